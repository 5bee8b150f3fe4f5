"""Each optimizer that ships follows its reference over several steps; rates follow the stated schedules.

With a loss scale that changes, with skipped steps in between, with accumulated and with missing gradients. A branch
that changes the optimizer is not asked to pass this file: delete it there.
"""

import math

import pytest
import reference_optimizer as reference
import torch
from reference_model import relative_error

import train

LR, DECAY, MOMENTUM = (0.1, 0.2, 0.05, 0.1, 0.1, 0.02), (2.0, 1.0, 0.0, 3.0, 1.0, 1.0), (0.7, 0.8, 0.9, 0.85, 0.9, 0.9)


def make(kind: str, params: list[torch.nn.Parameter], betas=(0.0, 0.9), dtype=torch.float32) -> train.MuonAdamW:
    """With one group of that kind, and another one that shows the steps to GradScaler, which sees no tables.

    kind: adamw, rows, or muon, whose Newton-Schulz iteration runs in dtype.
    """
    rates = dict(lr=0.1, betas=betas, beta2=betas[1], half_lr=4.0, weight_decay=0.5, momentum=0.9)
    seen = torch.nn.Parameter(torch.zeros(1))
    groups = dict(kind=kind, params=params), dict(kind="adamw", params=[seen])
    return train.MuonAdamW([group | rates for group in groups], dtype)


def look_up(optimizer, table, ids) -> torch.Tensor:
    """Rows of a table, whose gradients go to the optimizer."""
    return train.RowLookup.apply(table, ids, optimizer.row_grads[table])


@pytest.fixture(params=[(), (0, 1, 3)], ids=["no step is skipped", "some are"])
def steps(request):
    """Feeds steps under a loss scale to an optimizer: sets the rates of each, yields its number and scale, then steps.

    Before some, gradients of which one is infinite go first, and nothing of that step may stay.
    """

    def feed(optimizer, n: int):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scaler.scale(torch.zeros(()))  # a GradScaler makes its scale when it is first used
        params, (seen,) = (group["params"] for group in optimizer.param_groups)

        def step(seen_grad: float) -> None:
            seen.grad = torch.tensor([seen_grad])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

        for i in range(n):
            if i in request.param:
                for p in params:
                    if p in optimizer.row_grads:
                        look_up(optimizer, p, torch.arange(len(p))).mul(1e4).sum().backward()
                    else:
                        p.grad = torch.full_like(p, math.inf)
                step(math.inf)
            optimizer.param_groups[0].update(lr=LR[i], weight_decay=DECAY[i], momentum=MOMENTUM[i])
            yield i, scaler.get_scale()
            step(0.0)
        assert optimizer.num_skipped == len(request.param) and scaler.get_scale() != 2.0**10

    return feed


def parameters(*shapes: tuple[int, ...]) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """Random ones, and their copies in float64."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(0.5 * torch.randn(shape)) for shape in shapes]
    return params, [p.detach().double() for p in params]


def assert_close(params, copies, tolerance: float) -> None:
    """copies: in float64, which the references have changed in place."""
    for p, copy in zip(params, copies, strict=True):
        assert relative_error(p.detach(), copy) < tolerance, tuple(p.shape)


def test_adamw_follows_pytorchs_own_in_float64(steps):
    params, copies = parameters((7, 5), (3,))
    of_reference = torch.optim.AdamW(copies, betas=(0.7, 0.9), eps=1e-10)
    optimizer = make("adamw", params, betas=(0.7, 0.9))
    for i, factor in steps(optimizer, 6):
        of_reference.param_groups[0].update(lr=LR[i], weight_decay=DECAY[i])
        for p, copy in zip(params, copies, strict=True):
            grad = 10.0 ** (i - 6) * torch.randn(p.shape)  # an epsilon above 1e-10 would show
            p.grad, copy.grad = factor * grad, grad.double()
        of_reference.step()
    assert_close(params, copies, 1e-5)


QKV = [24, 6, 6]  # widths of queries, keys and values in a matrix of 36 rows


def declare(p: torch.nn.Parameter) -> torch.nn.Parameter:
    """As train.py does for its own matrices: where a side is a multiple of the other, each square is a matrix."""
    R, C = p.shape[-2:]
    split = (QKV, -2) if R == 36 else (C, -2) if R % C == 0 else (R, -1) if C % R == 0 else None
    return train.declare(p, None, train.muon(0.0, split))


def matrices(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the reference takes for a matrix: each expert; queries, keys and values."""
    return t.split(QKV) if len(t) == 36 else t.view(-1, *t.shape[-2:]).unbind()


STACKS = {
    "matrices": [(16, 16), (48, 16), (16, 64), (16, 16), (40, 16), (16, 40), (24, 48), (5, 3)],
    "queries, keys and values": [(36, 16)],
    "experts and matrices": [(3, 32, 16), (16, 16), (3, 16, 48), (16, 16), (4, 16, 32)],
    "experts that are no squares": [(4, 12, 16)],
}


@pytest.mark.parametrize("shapes", STACKS)
def test_muon_follows_its_reference(steps, shapes):
    params, copies = parameters(*STACKS[shapes])
    references = [[*map(reference.Muon, matrices(copy))] for copy in copies]
    optimizer = make("muon", [*map(declare, params)])
    for i, factor in steps(optimizer, 6):
        for n, (p, of_reference) in enumerate(zip(params, references, strict=True)):
            grad = 10.0 ** (i - 3) * torch.randn(p.shape) * torch.linspace(0.2, 2, p.size(-2))[:, None]  # rows differ
            missing = n == 3 and i in (0, 4)  # no gradient: it stays, and its momentum fades
            p.grad = None if missing else factor * grad
            for matrix, g in zip(of_reference, matrices(grad.double()), strict=True):
                before = matrix.p.clone()
                matrix.step(g * (not missing), LR[i], DECAY[i], MOMENTUM[i])
                if missing:
                    matrix.p.copy_(before)
    assert_close(params, copies, 5e-5)


@pytest.mark.parametrize("size", [1e-7, 1.0, 1e6])
def test_muon_in_fp16_follows_its_reference_where_fp16_cannot_hold_the_gradient(size):
    params, copies = parameters((16, 64))
    optimizer = make("muon", [*map(declare, params)], dtype=torch.float16)
    params[0].grad = size * torch.randn(16, 64)
    reference.Muon(copies[0]).step(params[0].grad.double(), 0.1, 0.5, 0.9)
    optimizer.step()
    assert_close(params, copies, 3e-3)


def test_sparse_adam_follows_its_reference_with_repeated_rows_and_accumulated_gradients(steps):
    params, copies = parameters((30, 8), (50, 8))
    references = [reference.SparseAdam(copy) for copy in copies]
    before = [p.detach().clone() for p in params]
    optimizer = make("rows", params)
    for i, factor in steps(optimizer, 6):
        for p, r in zip(params, references, strict=True):
            if i == 2 and p is params[1]:  # a table that a step does not use stays what it is
                continue
            lookups = []
            for _ in range(1 + i % 3):  # accumulated device batches
                ids, grads = torch.randint(0, 20, (4, 6)), 10.0 ** (i - 6) * torch.randn(4, 6, 8)
                (factor * look_up(optimizer, p, ids) * grads).sum().backward()
                lookups += zip(ids.flatten().tolist(), grads.flatten(0, 1).double(), strict=True)
            r.step(lookups, LR[i], 0.9, 4.0)
    assert_close(params, copies, 1e-5)
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p[20:], old[20:]), "a row that nobody looked up has moved"


def test_a_gradient_of_a_table_stays_out_of_the_scalers_sight_and_where_it_overflows_the_row_stays():
    p = torch.nn.Parameter(torch.ones(5, 8, dtype=torch.float16))
    optimizer = make("rows", [p])
    for scale in (1.0, math.inf):
        (look_up(optimizer, p, torch.tensor([1, 3])) * torch.tensor([[1.0], [scale]])).sum().backward()
        assert p.grad is None and len(optimizer.row_grads[p]) == 1
        before = p.detach().clone()
        optimizer.step()
        assert not optimizer.row_grads[p]
        assert (p.detach() != before).any(1).tolist() == [False, True, False, scale == 1, False]
    (state,) = optimizer.param_groups[0]["moments"]
    assert state.dtype == torch.float32 and state.tolist() == [[0, 0], [1, 2], [0, 0], [1, 1], [0, 0]]


# -- The experiment's own groups and schedules


def groups_by_parameter() -> tuple[train.MuonAdamW, dict[str, dict]]:
    """The optimizer of a small model, and the group of each parameter by its name; each is in exactly one."""
    config = train.Config(3, 48, 16, 16, 8, 2, 32, 64, ngram_lr=0.3, num_experts=2, vocab_size=40)
    model = train.GPT(config, torch.float32, "sdpa")
    optimizer = train.make_optimizer(model)
    names = {p: name for name, p in model.named_parameters()}
    held = [(names[p], group) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(name for name, _ in held) == sorted(names.values())
    return optimizer, dict(held)


def test_each_parameter_has_the_rate_the_betas_and_the_decay_that_the_constants_state(monkeypatch):
    constants = dict(MATRIX_LR=0.1, EMBEDDING_LR=0.2, UNEMBEDDING_LR=0.4, X0_LR=0.5, RESIDUAL_LR=0.6)
    constants |= dict(GATE_LR=0.7, INDUCTION_LR=0.8, ADAM_BETAS=(0.5, 0.6), MATRIX_DECAY=0.8, VALUE_EMBED_DECAY=0.9)
    constants |= dict(ROUTER_LR=0.95, EXPERT_LR_SCALE=0.25, NGRAM_HALF_LR=64)
    for name, value in constants.items():
        monkeypatch.setattr(train, name, value)
    wide = (48 / 768) ** -0.5  # rates of embeddings and head are stated for width 768
    expected = {  # by a part of the name
        "embed": ("adamw", 0.2 * wide, (0.5, 0.6), 0.0),
        "lm_head": ("adamw", 0.4 * wide, (0.5, 0.6), 0.0),
        "value_embed": ("adamw", 0.2 * wide, (0.5, 0.6), 0.9),
        "ngram_embeds": ("rows", 0.3 * wide, (0.9, 0.999), 0.01),  # of which only the rate is used
        "induction_embed": ("adamw", 0.8 * wide, (0.5, 0.6), 0.0),
        "x0_lambda": ("adamw", 0.5, (0.96, 0.95), 0.0),
        "residual_lambda": ("adamw", 0.6, (0.5, 0.6), 0.0),
        "gate": ("adamw", 0.7, (0.5, 0.6), 0.0),
        "router": ("adamw", 0.95, (0.5, 0.6), 0.0),
        "experts": ("muon", 0.1 * 0.25, (0.9, 0.999), 0.8),  # betas of no use
        "blocks": ("muon", 0.1, (0.9, 0.999), 0.8),
    }
    for name, group in groups_by_parameter()[1].items():
        kind, lr, betas, decay = next(value for part, value in expected.items() if part in name.split("."))
        assert (group["kind"], group["betas"], group["weight_decay"]) == (kind, betas, decay), name
        half_lr = 64 if "ngram_embeds.0" in name else 16
        assert kind != "rows" or (group["beta2"], group["half_lr"]) == (0.8, half_lr)
        assert group["lr"] == pytest.approx(lr), name


def test_muon_moves_the_blocks_matrices_in_squares_and_the_experts_in_halves():
    for group in groups_by_parameter()[0].param_groups:
        for p in group["params"] if group["kind"] == "muon" else []:
            shapes = {tuple(part.shape[1:]) for part in train.matrices(p.detach(), p.optim["split"])}
            assert shapes == {(48, 24) if p.ndim == 3 else (48, 48)}


@pytest.mark.parametrize("progress", [0.0, 0.3, 0.999, 1.0])
def test_rates_and_the_decay_of_matrices_fall_linearly_whatever_was_set_before(progress, monkeypatch):
    """Rates to the final fraction, but those of tables stay: there the updates that halve a row's rate fall, to 1/16.

    The decay to zero, but that of value embeddings stays.
    """
    monkeypatch.setattr(train, "FINAL_LR", 0.1)
    optimizer, groups = groups_by_parameter()
    before = {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()}
    train.set_schedules(optimizer, 0.9)
    for group in optimizer.param_groups:
        group["lr"] *= 0.1  # a warm-up by hand
    train.set_schedules(optimizer, progress)
    for name, group in groups.items():
        (lr, decay), matrix = before[name], group["kind"] == "muon"
        assert group["lr"] == pytest.approx(lr * (1 if "ngram" in name else 1 - 0.9 * progress), rel=1e-9), name
        assert group["weight_decay"] == pytest.approx(decay * (1 - progress * matrix), abs=1e-12), name
        if group["kind"] == "rows":
            full = train.NGRAM_HALF_LR / (1 if "ngram_embeds.0" in name else 4)
            assert group["half_lr"] == pytest.approx(full * (1 - progress + progress / 16)), name
