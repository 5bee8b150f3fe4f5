"""Claims about the models of GPUs, and about what a T4 runs."""

import dataclasses
import itertools

import bench_gpu
import bench_train
import pytest
import torch
import torch.nn.functional as F
from record_kernels import ATTENTION_TILE, Recorder

import harness
import train

T4 = bench_gpu.size_for("T4")
SMALL = dataclasses.replace(T4, depth=2, ngram_rows=1000)


@pytest.mark.slow
def test_the_published_port_takes_what_it_took():
    predicted = bench_gpu.predict(bench_gpu.PORT)
    assert predicted["tokens_per_sec"] == pytest.approx(60.8e3, rel=0.05)  # 279 timed steps
    assert predicted["memory_gb"] == pytest.approx(2497 / 1024, rel=0.06)


BEFORE = dict(depth=9, n_embd=640, num_experts=0, seq_len=2048, device_batch_size=64, ngram_rows=2_621_440)


@pytest.mark.slow
@pytest.mark.parametrize("size, tokens_per_sec, memory_gb", [(BEFORE, 1.224e6, 41.4), ({}, 1.119e6, 77.9)])
def test_an_h200_takes_what_it_took(size, tokens_per_sec, memory_gb):
    """The model counts products in FP8 as in bf16; in return, experts in fewer layers gain more than on an H200."""
    config = dataclasses.replace(bench_gpu.size_for("H200"), **size)
    predicted = bench_gpu.predict(config, "H200")
    assert predicted["attention"] == "fa3"
    assert predicted["tokens_per_sec"] == pytest.approx(tokens_per_sec, rel=0.05)
    assert predicted["memory_gb"] == pytest.approx(memory_gb, rel=0.06)


@pytest.mark.slow
def test_an_h200_takes_for_the_shape_of_autoresearch_what_it_took(monkeypatch):
    for name in ("pick_size", "scale_batch", "NGRAMS"):
        monkeypatch.setattr(train, name, getattr(train, name))  # restored later
    for owner, method in ((train.Attention, "forward"), (train.GPT, "forward"), (train.GPT, "trunk")):
        monkeypatch.setattr(owner, method, getattr(owner, method))
    exec(bench_train.RECIPES["same-shape"], {"train": train})
    predicted = bench_gpu.predict.__wrapped__(train.pick_size(0), "H200")
    bench_gpu.record.cache_clear()  # of the recipe's changes
    assert 1e3 * predicted["seconds"] == pytest.approx(275, rel=0.15)
    assert predicted["memory_gb"] == pytest.approx(43_584 / 1024, rel=0.15)


@pytest.mark.parametrize(
    "n, d, v, milliseconds", [(65536, 512, 8192, 3.34), (262144, 512, 8192, 13.3), (8192, 4096, 128256, 38.6)]
)
def test_an_h100_takes_for_the_cross_entropy_what_it_took(n, d, v, milliseconds):
    x, weight = torch.empty(n, d, device="meta"), torch.empty(v, d, device="meta")
    kernels = bench_gpu.cross_entropy(bench_gpu.chunk_rows("H100", v), (x, weight), (None, x, weight))
    seconds = sum(map(bench_gpu.rates("H100").seconds, kernels))
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize(
    "fa3, length, window, milliseconds",
    [(True, 2048, 2048, 2.81), (True, 2048, 256, 1.54), (False, 2048, 2048, 3.02), (False, 256, 256, 1.36)],
)
def test_an_h200_takes_for_attention_what_it_took(fa3, length, window, milliseconds):
    """Forward and backward, 64 x 2048 tokens, 5 heads of 128; without FA3 in pieces."""
    q = torch.empty(64 * 2048 // length, length, 5, 128, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(len(q), 5, length, device="meta")
    forward = bench_gpu.flash_kernel(False, (q, q, q, window), (q, lse))
    backward = bench_gpu.flash_kernel(True, (q, q, q, q, q, lse, window), (q, q, q))
    seconds = sum(map(bench_gpu.rates("H200", fa3).seconds, forward + backward))
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.2)


def test_attention_computes_what_the_mask_keeps_and_half_a_tile_at_each_edge():
    B, T, H, D, W = 2, 1024, 3, 64, 128
    q = torch.empty(B, T, H, D, dtype=torch.bfloat16, device="meta")
    for window, edges in [(T, 1), (W, 1 + (T - W) / T)]:
        distance = torch.arange(T)[:, None] - torch.arange(T)
        pairs = ((distance >= 0) & (distance < window)).sum().item()  # of a query and a key
        [kernel] = bench_gpu.flash_kernel(False, (q, q, q, window), (q, torch.empty(0)))
        expected = 2 * 2 * B * H * D * (pairs + T * edges * bench_gpu.FLASH_TILE / 2)
        assert kernel.flops == pytest.approx(expected, rel=0.01)


def test_every_gpu_with_a_name_has_rates_and_a_faster_one_is_not_slower():
    for gpu in harness.GPUS:
        peak, rates = harness.named_gpu(gpu).peak_flops, bench_gpu.rates(gpu)
        assert bench_gpu.MEMORY[gpu][1] * 0.7 < rates.memory < bench_gpu.MEMORY[gpu][1]
        assert max(rates.attention_forward, rates.attention_backward) < rates.gemm < peak
    order = ("T4", "L4", "A100", "H100", "H200", "B200")
    for slower, faster in itertools.pairwise(order):
        one, other = bench_gpu.rates(slower), bench_gpu.rates(faster)
        assert one.gemm <= other.gemm and one.scatter <= other.scatter


@pytest.mark.slow
def test_each_gpu_runs_its_own_numerics():
    def dtypes_and_ops(gpu, fa3):
        recorder, model, _ = bench_gpu.record(SMALL, harness.GPUS[gpu][0], 4096, evaluation=True, fa3=fa3)
        windows = {kernel.kind for kernel in recorder.kernels if "window" in kernel.kind}
        return model.dtype, model.attention, bool(windows), "flash_forward" in recorder.ops

    assert dtypes_and_ops("V100", True) == (torch.float16, "sdpa", False, False)
    assert dtypes_and_ops("H100", False) == (torch.bfloat16, "fa2", True, True)
    assert dtypes_and_ops("H100", True) == (torch.bfloat16, "fa3", True, True)


def test_a_model_that_is_too_large_gets_a_smaller_device_batch(monkeypatch):
    monkeypatch.setattr(bench_gpu, "predict", lambda config, *_: {"memory_gb": config.device_batch_size})  # 1 GiB each
    config = dataclasses.replace(T4, device_batch_size=64, total_batch_size=2**17)
    for gpu, sequences in [("H100", 64), ("A100", 32), ("RTX3090", 16), ("RTX3060", 8)]:
        assert bench_gpu.fit(config, gpu) == dataclasses.replace(config, device_batch_size=sequences)


@pytest.fixture(scope="module")
def predicted():
    return bench_gpu.predict(T4)


@pytest.mark.slow
def test_recorded_flops_are_those_that_train_counts(predicted):
    flops = {"GEMM": 0.0, "attention forward": 0.0, "attention backward": 0.0}
    for kernel in predicted["recorder"].kernels:
        if kernel.kind not in ("memory", "scatter") and kernel.where not in ("bmm", "baddbmm"):  # Newton-Schulz
            flops[kernel.kind] += kernel.flops / T4.total_batch_size  # a KeyError is a GEMM in fp32
    T, H, triangles, squares = T4.seq_len, T4.n_embd // T4.head_dim, 0, 0
    for layer in (block.attn for block in predicted["model"].blocks):
        pieces = T // layer.window + bool(layer.shift)
        squares += H * T * layer.window
        # the lower triangle and half a tile, where train.py counts the square
        triangles += H * pieces * layer.window * (layer.window + ATTENTION_TILE)
    assert flops["attention forward"] == 2 * T4.head_dim * triangles / T
    assert flops["attention backward"] == 2.5 * flops["attention forward"]
    assert flops["GEMM"] + 12 * T4.head_dim * squares / T == pytest.approx(predicted["flops_per_token"], rel=0.02)


@pytest.mark.slow
def test_a_t4_is_given_nothing_that_it_lacks(predicted):
    recorder = predicted["recorder"]
    attention = {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
    assert {op for op in recorder.ops if "attention" in op or "softmax" in op} == attention
    assert torch.float16 in recorder.dtypes and not recorder.dtypes & {torch.bfloat16, torch.float64}


def record(fn, *shapes):
    tensors = [torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes]
    with Recorder({}) as recorder:
        torch.compile(fn)(*tensors)
    return [(kernel.kind, kernel.flops, kernel.bytes) for kernel in recorder.kernels]


N, D = 1024, 256


def test_pointwise_ops_and_row_reductions_are_one_kernel_that_reads_and_writes_once():
    def normalized(x, y):
        z = torch.sigmoid(x) * y + 1
        return z / z.sum(-1, keepdim=True)

    assert record(normalized, (N, D), (N, D)) == [("memory", 0, 3 * N * D * 2)]


def test_attention_with_a_mask_computes_the_whole_square():
    T, bias = 256, [(1, 2, 256, 256)]
    for masks, keys in (([], (T + ATTENTION_TILE) / 2), (bias, T)):

        def attend(q, k, v, mask=None):
            return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, False, 0.0, mask is None)[0]

        (kind, flops, _), *_ = record(attend, *[(1, 2, T, 64)] * 3, *masks)
        assert (kind, flops) == ("attention forward", 2 * 2 * 2 * T * 64 * keys)


def test_a_gemm_separates_what_is_before_it_from_what_follows():
    kernels = record(lambda x, w: F.relu(x + 1) @ w + x, (N, D), (D, D))
    gemm = ("GEMM", 2 * N * D * D, (2 * N * D + D * D) * 2)
    assert sorted(kernels) == sorted([gemm, ("memory", 0, 2 * N * D * 2), ("memory", 0, 3 * N * D * 2)])


def test_a_sum_over_everything_is_read_by_a_later_kernel():
    kernels = record(lambda x: x / x.sum(), (N, D))
    assert sorted(kernels) == sorted([("memory", 0, N * D * 2 + 2), ("memory", 0, 2 * N * D * 2 + 2)])
