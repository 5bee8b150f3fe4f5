"""Claims about train.py: the GPU, the model, the optimizer, the warm-up and the loop. Whole processes: test_run.py."""

import copy
import dataclasses
import functools
import gc
import itertools
import re
import types
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from reference_model import relative_error, sliding_attention

import harness
import prepare
import train
from harness import GPU, Clock
from kernels import quantize_4bit

VOCAB = 512
TINY = train.Config(
    depth=3, n_embd=64, head_dim=32, seq_len=64, eval_seq_len=64, window=64, device_batch_size=2,
    total_batch_size=128, ngram_rows=512, vocab_size=VOCAB,
)  # fmt: skip
EXPERTS = dataclasses.replace(TINY, num_experts=3, experts_per_token=2)
CPU = torch.device("cpu")
GPUS = {torch.float32: GPU(None, 0.0), torch.bfloat16: GPU((8, 0), 0.0), torch.float16: GPU((7, 5), 0.0)}


def build(config=TINY, dtype=torch.float32):
    torch.manual_seed(0)
    model = train.build_model(config, CPU, GPUS[dtype])
    return model, train.make_optimizer(model)


def batches(seed=1):
    """The same random batch forever."""
    torch.manual_seed(seed)
    tokens = torch.randint(VOCAB, (TINY.device_batch_size, TINY.seq_len + 1))
    return itertools.repeat((tokens[:, :-1], tokens[:, 1:], 1))


def loss_of(model) -> torch.Tensor:
    return model(*next(batches())[:2])


def train_on(model, optimizer, steps=1) -> list[float]:
    """The losses of steps on the same batch."""
    scaler = train.make_scaler(model)
    return [train.train_step(model, optimizer, scaler, batches())[0].item() for _ in range(steps)]


def trained(**sizes) -> train.GPT:
    """After three steps: at initialisation every block is the identity."""
    model, optimizer = build(dataclasses.replace(TINY, **sizes))
    train_on(model, optimizer, 3)
    return model


# -- GPU


def test_numerics_follow_from_the_capability():
    for capability, flash, *numerics in (
        (None, "", torch.float32, "sdpa"),
        ((7, 5), "", torch.float16, "sdpa"),
        ((8, 0), "", torch.bfloat16, "fa2"),
        ((9, 0), "", torch.bfloat16, "fa2"),
        ((10, 0), "fa4", torch.bfloat16, "fa4"),
    ):
        assert train.pick_numerics(GPU(capability, 0.0, 0, flash)) == tuple(numerics)


def test_size_grows_with_the_gpu_and_its_tables_take_at_most_half_of_the_memory():
    sizes = [train.pick_size(GPU(None, peak)) for peak in (0, 25e12, 65e12, 121e12, 312e12, 989e12, 2250e12)]
    matrices = [config.depth * config.n_embd**2 for config in sizes]
    assert matrices == sorted(matrices)
    assert sizes[0] == train.SIZES[0][1] and sizes[-1] == train.SIZES[-1][1] and sizes[1] == sizes[2] != sizes[3]
    assert not any(size.n_embd % 64 or size.seq_len % min(size.window, size.seq_len) for _, size in train.SIZES)
    for peak, gigabytes, rows in (
        (65e12, 16, 2_621_440),  # a T4
        (312e12, 42.4, 5_242_880),  # an A100 of 40 GB
        (25e12, 4, 655_360),
        (990e12, 150, 10_485_760),  # an H200
        (0, 0, 655_360),
    ):
        config = train.pick_size(GPU((8, 6), peak, int(gigabytes * 1e9)))
        assert config == dataclasses.replace(train.pick_size(GPU((8, 6), peak)), ngram_rows=rows)


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        (dict(head_dim=48), "n_embd % head_dim == 0"),
        (dict(window=0), "window > 0"),
        (dict(total_batch_size=100), "total_batch_size % (device_batch_size * seq_len) == 0"),
        (dict(device_batch_size=3, total_batch_size=256), "total_batch_size % (device_batch_size * seq_len) == 0"),
        (dict(num_experts=2, experts_per_token=0), "0 < experts_per_token <= num_experts <= 256"),
        (dict(num_experts=257, experts_per_token=2), "0 < experts_per_token <= num_experts <= 256"),  # sorted as uint8
        (dict(num_experts=8, experts_per_token=6), "2 * n_embd % experts_per_token == 0"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused_with_their_values(sizes, rule):
    values = ".*".join(f"{name}={value}," for name, value in sizes.items())
    with pytest.raises(AssertionError, match=f"{re.escape(rule)} must hold in .*{values}"):
        dataclasses.replace(TINY, **sizes)


def said(capsys) -> str:
    """What has been printed; and it may be said again."""
    train.say_once.cache_clear()
    return capsys.readouterr().out


def test_a_run_says_which_size_is_live_and_that_experts_need_a_fast_grouped_gemm(monkeypatch, capsys):
    said(capsys)
    train.pick_size(harness.named_gpu("T4"))
    assert said(capsys) == "Size by SIZES[1], for 6.51e+13 FLOP/s\n"
    h100 = harness.named_gpu("H100")
    for capability in ((7, 5), (8, 0), (12, 0), (9, 0), (10, 3)):
        fast = capability[0] in (9, 10)
        config = train.pick_size(h100._replace(capability=capability))  # `--gpu H100` on a T4, an A100
        assert ("No experts, no FP8: only for sm_90 and sm_10x" in said(capsys)) != fast
        assert config == dataclasses.replace(train.pick_size(h100), num_experts=32 if fast else 0, fp8=fast)
    said(capsys)
    monkeypatch.setattr(train, "SIZE", TINY)
    for name, row in (("T4", 1), ("H100", 4), ("cpu", 0)):
        assert train.pick_size(harness.named_gpu(name)) == TINY
        assert said(capsys).startswith(f"Size by SIZE instead of SIZES[{row}], for ")


def test_the_batch_follows_the_square_root_of_the_budget_in_whole_device_batches():
    for sequences, device_batch, seconds, *expected in (  # sequences in a step, and at once
        (64, 64, 300, 64, 64),
        (64, 64, 60, 32, 32),
        (64, 64, 1200, 128, 64),
        (12, 4, 3, 1, 1),
        (96, 16, 3, 12, 4),
        (5, 5, 75, 2, 1),
    ):
        config = dataclasses.replace(TINY, device_batch_size=device_batch, total_batch_size=sequences * TINY.seq_len)
        config = train.scale_batch(config, seconds)
        assert [config.total_batch_size / TINY.seq_len, config.device_batch_size] == expected


# -- Model


@pytest.mark.parametrize("softcap", [train.SOFTCAP, None])
def test_loss_is_the_cross_entropy_of_the_logits_and_an_ignored_target_counts_nothing(softcap, monkeypatch):
    monkeypatch.setattr(train, "SOFTCAP", softcap)
    model = trained()
    x, y, _ = next(batches(seed=2))
    y = y.clone()
    y[0, :5] = -1
    with torch.no_grad():
        expected = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none")
        torch.testing.assert_close(model(x, y, reduction="none"), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(x, y), expected.sum() / (y >= 0).sum(), rtol=1e-5, atol=1e-5)


def test_flops_count_every_matrix_six_times_and_every_key_within_the_window():
    def flops(**sizes) -> float:
        return build(dataclasses.replace(TINY, **sizes))[0].flops_per_token()

    matrices = 3 * 12 * 64 * 64 + 64 * VOCAB + (4 + 2 + 4) * 32  # blocks, lm_head, gates of 2 heads, twice with values
    keys = 16 + 16 + 64
    assert flops(window=16) == 6 * matrices + 12 * 64 * keys
    assert flops() == flops(window=2 * TINY.seq_len) == 6 * matrices + 12 * 64 * 3 * TINY.seq_len
    for per_token in (1, 2):  # as wide as before, and a router in the first and the last block
        experts = dict(num_experts=4, experts_per_token=per_token)
        assert flops(window=16, **experts) == 6 * (matrices + 2 * 4 * 64) + 12 * 64 * keys


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fa2", "fa3", "fa4"])
@pytest.mark.parametrize("window", [128, 1024])
def test_kernels_of_exact_windows_agree_with_a_mask_forward_and_backward(kind, window):
    if torch.cuda.get_device_capability() < (8, 0) or (kind != "fa2" and not harness.flash.installed(kind)):
        pytest.skip("not on this GPU")
    torch.manual_seed(0)
    qkv = torch.randn(2, 1024, 3, 4, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    expected = sliding_attention(*qkv.float().unbind(2), window)
    grad = torch.randn_like(expected)
    expected_grad = torch.autograd.grad(expected, qkv, grad)[0]
    for attend in (train.attention(kind), torch.compile(train.attention(kind), fullgraph=True)):
        y = attend(*qkv.unbind(2), window, 0)
        for a, b in (y, expected), (torch.autograd.grad(y, qkv, grad.to(y.dtype))[0], expected_grad):
            assert relative_error(a, b) < 2e-2


# -- The compiler


def compile_trunk(model, backend, monkeypatch) -> str:
    """By that backend. Returns the tag in the key of PyTorch's caches, and puts it back."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(train, "compiled", functools.cache(train.compiled.__wrapped__))
    with torch.compiler.config.patch(cache_key_tag=""):
        model.compile_trunk()
        return torch.compiler.config.cache_key_tag


def test_the_trunk_is_one_compilation(monkeypatch):
    model = trained(depth=4, window=TINY.seq_len // 4)
    expected = loss_of(model).item()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    tag = compile_trunk(model, counter, monkeypatch)
    for _ in range(2):
        assert loss_of(model).item() == pytest.approx(expected, abs=1e-5)
    with torch.no_grad():
        loss_of(model)  # evaluation is not compiled
    assert counter.frame_count == 1
    called = [node.target for graph in counter.graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert F.scaled_dot_product_attention in called
    assert not any(f.__module__ == "torch.nn.attention" for f in called), "PyTorch would not cache the compilation"
    assert all(backend.name in tag for backend in train.BACKENDS)


def test_a_trunk_of_ones_own_is_compiled_and_scored_and_a_copy_computes_with_its_own_weights(monkeypatch):
    class Doubled(train.GPT):
        def trunk(self, *args):
            return 2 * super().trunk(*args)

    torch.manual_seed(0)
    model, (tokens, *_) = Doubled(TINY, torch.float32, "sdpa"), next(batches())
    model.init_weights()
    first = model(tokens).detach()
    compile_trunk(model, "eager", monkeypatch)
    average = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(model(tokens), first)
    assert torch.equal(model(tokens), first)
    train_on(model, train.make_optimizer(model))
    assert torch.equal(average(tokens), first) and not torch.equal(model(tokens), first)


@pytest.mark.parametrize(("dtype", "fast"), [(torch.float16, False), (torch.bfloat16, True)])
def test_cudnn_and_flash_attention_serve_bf16_and_not_fp16_whose_loss_is_scaled(monkeypatch, dtype, fast):
    allowed = []

    def attention(q, k, v, mask, is_causal):
        cuda = torch.backends.cuda
        allowed.append((cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()))
        return v

    model, _ = build(dtype=dtype)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    loss_of(model)
    assert set(allowed) == {(fast, fast, True)}
    model.wte = model._modules.pop("embed")  # under any name
    assert train.make_scaler(model).is_enabled() != fast


# -- Parameters: their groups and their initial values


@pytest.mark.parametrize("shape", [(), (8,), (1, 8), (24, 8), (VOCAB, 8), (8, VOCAB), (4, 8, 8), (8, 1, 3)], ids=str)
def test_a_parameter_that_declares_nothing_keeps_its_first_values_and_learns_by_its_shape_with_one_line(shape, capsys):
    kind = "muon" if shape == (24, 8) else "adamw"
    model, _ = build(EXPERTS)
    new = [torch.nn.Parameter(torch.rand(shape)) for _ in range(2)]
    before = [p.detach().clone() for p in new]
    for block, p in zip(model.blocks, new, strict=False):
        block.mlp.register_parameter("shift", p)
    said(capsys)
    for again in (False, True):
        model.init_weights(again)
        assert all(map(torch.equal, new, before))
        groups = train.make_optimizer(model).param_groups
        assert [group["kind"] for group in groups for p in group["params"] if any(p is q for q in new)] == 2 * [kind]
        for p in new:
            p.data += 1
    lr = train.MATRIX_LR if kind == "muon" else train.GATE_LR
    assert said(capsys) == f"blocks.*.mlp.shift declares no optimizer: {kind}, lr {lr}\n"


def test_what_is_written_into_a_parameter_that_has_declared_its_values_is_there_again_after_the_warm_up(monkeypatch):
    """In a constructor or into a built model. The optimizer is the declared one."""

    class Filled(train.GPT):
        def __init__(self, *args):
            super().__init__(*args)
            torch.nn.init.constant_(self.lm_head.weight, 0.25)

    kinds = [group["kind"] for group in build()[1].param_groups]
    monkeypatch.setattr(train, "GPT", Filled)
    model, optimizer = build()
    assert (model.lm_head.weight == 0.25).all() and [group["kind"] for group in optimizer.param_groups] == kinds
    model.embed.weight.data.mul_(0.5)
    model.blocks[0].attn.c_qkv.weight.data[64:128] = 0
    written = {name: p.detach().clone() for name, p in model.named_parameters()}
    for again in (False, True):
        model.init_weights(again)
        assert all(torch.equal(p, written[name]) for name, p in model.named_parameters())
        with torch.no_grad():
            for p in model.parameters():
                p += 1
    assert 0.4 < written["embed.weight"].std() < 0.6


def test_what_would_train_in_silence_is_refused():
    (model, optimizer), tokens = build(), torch.zeros(2, 64, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"65 tokens exceed eval_seq_len: .* eval_seq_len=64\)"):
        model(torch.zeros(1, 65, dtype=torch.int64))
    (loss_of(model) + model.ngram_embeds[0].weight.square().mean()).backward()
    with pytest.raises(AssertionError, match=r"a table \(512, 64\) that is not only looked up needs adamw\(\)"):
        optimizer.step()
    with pytest.raises(AssertionError, match=re.escape("declare() its parameters")):
        train.declare(torch.nn.utils.parametrizations.weight_norm(train.Linear(4, 4)), 0, train.muon(0.1))
    hook = model.blocks[0].mlp.register_forward_hook(lambda layer, args, out: out.double())
    with pytest.raises(AssertionError, match=r"a tensor makes activations torch.float64: cast it to x.dtype"):
        model(tokens)
    hook.remove()
    for head in (torch.nn.Linear(64, VOCAB), type("Scaled", (train.Linear,), {"forward": torch.mul})(64, VOCAB)):
        model.lm_head = head  # more than its weight
        with pytest.raises(AssertionError, match=r"the loss takes lm_head\.weight alone"):
            model(tokens, tokens)


def test_initial_values_follow_from_seed_and_name_alone_and_leave_the_random_numbers_of_a_run_to_its_seed():
    values, draws = [], []
    for seed, edited in ((1, False), (1, True), (2, False)):
        model, _ = build()
        if edited:
            model.blocks[0].attn.register_parameter("aaa", torch.nn.Parameter(torch.ones(8, 8)))
        torch.manual_seed(seed)
        for _ in range(2):
            model.init_weights()
            draws.append((torch.initial_seed(), torch.rand(()).item()))
        values.append({name: p for name, p in model.named_parameters() if name != "blocks.0.attn.aaa"})
    assert len({*draws[:4]}) == 1 and draws[0][0] == 1
    assert values[0].keys() == values[1].keys()
    for name, p in values[0].items():
        assert torch.equal(p, values[1][name])
        assert p.unique().numel() == 1 or not torch.equal(p, values[2][name]), "another seed is another draw"
    assert not torch.equal(values[0]["blocks.0.mlp.c_fc.weight"], values[0]["blocks.1.mlp.c_fc.weight"])


# -- Optimizer


ANY = {
    "ours": train.make_optimizer,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.5),
}


@pytest.fixture(params=GPUS, ids=str)
def any_model(request, exact_windows):
    """In each dtype. Only pieces of 64 in one block: 16-bit attention is slow on a CPU."""
    return build(dataclasses.replace(TINY, depth=1), dtype=request.param)[0]


@pytest.mark.parametrize("optimizer", ANY)
def test_any_optimizer_trains_the_model_tables_included_and_gradients_can_be_clipped(any_model, optimizer):
    optimizer, scaler, losses = ANY[optimizer](any_model), train.make_scaler(any_model), []
    for _ in range(4):
        losses.append(loss_of(any_model))
        scaler.scale(losses[-1]).backward()
        scaler.unscale_(optimizer)
        assert 0.01 < torch.nn.utils.clip_grad_norm_(any_model.parameters(), 0.5) < 100
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.02 and all(table.weight.any() for table in any_model.ngram_embeds)


def test_no_gradient_is_used_twice_or_after_it_was_zeroed_and_a_step_needs_no_scaler(any_model):
    optimizer, scaler = train.make_optimizer(any_model), torch.amp.GradScaler("cpu", init_scale=16.0)
    loss_of(any_model).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert not any(table.weight.any() for table in any_model.ngram_embeds), "zeroed gradients reach the tables"
    scaler.scale(loss_of(any_model)).backward()
    scaler.step(optimizer)
    muon = [p for group in optimizer.param_groups if group["kind"] == "muon" for p in group["params"]]
    after = [p.detach().clone() for p in muon]
    optimizer.step()
    assert muon and all(map(torch.equal, muon, after))
    scaler.update()
    optimizer.zero_grad()
    loss_of(any_model).backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in any_model.parameters())


def test_when_our_optimizer_is_gone_or_another_one_comes_gradients_of_tables_are_dense(any_model, capsys):
    """Without the garbage collector, which a run turns off."""
    said(capsys)
    gc.disable()
    try:
        optimizer, table, dtype = train.make_optimizer(any_model), any_model.ngram_embeds[0].weight, any_model.dtype
        average = copy.deepcopy(any_model).eval()
        assert loss_of(average).isfinite() and average.ngram_embeds[0].weight.dtype == dtype
        loss_of(any_model).backward()
        assert table.grad is None and table.dtype == dtype and len(optimizer.row_grads[table]) == 1
        optimizer = torch.optim.SGD(any_model.parameters(), 0.1)
        loss_of(any_model).backward()
        assert table.grad.dtype == table.dtype == torch.float32 and not table.grad.is_sparse and table.grad.any()
        assert ("n-gram tables: fp32, dense gradients" in said(capsys)) == (dtype != torch.float32)
    finally:
        gc.enable()


def test_four_bit_training_learns_and_keeps_masters_and_codes_together(monkeypatch):
    monkeypatch.setattr(train, "FOUR_BIT", True)
    model, optimizer = build()
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: pytest.fail("saved"), lambda t: t):
        loss_of(model)  # saves no activations
    assert train_on(model, optimizer, 15)[-1] < 1.5
    for linear in (m for m in model.modules() if isinstance(m, train.Linear4bit)):
        packed, absmax = quantize_4bit(linear.weight.detach())
        assert torch.equal(packed.flatten(), linear.packed.flatten())
        assert torch.equal(absmax.flatten(), linear.absmax.flatten())


# -- Warm-up and loop


def run_loop(tokenizer, clock, monkeypatch, config=TINY):
    """train.train() on a CPU, with the tiny sizes."""
    config = dataclasses.replace(config, vocab_size=tokenizer.get_vocab_size())
    monkeypatch.setattr(train, "pick_size", lambda gpu: config)
    model, numbers = train.train(clock, tokenizer, CPU, 0, GPUS[torch.float32])
    assert not model.training, "an edit's dropout would be scored"
    return model, numbers


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_run_with_warm_up_equals_one_without_bit_for_bit(monkeypatch, tokenizer, kind):
    """Nothing of it knows that it was warmed up, so torch.optim.AdamW in place of our optimizer works as well."""

    class WithStatistics(train.GPT):  # changes buffers, of which one is saved, and draws random numbers
        def __init__(self, *args):
            super().__init__(*args)
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("sum", torch.zeros(2), persistent=False)

        def forward(self, idx, *args):
            self.mean.lerp_(idx.float().aminmax().max, 0.1)
            self.sum = self.sum + torch.rand(2)
            return super().forward(idx, *args)

    monkeypatch.setattr(train, "pick_numerics", lambda *_: (torch.float16, "sdpa"))
    monkeypatch.setattr(train, "GPT", WithStatistics)
    if kind == "adamw":
        monkeypatch.setattr(train, "make_optimizer", lambda model: torch.optim.AdamW(model.parameters()))
    manual_seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # the state of the generator stands for itself
    ends = []
    for warm_up in (harness.warm_up, lambda model, step: None):
        manual_seed(0)
        monkeypatch.setattr(harness, "warm_up", warm_up)
        model, _ = run_loop(tokenizer, Clock(tokens=128 * 3), monkeypatch, EXPERTS)
        ends.append([*model.parameters(), *model.buffers(), torch.get_rng_state()])
    assert all(map(torch.equal, *ends))


def test_the_clock_starts_once_the_warm_up_has_compiled(monkeypatch, tokenizer):
    """The first step takes minutes, each further one a second."""
    now, seconds, train_step = [0.0], itertools.chain([300.0], itertools.repeat(1.0)), train.train_step

    def timed_step(*args):
        now[0] += next(seconds)
        return train_step(*args)

    monkeypatch.setattr(harness.clock, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(train, "train_step", timed_step)
    clock = Clock(seconds=5)
    _, numbers = run_loop(tokenizer, clock, monkeypatch)
    assert clock.steps == clock.elapsed() == 5 and numbers["numerics"] == "float32/sdpa"


@pytest.mark.parametrize("fits", [0, 2])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")]
)
def test_out_of_memory_in_warm_up_shrinks_the_device_batch_to_a_divisor_as_far_as_one_sequence(fits, error, capsys):
    model, _ = build(dataclasses.replace(TINY, device_batch_size=9, total_batch_size=18 * 64))
    seen = []

    def step(loader):
        seen.append(next(loader)[0].size(0))
        assert model.embed.weight.grad is None
        model.embed.weight.grad = torch.ones_like(model.embed.weight)  # which the next attempt must not find
        if seen[-1] > fits:
            raise error

    with nullcontext() if fits else pytest.raises(type(error)):
        harness.warm_up(model, step)
    assert seen == [9, 3, 1] and model.config.device_batch_size == 1 and model.config.total_batch_size == 18 * 64
    assert capsys.readouterr().out.count("Out of memory") == 2
    fits, error = 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    model, _ = build()
    with pytest.raises(RuntimeError, match="mat1"):
        harness.warm_up(model, step)
    assert seen == [9, 3, 1, TINY.device_batch_size], "another error is not tried again"


@pytest.mark.parametrize(("epochs", "resets"), [(0.97, []), (1.01, [2]), (2.5, [6, 16])])  # a pace: from step 2 on
def test_tables_start_over_when_whole_epochs_are_left_and_nothing_else_does(monkeypatch, tokenizer, epochs, resets):
    real, calls = torch.nn.init.zeros_, []

    def zeros_(tensor):
        if clock.steps:
            calls.append((clock.steps, tensor.any().item(), tuple(tensor.shape)))
        return real(tensor)

    monkeypatch.setattr(torch.nn.init, "zeros_", zeros_)
    monkeypatch.setattr(prepare.TokenStream, "__len__", lambda self: int(128 * 25 / epochs))
    clock = Clock(tokens=128 * 25)
    run_loop(tokenizer, clock, monkeypatch, dataclasses.replace(TINY, depth=1))
    columns = [TINY.n_embd] * 3 + [2] * 3  # tables; their second moments and updates
    assert calls == [(step, True, (TINY.ngram_rows, c)) for step in resets for c in columns]


def test_mfu_is_the_share_of_the_peak_flops_of_this_gpu(monkeypatch):
    monkeypatch.setattr(harness.summary, "this_gpu", lambda: GPU((7, 5), 1e6))
    (model, _), clock = build(), types.SimpleNamespace(tokens=256, elapsed=lambda: 2.0)
    percent = 100 * model.flops_per_token() * 256 / 2 / 1e6
    for kind, expected in (("cuda", percent), ("cpu", 0)):
        device = types.SimpleNamespace(type=kind)
        assert harness.mfu_percent(model, clock, device) == pytest.approx(expected)
        assert harness.mfu_percent(torch.nn.Linear(1, 1), clock, device) == 0, "an edit without flops_per_token()"


def test_collapse_of_the_loss_scale_ends_the_run(monkeypatch, tokenizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5, growth_interval=10**6)
    monkeypatch.setattr(train, "make_scaler", lambda model: scaler)
    small = dataclasses.replace(TINY, depth=1, seq_len=16, device_batch_size=1, total_batch_size=16)
    with pytest.raises(FloatingPointError, match="loss scale below 1 at step 100"):
        run_loop(tokenizer, Clock(tokens=16 * 200), monkeypatch, small)
