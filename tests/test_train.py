"""Claims about train.py: the GPU, the model, the optimizer, the warm-up and the loop. Whole processes: test_run.py."""

import copy
import dataclasses
import functools
import io
import itertools
import math
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from reference_model import relative_error, sliding_attention
from torch.nn.attention import SDPBackend

import harness
import prepare
import train
from harness import GPU, Clock
from kernels import quantize_4bit

VOCAB = 512
TINY = train.Config(
    depth=3, n_embd=64, head_dim=32, seq_len=64, window=64, full_heads=2, device_batch_size=2, total_batch_size=128,
    ngram_rows=512, vocab_size=VOCAB,
)  # fmt: skip
EXPERTS = dataclasses.replace(TINY, num_experts=3, experts_per_token=2)
CPU = torch.device("cpu")
NO_GPU = GPU(None, 0.0)


def build(config=TINY, seed=0):
    torch.manual_seed(seed)
    model = train.build_model(config, CPU, NO_GPU)
    return model, train.make_optimizer(model)


def batches(seed=1):
    """The same random batch forever."""
    torch.manual_seed(seed)
    tokens = torch.randint(VOCAB, (TINY.device_batch_size, TINY.seq_len + 1))
    return itertools.repeat((tokens[:, :-1], tokens[:, 1:], 1))


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


@pytest.mark.parametrize(
    ("capability", "has_fa3", "dtype", "attention"),
    [
        (None, False, torch.float32, "sdpa"),
        ((7, 0), False, torch.float16, "sdpa"),
        ((7, 5), False, torch.float16, "sdpa"),
        ((8, 0), False, torch.bfloat16, "fa2"),
        ((9, 0), True, torch.bfloat16, "fa3"),
        ((9, 0), False, torch.bfloat16, "fa2"),
        ((12, 0), False, torch.bfloat16, "fa2"),
    ],
)
def test_numerics_follow_from_the_capability(capability, has_fa3, dtype, attention):
    assert train.pick_numerics(GPU(capability, 0.0, 0, has_fa3)) == (dtype, attention)


def test_a_gpu_that_is_too_old_is_refused_with_the_remedy():
    with pytest.raises(prepare.PrepareError, match=r"\(6, 1\) is below 7.0.*--gpu cpu"):
        train.pick_numerics(GPU((6, 1), 0.0))


def test_size_grows_with_the_gpu():
    sizes = [train.pick_size(GPU(None, peak)) for peak in (0, 25e12, 65e12, 121e12, 312e12, 989e12, 2250e12)]
    matrices = [config.depth * config.n_embd**2 for config in sizes]
    assert matrices == sorted(matrices)
    assert sizes[0] == train.SIZES[0][1] and sizes[-1] == train.SIZES[-1][1] and sizes[1] == sizes[2] != sizes[3]


@pytest.mark.parametrize(
    ("peak", "gigabytes", "rows"),
    [
        (65e12, 16, 2_621_440),  # a T4: tables of 6.0 GB
        (25e12, 12.7, 2_621_440),  # an RTX 3060
        (25e12, 12, 1_310_720),
        (25e12, 4, 655_360),
        (165e12, 24, 2_621_440),
        (165e12, 16, 1_310_720),
        (0, 0, 40_960),
    ],
)
def test_the_tables_take_at_most_half_of_the_memory(peak, gigabytes, rows):
    config = train.pick_size(GPU((8, 6), peak, int(gigabytes * 1e9)))
    assert config == dataclasses.replace(train.pick_size(GPU((8, 6), peak)), ngram_rows=rows)


@pytest.mark.parametrize("config", [config for _, config in train.SIZES], ids=str)
def test_sizes_that_ship_divide(config):
    """Most of what does not is refused, but only on the GPU that takes this size."""
    assert config.total_batch_size % (config.device_batch_size * config.seq_len) == 0
    assert config.n_embd % config.head_dim == config.seq_len % config.window == 0
    assert config.full_heads <= config.n_embd // config.head_dim
    assert config.n_embd % 64 == 0, "4-bit blocks of 64 must divide the rows"


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (dict(head_dim=48), "Config"),
        (dict(full_heads=3), "Config"),
        (dict(window=0), "Config"),
        (dict(window=48), "SDPA cuts whole pieces"),
        (dict(seq_len=100, total_batch_size=200), "SDPA cuts whole pieces"),
        (dict(total_batch_size=100), r"device_batch_size \* seq_len must divide total_batch_size"),
        (dict(device_batch_size=3, total_batch_size=256), r"device_batch_size \* seq_len must divide total_batch_size"),
        (dict(num_experts=2, experts_per_token=0), "Config"),
        (dict(num_experts=2, experts_per_token=3), "Config"),
        (dict(num_experts=8, experts_per_token=6), "Config"),  # not equal parts
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused_with_their_values(sizes, reason):
    with pytest.raises(AssertionError, match="^" + ".*".join([reason, *(f"{k}={v}," for k, v in sizes.items())])):
        train_on(*build(dataclasses.replace(TINY, **sizes)))


def test_a_batch_that_a_short_run_cannot_divide_is_refused():
    config = dataclasses.replace(TINY, seq_len=64, total_batch_size=6 * 64)
    with pytest.raises(AssertionError, match=r"must divide total_batch_size: .* total_batch_size=96,"):
        train.scale_batch(config, 30)


@pytest.mark.parametrize(
    ("given", "seconds", "scaled"),  # sequences in a step and in a device batch
    [
        ((64, 64), 300, (64, 64)),
        ((64, 64), 120, (32, 32)),
        ((64, 64), 60, (32, 32)),
        ((64, 64), 30, (16, 16)),
        ((64, 64), 1200, (128, 64)),
        ((64, 64), 1e-3, (1, 1)),
        ((12, 4), 75, (6, 2)),
    ],
)
def test_the_batch_follows_the_square_root_of_the_budget_in_whole_device_batches(given, seconds, scaled):
    total, device_batch_size = given
    config = dataclasses.replace(TINY, device_batch_size=device_batch_size, total_batch_size=total * TINY.seq_len)
    config = train.scale_batch(config, seconds)
    assert (config.total_batch_size, config.device_batch_size) == (scaled[0] * TINY.seq_len, scaled[1])


# -- Model


@pytest.mark.parametrize("window", [TINY.window, TINY.seq_len // 4], ids=["whole", "pieces"])
def test_model_is_causal(window):
    model = trained(window=window)
    tokens = torch.randint(VOCAB, (2, TINY.seq_len))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-5)
    assert (before[:, 41:] - after[:, 41:]).abs().max() > 1e-3, "a token must change what follows it"


def test_rows_that_pieces_do_not_divide_are_refused_and_never_mixed():
    model, _ = build(dataclasses.replace(TINY, window=16))
    with pytest.raises(RuntimeError, match="16"):
        model(torch.randint(VOCAB, (2, 24)))


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
    config = dataclasses.replace(TINY, window=16)
    model, _ = build(config)
    matrices = 3 * 12 * 64 * 64 + 64 * VOCAB + (4 + 2 + 4) * 32  # blocks, lm_head, gates of 2 heads, twice with values
    keys = 16 + 16 + 64
    assert model.flops_per_token() == 6 * matrices + 12 * 64 * keys
    wide, _ = build(dataclasses.replace(TINY, window=2 * TINY.seq_len))
    assert wide.flops_per_token() == build()[0].flops_per_token() == 6 * matrices + 12 * 64 * 3 * TINY.seq_len
    for per_token in (1, 2):  # as wide as before, and a router
        experts, _ = build(dataclasses.replace(config, num_experts=4, experts_per_token=per_token))
        assert experts.flops_per_token() == 6 * (matrices + 3 * 4 * 64) + 12 * 64 * keys


@pytest.mark.parametrize("experts, per_token", [(3, 1), (8, 1), (16, 1), (32, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_experts_in_half_precision_are_those_in_fp32_but_for_rounding(dtype, experts, per_token, device):
    torch.manual_seed(0)
    module = train.Experts(dataclasses.replace(TINY, num_experts=experts, experts_per_token=per_token)).to(device)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x = torch.randn(4, 512, TINY.n_embd, device=device, dtype=dtype, requires_grad=True)
    y = module(x)
    score = torch.sigmoid(module.router(x))  # as rounded: another rounding may flip the choice
    best = score.sort(dim=-1, descending=True, stable=True).indices[..., :per_token]
    expected = torch.zeros_like(y, dtype=torch.float32)
    for i, (c_fc, c_proj) in enumerate(zip(module.c_fc, module.c_proj, strict=True)):
        of_expert = F.leaky_relu(x.float() @ c_fc.T, 0.3).square() @ c_proj * 2 * score[..., i : i + 1]
        expected = expected + torch.where((best == i).any(-1, keepdim=True), of_expert, 0)
    inputs, grad = (x, *module.parameters()), torch.randn(y.shape, device=device)
    ours, theirs = (torch.autograd.grad(out, inputs, grad.to(out.dtype)) for out in (y, expected))
    for a, b in zip((y, *ours), (expected, *theirs), strict=True):
        assert relative_error(a, b) < 16 * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fa3", "fa2"])
@pytest.mark.parametrize("window", [128, 1024])
def test_kernels_of_exact_windows_agree_with_a_mask_forward_and_backward(kind, window):
    if torch.cuda.get_device_capability() < (8, 0) or (kind == "fa3" and not harness.this_gpu().has_fa3):
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
    x, y, _ = next(batches())
    expected = model(x, y).item()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    tag = compile_trunk(model, counter, monkeypatch)
    for _ in range(2):
        assert model(x, y).item() == pytest.approx(expected, abs=1e-5)
    assert counter.frame_count == 1
    called = [node.target for graph in counter.graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert F.scaled_dot_product_attention in called
    assert not any(f.__module__ == "torch.nn.attention" for f in called), "PyTorch would not cache the compilation"
    assert all(backend.name in tag for backend in train.BACKENDS)


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights(monkeypatch):
    model = trained()
    compile_trunk(model, "eager", monkeypatch)
    x, y, _ = next(batches())
    average = copy.deepcopy(model)
    expected = average(x, y).item()
    train_on(model, train.make_optimizer(model))
    assert average(x, y).item() == expected != model(x, y).item()


@pytest.mark.parametrize("attention", ["fa3", "fa2"])
def test_the_trunk_compiles_with_exact_windows(monkeypatch, exact_windows, attention):
    monkeypatch.setattr(train, "BACKENDS", [SDPBackend.MATH])  # in bf16 a CPU's fused kernel needs AVX-512
    model = train.build_model(dataclasses.replace(TINY, depth=5), CPU, GPU((9, 0), 0.0, 0, attention == "fa3"))
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.c_proj.weight, std=0.1)  # zero at the start, or no gradient would reach q
    x, y, _ = next(batches())

    def gradient():
        model.zero_grad()
        model(x, y).backward()
        return model.blocks[0].attn.c_qkv.weight.grad

    expected = gradient()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compile_trunk(model, counter, monkeypatch)
    assert expected.any()
    torch.testing.assert_close(gradient(), expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
    assert counter.frame_count == 1


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True)], ids=["fp16", "bf16"])
def test_cudnn_and_flash_attention_serve_bf16_and_not_fp16_whose_loss_is_scaled(monkeypatch, capability, fast):
    allowed = []

    def attention(q, k, v, is_causal):
        cuda = torch.backends.cuda
        allowed.append((cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()))
        return v

    model = train.build_model(TINY, CPU, GPU(capability, 0.0))
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    x, y, _ = next(batches())
    model(x, y)
    assert set(allowed) == {(fast, fast, True)}
    assert train.make_scaler(model).is_enabled() != fast


# -- Parameters: their groups and their initial values


@pytest.mark.parametrize(
    ("name", "shape", "has_initial_values"),
    [
        ("shift", (4, 8), False),
        ("blocks.1.mlp.bias", (8,), False),
        ("blocks.1.skip_lambda", (), False),  # may have to start at 0
        ("blocks.1.attn.scale", (2, 1), False),  # one for each head is no matrix
        ("blocks.1.attn.bigram_embed.weight", (99, 64), True),
        ("blocks.1.attn.conv", (64, 1, 3), True),  # a convolution is no stack of experts
        ("blocks.1.experts.shift", (4, 8), True),
    ],
)
def test_a_parameter_of_no_group_or_without_initial_values_is_named(name, shape, has_initial_values):
    model, _ = build(EXPERTS)
    owner, _, attribute = name.rpartition(".")
    if "bigram" in name:
        model.blocks[1].attn.bigram_embed = torch.nn.Module()
    model.get_submodule(owner).register_parameter(attribute, torch.nn.Parameter(torch.ones(shape)))
    with pytest.raises(AssertionError, match=re.escape(f"no group for {name} {shape}")):
        train.make_optimizer(model)
    if not has_initial_values:
        with pytest.raises(AssertionError, match=re.escape(f"sets no {name}")):
            model.init_weights()


def test_an_edit_that_adds_a_parameter_leaves_the_initial_values_of_all_others_alone():
    values = []
    for seed, edited in ((1, False), (1, True), (2, False)):
        model, _ = build()
        if edited:
            model.blocks[0].attn.register_parameter("aaa", torch.nn.Parameter(torch.ones(8, 8)))
        torch.manual_seed(seed)
        model.init_weights()
        values.append({name: p for name, p in model.named_parameters() if name != "blocks.0.attn.aaa"})
    assert values[0].keys() == values[1].keys()
    for name, p in values[0].items():
        assert torch.equal(p, values[1][name])
        assert p.unique().numel() == 1 or not torch.equal(p, values[2][name]), "another seed is another draw"
    assert not torch.equal(values[0]["blocks.0.mlp.c_fc.weight"], values[0]["blocks.1.mlp.c_fc.weight"])


def test_a_matrix_is_not_taken_for_one_whose_name_its_own_contains():
    model, _ = build()
    attn, mlp = model.blocks[1].attn, model.blocks[1].mlp
    new = mlp.embed_proj, mlp.gate, mlp.c_proj_in, attn.gate_proj, attn.router_q = [
        train.Linear(64, 64) for _ in range(5)
    ]
    model.init_weights()
    muon = {p for group in train.make_optimizer(model).param_groups if group["kind"] == "muon" for p in group["params"]}
    for linear in new:
        assert linear.weight in muon and 0 < linear.weight.abs().max() < 1


# -- Optimizer


def test_a_frozen_parameter_stays_what_it_is():
    model, _ = build()
    frozen = [model.blocks[1].attn.c_qkv.weight, model.blocks[0].attn.value_embed.weight]
    before = [p.requires_grad_(False).clone() for p in frozen]
    train_on(model, train.make_optimizer(model), 3)
    assert all(map(torch.equal, frozen, before))


def test_weights_that_an_edit_replaces_train_on():
    model, optimizer = build()
    for weight in (model.blocks[0].mlp.c_fc.weight, model.blocks[1].attn.c_qkv.weight):
        weight.data = F.normalize(weight.data)
        before = weight.detach().clone()
        train_on(model, optimizer)
        assert not torch.equal(weight, before)


def test_a_part_that_an_edit_has_left_unused_stays_what_it_is():
    model, optimizer = build()
    model.gone = model.lm_head
    model.lm_head = train.Linear(TINY.n_embd, VOCAB)  # after the optimizer has seen the other
    torch.nn.init.zeros_(model.lm_head.weight)
    gone_table, model.ngram_embeds = model.ngram_embeds[1], model.ngram_embeds[:1]
    before = model.gone.weight.detach().clone()
    train_on(model, optimizer)
    assert torch.equal(model.gone.weight, before)
    assert not gone_table.weight.any()


@pytest.mark.parametrize("config", [TINY, EXPERTS], ids=["MLP", "experts"])
def test_a_copy_and_a_saved_state_train_on_as_the_model_itself_does(config):
    model, optimizer = build(config)
    train_on(model, optimizer, 3)
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    expected = train_on(model, optimizer, 8)
    weights, state = torch.load(io.BytesIO(buffer.getvalue()))
    other, _ = build(config, seed=1)
    other.load_state_dict(weights)
    for model in (twin, other):
        optimizer = train.make_optimizer(model)
        optimizer.load_state_dict(copy.deepcopy(state))  # which would be changed in place
        assert train_on(model, optimizer, 8) == expected and expected[-1] < expected[0] - 1


@pytest.mark.parametrize("option", [dict(betas=(0.9, 0.8)), dict(weight_decay=0.5)], ids=str)
def test_tables_refuse_what_they_would_ignore(option):
    group = dict(kind="sparse", params=[train.NGramEmbedding(2, 8, 4, torch.float32).weight])
    with pytest.raises(AssertionError, match="no momentum and no weight decay"):
        train.MuonAdamW([group | dict(betas=(0.0, 0.8), weight_decay=0.0) | option], torch.float32)


def test_gradients_of_tables_that_the_optimizer_cannot_use_are_refused():
    model, optimizer = build()  # which asks for sparse ones
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        train_on(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    model, optimizer = build()
    model.ngram_embeds[0].sparse = False
    with pytest.raises(AssertionError, match="must be sparse"):
        train_on(model, optimizer)


def test_a_scaler_must_not_unscale():
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu")
    train.train_step(model, optimizer, scaler, batches())
    scaler.scale(model(*next(batches())[:2])).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="leave out scaler"):
        scaler.step(optimizer)


def test_four_bit_training_learns_and_keeps_masters_and_codes_together(monkeypatch):
    monkeypatch.setattr(train, "FOUR_BIT", True)
    model, optimizer = build()
    assert train_on(model, optimizer, 15)[-1] < 1.5
    for linear in (m for m in model.modules() if isinstance(m, train.Linear4bit)):
        packed, absmax = quantize_4bit(linear.weight.detach())
        assert torch.equal(packed.flatten(), linear.packed.flatten())
        assert torch.equal(absmax.flatten(), linear.absmax.flatten())


# -- Warm-up and loop


def run_loop(tokenizer, clock, monkeypatch, config=TINY, device=CPU, gpu=NO_GPU):
    """train.train() on a CPU, with the tiny sizes."""
    config = dataclasses.replace(config, vocab_size=tokenizer.get_vocab_size())
    monkeypatch.setattr(train, "pick_size", lambda gpu: config)
    model, numbers = train.train(clock, tokenizer, device, 0, gpu)
    assert not model.training, "an edit's dropout would be scored"
    return model, numbers


class WithStatistics(train.GPT):
    """As an edit makes one: forward changes buffers, of which one is saved, and draws random numbers."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("sum", torch.zeros(2), persistent=False)

    def forward(self, idx, *args):
        self.mean.lerp_(idx.float().aminmax().max, 0.1)
        self.sum = self.sum + torch.rand(2)
        return super().forward(idx, *args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_run_with_warm_up_equals_one_without_bit_for_bit(monkeypatch, tokenizer, one_thread, dtype, kind):
    """Nothing of it knows that it was warmed up, so torch.optim.AdamW in place of our optimizer works as well."""
    monkeypatch.setattr(train, "pick_numerics", lambda *_: (dtype, "sdpa"))
    monkeypatch.setattr(train, "GPT", WithStatistics)
    if kind == "adamw":
        # fused: the others refuse to unscale the fp16 tables
        monkeypatch.setattr(train, "make_optimizer", lambda model: torch.optim.AdamW(model.parameters(), fused=True))
    manual_seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # the state of the generator stands for itself
    ends = []
    for warm_up in (harness.warm_up, lambda model, step: None):
        manual_seed(0)
        monkeypatch.setattr(harness, "warm_up", warm_up)
        model, _ = run_loop(tokenizer, Clock(tokens=128 * 3), monkeypatch, EXPERTS)
        ends.append([*model.parameters(), *model.buffers(), torch.get_rng_state()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("fits", [2, 0])
def test_out_of_memory_in_warm_up_shrinks_the_device_batch_to_a_divisor_as_far_as_one_sequence(fits, capsys):
    model, _ = build(dataclasses.replace(TINY, device_batch_size=9, total_batch_size=18 * 64))
    seen = []

    def step(loader):
        seen.append(next(loader)[0].size(0))
        assert model.embed.weight.grad is None
        model.embed.weight.grad = torch.ones_like(model.embed.weight)  # which the next attempt must not find
        if seen[-1] > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")

    if fits:
        harness.warm_up(model, step)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            harness.warm_up(model, step)
    assert seen == [9, 3, 1] and model.config.device_batch_size == 1 and model.config.total_batch_size == 18 * 64
    assert capsys.readouterr().out.count("Out of memory") == 2


@pytest.mark.parametrize(
    ("epochs", "resets"), [(0.97, []), (1.01, [2]), (1.1, [3]), (1.5, [9]), (2.04, [2, 13]), (2.5, [6, 16])]
)  # the pace is known from step 2 on
def test_tables_start_over_when_whole_epochs_are_left_and_nothing_else_does(monkeypatch, tokenizer, epochs, resets):
    real, calls = torch.nn.init.zeros_, []

    def zeros_(tensor):
        if clock.steps:
            calls.append((clock.steps, tensor.any().item(), tuple(tensor.shape)))
        return real(tensor)

    monkeypatch.setattr(torch.nn.init, "zeros_", zeros_)
    monkeypatch.setattr(prepare.TokenStream, "__len__", lambda self: int(128 * 25 / epochs))
    clock = Clock(tokens=128 * 25)
    run_loop(tokenizer, clock, monkeypatch)
    assert calls == [(step, True, (TINY.ngram_rows, TINY.n_embd)) for step in resets for _ in train.NGRAMS]


def test_mfu_is_the_share_of_the_peak_flops_of_this_gpu_and_not_of_one_that_lends_its_size(monkeypatch, tokenizer):
    build_model, make_dataloader = train.build_model, train.make_dataloader
    monkeypatch.setattr(train, "build_model", lambda config, _, gpu: build_model(config, CPU, gpu))
    monkeypatch.setattr(train, "make_dataloader", lambda *args: make_dataloader(*args[:-1], CPU))
    monkeypatch.setattr(harness.experiment, "this_gpu", lambda: GPU((7, 5), 1e6))
    for kind in ("cuda", "cpu"):
        clock = Clock(tokens=128 * 2)
        device = types.SimpleNamespace(type=kind)
        model, numbers = run_loop(tokenizer, clock, monkeypatch, TINY, device, GPU(None, 1.0))
        percent = 100 * model.flops_per_token() * 256 / clock.elapsed() / 1e6
        assert harness.mfu_percent(model, clock, device) == pytest.approx(percent * (kind == "cuda"), rel=1e-3)
        assert harness.mfu_percent(torch.nn.Linear(1, 1), clock, device) == 0, "an edit without flops_per_token()"
    assert numbers["numerics"] == "float32/sdpa"


def test_collapse_of_the_loss_scale_ends_the_run(monkeypatch, tokenizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5, growth_interval=10**6)
    monkeypatch.setattr(train, "make_scaler", lambda model: scaler)
    with pytest.raises(FloatingPointError, match="loss scale below 1 at step 100"):
        run_loop(tokenizer, Clock(tokens=128 * 200), monkeypatch)


# -- Edits of train.py's text, as an agent makes them: few lines each

MLP = """\
        width = (2 if config.num_experts else 4) * config.n_embd
        self.c_fc, self.c_proj = block_linear(config.n_embd, width), block_linear(width, config.n_embd)

    def forward(self, x):
        return self.c_proj(leaky_relu_squared(self.c_fc(x)))
"""
SWIGLU = """\
        width = config.n_embd * 8 // 3 // 8 * 8
        self.c_gate, self.c_up = block_linear(config.n_embd, width), block_linear(config.n_embd, width)
        self.c_proj = block_linear(width, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.silu(self.c_gate(x)) * self.c_up(x))
"""
LOSS = "return fused_linear_cross_entropy(x, self.lm_head.weight, targets, softcap=SOFTCAP, reduction=reduction)\n"
Z_LOSS = f"""\
loss, lse = {LOSS[7:-2]}, return_lse=True)
        return loss + 1e-4 * lse.square().mean() if self.training else loss
"""
EDITS = {
    "depth": ("i % 4 == 0", "i % 3 == 0"),
    "SwiGLU": (MLP, SWIGLU),
    "AdamW for all": ("scaler = make_optimizer(model),", "scaler = torch.optim.AdamW(model.parameters(), 3e-3),"),
    "dense tables": ('group(NGRAM_LR * wide, betas=(0.0, 0.8), kind="sparse")', "group(NGRAM_LR * wide)"),
    "no tables": ("NGRAMS = (2, 3, 4)", "NGRAMS = ()"),
    "dropout": ("x = x + self.mlp(h)", "x = x + F.dropout(self.mlp(h), 0.1, self.training)"),
    "z-loss": (LOSS, Z_LOSS),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_few_lines_trains_and_is_scored_without_what_is_for_training_only(edit, monkeypatch, tokenizer):
    source, (old, new) = Path(train.__file__).read_text(), EDITS[edit]
    assert source.count(old) == 1, old
    edited = types.ModuleType("edited")
    monkeypatch.setitem(sys.modules, "edited", edited)
    exec(compile(source.replace(old, new), "train.py", "exec"), vars(edited))
    sizes = dataclasses.asdict(TINY) | dict(vocab_size=tokenizer.get_vocab_size(), depth=3 + (edit == "depth"))
    monkeypatch.setattr(edited, "pick_size", lambda gpu: edited.Config(**sizes))
    model, _ = edited.train(Clock(tokens=128 * 12), tokenizer, CPU, 0, NO_GPU)
    x, y, _ = next(prepare.make_dataloader(tokenizer, 2, TINY.seq_len, "train", "cpu"))
    with torch.no_grad():
        logits = model(x)
        expected = F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
        assert model(x, y).item() == pytest.approx(expected, rel=1e-4) and expected < math.log(logits.size(-1)) - 0.3
        if edit in ("dropout", "z-loss"):
            assert abs(model.train()(x, y).item() - expected) > 1e-4
    assert all(table.weight.any() for table in model.ngram_embeds)
