"""Claims about the model of a T4, and about what the turing row runs there."""

import dataclasses

import bench_t4
import pytest
import torch
import torch.nn.functional as F
from record_kernels import ATTENTION_TILE, Recorder

import train

TURING = train.PLATFORMS["turing"]


def test_the_published_port_takes_what_it_took():
    predicted = bench_t4.predict(bench_t4.PORT)
    assert predicted["tokens_per_sec"] == pytest.approx(63.4e3, rel=0.25)
    assert predicted["memory_gb"] == pytest.approx(2497 / 1024, rel=0.25)


def test_recorded_flops_are_those_that_train_counts():
    predicted = bench_t4.predict(TURING)
    flops = {"GEMM": 0.0, "attention forward": 0.0, "attention backward": 0.0}
    for kernel in predicted["recorder"].kernels:
        if kernel.flops and kernel.where not in ("bmm", "baddbmm"):  # Newton-Schulz
            flops[kernel.kind] += kernel.flops / TURING.total_batch  # a KeyError is a GEMM in fp32
    with torch.device("meta"):
        blocks = train.GPT(TURING, vocab_size=8).blocks
        windows = [block.attn.window for block in blocks]
        shifts = [block.attn.shift for block in blocks]
    # the lower triangle and half a tile, where train.py counts the square
    pieces = [TURING.seq_len // window + (shift > 0) for window, shift in zip(windows, shifts, strict=True)]
    triangles = [n * window * (window + ATTENTION_TILE) for n, window in zip(pieces, windows, strict=True)]
    assert flops["attention forward"] == 2 * TURING.n_embd * sum(triangles) / TURING.seq_len
    assert flops["attention backward"] == 2.5 * flops["attention forward"]
    squares = sum(12 * TURING.n_embd * window for window in windows)
    assert flops["GEMM"] + squares == pytest.approx(predicted["flops_per_token"], rel=0.02)


def test_the_turing_row_runs_nothing_that_a_t4_lacks():
    recorder = bench_t4.predict(TURING)["recorder"]
    attention = {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
    assert {op for op in recorder.ops if "attention" in op or "softmax" in op} == attention
    assert not recorder.dtypes & {torch.bfloat16, torch.float64}


def test_what_a_t4_lacks_would_be_seen():
    recorder, *_ = bench_t4.record(dataclasses.replace(TURING, dtype=torch.bfloat16), evaluation=True)
    assert torch.bfloat16 in recorder.dtypes
    assert not any("efficient_attention" in op for op in recorder.ops)


def test_twice_the_batch_takes_twice_the_time_and_one_optimizer_step():
    once = bench_t4.predict(TURING)
    twice = bench_t4.predict(dataclasses.replace(TURING, total_batch=2 * TURING.total_batch))
    assert 1.8 < twice["seconds"] / once["seconds"] < 2
    for where, times in [("MLP", 2), ("cross-entropy", 2), ("update", 1)]:
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
