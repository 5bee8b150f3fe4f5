"""Ordinary edits of train.py's text: each touches one place, or two, and trains as it is meant to.

Each edited file runs its own train() for a few steps of a tiny model: on the CPU in fp32, on a GPU in bf16 and fp16.
The table in docs/edits.md is printed by `PYTHONPATH=. python tests/test_edits.py`.
"""

import math
import re
import sys
import types
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from small_corpus import ROOT

from harness import GPU, Clock

SOURCE = (ROOT / "train.py").read_text()
STEPS = 4
TINY = dict(depth=2, n_embd=64, head_dim=32, seq_len=64, window=32, device_batch_size=4)
TINY |= dict(total_batch_size=256, ngram_rows=512, eval_seq_len=128)


@dataclass
class Edit:
    places: list[tuple[str, str]] = field(default_factory=list)  # old and new text
    sizes: dict = field(default_factory=dict)  # fields of the Config in SIZE, which is one place
    still: str = r"$^"  # parameters that must not move
    says: str = ""  # a line that the run must print

    @property
    def touched(self) -> int:
        return len(self.places) + bool(self.sizes)


def replace(old: str, new: str, **options) -> Edit:
    return Edit([(old, new)], **options)


def after(old: str, new: str) -> tuple[str, str]:
    return old, old + new


def before(old: str, new: str) -> tuple[str, str]:
    return old, new + old


RETURN_OPTIMIZER = "    return MuonAdamW([*groups.values()], model.dtype)\n"
STEP = "    scaler.step(optimizer)\n"
LION = """\
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p -= group["lr"] * torch.sign(0.9 * m + 0.1 * p.grad)
                m.lerp_(p.grad, 0.01)


"""
BLOCK = "        self.attn, self.mlp = Attention(config, i, kind), MLP(config, 2 if self.experts else 4)\n"
HEAD = "        self.lm_head = declare(Linear(C, V), lambda p: p.normal_(std=0.001), adamw(UNEMBEDDING_LR, C))\n"
LOSS = "        return fused_linear_cross_entropy(x, self.lm_head.weight, targets, **options)\n"
QKV = "        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # (B, T, H, D)\n"
SDPA = "    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)"
ALIBI = """\
    i = torch.arange(k.size(-2), device=q.device)
    distance = i[-q.size(-2) :, None] - i
    slope = 2.0 ** -torch.arange(1, q.size(1) + 1, device=q.device).view(-1, 1, 1)
    bias = torch.where((distance >= 0) if mask is None else mask, -slope * distance, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype))"""
INIT = "        model.init_weights()\n    if device.type"

EDITS = {
    # What crashed, or trained another function in silence
    "gradients clipped": replace(STEP, """\
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
"""),
    "AdamW for all": replace(RETURN_OPTIMIZER, "    return torch.optim.AdamW(model.parameters(), 3e-3)\n"),
    "plain SGD": replace(RETURN_OPTIMIZER, "    return torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)\n"),
    "Lion by hand": Edit([
        before("def make_optimizer", LION), (RETURN_OPTIMIZER, "    return Lion(model.parameters(), 1e-3)\n"),
    ]),
    "a second step per batch": replace(*after("    scaler.update()\n", "    optimizer.step()\n")),
    "c_proj renamed": Edit([
        ("self.c_proj = block_linear(factor", "self.out = block_linear(factor"),
        ("self.c_proj(leaky", "self.out(leaky"),
    ]),
    "GQA": Edit([
        ("self.qkv = [C, C, C]", "self.qkv = [C, D, D]"),
        after(QKV, "        k, v = (t.repeat_interleave(H // t.size(2), 2) for t in (k, v))\n"),
    ]),
    "1 of 4 experts": Edit(sizes=dict(num_experts=4, experts_per_token=1)),
    "4 of 8 experts": Edit(sizes=dict(num_experts=8, experts_per_token=4)),
    "a matrix that nothing uses": replace(
        *after(BLOCK, "        self.spare = block_linear(config.n_embd, config.n_embd, 0.1)\n"), still="spare"
    ),
    "LayerNorm": Edit([
        after(BLOCK, "        self.norm = nn.LayerNorm(config.n_embd)\n"),
        ("        h = norm(x)\n", "        h = self.norm(x.float()).to(x.dtype)\n"),
    ], says=r"blocks\.\*\.norm\.bias declares no optimizer: adamw"),
    "RMSNorm with weights": Edit([
        after(BLOCK, "        self.scale = nn.Parameter(torch.ones(config.n_embd))\n"),
        ("        h = norm(x)\n", "        h = norm(x) * self.scale.to(x.dtype)\n"),
    ], says=r"blocks\.\*\.scale declares no optimizer: adamw"),
    "biases": Edit([
        ("outputs, bias=False)\n", "outputs, bias=True)\n        nn.init.zeros_(self.bias)\n"),
        ("""(x, self.weight)
        return F.linear(x, self.weight.to(x.dtype))""", """(x, self.weight) + self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))"""),
    ], still=r"lm_head\.bias", says=r"c_fc\.bias declares no optimizer: adamw"),
    "a scalar": Edit([
        after(BLOCK, "        self.strength = nn.Parameter(torch.ones(()))\n"),
        ("x = x + self.mlp(h)", "x = x + self.strength * self.mlp(h)"),
    ]),
    "a convolution": Edit([
        after(BLOCK, "        self.conv = nn.Parameter(torch.zeros(config.n_embd, 1, 3))\n"),
        ("        h = norm(x)\n", """\
        h = F.conv1d(F.pad(norm(x).mT, (2, 0)), self.conv.to(x.dtype), groups=x.size(-1)).mT
        h = norm(x) + h
"""),
    ], says=r"blocks\.\*\.conv declares no optimizer: adamw"),
    "a matrix that declares nothing": Edit([
        after(BLOCK, "        self.mixer = Linear(config.n_embd, config.n_embd)\n"),
        ("x = x + self.mlp(h)", "x = x + self.mlp(self.mixer(h))"),
    ], says=r"blocks\.\*\.mixer\.weight declares no optimizer: muon, lr 0\.04"),
    "T = 300": Edit(sizes=dict(seq_len=300, device_batch_size=1, total_batch_size=300)),
    "T = 397, a prime": Edit(sizes=dict(seq_len=397, window=96, device_batch_size=1, total_batch_size=397)),
    "a frozen embedding": replace(INIT, INIT.replace("\n", "\n        model.embed.requires_grad_(False)\n", 1),
                                  still=r"^embed"),
    "frozen tables": replace(INIT, INIT.replace("\n", "\n        model.ngram_embeds.requires_grad_(False)\n", 1),
                             still="ngram"),
    "an average of the weights": Edit([
        after("    optimizer, scaler, config = make_optimizer(model), make_scaler(model), model.config\n",
              "    import copy\n    average = copy.deepcopy(model)\n"),
        ("        epochs_left = reset_tables(", """\
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters()):
                a.lerp_(p, 0.5)
        epochs_left = reset_tables("""),
    ]),
    "tied embeddings": Edit([
        after(HEAD, "        self.lm_head.weight = self.embed.weight\n"),
        ("nn.Embedding(V, C), nn.init.normal_,", "nn.Embedding(V, C), 0.02,"),
    ]),
    # What has always worked, or nearly
    "deeper": Edit(sizes=dict(depth=5)),
    "wider": Edit(sizes=dict(n_embd=96)),
    "other heads": Edit(sizes=dict(head_dim=16)),
    "half the context": Edit(sizes=dict(seq_len=32)),
    "accumulated gradients": Edit(sizes=dict(device_batch_size=1)),
    "no n-grams": replace("NGRAMS = (2, 3, 4)", "NGRAMS = ()"),
    "tables by AdamW": replace("row_adam(config.ngram_lr, config.n_embd, 0.8, half_lr)", "adamw(0.4, config.n_embd)"),
    "SwiGLU": Edit([
        after("        C, fp8 = config.n_embd, config.fp8  # split into squares\n", """\
        self.c_gate = block_linear(C, factor * C, INIT_SCALE * C**-0.5, (C, -2), fp8)
"""),
        ("leaky_relu_squared(self.c_fc(x))", "F.silu(self.c_gate(x)) * self.c_fc(x)"),
    ]),
    "dropout": replace("x = x + self.mlp(h)", "x = x + F.dropout(self.mlp(h), 0.1, self.training)"),
    "cosine schedule": replace(
        "(1 - (1 - FINAL_LR) * progress)", "(0.55 + 0.45 * math.cos(math.pi * progress))"
    ),
    "warm-up": replace("(1 - (1 - FINAL_LR) * progress)", "min(1, 0.3 + progress)"),
    "z-loss": replace(LOSS, """\
        loss, lse = fused_linear_cross_entropy(x, self.lm_head.weight, targets, return_lse=True, **options)
        return loss + 1e-4 * lse.square().mean() if self.training else loss
"""),
    "a second token is predicted": Edit([
        after(HEAD, "        self.next_head = declare(Linear(C, V), 0, adamw(UNEMBEDDING_LR, C))\n"),
        (LOSS, """\
        loss = fused_linear_cross_entropy(x, self.lm_head.weight, targets, **options)
        if self.training:
            x, targets = x[:, :-1].contiguous(), targets[:, 1:].contiguous()
            next_loss = fused_linear_cross_entropy(x, self.next_head.weight, targets, **options)
            loss = (loss + next_loss) / 2
        return loss
"""),
    ]),
    "full context elsewhere": replace("seq_len if i % 4 == 0", "seq_len if i % 4 == 1"),
    "windows that grow": replace("min(config.window, config.seq_len)", "min(config.window // (1 + i), config.seq_len)"),
    "ALiBi": Edit([
        (SDPA, ALIBI),
        ('gpu.flash or "fa2"', '"sdpa"'),
    ]),
    "fp32 everywhere": replace("    if gpu.capability is None:\n", "    if True:\n"),
    "parallel attention and MLP": replace(
        "        x = x + self.attn(norm(x), idx, cos, sin)\n        h = norm(x)\n",
        "        h = norm(x)\n        x = x + self.attn(h, idx, cos, sin)\n",
    ),
}  # fmt: skip


def table() -> str:
    """For docs/edits.md."""
    rows = ["| edit | places | a run says |", "| --- | --- | --- |"]
    for name, edit in EDITS.items():
        says = edit.says.replace("\\", "").replace("*", r"\*")
        rows.append(f"| {name} | {edit.touched} | {says} |")
    return "\n".join(rows) + "\n"


def edited(edit: Edit, monkeypatch) -> types.ModuleType:
    """train.py with the edit, and with a tiny SIZE."""
    sizes = ", ".join(f"{name}={value}" for name, value in (TINY | edit.sizes).items())
    text = SOURCE
    for old, new in [*edit.places, ("SIZE = None", f"SIZE = Config({sizes})")]:
        assert text.count(old) == 1, f"{text.count(old)} times in train.py: {old}"
        text = text.replace(old, new)
    module = types.ModuleType("edited")
    monkeypatch.setitem(sys.modules, "edited", module)  # where dataclasses look
    exec(compile(text, "train.py", "exec"), vars(module))
    return module


ON_A_GPU = [pytest.param(kind, marks=pytest.mark.gpu) for kind in ("fp16", "bf16")]


@pytest.mark.parametrize("kind", ["fp32", *ON_A_GPU])
@pytest.mark.parametrize("name", EDITS)
def test_an_ordinary_edit_in_one_place_or_two_trains(name, kind, tokenizer, capsys, monkeypatch):
    """The initial loss is that of a uniform guess, the loss falls, and every parameter moves, but for those that the
    edit freezes or leaves unused; what is for training only is not scored."""
    capability = None if kind == "fp32" else (7, 5) if kind == "fp16" else torch.cuda.get_device_capability()
    if kind == "bf16" and capability < (8, 0):
        pytest.skip("not on this GPU")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # seconds each
    edit, device = EDITS[name], torch.device("cpu" if kind == "fp32" else "cuda")
    module = edited(edit, monkeypatch)
    losses, initial, real = [], {}, module.train_step

    def train_step(model, optimizer, scaler, loader):
        if not losses:  # the warm-up, and the first step
            initial.update((name, p.detach().clone()) for name, p in model.named_parameters())
        loss, epoch, tokens = real(model, optimizer, scaler, loader)
        losses.extend([loss.item()] if epoch else [])
        return loss, epoch, tokens

    def make_scaler(model):  # with a scale at which no step overflows
        return torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=model.dtype == torch.float16)

    module.train_step, module.make_scaler = train_step, make_scaler
    clock = Clock(tokens=STEPS * module.SIZE.total_batch_size)
    model, _ = module.train(clock, tokenizer, device, 0, GPU(capability, 0.0))
    assert 1 <= edit.touched <= 2
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.02, losses
    assert losses[0] == pytest.approx(math.log(tokenizer.get_vocab_size()), abs=0.1)
    for name, p in model.named_parameters():
        moved = not torch.equal(p.to(initial[name].dtype), initial[name])
        assert moved != bool(re.search(edit.still, name)), f"{name} {'moved' if moved else 'did not move'}"
    x = torch.randint(tokenizer.get_vocab_size(), (2, module.SIZE.seq_len), device=device)
    with torch.no_grad():
        expected = F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        assert model(x, F.pad(x[:, 1:], (0, 1), value=-1)).item() == pytest.approx(expected.item(), rel=5e-3)
    assert re.search(edit.says, capsys.readouterr().out)


def test_the_table_in_the_docs_is_that_of_these_edits():
    assert table() in (ROOT / "docs" / "edits.md").read_text()


if __name__ == "__main__":
    print(table(), end="")
