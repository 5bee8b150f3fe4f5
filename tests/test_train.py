"""Claims about train.py: the GPU, the model, the optimizer, the warm-up and the loop. Whole processes: test_run.py."""

import copy
import dataclasses
import functools
import itertools
import math
import re

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import harness
import prepare
import train
from harness import Clock
from kernels import quantize_4bit

VOCAB = 512
TINY = train.Config(
    depth=3, n_embd=64, head_dim=32, seq_len=64, window=64, full_heads=2, device_batch_size=2, total_batch_size=128,
    ngram_rows=512, vocab_size=VOCAB,
)  # fmt: skip
CPU = torch.device("cpu")


def build(config=TINY, seed=0):
    torch.manual_seed(seed)
    model = train.build_model(config, CPU, None)
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
        (None, True, torch.float32, "sdpa"),
        ((7, 0), True, torch.float16, "sdpa"),
        ((7, 5), True, torch.float16, "sdpa"),
        ((8, 0), True, torch.bfloat16, "sdpa"),
        ((8, 6), False, torch.bfloat16, "sdpa"),
        ((8, 9), False, torch.bfloat16, "sdpa"),
        ((9, 0), True, torch.bfloat16, "fa3"),
        ((9, 0), False, torch.bfloat16, "sdpa"),
        ((10, 0), True, torch.bfloat16, "sdpa"),
        ((12, 0), True, torch.bfloat16, "sdpa"),
    ],
)
def test_numerics_follow_from_the_capability(capability, has_fa3, dtype, attention):
    assert train.pick_numerics(capability, has_fa3) == (dtype, attention)


def test_a_gpu_that_is_too_old_is_refused_with_the_remedy():
    with pytest.raises(prepare.PrepareError, match=r"\(6, 1\) is below 7.0.*--gpu cpu"):
        train.pick_numerics((6, 1), False)


def test_size_grows_with_the_gpu():
    sizes = [train.pick_size(peak) for peak in (0, 25e12, 65e12, 121e12, 312e12, 989e12, 2250e12)]
    matrices = [config.depth * config.n_embd**2 for config in sizes]
    assert matrices == sorted(matrices)
    assert sizes[0] == train.SIZES[0][1] and sizes[-1] == train.SIZES[-1][1] and sizes[1] == sizes[2] != sizes[3]


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
        attention = train.Attention(TINY, train.Layer(0, 16, shift, False), None)
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
    assert all(backend.name in tag for backend in train.SDPA_BACKENDS)


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


def test_blocks_compile_with_an_attention_that_is_an_autograd_function_as_that_of_flash_attn_3(monkeypatch):
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return q + 2 * v

        @staticmethod
        def backward(ctx, grad):
            return grad, torch.zeros_like(grad), 2 * grad

    monkeypatch.setattr(train, "load_fa3", lambda: lambda q, k, v, causal, window_size: Attention.apply(q, k, v))
    model = train.build_model(dataclasses.replace(TINY, depth=5), CPU, (9, 0))
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.c_proj.weight, std=0.1)  # zero at the start, or no gradient would reach q
    x, y, _ = next(batches())

    def gradient():
        model.zero_grad()
        model(x, y).backward()
        return model.blocks[0].attn.c_qkv.weight.grad

    expected = gradient()
    compile_trunk(model, "aot_eager", monkeypatch)
    assert expected.any()
    torch.testing.assert_close(gradient(), expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True)], ids=["fp16", "bf16"])
def test_cudnn_and_flash_attention_serve_bf16_and_not_fp16(monkeypatch, capability, fast):
    allowed = []

    def attention(q, k, v, is_causal):
        cuda = torch.backends.cuda
        allowed.append((cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()))
        return v

    model = train.build_model(TINY, CPU, capability)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    x, y, _ = next(batches())
    model(x, y)
    assert set(allowed) == {(fast, fast, True)}


def test_first_loss_is_about_ln_v():
    model, _ = build()
    x, y, _ = next(batches())
    assert abs(model(x, y).item() - math.log(VOCAB)) < 0.05


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
def test_fa3_and_sdpa_agree_where_every_layer_sees_the_whole_context():
    flash = train.load_fa3()
    if flash is None:
        pytest.skip("flash_attn_interface is not installed")
    # no experts, whose choice a rounding may flip
    sizes = dict(depth=2, seq_len=256, ngram_rows=512, vocab_size=VOCAB, num_experts=0)
    config = dataclasses.replace(train.SIZES[-1][1], **sizes)
    torch.manual_seed(0)
    with torch.device("cuda"):
        fa3, sdpa = (train.GPT(config, torch.bfloat16, attention) for attention in (flash, None))
        for p in fa3.parameters():
            torch.nn.init.normal_(p, std=0.05)
        sdpa.load_state_dict(fa3.state_dict())
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


def test_a_matrix_that_was_cut_off_from_its_stack_is_noticed():
    model, optimizer = build()
    weight = model.blocks[0].mlp.c_fc.weight
    weight.data.copy_(F.normalize(weight.data))
    train.train_step(model, optimizer, train.make_scaler(model), batches())
    weight.data = F.normalize(weight.data)
    with pytest.raises(AssertionError, match="cuts a matrix off"):
        train.train_step(model, optimizer, train.make_scaler(model), batches())


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


def test_polar_express_orthogonalizes():
    torch.manual_seed(0)
    for shape in (3, 64, 64), (3, 96, 64):
        x = torch.randn(shape)
        singular = torch.linalg.svdvals(train.polar_express(x / x.norm(dim=(-2, -1), keepdim=True)))
        assert singular.max() < 1.25 and singular.median() > 0.7


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


def test_induction_takes_from_earlier_in_the_row_and_never_from_later_or_from_other_rows():
    random = torch.Generator().manual_seed(0)
    idx, other = torch.randint(5, (2, 16, 64), generator=random)  # short vocabulary: much comes again

    def seen(idx):
        followers, found = train.induction(idx)
        return torch.where(found, followers, -1)

    before = seen(idx)
    assert (before >= 0).float().mean() > 0.1 and (before[:, :3] < 0).float().mean() > 0.9
    for cut in range(4, 64):
        changed = torch.cat([idx[:, :cut], other[:, cut:]], dim=1)
        assert torch.equal(seen(changed)[:, :cut], before[:, :cut]), "the future"
        assert torch.equal(seen(idx[:, :cut]), before[:, :cut]), "the length of the row"
    assert torch.equal(seen(idx[3:4])[0], before[3]), "other rows"


@pytest.mark.parametrize(("epochs", "forgets"), [(0.97, []), (1.5, [9]), (2.5, [6, 16])])
def test_tables_start_over_when_whole_epochs_are_left_and_nothing_else_does(monkeypatch, tokenizer, epochs, forgets):
    real, calls = torch.nn.init.zeros_, []

    def zeros_(tensor):
        if clock.steps:
            calls.append((clock.steps, tensor.any().item(), tuple(tensor.shape)))
        return real(tensor)

    monkeypatch.setattr(torch.nn.init, "zeros_", zeros_)
    monkeypatch.setattr(prepare.TokenStream, "__len__", lambda self: int(128 * 25 / epochs / 0.98) - 1)
    clock = Clock(tokens=128 * 25)
    run_loop(tokenizer, clock, monkeypatch)
    assert calls == [(step, True, (TINY.ngram_rows, TINY.n_embd)) for step in forgets for _ in train.NGRAMS]


def test_it_trains_without_n_grams_too(monkeypatch):
    monkeypatch.setattr(train, "NGRAMS", ())
    model, optimizer = build()
    train.train_step(model, optimizer, train.make_scaler(model), batches())
    assert optimizer.steps == 1 and model.lm_head.weight.isfinite().all()


def test_muon_moves_each_square_by_an_orthogonal_step_of_the_learning_rate():
    torch.manual_seed(0)
    shapes = [(3 * 64, 64), (64, 64), (64, 4 * 64)]  # like c_qkv, c_proj and the MLP's c_proj
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    group = dict(kind="muon", params=params, lr=0.1, betas=None, weight_decay=0.0, momentum=0.0)
    optimizer = train.MuonAdamW([group], torch.float32)
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
    train.train_step(model, optimizer, scaler, batches())
    tensors = [*model.parameters(), optimizer.steps, *state_of(optimizer)]
    before = [t.detach().clone() for t in tensors]
    hook = model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    train.train_step(model, optimizer, scaler, batches())
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert optimizer.num_skipped.item() == 1
    assert scaler.get_scale() == 2.0
    train.train_step(model, optimizer, scaler, batches())
    assert not torch.equal(before[0], tensors[0]), "and the next step goes on"


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


def test_loss_scale_does_not_change_the_update():
    runs = []
    for enabled in (False, True):
        model, optimizer = build()
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        for step in range(3):
            train.set_schedules(optimizer, 0.0, step)
            train.train_step(model, optimizer, scaler, batches())
        runs.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


# -- Schedules, warm-up, loop


class Started(Exception):
    pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_run_with_warm_up_starts_as_one_without_bit_for_bit(monkeypatch, tokenizer, dtype, kind):
    """Parameters, optimizer state, loss scale and random numbers. Nothing of it knows that it was warmed up, so
    torch.optim.AdamW in place of our optimizer works as well."""
    monkeypatch.setattr(train, "pick_numerics", lambda *_: (dtype, "sdpa"))
    if kind == "adamw":
        # fused: the others refuse to unscale the fp16 tables
        monkeypatch.setattr(train, "make_optimizer", lambda model: torch.optim.AdamW(model.parameters(), fused=True))
        monkeypatch.setattr(train, "set_schedules", lambda *_: None)
    made = []  # the last of each kind is the run's

    def recorded(real):
        return lambda model: made.append((model, real(model))) or made[-1][1]

    monkeypatch.setattr(train, "make_optimizer", recorded(train.make_optimizer))
    monkeypatch.setattr(train, "make_scaler", recorded(train.make_scaler))
    starts = []
    for warm_up in (harness.warm_up, lambda model, step: None):
        monkeypatch.setattr(harness, "warm_up", warm_up)
        clock = Clock(tokens=128)
        monkeypatch.setattr(clock, "start", lambda: (_ for _ in ()).throw(Started))
        with pytest.raises(Started):
            run_loop(tokenizer, clock, monkeypatch)
        (model, optimizer), (_, scaler) = made[-2:]
        state = torch.utils._pytree.tree_leaves([optimizer.state_dict(), scaler.state_dict()])
        starts.append([*model.state_dict().values(), *state, torch.get_rng_state()])
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


def test_accumulation_equals_one_large_batch():
    large = dataclasses.replace(TINY, device_batch_size=4, total_batch_size=256)
    small = dataclasses.replace(large, device_batch_size=2)
    tokens = torch.randint(VOCAB, (4, TINY.seq_len + 1))
    x, y = tokens[:, :-1], tokens[:, 1:]
    runs = []
    for config, parts in ((large, [(x, y, 1)]), (small, [(x[:2], y[:2], 1), (x[2:], y[2:], 1)])):
        model, optimizer = build(config)
        loader = iter(parts)
        loss, _ = train.train_step(model, optimizer, train.make_scaler(model), loader)
        assert next(loader, None) is None, "all of the batch"
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
        losses.append(train.train_step(model, optimizer, train.make_scaler(model), batches())[0].item())
    assert losses[0] > 6 and losses[-1] < 2, losses  # 0.1 to 0.6 by the CPU; rates are high for a model this small


def run_loop(tokenizer, clock, monkeypatch, seed=0):
    """train.train() on a CPU, with the tiny sizes."""
    config = dataclasses.replace(TINY, vocab_size=tokenizer.get_vocab_size())
    monkeypatch.setattr(train, "pick_size", lambda peak_flops: config)
    model, numbers = train.train(clock, tokenizer, CPU, seed, harness.GPU(None, 0.0))
    assert not model.training, "an edit's dropout would be scored"
    return torch.cat([p.detach().flatten() for p in model.parameters()]), numbers


def test_loop_spends_its_token_budget_and_repeats_bit_for_bit(capsys, tokenizer, monkeypatch):
    clocks = [Clock(tokens=128 * 6) for _ in range(3)]
    first, second, other = (run_loop(tokenizer, clock, monkeypatch, i // 2)[0] for i, clock in enumerate(clocks))
    assert [(clock.steps, clock.tokens) for clock in clocks] == [(6, 128 * 6)] * 3
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert "step 00002" in capsys.readouterr().out


def test_collapse_of_the_loss_scale_ends_the_run(monkeypatch, tokenizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5, growth_interval=10**6)
    monkeypatch.setattr(train, "make_scaler", lambda model: scaler)
    with pytest.raises(FloatingPointError, match="loss scale below 1 at step 100"):
        run_loop(tokenizer, Clock(tokens=128 * 200), monkeypatch)


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
