"""The models of GPUs predict what was measured, and a T4 runs nothing that it lacks."""

import dataclasses

import bench_gpu
import bench_train
import pytest
import torch

import train

pytestmark = pytest.mark.slow
T4, H200 = bench_gpu.size_for("T4"), bench_gpu.size_for("H200")
DENSE = dict(depth=9, n_embd=640, num_experts=0, seq_len=2048, device_batch_size=64, ngram_rows=2_621_440)


@pytest.mark.parametrize(
    ("config", "gpu", "tokens_per_sec", "memory_gb"),
    [
        (bench_gpu.PORT, "T4", 60.8e3, 2497 / 1024),  # 279 timed steps
        (dataclasses.replace(H200, **DENSE), "H200", 1.224e6, 41.4),
        (H200, "H200", 1.119e6, 77.9),
    ],
    ids=["port", "dense", "H200"],
)
def test_whole_runs_take_what_they_took(config, gpu, tokens_per_sec, memory_gb):
    """Products in FP8 count as in bf16; in return, experts in fewer layers gain more than on an H200."""
    predicted = bench_gpu.predict(config, gpu)
    assert predicted["tokens_per_sec"] == pytest.approx(tokens_per_sec, rel=0.05)
    assert predicted["memory_gb"] == pytest.approx(memory_gb, rel=0.06)


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


def test_a_t4_is_given_nothing_that_it_lacks():
    recorder = bench_gpu.predict(T4)["recorder"]
    attention = {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
    assert {op for op in recorder.ops if "attention" in op or "softmax" in op} == attention
    assert torch.float16 in recorder.dtypes and not recorder.dtypes & {torch.bfloat16, torch.float64}
