"""FlashAttention made for the GPU: version 3 for a Hopper, 4 for a Blackwell B200. PyTorch itself has version 2."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from contextlib import suppress

from prepare import PrepareError, one_line

MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}


def flash_for(capability: tuple[int, int] | None) -> str:
    """The version made for a compute capability: "fa3", "fa4", or "" for none."""
    return {9: "fa3", 10: "fa4"}.get(capability[0], "") if capability else ""


def installed(kind: str) -> bool:
    with suppress(ImportError):  # of the package above the module
        return kind in MODULES and importlib.util.find_spec(MODULES[kind]) is not None
    return False


def install(kind: str) -> str:
    """The command that installs a version."""
    import torch

    cuda = torch.version.cuda.replace(".", "")
    if kind == "fa4":
        return f"pip install 'flash-attn-4[cu{cuda[:2]}]'" if cuda >= "130" else "pip install flash-attn-4"
    return f"pip install flash-attn-3 --index-url https://download.pytorch.org/whl/cu{cuda}"


def unusable(kind: str, error: Exception) -> PrepareError:
    fix = f"reinstall it ({install(kind)}) or remove it (pip uninstall flash-attn-{kind[-1]})"
    return PrepareError(f"{MODULES[kind]} cannot be used ({one_line(error)}): {fix}")


def load_fa3() -> Callable:
    """flash_attn_func from FlashAttention-3's official module. Raises PrepareError if the import fails."""
    try:
        from flash_attn_interface import flash_attn_func
    except Exception as error:
        raise unusable("fa3", error) from error
    return flash_attn_func


def load_fa4() -> Callable:
    """As load_fa3(), from FlashAttention-4, a beta: raises PrepareError also if it disagrees with a mask."""
    try:
        with warnings.catch_warnings():  # of its compiler
            warnings.simplefilter("ignore")
            flash = fa4_operator()
            if not (difference := compare_with_mask(flash)) < 0.03:  # bf16
                raise ValueError(f"it differs from a mask by {difference:.2g}")
    except Exception as error:
        raise unusable("fa4", error) from error
    return flash


def fa4_operator() -> Callable:
    """FlashAttention-4 as an operator that torch.compile can call; its own Python, which it cannot trace, compiles
    kernels when first called. Public functions would do the forward pass again for the backward pass."""
    import torch
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    library, tensors = torch.library, "Tensor q, Tensor k, Tensor v"

    @library.custom_op("harness::fa4", mutates_args=(), schema=f"({tensors}, int left) -> (Tensor, Tensor)")
    def forward(q, k, v, left):
        return _flash_attn_fwd(q, k, v, **window(q, left), return_lse=True)[:2]

    @library.custom_op(
        "harness::fa4_backward",
        mutates_args=(),
        schema=f"({tensors}, Tensor out, Tensor lse, Tensor grad, int left) -> (Tensor, Tensor, Tensor)",
    )
    def backward(q, k, v, out, lse, grad, left):
        return _flash_attn_bwd(q, k, v, out, grad.contiguous(), lse, **window(q, left))[:3]

    def window(q, left):
        return dict(causal=True, window_size_left=left if left < q.size(1) else None)

    def fake(q, k, v, left):
        B, T, H, _ = q.shape
        return q.new_empty(q.shape), q.new_empty(B, H, T, dtype=torch.float32)

    def fake_backward(q, k, v, out, lse, grad, left):
        return tuple(t.new_empty(t.shape) for t in (q, k, v))

    def setup_context(ctx, inputs, output):
        ctx.left = inputs[3]
        ctx.save_for_backward(*inputs[:3], *output)

    forward.register_fake(fake)
    backward.register_fake(fake_backward)
    forward.register_autograd(
        lambda ctx, grad, _: (*backward(*ctx.saved_tensors, grad, ctx.left), None), setup_context=setup_context
    )
    return lambda q, k, v, causal, window_size: forward(q, k, v, window_size[0])[0]


def compare_with_mask(flash: Callable) -> float:
    """The largest relative difference from a mask, of the output and of the gradients."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    qkv = torch.randn(3, 1, 300, 2, 128, device=device, dtype=torch.bfloat16).requires_grad_()
    i, largest = torch.arange(300, device=device), 0.0
    for left in (100, 300):
        mask = (i <= i[:, None]) & (i >= i[:, None] - left)
        q, k, v = qkv.float().transpose(2, 3)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
        found = flash(*qkv, causal=True, window_size=(left, 0))
        grad = torch.randn_like(found)
        gradients = [torch.autograd.grad(y, qkv, grad.to(y.dtype))[0] for y in (found, expected)]
        for a, b in (found, expected), gradients:
            largest = max(largest, ((a - b).norm() / b.norm()).item())
    return largest
