"""The recipes of docs/kernels.md, run as they stand there, against float64 and bitsandbytes."""

import re
from pathlib import Path

import bitsandbytes
import pytest
import torch
import torch.nn.functional as F
from reference_model import relative_error as error

import kernels

PAGE = (Path(__file__).parent.parent / "docs" / "kernels.md").read_text()
RECIPES = dict(re.findall(r"^\*\*([\w -]+)\*\*.*?```python\n(.*?)```", PAGE, re.M | re.S))
assert len(RECIPES) == PAGE.count("```python") == 5, "a test below runs each"


def run(title: str, **names) -> dict:
    names |= {"torch": torch, "F": F, "bitsandbytes": bitsandbytes} | vars(kernels)
    exec(RECIPES[title], names)
    return names


LOSSES = {
    "A bias": lambda z, y, bias, c: F.cross_entropy(z + bias, y, ignore_index=-1),
    "Class weights": lambda z, y, bias, c: F.cross_entropy(z, y, weight=c, ignore_index=-1),
    "Label smoothing": lambda z, y, bias, c: F.cross_entropy(z, y, label_smoothing=0.1, ignore_index=-1),
}


@pytest.mark.parametrize("title", LOSSES)
def test_losses_and_gradients_match_float64(title, device):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(n, generator=generator).to(device) for n in ((60, 16), (30, 16), 30))
    targets = (torch.arange(60, device=device) % 31) - 1
    class_weight = torch.linspace(0.5, 2, 30, device=device)
    ours = [t.requires_grad_() for t in (x, weight, bias)]
    exact = [t.detach().double().requires_grad_() for t in ours]
    loss = run(title, x=x, weight=weight, bias=bias, targets=targets, class_weight=class_weight)["loss"]
    expected = LOSSES[title](exact[0] @ exact[1].T, targets, exact[2], class_weight.double())
    loss.backward()
    expected.backward()
    assert error(loss, expected) < 1e-6
    for t, e in zip(ours, exact, strict=True):
        assert (t.grad is None) == (e.grad is None)
        assert t.grad is None or error(t.grad, e.grad) < 4e-6


def test_token_accuracy(device):
    weight = torch.eye(16, device=device)
    targets = torch.arange(64, device=device) % 16
    x = F.one_hot(targets, 16).float()
    x[:16] = -x[:16]  # 16 wrong ones, of which 8 are ignored
    targets[8:16] = -1
    assert run("Token accuracy", x=x, weight=weight, targets=targets)["accuracy"].item() == pytest.approx(48 / 56)


@pytest.mark.parametrize("nested", [True, False])
def test_a_layer_saved_by_bitsandbytes(nested, device):
    torch.manual_seed(0)
    theirs = bitsandbytes.nn.Linear4bit(128, 64, bias=nested, compress_statistics=nested, quant_type="nf4").to(device)
    x, saved = torch.randn(3, 128, device=device), theirs.state_dict()
    assert ("weight.nested_absmax" in saved) == nested
    layer = run("A 4-bit layer saved by bitsandbytes", saved=dict(saved), device=device)["layer"]
    torch.testing.assert_close(layer(x), theirs(x))
    assert layer.absmax.dtype == torch.float32
