"""Claims about train.py: the GPU, the model, the optimizer, the warm-up and the loop. Whole processes: test_run.py."""

import copy
import dataclasses
import functools
import inspect
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
from torch.nn.attention import SDPBackend

import harness
import prepare
import train
from harness import Clock
from kernels import fused_linear_cross_entropy, quantize_4bit

VOCAB = 512
TINY = train.Config(
    depth=3, n_embd=64, head_dim=32, seq_len=64, window=64, full_heads=2, device_batch_size=2, total_batch_size=128,
    ngram_rows=512, vocab_size=VOCAB,
)  # fmt: skip
EXPERTS = dataclasses.replace(TINY, num_experts=3, experts_per_token=2)
CPU = torch.device("cpu")
NO_GPU = harness.GPU(None, 0.0)


def build(config=TINY, seed=0):
    torch.manual_seed(seed)
    model = train.build_model(config, CPU, NO_GPU)
    return model, train.make_optimizer(model)


def batches(config=TINY, seed=1):
    """The same random batch forever."""
    torch.manual_seed(seed)
    tokens = torch.randint(VOCAB, (config.device_batch_size, config.seq_len + 1))
    return itertools.repeat((tokens[:, :-1], tokens[:, 1:], 1))


# -- GPU


@pytest.mark.parametrize(
    ("capability", "has_fa3", "dtype", "attention"),
    [
        (None, False, torch.float32, "sdpa"),
        ((7, 0), False, torch.float16, "sdpa"),
        ((7, 5), False, torch.float16, "sdpa"),
        ((8, 0), False, torch.bfloat16, "fa2"),
        ((8, 9), False, torch.bfloat16, "fa2"),
        ((9, 0), True, torch.bfloat16, "fa3"),
        ((9, 0), False, torch.bfloat16, "fa2"),
        ((12, 0), False, torch.bfloat16, "fa2"),
    ],
)
def test_numerics_follow_from_the_capability(capability, has_fa3, dtype, attention):
    assert train.pick_numerics(harness.GPU(capability, 0.0, 0, has_fa3)) == (dtype, attention)


def test_a_gpu_that_is_too_old_is_refused_with_the_remedy():
    with pytest.raises(prepare.PrepareError, match=r"\(6, 1\) is below 7.0.*--gpu cpu"):
        train.pick_numerics(harness.GPU((6, 1), 0.0))


def test_size_grows_with_the_gpu():
    sizes = [train.pick_size(harness.GPU(None, peak)) for peak in (0, 25e12, 65e12, 121e12, 312e12, 989e12, 2250e12)]
    matrices = [config.depth * config.n_embd**2 for config in sizes]
    assert matrices == sorted(matrices)
    assert sizes[0] == train.SIZES[0][1] and sizes[-1] == train.SIZES[-1][1] and sizes[1] == sizes[2] != sizes[3]


@pytest.mark.parametrize(
    ("peak", "gigabytes", "rows"),
    [
        (65e12, 16, 2_621_440),  # a T4: tables of 6.0 GB
        (25e12, 12.7, 2_621_440),  # an RTX 3060
        (25e12, 12, 1_310_720),
        (25e12, 6.2, 1_310_720),
        (25e12, 4, 655_360),
        (71e12, 24, 2_621_440),
        (165e12, 24, 2_621_440),
        (165e12, 16, 1_310_720),
        (989e12, 80, 2_621_440),
        (0, 0, 40_960),
    ],
)
def test_the_tables_take_at_most_half_of_the_memory(peak, gigabytes, rows):
    config = train.pick_size(harness.GPU((8, 6), peak, int(gigabytes * 1e9)))
    assert config == dataclasses.replace(train.pick_size(harness.GPU((8, 6), peak)), ngram_rows=rows)


@pytest.mark.parametrize("config", [config for _, config in train.SIZES], ids=str)
def test_sizes_divide(config):
    assert config.n_embd % config.head_dim == 0
    assert config.total_batch_size % (config.device_batch_size * config.seq_len) == 0
    assert config.seq_len % config.window == 0, "SDPA cuts whole pieces"
    assert 1 <= config.full_heads <= config.n_embd // config.head_dim
    assert config.n_embd % 64 == 0, "4-bit blocks of 64 must divide the rows"


@pytest.mark.parametrize("size", [{"head_dim": 48}, {"full_heads": 3}, {"window": 48}, {"seq_len": 100}], ids=str)
def test_sizes_that_cannot_be_are_refused(size):
    with pytest.raises(AssertionError, match=", ".join(f"{name}={value}" for name, value in size.items())):
        build(dataclasses.replace(TINY, **size))


@pytest.mark.parametrize(
    ("seconds", "batch", "device_batch_size"),
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
def test_the_batch_follows_the_square_root_of_the_budget(seconds, batch, device_batch_size):
    config = dataclasses.replace(TINY, seq_len=2048, device_batch_size=64, total_batch_size=2**17)
    config = train.scale_batch(config, seconds)
    assert (config.total_batch_size, config.device_batch_size) == (batch, device_batch_size)


def test_a_scaled_batch_is_whole_device_batches():
    config = train.scale_batch(dataclasses.replace(TINY, device_batch_size=4, total_batch_size=12 * 64), 75)
    assert (config.total_batch_size, config.device_batch_size) == (6 * 64, 2)


def test_a_batch_of_a_fraction_of_a_sequence_is_refused():
    with pytest.raises(AssertionError, match=r"seq_len must divide total_batch_size: .*total_batch_size=100,"):
        train.scale_batch(dataclasses.replace(TINY, total_batch_size=100), 300)


def test_another_depth_leaves_the_last_layers_as_they_are():
    for config in (train.SIZES[1][1], train.SIZES[-1][1]):
        deeper = dataclasses.replace(config, depth=config.depth + 1)
        assert train.layers(deeper)[1:] == train.layers(config)
    last = train.layers(TINY)[-1]
    assert last.full_heads == TINY.full_heads and last.value_embed and last.shift == 0


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


def test_rows_that_pieces_do_not_divide_are_refused_and_never_mixed():
    model, _ = build(dataclasses.replace(TINY, window=16))
    with pytest.raises(RuntimeError, match="16"):
        model(torch.randint(VOCAB, (2, 24)))


def test_pieces_of_a_shifted_layer_span_the_cuts_of_the_others():
    model, _ = build()
    cos, sin = model.cos, model.sin
    x = torch.randn(2, TINY.seq_len, TINY.n_embd)
    changed = x.clone()
    changed[:, 30] += 1
    for shift, reach in (0, 32), (8, 40):  # cut at 32, or at 24 and 40
        attention = train.Attention(TINY, train.Layer(0, 16, shift, False), "sdpa")
        with torch.no_grad():
            difference = attention(changed, None, cos, sin) - attention(x, None, cos, sin)
        moved = difference.abs().amax((0, 2)).nonzero().squeeze(1)
        assert moved.tolist() == list(range(30, reach))


def train_a_little(model, steps=3):
    optimizer, loader = train.make_optimizer(model), batches()
    for step in range(steps):
        train.set_schedules(optimizer, 0.0, step)
        train.train_step(model, optimizer, train.make_scaler(model), loader)


def compile_trunk(model, backend, monkeypatch) -> str:
    """By that backend. Returns the tag in the key of PyTorch's caches, and puts it back."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(train, "compiled", functools.cache(train.compiled.__wrapped__))
    with torch.compiler.config.patch(cache_key_tag=""):
        model.compile_trunk()
        return torch.compiler.config.cache_key_tag


def twelve_kinds(config):
    return [train.Layer(0, *kind) for kind in itertools.product((4, 8, 16), (0, 2), (False, True))]


@pytest.mark.parametrize(
    ("depth", "layers", "compilations"),
    [(4, train.layers, 1), (9, train.layers, 2 + 3), (12, twelve_kinds, 2 + 12)],
    ids=["whole", "by halves", "of many kinds"],
)
def test_each_kind_of_layer_of_a_deep_trunk_is_compiled_once(monkeypatch, depth, layers, compilations):
    monkeypatch.setattr(train, "layers", layers)
    experts = dict(num_experts=3, experts_per_token=2)
    model, _ = build(dataclasses.replace(TINY, depth=depth, window=TINY.seq_len // 4, **experts))
    train_a_little(model, steps=1)
    x, y, _ = next(batches())
    expected = model(x, y).item()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    tag = compile_trunk(model, counter, monkeypatch)
    for _ in range(2):
        assert model(x, y).item() == pytest.approx(expected, abs=1e-5)
    assert counter.frame_count == compilations
    called = [node.target for graph in counter.graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert F.scaled_dot_product_attention in called
    assert not any(f.__module__ == "torch.nn.attention" for f in called), "PyTorch would not cache the compilation"
    assert all(backend.name in tag for backend in train.BACKENDS)


@pytest.mark.parametrize("depth", [3, 5])
def test_a_copy_of_a_compiled_model_computes_with_its_own_weights(monkeypatch, depth):
    model, _ = build(dataclasses.replace(TINY, depth=depth))
    train_a_little(model)
    compile_trunk(model, "eager", monkeypatch)
    x, y, _ = next(batches())
    average = copy.deepcopy(model)
    expected = average(x, y).item()
    train_a_little(model)
    assert average(x, y).item() == expected != model(x, y).item()


@pytest.mark.parametrize("attention", ["fa3", "fa2"])
def test_blocks_compile_with_exact_windows(monkeypatch, flash_on_cpu, attention):
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return q + 2 * v

        @staticmethod
        def backward(ctx, grad):
            return grad, torch.zeros_like(grad), 2 * grad

    monkeypatch.setattr(train, "BACKENDS", [SDPBackend.MATH])  # in bf16 a CPU's fused kernel needs AVX-512
    monkeypatch.setattr(train, "attention", functools.cache(train.attention.__wrapped__))
    monkeypatch.setattr(harness, "load_fa3", lambda: lambda q, k, v, causal, window_size: Attention.apply(q, k, v))
    model = train.build_model(dataclasses.replace(TINY, depth=5), CPU, harness.GPU((9, 0), 0.0, 0, attention == "fa3"))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.c_proj.weight, std=0.1)  # zero at the start, or no gradient would reach q
    x, y, _ = next(batches())

    def gradient():
        model.zero_grad()
        model(x, y).backward()
        return model.blocks[0].attn.c_qkv.weight.grad

    expected = gradient()
    compile_trunk(model, counter, monkeypatch)
    assert expected.any()
    torch.testing.assert_close(gradient(), expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
    assert counter.frame_count == 2 + 3


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True)], ids=["fp16", "bf16"])
def test_cudnn_and_flash_attention_serve_bf16_and_not_fp16(monkeypatch, capability, fast):
    allowed = []

    def attention(q, k, v, is_causal):
        cuda = torch.backends.cuda
        allowed.append((cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()))
        return v

    model = train.build_model(TINY, CPU, harness.GPU(capability, 0.0))
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    x, y, _ = next(batches())
    model(x, y)
    assert set(allowed) == {(fast, fast, True)}


@pytest.mark.parametrize("softcap", [train.SOFTCAP, None])
def test_loss_is_the_cross_entropy_of_the_logits(softcap, monkeypatch):
    monkeypatch.setattr(train, "SOFTCAP", softcap)
    model, _ = build()
    train_a_little(model)
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


@pytest.mark.parametrize("experts, per_token", [(2, 0), (2, 3), (8, 6)], ids=["none", "too many", "not equal parts"])
def test_experts_refuse_a_number_for_each_token_that_cannot_be(experts, per_token):
    with pytest.raises(AssertionError, match=f"experts_per_token={per_token}"):
        build(dataclasses.replace(TINY, num_experts=experts, experts_per_token=per_token))


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
    pairs = [(y, expected)]
    pairs += zip(
        torch.autograd.grad(y, inputs, grad.to(dtype)), torch.autograd.grad(expected, inputs, grad), strict=True
    )
    for a, b in pairs:
        assert ((a.float() - b.float()).norm() / b.float().norm()).item() < 16 * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fa3", "fa2"])
@pytest.mark.parametrize("window", [128, 1024])
def test_kernels_of_exact_windows_agree_with_a_mask_forward_and_backward(kind, window):
    if torch.cuda.get_device_capability() < (8, 0) or (kind == "fa3" and not harness.this_gpu().has_fa3):
        pytest.skip("not on this GPU")
    torch.manual_seed(0)
    qkv = torch.randn(2, 1024, 3, 4, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    distance = torch.arange(1024, device="cuda")[:, None] - torch.arange(1024, device="cuda")
    mask = (distance >= 0) & (distance <= window)
    q, k, v = qkv.float().unbind(2)
    expected = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask).transpose(1, 2)
    grad = torch.randn_like(expected)
    pairs = [(expected, torch.autograd.grad(expected, qkv, grad)[0])]
    compiled = torch.compile(train.attention(kind), fullgraph=True)
    for attend in (train.attention(kind), compiled):
        y = attend(*qkv.unbind(2), window, 0)
        pairs.append((y, torch.autograd.grad(y, qkv, grad.to(y.dtype))[0]))
    for pair in pairs[1:]:
        for a, b in zip(pair, pairs[0], strict=True):
            assert ((a.float() - b.float()).norm() / b.float().norm()).item() < 2e-2


# -- Optimizer


def test_every_parameter_is_in_exactly_one_group():
    model, optimizer = build()
    held = [*itertools.chain(*optimizer.tables.values(), *(group["params"] for group in optimizer.param_groups))]
    assert len(held) == len(set(held)) and set(held) == set(model.parameters())


def test_a_parameter_without_a_group_is_named():
    model, _ = build()
    model.blocks[1].mlp.bias = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(AssertionError, match=re.escape("no group for blocks.1.mlp.bias (8,)")):
        train.make_optimizer(model)
    model, _ = build(dataclasses.replace(TINY, num_experts=4))
    model.blocks[1].experts.shift = torch.nn.Parameter(torch.zeros(4, 8))
    with pytest.raises(AssertionError, match=re.escape("no group for blocks.1.experts.shift (4, 8)")):
        train.make_optimizer(model)


def test_a_matrix_is_not_taken_for_one_whose_name_its_own_contains():
    model, _ = build()
    block = model.blocks[1]
    new = block.mlp.embed_proj, block.attn.gate_proj, block.attn.router_q = [train.Linear(64, 64) for _ in range(3)]
    model.init_weights()
    muon = {p for group in train.make_optimizer(model).param_groups if group["kind"] == "muon" for p in group["params"]}
    for linear in new:
        assert linear.weight in muon and 0 < linear.weight.abs().max() < 1


def test_a_parameter_that_init_weights_forgets_is_named():
    model, _ = build()
    model.blocks[1].attn.scale = torch.nn.Parameter(torch.ones(8))
    with pytest.raises(AssertionError, match=re.escape("['blocks.1.attn.scale']")):
        model.init_weights()


def test_one_scale_for_each_head_is_no_matrix():
    model, _ = build()
    model.blocks[1].attn.scale = torch.nn.Parameter(torch.ones(2, 1))
    with pytest.raises(AssertionError, match=re.escape("no group for blocks.1.attn.scale (2, 1)")):
        train.make_optimizer(model)
    with pytest.raises(AssertionError, match=re.escape("['blocks.1.attn.scale']")):
        model.init_weights()


def test_a_gate_of_an_mlp_does_not_start_at_zero_as_those_of_heads_do():
    model, _ = build()
    model.blocks[1].mlp.gate = train.Linear(64, 64)
    model.init_weights()
    assert model.blocks[1].mlp.gate.weight.abs().max() > 0 == model.blocks[1].attn.gate.weight.abs().max()


@pytest.mark.parametrize("part", ["attn", "mlp", "experts"])
def test_a_part_of_a_block_without_a_matrix_that_starts_at_zero_is_refused(part):
    model, _ = build(EXPERTS)
    module = getattr(model.blocks[1], part)
    module.c_down, module.c_proj = module.c_proj, None
    with pytest.raises(AssertionError, match=r"name the last of \[.*'c_down.* c_proj"):
        model.init_weights()
    setattr(model.blocks[1], part, torch.nn.Dropout(0.1))  # has no parameters
    model.init_weights()
    setattr(model.blocks[1], part, torch.nn.LayerNorm(64))  # has no matrix
    with pytest.raises(AssertionError, match="sets no values"):
        model.init_weights()


def test_a_convolution_is_no_stack_of_experts():
    model, _ = build()
    flops = model.flops_per_token()
    model.blocks[1].attn.conv = torch.nn.Conv1d(64, 64, 3, groups=64, bias=False)
    assert model.flops_per_token() == flops + 6 * 3 * 64
    with pytest.raises(AssertionError, match=r"no group for blocks\.1\.attn\.conv"):
        train.make_optimizer(model)


def test_a_frozen_parameter_stays_what_it_is():
    model, _ = build()
    frozen = [model.blocks[1].attn.c_qkv.weight, model.blocks[0].attn.value_embed.weight]
    before = [p.requires_grad_(False).clone() for p in frozen]
    train_a_little(model)
    assert all(map(torch.equal, frozen, before))


def losses_of(model, optimizer, steps=8):
    scaler = train.make_scaler(model)
    return [train.train_step(model, optimizer, scaler, batches())[0].item() for _ in range(steps)]


def test_weights_that_an_edit_replaces_train_on():
    model, optimizer = build()
    for weight in (model.blocks[0].mlp.c_fc.weight, model.blocks[1].attn.c_qkv.weight):
        weight.data = F.normalize(weight.data)
        before = weight.detach().clone()
        losses_of(model, optimizer, 1)
        assert not torch.equal(weight, before)


@pytest.mark.parametrize("config", [TINY, EXPERTS], ids=["MLP", "experts"])
def test_a_copy_of_a_model_in_training_trains_as_the_model_does(config):
    model, optimizer = build(config)
    losses_of(model, optimizer, 2)
    twin = copy.deepcopy(model)
    losses = losses_of(twin, train.make_optimizer(twin))
    assert losses == losses_of(model, train.make_optimizer(model)) and losses[-1] < losses[0] - 1


@pytest.mark.parametrize("config", [TINY, EXPERTS], ids=["MLP", "experts"])
def test_training_goes_on_from_a_saved_state_as_if_nothing_had_happened(config):
    model, optimizer = build(config)
    losses_of(model, optimizer, 3)
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    expected = losses_of(model, optimizer)
    model, optimizer = build(config, seed=1)
    weights, state = torch.load(io.BytesIO(buffer.getvalue()))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert losses_of(model, optimizer) == expected


@pytest.mark.parametrize("option", [dict(betas=(0.9, 0.8)), dict(weight_decay=0.5)], ids=str)
def test_tables_refuse_what_they_would_ignore(option):
    group = dict(kind="sparse", params=[train.NGramEmbedding(2, 8, 4, torch.float32).weight])
    with pytest.raises(AssertionError, match="no momentum and no weight decay"):
        train.MuonAdamW([group | dict(betas=(0.0, 0.8), weight_decay=0.0) | option], torch.float32)


def test_a_batch_that_is_skipped_leaves_nothing_to_the_next_step():
    weights = []
    for skip in (False, True):
        model, optimizer = build()
        train.set_schedules(optimizer, 0.0, 0)
        if skip:
            model(*next(batches())[:2]).backward()
            optimizer.zero_grad()
        train.train_step(model, optimizer, train.make_scaler(model), batches())
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def test_adamw_for_all_says_so_if_the_gradients_of_tables_are_sparse():
    model, _ = build()  # with an optimizer that asked for them
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        losses_of(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    model.init_weights()  # as after the warm-up
    losses = losses_of(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert losses[-1] < losses[0] - 1 and all(table.weight.any() for table in model.ngram_embeds)


def test_tables_of_another_kind_of_group_get_dense_gradients():
    model = train.build_model(TINY, CPU, NO_GPU)
    group = dict(kind="adamw", params=[*model.parameters()], lr=0.01, betas=(0.8, 0.95), weight_decay=0, momentum=0)
    losses_of(model, train.MuonAdamW([group], torch.float32))
    assert all(table.weight.any() for table in model.ngram_embeds)


def test_a_table_with_a_dense_gradient_is_refused():
    model, optimizer = build()
    model.ngram_embeds[0].sparse = False
    with pytest.raises(AssertionError, match="must be sparse"):
        train.train_step(model, optimizer, train.make_scaler(model), batches())


def test_a_scaler_must_not_unscale():
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu")
    train.train_step(model, optimizer, scaler, batches())
    scaler.scale(model(*next(batches())[:2])).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="leave out scaler"):
        scaler.step(optimizer)


def test_matrices_of_any_shape_train():
    """A SwiGLU of 8/3 width, fewer heads for keys, an MLP that is no multiple."""
    model, _ = build()
    shapes = [(172, 64), (64, 172), (96, 64), (40, 64)]
    for i, shape in enumerate(shapes):
        model.blocks[0].register_parameter(f"extra{i}", torch.nn.Parameter(torch.zeros(shape)))
    optimizer = train.make_optimizer(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for table in model.ngram_embeds:
        table.weight.grad = None
    optimizer.step()
    for i, (rows, columns) in enumerate(shapes):
        p = getattr(model.blocks[0], f"extra{i}").detach()
        # an orthogonal matrix of this shape, times the rate and sqrt(max(1, rows / columns))
        expected = train.MATRIX_LR * min(rows, columns) ** 0.5 * max(1, rows / columns) ** 0.5
        assert p.norm().item() == pytest.approx(expected, rel=0.2), (rows, columns)


def test_a_part_that_an_edit_has_left_unused_stays_what_it_is():
    model, optimizer = build()
    model.gone = model.lm_head
    model.lm_head = train.Linear(TINY.n_embd, VOCAB)  # after the optimizer has seen the other
    torch.nn.init.zeros_(model.lm_head.weight)
    gone_table, model.ngram_embeds = model.ngram_embeds[1], model.ngram_embeds[:1]
    before = model.gone.weight.detach().clone()
    train.train_step(model, optimizer, train.make_scaler(model), batches())
    assert torch.equal(model.gone.weight, before)
    assert not gone_table.weight.any()


def test_ngrams_tell_successions_of_tokens_apart():
    rows = 4096
    for n in train.NGRAMS:
        table = train.NGramEmbedding(n, rows, 1, torch.float32)
        table.weight.data = torch.arange(rows, dtype=torch.float32)[:, None]  # so that it says which row it takes
        idx = torch.randint(8192, (4, 512), generator=torch.Generator().manual_seed(n))
        took = table(idx).flatten()
        # As many different rows as throwing 2048 balls at random into 4096 bins fills: 1612 +- 21
        assert 1500 < took.unique().numel() < 1700
        idx[1:, 100 : 100 + n] = idx[0, 100 : 100 + n]  # the same n tokens, whatever stands before them
        assert table(idx)[:, 99 + n].unique().numel() == 1
        assert table(idx)[:, 98 + n].unique().numel() > 1


@pytest.mark.parametrize(
    ("epochs", "forgets"), [(0.97, []), (0.99, [2]), (1.0, [2]), (1.01, [2]), (1.03, [2]), (1.5, [9]), (2.5, [6, 16])]
)  # the pace is known from step 2 on
def test_tables_start_over_when_whole_epochs_are_left_and_nothing_else_does(monkeypatch, tokenizer, epochs, forgets):
    real, calls = torch.nn.init.zeros_, []

    def zeros_(tensor):
        if clock.steps:
            calls.append((clock.steps, tensor.any().item(), tuple(tensor.shape)))
        return real(tensor)

    monkeypatch.setattr(torch.nn.init, "zeros_", zeros_)
    monkeypatch.setattr(prepare.TokenStream, "__len__", lambda self: int(128 * 25 / epochs))
    clock = Clock(tokens=128 * 25)
    run_loop(tokenizer, clock, monkeypatch)
    assert calls == [(step, True, (TINY.ngram_rows, TINY.n_embd)) for step in forgets for _ in train.NGRAMS]


def test_it_trains_without_n_grams_too(monkeypatch):
    monkeypatch.setattr(train, "NGRAMS", ())
    model, optimizer = build()
    train.train_step(model, optimizer, train.make_scaler(model), batches())
    assert model.lm_head.weight.any() and model.lm_head.weight.isfinite().all()


def test_fp16_with_fp16_tables_skips_the_steps_that_overflow_and_learns_in_the_others(monkeypatch):
    monkeypatch.setattr(train, "pick_numerics", lambda *_: (torch.float16, "sdpa"))
    model, optimizer = build()
    assert {table.weight.dtype for table in model.ngram_embeds} == {torch.float16}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=10)
    losses, skipped = [], []
    for step in range(50):
        tables = [table.weight.detach().clone() for table in model.ngram_embeds]
        before = optimizer.num_skipped.item()
        losses.append(train.train_step(model, optimizer, scaler, batches())[0].item())
        skipped.append(optimizer.num_skipped.item() > before)
        for table, old in zip(model.ngram_embeds, tables, strict=True):
            assert torch.equal(table.weight, old) == skipped[-1], f"step {step}"
    assert skipped[0] and 3 < sum(skipped) < 30, skipped
    assert losses[0] > 6 and losses[-1] < 2, losses  # 0.1 to 0.6 by the CPU; rates are high for a model this small
    assert all(p.isfinite().all() for p in model.parameters())


# -- Schedules, warm-up, loop


class Started(Exception):
    pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_run_with_warm_up_starts_as_one_without_bit_for_bit(monkeypatch, tokenizer, dtype, kind):
    """Parameters, buffers, those of an edit, too, gradients, optimizer state, loss scale and random numbers. Nothing
    of it knows that it was warmed up, so torch.optim.AdamW in place of our optimizer works as well."""
    monkeypatch.setattr(train, "pick_numerics", lambda *_: (dtype, "sdpa"))
    if kind == "adamw":
        # fused: the others refuse to unscale the fp16 tables
        monkeypatch.setattr(train, "make_optimizer", lambda model: torch.optim.AdamW(model.parameters(), fused=True))
    made = []  # the last of each kind is the run's

    def recorded(real):
        return lambda model: made.append((model, real(model))) or made[-1][1]

    def counting(init):
        def with_statistics(model, *args):
            init(model, *args)
            for name, persistent in (("mean", True), ("steps", False)):
                model.register_buffer(name, torch.zeros(2), persistent=persistent)

        return with_statistics

    def forward(model, idx, targets=None, reduction="mean", real=train.GPT.forward):
        model.mean.lerp_(idx.float().aminmax().max, 0.1)
        model.steps = model.steps + torch.rand(2)
        return real(model, idx, targets, reduction)

    monkeypatch.setattr(train.GPT, "__init__", counting(train.GPT.__init__))
    monkeypatch.setattr(train.GPT, "forward", forward)
    monkeypatch.setattr(train, "make_optimizer", recorded(train.make_optimizer))
    monkeypatch.setattr(train, "make_scaler", recorded(train.make_scaler))
    manual_seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # the state of the generator stands for itself
    starts = []
    for warm_up in (harness.warm_up, lambda model, step: None):
        manual_seed(0)
        monkeypatch.setattr(harness, "warm_up", warm_up)
        clock = Clock(tokens=128)
        monkeypatch.setattr(clock, "start", lambda: (_ for _ in ()).throw(Started))
        with pytest.raises(Started):
            run_loop(tokenizer, clock, monkeypatch, EXPERTS)
        (model, optimizer), (_, scaler) = made[-2:]
        assert all(p.grad is None for p in model.parameters())
        state = torch.utils._pytree.tree_leaves([optimizer.state_dict(), scaler.state_dict()])
        starts.append([*model.parameters(), *model.buffers(), *state, torch.get_rng_state()])
    for a, b in zip(*starts, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_out_of_memory_in_warm_up_shrinks_the_device_batch_to_a_divisor(capsys):
    model, _ = build(dataclasses.replace(TINY, device_batch_size=9, total_batch_size=18 * 64))
    seen = []

    def step(loader):
        size = next(loader)[0].size(0)
        seen.append(size)
        if size > 2:
            model.embed.weight.grad = torch.ones_like(model.embed.weight)  # which the next attempt must not find
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert model.embed.weight.grad is None
        train.train_step(model, train.make_optimizer(model), train.make_scaler(model), loader)

    harness.warm_up(model, step)
    assert seen == [9, 3, 1] and model.config.device_batch_size == 1 and model.config.total_batch_size == 18 * 64
    assert capsys.readouterr().out.count("Out of memory") == 2


def test_a_single_sequence_that_does_not_fit_ends_the_warm_up():
    model, _ = build(dataclasses.replace(TINY, device_batch_size=2))
    seen = []

    def step(loader):
        seen.append(next(loader)[0].size(0))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        harness.warm_up(model, step)
    assert seen == [2, 1]


def test_a_device_batch_that_does_not_divide_the_total_batch_is_refused_with_both():
    model, optimizer = build(dataclasses.replace(TINY, device_batch_size=3, total_batch_size=4 * 64))
    with pytest.raises(AssertionError, match=r"device_batch_size=3.*total_batch_size=256"):
        train.train_step(model, optimizer, train.make_scaler(model), batches())


def run_loop(tokenizer, clock, monkeypatch, config=TINY, gpu=NO_GPU):
    """train.train() on a CPU, with the tiny sizes."""
    config = dataclasses.replace(config, vocab_size=tokenizer.get_vocab_size())
    monkeypatch.setattr(train, "pick_size", lambda gpu: config)
    model, numbers = train.train(clock, tokenizer, CPU, 0, gpu)
    assert not model.training, "an edit's dropout would be scored"
    return torch.cat([p.detach().flatten() for p in model.parameters()]), numbers


def test_mfu_is_not_that_of_a_gpu_that_only_lends_its_size(monkeypatch, tokenizer):
    _, numbers = run_loop(tokenizer, Clock(tokens=128), monkeypatch, gpu=harness.GPU(None, 1.0))
    assert numbers["mfu_percent"] == "0.00" and numbers["numerics"] == "float32/sdpa"


def test_collapse_of_the_loss_scale_ends_the_run(monkeypatch, tokenizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5, growth_interval=10**6)
    monkeypatch.setattr(train, "make_scaler", lambda model: scaler)
    with pytest.raises(FloatingPointError, match="loss scale below 1 at step 100"):
        run_loop(tokenizer, Clock(tokens=128 * 200), monkeypatch)


# -- Edits of train.py's text, as an agent makes them: few lines each

SWIGLU = """\
        width = config.n_embd * 8 // 3 // 8 * 8
        self.c_gate, self.c_up = block_linear(config.n_embd, width), block_linear(config.n_embd, width)
        self.c_proj = block_linear(width, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.silu(self.c_gate(x)) * self.c_up(x))
"""
EDITS = {
    "depth": [("i % 4 == 0", "i % 3 == 0")],
    "SwiGLU": [
        (
            "        width = (2 if config.num_experts else 4) * config.n_embd\n"
            "        self.c_fc, self.c_proj = block_linear(config.n_embd, width), block_linear(width, config.n_embd)\n"
            "\n    def forward(self, x):\n        return self.c_proj(leaky_relu_squared(self.c_fc(x)))\n",
            SWIGLU,
        )
    ],
    "AdamW for all": [
        (
            "    optimizer, scaler = make_optimizer(model)",
            "    optimizer, scaler = torch.optim.AdamW(model.parameters(), 3e-3)",
        )
    ],
    "dropout": [("x = x + self.mlp(h)", "x = x + F.dropout(self.mlp(h), 0.1, self.training)")],
    "z-loss": [
        (
            "return fused_linear_cross_entropy(x, self.lm_head.weight, targets, softcap=SOFTCAP, reduction=reduction)",
            "loss, lse = fused_linear_cross_entropy(x, self.lm_head.weight, targets, softcap=SOFTCAP, "
            "reduction=reduction, return_lse=True)\n"
            "        return loss + 1e-4 * lse.square().mean() if self.training else loss",
        )
    ],
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_few_lines_trains_and_is_scored_without_what_is_for_training_only(edit, monkeypatch, tokenizer):
    if edit == "z-loss" and "return_lse" not in inspect.signature(fused_linear_cross_entropy).parameters:
        pytest.skip("kernels.py has no return_lse yet")
    source = Path(train.__file__).read_text()
    for old, new in EDITS[edit]:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    edited = types.ModuleType("edited")
    monkeypatch.setitem(sys.modules, "edited", edited)
    exec(compile(source, "train.py", "exec"), vars(edited))
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


# -- 4-bit training


def test_four_bit_training_learns_and_keeps_masters_and_codes_together(monkeypatch):
    monkeypatch.setattr(train, "FOUR_BIT", True)
    model, optimizer = build()
    losses = []
    for step in range(15):
        train.set_schedules(optimizer, step / 15, step)
        losses.append(train.train_step(model, optimizer, train.make_scaler(model), batches())[0].item())
    assert losses[-1] < 1.5, losses
    for linear in (m for m in model.modules() if isinstance(m, train.Linear4bit)):
        packed, absmax = quantize_4bit(linear.weight.detach())
        assert torch.equal(packed.flatten(), linear.packed.flatten())
        assert torch.equal(absmax.flatten(), linear.absmax.flatten())
