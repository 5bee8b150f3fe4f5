"""The model that ships computes what reference_model.py says: logits, loss, gradients, and the initial weights.

A branch that changes the model is not asked to pass this file: delete it there.
"""

import dataclasses
import functools
import math

import pytest
import reference_model as reference
import torch
from reference_model import Layer

import harness
import train

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, ROWS, SEQ_LEN, WIDTH, HEAD_DIM, BATCH = 40, 64, 24, 48, 16, 2
FULL = SEQ_LEN

TABLES = {
    "cuts in one place": (Layer(FULL), Layer(8, value_embed=True), Layer(12), Layer(FULL, value_embed=True)),
    "shifted cuts": (Layer(8, value_embed=True), Layer(12, 0, 3), Layer(8, 1, 4, True), Layer(FULL, 0, FULL // 2)),
    "some heads see all": (Layer(8, 2, value_embed=True), Layer(12, 3, 3), Layer(8, 1, 4), Layer(12, 1)),
}


# -- Adapters: all that this file knows about train.py's names


def config(layers: tuple[Layer, ...], monkeypatch, *experts: int) -> train.Config:
    """A tiny configuration with this table of layers. experts: how many, and how many to a token."""
    table = [train.Layer(**dataclasses.asdict(layer)) for layer in layers]
    monkeypatch.setattr(train, "layers", lambda config: table)
    return train.Config(
        len(layers), WIDTH, HEAD_DIM, SEQ_LEN, 8, 1, BATCH, BATCH * SEQ_LEN, ROWS, *experts, vocab_size=VOCAB
    )


def build(config: train.Config, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> train.GPT:
    """A model with its initial weights."""
    model = train.GPT(config, dtype, attention)
    model.init_weights()
    return model


def named_weights(model: train.GPT) -> dict[str, torch.nn.Parameter]:
    """Every parameter under the name that the reference gives it."""
    names = {"embed": model.embed.weight, "lm_head": model.lm_head.weight, "induction": model.induction_embed.weight}
    names |= {f"ngram.{table.n}": table.weight for table in model.ngram_embeds}
    for i, block in enumerate(model.blocks):
        modules = {"qkv": block.attn.c_qkv, "attn_out": block.attn.c_proj, "gate": block.attn.gate}
        modules |= {"mlp_in": block.mlp.c_fc, "mlp_out": block.mlp.c_proj, "value_embed": block.attn.value_embed}
        names |= {f"block.{i}.{name}": module.weight for name, module in modules.items() if module is not None}
        names |= {f"block.{i}.residual_lambda": block.residual_lambda}
        names |= {f"block.{i}.x0_lambda": block.x0_lambda} if block.x0_lambda is not None else {}
        if block.experts is not None:
            router, w_in, w_out = block.experts.router.weight, block.experts.c_fc, block.experts.c_proj
            names |= {f"block.{i}.router": router, f"block.{i}.experts_in": w_in, f"block.{i}.experts_out": w_out}
    assert {id(p) for p in names.values()} == {id(p) for p in model.parameters()}, "a parameter has no name here"
    return names


def reference_of(layers: tuple[Layer, ...], sliding: bool = False) -> reference.Model:
    return reference.Model(layers, HEAD_DIM, sliding, train.ROPE_BASE, train.SOFTCAP)


# -- A model whose every part counts, and its reference


def sliding_windows(q, k, v, causal, window_size):
    """In place of FlashAttention-3: each position sees window_size[0] earlier ones. (B, T, H, D) each."""
    assert causal and window_size[1] == 0
    at = torch.arange(q.size(1))
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance <= window_size[0])
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.size(-1))
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def kind_of(name: str) -> str:
    """The weight's name without the number of its layer or n-gram."""
    return name.rpartition(".")[2] if name.startswith("block") else name.partition(".")[0]


def lively(model) -> dict[str, torch.Tensor]:
    """Draws weights far from their initial values; returns them in float64, with gradients."""
    generator = torch.Generator().manual_seed(0)
    scales = {"lm_head": 1.5, "x0_lambda": 0.5, "residual_lambda": 0.3, "gate": 0.3}  # of the rest: by their width
    weights = {}
    for name, p in named_weights(model).items():
        kind = kind_of(name)
        table = "embed" in kind or kind in ("ngram", "induction")
        scale = scales.get(kind, 1.0 if table else 1.5 * p.shape[-1:].numel() ** -0.5)
        p.data.copy_((kind == "residual_lambda") + scale * torch.randn(p.shape, generator=generator))
        weights[name] = p.detach().double().requires_grad_()
    for i, block in enumerate(model.blocks):
        if block.experts is not None:
            block.experts.bias.copy_(0.1 * torch.randn(block.experts.bias.shape, generator=generator))
            weights[f"block.{i}.router_bias"] = block.experts.bias.double()
    return weights


def random_tokens(length: int = SEQ_LEN + 1) -> torch.Tensor:
    """The second half repeats a part of the first one, so that induction finds something."""
    tokens = torch.randint(VOCAB, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    tokens[:, 14:20] = tokens[:, 3:9]
    return tokens[:, :length]


def reference_logits(layers, weights, x, sliding=False) -> torch.Tensor:
    return torch.stack([reference.logits(reference_of(layers, sliding), weights, row.tolist()) for row in x])


def reference_losses(logits, y) -> torch.Tensor:
    return torch.stack([reference.losses(row, targets.tolist()) for row, targets in zip(logits, y, strict=True)])


def relative_error(value, expected) -> float:
    return ((value.double() - expected).norm() / expected.norm()).item()


def assert_gradients_agree(model, weights, tolerance: float) -> None:
    """No gradient is missing, and none is zero.

    Errors are relative to the gradients of that kind of weight in all layers: one scalar's may happen to be near zero.
    """
    for kind in {kind_of(name) for name in weights}:
        pairs = [(p.grad, weights[name].grad) for name, p in named_weights(model).items() if kind_of(name) == kind]
        size = math.hypot(*(expected.norm() for _, expected in pairs))
        for grad, expected in pairs:
            assert 1e-3 < expected.norm(), f"{kind}: the reference does not use it"
            assert (grad.double() - expected).norm() < tolerance * size, kind


def assert_agrees(layers, model, sliding=False) -> None:
    """Logits, loss and the gradient of every parameter, against float64; no gradient is missing, and none is zero."""
    weights, tokens = lively(model), random_tokens()
    x, y = tokens[:, :-1], tokens[:, 1:]
    expected = reference_logits(layers, weights, x, sliding)
    assert 5 < expected.abs().max() < train.SOFTCAP, "the softcap bends the logits"
    assert relative_error(model(x), expected) < 1e-4

    loss, expected = model(x, y), reference_losses(expected, y).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    assert_gradients_agree(model, weights, 1e-4)


@pytest.mark.parametrize("name", TABLES)
def test_logits_and_gradients_of_attention_in_pieces_are_those_of_the_formulas(name, monkeypatch):
    assert_agrees(TABLES[name], build(config(TABLES[name], monkeypatch)))


@pytest.fixture
def sliding(monkeypatch, flash_on_cpu):
    """FlashAttention-3 and -2 on a CPU."""
    monkeypatch.setattr(train, "attention", functools.cache(train.attention.__wrapped__))
    monkeypatch.setattr(harness, "load_fa3", lambda: sliding_windows)


@pytest.mark.parametrize("attention", ["fa3", "fa2"])
@pytest.mark.parametrize("name", TABLES)
def test_logits_and_gradients_of_sliding_windows_are_those_of_the_formulas(name, attention, monkeypatch, sliding):
    """A shift moves the cuts between pieces, and windows that slide have none."""
    model = build(config(TABLES[name], monkeypatch), attention)
    assert_agrees(TABLES[name], model, sliding=True)


@pytest.mark.parametrize("experts, per_token", [(2, 1), (4, 1), (4, 2), (3, 3)])  # blocks of 3, 1, 3 and 6 rows
@pytest.mark.parametrize("name", TABLES)
def test_logits_and_gradients_of_experts_are_those_of_the_formulas(name, experts, per_token, monkeypatch):
    """So no token is dropped, however uneven the load."""
    model = build(config(TABLES[name], monkeypatch, experts, per_token))
    assert_agrees(TABLES[name], model)
    loads = torch.stack([block.experts.load for block in model.blocks]) / 2  # of two forwards
    even = per_token * BATCH * SEQ_LEN / experts
    assert (loads.sum(1) == experts * even).all()
    assert loads.max() > 1.25 * even or per_token == experts


@pytest.mark.parametrize("favourite", [0, 2])
def test_an_expert_gets_all_tokens_if_its_bias_is_high_and_loses_it_step_by_step(favourite, monkeypatch):
    layers = TABLES["cuts in one place"]
    model = build(config(layers, monkeypatch, 3))
    weights, tokens = lively(model), random_tokens()
    for i, block in enumerate(model.blocks):
        block.experts.bias.copy_(torch.eye(3)[favourite])  # more than any difference of scores
        weights[f"block.{i}.router_bias"] = block.experts.bias.double()
    assert relative_error(model(tokens[:, :-1]), reference_logits(layers, weights, tokens[:, :-1])) < 1e-4
    step = train.BALANCE_RATE * (1 - 2 * torch.eye(3)[favourite])  # up where there were none, down where all were
    for n in range(1, 4):
        train.update_buffers(model)
        for block in model.blocks:
            torch.testing.assert_close(block.experts.bias, torch.eye(3)[favourite] + n * step)
            assert (block.experts.load == 0).all(), "each step counts its own tokens"
        model(tokens[:, :-1])


def test_experts_do_for_a_token_what_they_do_in_any_other_batch(monkeypatch):
    model = build(config(TABLES["shifted cuts"], monkeypatch, 4))
    lively(model)
    x = random_tokens(SEQ_LEN)
    together, alone = model(x), torch.cat([model(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "fa2"])
def test_a_shorter_sequence_gets_the_logits_of_its_own_length(attention, monkeypatch, sliding):
    layers = TABLES["shifted cuts"]
    model = build(config(layers, monkeypatch), attention)
    weights, x = lively(model), random_tokens(8)
    assert relative_error(model(x), reference_logits(layers, weights, x, attention == "fa2")) < 1e-4


def test_losses_are_minus_log_softmax_and_an_ignored_target_counts_nothing(monkeypatch):
    layers = TABLES["cuts in one place"]
    model = build(config(layers, monkeypatch))
    weights, tokens = lively(model), random_tokens()
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[0, 3:9] = y[1, -1] = -1
    expected = reference_losses(reference_logits(layers, weights, x), y)  # (B, T)
    each = model(x, y, reduction="none")
    assert each.shape == (y.numel(),) and each.dtype == torch.float32
    torch.testing.assert_close(each.double(), expected.flatten(), rtol=0, atol=1e-4)
    torch.testing.assert_close(model(x, y).double(), expected.sum() / (y >= 0).sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_half_precision_changes_logits_and_gradients_by_its_rounding_only(dtype, tolerance, monkeypatch):
    """Parameters, their gradients, logits and loss stay fp32, except that n-gram tables have the activations' dtype."""
    layers = TABLES["cuts in one place"]
    model = build(config(layers, monkeypatch), dtype=dtype)
    weights, tokens = lively(model), random_tokens()
    x, y = tokens[:, :-1], tokens[:, 1:]
    expected = reference_logits(layers, weights, x)
    logits, loss = model(x), model(x, y)
    assert logits.dtype == loss.dtype == torch.float32
    assert relative_error(logits, expected) < tolerance
    loss.backward()
    reference_losses(expected, y).mean().backward()
    assert_gradients_agree(model, weights, 2 * tolerance)
    for name, p in named_weights(model).items():
        assert p.dtype == p.grad.dtype == (dtype if kind_of(name) == "ngram" else torch.float32), name


def text(kind: str, seed: int) -> torch.Tensor:
    """Tokens (4, 64) below 5."""
    random = torch.Generator().manual_seed(seed)
    if kind == "repetitive":  # of periods 1, 2, 3 and 7, each with two slips
        periods = [torch.randint(5, (n,), generator=random) for n in (1, 2, 3, 7)]
        rows = torch.stack([period.repeat(64)[:64] for period in periods])
        return rows.scatter(1, torch.randint(64, (4, 2), generator=random), 4)
    return torch.randint(5, (4, 64), generator=random)


@pytest.mark.parametrize("kind", ["random", "repetitive"])
def test_induction_finds_what_followed_the_last_occurrence_of_the_same_three_tokens(kind):
    for seed in range(5):
        idx = text(kind, seed)
        expected = [[reference.follower(row, t) for t in range(64)] for row in idx.tolist()]
        assert all(None in row and len(set(row)) > 1 for row in expected), "some were there before, some not"
        followers, found = train.induction(idx)
        assert torch.where(found, followers, -1).tolist() == [[-1 if t is None else t for t in row] for row in expected]


def test_initial_weights_make_every_block_the_identity_and_have_the_stated_scales(monkeypatch):
    layers = TABLES["shifted cuts"]
    monkeypatch.setattr(train, "INIT_SCALE", 0.5)
    monkeypatch.setattr(train, "X0_LAMBDA", 0.07)
    torch.manual_seed(0)
    model = build(config(layers, monkeypatch, 3))
    assert not any(state.any() for block in model.blocks for state in (block.experts.bias, block.experts.load))
    weights = named_weights(model)
    constant = {"residual_lambda": 1.0, "x0_lambda": 0.07, "attn_out": 0.0, "mlp_out": 0.0, "gate": 0.0}
    constant |= {"ngram": 0.0, "induction": 0.0, "experts_out": 0.0}
    uniform = {"value_embed": WIDTH**-0.5}  # standard deviation
    uniform |= dict.fromkeys(("qkv", "mlp_in", "experts_in", "router"), 0.5 * WIDTH**-0.5)
    normal = {"embed": 1.0, "lm_head": 0.001}
    for name, p in weights.items():
        kind = kind_of(name)
        if kind in constant:
            assert (p == constant[kind]).all(), name
            continue
        std = (uniform | normal)[kind]
        assert p.mean().item() == pytest.approx(0, abs=5 * std * p.numel() ** -0.5), name
        assert p.std().item() == pytest.approx(std, rel=5 * p.numel() ** -0.5), name
        bounded = p.abs().max() <= 3**0.5 * std * 1.0001
        assert bounded if kind in uniform else not bounded, f"{name} is drawn from another distribution"


def test_layers_are_counted_from_the_last_one_where_heads_see_the_whole_context():
    """Of every four, in three all heads have the window. Every other layer has a value embedding, the rest a shift."""
    table = train.layers(train.Config(8, WIDTH, HEAD_DIM, SEQ_LEN, 8, 2, BATCH, BATCH * SEQ_LEN, ROWS))
    assert [layer.full_heads for layer in table] == [0, 0, 0, 2, 0, 0, 0, 2]
    assert {layer.window for layer in table} == {8}
    assert [layer.value_embed for layer in table] == [False, True] * 4
    assert [layer.shift for layer in table] == [4, 0] * 4
