"""The fused cross-entropy against float64, on the GPU or, without one, on CPU and in Triton's interpreter."""

import functools
from unittest.mock import patch

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from reference_model import relative_error as error
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import kernels
from kernels import fused_cross_entropy, fused_linear_cross_entropy

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from Triton's interpreter
ROW_KERNELS = [kernels._rows_torch, kernels._rows_triton]
UNIT = {dtype: torch.finfo(dtype).eps / 2 for dtype in kernels.FLOATS}  # the largest relative rounding error


def softcapped(z: Tensor, softcap: float | None) -> Tensor:
    return softcap * torch.tanh(z / softcap) if softcap else z


def eager(x, weight, targets, *, softcap=None, ignore_index=-1, reduction="mean", return_lse=False):
    """What the model would do without the fused operator: logits in fp32 (in float64 for float64 arguments)."""
    logits = x @ weight.to(x.dtype).T
    logits = softcapped(logits if logits.dtype == torch.float64 else logits.float(), softcap)
    loss = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)
    return (loss, logits.logsumexp(-1)) if return_lse else loss


def of_logits(x, weight, targets, **options):
    """The operator on logits, with the linear one's signature."""
    return fused_cross_entropy(x @ weight.to(x.dtype).T, targets, **options)


def alone(operator, *args, **options):
    return operator(*args, **options)


def with_z_loss(operator, *args, **options):
    """A strong one. Without a reduction, each row gets its own."""
    loss, lse = operator(*args, return_lse=True, **options)
    return loss + 0.1 * (lse.square() if loss.dim() else lse.square().mean())


OPERATORS = [fused_linear_cross_entropy, of_logits]
WAYS = [(alone, fused_linear_cross_entropy), (alone, of_logits), (with_z_loss, fused_linear_cross_entropy)]


def example(n: int, d: int, v: int, dtype: torch.dtype, device: torch.device, ignore_index: int = -1):
    """x (N, D), an fp32 weight (V, D) for logits of standard deviation 3, targets with both ends and ignored ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator).to(device, dtype)
    weight = (3 / d**0.5 * torch.randn(v, d, generator=generator)).to(device)
    targets = torch.randint(0, v, (n,), generator=generator)
    targets[::3], targets[1::5], targets[2::7] = 0, v - 1, ignore_index
    return x.requires_grad_(), weight.requires_grad_(), targets.to(device)


def weighted(loss: Tensor) -> Tensor:
    return (loss * torch.linspace(0, 1, len(loss), device=loss.device)).sum() if loss.dim() else loss


def gradients(x, weight, targets, operator=fused_linear_cross_entropy, loss=alone, factor=1.0, **options):
    """Loss, dx and dW of factor * loss(operator, ...), where the losses of 'none' get weights from 0 to 1."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y = loss(operator, x, weight, targets, **options)
    (factor * weighted(y)).backward()
    return y.detach(), x.grad, weight.grad


def in_float64(x, weight, targets, **options):
    return gradients(x.double(), weight.to(x.dtype).double(), targets, operator=eager, **options)


# -- The row kernel, and its twin in plain PyTorch


def run_rows(rows, logits, targets, row_scale, softcap=None, ignore_index=-1, lse_scale=None):
    """Losses, gradients and lse of `logits` in a wider buffer, whose other columns must not change."""
    n, v = logits.shape
    wide, other = logits.new_full((n, v + 16), 2.0), logits.new_full((n, v + 32), 2.0)
    wide[:, :v] = logits
    losses, again, lse = torch.full((3, n), float("nan"), device=logits.device)
    rows(wide[:, :v], targets, again, row_scale, softcap, ignore_index, None, lse)
    rows(wide[:, :v], targets, losses, row_scale, softcap, ignore_index, other[:, :v], None, lse_scale)
    torch.testing.assert_close(again, losses, equal_nan=True)
    assert torch.equal(wide[:, :v], logits), "untouched unless in place"
    rows(wide[:, :v], targets, losses, row_scale, softcap, ignore_index, wide[:, :v], None, lse_scale)
    torch.testing.assert_close(wide[:, :v], other[:, :v], rtol=0, atol=0, equal_nan=True)
    assert (wide[:, v:] == 2.0).all() and (other[:, v:] == 2.0).all()
    return losses, wide[:, :v], lse


def rows_by_autograd(logits, targets, row_scale, softcap=None, ignore_index=-1, lse_scale=None):
    z = logits.double().requires_grad_()
    s = softcapped(z, softcap)
    losses, lse = F.cross_entropy(s, targets, ignore_index=ignore_index, reduction="none"), s.logsumexp(1)
    (losses * row_scale + (0 if lse_scale is None else lse * lse_scale)).sum().backward()
    return losses.detach(), z.grad, lse.detach()


def assert_rows_match(*args, rtol: float, atol: float, grad_rtol: float, grad_atol: float, **options) -> None:
    tolerances = (rtol, atol), (grad_rtol, grad_atol), (rtol, atol)
    results = zip(run_rows(*args, **options), rows_by_autograd(*args[1:], **options), tolerances, strict=True)
    for found, expected, (rtol, atol) in results:
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("rows", ROW_KERNELS)
@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("v", [1, 41, 8192, pytest.param(50257, marks=pytest.mark.slow)])
def test_rows_match_float64(rows, v, softcap, device):
    logits = 5 * torch.randn(5, v, generator=torch.Generator().manual_seed(v)).to(device)
    targets = torch.tensor([0, v - 1, v // 2, -1, v // 3], device=device)
    row_scale = torch.tensor([1.0, 0.5, 3.0, 1.0, 0.0], device=device)
    tolerances = dict(rtol=2e-6, atol=2e-5, grad_rtol=5e-5, grad_atol=3e-6)
    for lse_scale in (None, torch.tensor([1.0, -2.0, 0.1, 0.5, 1.0], device=device)):  # one is of an ignored row
        assert_rows_match(rows, logits, targets, row_scale, softcap, lse_scale=lse_scale, **tolerances)


@pytest.mark.parametrize("rows", ROW_KERNELS)
def test_huge_logits_neither_overflow_nor_vanish(rows, device):
    logits = 1e4 * torch.tensor([[1.0, -1.0, 0.5], [-1.0, -1.0, 1.0], [-1.0, -1.0, -1.0]], device=device)
    targets, ones = torch.tensor([0, 0, 2], device=device), torch.ones(3, device=device)
    tolerances = dict(rtol=1e-6, atol=5e-6, grad_rtol=1e-6, grad_atol=1e-6)  # 5e-6: an ulp of 50
    for softcap in (None, 15.0, 50.0):
        assert_rows_match(rows, logits, targets, ones, softcap, lse_scale=ones, **tolerances)


@pytest.mark.parametrize("rows", ROW_KERNELS)
@pytest.mark.parametrize("v", [50, 20001])  # 20001 columns are three blocks, the last one partial
def test_infinite_logits_behave_as_in_eager(rows, v, device):
    inf = float("inf")
    logits = torch.randn(8, v, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0, 0] = -inf  # one class excluded
    logits[1, : v - 3] = -inf  # all of the first block
    logits[2, 7] = -inf  # the target itself: an infinite loss
    logits[3, 5] = inf  # NaN
    logits[4] = -inf  # NaN
    logits[5, 5] = inf  # ignored, so no loss; its gradient is NaN in eager, too
    logits[6, v // 2 :] = -inf  # all of the last block
    logits[7, v // 2 :] -= 1000  # far below the maximum
    args = logits, torch.tensor([1, v - 2, 7, 3, 0, -1, 4, 5], device=device), torch.ones(8, device=device)
    results = run_rows(rows, *args), rows_by_autograd(*args), ([], [5], [3, 5]), (1e-6, 1e-5, 1e-6)
    for found, expected, unlike, rtol in zip(*results, strict=True):
        rest = [row for row in range(8) if row not in unlike]
        torch.testing.assert_close(found.double()[rest], expected[rest], rtol=rtol, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("ignore_index", [-1, -100, 42])
def test_a_target_out_of_range_is_never_silent(ignore_index, device):
    """Not even a negative one that other functions use as ignore_index."""
    logits, row_scale = torch.randn(3, 50, device=device), torch.ones(3, device=device)
    for bad in {50, -1, -100, 2**40} - {ignore_index}:
        targets = torch.tensor([3, bad, ignore_index], device=device)
        losses, grad, _ = run_rows(kernels._rows_triton, logits, targets, row_scale, ignore_index=ignore_index)
        assert losses[0].isfinite() and losses[1].isnan() and losses[2] == 0 and not grad[2].any()
        with pytest.raises(ValueError, match=r"targets must be in \[0, 50\)"):
            fused_cross_entropy(logits.cpu(), targets.cpu(), ignore_index=ignore_index)


# -- The operators

SHAPES = [(1, 32, 300), (77, 24, 1), (9 * 7, 48, 41), (3 * 423, 16, 130)] + [
    pytest.param((n, 256, v), marks=pytest.mark.gpu)
    for n, v in [(3 * 423, 32000), (8192, 49152), (4096, 50257), (300, 262144)]
]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("loss", [alone, with_z_loss])
def test_losses_and_gradients_match_float64(loss, operator, shape, softcap, reduction, device):
    args, options = example(*shape, torch.float32, device), dict(loss=loss, softcap=softcap, reduction=reduction)
    results = gradients(*args, operator=operator, **options)
    for result, reference in zip(results, in_float64(*args, **options), strict=True):
        assert result.dtype == torch.float32 and result.shape == reference.shape
        assert error(result, reference) < 5e-6 or reference.norm() < 1e-6  # V = 1: everything is zero


class OnGPU(Tensor):
    """Of a CPU, but it takes a GPU's way: logits in its own dtype, and the row kernel, in Triton's interpreter."""

    is_cuda = True


@pytest.fixture
def linear(device, monkeypatch):
    """The linear operator, whose logits have the dtype of x also on a CPU, which would take fp32."""
    if device.type == "cuda":
        return fused_linear_cross_entropy

    def add_product(out, a, b, *, beta, alpha):
        out.copy_(out.float().addmm_(a.float(), b.float(), beta=beta, alpha=alpha))

    monkeypatch.setattr(kernels, "_addmm_", add_product)
    monkeypatch.setattr(kernels, "_linear_cross_entropy", kernels._linear_cross_entropy._init_fn)
    return lambda x, *args, **options: fused_linear_cross_entropy(x.as_subclass(OnGPU), *args, **options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_a_z_loss_counts_ignored_rows_and_is_exact_at_any_size(dtype, reduction, linear, device, monkeypatch):
    """Logits are multiples of 128 up to 8192, exact in each dtype."""
    monkeypatch.setattr(kernels, "_chunk_rows", lambda *_: 16)
    x, weight, targets = example(40, 32, 50, dtype, device, ignore_index=7)
    x = 128 * F.one_hot(torch.arange(40, device=device) % 32, 32).to(dtype)
    args = x, (10 * weight.detach()).round().clamp(-64, 64), targets
    for softcap, factor in ((None, 1.0), (None, 2.0**-20), (50.0, 1.0), (50.0, 2.0**-20), (50.0, 0.0)):
        options = dict(loss=with_z_loss, softcap=softcap, ignore_index=7, reduction=reduction, factor=factor)
        loss, dx, dw = gradients(*args, operator=linear, **options)
        exact_loss, exact_dx, exact_dw = in_float64(*args, **options)
        most = 4 * UNIT[dtype] + 5e-6
        assert error(loss, exact_loss) < most and error(dw, exact_dw) < most
        if factor == 1:  # dx itself is in half precision
            assert error(dx, exact_dx) < most


@pytest.mark.parametrize("used", [0, 1], ids=["loss", "lse"])
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_of_loss_and_log_sum_exp_one_that_nobody_uses_leaves_the_other_its_gradients(dtype, used, device):
    def one(operator, *args):
        return 100 * operator(*args, return_lse=True)[used]

    args = example(97, 32, 50, dtype, device)
    for result, reference in zip(gradients(*args, loss=one), in_float64(*args, loss=one), strict=True):
        assert error(result, reference) < 4 * UNIT[dtype] + 5e-6


@pytest.mark.parametrize("loss, operator", WAYS)
def test_no_logits_are_saved_but_given_ones_and_a_second_derivative_is_refused(loss, operator, device):
    x, weight, targets = example(60, 16, 30, torch.float32, device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = loss(operator, x, weight, targets)
    large = {t.data_ptr() for t in saved if t.numel() >= 60 * 30}
    assert len(large) == (operator is of_logits)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_error_is_not_above_that_of_eager_with_fp32_logits(dtype, softcap, device):
    args = example(*((4096, 512, 8192) if device.type == "cuda" else (520, 64, 500)), dtype, device)
    for reduction, checked in (("mean", slice(1, 3)), ("none", slice(1))):  # a mean loss's errors cancel by luck
        options = dict(softcap=softcap, reduction=reduction)
        results = gradients(*args, **options), gradients(*args, operator=eager, **options), in_float64(*args, **options)
        for ours, theirs, exact in [*zip(*results, strict=True)][checked]:
            # 8: what the order of a sum may change
            assert error(ours, exact) <= 1.1 * error(theirs, exact) + 8 * UNIT[torch.float32]


@pytest.mark.parametrize(("scale", "spread"), [(65536.0, 1), (1.0, 64)])
def test_small_fp16_gradients_survive_a_batch_of_262144(scale, spread, device):
    """1/N is 4e-6 and most probabilities are below 1e-4. Their product is zero in fp16, and so is much of dx / N unless
    the loss scale is applied first. At a scale of 1 the weight is large, since fp16 could not hold dx itself."""
    x, weight, targets = example(2**18 - 1, *((16, 8192) if device.type == "cuda" else (4, 8)), torch.float16, device)
    args, options = (x.detach() / spread, spread * weight.detach(), targets), {"softcap": 15.0, "factor": scale}
    for found, expected in zip(gradients(*args, **options)[1:], in_float64(*args, **options)[1:], strict=True):
        assert error(found, expected) < 2e-3


def test_in_fp16_neither_rare_classes_nor_the_weights_of_ignored_rows_take_gradients_precision(linear, device):
    x = torch.ones(64, 8, dtype=torch.float16, device=device)
    weight = torch.zeros(5, 8, device=device)
    weight[4] = -2.0  # a probability of 3e-8, below fp16's smallest number
    args = x, weight, torch.arange(64, device=device) % 4
    assert error(gradients(*args, operator=linear)[2][4], in_float64(*args)[2][4]) < 2e-3
    x, weight, targets = example(40, 16, 30, torch.float16, device)
    targets[7] = -1
    grads = []
    for ignored in (1.0, 1e9):
        weights = torch.linspace(0.1, 1, 40, device=device)
        weights[7] = ignored
        losses = linear(x, weight, targets, reduction="none")
        grads.append(torch.autograd.grad((losses * weights).sum(), (x, weight)))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_the_gradient_of_a_bf16_weight_is_rounded_twice_at_most(chunks, device, monkeypatch):
    x, weight, targets = example(384, 32, 100, torch.bfloat16, device)
    monkeypatch.setattr(kernels, "_chunk_rows", lambda *_: 384 // chunks)
    _, _, dw = gradients(x, weight.bfloat16(), targets)
    _, _, exact = gradients(x, weight, targets)
    assert dw.dtype == torch.bfloat16 and exact.dtype == torch.float32
    assert error(dw, exact.double()) < 1.5 * error(exact.bfloat16(), exact.double())


def test_autocast_sets_the_dtype_of_the_gemms(device):
    x, weight, targets = example(64, 32, 100, torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        rows, dx, _ = gradients(x, weight, targets, reduction="none")
    in_bf16, in_fp32 = (fused_linear_cross_entropy(t, weight, targets, reduction="none") for t in (x.bfloat16(), x))
    assert error(rows, in_bf16) < 1e-6 and error(rows, in_fp32) > 1e-4 and dx.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype, device):
    """Not even the mean over so many targets that 1/n underflows in fp16."""
    args = example(70_000, 2, 5, torch.float32, device)
    expected = gradients(*args)
    torch.set_default_dtype(dtype)
    try:
        assert all(map(torch.equal, gradients(*args), expected))
    finally:
        torch.set_default_dtype(torch.float32)


def test_targets_of_any_integer_dtype_and_shapes_on_meta(device):
    x, weight, targets = example(64, 16, 200, torch.float32, device)
    targets = targets.clamp(min=0)
    for function, args in ((fused_linear_cross_entropy, (x, weight)), (fused_cross_entropy, (x @ weight.T,))):
        for dtype in (torch.uint8, torch.int16, torch.int32):
            assert torch.equal(function(*args, targets.to(dtype)), function(*args, targets))
        loss = function(*(t.detach().to("meta").requires_grad_() for t in args), targets.to("meta"), reduction="none")
        assert loss.shape == (64,) and loss.is_meta
        loss.sum().backward()


def test_no_grad_computes_no_gradient_and_holds_one_chunk_of_logits(device, monkeypatch):
    calls, rows = [], kernels._rows
    monkeypatch.setattr(kernels, "_rows", lambda z, *a: (calls.append((len(z), a[5] is not None)), rows(z, *a)))
    monkeypatch.setattr(kernels, "_chunk_rows", lambda *_: 16)
    x, weight, targets = example(40, 16, 30, torch.float32, device)
    with torch.no_grad():
        loss = fused_linear_cross_entropy(x, weight, targets)
    assert calls == [(16, False), (16, False), (8, False)] and not loss.requires_grad
    fused_linear_cross_entropy(x.detach(), weight.detach(), targets)
    assert not any(grad for _, grad in calls)
    torch.testing.assert_close(loss, fused_linear_cross_entropy(x, weight, targets))
    assert all(grad for _, grad in calls[6:])


def test_neither_chunks_nor_leading_dimensions_nor_inputs_without_gradients_show(device, monkeypatch):
    x, weight, targets = example(100, 16, 30, torch.float32, device)
    for reduction in ("mean", "none"):
        whole = gradients(x, weight, targets, reduction=reduction)
        for size in (1, 7, 33, 100):
            monkeypatch.setattr(kernels, "_chunk_rows", lambda *_, size=size: size)
            torch.testing.assert_close(gradients(x, weight, targets, reduction=reduction), whole)
        for only, inputs in enumerate([(x, weight.detach()), (x.detach(), weight)]):
            loss = fused_linear_cross_entropy(*inputs, targets, reduction=reduction)
            torch.testing.assert_close(torch.autograd.grad(weighted(loss), inputs[only])[0], whole[1 + only])
        loss = fused_linear_cross_entropy(x.view(2, 5, 10, 16), weight, targets.view(2, 5, 10), reduction=reduction)
        torch.testing.assert_close(loss, whole[0], rtol=0, atol=0)


STRIDES = {"row-strided": lambda t: torch.stack([t, t + 1], 1)[:, 0], "column-major": lambda t: t.T.contiguous().T}


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("strided", STRIDES.values(), ids=STRIDES)
def test_any_strides(strided, repeated, device, monkeypatch):
    monkeypatch.setattr(kernels, "_rows", kernels._rows_triton)  # which takes a row stride and nothing else
    x, weight, targets = example(12, 32, 40, torch.float32, device)
    targets = targets.clamp_min(0)
    targets = targets[:1].expand(12) if repeated else torch.stack([targets, targets + 1], 1)[:, 0]
    logits, x, weight = (strided(t.detach()).requires_grad_() for t in (x @ weight.T, x, weight))
    expected = F.cross_entropy(logits, targets)
    (dlogits,) = torch.autograd.grad(expected, logits)
    loss = fused_linear_cross_entropy(x, weight, targets)
    dx, dw = torch.autograd.grad(loss, (x, weight))
    torch.testing.assert_close((loss, dx, dw), (expected, dlogits @ weight, dlogits.T @ x))
    for inplace in (False, True):
        loss = fused_cross_entropy(logits, targets, inplace=inplace)
        torch.testing.assert_close((loss, *torch.autograd.grad(loss, logits)), (expected, dlogits))


def test_mistakes_are_named(device):
    x, weight, targets = example(6, 16, 30, torch.float32, device)
    for mistake, match, args, options in (
        (ValueError, "'mean', 'sum' or 'none', not 'avg'", (x, weight, targets), dict(reduction="avg")),
        (ValueError, "softcap", (x, weight, targets), dict(softcap=1e3)),
        (ValueError, "targets must have shape", (x, weight, targets[:5]), {}),
        (TypeError, "int64", (x.long(), weight, targets), {}),  # the weight would be rounded, too
        (TypeError, r"integer targets.*float32$", (x, weight, targets.float()), {}),
        # a custom op would return uninitialized memory
        (ValueError, "must be on", (x.to("meta"), weight, targets), {}),
        (ValueError, "must be on", (x, weight.to("meta"), targets), {}),
        (ValueError, "must be on", (x, weight, targets.to("meta")), {}),
    ):
        with pytest.raises(mistake, match=match):
            fused_linear_cross_entropy(*args, **options)
    with pytest.raises(TypeError, match=r"integer targets.*float32$"):
        fused_cross_entropy(x, targets.float())
    with pytest.raises(ValueError, match="not on meta"):
        fused_cross_entropy(x, targets.to("meta"))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("operator", [*OPERATORS, eager])
def test_without_targets_a_mean_is_nan_a_sum_is_zero_and_so_are_gradients(operator, dtype, reduction, device):
    """As in F.cross_entropy, under a loss scale too: whether the batch is empty or all of it is ignored."""
    some_x, weight, some_targets = example(8, 16, 30, dtype, device)
    for x, targets in ((some_x[:0], some_targets[:0]), (some_x, torch.full_like(some_targets, -1))):
        loss, dx, dw = gradients(x, weight, targets, operator=operator, reduction=reduction, factor=65536.0)
        assert loss.isnan() if reduction == "mean" else not loss.any()
        assert dx.shape == x.shape and dw.shape == weight.shape
        assert not dx.any() and not dw.any()  # NaN would be true


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss, operator", WAYS)
def test_backward_can_run_twice_and_accumulates_and_activations_can_be_checkpointed(loss, operator, reduction, device):
    x, weight, targets = example(90, 16, 30, torch.float32, device)
    run = functools.partial(loss, operator, reduction=reduction)  # reentrant checkpoints take no keywords
    expected = gradients(x, weight, targets, run, factor=5)
    y = weighted(run(x, weight, targets))
    (2 * y).backward(retain_graph=True)
    (3 * y).backward()
    torch.testing.assert_close((x.grad, weight.grad), expected[1:])
    for reentrant in (True, False):
        checkpointed = functools.partial(checkpoint, run, use_reentrant=reentrant)
        torch.testing.assert_close(gradients(x, weight, targets, checkpointed, factor=5), expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("reduction", "softcap", "sizes"), [("none", 15.0, (90,)), ("mean", None, (64, 33, 7))])
@pytest.mark.parametrize("loss, operator", WAYS)
def test_compiles_into_one_graph_with_the_same_results_for_every_batch_size(
    loss, operator, reduction, softcap, sizes, backend, device
):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    function = functools.partial(loss, operator, softcap=softcap, reduction=reduction)
    compiled = torch.compile(function, fullgraph=True, dynamic=len(sizes) > 1, backend=counter)
    for n in sizes:
        args = example(n, 16, 30, torch.bfloat16, device)
        result, expected = (gradients(*args, f) for f in (compiled, function))
        torch.testing.assert_close(result, expected, rtol=2**-6, atol=2**-8)
    assert counter.frame_count == 1
    args = [t.detach() for t in args]
    torch.testing.assert_close(compiled(*args), function(*args))


@torch.no_grad()
def test_the_backward_can_be_traced_by_aotautograd():
    """AOTAutograd of torch 2.11 does not report that it is compiling, and fake tensors have no memory to launch on."""
    with FakeTensorMode(), patch.object(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False):
        grad = torch.empty(90, 16, dtype=torch.bfloat16, device="cuda")
        scaled = kernels._scaled(grad, torch.ones((), device="cuda"))
    assert scaled.dtype == torch.bfloat16 and scaled.shape == grad.shape and scaled is not grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("ignore_index", "inplace"), [(-100, False), (42, True)])
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_losses_of_logits_match_float64_and_the_gradient_is_rounded_once(
    dtype, ignore_index, inplace, reduction, device
):
    """Whatever weights the losses get: it was once rounded before and after their multiplication."""
    x, weight, targets = example(77, 32, 300, dtype, device, ignore_index)
    logits = (x @ weight.to(dtype).T).detach().requires_grad_()
    exact = logits.detach().double().requires_grad_()
    weights = torch.linspace(0.3, 0.7, 77, device=device) if reduction == "none" else 0.7
    options = {"ignore_index": ignore_index, "reduction": reduction}
    loss = fused_cross_entropy(logits.clone(), targets, inplace=inplace, **options)
    expected = F.cross_entropy(exact, targets, **options)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    assert error(loss, expected) < 1e-6
    assert logits.grad.dtype == dtype and error(logits.grad, exact.grad) < UNIT[dtype] + 1e-6
    if dtype != torch.float32:
        approximate = dtype == torch.bfloat16 and logits.is_cuda  # by instructions that change a few elements
        assert (logits.grad != exact.grad.to(dtype)).float().mean() < (0.05 if approximate else 0.002)


def test_logits_stay_unless_in_place_is_asked_for(device):
    base, targets = torch.randn(20, 30, device=device, requires_grad=True), torch.arange(20, device=device)
    p, one_hot, logits = base.detach().softmax(1), F.one_hot(targets, 30), 1 * base
    loss = fused_cross_entropy(logits, targets) + logits.logsumexp(1).mean()  # right only if it is that of the logits
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], (2 * p - one_hot) / 20)
    for inplace in (False, True):
        with torch.no_grad():
            fused_cross_entropy(logits, targets, inplace=inplace)  # no gradient is asked for
        assert torch.equal(logits, base)
    (grad,) = torch.autograd.grad(fused_cross_entropy(logits, targets, inplace=True), logits)
    assert grad.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(grad, (p - one_hot) / 20)


# -- Only on a GPU


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31():
    n, v = 2**18 + 2, 8192
    logits = torch.zeros(n, v, device="cuda", dtype=torch.bfloat16)
    logits[-1, 5] = 4.0
    targets = torch.full((n,), -1, device="cuda")
    targets[0], targets[-1] = 7, 5
    losses, grad, _ = run_rows(kernels._rows_triton, logits[-1:], targets[-1:], torch.ones(1, device="cuda"))
    logits.requires_grad_()
    loss = fused_cross_entropy(logits, targets, reduction="sum")
    (all_grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, losses[0] + torch.tensor(float(v), device="cuda").log())
    assert torch.equal(all_grad[-1], grad[0]) and not all_grad[1:-1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss, operator", WAYS)
def test_no_host_sync(loss, operator, reduction):
    args = example(9000, 64, 1000, torch.bfloat16, torch.device("cuda"))
    loss(operator, *args, reduction=reduction).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(operator, *args, reduction=reduction).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak(step) -> int:
    """Bytes that a call takes at most beyond what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
def test_a_bf16_weight_of_a_large_vocabulary_costs_its_gradient_and_one_chunk():
    x, weight, targets = example(8192, 4096, 128256, torch.bfloat16, torch.device("cuda"))
    weight = weight.detach().bfloat16().requires_grad_()
    assert peak(lambda: fused_linear_cross_entropy(x, weight, targets, softcap=15.0).backward()) <= 2.2 * 2**30


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "mib"), [(65536, 220), (262144, 420)])
def test_extra_memory_is_bounded_and_without_gradients_one_chunk(n, mib):
    x, weight, targets = example(n, 512, 8192, torch.bfloat16, torch.device("cuda"))
    peaks = []
    for loss in (alone, alone, with_z_loss):  # the first one compiles
        x.grad = weight.grad = None
        step = functools.partial(loss, fused_linear_cross_entropy, x, weight, targets, softcap=15.0)
        peaks.append(peak(lambda step=step: step().backward()))
    assert max(peaks[1:]) <= mib * 2**20
    x.grad = weight.grad = None
    with torch.no_grad():
        forward = peak(lambda: fused_linear_cross_entropy(x, weight, targets, softcap=15.0))
    chunk = kernels._chunk_rows(n, 8192, 2, x.device) * 8192 * 2
    assert forward <= chunk + 8192 * 512 * 2 + 8 * 2**20
