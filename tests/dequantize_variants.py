"""Candidates for kernels._dequantize_kernel, for `bench_linear4bit.py --variants`; to be deleted once one is chosen."""

import torch
import triton
import triton.language as tl

import kernels


@triton.jit
def one_lookup(
    packed_ptr, absmax_ptr, code_ptr, out_ptr, n_words, GROUP: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr
):
    """One gather for the four words: the codes go to shared memory once, behind one barrier instead of seven."""
    first = tl.program_id(0) * 4 * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, 8)
    nibble, absmax = (), ()
    for part in tl.static_range(4):
        word = first + part * BLOCK
        packed = tl.load(packed_ptr + word, word < n_words, eviction_policy=EVICT)
        nibble += ((packed[:, None] >> (4 * (i ^ 1))[None, :]) & 15,)
        absmax += (tl.load(absmax_ptr + word // GROUP, word < n_words, eviction_policy=EVICT),)
    code = tl.load(code_ptr + tl.arange(0, 16))
    index = tl.join(tl.join(nibble[0], nibble[1]), tl.join(nibble[2], nibble[3]))  # (BLOCK, 8, 2, 2)
    a, b = tl.split(tl.gather(code, index.reshape(BLOCK * 32), 0).reshape(BLOCK, 8, 2, 2))
    w = tl.split(a) + tl.split(b)
    for part in tl.static_range(4):
        word = first + part * BLOCK
        value = (w[part] * absmax[part][:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + word[:, None] * 8 + i[None, :], value, (word < n_words)[:, None])


@triton.jit
def global_table(
    packed_ptr, absmax_ptr, code_ptr, out_ptr, n_words, GROUP: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr
):
    """The codes are looked up in global memory, through L1: no shared memory, no barrier."""
    first = tl.program_id(0) * 4 * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, 8)
    packed, absmax = (), ()
    for part in tl.static_range(4):
        word = first + part * BLOCK
        packed += (tl.load(packed_ptr + word, word < n_words, eviction_policy=EVICT),)
        absmax += (tl.load(absmax_ptr + word // GROUP, word < n_words, eviction_policy=EVICT),)
    for part in tl.static_range(4):
        word = first + part * BLOCK
        w = tl.load(code_ptr + ((packed[part][:, None] >> (4 * (i ^ 1))[None, :]) & 15)) * absmax[part][:, None]
        tl.store(out_ptr + word[:, None] * 8 + i[None, :], w.to(out_ptr.dtype.element_ty), (word < n_words)[:, None])


@triton.jit
def tile(
    packed_ptr, absmax_ptr, code_ptr, out_ptr, n_words, GROUP: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr
):
    """The shortest: one tile. Its words are loaded as 16 bytes a thread and redistributed through shared memory."""
    word = (tl.program_id(0) * 4 + tl.arange(0, 4)[:, None]) * BLOCK + tl.arange(0, BLOCK)[None, :]
    packed = tl.load(packed_ptr + word, word < n_words, eviction_policy=EVICT)
    absmax = tl.load(absmax_ptr + word // GROUP, word < n_words, eviction_policy=EVICT)
    code = tl.load(code_ptr + tl.arange(0, 16))
    i = tl.arange(0, 8)
    nibble = (packed[:, :, None] >> (4 * (i ^ 1))) & 15  # (4, BLOCK, 8)
    w = tl.gather(code, nibble.reshape(BLOCK * 32), 0).reshape(4, BLOCK, 8) * absmax[:, :, None]
    tl.store(out_ptr + word[:, :, None] * 8 + i, w.to(out_ptr.dtype.element_ty), (word < n_words)[:, :, None])


DESIGNS = {  # name: kernel, threads, eviction policy of the loads
    "one lookup, 128": (one_lookup, 128, ""),
    "one lookup, 256": (one_lookup, 256, ""),
    "one lookup, evict": (one_lookup, 128, "evict_first"),
    "global table, 128": (global_table, 128, ""),
    "tile, 128": (tile, 128, ""),
}


def launchers(code: torch.Tensor) -> dict:
    """name -> f(packed, absmax, out) for NF4 with block size 64."""

    def launcher(kernel, threads, evict):
        def launch(packed, absmax, out):
            words = packed.view(-1).view(torch.int32)
            grid = (triton.cdiv(len(words), 4 * threads),)
            options = {"GROUP": 8, "BLOCK": threads, "EVICT": evict, "num_warps": threads // 32}
            kernel[grid](words, absmax, code, out, len(words), **options)

        return launch

    return {name: launcher(*design) for name, design in DESIGNS.items()}


if __name__ == "__main__":  # without a GPU, in Triton's interpreter
    for shape in (64, 64), (3, 2048):
        packed, absmax = kernels.quantize_4bit(torch.randn(shape))
        expected = kernels.dequantize_4bit(packed, absmax, shape, torch.float32)
        for name, launch in launchers(kernels._code("nf4", packed.device)).items():
            out = torch.zeros(shape)
            launch(packed, absmax, out)
            print(name, shape, torch.equal(out, expected))
