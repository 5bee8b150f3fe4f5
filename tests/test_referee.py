"""The referee: no honest model is refused, however unusual; a false one is refused, or scored as what it predicts."""

import dataclasses
import itertools
import math
import random
import sys
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import harness
import prepare
import train
from harness import referee

B, T, C = 6, 48, 16


class LM(nn.Module):
    """Embeds tokens, mixes over positions, predicts. Each model here replaces one method, usually mix()."""

    dtype = torch.float32  # without it, a GPU's is taken to be bf16

    def __init__(self, vocab: int, seed: int = 0):
        super().__init__()
        self.vocab = vocab
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed, self.at = nn.Embedding(vocab, C), nn.Embedding(512, C)
            self.linear, self.lm_head = nn.Linear(C, C), nn.Linear(C, vocab)
            self.rnn, self.norm, self.dropout = nn.GRU(C, C, batch_first=True), nn.BatchNorm1d(C), nn.Dropout(0.5)
            self.experts = nn.ModuleList(nn.Linear(C, C) for _ in range(4))

    def mix(self, x, idx):  # x: (B, T, C)
        return x

    def change(self, logits, idx):  # (B, T, V)
        return logits

    def forward(self, idx, targets=None, reduction="mean"):
        with torch.autocast(idx.device.type, self.dtype, enabled=self.dtype in (torch.bfloat16, torch.float16)):
            logits = self.change(self.lm_head(self.mix(self.embed(idx), idx)), idx)
        return logits if targets is None else self.loss(logits, targets, reduction)

    @staticmethod
    def loss(logits, targets, reduction):
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1, reduction=reduction)


def lm_with(method: str, function) -> type:
    """A class of models of which that method is the function."""
    return type("Model", (LM,), {method: function})


def models(method: str, *functions) -> dict[str, type]:
    return {function.__name__: lm_with(method, function) for function in functions}


# Honest models: mix() gets the embedded tokens x (B, T, C) and the tokens idx (B, T)


def attention(self, x, idx):
    x = self.linear(x)
    return x + F.scaled_dot_product_attention(x, x, x, is_causal=True)


def sorted_by_expert(self, x, idx):
    """The tokens of all rows, and back."""
    x = x.flatten(0, 1)
    expert = x[:, :4].argmax(-1)
    order = expert.argsort(stable=True)
    parts = x[order].split(expert.bincount(minlength=4).tolist())
    out = torch.cat([layer(part) for layer, part in zip(self.experts, parts, strict=True)])
    return out[order.argsort()].view(*idx.shape, C)


def rounds_by_the_batch(self, x, idx):
    """As some kernels do: what a row shares a tile with decides the order of its sums."""
    generator = torch.Generator(x.device).manual_seed(int(idx.sum()))
    return x * (1 + 3e-5 * torch.rand(len(x), generator=generator)[:, None, None])


def writes_on_its_input(self, x, idx):
    idx += 1
    return x


HONEST: dict[str, type] = {
    "lm": LM,
    "bf16": type("Model", (LM,), {"mix": attention, "dtype": torch.bfloat16}),
    "fp16": type("Model", (LM,), {"mix": attention, "dtype": torch.float16}),
    **models("mix", attention, sorted_by_expert, rounds_by_the_batch, writes_on_its_input),
    "recurrent": lm_with("mix", lambda self, x, idx: self.rnn(x)[0]),
    "dropout": lm_with("mix", lambda self, x, idx: self.dropout(x)),
    "batch_norm": lm_with("mix", lambda self, x, idx: self.norm(x.mT).mT),  # of what training has seen
    "positions": lm_with("mix", lambda self, x, idx: x + self.at.weight[: idx.size(1)]),
    "impossible_tokens": lm_with(
        "change", lambda self, logits, idx: logits.index_fill(2, idx.new_tensor([0]), -math.inf)
    ),
    "offset": lm_with("change", lambda self, logits, idx: logits + 500),
    "predicts_nothing_yet": lm_with("change", lambda self, logits, idx: 0 * logits),
    # Scored truly: what these lie about is not asked
    "hides_nan": lm_with("change", lambda self, logits, idx: torch.where(idx[..., None] % 3 == 0, 0.0, logits)),
    "loss_of_nothing": lm_with("loss", lambda self, logits, targets, reduction: 0 * targets),
}


# Mistakes and lies


def only_the_answer(self, logits, idx):
    """The logit of the token to come, and no other."""
    return logits.scatter_add(2, idx.roll(-1, 1)[..., None], torch.ones(*idx.shape, 1))


def targets_of_the_caller(self, logits, idx):
    """Found in the frames above."""
    frame = sys._getframe(1)
    while frame and "y" not in frame.f_locals:
        frame = frame.f_back
    y = frame.f_locals["y"] if frame else idx
    return logits.scatter_add(2, y.clamp(min=0)[..., None], torch.full((*idx.shape, 1), 9.0))


def learns_while_scored(self, x, idx):
    self.lm_head.bias += F.one_hot(idx.flatten(), self.vocab).float().mean(0)
    return x


def turns_after_a_while(self, x, idx):
    self.calls = getattr(self, "calls", 0) + 1
    return x if self.calls < 18 else 2 * x


def remembers_rows(self, logits, idx):
    """Answers truly what it was asked before."""
    self.known = getattr(self, "known", {})
    for i, row in enumerate(idx.tolist()):
        if self.known.setdefault(tuple(row[:4]), row) is not row:
            logits[i].scatter_add_(1, idx[i].roll(-1)[:, None], torch.full((len(row), 1), 9.0))
    return logits


def with_nan(self, logits, idx):
    """Their standard deviation is none."""
    return torch.where(idx[..., None] % 5 == 0, math.nan, logits + logits.roll(-1, 1))


def spreads_its_logits(self, logits, idx):
    """Their standard deviation would excuse much."""
    return (logits + logits.roll(-1, 1)).index_fill(2, torch.arange(0, self.vocab, 3), -1e30)


class Lie(torch.Tensor):
    """Whatever is computed from it is 0."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.gather, torch.Tensor.logsumexp):
            return torch.zeros(T, 1)
        return super().__torch_function__(func, types, args, kwargs or {})


class ClaimsToBeCoarse(LM):
    """With a dtype whose rounding would excuse much."""

    dtype = torch.float8_e5m2

    def mix(self, x, idx):
        return x + 0.3 * x.roll(-1, 1)


class NeverEvaluates(HONEST["dropout"]):
    def eval(self):
        return self


FUTURE = r"sees the future: position \d+ changes with token \d+$"
ROWS = "a row depends on the others of its batch, or on their order"
OUTPUT = r"must give logits \(6, 48, \d+\), not "
FALSE = {  # with a pattern of the row's reason
    "shifted_keys": (lm_with("mix", lambda self, x, idx: x + x.roll(-1, 1)), FUTURE),
    "two_ahead": (lm_with("mix", lambda self, x, idx: x + 0.01 * x.roll(-2, 1)), FUTURE),
    # each token sees its block, whose end is ahead of three of them
    "blocks": (lm_with("mix", lambda s, x, idx: x + x.unflatten(1, (-1, 4)).mean(2).repeat_interleave(4, 1)), FUTURE),
    "only_when_scored": (lm_with("mix", lambda self, x, idx: x if self.training else x + x.roll(-1, 1)), FUTURE),
    "only_the_answer": (lm_with("change", only_the_answer), FUTURE),
    "with_nan": (lm_with("change", with_nan), FUTURE),
    "spreads_its_logits": (lm_with("change", spreads_its_logits), FUTURE),
    "claims_to_be_coarse": (ClaimsToBeCoarse, FUTURE),
    "batch_statistic": (lm_with("mix", lambda self, x, idx: x + x.mean(0)), ROWS),
    "number_of_the_row": (lm_with("mix", lambda self, x, idx: x + self.at.weight[: len(idx), None]), ROWS),
    # If the rows that are asked about again happen to have neighbours that begin alike
    "next_row": (lm_with("mix", lambda self, x, idx: x + x.roll(-1, 0)[:, :1]), f"{ROWS}|{FUTURE}"),
    "targets_of_the_caller": (lm_with("change", targets_of_the_caller), ROWS),
    "always_dropout": (lm_with("mix", lambda self, x, idx: F.dropout(x, 0.5)), "is not the same twice"),
    "never_evaluates": (NeverEvaluates, "is not the same twice"),
    "learns_while_scored": (lm_with("mix", learns_while_scored), "is not the same"),
    "turns_after_a_while": (lm_with("mix", turns_after_a_while), "is not the same|sees the future"),
    "remembers_rows": (lm_with("change", remembers_rows), "is not the same|depends on the others|sees the future"),
    "loss": (lm_with("change", lambda self, logits, idx: torch.tensor(0.5)), OUTPUT + r"torch.float32 \(\)"),
    "certain": (lm_with("change", lambda self, logits, idx: logits[..., :1]), OUTPUT + r"torch.float32 \(6, 48, 1\)"),
    "integers": (lm_with("change", lambda self, logits, idx: logits.long()), OUTPUT + "torch.int64"),
    "subclass": (lm_with("change", lambda self, logits, idx: logits.as_subclass(Lie)), OUTPUT + "torch.float32"),
    "nothing": (lm_with("change", lambda self, logits, idx: None), OUTPUT + "NoneType"),
}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(prepare, "EVAL_TOKENS", 4000)


@pytest.fixture
def on_device(device):
    """Tensors are made on the GPU, if there is one."""
    with device:
        yield


def reference(model, tokenizer, split: str = "val", limit: int = 2**22, shape: tuple = (B, T)) -> float:
    """The score of evaluate_bpb, which asks the model for its loss."""
    model.loss = LM.loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "EVAL_TOKENS", limit)
        return prepare.evaluate_bpb(model, tokenizer, *shape, split)


CASES = [*((name, (B, T), "val") for name in HONEST), ("lm", (1, 64), "val"), ("attention", (7, 33), "test")]


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(("name", "shape", "split"), CASES)
def test_no_honest_model_is_refused_and_each_is_scored_as_what_it_predicts(tokenizer, name, shape, split):
    model, vocab = HONEST[name](tokenizer.get_vocab_size()).train(), tokenizer.get_vocab_size()
    bpb = referee.evaluate_bpb(model, tokenizer, *shape, split)
    assert all(module.training for module in model.modules())
    referee.check(model, torch.randint(vocab, shape), vocab)
    expected = reference(model, tokenizer, split, 4000, shape)
    assert bpb == pytest.approx(expected, rel=1e-3 if name in ("bf16", "fp16") else 1e-5)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", FALSE)
def test_each_false_model_is_refused_with_its_reason_before_training_and_by_the_score(tokenizer, name):
    (cls, reason), vocab = FALSE[name], tokenizer.get_vocab_size()
    with pytest.raises(referee.Unscorable, match=reason) as error:
        referee.evaluate_bpb(cls(vocab), tokenizer, B, T)
    assert "\n" not in str(error.value)
    if name not in ("targets_of_the_caller", "turns_after_a_while"):
        with pytest.raises(referee.Unscorable, match=reason):
            referee.check(cls(vocab), torch.randint(vocab, (B, T)), vocab)


@pytest.mark.parametrize("repeats", [False, True])
def test_the_position_that_sees_the_future_is_named_even_in_text_that_repeats_one_token(tokenizer, repeats):
    """Seeing one token ahead, the last position that stays sees the first one that does not."""
    vocab = tokenizer.get_vocab_size()
    text = torch.randint(1 if repeats else vocab, (B, T))
    with pytest.raises(referee.Unscorable, match=FUTURE) as error:
        referee.check(FALSE["shifted_keys"][0](vocab), text, vocab)
    position, token = (int(word) for word in str(error.value).split() if word.isdigit())
    assert token == position + 1 < T


def test_a_leak_that_only_exchanges_the_answer_with_the_best_guess_is_found(tokenizer, monkeypatch):
    """It moves no other prediction, and hardly ever one of the few that are compared at random."""

    def exchanges(self, logits, idx):
        places = torch.stack([logits.argmax(-1), idx.roll(-1, 1)], -1)
        return logits.scatter(2, places, logits.gather(2, places.flip(-1)))

    vocab = tokenizer.get_vocab_size()
    monkeypatch.setattr(referee, "TOKENS", 1)
    with pytest.raises(referee.Unscorable, match=FUTURE):
        referee.check(lm_with("change", exchanges)(vocab), torch.randint(vocab, (32, T)), vocab)


def test_a_leak_at_one_position_in_sixteen_is_found_in_most_runs(tokenizer, monkeypatch):
    """One cut in sixteen shows it, and there are at least 32 of them."""

    def sometimes(self, x, idx):
        return x + x.roll(-1, 1) * (torch.arange(T) % 16 == 3)[:, None]

    missed = 0
    for seed in range(20):
        numbers = random.Random(seed)
        monkeypatch.setattr(referee.random, "SystemRandom", lambda numbers=numbers: numbers)
        with suppress(referee.Unscorable):
            referee.evaluate_bpb(lm_with("mix", sometimes)(tokenizer.get_vocab_size()), tokenizer, B, T)
            missed += 1
    assert missed <= 6


def test_train_pys_gpt_is_scored_as_with_targets_and_a_leak_in_its_attention_is_found(tokenizer, monkeypatch, device):
    """Also before training, after the one step of the warm-up; blocks begin as the identity."""
    config = train.Config(2, 64, 32, 64, 64, 8, 512, 512, eval_seq_len=128)
    config = dataclasses.replace(config, vocab_size=tokenizer.get_vocab_size())
    model = train.build_model(config, device, harness.GPU(None, 0))
    tokens = torch.randint(config.vocab_size, (config.device_batch_size, config.seq_len), device=device)
    optimizer, scaler = train.make_optimizer(model), train.make_scaler(model)
    train.train_step(model, optimizer, scaler, itertools.repeat((tokens, tokens, 0)))
    monkeypatch.setattr(prepare, "EVAL_TOKENS", 3000)
    referee.check(model, tokens, config.vocab_size)
    expected = prepare.evaluate_bpb(model, tokenizer, *tokens.shape)
    assert referee.evaluate_bpb(model, tokenizer, *tokens.shape) == pytest.approx(expected, abs=1e-5)
    model.blocks[0].attn.register_forward_hook(lambda module, inputs, out: out + out.roll(-1, 1))
    with pytest.raises(referee.Unscorable, match=FUTURE):
        referee.check(model, tokens, config.vocab_size)
    with pytest.raises(referee.Unscorable, match=FUTURE):
        referee.evaluate_bpb(model, tokenizer, *tokens.shape)


def test_a_nan_that_is_scored_makes_the_score_nan(tokenizer):
    nan = lm_with("mix", lambda self, x, idx: torch.where(idx[..., None] % 5 == 0, math.nan, x))
    assert math.isnan(referee.evaluate_bpb(nan(tokenizer.get_vocab_size()), tokenizer, B, T))


def test_logits_of_one_batch_at_a_time_are_kept(tokenizer):
    """Two of them would be more memory than training took, on a GPU."""
    alive, counts, model = [], [], LM(tokenizer.get_vocab_size())

    def watch(module, inputs, logits):
        counts.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(logits.untyped_storage()))

    model.register_forward_hook(watch)
    referee.evaluate_bpb(model, tokenizer, B, T)
    assert len(counts) > 10 and max(counts) == 0


@pytest.mark.parametrize(
    ("batch_size", "longer", "shape"),
    [(16, None, (16, 1024)), (32, 16384, (2, 16384)), (4, 16384, (1, 16384)), (4, 512, (4, 1024))],
)
def test_rows_that_are_scored_may_be_longer_than_those_of_training(batch_size, longer, shape):
    config = SimpleNamespace(device_batch_size=batch_size, seq_len=1024, **({"eval_seq_len": longer} if longer else {}))
    assert referee.eval_shape(config) == shape
