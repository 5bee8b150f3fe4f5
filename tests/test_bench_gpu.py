"""The models of GPUs predict what was measured, and a T4 runs nothing that it lacks."""

import dataclasses

import bench_gpu
import bench_train
import pytest
import torch
import torch.nn.functional as F
from record_kernels import ATTENTION_TILE, Recorder

import train

T4, H200 = bench_gpu.size_for("T4"), bench_gpu.size_for("H200")
# The model counts products in FP8 as in bf16; in return, experts in fewer layers gain more than on an H200
BEFORE = dataclasses.replace(
    H200, depth=9, n_embd=640, num_experts=0, seq_len=2048, device_batch_size=64, ngram_rows=2_621_440
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "gpu", "tokens_per_sec", "memory_gb"),
    [
        (bench_gpu.PORT, "T4", 60.8e3, 2497 / 1024),  # 279 timed steps
        (BEFORE, "H200", 1.224e6, 41.4),
        (H200, "H200", 1.119e6, 77.9),
    ],
    ids=["port", "before experts", "H200"],
)
def test_whole_runs_take_what_they_took(config, gpu, tokens_per_sec, memory_gb):
    predicted = bench_gpu.predict(config, gpu)
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


@pytest.mark.slow
def test_a_t4_is_given_nothing_that_it_lacks_and_the_flops_that_train_counts():
    predicted = bench_gpu.predict(T4)
    recorder = predicted["recorder"]
    attention = {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
    assert {op for op in recorder.ops if "attention" in op or "softmax" in op} == attention
    assert torch.float16 in recorder.dtypes and not recorder.dtypes & {torch.bfloat16, torch.float64}
    flops = {"GEMM": 0.0, "attention forward": 0.0, "attention backward": 0.0}
    for kernel in recorder.kernels:
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


def test_pointwise_ops_and_row_reductions_are_one_kernel_and_a_gemm_ends_it():
    def normalized(x, w):
        z = torch.sigmoid(x) * x + 1
        return F.relu(z / z.sum(-1, keepdim=True)) @ w + x

    N, D = 1024, 256
    x, w = (torch.empty(n, D, dtype=torch.float16, device="meta") for n in (N, D))
    with Recorder({}) as recorder:
        torch.compile(normalized)(x, w)
    gemm = ("GEMM", 2 * N * D * D, (2 * N * D + D * D) * 2)
    expected = [gemm, ("memory", 0, 2 * N * D * 2), ("memory", 0, 3 * N * D * 2)]
    assert sorted((kernel.kind, kernel.flops, kernel.bytes) for kernel in recorder.kernels) == expected
