"""Five operators: cross-entropy of a linear layer or of logits, 4-bit and FP8 linear layers, Adam on the rows of a
table, and sums of rows. None knows the model, the data or GPU names.

torch.compile(fullgraph=True) sees the first two as opaque nodes. CPUs need no Triton.
"""

from __future__ import annotations  # tl may be missing

import functools
import logging
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # on a CPU
    triton = None
jit = triton.jit if triton else lambda f: f


def _tracing(x):  # by torch.compile; only x's type shows AOTAutograd before torch 2.13
    return torch.compiler.is_compiling() or type(x) is not Tensor


def _autocast(x):
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if kind != "meta" and torch.is_autocast_enabled(kind) else x


def _check_devices(first, *others):
    for t in others:
        if t is not None and t.device != first.device:
            raise ValueError(f"all tensors must be on {first.device}, not on {t.device}")


# ---- Fused (linear) cross-entropy
# The loss of logits z = x W^T with targets y, without storing all (N, V) logits. For each chunk of rows:
#
#     z = x W^T, by cuBLAS (tl.dot on sm_75 is scalar FMA), into a buffer that chunks share
#     s = c tanh(z / c) with a softcap c, else z
#     lse = log sum exp(s), loss = lse - s_y
#     g = (a + b) softmax(s) - a onehot(y); a, b: weights of the row's loss and lse, 1/n and 0 for a mean
#     z <- g (1 - (s / c)^2), the gradient with respect to z, in place
#     dx = z W, dW += z^T x in fp32, by cuBLAS
#
# The middle four lines are one Triton launch, with rows of up to 16384 logits in registers. With a softcap, exp(s)
# cannot overflow, so no pass finds the maximum. In fp16, g / n would underflow: z holds 2^15 g, and 1/n comes last.


@jit
def _softcap_exp(z, shift, cap, TANH_UNIT: tl.constexpr):
    """exp(s - shift), s - shift and ds/dz. The constants, for exp2: 2 / ln 2 and 1 / ln 2. TANH_UNIT: one tanh
    instruction, relative error 5e-4 (rounding logits to bf16: 4e-3). Else two, absolute error 1e-7."""
    if cap is not None:  # shift is 0
        if TANH_UNIT:
            tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z * (1.0 / cap)], tl.float32, True, 1)
        else:
            r = tl.rsqrt(0.5 + 0.5 * tl.exp2(z * (2.8853900817779268 / cap)))  # r^2 = 2 / (1 + exp(2z/c))
            tanh = 1.0 - r * r
        return tl.exp2(tanh * (cap * 1.4426950408889634)), cap * tanh, 1.0 - tanh * tanh
    else:
        return tl.exp(z - shift), z - shift, 1.0


@jit
def _cross_entropy_kernel(
    logits, targets, losses, row_scale, grads, lse, lse_scale, logits_stride, scale_stride, grads_stride, cap,
    ignore_index, V: tl.constexpr, BLOCK: tl.constexpr, TANH_UNIT: tl.constexpr,
):  # fmt: skip
    """One program per row. The first BLOCK columns stay in registers; others are read again, from L2."""
    row = tl.program_id(0).to(tl.int64)  # row * V may exceed 2^31
    logits += row * logits_stride
    cols = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    ignored = target == ignore_index
    valid = (target >= 0) & (target < V)
    z_y = tl.load(logits + tl.where(valid, target, 0)).to(tl.float32)

    z = tl.load(logits + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
    shift = tl.maximum(tl.max(z, 0), -1e38) if cap is None else 0.0  # finite if all of z is -inf
    first, _first_s, first_slope = _softcap_exp(z, shift, cap, TANH_UNIT)
    first_shift = shift
    total = tl.where(cols < V, first, 0.0)
    for start in range(BLOCK, V, BLOCK):
        mask = start + cols < V
        z = tl.load(logits + start + cols, mask=mask, other=-float("inf")).to(tl.float32)
        if cap is None:
            old_shift = shift
            shift = tl.maximum(shift, tl.max(z, 0))
            total *= tl.exp(old_shift - shift)
        total += tl.where(mask, _softcap_exp(z, shift, cap, TANH_UNIT)[0], 0.0)
    total = tl.sum(total, 0)

    e_y, s_y, slope_y = _softcap_exp(z_y, shift, cap, TANH_UNIT)
    loss = tl.where(valid, tl.log(total) - s_y, float("nan"))  # shows a target out of range
    tl.store(losses + row, tl.where(ignored, 0.0, loss))
    if lse is not None:
        tl.store(lse + row, tl.log(total) + shift)

    if grads is not None:
        grads += row * grads_stride
        a = tl.where(ignored, 0.0, tl.load(row_scale + row * scale_stride))
        scale = (a if lse_scale is None else a + tl.load(lse_scale + row)) / total
        first_scale = scale * tl.exp(first_shift - shift) if cap is None else scale
        tl.store(grads + cols, first * first_slope * first_scale, mask=cols < V)
        for start in range(BLOCK, V, BLOCK):
            mask = start + cols < V
            z = tl.load(logits + start + cols, mask=mask, other=0.0).to(tl.float32)
            e, _s, slope = _softcap_exp(z, shift, cap, TANH_UNIT)
            tl.store(grads + start + cols, e * slope * scale, mask=mask)
        tl.debug_barrier()  # store the row before its target column
        tl.store(grads + target, (e_y * scale - a) * slope_y, mask=valid)


def _rows_triton(logits, targets, losses, row_scale, softcap, ignore_index, grads=None, lse=None, lse_scale=None):
    """Fills losses (R,) and, unless None, lse (R,) and grads (R, V): the gradient of sum(row_scale * losses + lse_scale
    * lse) with respect to logits (R, V), which it may overwrite."""
    v = logits.shape[1]
    block = triton.next_power_of_2(v)  # the whole row, up to 32 columns per thread
    if v > 16384:  # larger blocks spill registers, sooner if unaligned
        block = 16384 if v % 16 == 0 else 8192
    warps = 16 if v > 16384 else max(1, block // 1024)
    compiled = isinstance(_cross_entropy_kernel, triton.JITFunction)  # the interpreter cannot run PTX
    _cross_entropy_kernel[(len(logits),)](
        logits, targets, losses, row_scale, grads, lse, lse_scale,
        logits.stride(0), row_scale.stride(0), 0 if grads is None else grads.stride(0), softcap, ignore_index,
        V=v, BLOCK=block, TANH_UNIT=compiled and logits.dtype == torch.bfloat16, num_warps=warps,
    )  # fmt: skip


def _rows_torch(logits, targets, losses, row_scale, softcap, ignore_index, grads=None, lse=None, lse_scale=None):
    """`_rows_triton` in plain PyTorch."""
    v = logits.shape[1]
    ignored = targets == ignore_index
    if not (ignored | (targets >= 0) & (targets < v)).all():
        raise ValueError(f"targets must be in [0, {v}) or ignore_index={ignore_index}")
    target = targets.masked_fill(ignored, 0)[:, None]
    s = softcap * torch.tanh(logits.float() / softcap) if softcap else logits.float()
    log_p = s.log_softmax(1)
    losses.copy_(-log_p.gather(1, target).squeeze(1).masked_fill(ignored, 0))
    if lse is not None:
        lse.copy_(s.logsumexp(1))
    if grads is not None:
        a = row_scale.masked_fill(ignored, 0)[:, None]
        g = log_p.exp_().mul_(a if lse_scale is None else a + lse_scale[:, None]).scatter_add_(1, target, -a)
        grads.copy_(g * (1 - (s / softcap) ** 2) if softcap else g)


def _rows(logits, *args):
    (_rows_triton if logits.is_cuda else _rows_torch)(logits, *args)


def _may_overwrite(saved):
    """Whether a backward may overwrite what it saved: not if traced or to be run again."""
    if torch.is_grad_enabled():
        raise RuntimeError("the fused cross-entropy has no second derivative: leave out create_graph=True")
    return not (_tracing(saved) or torch._C._autograd._get_current_graph_task_keep_graph())


def _scaled(grad, factor):
    factor = factor.view(1)  # of shape () it would be rounded to grad's dtype
    return grad.mul_(factor) if _may_overwrite(grad) else (grad * factor).to(grad.dtype)


def _chunk_rows(n, v, itemsize, device):
    """Rows of logits per chunk: 64 per multiprocessor, at least 4096, at most 1 GiB."""
    if device.type != "cuda":
        return min(max(n, 1), 512)
    rows = max(4096, torch.cuda.get_device_properties(device).multi_processor_count * 64 // 1024 * 1024)
    limit = 2**30 // (v * itemsize)
    return max(1, min(n, rows, limit // 128 * 128 or limit))


def _addmm_(out, a, b, *, beta, alpha):
    """out = beta * out + alpha * a @ b, in fp32 if `out` is, whatever the dtype of a and b."""
    if a.is_cuda:  # addmm adds fp16 products only to fp16
        torch.baddbmm(out[None], a[None], b[None], out.dtype, beta=beta, alpha=alpha, out=out[None])
    else:
        out.copy_(out.float().addmm_(a, b, beta=beta, alpha=alpha))


def _outputs(x, weight, need_dx, need_dw):
    """Empty losses, lse, dx, dw. dw sums chunks in fp32, or up to two in bf16 if x and weight are."""
    (n, _), v, dw_dtype = x.shape, weight.shape[0], torch.float32  # len(x) would specialize a compiled graph
    if x.dtype == weight.dtype == torch.bfloat16 and n <= 2 * _chunk_rows(n, v, x.itemsize, x.device):
        dw_dtype = torch.bfloat16
    lse = x.new_empty(0 if need_dx or need_dw else n, dtype=torch.float32)
    dx, dw = x.new_empty(x.shape if need_dx else 0), x.new_empty(weight.shape if need_dw else 0, dtype=dw_dtype)
    return x.new_empty(n, dtype=torch.float32), lse, dx, dw


@torch.library.custom_op("autoresearch::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, row_scale: Tensor, lse_scale: Tensor | None, softcap: float | None,
    ignore_index: int, need_dx: bool, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Losses (N,) and either lse (N,) or the needed gradients, dx (N, D) and dw (V, D), of sum(row_scale * losses +
    lse_scale * lse); the rest is empty. row_scale: () or (N,)."""
    n, v = len(x), len(weight)
    losses, lse, dx, dw = _outputs(x, weight, need_dx, need_dw)
    x, w = (t if x.is_cuda else t.float() for t in (x, weight.to(x.dtype)))  # few CPUs are fast in bf16 or fp16
    boost = 2.0**15 if x.dtype == torch.float16 else 1.0  # |g| <= 1: the largest power of two that fits
    row_scale = (row_scale * boost).expand(n)
    rows = _chunk_rows(n, v, x.itemsize, x.device)
    buffer = x.new_empty(rows, -(-v // 16) * 16)[:, :v]  # aligned rows, for vector loads
    for i in range(0, n, rows):
        part, z = slice(i, i + rows), buffer[: n - i]
        torch.mm(x[part], w.T, out=z)  # (R, V)
        outputs = (z, None) if need_dx or need_dw else (None, lse[part])
        weights = None if lse_scale is None else lse_scale[part] * boost
        _rows(z, targets[part], losses[part], row_scale[part], softcap, ignore_index, *outputs, weights)
        if need_dx:
            _addmm_(dx[part], z, w, beta=0.0, alpha=1 / boost)
        if need_dw:
            _addmm_(dw, z.T, x[part], beta=float(i > 0), alpha=1 / boost)
    return losses, lse, dx, dw if n else dw.zero_()


_linear_cross_entropy.register_fake(lambda x, weight, *args: _outputs(x, weight, *args[-2:]))


class _LinearCrossEntropy(torch.autograd.Function):
    """If reduce, row_scale times the sum of losses, with gradients from the forward. Else losses and lse, whose weights
    only the backward knows: it recomputes the logits."""

    @staticmethod
    def forward(ctx, x, weight, targets, row_scale, softcap, ignore_index, reduce):
        early, late = row_scale, torch.ones_like(row_scale)
        if x.dtype == torch.float16:  # late, or gradients would underflow
            early, late = late, row_scale.nan_to_num(posinf=1.0)  # 1/n is inf without targets; gradients are 0
        needs = [reduce and need for need in ctx.needs_input_grad[:2]]
        losses, lse, dx, dw = _linear_cross_entropy(x, weight, targets, early, None, softcap, ignore_index, *needs)
        ctx.options = softcap, ignore_index
        ctx.save_for_backward(*((dx, dw, late) if reduce else (x, weight, targets)))
        return losses.sum() * row_scale if reduce else (losses, lse)

    @staticmethod
    def backward(ctx, row_scale, lse_scale=None):
        need_dx, need_dw = ctx.needs_input_grad[:2]
        if lse_scale is None:
            dx, dw, late = ctx.saved_tensors
            late = row_scale * late
        else:
            x, weight, targets = ctx.saved_tensors
            late = row_scale.new_ones(())
            if x.dtype == torch.float16 and x.shape[0]:  # the row kernel needs weights <= 1
                largest = torch.where(targets == ctx.options[1], 0.0, row_scale).abs() + lse_scale.abs()
                late = largest.amax().nan_to_num(1.0, 1.0).clamp(torch.finfo(torch.float32).tiny)
            scales = row_scale / late, lse_scale / late
            _, _, dx, dw = _linear_cross_entropy(x, weight, targets, *scales, *ctx.options, need_dx, need_dw)
        return _scaled(dx, late) if need_dx else None, _scaled(dw, late) if need_dw else None, *[None] * 5


@torch.library.custom_op("autoresearch::cross_entropy", mutates_args={"losses", "grads", "lse"})
def _cross_entropy(
    logits: Tensor, targets: Tensor, losses: Tensor, row_scale: Tensor, softcap: float | None, ignore_index: int,
    grads: Tensor | None, lse: Tensor | None, lse_scale: Tensor | None,
) -> None:  # fmt: skip
    _rows(logits, targets, losses, row_scale, softcap, ignore_index, grads, lse, lse_scale)


class _CrossEntropy(torch.autograd.Function):  # losses and lse; with the backward, three passes over (N, V)
    @staticmethod
    def forward(ctx, logits, targets, softcap, ignore_index, inplace):
        ctx.options, ctx.inplace = (softcap, ignore_index), inplace
        ctx.save_for_backward(logits, targets)
        losses, lse, unused = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3))
        _cross_entropy(logits, targets, losses, unused, softcap, ignore_index, None, lse, None)
        return losses, lse

    @staticmethod
    def backward(ctx, row_scale, lse_scale):
        logits, targets = ctx.saved_tensors
        grads = logits if _may_overwrite(logits) and ctx.inplace else torch.empty_like(logits)
        unused, lse_scale = torch.empty_like(lse_scale), lse_scale.contiguous()
        _cross_entropy(logits, targets, unused, row_scale, *ctx.options, grads, None, lse_scale)
        return grads, *[None] * 4


def _flatten(x, targets, softcap, ignore_index, reduction):
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    if not 0 <= (softcap or 0) <= 50:
        raise ValueError(f"softcap must be None or in (0, 50], not {softcap}")
    if not x.is_floating_point() or targets.is_floating_point():
        raise TypeError(f"need floating-point inputs and integer targets, not {x.dtype} and {targets.dtype}")
    if x.shape[:-1] != targets.shape:
        raise ValueError(f"targets must have shape {tuple(x.shape[:-1])}, not {tuple(targets.shape)}")
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1).long().contiguous()
    n = (targets != ignore_index).sum().float()  # not the default dtype
    row_scale = n.reciprocal() if reduction == "mean" else torch.ones_like(n)
    return x, targets, row_scale, softcap or None, ignore_index, reduction != "none"


def fused_linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *,
    softcap: float | None = None, ignore_index: int = -1, reduction: str = "mean", return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Cross-entropy of softcap(x @ weight.T): x (..., D), weight (V, D), targets (...) -> fp32 () or, for 'none', (N,).

    The GEMMs run in x's dtype, or autocast's; `weight` may be an fp32 master. A mean over no targets is NaN.
    return_lse: returns (loss, lse), lse (N,) the fp32 log-sum-exp of each row's softcapped logits, ignored or not:
    `loss + 1e-4 * lse.square().mean()` adds a z-loss. The backward of return_lse or 'none' has a fourth GEMM."""
    _check_devices(x, weight, targets)
    x, targets, row_scale, *options, reduce = _flatten(_autocast(x), targets, softcap, ignore_index, reduction)
    if reduce and not return_lse and torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(x, weight, targets, row_scale, *options, True)
    losses, lse = _LinearCrossEntropy.apply(x, weight, targets, row_scale, *options, False)
    loss = losses.sum() * row_scale if reduce else losses
    return (loss, lse) if return_lse else loss


def fused_cross_entropy(
    logits: Tensor, targets: Tensor, *, softcap: float | None = None, ignore_index: int = -1,
    reduction: str = "mean", inplace: bool = False, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Cross-entropy of softcap(logits): logits (..., V), targets (...) -> fp32 () or, for 'none', (N,).

    Like F.cross_entropy but for the default of ignore_index; return_lse as above. inplace: an eager backward writes the
    gradient over the logits."""
    _check_devices(logits, targets)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    logits, targets, row_scale, *options, reduce = _flatten(logits, targets, softcap, ignore_index, reduction)
    losses, lse = _CrossEntropy.apply(logits, targets, *options, inplace)
    loss = losses.sum() * row_scale if reduce else losses
    return (loss, lse) if return_lse else loss


# ---- 4-bit linear
# As in bitsandbytes, each block of `block_size` weights in a row shares absmax = max |w|. A weight is the 4-bit
# index of the code nearest to w / absmax, two in a byte, the first in its high half. nf4: 16 quantiles of N(0, 1),
# https://arxiv.org/abs/2305.14314; fp4: sign, 2 bits of exponent, 1 of mantissa.
#
# y = x W^T and dx = dy W both dequantize W. torch.compile would merge the two and save the dequantized W, even under
# no_grad: so dequantization and GEMM are one opaque op.

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it takes this file for a package
FEW_ROWS = 16  # up to this many rows, bitsandbytes' CUDA op is one launch that stores no W


def _check_format(shape, quant_type, block_size, dtype=torch.float32):
    if dtype not in FLOATS:
        raise TypeError(f"need fp32, bf16 or fp16, not {dtype}")
    if quant_type not in ("nf4", "fp4") or block_size not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"need 'nf4' or 'fp4' and a power of two from 32 to 4096, not {quant_type!r} and {block_size}")
    if shape[-1] % block_size:  # bitsandbytes' CPU kernel silently gets blocks across rows wrong
        raise ValueError(f"the last dimension must be a multiple of block_size={block_size}, not {tuple(shape)}")


@functools.cache
def _bitsandbytes():  # imported on first use: slow
    import bitsandbytes  # noqa: F401, registers the ops

    return torch.ops.bitsandbytes


@torch.no_grad()
def quantize_4bit(
    w: Tensor, quant_type: str = "nf4", block_size: int = 64, check_finite: bool = True
) -> tuple[Tensor, Tensor]:
    """n weights (..., K) -> packed uint8 (n / 2, 1), absmax fp32 (n / block_size,), bit for bit as in bitsandbytes.
    check_finite: raise ValueError for NaN or inf, which waits for the GPU. Else they show in absmax."""
    _check_format(w.shape, quant_type, block_size, w.dtype)
    packed, _ = _bitsandbytes().quantize_4bit.default(w, block_size, quant_type, torch.uint8)
    # bitsandbytes' absmax ignores NaN on CUDA: the loss would stay finite
    absmax = torch.linalg.vector_norm(w.reshape(-1, block_size), float("inf"), 1, dtype=torch.float32)
    if check_finite and not absmax.isfinite().all():
        raise ValueError(f"w {tuple(w.shape)} contains NaN or inf")
    return packed, absmax


@jit
def _dequantize_kernel(packed, absmax, code, out, n_words, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Each thread unpacks four words of 8 weights; GROUP words share an absmax. int32: at most 2^31 weights."""
    first = tl.program_id(0) * 4 * BLOCK + tl.arange(0, BLOCK)
    words, scales = (), ()
    for part in tl.static_range(4):  # loads first: the compiler moves none before a store
        word = first + part * BLOCK
        words += (tl.load(packed + word, word < n_words),)
        scales += (tl.load(absmax + word // GROUP, word < n_words),)
    codes = tl.load(code + tl.arange(0, 16))
    i = tl.arange(0, 8)
    for part in tl.static_range(4):
        word = first + part * BLOCK
        nibble = (words[part][:, None] >> (4 * (i ^ 1))[None, :]) & 15  # (BLOCK, 8)
        w = tl.gather(codes, nibble.reshape(BLOCK * 8), 0).reshape(BLOCK, 8) * scales[part][:, None]
        tl.store(out + word[:, None] * 8 + i[None, :], w.to(out.dtype.element_ty), (word < n_words)[:, None])


@functools.cache
def _code(quant_type, device):
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type(quant_type, device)  # fp32 (16,)


def _dequantize_triton(packed, absmax, out, quant_type, block_size):
    words, n, code = packed.view(-1).view(torch.int32), out.numel() // 8, _code(quant_type, packed.device)
    _dequantize_kernel[(triton.cdiv(n, 512),)](words, absmax, code, out, n, GROUP=block_size // 8, BLOCK=128)
    return out


def dequantize_4bit(
    packed: Tensor, absmax: Tensor, shape: tuple[int, ...], dtype: torch.dtype, quant_type: str = "nf4",
    block_size: int = 64,
) -> Tensor:  # fmt: skip
    """Inverse of `quantize_4bit`: weights of `shape`, code * absmax in fp32, rounded once."""
    _check_format(shape, quant_type, block_size, dtype)
    n, stored = math.prod(shape), (packed.dtype, 2 * packed.numel(), absmax.dtype, block_size * absmax.numel())
    if stored != (torch.uint8, n, torch.float32, n):
        raise ValueError(f"{tuple(shape)} needs packed uint8 and absmax fp32 for {n} weights each, not {stored}")
    _check_devices(packed, absmax)
    packed, absmax = packed.contiguous(), absmax.contiguous()  # neither kernel handles strides
    if not packed.is_cuda:
        return _bitsandbytes().dequantize_4bit.default(packed, absmax, block_size, quant_type, shape, dtype).view(shape)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    return _dequantize_triton(packed, absmax, out, quant_type, block_size)


def _matmul_4bit(
    x: Tensor, packed: Tensor, absmax: Tensor, bias: Tensor | None, transpose: bool, quant_type: str, block_size: int
) -> Tensor:
    """x W, (..., N) -> (..., K); with `transpose`, x W^T + bias, (..., K) -> (..., N)."""
    k, n = x.shape[-1], 2 * packed.numel() // x.shape[-1]
    bias = bias if bias is None else bias.to(x.dtype)
    if transpose and packed.is_cuda and 0 < x.numel() <= FEW_ROWS * k:
        return _bitsandbytes().gemm_4bit.default(x, packed, (n, k), absmax, block_size, quant_type, bias)
    w = dequantize_4bit(packed, absmax, (n, k) if transpose else (k, n), x.dtype, quant_type, block_size)
    return F.linear(x, w, bias) if transpose else x @ w


_OP = "autoresearch::matmul_4bit"  # custom_op would triple a call's host time
torch.library.define(_OP, torch.library.infer_schema(_matmul_4bit, mutates_args=()))
torch.library.impl(_OP, "default", _matmul_4bit)
torch.library.register_fake(_OP, lambda x, packed, *_: x.new_empty(*x.shape[:-1], 2 * packed.numel() // x.shape[-1]))


def _matmul(x, *args):  # torch.compile needs the op; eager calls save the dispatcher's time
    return (torch.ops.autoresearch.matmul_4bit.default if _tracing(x) else _matmul_4bit)(x, *args)


class _Linear4bit(torch.autograd.Function):  # weight: an input to get a gradient
    @staticmethod
    def forward(ctx, weight, x, packed, absmax, bias, *options):
        ctx.options = options
        ctx.save_for_backward(x if ctx.needs_input_grad[0] else None, packed, absmax)
        return _matmul(x, packed, absmax, bias, *options)

    @staticmethod
    def backward(ctx, dy):
        assert not torch.is_grad_enabled(), "the 4-bit linear has no second derivative"
        x, packed, absmax = ctx.saved_tensors
        need_dw, need_dx, _, _, need_db, *_ = ctx.needs_input_grad
        dx = _matmul(dy, packed, absmax, None, False, *ctx.options[1:]) if need_dx else None
        dy = dy.reshape(-1, dy.shape[-1])
        dw = dy.T @ x.reshape(-1, x.shape[-1]) if need_dw else None  # straight-through estimate
        db = dy.sum(0, dtype=torch.float32) if need_db else None
        return dw, dx, None, None, db, None, None, None


class Linear4bit(nn.Module):
    """y = x W^T + bias in x's dtype, or autocast's: x (..., in_features), y (..., out_features), W in 4 bits.

    If trainable, W's gradient goes to an fp32 master `weight`: call `requantize_` after each optimizer step."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, trainable: bool = False, quant_type: str = "nf4",
        block_size: int = 64,
    ) -> None:  # fmt: skip
        super().__init__()
        _check_format((out_features, in_features), quant_type, block_size)
        self.in_features, self.out_features = in_features, out_features
        self.format, n = (quant_type, block_size), out_features * in_features
        self.register_buffer("packed", torch.zeros(n // 2, 1, dtype=torch.uint8))
        self.register_buffer("absmax", torch.zeros(n // block_size, dtype=torch.float32))
        self.weight = nn.Parameter(torch.empty(out_features, in_features)) if trainable else None
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        if trainable:
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Linear; a frozen W is 0 until loaded
            self.requantize_()

    @classmethod
    def from_linear(cls, linear: nn.Linear, trainable: bool = False, **format) -> Linear4bit:
        """Quantizes `linear`. Shares its bias and, if trainable, its fp32 weight."""
        packed, absmax = quantize_4bit(linear.weight, **format)
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, trainable=trainable, **format)
        layer.packed, layer.absmax, layer.bias = packed, absmax, linear.bias
        if trainable:
            w = linear.weight.float()  # itself if fp32: may be tied
            layer.weight = w if w is linear.weight else nn.Parameter(w.detach())
        return layer

    def _apply(self, fn, recurse=True):
        absmax = fn(self.absmax.view(torch.int32)).view(torch.float32)  # as integers: half() must not cast it
        super()._apply(fn, recurse).absmax = absmax
        return self

    def requantize_(self) -> None:
        """Quantizes `weight` into the buffers. No wait for the GPU: NaN and inf show in the outputs."""
        packed, absmax = quantize_4bit(self.weight, *self.format, check_finite=False)
        self.packed.copy_(packed)
        self.absmax.copy_(absmax)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype not in FLOATS or x.shape[-1] != self.in_features:
            raise ValueError(f"need floats (..., {self.in_features}), not {x.dtype} {tuple(x.shape)}")
        _check_devices(self.packed, x, self.absmax, self.weight, self.bias)
        args = _autocast(x), self.packed, self.absmax, self.bias, True, *self.format
        return _Linear4bit.apply(self.weight, *args) if torch.is_grad_enabled() else _matmul(*args)


# ---- FP8 linear


def _fp8(x, dtype, every=1):
    """x in FP8, and its scale (1, 1): by the largest of every so many rows; others are clamped to 8 times that."""
    top = torch.finfo(dtype).max
    scale = (x[::every].abs().amax().float() * (1 if every == 1 else 8) / top).clamp(min=1e-30)
    return (x.float() / scale).clamp(-top, top).to(dtype), scale.view(1, 1)


class _LinearFP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        (x8, x_scale), (w8, w_scale) = _fp8(x, torch.float8_e4m3fn, 64), _fp8(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w8, w_scale)
        return torch._scaled_mm(x8, w8.T, x_scale, w_scale, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx, dy):
        x, w8, w_scale = ctx.saved_tensors
        dy8, dy_scale = _fp8(dy, torch.float8_e5m2, 64)
        w8 = w8.T.contiguous().T  # cuBLAS wants columns
        dx = torch._scaled_mm(dy8, w8, dy_scale, w_scale, out_dtype=dy.dtype, use_fast_accum=True)
        return dx, (dy.T @ x).float()


def linear_fp8(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, (..., K) -> (..., N), in FP8 but for W's gradient, on an sm_90 or sm_10x: x in bf16, W (N, K) in fp32, K
    and N multiples of 16. Each call has its own scales."""
    return _LinearFP8.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)


# ---- Rows of a table: Adam, sums


@jit
def _row_adam_kernel(
    table, state, ids, order, grads, lr, beta2, half_lr, loss_scale, found_inf, n, C: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per sorted id; a row's first one sums its gradients, four at a time, and updates it."""
    place = tl.program_id(0)
    row = tl.load(ids + place)
    if row != tl.load(ids + place - 1, mask=place > 0, other=-1):
        cols = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        found = 4
        while found == 4:
            places = place + tl.arange(0, 4)
            same = tl.load(ids + places, mask=places < n, other=-1) == row
            source = tl.load(order + places, mask=same, other=0)[:, None] * C + cols[None, :]
            part = tl.load(grads + source, mask=same[:, None] & (cols < C)[None, :], other=0.0)
            total += tl.sum(part.to(tl.float32), 0)
            found = tl.sum(same.to(tl.int32), 0)
            place += 4
        total /= tl.load(loss_scale)
        mean_sq = tl.sum(total * total, 0) / C
        if (tl.load(found_inf) == 0) & (mean_sq < float("inf")):  # false for NaN
            old, updates = tl.load(state + row * 2), tl.load(state + row * 2 + 1)
            v = tl.where(old == 0, mean_sq, old + (1 - beta2) * (mean_sq - old))
            tl.store(state + row * 2, v)
            tl.store(state + row * 2 + 1, updates + 1)
            target = table + row * C + cols
            weight = tl.load(target, mask=cols < C).to(tl.float32)
            tl.store(target, weight - lr / (1 + updates / half_lr) / (tl.sqrt(v) + 1e-10) * total, mask=cols < C)


def _row_adam_triton(table, state, ids, grads, *scalars):
    ids, order = ids.sort(stable=True)  # stable: a fixed order of sums
    (n, c), block = grads.shape, triton.next_power_of_2(grads.shape[1])
    _row_adam_kernel[(n,)](table, state, ids, order, grads.contiguous(), *scalars, n, C=c, BLOCK=block)


def _row_adam_torch(table, state, ids, grads, lr, beta2, half_lr, loss_scale, found_inf):
    rows, inverse = ids.unique(return_inverse=True)
    total = grads.new_zeros(len(rows), grads.shape[1], dtype=torch.float32).index_add_(0, inverse, grads.float())
    total /= loss_scale
    mean_sq = total.square().mean(1)
    good = (found_inf == 0) & mean_sq.isfinite()
    rows, total, mean_sq = rows[good], total[good], mean_sq[good]
    old, updates = state[rows].unbind(1)
    v = torch.where(old == 0, mean_sq, old.lerp(mean_sq, 1 - beta2))
    state[rows] = torch.stack([v, updates + 1], 1)
    rate = lr / (1 + updates / half_lr) / (v.sqrt() + 1e-10)
    table[rows] = (table[rows].float() - rate[:, None] * total).to(table.dtype)


@torch.no_grad()
def row_adam_(
    table: Tensor, state: Tensor, ids: Tensor, grads: Tensor,
    lr: float, beta2: float, half_lr: float, loss_scale: Tensor, found_inf: Tensor,
) -> None:  # fmt: skip
    """Adam in place on the rows of table (R, C) that a batch touched: no momentum, one second moment per row.

    grads (N, C), scaled by loss_scale, are of rows ids (N,); a row's are first summed in fp32. state (R, 2), fp32,
    starts at 0: a row's second moment and number n of updates. Its rate is lr / (1 + n / half_lr), its first step has
    RMS lr. Rows whose gradient is not finite stay; so do all if found_inf is not 0."""
    _check_devices(table, state, ids, grads, loss_scale, found_inf)
    (r, c), stored = table.shape, (table.stride(), state.shape, state.is_contiguous(), grads.shape)
    if stored != ((c, 1), (r, 2), True, (len(ids), c)):  # the kernel would write elsewhere
        raise ValueError(f"{r} rows of {c} and {len(ids)} ids need contiguous tensors to match, not {stored}")
    step = _row_adam_triton if table.is_cuda else _row_adam_torch
    step(table, state, ids, grads, lr, beta2, half_lr, loss_scale, found_inf)


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, at, back):
        ctx.save_for_backward(back)
        return x[at].sum(1)

    @staticmethod
    def backward(ctx, grad):
        (back,) = ctx.saved_tensors
        return grad[back].sum(1), None, None


def sum_rows(x: Tensor, at: Tensor, back: Tensor) -> Tensor:
    """x[at].sum(1): x (R, C), int64 at (M, J) -> (M, C).

    back (R, K): the sums that each row is part of, so that the gradient is a gather, not a scatter."""
    _check_devices(x, at, back)
    return _SumRows.apply(x, at, back)
