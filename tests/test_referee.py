"""The referee: no honest model is refused, however unusual; a false one is refused, or scored as what it predicts."""

import dataclasses
import itertools
import math
import random
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small_corpus import texts
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
            self.rnn, self.conv = nn.GRU(C, C, batch_first=True), nn.Conv1d(C, C, 4)
            self.norm, self.dropout = nn.BatchNorm1d(C), nn.Dropout(0.5)
            self.experts = nn.ModuleList(nn.Linear(C, C) for _ in range(4))

    def mix(self, x, idx):  # x: (B, T, C)
        return x

    def change(self, logits, idx):  # (B, T, V)
        return logits

    def forward(self, idx, targets=None, reduction="mean"):
        logits = self.change(self.lm_head(self.mix(self.embed(idx), idx)), idx)
        return logits if targets is None else self.loss(logits, targets, reduction)

    def loss(self, logits, targets, reduction):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)


def attend(x, **options):
    return F.scaled_dot_product_attention(x, x, x, **options)


def models(method: str, *functions, **more) -> dict[str, type]:
    """By name: models of which that method is the function."""
    functions = {function.__name__: function for function in functions} | more
    return {name: type(name, (LM,), {method: function}) for name, function in functions.items()}


# Honest models: mix() gets the embedded tokens x (B, T, C) and the tokens idx (B, T)


def window(self, x, idx):
    near = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril().triu(-5)
    return x + attend(x, attn_mask=near)


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


def keeps_tables(self, x, idx):
    self.table = getattr(self, "table", None)
    if self.table is None or len(self.table) < idx.size(1):
        self.table = torch.arange(idx.size(1))[:, None] / 100
    return x + self.table


def writes_on_its_input(self, x, idx):
    idx += 1
    return x


def two_tokens_at_once(self, logits, targets, reduction):
    """Training also asks for the token after the next one."""
    return LM.loss(self, logits, targets, reduction) + LM.loss(self, logits[:, :-1], targets[:, 1:], "mean")


class SixteenBit(LM):
    def forward(self, idx, targets=None, reduction="mean"):
        with torch.autocast(idx.device.type, self.dtype):
            return self.lm_head(attend(self.linear(self.embed(idx)), is_causal=True))


HONEST: dict[str, type] = {
    "lm": LM,
    "bf16": type("bf16", (SixteenBit,), {"dtype": torch.bfloat16}),
    "fp16": type("fp16", (SixteenBit,), {"dtype": torch.float16}),
    **models(
        "mix",
        *(window, sorted_by_expert, rounds_by_the_batch, keeps_tables, writes_on_its_input),
        attention=lambda self, x, idx: x + attend(x, is_causal=True),
        recurrent=lambda self, x, idx: self.rnn(x)[0],
        convolution=lambda self, x, idx: self.conv(F.pad(x.mT, (3, 0))).mT,
        dropout=lambda self, x, idx: self.dropout(x),
        batch_norm=lambda self, x, idx: self.norm(x.mT).mT,  # of what training has seen
        positions=lambda self, x, idx: x + self.at.weight[: idx.size(1)],
    ),
    **models(
        "change",
        special_tokens_ruled_out=lambda self, logits, idx: logits.index_fill(
            2, torch.arange(self.vocab - 3, self.vocab), -math.inf
        ),
        offset=lambda self, logits, idx: logits + 500,
        predicts_nothing_yet=lambda self, logits, idx: 0 * logits,
        # Scored truly: what these lie about is not asked
        hides_nan=lambda self, logits, idx: torch.where(idx[..., None] % 3 == 0, math.nan, logits).nan_to_num(),
    ),
    **models(
        "loss",
        two_tokens_at_once,
        halved_loss=lambda self, *args: LM.loss(self, *args) / (2 if args[2] == "none" else 1),
        loss_of_nothing=lambda self, logits, targets, reduction: torch.zeros(targets.numel()),
        forgets_the_sum=lambda self, logits, targets, reduction: (
            -logits.gather(-1, targets.clamp(min=0)[..., None]).flatten()
        ),
    ),
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


class Lie(torch.Tensor):
    """Whatever is computed from it is 0."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.gather, torch.Tensor.logsumexp):
            return torch.zeros(T, 1)
        return super().__torch_function__(func, types, args, kwargs or {})


FUTURE = r"sees the future: position \d+ changes with token \d+$"
ROWS = "a row depends on the others of its batch, or on their order"
OUTPUT = r"must give logits \(6, 48, \d+\), not "
LIARS = {  # by a pattern of the row's reason
    FUTURE: models(
        "mix",
        shifted_keys=lambda self, x, idx: x + x.roll(-1, 1),
        two_ahead=lambda self, x, idx: x + 0.01 * x.roll(-2, 1),
        no_mask=lambda self, x, idx: x + attend(x),
        # each token sees its block, whose end is ahead of three of them
        blocks_of_four=lambda self, x, idx: x + x.unflatten(1, (-1, 4)).mean(2).repeat_interleave(4, 1),
        only_when_scored=lambda self, x, idx: x if self.training else x + x.roll(-1, 1),
    )
    | models(
        "change",
        only_the_answer,
        # with logits whose standard deviation is none, or would excuse much
        with_nan=lambda self, logits, idx: torch.where(idx[..., None] % 5 == 0, math.nan, logits + logits.roll(-1, 1)),
        spreads_its_logits=lambda self, logits, idx: (logits + logits.roll(-1, 1)).index_fill(
            2, torch.arange(0, self.vocab, 3), -1e30
        ),
    ),
    ROWS: models(
        "mix",
        batch_statistic=lambda self, x, idx: x + x.mean(0),
        normalized_by_the_batch=lambda self, x, idx: F.batch_norm(x.mT, None, None, training=True).mT,
        number_of_the_row=lambda self, x, idx: x + self.at.weight[: len(idx), None],
    )
    | models("change", targets_of_the_caller),
    # If the rows that are asked about again happen to have neighbours that begin alike
    f"{ROWS}|{FUTURE}": models("mix", next_row=lambda self, x, idx: x + x.roll(-1, 0)[:, :1]),
    "is not the same twice": models("mix", always_dropout=lambda self, x, idx: F.dropout(x, 0.5)),
    "is not the same": models("mix", learns_while_scored),
    "is not the same|sees the future": models("mix", turns_after_a_while),
    "is not the same|depends on the others|sees the future": models("change", remembers_rows),
    OUTPUT + r"torch.float32 \(\)": models("change", loss=lambda self, logits, idx: torch.tensor(0.5)),
    OUTPUT + r"torch.float32 \(6, 48, 1\)": models("change", certain=lambda self, logits, idx: logits[..., :1]),
    OUTPUT + "torch.int64": models("change", integers=lambda self, logits, idx: logits.long()),
    OUTPUT + r"torch.float32 \(6, 48": models("change", subclass=lambda self, logits, idx: logits.as_subclass(Lie)),
    OUTPUT + "NoneType": models("change", nothing=lambda self, logits, idx: None),
}
FALSE = {name: (cls, reason) for reason, classes in LIARS.items() for name, cls in classes.items()}


class ClaimsToBeCoarse(LM):
    """With a dtype whose rounding would excuse much."""

    dtype = torch.float8_e5m2

    def mix(self, x, idx):
        return x + 0.3 * x.roll(-1, 1)


class NeverEvaluates(HONEST["dropout"]):
    def eval(self):
        return self


FALSE["claims_to_be_coarse"] = ClaimsToBeCoarse, FUTURE
FALSE["never_evaluates"] = NeverEvaluates, "is not the same twice"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(prepare, "EVAL_TOKENS", 4000)


@pytest.fixture
def on_device(device):
    """Tensors are made on the GPU, if there is one."""
    with device:
        yield


def reference(model, tokenizer, split: str = "val", limit: int = 10**9) -> float:
    """Bits per byte by another route: rows one at a time, in float64."""
    bos = tokenizer.get_bos_token_id()
    seed = {"val": 6542, "test": 6541}[split]
    stream = torch.tensor([i for ids in tokenizer.encode(texts(seed), prepend=bos) for i in ids])[: limit + 1]
    nats = nbytes = 0.0
    model.eval()
    for start in range(0, len(stream) - 1, T):
        x, y = stream[start : start + T][: len(stream) - 1 - start], stream[start + 1 : start + T + 1]
        padded = F.pad(x, (0, T - len(x)))
        with torch.no_grad():
            logits = model(padded.repeat(B, 1))[0, : len(y)].double()
        size = torch.tensor(tokenizer.token_bytes)[y]
        nats += (F.cross_entropy(logits, y, reduction="none") * (size > 0)).sum().item()
        nbytes += size.sum().item()
    return nats / math.log(2) / nbytes


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", HONEST)
def test_no_honest_model_is_refused_and_each_is_scored_as_what_it_predicts(tokenizer, name):
    model = HONEST[name](tokenizer.get_vocab_size()).train()
    rel = 1e-3 if isinstance(model, SixteenBit) else 1e-5
    bpb = referee.evaluate_bpb(model, tokenizer, B, T)
    assert all(module.training for module in model.modules())
    assert bpb == pytest.approx(reference(model, tokenizer, limit=4000), rel=rel)
    referee.check(model, torch.randint(tokenizer.get_vocab_size(), (B, T)), tokenizer.get_vocab_size())


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


def test_a_default_device_set_in_train_py_changes_nothing(tokenizer):
    model = LM(tokenizer.get_vocab_size())
    bpb = referee.evaluate_bpb(model, tokenizer, B, T)
    with torch.device("meta"):
        assert referee.evaluate_bpb(model, tokenizer, B, T) == bpb
        x, y, _ = next(prepare.make_dataloader(tokenizer, B, T, "train", "cpu"))
    assert torch.equal(x[:, 1:], y[:, :-1])


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
        referee.check(models("change", exchanges)["exchanges"](vocab), torch.randint(vocab, (32, T)), vocab)


def test_a_leak_at_one_position_in_sixteen_is_found_in_most_runs(tokenizer):
    """One cut in sixteen shows it, and there are at least 32 of them."""

    def sometimes(self, x, idx):
        return x + x.roll(-1, 1) * (torch.arange(T) % 16 == 3)[:, None]

    cls = models("mix", sometimes)["sometimes"]
    found = 0
    for seed in range(20):
        with pytest.MonkeyPatch.context() as patch:
            numbers = random.Random(seed)
            patch.setattr(referee.random, "SystemRandom", lambda numbers=numbers: numbers)
            try:
                referee.evaluate_bpb(cls(tokenizer.get_vocab_size()), tokenizer, B, T)
            except referee.Unscorable:
                found += 1
    assert found >= 14


@pytest.mark.parametrize(("batch_size", "seq_len", "split"), [(1, 64, "val"), (7, 33, "test"), (16, 512, "val")])
def test_the_score_is_evaluate_bpbs_whatever_the_batches(tokenizer, device, batch_size, seq_len, split, monkeypatch):
    monkeypatch.setattr(prepare, "EVAL_TOKENS", 6000)
    for cls in (LM, HONEST["attention"]):
        model = cls(tokenizer.get_vocab_size()).to(device)
        score = referee.evaluate_bpb(model, tokenizer, batch_size, seq_len, split)
        assert score == pytest.approx(prepare.evaluate_bpb(model, tokenizer, batch_size, seq_len, split), abs=1e-5)


def test_train_pys_gpt_is_scored_as_with_targets_and_a_leak_in_its_attention_is_found(tokenizer, monkeypatch, device):
    """Also before training, after the one step of the warm-up; blocks begin as the identity."""
    config = dataclasses.replace(
        train.Config(2, 64, 32, 64, 64, 8, 512, 512, eval_seq_len=128), vocab_size=tokenizer.get_vocab_size()
    )
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
    nan = models("mix", nan=lambda self, x, idx: torch.where(idx[..., None] % 5 == 0, math.nan, x))["nan"]
    assert math.isnan(referee.evaluate_bpb(nan(tokenizer.get_vocab_size()), tokenizer, B, T))


def test_logits_of_one_batch_at_a_time_are_kept(tokenizer):
    """Two of them would be more memory than training took, on a GPU."""
    alive, most = [], []

    class Counts(LM):
        def forward(self, idx, targets=None, reduction="mean"):
            most.append(sum(ref() is not None for ref in alive))
            logits = super().forward(idx)
            alive.append(weakref.ref(logits.untyped_storage()))
            return logits

    referee.evaluate_bpb(Counts(tokenizer.get_vocab_size()), tokenizer, B, T)
    assert len(most) > 10 and max(most) == 0


def test_rows_that_are_scored_may_be_longer_than_those_of_training():
    shapes = {(16, 0): (16, 1024), (32, 16384): (2, 16384), (4, 16384): (1, 16384), (4, 512): (4, 1024)}
    for (batch_size, longer), shape in shapes.items():
        config = SimpleNamespace(
            device_batch_size=batch_size, seq_len=1024, **{"eval_seq_len": longer} if longer else {}
        )
        assert referee.eval_shape(config) == shape
