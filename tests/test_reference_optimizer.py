"""Each optimizer that ships follows reference_optimizer.py over several steps; rates follow the stated schedules.

With a loss scale that changes, with skipped steps in between, with accumulated and with missing gradients. A branch
that changes the optimizer is not asked to pass this file: delete it there.
"""

import itertools
import math

import pytest
import reference_optimizer as reference
import torch
import torch.nn.functional as F

import train

pytestmark = pytest.mark.usefixtures("one_thread")


# -- Adapters: all that this file knows about train.py's names


def make(kind: str, params: list[torch.nn.Parameter], betas=(0.8, 0.95), dtype=torch.float32):
    """An optimizer with one group of `kind`: adamw, sparse or muon, whose Newton-Schulz iteration runs in dtype."""
    group = dict(kind=kind, params=params, lr=0.0, betas=betas, weight_decay=0.0, momentum=0.0)
    return train.MuonAdamW([group], dtype)


def tables(*params: torch.Tensor) -> list[torch.nn.Parameter]:
    """As weights of tables of n-grams, whose gradients are sparse and hidden from GradScaler."""
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def set_rates(optimizer, lr: float, decay: float = 0.0, momentum: float = 0.0) -> None:
    """What a schedule does before each step."""
    optimizer.param_groups[0].update(lr=lr, weight_decay=decay, momentum=momentum)


def skipped_by(optimizer: train.MuonAdamW) -> int:
    return int(optimizer.num_skipped)


def build() -> tuple[train.GPT, train.MuonAdamW]:
    model = train.GPT(train.Config(3, 48, 16, 16, 8, 3, 2, 32, 64, 2, vocab_size=40), torch.float32, "sdpa")
    model.init_weights()
    return model, train.make_optimizer(model)


def groups_by_parameter(model, optimizer) -> dict[str, dict]:
    """The group of each parameter that the experiment names, each parameter being in exactly one."""
    names = {p: name for name, p in model.named_parameters()}
    groups = list(enumerate(optimizer.param_groups))
    held = [(names[p], group) for i, group in groups for p in group["params"] + optimizer.tables.get(i, [])]
    assert sorted(name for name, _ in held) == sorted(names.values())
    return dict(held)


A_MATRIX = "blocks.0.attn.c_qkv.weight"


def role(name: str) -> str:
    """What a parameter is, by its name in the model."""
    if not name.startswith("blocks."):
        return name.partition(".")[0]
    small = ("gate", "value_embed", "residual_lambda", "x0_lambda", "router", "experts")
    return next((part for part in small if part in name.split(".")), "matrix")


# -- Trajectories


@pytest.fixture(params=["plain", "loss scale", "loss scale and skipped steps"])
def steps(request):
    """Feeds steps to an optimizer as a run on that kind of GPU would: yields the factor of each step's gradients.

    `steps(optimizer, n)` is an iterator of n factors; between two of them the optimizer steps. Where steps are skipped,
    an infinity in one parameter's gradient goes first, and nothing of that step may stay.
    """

    def feed(optimizer, n: int):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=request.param != "plain")
        scaler.scale(torch.zeros(()))  # a GradScaler makes its scale when it is first used
        if optimizer.tables:  # what GradScaler sees
            rest = dict(kind="adamw", lr=0.0, betas=(0.8, 0.95), weight_decay=0.0, momentum=0.0)
            state = [[torch.zeros(1)], [torch.zeros(1)], [torch.zeros(())]]
            rest |= dict(params=[torch.nn.Parameter(torch.zeros(1))], state=state)
            optimizer.param_groups.append(rest)
        skipped = (0, 1, 3) if "skipped" in request.param else ()
        for i in range(n):
            if i in skipped:
                lost(optimizer)
                step(scaler, optimizer)
            yield scaler.get_scale()
            step(scaler, optimizer)
        assert skipped_by(optimizer) == len(skipped)
        assert not scaler.is_enabled() or scaler.get_scale() != 2.0**10, "the scale moved"

    def step(scaler, optimizer):
        last = optimizer.param_groups[-1]["params"][-1]
        if optimizer.tables and last.grad is None:
            last.grad = torch.zeros(1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def lost(optimizer) -> None:
        """Gradients of a step that overflowed: finite ones and, in the last parameter, an infinity."""
        for p in itertools.chain(*optimizer.tables.values()):
            F.embedding(torch.arange(len(p)), p, sparse=True).mul(1e4).sum().backward()
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.full_like(p, 1e4)
        p.grad[(-1,) * p.ndim] = math.inf

    return feed


def parameters(*shapes: tuple[int, ...]) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """Random ones, and their copies in float64."""
    params = [torch.nn.Parameter(0.5 * torch.randn(shape)) for shape in shapes]
    return params, [p.detach().double() for p in params]


def assert_close(params, references, tolerance: float) -> None:
    for p, r in zip(params, references, strict=True):
        assert (p.detach().double() - r.p).norm() < tolerance * r.p.norm(), tuple(p.shape)


def test_adamw_follows_its_reference(steps):
    torch.manual_seed(0)
    params, copies = parameters((7, 5), (3,))
    references = [reference.AdamW(p) for p in copies]
    optimizer, betas = make("adamw", params, betas=(0.7, 0.9)), (0.7, 0.9)
    for i, factor in enumerate(steps(optimizer, 6)):
        lr, decay = (0.1, 0.2, 0.05, 0.1, 0.1, 0.02)[i], (0.5, 0.1, 0.0, 1.0, 0.3, 0.3)[i]
        set_rates(optimizer, lr, decay)
        for p, r in zip(params, references, strict=True):
            grad = 10.0 ** (i - 6) * torch.randn(p.shape)  # an epsilon above 1e-10 would show
            p.grad = factor * grad
            r.step(grad.double(), lr, betas, decay)
    assert_close(params, references, 1e-5)


STACKS = {  # of one shape each, as one group of the optimizer has to be
    "squares": [(16, 16), (48, 16), (16, 64), (16, 16)],
    "a pair": [(16, 48), (16, 16)],
    "tall and wide": [(40, 16), (16, 40), (40, 16), (16, 40)],
}


@pytest.mark.parametrize("shapes", STACKS)
def test_muon_follows_its_reference(steps, shapes):
    torch.manual_seed(0)
    params, copies = parameters(*STACKS[shapes])
    references = [reference.Muon(p) for p in copies]
    optimizer = make("muon", params)
    for i, factor in enumerate(steps(optimizer, 6)):
        lr, decay, momentum = (0.1, 0.2, 0.05, 0.1, 0.1, 0.02)[i], (2.0, 1.0, 0.0, 3.0, 1.0, 1.0)[i], 0.7 + 0.05 * i
        set_rates(optimizer, lr, decay, momentum)
        for n, (p, r) in enumerate(zip(params, references, strict=True)):
            grad = 10.0 ** (i - 3) * torch.randn(p.shape) * torch.linspace(0.2, 2, p.size(0))[:, None]  # rows differ
            missing = n == 3 and i in (0, 4)  # no gradient: one of zeros
            p.grad = None if missing else factor * grad
            r.step(grad.double() * (not missing), lr, decay, momentum)
    assert_close(params, references, 5e-5)


@pytest.mark.parametrize("shapes", [[(3, 32, 16)], [(3, 32, 16), (16, 16), (2, 16, 16)], [(4, 12, 16)]], ids=str)
def test_muon_takes_each_expert_for_a_matrix(steps, shapes):
    torch.manual_seed(0)
    params, copies = parameters(*shapes)
    references = [[reference.Muon(matrix) for matrix in p.view(-1, *p.shape[-2:])] for p in copies]
    optimizer = make("muon", params)
    for factor in steps(optimizer, 4):
        set_rates(optimizer, 0.1, 2.0, 0.8)
        for p, matrices in zip(params, references, strict=True):
            grad = torch.randn(p.shape) * torch.linspace(0.2, 2, p.size(-2))[:, None]
            p.grad = factor * grad
            for matrix, g in zip(matrices, grad.double().view(-1, *p.shape[-2:]), strict=True):
                matrix.step(g, 0.1, 2.0, 0.8)
    for p, copy in zip(params, copies, strict=True):  # which the references have changed in place
        assert (p.detach().double() - copy).norm() < 5e-5 * copy.norm(), tuple(p.shape)


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 64), (16, 40), (3, 32, 16), (4, 8, 16), (3, 12, 16)])
def test_what_muon_does_to_a_stack_reaches_the_parameter(shape):
    """A wide expert's squares would be no view: such experts stay whole."""
    p = torch.zeros(shape)
    stack = train.as_stack(p)
    stack += 1
    assert p.all() and stack.size(-1) == min(shape[-2:])


@pytest.mark.parametrize("size", [1e-7, 1.0, 1e6])
def test_muon_in_fp16_follows_its_reference_where_fp16_cannot_hold_the_gradient(size):
    torch.manual_seed(0)
    params, copies = parameters((16, 64))
    references = [reference.Muon(p) for p in copies]
    optimizer = make("muon", params, dtype=torch.float16)
    set_rates(optimizer, lr=0.1, decay=0.5, momentum=0.9)
    params[0].grad = size * torch.randn(16, 64)
    references[0].step(params[0].grad.double(), 0.1, 0.5, 0.9)
    optimizer.step()
    assert_close(params, references, 2e-3)


def test_sparse_adam_follows_its_reference_with_repeated_rows_and_accumulated_gradients(steps):
    torch.manual_seed(0)
    params, copies = parameters((30, 8), (50, 8))
    params = tables(*params)
    before = [p.detach().clone() for p in params]
    references = [reference.SparseAdam(p) for p in copies]
    optimizer = make("sparse", params, betas=(0.0, 0.9))
    for i, factor in enumerate(steps(optimizer, 6)):
        lr = (0.1, 0.2, 0.05, 0.1, 0.1, 0.02)[i]
        set_rates(optimizer, lr)
        for p, r in zip(params, references, strict=True):
            if i == 2 and p is params[1]:  # a table that a step does not use stays what it is
                continue
            lookups = []
            for _ in range(1 + i % 3):  # accumulated device batches
                ids, grads = torch.randint(0, 20, (4, 6)), 10.0 ** (i - 6) * torch.randn(4, 6, 8)
                (factor * F.embedding(ids, p, sparse=True) * grads).sum().backward()
                lookups += zip(ids.flatten().tolist(), grads.flatten(0, 1).double(), strict=True)
            r.step(lookups, lr, 0.9)
    assert_close(params, references, 1e-5)
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p[20:], old[20:]), "a row that nobody looked up has moved"


@pytest.mark.parametrize("lr", [0.1, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sparse_adam_in_half_precision_rounds_once_per_row_however_often_a_step_looks_it_up(dtype, lr, device):
    """A thousand gradients would overflow in fp16, and a thousand parts of an update would vanish one by one."""
    torch.manual_seed(0)
    (p,) = tables((5 * lr * torch.rand(30, 8)).to(device, dtype))
    optimizer, of_reference = make("sparse", [p], betas=(0.0, 0.9)), reference.SparseAdam(p.detach().cpu().double())
    set_rates(optimizer, lr)
    for _ in range(3):
        ids = torch.cat([torch.full((1000,), 3), torch.randint(20, (200,))])
        grads = (100 * (0.5 + torch.rand(1200, 8)) * torch.linspace(0.2, 2, 8)).to(dtype)  # of one sign
        for part in torch.arange(1200).chunk(2 if device.type == "cuda" else 1):  # accumulated, where there are kernels
            of_part = F.embedding(ids[part].to(device), p, sparse=True) * grads[part].to(device)
            of_part.sum(dtype=torch.float32).backward()
        old = p.detach().cpu().double()
        of_reference.p.copy_(old)
        of_reference.step(list(zip(ids.tolist(), grads.double(), strict=True)), lr, 0.9)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        new, limits = p.detach().cpu().double(), torch.finfo(dtype)
        roundings = limits.eps / 2 * (of_reference.p.abs() + (of_reference.p - old).abs())  # of the sum and the update
        roundings += limits.smallest_normal * limits.eps  # least distance of two numbers
        assert ((new - of_reference.p).abs() < 1.1 * roundings).all()
    assert optimizer.param_groups[0]["state"][0].dtype == torch.float32


def test_a_gradient_of_a_table_stays_out_of_the_scalers_sight_and_where_it_overflows_the_row_stays():
    (p,) = tables(torch.ones(5, 8))
    optimizer = make("sparse", [p], betas=(0.0, 0.95))
    set_rates(optimizer, 0.1)
    for scale in (1.0, math.inf):
        (F.embedding(torch.tensor([1, 3]), p, sparse=True) * torch.tensor([[1.0], [scale]])).sum().backward()
        assert p.grad.is_sparse and not any(group["params"] for group in optimizer.param_groups)
        before = p.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert p.grad is None
        moved = (p.detach() != before).any(1).tolist()
        assert moved == [False, True, False, scale == 1, False]
    state = optimizer.param_groups[0]["state"][0]
    assert state.flatten().tolist() == [0, 1, 0, 1, 0]


# -- The experiment's own groups and schedules


def test_each_parameter_has_the_rate_the_betas_and_the_decay_that_the_constants_state(monkeypatch):
    constants = dict(MATRIX_LR=0.1, EMBEDDING_LR=0.2, NGRAM_LR=0.3, UNEMBEDDING_LR=0.4, X0_LR=0.5, RESIDUAL_LR=0.6)
    constants |= dict(GATE_LR=0.7, INDUCTION_LR=0.8, ADAM_BETAS=(0.5, 0.6), MATRIX_DECAY=0.8, VALUE_EMBED_DECAY=0.9)
    constants |= dict(ROUTER_LR=0.95, EXPERT_LR_SCALE=0.25)
    for name, value in constants.items():
        monkeypatch.setattr(train, name, value)
    model, optimizer = build()
    wide = (48 / 768) ** -0.5  # rates of embeddings and head are stated for width 768
    expected = {
        "embed": ("adamw", 0.2 * wide, (0.5, 0.6), 0.0),
        "lm_head": ("adamw", 0.4 * wide, (0.5, 0.6), 0.0),
        "value_embed": ("adamw", 0.2 * wide, (0.5, 0.6), 0.9),
        "ngram_embeds": ("sparse", 0.3 * wide, (0.0, 0.8), 0.0),
        "induction_embed": ("adamw", 0.8 * wide, (0.5, 0.6), 0.0),
        "x0_lambda": ("adamw", 0.5, (0.96, 0.95), 0.0),
        "residual_lambda": ("adamw", 0.6, (0.5, 0.6), 0.0),
        "gate": ("adamw", 0.7, (0.5, 0.6), 0.0),
        "router": ("adamw", 0.95, (0.5, 0.6), 0.0),
        "experts": ("muon", 0.1 * 0.25, None, 0.8),
        "matrix": ("muon", 0.1, None, 0.8),
    }
    for name, group in groups_by_parameter(model, optimizer).items():
        kind, lr, betas, decay = expected[role(name)]
        assert (group["kind"], group["weight_decay"]) == (kind, decay), name
        assert group["lr"] == pytest.approx(lr) and (betas is None or group["betas"] == betas), name


@pytest.mark.parametrize(("progress", "rate"), [(0.0, 1.0), (0.3, 0.73), (0.5, 0.55), (0.999, 0.1009), (1.0, 0.1)])
def test_rates_fall_linearly_to_the_final_fraction(progress, rate, monkeypatch):
    monkeypatch.setattr(train, "FINAL_LR", 0.1)
    model, optimizer = build()
    before = {name: group["lr"] for name, group in groups_by_parameter(model, optimizer).items()}
    train.set_schedules(optimizer, 0.9, 3)  # what an earlier step has set leaves no trace
    train.set_schedules(optimizer, progress, 7)
    for name, group in groups_by_parameter(model, optimizer).items():
        factor = 1.0 if role(name) == "ngram_embeds" else rate
        assert group["lr"] == pytest.approx(factor * before[name], rel=1e-9), name


@pytest.mark.parametrize(
    ("step", "momentum"), [(0, 0.85), (10, 0.8625), (20, 0.875), (39, 0.89875), (40, 0.9), (41, 0.9)]
)
def test_momentum_of_the_matrices_rises_linearly_over_its_warm_up(step, momentum, monkeypatch):
    monkeypatch.setattr(train, "MOMENTUM_WARMUP", 40)
    model, optimizer = build()
    train.set_schedules(optimizer, 0.9, step)
    assert groups_by_parameter(model, optimizer)[A_MATRIX]["momentum"] == pytest.approx(momentum, rel=1e-9)


@pytest.mark.parametrize("progress", [0.0, 0.25, 0.9, 1.0])
def test_decay_of_the_matrices_falls_linearly_to_zero_and_that_of_value_embeddings_stays(progress, monkeypatch):
    monkeypatch.setattr(train, "MATRIX_DECAY", 0.3)
    monkeypatch.setattr(train, "VALUE_EMBED_DECAY", 0.07)
    model, optimizer = build()
    train.set_schedules(optimizer, 0.5, 3)
    train.set_schedules(optimizer, progress, 7)
    stays = {"value_embed": 0.07, "matrix": 0.3 * (1 - progress), "experts": 0.3 * (1 - progress)}
    for name, group in groups_by_parameter(model, optimizer).items():
        assert group["weight_decay"] == pytest.approx(stays.get(role(name), 0.0), abs=1e-12), name
