"""The loop of bench_experts.py computes the same experts as F.grouped_mm, and compiles into one graph."""

import bench_experts
import pytest
import torch
import torch.nn.functional as F

import train


@pytest.mark.slow
def test_a_loop_over_the_experts_computes_the_same(device, monkeypatch):
    torch.manual_seed(0)
    config = train.Config(1, 32, 16, 64, 64, 2, 128, ngram_rows=64, num_experts=4)
    experts, x = train.Experts(config).to(device), torch.randn(2, 64, 32, device=device, requires_grad=True)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.2)

    def results(experts) -> list[torch.Tensor]:
        y = experts(x)
        dy = torch.linspace(-1, 1, 32, device=device).expand_as(y)
        return [y, *torch.autograd.grad(y, [x, *experts.parameters()], dy)]

    expected = results(experts)
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, offs: bench_experts.loop_rows(a, b, offs))
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    for result, reference in zip(results(experts) + results(compiled), 2 * expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-4 if device.type == "cpu" else 1e-2)
