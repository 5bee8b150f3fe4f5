"""The loop of bench_experts.py computes the same experts as F.grouped_mm, and compiles into one graph."""

import bench_experts
import pytest
import torch
import torch.nn.functional as F

import train

CONFIG = train.Config(
    depth=1, n_embd=32, head_dim=16, seq_len=64, window=64, device_batch_size=2, total_batch_size=128,
    ngram_rows=64, num_experts=4, experts_per_token=2,
)  # fmt: skip


@pytest.mark.slow
def test_a_loop_over_the_experts_computes_the_same(device, monkeypatch):
    torch.manual_seed(0)
    experts, x = train.Experts(CONFIG).to(device), torch.randn(2, 64, 32, device=device, requires_grad=True)
    inputs = [x, *experts.parameters()]
    with torch.no_grad():
        for p in experts.parameters():
            p.normal_(0, 0.2)

    def results(experts) -> list[torch.Tensor]:
        y = experts(x)
        return [y.detach(), *torch.autograd.grad(y, inputs, torch.linspace(-1, 1, 32, device=device).expand_as(y))]

    expected = results(experts)
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, offs: bench_experts.loop_rows(a, b, offs))
    torch._dynamo.reset()
    for way in (experts, torch.compile(experts, backend="aot_eager", fullgraph=True)):
        for result, reference in zip(results(way), expected, strict=True):
            torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-4 if device.type == "cpu" else 1e-2)
