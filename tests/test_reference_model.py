"""The model that ships computes what reference_model.py says: logits, loss, gradients, and the initial weights.

A branch that changes the model is not asked to pass this file: delete it there.
"""

import dataclasses
import math
import re

import pytest
import reference_model as reference
import torch
import torch.nn.functional as F
from reference_model import relative_error

import train

CONFIG = train.Config(
    depth=4, n_embd=48, head_dim=16, seq_len=24, window=8, device_batch_size=2, total_batch_size=48,
    ngram_rows=64, vocab_size=40,
)  # fmt: skip
T = CONFIG.seq_len
LAYERS = {  # (window, shift) of each; shift None: windows slide
    "cuts in one place": ((T, 0), (8, 0), (12, 0), (T, 0)),
    "shifted cuts": ((8, 0), (12, 3), (8, 4), (T, T // 2)),
    "some windows slide": ((T, None), (12, 3), (7, None), (12, 0)),
}


def build(layers: str, attention="sdpa", dtype=torch.float32, experts=(0, 1)) -> train.GPT:
    """A model with its initial weights. layers: a key of LAYERS; experts: how many, and how many to a token."""
    config = dataclasses.replace(CONFIG, num_experts=experts[0], experts_per_token=experts[1])
    model = train.GPT(config, dtype, attention)
    model.init_weights()
    for block, values in zip(model.blocks, LAYERS[layers], strict=True):
        block.attn.window, block.attn.shift = values
    return model


def kind_of(name: str) -> str:
    """The parameter's name without the number of its layer or n-gram."""
    return re.sub(r"\.\d+|\.weight", "", name).removeprefix("blocks.")


SCALES = {"lm_head": 1.5, "_lambda": 0.4, "gate": 0.3, "embed": 1.0, "bias": 0.1}  # of the rest: by their width


def lively(model: train.GPT) -> dict[str, torch.Tensor]:
    """Draws weights far from their initial values; returns them in float64, with gradients."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, p in model.state_dict().items():
        scale = next((scale for part, scale in SCALES.items() if part in name), 1.5 * p.shape[-1:].numel() ** -0.5)
        p.copy_(("residual" in name) + scale * torch.randn(p.shape, generator=generator))
        weights[name] = p.double().requires_grad_()
    return weights


def random_tokens(length: int = T + 1) -> torch.Tensor:
    """The second half repeats a part of the first one, so that induction finds something."""
    tokens = torch.randint(CONFIG.vocab_size, (2, T + 1), generator=torch.Generator().manual_seed(1))
    tokens[:, 14:20] = tokens[:, 3:9]
    return tokens[:, :length]


def reference_logits(model, weights, x) -> torch.Tensor:
    sliding = model.attention != "sdpa"
    layers = tuple(block.attn for block in model.blocks)
    of = reference.Model(layers, CONFIG.head_dim, sliding, train.ROPE_BASE, train.SOFTCAP)
    return torch.stack([reference.logits(of, weights, row.tolist()) for row in x])


def assert_agrees(model, tolerance: float, length: int = T) -> None:
    """Logits, loss and the gradient of every parameter, against float64; no gradient is missing, and none is zero.

    Errors are relative to the gradients of that kind of weight in all layers: one scalar's may happen to be near zero.
    """
    weights, tokens = lively(model), random_tokens(length + 1)
    x, y = tokens[:, :-1], tokens[:, 1:]
    logits, expected = model(x), reference_logits(model, weights, x)
    assert 5 < expected.abs().max() < train.SOFTCAP, "the softcap bends the logits"
    assert relative_error(logits, expected) < tolerance
    loss, expected = model(x, y), F.cross_entropy(expected.flatten(0, 1), y.flatten())
    assert logits.dtype == loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance / 10, atol=0)
    loss.backward()
    expected.backward()
    parameters = dict(model.named_parameters())
    for kind in set(map(kind_of, parameters)):
        pairs = [(p.grad, weights[name].grad) for name, p in parameters.items() if kind_of(name) == kind]
        size = math.hypot(*(expected.norm() for _, expected in pairs))
        for grad, expected in pairs:
            assert expected.norm() > 1e-5, f"{kind}: the reference does not use it"
            assert (grad.double() - expected).norm() < 2 * tolerance * size, kind


@pytest.mark.parametrize("layers, length", [*((layers, T) for layers in LAYERS), ("cuts in one place", 17)])
@pytest.mark.parametrize("attention", ["sdpa", "fa3", "fa2"])
def test_logits_and_gradients_are_those_of_the_formulas(attention, layers, length, exact_windows):
    """Attention in pieces, of which the last may be short, and windows that slide, for which a shift means nothing."""
    assert_agrees(build(layers, attention), 1e-4, length)


@pytest.mark.parametrize("experts, per_token", [(2, 1), (4, 2), (3, 3), (32, 2)])
def test_logits_and_gradients_of_experts_are_those_of_the_formulas(experts, per_token):
    """So no token is dropped, however uneven the load."""
    model = build("some windows slide", experts=(experts, per_token))
    assert_agrees(model, 1e-4)
    loads = torch.stack([block.experts.load for block in model.blocks[1::2]]) / 2  # of two forwards
    even = per_token * 2 * T / experts
    assert (loads.sum(1) == experts * even).all()
    assert loads.max() > 1.25 * even or per_token == experts


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_half_precision_changes_logits_and_gradients_by_its_rounding_only(dtype, tolerance):
    """Parameters and their gradients are fp32, n-gram tables, too, as no optimizer wants their rows."""
    model = build("cuts in one place", dtype=dtype)
    assert {table.weight.dtype for table in model.ngram_embeds} == {dtype}
    assert_agrees(model, tolerance)
    for name, p in model.named_parameters():
        assert p.dtype == p.grad.dtype == torch.float32, name


@pytest.mark.parametrize("favourite", [0, 2])
def test_an_expert_gets_all_tokens_if_its_bias_is_high_and_loses_it_step_by_step(favourite):
    model = build("cuts in one place", experts=(3, 1))
    weights, x = lively(model), random_tokens(T)
    high = torch.eye(3)[favourite]  # more than any difference of scores
    for i, block in [*enumerate(model.blocks)][1::2]:
        block.experts.bias.copy_(high)
        weights[f"blocks.{i}.experts.bias"] = high.double()
    assert relative_error(model(x), reference_logits(model, weights, x)) < 1e-4
    step = train.BALANCE_RATE * (1 - 2 * high)  # up where there were none, down where all were
    for n in range(1, 4):
        train.update_buffers(model)
        for block in model.blocks[1::2]:
            torch.testing.assert_close(block.experts.bias, high + n * step)
            assert (block.experts.load == 0).all(), "each step counts its own tokens"
        model(x)


def test_induction_finds_what_followed_the_last_occurrence_of_the_same_three_tokens():
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        idx = torch.randint(5, (4, 64), generator=random)
        again = torch.stack([row[:n].repeat(64)[:64] for row, n in zip(idx, (1, 2, 3, 7), strict=True)])
        idx = torch.cat([idx, again.scatter(1, torch.randint(64, (4, 2), generator=random), 4)])  # with two slips
        expected = [[reference.follower(row, t) for t in range(64)] for row in idx.tolist()]
        assert all(-1 in row and len(set(row)) > 1 for row in expected), "some were there before, some not"
        followers, found = train.induction(idx)
        assert torch.where(found, followers, -1).tolist() == expected


def test_initial_weights_make_every_block_the_identity_and_have_the_stated_scales(monkeypatch):
    monkeypatch.setattr(train, "INIT_SCALE", 0.5)
    torch.manual_seed(0)
    model = build("shifted cuts", experts=(3, 1))
    assert not any(state.any() for block in model.blocks[1::2] for state in (block.experts.bias, block.experts.load))
    constant = {"residual_lambda": 1.0, "x0_lambda": 1.0, "ngram_embeds": 0.0, "induction_embed": 0.0}
    constant |= dict.fromkeys(("attn.c_proj", "mlp.c_proj", "experts.c_proj", "attn.gate"), 0.0)
    width = CONFIG.n_embd**-0.5
    uniform = {"attn.value_embed": width}  # standard deviation
    uniform |= dict.fromkeys(("attn.c_qkv", "mlp.c_fc", "experts.c_fc", "experts.router"), 0.5 * width)
    normal = {"embed": 1.0, "lm_head": 0.001}
    for name, p in model.named_parameters():
        kind = kind_of(name)
        if kind in constant:
            assert (p == constant[kind]).all(), name
            continue
        std = (uniform | normal)[kind]
        assert p.mean().item() == pytest.approx(0, abs=5 * std * p.numel() ** -0.5), name
        assert p.std().item() == pytest.approx(std, rel=5 * p.numel() ** -0.5), name
        bounded = p.abs().max() <= 3**0.5 * std * 1.0001
        assert bounded if kind in uniform else not bounded, f"{name} is drawn from another distribution"


def test_layers_are_counted_from_the_last_one_which_sees_the_whole_context():
    """Of every four, three have the window. Every other layer has a value embedding and experts, the rest a shift."""
    for depth in (8, 7):
        blocks = train.GPT(dataclasses.replace(CONFIG, depth=depth, num_experts=2), torch.float32, "sdpa").blocks
        assert [block.attn.window for block in blocks] == [8, 8, 8, T, 8, 8, 8, T][-depth:]
        assert [block.attn.value_embed is not None for block in blocks] == ([False, True] * 4)[-depth:]
        assert [block.x0_lambda is not None for block in blocks] == ([False, True] * 4)[-depth:]
        assert [block.experts is not None for block in blocks] == ([False, True] * 4)[-depth:]
        assert [block.attn.shift for block in blocks] == ([4, 0, 4, None] * 2)[-depth:]
