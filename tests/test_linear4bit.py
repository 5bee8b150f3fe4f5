"""The 4-bit linear: bitsandbytes' storage bit for bit, F.linear's results, no dequantized weight kept for backward."""

import copy

import bitsandbytes
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint

import kernels
from kernels import FLOATS, Linear4bit, dequantize_4bit, quantize_4bit

K, N = 192, 128  # three blocks of 64 per row; no other tensor below has K * N elements
UNIT = {dtype: torch.finfo(dtype).eps / 2 for dtype in FLOATS}  # the largest relative rounding error


def make_layer(device: torch.device, k: int = K, n: int = N, bias: bool = False, **options) -> Linear4bit:
    torch.manual_seed(0)
    return Linear4bit.from_linear(nn.Linear(k, n, bias=bias, device=device), **options)


def dequantized(layer: Linear4bit, dtype: torch.dtype) -> torch.Tensor:
    shape = (layer.out_features, layer.in_features)
    return dequantize_4bit(layer.packed, layer.absmax, shape, dtype, *layer.format)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("block_size", [32, 64, 1024])
@pytest.mark.parametrize("dtype", FLOATS)
def test_storage_and_dequantized_weights_are_those_of_bitsandbytes_bit_for_bit(quant_type, block_size, dtype, device):
    w = torch.randn(24, 2 * block_size, device=device, dtype=dtype)
    w[3] = 0  # absmax 0
    packed, absmax = quantize_4bit(w, quant_type, block_size)
    their_packed, state = bitsandbytes.functional.quantize_4bit(w, quant_type=quant_type, blocksize=block_size)
    assert torch.equal(packed, their_packed) and torch.equal(absmax, state.absmax)
    theirs = bitsandbytes.functional.dequantize_4bit(their_packed, state)
    strided = (torch.stack([t, t], 1)[:, 0] for t in (packed, absmax))
    assert torch.equal(dequantize_4bit(packed, absmax, w.shape, dtype, quant_type, block_size), theirs)
    flat = dequantize_4bit(*strided, (w.numel(),), dtype, quant_type, block_size)
    assert torch.equal(flat, theirs.flatten())


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("block_size", [32, 64, 1024, pytest.param(4096, marks=pytest.mark.slow)])  # bnb compiles that
@pytest.mark.parametrize("dtype", FLOATS)
def test_triton_dequantize_is_that_of_bitsandbytes_for_all_256_bytes(quant_type, block_size, dtype, device):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter truncates to bf16 instead of rounding")
    blocks = 5 if block_size > 64 else 37  # 37 blocks: the last program of the grid is only partly full
    packed = torch.arange(blocks * block_size // 2, device=device).to(torch.uint8)  # 0 to 255, again and again
    absmax = torch.rand(blocks, device=device)
    out = torch.empty(blocks, block_size, dtype=dtype, device=device)
    theirs = torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, block_size, quant_type, out.shape, dtype)
    kernels._dequantize_triton(packed, absmax, out, quant_type, block_size)
    assert torch.equal(out, theirs)


INPUTS = {  # of k features
    "one row": lambda k: torch.randn(1, 1, k),
    "few rows": lambda k: torch.randn(kernels.FEW_ROWS, k),
    "many rows": lambda k: torch.randn(1, kernels.FEW_ROWS + 1, k),
    "zero rows": lambda k: torch.randn(0, k),
    "transposed": lambda k: torch.randn(k, 6).T,
    "strided": lambda k: torch.randn(3, 2, 2 * k).transpose(0, 1)[..., ::2],
}


def assert_rounded(result: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, terms: int) -> None:
    """Every element sums at most `terms` products, in fp32 and in whatever order the BLAS likes, and is rounded to
    `dtype` at most twice: before and after the bias is added."""
    assert result.shape == exact.shape
    assert (result - exact).norm() <= (2 * UNIT[dtype] + terms * UNIT[torch.float32]) * exact.norm()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quant_type, block_size", [("nf4", 64), ("fp4", 32), ("nf4", 1024)])
@pytest.mark.parametrize("kind", INPUTS)
def test_output_and_gradients_are_those_of_f_linear_on_the_dequantized_weight(
    kind, quant_type, block_size, bias, dtype, device
):
    k = 3 * block_size
    layer = make_layer(device, k, bias=bias, trainable=True, quant_type=quant_type, block_size=block_size)
    x = INPUTS[kind](k).to(device, dtype).requires_grad_()
    biases = [layer.bias] if bias else []
    y = layer(x)
    dy = torch.randn_like(y)
    results = [y, *torch.autograd.grad(y, [x, layer.weight, *biases], dy)]
    assert [t.dtype for t in results] == [dtype, dtype, torch.float32, torch.float32][: len(results)]

    exact_inputs = [t.detach().to(dtype).double().requires_grad_() for t in (x, dequantized(layer, dtype), *biases)]
    exact_y = F.linear(*exact_inputs)
    exact_results = [exact_y, *torch.autograd.grad(exact_y, exact_inputs, dy.double())]
    for result, exact, rounded in zip(results, exact_results, [dtype, dtype, dtype, torch.float32], strict=False):
        assert_rounded(result, exact, rounded, max(k, N))  # the bias's gradient is summed up in fp32
    with torch.no_grad():
        assert_rounded(layer(x), exact_y, dtype, k)


def test_autocast_casts_x_and_leaves_absmax_in_fp32(device):
    layer, x = make_layer(device, trainable=True), torch.randn(4, K, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    torch.testing.assert_close(y, F.linear(x.bfloat16(), dequantized(layer, torch.bfloat16)))
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(layer.weight.grad, x.bfloat16().float().sum(0).expand(N, K), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("trainable", [False, True])
def test_no_dequantized_weight_is_saved_for_backward(trainable, backend, device):
    """A frozen layer saves packed and absmax alone; one with masters is tried with checkpointed activations."""
    torch._dynamo.reset()
    linears = [nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False)]
    model = nn.Sequential(*[Linear4bit.from_linear(linear.to(device), trainable) for linear in linears])
    run = (lambda x: checkpoint(model, x, use_reentrant=False)) if trainable else model
    compiled = run if backend == "eager" else torch.compile(run, backend=backend, fullgraph=True)
    x, kept = torch.randn(5, K, device=device, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = compiled(x)
    if not trainable:
        assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in model.buffers()}
    dense = {t.data_ptr() for t in kept if t.is_floating_point() and t.numel() == K * N}
    assert dense <= {p.data_ptr() for p in model.parameters()}
    dy, reference, inputs = torch.randn_like(y), model(x), [x, *model.parameters()]
    torch.testing.assert_close(y, reference)
    expected = torch.autograd.grad(reference, inputs, dy, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y, inputs, dy), expected)
    with pytest.raises(AssertionError, match="no second derivative"):
        torch.autograd.grad(reference, x, dy, create_graph=True)


@pytest.mark.parametrize("trainable", [False, True])
def test_state_dict_safetensors_deepcopy_and_to_device_carry_the_layer(trainable, tmp_path, device):
    layer = make_layer(torch.device("cpu"), bias=True, trainable=trainable, quant_type="fp4", block_size=32)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    loaded = Linear4bit(K, N, bias=True, trainable=trainable, quant_type="fp4", block_size=32)
    loaded.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    x = torch.randn(3, K)
    for copied in (loaded, copy.deepcopy(layer)):
        torch.testing.assert_close(copied.state_dict(), layer.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(copied(x), layer(x))
    names = {"packed", "absmax", "bias"} | ({"weight"} if trainable else set())
    assert set(layer.state_dict()) == names
    torch.testing.assert_close(loaded.to(device)(x.to(device)).cpu(), layer(x))


def test_requantized_weights_stay_in_place_and_a_compiled_layer_sees_them(device):
    torch._dynamo.reset()
    layer = Linear4bit(K, N, trainable=True).to(device)
    compiled, x = torch.compile(layer, backend="aot_eager", fullgraph=True), torch.randn(2, K, device=device)
    before, addresses = compiled(x), [t.data_ptr() for t in layer.buffers()]
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(compiled(x), before)
    torch.compile(layer.requantize_, backend="aot_eager", fullgraph=True)()
    assert before.any() and [t.data_ptr() for t in layer.buffers()] == addresses
    torch.testing.assert_close(compiled(x), 2 * before)


def test_a_tied_weight_stays_tied_and_in_its_optimizer(device):
    embed, head = nn.Embedding(N, K, device=device), nn.Linear(K, N, bias=False, device=device)
    head.weight = embed.weight
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    layer, before = Linear4bit.from_linear(head, trainable=True), head.weight.detach().clone()
    assert [*nn.ModuleList([embed, layer]).parameters()] == [embed.weight]
    layer(embed(torch.tensor([1], device=device))).sum().backward()
    optimizer.step()
    assert (layer.weight != before).any(1).all()
    half = Linear4bit.from_linear(nn.Linear(K, N, device=device, dtype=torch.bfloat16), trainable=True)
    assert half.weight.is_leaf and half.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_can_be_cast_and_absmax_keeps_its_bits(dtype, device):
    model = nn.Sequential(make_layer(device), nn.Linear(N, 4, device=device))
    x, before = torch.randn(4, K, device=device, dtype=torch.bfloat16), copy.deepcopy(model[0])
    assert model.to(dtype) is model and model[1].weight.dtype == dtype
    assert torch.equal(model[0].absmax, before.absmax) and torch.equal(model[0].packed, before.packed)
    assert model[0].absmax.dtype == torch.float32 and dict(model[0].named_buffers())["absmax"] is model[0].absmax
    assert torch.equal(model[0](x), before(x))
    assert model.to("meta")[0].absmax.device.type == "meta"


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_nan_and_inf_are_refused_by_quantize_and_surface_from_requantize(bad, device):
    layer = make_layer(device, trainable=True)
    with torch.no_grad():
        layer.weight[7, 100] = bad
    with pytest.raises(ValueError, match="NaN or inf"):
        quantize_4bit(layer.weight)
    layer.requantize_()  # never waits for the GPU, so it cannot raise
    finite = layer(torch.randn(4, K, device=device)).isfinite()
    assert not finite[:, 7].any() and finite[:, :7].all() and finite[:, 8:].all()


STORED = quantize_4bit(torch.ones(64, 64))


@pytest.mark.parametrize(
    "error, match, call",
    [
        (ValueError, "multiple of block_size=128", lambda d: quantize_4bit(torch.randn(4, K, device=d), "nf4", 128)),
        (ValueError, "multiple of block_size=64", lambda d: Linear4bit(65, N)),
        (ValueError, "48", lambda d: Linear4bit(K, N, block_size=48)),
        (ValueError, "'int4'", lambda d: Linear4bit(K, N, quant_type="int4")),
        (TypeError, "float64", lambda d: quantize_4bit(torch.randn(4, K, device=d, dtype=torch.float64))),
        (TypeError, "float64", lambda d: dequantize_4bit(*STORED, (64, 64), torch.float64)),
        (ValueError, "float64", lambda d: make_layer(d)(torch.randn(4, K, device=d, dtype=torch.float64))),
        (ValueError, "not .*4096", lambda d: dequantize_4bit(*STORED, (64, 128), FLOATS[0])),
        (ValueError, "on meta", lambda d: dequantize_4bit(STORED[0], STORED[1].to("meta"), (64, 64), FLOATS[0])),
        (ValueError, "on meta", lambda d: make_layer(d)(torch.randn(4, K, device="meta"))),
        (ValueError, f"need .*{K}.*64", lambda d: make_layer(d)(torch.randn(4, 64, device=d))),  # which divides K * N
    ],
)
def test_what_cannot_work_is_refused_with_its_values(error, match, call, device):
    with pytest.raises(error, match=match):
        call(device)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [2**24, 2**25 - 1])  # 2^30 weights; bitsandbytes' most, with a partial last program
def test_the_last_of_two_billion_weights_are_those_of_a_small_tensor(blocks, device):
    w, ends = torch.zeros(blocks, 64, dtype=torch.bfloat16, device=device), torch.randn(6, 64, device=device).bfloat16()
    w[:3], w[-3:] = ends.chunk(2)
    stored = quantize_4bit(w)
    w = dequantize_4bit(*stored, w.shape, w.dtype)
    assert torch.equal(torch.cat([w[:3], w[-3:]]), dequantize_4bit(*quantize_4bit(ends), ends.shape, w.dtype))
    assert not w[3:-3].any()


@pytest.mark.gpu
def test_requantize_takes_less_than_one_more_parameter_and_never_syncs(device):
    layer = Linear4bit(2048, 2048, trainable=True).to(device)
    layer.requantize_()
    torch.cuda.reset_peak_memory_stats()
    live = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.requantize_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - live <= layer.weight.nbytes


@pytest.mark.gpu
def test_peak_of_a_forward_is_one_dequantized_weight(device):
    stack = nn.Sequential(*[make_layer(device, 2048, 2048) for _ in range(4)])
    x = torch.randn(32, 2048, device=device, dtype=torch.bfloat16, requires_grad=True)  # more than FEW_ROWS
    stack(x)
    torch.cuda.reset_peak_memory_stats()
    live, weight = torch.cuda.memory_allocated(), 2048 * 2048 * 2
    y = stack(x)
    assert torch.cuda.memory_allocated() - live < 0.1 * weight  # y and three hidden activations of 128 KiB
    assert torch.cuda.max_memory_allocated() - live < 1.2 * weight
    y.sum().backward()
