"""Each way of bench_experts.py computes the same experts, and compiles into one graph."""

import bench_experts
import pytest
import torch
import torch.nn.functional as F
import triton

import train

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from Triton's interpreter


def results(experts, x, compiled=False) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    experts.zero_grad()
    y = (torch.compile(experts, backend="aot_eager", fullgraph=True) if compiled else experts)(x)
    (y * torch.linspace(-1, 1, y.size(-1), device=x.device)).sum().backward()
    return [y.detach(), x.grad, experts.c_fc.grad, experts.c_proj.grad, experts.router.weight.grad]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["loop", "triton", "batch"])
def test_each_way_computes_the_same(way, device, monkeypatch):
    if way == "triton" and device.type == "cpu" and triton.__version__ < "3.7":
        pytest.skip("Triton 3.6's interpreter takes no tensor as the end of a range")
    config = train.Config(
        depth=1, n_embd=32, head_dim=16, seq_len=64, window=64, full_heads=1, device_batch_size=2, total_batch_size=128,
        ngram_rows=64, num_experts=4, experts_per_token=2,
    )  # fmt: skip
    torch.manual_seed(0)
    experts, x = train.Experts(config).to(device), torch.randn(2, 64, 32, device=device)
    with torch.no_grad():
        for p in experts.parameters():
            p.normal_(0, 0.2)
    expected = results(experts, x)
    monkeypatch.setattr(bench_experts, "CAPACITY", 4)  # no token is dropped
    monkeypatch.setattr(train, "Experts", train.Experts)  # restored later, as is
    monkeypatch.setattr(F, "grouped_mm", F.grouped_mm)
    bench_experts.set_up(way)
    torch._dynamo.reset()
    other = train.Experts(config).to(device)
    other.load_state_dict(experts.state_dict())
    for compiled in (False, True):
        for result, reference in zip(results(other, x, compiled), expected, strict=True):
            torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-4 if device.type == "cpu" else 1e-2)
