"""Claims about the models of GPUs, and about what a T4 runs."""

import dataclasses

import bench_gpu
import pytest
import torch
import torch.nn.functional as F
from record_kernels import ATTENTION_TILE, Recorder

import train

T4 = bench_gpu.size_for("T4")


def test_the_published_port_takes_what_it_took():
    predicted = bench_gpu.predict(bench_gpu.PORT)
    assert predicted["tokens_per_sec"] == pytest.approx(63.4e3, rel=0.25)
    assert predicted["memory_gb"] == pytest.approx(2497 / 1024, rel=0.25)


def test_recorded_flops_are_those_that_train_counts():
    predicted = bench_gpu.predict(T4)
    flops = {"GEMM": 0.0, "attention forward": 0.0, "attention backward": 0.0}
    for kernel in predicted["recorder"].kernels:
        if kernel.flops and kernel.where not in ("bmm", "baddbmm"):  # Newton-Schulz
            flops[kernel.kind] += kernel.flops / T4.total_batch_size  # a KeyError is a GEMM in fp32
    table = train.layers(T4)
    # the lower triangle and half a tile, where train.py counts the square
    pieces = [T4.seq_len // layer.window + (layer.shift > 0 and layer.window < T4.seq_len) for layer in table]
    triangles = [n * layer.window * (layer.window + ATTENTION_TILE) for n, layer in zip(pieces, table, strict=True)]
    assert flops["attention forward"] == 2 * T4.n_embd * sum(triangles) / T4.seq_len
    assert flops["attention backward"] == 2.5 * flops["attention forward"]
    squares = sum(12 * T4.n_embd * layer.window for layer in table)
    assert flops["GEMM"] + squares == pytest.approx(predicted["flops_per_token"], rel=0.02)


def test_a_t4_is_given_nothing_that_it_lacks():
    recorder = bench_gpu.predict(T4)["recorder"]
    attention = {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
    assert {op for op in recorder.ops if "attention" in op or "softmax" in op} == attention
    assert not recorder.dtypes & {torch.bfloat16, torch.float64}


def test_what_a_t4_lacks_would_be_seen():
    recorder, *_ = bench_gpu.record(T4, "T4", evaluation=True, capability=(8, 0))
    assert torch.bfloat16 in recorder.dtypes
    assert not any("efficient_attention" in op for op in recorder.ops)


def test_twice_the_batch_takes_twice_the_time_and_one_optimizer_step():
    once = bench_gpu.predict(T4)
    twice = bench_gpu.predict(dataclasses.replace(T4, total_batch_size=2 * T4.total_batch_size))
    assert 1.8 < twice["seconds"] / once["seconds"] < 2
    for where, times in [("mlp", 2), ("attn", 2), ("cross-entropy", 2), ("muon_update", 1), ("baddbmm", 1)]:
        launches = [sum(row[3] for key, row in p["rows"].items() if where in key) for p in (once, twice)]
        assert launches[1] == times * launches[0] > 0


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


def test_a_gemm_separates_what_is_before_it_from_what_follows():
    kernels = record(lambda x, w: F.relu(x + 1) @ w + x, (N, D), (D, D))
    gemm = ("GEMM", 2 * N * D * D, (2 * N * D + D * D) * 2)
    assert sorted(kernels) == sorted([gemm, ("memory", 0, 2 * N * D * 2), ("memory", 0, 3 * N * D * 2)])


def test_a_sum_over_everything_is_read_by_a_later_kernel():
    kernels = record(lambda x: x / x.sum(), (N, D))
    assert sorted(kernels) == sorted([("memory", 0, N * D * 2 + 2), ("memory", 0, 2 * N * D * 2 + 2)])
