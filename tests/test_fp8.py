"""train.Linear with FP8: F.linear's results but for FP8's rounding, at every scale."""

import pytest
import torch
import torch.nn.functional as F
from reference_model import relative_error

from train import Linear

K, N = 64, 48


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def layer(request):
    torch.manual_seed(0)
    with torch.device(request.param):
        if request.param == "cuda" and torch.cuda.get_device_capability()[0] not in (9, 10):
            pytest.skip("not on this GPU")
        yield Linear(K, N, fp8=True)


def results(layer, x, dy, linear=None):
    """Output and gradients in bf16 of x and of the weight. linear: instead of the layer."""
    x = x.to(torch.bfloat16).requires_grad_()
    y = layer(x) if linear is None else linear(x)
    return y, *torch.autograd.grad(y, (x, layer.weight), dy.to(torch.bfloat16))


def exact_results(layer, x, dy):
    return results(layer, x, dy, lambda x: F.linear(x, layer.weight.to(x.dtype)))


@pytest.mark.parametrize("shape", [(1,), (3, 100), (2, 5, 64)])
@pytest.mark.parametrize("scale", [1e-4, 1, 1e4])
def test_outputs_and_gradients_are_those_of_linear_but_for_rounding_at_every_scale(layer, shape, scale):
    x, dy = scale * torch.randn(*shape, K), torch.randn(*shape, N) / scale**2
    layer.weight.data *= scale
    found, exact = results(layer, x, dy), exact_results(layer, x, dy)
    for a, b, most in zip(found, exact, (0.06, 0.09, 0.01), strict=True):  # 3 bits of mantissa, 2, and 8
        assert a.shape == b.shape and a.dtype == b.dtype and relative_error(a, b) < most


def test_rows_between_those_that_set_the_scale_may_be_8_times_as_large_and_no_more(layer):
    x, dy = torch.randn(64, K), torch.randn(64, N)
    for factor, most in ((7, 0.06), (1000, None)):
        x[1] = factor * x[0].abs().amax() * torch.sign(torch.randn(K))
        (y, *grads), (exact, *_) = results(layer, x, dy), exact_results(layer, x, dy)
        assert all(t.isfinite().all() for t in (y, *grads))
        assert relative_error(y[1], exact[1]) < most if most else y[1].norm() < exact[1].norm() / 50
        rest = torch.arange(64, device=y.device) != 1
        assert relative_error(y[rest], exact[rest]) < 0.06


def test_tokens_a_million_times_apart_negative_inputs_zeros_and_nan_keep_what_they_are(layer):
    x, dy = -torch.rand(64, K), torch.randn(64, N)
    dy[1] *= 1e-6
    found, exact = results(layer, x, dy), exact_results(layer, x, dy)
    assert relative_error(found[0], exact[0]) < 0.06 and relative_error(found[1][1], exact[1][1]) < 0.09
    assert not any(t.any() for t in results(layer, 0 * x, 0 * dy))
    x[0, 0] = float("nan")
    assert results(layer, x, dy)[0].isnan().any()


def test_evaluation_other_dtypes_and_layers_without_it_have_no_fp8(layer):
    x = torch.randn(5, K).to(torch.bfloat16)
    exact = F.linear(x, layer.weight.to(x.dtype))
    assert not torch.equal(layer(x), exact)
    with torch.no_grad():
        assert torch.equal(layer(x), exact)
    assert torch.equal(layer(x.float()), F.linear(x.float(), layer.weight))
    layer.fp8 = False
    assert torch.equal(layer(x), exact)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_it_compiles_whole(layer, backend):
    x, dy = torch.randn(2, 64, K), torch.randn(2, 64, N)
    found = results(layer, x, dy, torch.compile(layer, fullgraph=True, backend=backend))
    for a, b in zip(found, results(layer, x, dy), strict=True):
        assert relative_error(a, b) < 0.01
