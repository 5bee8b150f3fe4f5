"""Designs of the dequantize kernel for `bench_linear4bit.py --variants`; to be deleted once one is chosen."""

import torch
import triton
import triton.language as tl

import kernels


@triton.jit
def _write(packed, absmax, code, out_ptr, word, mask, BLOCK: tl.constexpr):
    i = tl.arange(0, 8)
    nibble = (packed[:, None] >> (4 * (i ^ 1))[None, :]) & 15
    w = tl.gather(code, nibble.reshape(BLOCK * 8), 0).reshape(BLOCK, 8) * absmax[:, None]
    tl.store(out_ptr + word[:, None] * 8 + i[None, :], w.to(out_ptr.dtype.element_ty), mask[:, None])


@triton.jit
def two_words(packed_ptr, absmax_ptr, code_ptr, out_ptr, n_words, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Two words a thread, BLOCK apart, so both loads are in flight together."""
    a = tl.program_id(0) * 2 * BLOCK + tl.arange(0, BLOCK)
    b = a + BLOCK
    packed_a = tl.load(packed_ptr + a, a < n_words)
    packed_b = tl.load(packed_ptr + b, b < n_words)
    absmax_a = tl.load(absmax_ptr + a // WORDS, a < n_words)
    absmax_b = tl.load(absmax_ptr + b // WORDS, b < n_words)
    code = tl.load(code_ptr + tl.arange(0, 16))
    _write(packed_a, absmax_a, code, out_ptr, a, a < n_words, BLOCK)
    _write(packed_b, absmax_b, code, out_ptr, b, b < n_words, BLOCK)


@triton.jit
def four_words(packed_ptr, absmax_ptr, code_ptr, out_ptr, n_words, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """The same with four."""
    a = tl.program_id(0) * 4 * BLOCK + tl.arange(0, BLOCK)
    b = a + BLOCK
    c = b + BLOCK
    d = c + BLOCK
    packed_a = tl.load(packed_ptr + a, a < n_words)
    packed_b = tl.load(packed_ptr + b, b < n_words)
    packed_c = tl.load(packed_ptr + c, c < n_words)
    packed_d = tl.load(packed_ptr + d, d < n_words)
    absmax_a = tl.load(absmax_ptr + a // WORDS, a < n_words)
    absmax_b = tl.load(absmax_ptr + b // WORDS, b < n_words)
    absmax_c = tl.load(absmax_ptr + c // WORDS, c < n_words)
    absmax_d = tl.load(absmax_ptr + d // WORDS, d < n_words)
    code = tl.load(code_ptr + tl.arange(0, 16))
    _write(packed_a, absmax_a, code, out_ptr, a, a < n_words, BLOCK)
    _write(packed_b, absmax_b, code, out_ptr, b, b < n_words, BLOCK)
    _write(packed_c, absmax_c, code, out_ptr, c, c < n_words, BLOCK)
    _write(packed_d, absmax_d, code, out_ptr, d, d < n_words, BLOCK)


@triton.jit
def global_table(packed_ptr, absmax_ptr, code_ptr, out_ptr, n_words, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """The codes are loaded from global memory, through L1, instead of shared memory."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = word < n_words
    packed = tl.load(packed_ptr + word, mask)
    absmax = tl.load(absmax_ptr + word // WORDS, mask)
    i = tl.arange(0, 8)
    nibble = (packed[:, None] >> (4 * (i ^ 1))[None, :]) & 15
    w = tl.load(code_ptr + nibble) * absmax[:, None]
    tl.store(out_ptr + word[:, None] * 8 + i[None, :], w.to(out_ptr.dtype.element_ty), mask[:, None])


@triton.jit
def wide_load(packed_ptr, absmax_ptr, code_ptr, out_ptr, n_words, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Four words a thread, loaded as 16 bytes and turned to the layout of the store through shared memory."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = word // WORDS < n_words // WORDS  # constant over a block, so that the load may be vectorised
    packed = tl.load(packed_ptr + word, mask)
    absmax = tl.load(absmax_ptr + word // WORDS, mask)
    code = tl.load(code_ptr + tl.arange(0, 16))
    _write(packed, absmax, code, out_ptr, word, mask, BLOCK)


def launchers(code: torch.Tensor) -> dict:
    """name -> f(packed, absmax, out) for NF4 with block size 64."""

    def launcher(kernel, words_a_thread, block, warps):
        def launch(packed, absmax, out):
            words = packed.view(-1).view(torch.int32)
            grid = (triton.cdiv(len(words), words_a_thread * block),)
            kernel[grid](words, absmax, code, out, len(words), WORDS=8, BLOCK=block, num_warps=warps)

        return launch

    designs = {f"one word, {t}": (kernels._dequantize_kernel, 1, t, t // 32) for t in (64, 128, 256, 512, 1024)}
    designs |= {f"two words, {t}": (two_words, 2, t, t // 32) for t in (128, 256, 512)}
    designs |= {f"four words, {t}": (four_words, 4, t, t // 32) for t in (128, 256, 512)}
    designs |= {f"global table, {t}": (global_table, 1, t, t // 32) for t in (256, 512)}
    designs |= {f"wide load, {t}": (wide_load, 1, 4 * t, t // 32) for t in (128, 256, 512)}
    return {name: launcher(*design) for name, design in designs.items()}
