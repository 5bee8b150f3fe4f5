"""Claims about train.py: the gate, the model, the optimizer, the warm-up and the loop. Whole processes: test_run.py."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import train
from prepare import Clock

VOCAB = 512
TINY = dataclasses.replace(
    train.PLATFORMS["cpu"], depth=3, n_embd=64, head_dim=32, seq_len=64, window=64, device_batch=2, total_batch=128
)


def build(platform=TINY, seed=0):
    torch.manual_seed(seed)
    model = train.build_model(platform, VOCAB, None)
    return model, train.make_optimizer(model)


def batches(platform=TINY, seed=1):
    """The same random batch for ever."""
    torch.manual_seed(seed)
    tokens = torch.randint(VOCAB, (platform.device_batch, platform.seq_len + 1))
    return itertools.repeat((tokens[:, :-1], tokens[:, 1:], 1))


# -- Platform


@pytest.mark.parametrize(
    ("capability", "has_fa3", "row", "dtype", "attention"),
    [
        (None, False, "cpu", torch.float32, "sdpa"),
        ((7, 0), True, "turing", torch.float16, "sdpa"),
        ((7, 5), True, "turing", torch.float16, "sdpa"),
        ((8, 0), True, "ampere", torch.bfloat16, "fa3"),
        ((8, 0), False, "ampere", torch.bfloat16, "sdpa"),
        ((8, 6), False, "ampere", torch.bfloat16, "sdpa"),
        ((8, 9), False, "ampere", torch.bfloat16, "sdpa"),
        ((9, 0), True, "hopper", torch.bfloat16, "fa3"),
        ((9, 0), False, "hopper", torch.bfloat16, "sdpa"),
        ((10, 0), True, "ampere", torch.bfloat16, "sdpa"),
        ((12, 0), True, "ampere", torch.bfloat16, "sdpa"),
    ],
)
def test_platform_follows_from_the_capability(capability, has_fa3, row, dtype, attention):
    platform = train.pick_platform(capability, has_fa3)
    assert (platform.name, platform.dtype, platform.attention) == (row, dtype, attention)


@pytest.mark.parametrize("arguments", [((6, 1),), ((5, 2), False, "turing"), (None, False, "hopper")])
def test_a_gpu_that_cannot_run_the_row_is_refused_with_the_remedy(arguments):
    with pytest.raises(SystemExit, match=r"^train.py: .*--platform cpu"):
        train.pick_platform(*arguments)


def test_a_forced_row_wins_over_the_capability():
    assert train.pick_platform((9, 0), True, "turing").dtype == torch.float16
    assert train.pick_platform((6, 1), False, "cpu").device == "cpu"


@pytest.mark.parametrize("platform", train.PLATFORMS.values(), ids=lambda p: p.name)
def test_sizes_of_every_row_divide(platform):
    assert platform.n_embd % platform.head_dim == 0
    assert platform.total_batch % (platform.device_batch * platform.seq_len) == 0
    assert platform.n_embd % 64 == 0, "4-bit blocks of 64 must divide the rows"


@pytest.mark.parametrize(
    ("seconds", "batch", "device_batch"),
    [
        (300, 2**17, 64),
        (120, 2**16, 32),
        (60, 2**16, 32),
        (30, 2**15, 16),
        (15, 2**15, 16),
        (1200, 2**18, 64),
        (1e-3, 2**11, 1),
    ],
)
def test_the_batch_follows_the_square_root_of_the_budget(seconds, batch, device_batch):
    platform = train.scale_batch(train.PLATFORMS["hopper"], seconds)
    assert (platform.total_batch, platform.device_batch) == (batch, device_batch)


# -- Model


@pytest.mark.parametrize("window", [TINY.window, TINY.seq_len // 4], ids=["whole", "pieces"])
def test_model_is_causal(window):
    model, _ = build(dataclasses.replace(TINY, window=window))
    train_a_little(model)  # at initialisation every block is the identity, and causality would be trivial
    tokens = torch.randint(VOCAB, (2, TINY.seq_len))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-5)
    assert (before[:, 41:] - after[:, 41:]).abs().max() > 1e-3, "a token must change what follows it"


def test_pieces_of_a_shifted_layer_span_the_cuts_of_the_others():
    platform = dataclasses.replace(TINY, window=16)
    model, _ = build(platform)
    cos, sin = model.cos[: TINY.seq_len], model.sin[: TINY.seq_len]
    x = torch.randn(2, TINY.seq_len, TINY.n_embd)
    changed = x.clone()
    changed[:, 30] += 1
    for shift, reach in (0, 32), (8, 40):  # cut at 32, or at 24 and 40
        attention = train.Attention(platform, 16, shift, False, None)
        with torch.no_grad():
            a, b = (attention(t, t, 1.0, 0.0, None, None, cos, sin)[1] for t in (changed, x))
            difference = a - b
        moved = difference.abs().amax((0, 2)).nonzero().squeeze(1)
        assert moved.tolist() == list(range(30, reach))


def train_a_little(model, steps=3):
    optimizer, loader = train.make_optimizer(model), batches()
    for step in range(steps):
        train.set_schedules(optimizer, 0.0, step)
        train.train_step(model, optimizer, train.make_scaler(TINY), loader, 1)


def test_first_loss_is_about_ln_v():
    model, _ = build()
    x, y, _ = next(batches())
    assert abs(model(x, y).item() - math.log(VOCAB)) < 0.05


def test_loss_is_the_cross_entropy_of_the_logits():
    model, _ = build()
    train_a_little(model)
    x, y, _ = next(batches(seed=2))
    y = y.clone()
    y[0, :5] = -1
    with torch.no_grad():
        expected = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none")
        torch.testing.assert_close(model(x, y, reduction="none"), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(x, y), expected.sum() / (y >= 0).sum(), rtol=1e-5, atol=1e-5)


def test_flops_count_every_matrix_six_times():
    model, _ = build()
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    tables = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    attention = 12 * TINY.depth * TINY.n_embd * TINY.seq_len
    assert model.flops_per_token() == 6 * (matrices - tables) + attention


@pytest.mark.gpu
def test_fa3_and_sdpa_rows_agree():
    flash = train.load_fa3()
    if flash is None:
        pytest.skip("flash_attn_interface is not installed")
    row = dataclasses.replace(train.PLATFORMS["hopper"], depth=2, seq_len=256)
    torch.manual_seed(0)
    with torch.device("cuda"):
        fa3 = train.GPT(row, VOCAB, flash)
        sdpa = train.GPT(dataclasses.replace(row, attention="sdpa"), VOCAB, None)
        for model in (fa3, sdpa):
            model.init_weights()
        for p in fa3.parameters():
            torch.nn.init.normal_(p, std=0.05)
        sdpa.load_state_dict(fa3.state_dict())
        for block in fa3.blocks:
            block.attn.window = row.seq_len  # SDPA has no windows
        tokens = torch.randint(VOCAB, (2, 256))
    with torch.no_grad():
        a, b = fa3(tokens), sdpa(tokens)
    assert ((a - b).norm() / b.norm()).item() < 2e-2  # two bf16 attentions


# -- Optimizer


def state_of(optimizer):
    return torch.utils._pytree.tree_leaves([group["state"] for group in optimizer.param_groups])


def test_every_parameter_is_in_exactly_one_group():
    model, optimizer = build()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) and set(held) == set(model.parameters())


def test_polar_express_orthogonalizes():
    torch.manual_seed(0)
    x = torch.randn(3, 64, 64)
    singular = torch.linalg.svdvals(train.polar_express(x / x.norm(dim=(-2, -1), keepdim=True)))
    assert singular.max() < 1.25 and singular.median() > 0.7


def test_adamw_matches_torch():
    torch.manual_seed(0)
    ours, reference = (torch.nn.Parameter(torch.ones(7, 5)) for _ in range(2))
    group = dict(kind="adamw", params=[ours], lr=0.1, betas=(0.8, 0.95), weight_decay=0.01, momentum=0.0)
    optimizer = train.MuonAdamW([group], torch.float32, compile=False)
    adamw = torch.optim.AdamW([reference], lr=0.1, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.01)
    for _ in range(5):
        ours.grad = torch.randn(7, 5)
        reference.grad = ours.grad.clone()
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(ours, reference)


def dense_adam(p, grad, v, t, lr, beta2):
    """sparse_adam_update in float64, row by row, of a dense gradient whose untouched rows are NaN."""
    for row in (~grad.isnan().any(1)).nonzero().flatten():
        v[row] = beta2 * v[row] + (1 - beta2) * grad[row].square().mean()
        p[row] -= lr * grad[row] / ((v[row] / (1 - beta2**t)).sqrt() + 1e-10)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_sparse_adam_moves_the_rows_of_a_batch_and_no_other(accumulation):
    torch.manual_seed(0)
    table = train.NGramEmbedding(2, 50, 8)
    torch.nn.init.zeros_(table.weight)
    group = dict(kind="sparse", params=[table.weight], lr=0.1, betas=(0.8, 0.95), weight_decay=0.0, momentum=0.0)
    optimizer = train.MuonAdamW([group], torch.float32, compile=False)
    p, v = torch.zeros(50, 8, dtype=torch.float64), torch.zeros(50, 1, dtype=torch.float64)
    for t in range(1, 5):
        dense = torch.full((50, 8), math.nan, dtype=torch.float64)
        for _ in range(accumulation):
            ids, grad = torch.randint(20, (3, 7)), torch.randn(3, 7, 8)  # many a row several times
            (torch.nn.Embedding.forward(table, ids) * grad).sum().backward()
            for row, g in zip(ids.flatten(), grad.flatten(0, 1).double(), strict=True):
                dense[row] = dense[row].nan_to_num(0) + g
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dense_adam(p, dense, v, t, 0.1, 0.95)
    torch.testing.assert_close(table.weight.double(), p, rtol=1e-5, atol=1e-6)
    assert table.weight[20:].count_nonzero() == 0


def test_a_part_that_an_edit_has_left_unused_stays_what_it_is():
    model, optimizer = build()
    model.gone = model.head
    model.head = train.Linear(TINY.n_embd, VOCAB)  # after the optimizer has seen the other
    torch.nn.init.zeros_(model.head.weight)
    gone_table, model.ngram_embeds = model.ngram_embeds[1], model.ngram_embeds[:1]
    before = model.gone.weight.detach().clone()
    train.train_step(model, optimizer, train.make_scaler(TINY), batches(), 1)
    assert torch.equal(model.gone.weight, before)
    assert not gone_table.weight.any()


def test_ngrams_tell_successions_of_tokens_apart():
    rows = 4096
    for n in (2, 3):
        table = train.NGramEmbedding(n, rows, 1)
        table.weight.data = torch.arange(rows, dtype=torch.float32)[:, None]  # so that it says which row it takes
        idx = torch.randint(8192, (4, 512), generator=torch.Generator().manual_seed(n))
        took = table(idx).flatten()
        # As many different rows as throwing 2048 balls at random into 4096 bins fills: 1612 +- 21
        assert 1500 < took.unique().numel() < 1700
        idx[1:, 100 : 100 + n] = idx[0, 100 : 100 + n]  # the same n tokens, whatever stands before them
        assert table(idx)[:, 99 + n].unique().numel() == 1
        assert table(idx)[:, 98 + n].unique().numel() > 1


def test_tables_forget_whole_epochs_before_the_end_and_nothing_else_is_forgotten(monkeypatch):
    forgot = []
    monkeypatch.setattr(train.MuonAdamW, "forget_tables", lambda self: forgot.append(self.counters[0].item()))
    run_loop(tokens=128 * 25, epoch_tokens=128 * 10.4 / 0.98)
    assert forgot == [5, 15]
    forgot.clear()
    run_loop(tokens=128 * 25, epoch_tokens=128 * 26)
    assert forgot == []
    monkeypatch.undo()
    model, optimizer = build()
    train.train_step(model, optimizer, train.make_scaler(TINY), batches(), 1)
    others = [p.detach().clone() for n, p in model.named_parameters() if "ngram" not in n]
    assert model.ngram_embeds[0].weight.any()
    optimizer.forget_tables()
    assert not any(embed.weight.any() for embed in model.ngram_embeds)
    kept = [p for n, p in model.named_parameters() if "ngram" not in n]
    assert all(torch.equal(a, b) for a, b in zip(others, kept, strict=True))


def test_it_trains_and_forgets_without_n_grams_too(monkeypatch):
    monkeypatch.setattr(train, "NGRAMS", ())
    model, optimizer = build()
    train.train_step(model, optimizer, train.make_scaler(TINY), batches(), 1)
    optimizer.forget_tables()
    assert optimizer.counters[0] == 1 and model.head.weight.isfinite().all()


def test_muon_moves_each_square_by_an_orthogonal_step_of_the_learning_rate():
    torch.manual_seed(0)
    shapes = [(3 * 64, 64), (64, 64), (64, 4 * 64)]  # like c_qkv, c_proj and the MLP's c_proj
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    group = dict(kind="muon", params=params, lr=0.1, betas=None, weight_decay=0.0, momentum=0.0)
    optimizer = train.MuonAdamW([group], torch.float32, compile=False)
    for p in params:
        p.grad = torch.randn(p.shape)
    optimizer.step()
    for p, scale in zip(params, (1, 1, 0.5), strict=True):
        wide = int(p.size(0) < p.size(1))
        for matrix, grad in zip(p.detach().split(64, wide), p.grad.split(64, wide), strict=True):
            assert (matrix * grad).sum() < 0, "downhill"
            # NorMuon evens the rows out (columns, where wide), and keeps an orthogonal matrix's norm: 0.1 * sqrt(64)
            assert matrix.norm().item() == pytest.approx(0.1 * 8 * scale, rel=0.15)
            assert (matrix.norm(dim=1 - wide).std() / matrix.norm(dim=1 - wide).mean()).item() < 1e-3


def test_overflow_skips_the_step_and_changes_no_bit():
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    train.train_step(model, optimizer, scaler, batches(), 1)
    tensors = [*model.parameters(), optimizer.counters[0], *state_of(optimizer)]  # not the counters of skips
    before = [t.detach().clone() for t in tensors]
    hook = model.head.weight.register_hook(lambda grad: grad * math.inf)
    train.train_step(model, optimizer, scaler, batches(), 1)
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert optimizer.counters[1].item() == 1
    assert scaler.get_scale() == 2.0
    train.train_step(model, optimizer, scaler, batches(), 1)
    assert not torch.equal(before[0], tensors[0]), "and the next step goes on"


def test_loss_scale_does_not_change_the_update():
    runs = []
    for enabled in (False, True):
        model, optimizer = build()
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        for step in range(3):
            train.set_schedules(optimizer, 0.0, step)
            train.train_step(model, optimizer, scaler, batches(), 1)
        runs.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


# -- Schedules, warm-up, loop


def test_schedules_run_from_full_rate_to_the_final_fraction():
    _, optimizer = build()
    train.set_schedules(optimizer, 0.0, 0)
    assert all(group["lr"] == group["initial_lr"] for group in optimizer.param_groups)
    train.set_schedules(optimizer, 1.0, 10_000)
    for group in optimizer.param_groups:
        final = 1 if group["kind"] == "sparse" else train.FINAL_LR
        assert group["lr"] == pytest.approx(final * group["initial_lr"])
        if group["kind"] == "muon":
            assert group["momentum"] == pytest.approx(0.95) and group["weight_decay"] == 0


def test_warm_up_restores_every_tensor_and_the_rng_bit_for_bit():
    model, optimizer = build()
    tensors = [*model.parameters(), *model.buffers(), *optimizer.counters, *state_of(optimizer)]
    before, rng = [t.detach().clone() for t in tensors], torch.get_rng_state()
    assert train.warm_up(model, optimizer, TINY) == TINY
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_out_of_memory_in_warm_up_halves_the_device_batch(monkeypatch, capsys):
    model, optimizer = build()
    real, seen = train.train_step, []

    def step(model, optimizer, scaler, loader, accumulation):
        size = next(loader)[0].size(0)
        seen.append(size)
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, optimizer, scaler, loader, accumulation)

    monkeypatch.setattr(train, "train_step", step)
    before = [p.detach().clone() for p in model.parameters()]
    platform = train.warm_up(model, optimizer, dataclasses.replace(TINY, device_batch=8, total_batch=1024))
    assert seen == [8, 4, 2] and platform.device_batch == 2 and platform.total_batch == 1024
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert capsys.readouterr().out.count("halved") == 2


def test_accumulation_equals_one_large_batch():
    large = dataclasses.replace(TINY, device_batch=4, total_batch=256)
    tokens = torch.randint(VOCAB, (4, TINY.seq_len + 1))
    x, y = tokens[:, :-1], tokens[:, 1:]
    runs = []
    for platform, parts in ((large, [(x, y, 1)]), (TINY, [(x[:2], y[:2], 1), (x[2:], y[2:], 1)])):
        model, optimizer = build(platform)
        loss, _ = train.train_step(model, optimizer, train.make_scaler(platform), iter(parts), len(parts))
        # matrices only: identity blocks leave scalars and gates gradients of pure rounding, which AdamW blows up
        matrices = [p.detach().flatten() for n, p in model.named_parameters() if p.ndim == 2 and "gate" not in n]
        runs.append((loss, torch.cat(matrices)))
    torch.testing.assert_close(runs[0][0], runs[1][0])
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=1e-3, atol=1e-4)


def test_twenty_steps_overfit_one_batch():
    model, optimizer = build()
    losses = []
    for step in range(20):
        train.set_schedules(optimizer, step / 20, step)
        losses.append(train.train_step(model, optimizer, train.make_scaler(TINY), batches(), 1)[0].item())
    assert losses[0] > 6 and losses[-1] < 0.5, losses


def run_loop(seed=0, tokens=128 * 6, loader=None, **more):
    model, optimizer = build(seed=seed)
    clock = Clock(tokens=tokens)
    steps = train.train(model, optimizer, train.make_scaler(TINY), loader or batches(), TINY, clock, **more)
    return steps, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_loop_spends_its_token_budget_and_repeats_bit_for_bit(capsys):
    (steps, first), (_, second) = run_loop(), run_loop()
    assert steps == 6
    assert torch.equal(first, second)
    assert not torch.equal(first, run_loop(seed=1)[1])
    assert "step 00002" in capsys.readouterr().out


@pytest.mark.parametrize("bad_step", [1, 6])
def test_a_lost_loss_ends_the_run_with_its_reason(monkeypatch, bad_step):
    real, calls = train.train_step, itertools.count(1)

    def step(*args):
        loss, epoch = real(*args)
        return (loss * math.nan if next(calls) == bad_step else loss), epoch

    monkeypatch.setattr(train, "train_step", step)
    with pytest.raises(FloatingPointError, match=f"nan at step {bad_step}"):
        run_loop()


def test_collapse_of_the_loss_scale_ends_the_run(monkeypatch):
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5, growth_interval=10**6)
    with pytest.raises(FloatingPointError, match="GradScaler below 1 for 50 steps"):
        train.train(model, optimizer, scaler, batches(), TINY, Clock(tokens=128 * 100))


# -- 4-bit training, and the weights on disk


def test_round_to_nf4_changes_the_block_matrices_only():
    model, _ = build()
    train_a_little(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train.round_to_nf4(model)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {n for n in before if n.endswith(("c_qkv.weight", "c_proj.weight", "c_fc.weight"))}
    for name in changed:
        error = (dict(model.named_parameters())[name] - before[name]).norm() / before[name].norm()
        assert 0.01 < error < 0.15, (name, error)


def test_four_bit_training_learns_and_keeps_masters_and_codes_together(monkeypatch):
    monkeypatch.setattr(train, "FOUR_BIT", True)
    model, optimizer = build()
    losses = []
    for step in range(15):
        train.set_schedules(optimizer, step / 15, step)
        losses.append(train.train_step(model, optimizer, train.make_scaler(TINY), batches(), 1)[0].item())
    assert losses[-1] < 1.5, losses
    for linear in train.block_linears(model):
        packed, absmax = train.quantize_4bit(linear.weight.detach())
        assert torch.equal(packed.flatten(), linear.packed.flatten())
        assert torch.equal(absmax.flatten(), linear.absmax.flatten())


def test_checkpoint_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "CHECKPOINT", tmp_path / "model.safetensors")
    model, _ = build()
    train_a_little(model)
    train.save_checkpoint(model, {"official": False, "gpu": "cpu"})
    loaded, metadata = train.load_checkpoint(train.PLATFORMS["cpu"], VOCAB, None)
    assert metadata == {"official": False, "gpu": "cpu"}
    tokens = torch.randint(VOCAB, (1, 16))
    with torch.no_grad():
        assert torch.equal(model(tokens), loaded(tokens))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_sampling_without_a_checkpoint_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "CHECKPOINT", tmp_path / "model.safetensors")
    with pytest.raises(SystemExit, match=r"Run python train.py first"):
        train.load_checkpoint(TINY, VOCAB, None)
