"""Two operators: the fused (linear) cross-entropy and the 4-bit linear. Knows nothing of GPT, data or GPUs' names.

Fused linear cross-entropy: the loss of z = x W^T against targets y, with no (N, V) logits in memory. Per chunk of rows,

    z = x W^T                            cuBLAS, into one reused (rows, V) buffer
    s = c tanh(z / c)                    one Triton launch for these four lines, a row in registers. |s| < c, so exp(s)
    loss = log sum exp(s) - s_y            cannot overflow and needs no max pass; without a softcap s = z, and it does
    g = a (softmax(s) - onehot(y))       a: what the row's loss counts in the reduction, 1/n in a mean
    z <- g (1 - (s / c)^2)               in place
    dx = z W,  dW += z^T x               cuBLAS, dW in fp32

The gradients are ready when the forward ends; the backward multiplies them by the incoming scalar. The GEMMs run in
x's dtype, everything else in fp32. fp16 cannot hold g / n: there 1/n waits for that last product, which is fp32, and z
holds g times 2^15. Left out: recomputing logits in a kernel, as tl.dot on sm_75 compiles to scalar FMA.

Every op is an opaque torch.library.custom_op: one node for torch.compile(fullgraph=True). On CPU the same algorithm
runs in plain PyTorch.
"""

from __future__ import annotations  # tl.constexpr is spelled below even where there is no Triton

import functools
import logging
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # macOS, Windows: the CPU paths need none

    def jit(fn):
        return fn


# ----------------------------------------------------------------------------------------------------------------------
# Fused (linear) cross-entropy
# ----------------------------------------------------------------------------------------------------------------------


@jit
def _softcap_exp(z, shift, cap, SOFTCAP: tl.constexpr, TANH: tl.constexpr):
    """exp(s - shift), s - shift and ds/dz. The long numbers are 1 / ln 2 and 2 / ln 2, as the hardware has exp2.

    TANH: "hardware", one instruction, off by up to 5e-4 of its value; bf16 logits are off by 4e-3. "fast", two, 1e-7 of
    1. "exact", for fp32 logits: worth the digits that "fast" loses near 0; the polynomial is that of Cephes' tanhf.
    """
    if SOFTCAP:  # and shift is 0
        if TANH == "hardware":
            tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z * (1.0 / cap)], tl.float32, True, 1)
        else:
            r = tl.rsqrt(0.5 + 0.5 * tl.exp2(z * (2.8853900817779268 / cap)))  # r^2 = 2 / (1 + exp(2z/c))
            tanh = 1.0 - r * r
        if TANH == "exact":
            y = z / cap
            q = y * y
            p = (((-5.70498872745e-3 * q + 2.06390887954e-2) * q - 5.37397155531e-2) * q + 1.33314422036e-1) * q
            tanh = tl.where(q < 0.390625, y + y * q * (p - 3.33332819422e-1), tanh)
        return tl.exp2(tanh * (cap * 1.4426950408889634)), cap * tanh, 1.0 - tanh * tanh
    else:
        return tl.exp2((z - shift) * 1.4426950408889634), z - shift, 1.0


@jit
def _cross_entropy_kernel(
    logits, targets, losses, row_scale, logits_stride, scale_stride, cap, ignore_index,
    V: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, GRAD: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """One row: its loss and, over its logits, the gradient. The first BLOCK columns stay in registers, so rows that end
    there (the loops are empty) are read once and written once. Longer rows are read twice, the second time from L2."""
    row = tl.program_id(0).to(tl.int64)  # row * V passes 2^31
    logits += row * logits_stride
    cols = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    ignored = target == ignore_index
    valid = (target >= 0) & (target < V)
    z_y = tl.load(logits + tl.where(valid, target, 0)).to(tl.float32)

    z = tl.load(logits + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
    shift = 0.0 if SOFTCAP else tl.maximum(tl.max(z, 0), -1e38)  # finite even for a block of -inf
    first, _first_s, first_slope = _softcap_exp(z, shift, cap, SOFTCAP, TANH)
    first_shift = shift
    total = tl.where(cols < V, first, 0.0)
    for start in range(BLOCK, V, BLOCK):
        mask = start + cols < V
        z = tl.load(logits + start + cols, mask=mask, other=-float("inf")).to(tl.float32)
        if not SOFTCAP:
            old_shift = shift
            shift = tl.maximum(shift, tl.max(z, 0))
            total *= tl.exp2((old_shift - shift) * 1.4426950408889634)
        e = _softcap_exp(z, shift, cap, SOFTCAP, TANH)[0]
        total += tl.where(mask, e, 0.0)
    total = tl.sum(total, 0)

    e_y, s_y, slope_y = _softcap_exp(z_y, shift, cap, SOFTCAP, TANH)
    loss = tl.where(valid, tl.log(total) - s_y, float("nan"))  # a target out of range must not pass silently
    tl.store(losses + row, tl.where(ignored, 0.0, loss))

    if GRAD:
        a = tl.where(ignored, 0.0, tl.load(row_scale + row * scale_stride))
        scale = a / total
        first_scale = scale if SOFTCAP else scale * tl.exp2((first_shift - shift) * 1.4426950408889634)
        tl.store(logits + cols, first * first_slope * first_scale, mask=cols < V)
        for start in range(BLOCK, V, BLOCK):
            mask = start + cols < V
            z = tl.load(logits + start + cols, mask=mask, other=0.0).to(tl.float32)
            e, _s, slope = _softcap_exp(z, shift, cap, SOFTCAP, TANH)
            tl.store(logits + start + cols, e * slope * scale, mask=mask)
        tl.debug_barrier()  # all threads have stored the row, one stores its target column again
        tl.store(logits + target, (e_y / total - 1.0) * slope_y * a, mask=valid)


def _rows_triton(logits, targets, losses, row_scale, softcap, ignore_index, grad):
    """logits (R, V) -> losses (R,) and, if `grad`, their gradients times row_scale (R,), over the logits."""
    v = logits.shape[1]
    block = triton.next_power_of_2(v)  # the whole row, 32 columns a thread
    if v > 16384:  # the loops need more registers, most of all where loads are not aligned: larger blocks would spill
        block = 16384 if v % 16 == 0 else 8192
    tanh = {torch.float32: "exact", torch.bfloat16: "hardware"}.get(logits.dtype, "fast")
    if not isinstance(_cross_entropy_kernel, triton.JITFunction):  # Triton's interpreter knows no PTX
        tanh = tanh.replace("hardware", "fast")
    warps = 16 if v > 16384 else max(1, block // 1024)
    _cross_entropy_kernel[(len(logits),)](
        logits, targets, losses, row_scale, logits.stride(0), row_scale.stride(0), softcap or 1.0, ignore_index,
        V=v, BLOCK=block, SOFTCAP=softcap > 0, GRAD=grad, TANH=tanh, num_warps=warps,
    )  # fmt: skip


def _rows_torch(logits, targets, losses, row_scale, softcap, ignore_index, grad):
    """`_rows_triton` in plain PyTorch."""
    v = logits.shape[1]
    ignored = targets == ignore_index
    if not (ignored | (targets >= 0) & (targets < v)).all():
        raise ValueError(f"targets must be in [0, {v}) or ignore_index={ignore_index}")
    target = targets.masked_fill(ignored, 0)[:, None]
    s = softcap * torch.tanh(logits.float() / softcap) if softcap else logits.float()
    log_p = s.log_softmax(1)
    losses.copy_(-log_p.gather(1, target).squeeze(1).masked_fill(ignored, 0))
    if grad:
        g = log_p.exp_().scatter_add_(1, target, -torch.ones_like(log_p[:, :1]))
        if softcap:
            g *= 1 - (s / softcap) ** 2
        logits.copy_(g * row_scale.masked_fill(ignored, 0)[:, None])


def _rows(logits, *args):
    (_rows_triton if logits.is_cuda else _rows_torch)(logits, *args)


@jit
def _scale_kernel(x, factor, n, BLOCK: tl.constexpr):
    """x (n,) *= factor (1,), in fp32. A factor of 1, the usual one, moves nothing."""
    f = tl.load(factor)
    if f != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < n:
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < n).to(tl.float32)
            tl.store(x + at, value * f, mask=at < n)
            start += tl.num_programs(0) * BLOCK


def _tracing(x: Tensor) -> bool:
    """Whether torch.compile is tracing: Dynamo, or AOTAutograd, which before torch 2.13 does not say so."""
    return torch.compiler.is_compiling() or type(x) is not Tensor


def _saved_stays(saved: Tensor) -> bool:
    """Whether the running backward must keep what was saved: for retain_graph, or because torch.compile is tracing."""
    return _tracing(saved) or torch._C._autograd._get_current_graph_task_keep_graph()


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """A saved gradient times factor (), multiplied in fp32, in place where it can be."""
    if torch.is_grad_enabled():
        raise RuntimeError("the fused cross-entropy has no second derivative")
    if _saved_stays(grad) or not (grad.is_cuda and grad.is_contiguous()):
        return (grad * factor.expand(1, 1)).to(grad.dtype)  # () would be rounded to grad's dtype first
    programs = 8 * torch.cuda.get_device_properties(grad.device).multi_processor_count
    _scale_kernel[(programs,)](grad, factor, grad.numel(), BLOCK=2048)
    return grad


def _split_scale(row_scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`row_scale` in two factors: what the kernel multiplies by before it rounds to `dtype`, and what `_scaled` does
    afterwards, which is 1 except in fp16, whose range is too small for a mean's 1/n."""
    one = row_scale.new_ones(())
    if dtype != torch.float16 or row_scale.numel() == 0:
        return row_scale, one
    late = row_scale.abs().amax()
    late = torch.where((late > 0) & late.isfinite(), late, one)  # a mean over no target has 1/n = inf and gradients 0
    return row_scale / late, late


def _chunk_rows(n: int, v: int, itemsize: int, device: torch.device) -> int:
    """Rows of logits that exist at a time: near 48 an SM, at least 4096, and at most 1 GiB of them.

    Fewer would stay in L2 (4096 x 8192 in bf16 are 64 MiB), but the GEMM to dx has only (rows / 128) x (D / 128) tiles
    for the SMs, and each chunk reads and writes all of dW. More gain 3% for twice the memory (H200).
    """
    if device.type != "cuda":
        return min(max(n, 1), 128)
    rows = max(4096, torch.cuda.get_device_properties(device).multi_processor_count * 48 // 1024 * 1024)
    limit = 2**30 // (v * itemsize)
    return max(1, min(n, rows, limit // 128 * 128 or limit))


def _addmm_(out: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float) -> None:
    """out = beta * out + alpha * a @ b, added in fp32 where `out` is fp32, whatever a and b are."""
    if a.is_cuda:  # the batched form, since torch 2.9's addmm adds fp16 products to fp16 only
        out = out[None]
        torch.baddbmm(out, a[None], b[None], out.dtype, beta=beta, alpha=alpha, out=out)
    else:
        out.copy_(out.float().addmm_(a.float(), b.float(), beta=beta, alpha=alpha))


@torch.library.custom_op("autoresearch::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, row_scale: Tensor, softcap: float, ignore_index: int,
    reduce: bool, need_dx: bool, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Row losses (N,), or with `reduce` their sum times `row_scale`, which is () or (N,), and the gradients of
    sum(row_scale * losses) before `_scaled`: dx (N, D) in x's dtype, dW (V, D) in fp32, empty where not needed."""
    n, v = len(x), len(weight)
    w = weight.to(x.dtype)
    losses = x.new_empty(n, dtype=torch.float32)
    dx = x.new_empty(x.shape if need_dx else 0)
    dw = x.new_empty(weight.shape if need_dw else 0, dtype=torch.float32)
    boost = 2.0**15 if x.dtype == torch.float16 else 1.0  # |g| <= 1: the largest power of two that fits
    scale = (_split_scale(row_scale, x.dtype)[0] * boost).expand(n)
    rows = _chunk_rows(n, v, x.itemsize, x.device)
    buffer = x.new_empty(rows, -(-v // 16) * 16)[:, :v]  # rows start at 16 bytes or more, for vector loads
    for i in range(0, max(n, 1), rows):
        part = slice(i, i + rows)
        z = buffer[: n - i]
        torch.mm(x[part], w.T, out=z)  # (R, V)
        _rows(z, targets[part], losses[part], scale[part], softcap, ignore_index, need_dx or need_dw)
        if need_dx:
            _addmm_(dx[part], z, w, beta=0.0, alpha=1 / boost)
        if need_dw:
            _addmm_(dw, z.T, x[part], beta=float(i > 0), alpha=1 / boost)
    return losses.sum() * row_scale if reduce else losses, dx, dw


@_linear_cross_entropy.register_fake
def _(x, weight, targets, row_scale, softcap, ignore_index, reduce, need_dx, need_dw):
    loss = x.new_empty(() if reduce else len(x), dtype=torch.float32)
    dw = x.new_empty(weight.shape if need_dw else 0, dtype=torch.float32)
    return loss, x.new_empty(x.shape if need_dx else 0), dw


def _save_gradients(ctx, inputs, output):
    x, weight, targets, row_scale, *ctx.options, reduce, _, _ = inputs
    _, dx, dw = output
    ctx.mark_non_differentiable(dx, dw)
    ctx.set_materialize_grads(False)  # or the engine fills an (N, D) and a (V, D) with zeros
    ctx.reduce, ctx.weight_dtype = reduce, weight.dtype
    ctx.save_for_backward(*((row_scale, dx, dw) if reduce else (x, weight, targets)))


def _scale_gradients(ctx, grad_loss, _dx, _dw):
    need_dx, need_dw = ctx.needs_input_grad[:2]
    if ctx.reduce:
        row_scale, dx, dw = ctx.saved_tensors
        factor = grad_loss * _split_scale(row_scale, dx.dtype)[1]
    else:  # only now is it known what each row counts in dW
        x, *rest = ctx.saved_tensors
        _, dx, dw = _linear_cross_entropy(x, *rest, grad_loss, *ctx.options, False, need_dx, need_dw)
        factor = _split_scale(grad_loss, x.dtype)[1]
    dx = _scaled(dx, factor) if need_dx else None
    dw = _scaled(dw, factor).to(ctx.weight_dtype) if need_dw else None
    return dx, dw, *[None] * 7


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


@torch.library.custom_op("autoresearch::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, targets: Tensor, softcap: float, ignore_index: int) -> Tensor:
    """Row losses (N,) of logits (N, V)."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    _rows(logits, targets, losses, losses, softcap, ignore_index, False)
    return losses


@torch.library.custom_op("autoresearch::cross_entropy_", mutates_args={"logits"})
def _cross_entropy_(logits: Tensor, targets: Tensor, row_scale: Tensor, softcap: float, ignore_index: int) -> Tensor:
    """The same, and the gradient of sum(row_scale * losses) over the logits. row_scale: () or (N,)."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    _rows(logits, targets, losses, row_scale.expand(len(logits)), softcap, ignore_index, True)
    return losses


@_cross_entropy.register_fake
@_cross_entropy_.register_fake
def _(logits, targets, *_):
    return logits.new_empty(len(logits), dtype=torch.float32)


class _CrossEntropyInPlace(torch.autograd.Function):
    """The logits become their gradient in the forward or, where each loss is yet to get its scale, in the backward."""

    @staticmethod
    def forward(ctx, logits, targets, row_scale, softcap, ignore_index, reduce):
        ctx.options, ctx.reduce = (softcap, ignore_index), reduce
        if reduce:
            early, late = _split_scale(row_scale, logits.dtype)
            losses = _cross_entropy_(logits, targets, early, softcap, ignore_index)
            ctx.save_for_backward(logits, late)
            return losses.sum() * row_scale
        ctx.save_for_backward(logits, targets)
        return _cross_entropy(logits, targets, softcap, ignore_index)

    @staticmethod
    def backward(ctx, grad_loss):
        if ctx.reduce:
            grad, late = ctx.saved_tensors
            grad = _scaled(grad, grad_loss * late)
        else:
            logits, targets = ctx.saved_tensors
            grad = logits.clone() if _saved_stays(logits) else logits
            _cross_entropy_(grad, targets, grad_loss, *ctx.options)
        return grad, None, None, None, None, None


def _flatten(x: Tensor, targets: Tensor, softcap: float | None, ignore_index: int, reduction: str) -> tuple:
    """Checked arguments: x (N, ...), targets (N,), row_scale (), softcap, ignore_index, whether to reduce."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    if not 0 <= (softcap or 0) <= 50:
        raise ValueError(f"softcap must be in (0, 50], where exp(softcap) is far from overflow, or None, not {softcap}")
    if x.shape[:-1] != targets.shape:
        raise ValueError(f"shapes do not match: {tuple(x.shape)} for targets {tuple(targets.shape)}")
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if reduction == "mean":
        row_scale = (targets != ignore_index).sum(dtype=torch.float32).reciprocal()
    else:
        row_scale = torch.ones((), device=x.device)
    return x, targets, row_scale, float(softcap or 0), ignore_index, reduction != "none"


def fused_linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *,
    softcap: float | None = None, ignore_index: int = -1, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Cross-entropy of softcap(x @ weight.T): x (..., D), weight (V, D), targets (...) -> fp32 () or, for 'none', (N,).

    The GEMMs run in x's dtype, or autocast's; `weight` may be its fp32 master. A mean over no target is NaN, as in
    F.cross_entropy. Differentiating 'none' costs a fourth GEMM.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    x, targets, row_scale, softcap, ignore_index, reduce = _flatten(x, targets, softcap, ignore_index, reduction)
    needs = [reduce and torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight)]
    return _linear_cross_entropy(x, weight, targets, row_scale, softcap, ignore_index, reduce, *needs)[0]


def fused_cross_entropy(
    logits: Tensor, targets: Tensor, *, softcap: float | None = None, ignore_index: int = -1, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy of softcap(logits): logits (..., V), targets (...) -> fp32 () or, for 'none', (N,).

    Drop-in for F.cross_entropy that uses the logits up: where they require a gradient, it is written over them.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    logits, targets, row_scale, *options, reduce = _flatten(logits, targets, softcap, ignore_index, reduction)
    if torch.is_grad_enabled() and logits.requires_grad:
        return _CrossEntropyInPlace.apply(logits, targets, row_scale, *options, reduce)
    losses = _cross_entropy(logits, targets, *options)
    return losses.sum() * row_scale if reduce else losses


class FusedCrossEntropyLoss(nn.Module):
    """`fused_cross_entropy` as a module, in place of nn.CrossEntropyLoss."""

    def __init__(self, *, softcap: float | None = None, ignore_index: int = -1, reduction: str = "mean") -> None:
        super().__init__()
        self.options = {"softcap": softcap, "ignore_index": ignore_index, "reduction": reduction}

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return fused_cross_entropy(logits, targets, **self.options)


# ----------------------------------------------------------------------------------------------------------------------
# 4-bit linear
# ----------------------------------------------------------------------------------------------------------------------
# bitsandbytes' storage: `block_size` weights in a row share absmax = max |w| in fp32, each is stored as the index of
# the code nearest to w / absmax, and a byte holds two of them, the first in its high half:
#
#     w[2i], w[2i+1]  ~  absmax[2i // block_size] * (code[packed[i] >> 4], code[packed[i] & 15])
#
# y = x W^T and dx = dy W each need the dequantized W for a moment. Were that a node of the graph, torch.compile would
# merge the two equal nodes and save W for the backward, under no_grad too. So the op has the GEMM inside.

CODES = {  # 16 quantiles of N(0, 1), https://arxiv.org/abs/2305.14314; a sign bit, two of exponent, one of mantissa
    "nf4": (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    "fp4": tuple(sign * v / 12 for sign in (1.0, -1.0) for v in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}  # fmt: skip
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FEW_ROWS = 16  # of x, on CUDA: bitsandbytes' op then reads the 4 bits only, in one launch
# bitsandbytes takes this file for the hub's package `kernels` and on some CPUs warns that something is missing from it
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def _check_format(shape: tuple[int, ...], quant_type: str, block_size: int) -> None:
    if quant_type not in CODES or block_size not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"need 'nf4' or 'fp4' and a power of two from 32 to 4096, not {quant_type!r} and {block_size}")
    if shape[-1] % block_size:  # a block would run into the next row: bitsandbytes' CPU kernel is silently wrong there
        raise ValueError(f"the last dimension must be a multiple of block_size={block_size}, not {tuple(shape)}")


@functools.cache
def _bitsandbytes():
    """Its ops. The import takes a second: not before they are needed."""
    import bitsandbytes  # noqa: F401, registers them

    return torch.ops.bitsandbytes


@torch.no_grad()
def quantize_4bit(
    w: Tensor, quant_type: str = "nf4", block_size: int = 64, check_finite: bool = True
) -> tuple[Tensor, Tensor]:
    """n weights (..., K) -> packed uint8 (n / 2, 1), absmax fp32 (n / block_size,): bitsandbytes' bits, and its shapes.

    The check waits for the GPU. Without it, a NaN or inf in w makes absmax of its block NaN or inf.
    """
    _check_format(w.shape, quant_type, block_size)
    if w.dtype not in FLOATS:
        raise TypeError(f"w must be fp32, bf16 or fp16, not {w.dtype}")
    packed, _ = _bitsandbytes().quantize_4bit.default(w, block_size, quant_type, torch.uint8)
    # the same absmax, except that theirs passes over NaN on CUDA, and the loss would stay finite
    absmax = torch.linalg.vector_norm(w.reshape(-1, block_size), float("inf"), 1, dtype=torch.float32)
    if check_finite and not absmax.isfinite().all():
        raise ValueError("w holds NaN or inf")
    return packed, absmax


@jit
def _dequantize_kernel(packed_ptr, absmax_ptr, code_ptr, out_ptr, n_words, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Each thread turns four words of four bytes, BLOCK apart, into 8 weights each; GROUP words share an absmax.

    Loads and stores are coalesced without a shuffle. The 16 codes lie in 16 banks of shared memory: any 32 lookups are
    one access. (A tree of selects takes 2.4 times the instructions.) Offsets are int32: bitsandbytes stops at 2^31.
    """
    first = tl.program_id(0) * 4 * BLOCK + tl.arange(0, BLOCK)
    packed, absmax = (), ()
    for part in tl.static_range(4):  # a loop of its own: no load would overtake a store, which might alias it
        word = first + part * BLOCK
        packed += (tl.load(packed_ptr + word, word < n_words),)
        absmax += (tl.load(absmax_ptr + word // GROUP, word < n_words),)
    code = tl.load(code_ptr + tl.arange(0, 16))
    i = tl.arange(0, 8)
    for part in tl.static_range(4):
        word = first + part * BLOCK
        nibble = (packed[part][:, None] >> (4 * (i ^ 1))[None, :]) & 15  # (BLOCK, 8), high half of each byte first
        w = tl.gather(code, nibble.reshape(BLOCK * 8), 0).reshape(BLOCK, 8) * absmax[part][:, None]
        tl.store(out_ptr + word[:, None] * 8 + i[None, :], w.to(out_ptr.dtype.element_ty), (word < n_words)[:, None])


_launchers = {}  # by what Triton specializes a kernel on: its own lookup takes two to three times the host time


def _dequantize_triton(packed, absmax, code, out, block_size):
    n_words = out.numel() // 8
    grid, constants = (-(-n_words // 512), 1, 1), (n_words, block_size // 8, 128)
    pointers = packed.data_ptr(), absmax.data_ptr(), code.data_ptr(), out.data_ptr()
    key = constants, out.dtype, out.device, (pointers[0] | pointers[1]) % 16  # torch aligns code and out to 16 bytes
    if launch := _launchers.get(key):
        launch(*pointers, *constants)
    else:
        kernel = _dequantize_kernel[grid](packed.view(-1).view(torch.int32), absmax, code, out, *constants)
        _launchers[key] = kernel and kernel[grid]  # None in Triton's interpreter
    return out


@functools.cache
def _code(quant_type: str, device: torch.device) -> Tensor:
    return torch.tensor(CODES[quant_type], dtype=torch.float32, device=device)


@functools.cache
def _code_pairs(quant_type: str, device: torch.device) -> Tensor:
    """(256, 2): the two codes of each byte, that of its high half first."""
    code = _code(quant_type, device)
    return torch.cartesian_prod(code, code)


def _dequantize(packed, absmax, shape, dtype, quant_type, block_size):
    """`dequantize_4bit` of arguments known to be right."""
    if packed.is_cuda:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
        return _dequantize_triton(packed, absmax, _code(quant_type, packed.device), out, block_size)
    codes = _code_pairs(quant_type, packed.device).index_select(0, packed.view(-1).int())
    return (codes.view(-1, block_size) * absmax.view(-1, 1)).to(dtype).view(shape)


def dequantize_4bit(
    packed: Tensor, absmax: Tensor, shape: tuple[int, ...], dtype: torch.dtype, quant_type: str = "nf4",
    block_size: int = 64,
) -> Tensor:  # fmt: skip
    """Inverse of `quantize_4bit`: weights of `shape` and `dtype`, code times absmax in fp32 and rounded once."""
    _check_format(shape, quant_type, block_size)
    n, stored = math.prod(shape), (packed.dtype, 2 * packed.numel(), absmax.dtype, block_size * absmax.numel())
    if stored != (torch.uint8, n, torch.float32, n):
        raise ValueError(f"{tuple(shape)} needs uint8 for {n} weights and fp32 for as many, not {stored}")
    return _dequantize(packed, absmax, shape, dtype, quant_type, block_size)


def _matmul_4bit(
    x: Tensor, packed: Tensor, absmax: Tensor, bias: Tensor | None, transpose: bool, quant_type: str, block_size: int
) -> Tensor:
    """x W, (..., N) -> (..., K), or with `transpose` x W^T + bias, (..., K) -> (..., N)."""
    k = x.shape[-1]  # the GEMM's
    n = 2 * packed.numel() // k
    if transpose and bias is not None:
        bias = bias.to(x.dtype)
    if transpose and packed.is_cuda and 0 < x.numel() <= FEW_ROWS * k:
        return _bitsandbytes().gemm_4bit.default(x, packed, (n, k), absmax, block_size, quant_type, bias)
    w = _dequantize(packed, absmax, (n, k) if transpose else (k, n), x.dtype, quant_type, block_size)
    return F.linear(x, w, bias) if transpose else x @ w


_OP = "autoresearch::matmul_4bit"  # made by torch.library.custom_op, it would take three times the host time a call
torch.library.define(_OP, torch.library.infer_schema(_matmul_4bit, mutates_args=()))
torch.library.impl(_OP, "default", _matmul_4bit)
torch.library.register_fake(_OP, lambda x, packed, *_: x.new_empty(*x.shape[:-1], 2 * packed.numel() // x.shape[-1]))


def _fastest(x):
    """The op where torch.compile is tracing; in eager mode the dispatcher would only take host time."""
    return torch.ops.autoresearch.matmul_4bit.default if _tracing(x) else _matmul_4bit


class _Linear4bit(torch.autograd.Function):
    """The master `weight` is not read: it is an input in order to have a gradient."""

    @staticmethod
    def forward(ctx, x, packed, absmax, weight, bias, quant_type, block_size):
        ctx.format = quant_type, block_size
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, packed, absmax)
        return _fastest(x)(x, packed, absmax, bias, True, quant_type, block_size)

    @staticmethod
    def backward(ctx, dy):
        assert not torch.is_grad_enabled(), "the 4-bit linear has no second derivative"
        x, packed, absmax = ctx.saved_tensors
        need_dx, _, _, need_dw, need_db, _, _ = ctx.needs_input_grad
        dx = dw = db = None
        if need_dx:
            dx = _fastest(dy)(dy, packed, absmax, None, False, *ctx.format)
        if need_dw:  # straight through the quantizer
            dw = (dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])).float()
        if need_db:
            db = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32)
        return dx, None, None, dw, db, None, None


class Linear4bit(nn.Module):
    """y = x W^T + bias in x's dtype, x (..., in_features), W in 4 bits. Frozen, W is `packed` and `absmax` alone.

    With `trainable` an fp32 master `weight` gets W's gradient, while y and dx still come from the 4 bits: call
    `requantize_` after each step of the optimizer.
    """

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
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # nn.Linear's; a frozen W is zero until it is loaded
            self.requantize_()

    @classmethod
    def from_linear(cls, linear: nn.Linear, trainable: bool = False, **format) -> Linear4bit:
        """`linear` in 4 bits; its bias and, with `trainable`, its weight are shared, not copied."""
        packed, absmax = quantize_4bit(linear.weight, **format)
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, trainable=trainable, **format)
        layer.packed, layer.absmax, layer.bias = packed, absmax, linear.bias
        if trainable:
            layer.weight = nn.Parameter(linear.weight.detach().float())
        return layer

    @torch.no_grad()
    def requantize_(self) -> None:
        """`weight` into the existing buffers. It never waits for the GPU: NaN and inf surface in the outputs only."""
        # on CUDA, bitsandbytes quantizes on the default stream whatever the current one is
        packed, absmax = quantize_4bit(self.weight, *self.format, check_finite=False)
        self.packed.copy_(packed)
        self.absmax.copy_(absmax)

    def forward(self, x: Tensor) -> Tensor:
        packed, absmax, k = self.packed, self.absmax, self.in_features
        if x.dtype not in FLOATS or x.device != packed.device or x.shape[-1] != k:
            raise ValueError(f"need floats (..., {k}) on {packed.device}, not {x.dtype} {tuple(x.shape)} on {x.device}")
        if absmax.dtype != torch.float32:
            raise ValueError(f"absmax must stay fp32, not {absmax.dtype}: cast x, not the layer")
        if torch.is_autocast_enabled(x.device.type):  # not register_autocast, which would round absmax too
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if torch.is_grad_enabled():
            return _Linear4bit.apply(x, packed, absmax, self.weight, self.bias, *self.format)
        return _fastest(x)(x, packed, absmax, self.bias, True, *self.format)
