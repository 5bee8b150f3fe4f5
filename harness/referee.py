"""
The score, from predictions alone: the model is given tokens, never targets, and the loss is computed here.

Some batches are also predicted with their rows in reverse order and the tokens after a random position of each row
replaced: nothing at or before that position may move. What a model could still do is in docs/referee.md.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable

from prepare import PrepareError, Tokenizer, eval_batches, evaluating

CUTS = 32  # rows per split whose future is replaced, at least
TOKENS = 64  # tokens whose log-probabilities are compared, besides each position's own next one
# Log-probabilities may differ by this many rounding errors of the compute dtype, times their standard deviation: some
# kernels round by what else is in the batch, though most give the same bits
ROUNDING = 8


class Unscorable(PrepareError):
    """The model's output is no prediction, or it depends on what it must not."""


def evaluate_bpb(model, tokenizer: Tokenizer, batch_size: int, seq_len: int, split: str = "val") -> float:
    """The number of prepare.evaluate_bpb, from model(x) -> logits (B, T, V). Raises Unscorable."""
    batches = eval_batches(tokenizer, split, batch_size, seq_len, next(model.parameters()).device)
    with evaluating(model):
        predictor = Predictor(model, tokenizer.get_vocab_size())
        return bits_per_byte(predictor, split, *batches)


def eval_shape(config) -> tuple[int, int]:
    """Rows and tokens (B, T) of the batches that are scored: T is the config's `eval_seq_len`, if it has one that is
    longer than its `seq_len`; B * T at most about as many tokens as a batch of training has."""
    T = max(config.seq_len, getattr(config, "eval_seq_len", 0))
    return max(1, config.device_batch_size * config.seq_len // T), T


def bits_per_byte(predictor: Predictor, split: str, inputs, targets, sizes) -> float:
    """inputs, targets, sizes: of prepare.eval_batches. Raises Unscorable."""
    import torch

    probed = random.SystemRandom().sample(range(len(inputs)), min(len(inputs), -(-CUTS // inputs.size(1))))
    nats, first, due = 0.0, None, time.monotonic() + 10
    for i, (x, y, scored) in enumerate(zip(inputs, targets, sizes > 0, strict=True)):
        if time.monotonic() >= due:  # as on a CPU
            print(f"scoring {split}: {i / len(inputs):.0%}", flush=True)
            due = time.monotonic() + 30
        probe = Probe(predictor, x) if i in probed else None  # first, so that no earlier answer helps
        columns = y.clamp(min=0).unsqueeze(-1)
        found = predictor.log_probs(x, torch.cat([columns, probe.columns], -1) if probe else columns)
        nats -= torch.where(scored, found[..., 0], 0.0).sum(dtype=torch.float64)
        if probe:
            probe.compare(found[..., 1:])
            first = first or probe
    first.again("is not the same after other batches")
    return (nats / (math.log(2) * sizes.sum())).item()


def check(model, x, vocab: int) -> None:
    """Probes the model on tokens (B, T): before training, so that a leak costs no five minutes. Raises Unscorable."""
    with evaluating(model):
        probe = Probe(Predictor(model, vocab), x)
        probe.compare(probe.predictor.log_probs(x, probe.columns))


class Predictor:
    """Log-probabilities from a model in this process; harness/remote.py has them from another process."""

    def __init__(self, model, vocab: int):
        self.model, self.vocab, self.dtype = model, vocab, getattr(model, "dtype", None)

    def rows(self, x) -> Iterable:
        """The logits (T, V) of each row."""
        return predict(self.model, x, self.vocab)

    def log_probs(self, x, columns):
        """Log-probabilities (B, T, K) of the tokens in `columns`, in float32: by rows, since all logits may not fit."""
        import torch

        rows = zip(self.rows(x), columns, strict=True)
        return torch.stack([(row := r.float()).gather(-1, c) - row.logsumexp(-1, True) for r, c in rows])


def predict(model, x, vocab: int):
    """Logits (B, T, V), of a copy of the tokens."""
    import torch

    logits = model(x.clone())
    if type(logits) is not torch.Tensor or logits.shape != (*x.shape, vocab) or not logits.is_floating_point():
        found = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise Unscorable(f"model(x) must give logits {(*x.shape, vocab)}, not {found}")
    return logits.detach()


class Probe:
    """A batch with its rows reversed and their futures replaced. compare() then gets the predictions of the batch
    itself."""

    def __init__(self, predictor: Predictor, x):
        import torch

        (B, T), vocab = x.shape, predictor.vocab
        generator = torch.Generator("cpu").manual_seed(random.SystemRandom().getrandbits(60))

        def draw(low: int, high: int, *shape: int):
            return torch.randint(low, high, shape, generator=generator, device="cpu").to(x.device)

        self.predictor, self.x = predictor, x
        self.columns = torch.cat([draw(0, vocab, TOKENS).expand(B, T, -1), x.roll(-1, 1).unsqueeze(-1)], -1)
        self.last = draw(0, T, B, 1)  # the last position of each row that stays
        self.stays = torch.arange(T, device=x.device) <= self.last
        other = x.roll(1, 0).roll(T // 2 + 1, 1)  # another row's text, from elsewhere
        other = torch.where(other == x, (x + draw(1, vocab, B, 1)) % vocab, other)
        self.changed = torch.where(self.stays, x, other)
        self.before = self.ask(self.changed)

    def ask(self, x):
        """The predictions for x, asked for with its rows in reverse order."""
        return self.predictor.log_probs(x.flip(0), self.columns.flip(0)).flip(0)

    def moved(self, a, b):
        """Where predictions differ by more than rounding: (B, T)."""
        import torch

        a, b = (t.clamp(min=-20) for t in (a, b))  # tokens ruled out must not set the scale
        dtype = self.predictor.dtype or (torch.bfloat16 if a.is_cuda else torch.float32)
        step = max(min(torch.finfo(dtype).eps, 2**-7), 2**-10 if a.is_cuda else 2**-15)  # bf16's at most; TF32's
        tolerance = ROUNDING * (step * b.nan_to_num().std().item() + 20 * torch.finfo(torch.float32).eps)
        return ~torch.isclose(a, b, rtol=0, atol=tolerance, equal_nan=True).all(-1)

    def compare(self, seen) -> None:
        """Raises Unscorable if a prediction depends on what it must not."""
        self.seen = seen
        early = self.moved(self.before, seen) & self.stays
        if not early.any():
            return
        self.again("is not the same twice")
        others = self.x.clone()
        others[1::2] = self.changed[1::2]
        if self.moved(self.ask(others), seen)[::2].any():
            raise Unscorable("a row depends on the others of its batch, or on their order")
        row, position = early.nonzero()[-1].tolist()
        raise Unscorable(f"sees the future: position {position} changes with token {self.last[row].item() + 1}")

    def again(self, problem: str) -> None:
        """Raises Unscorable if the batch itself is predicted differently now."""
        if self.moved(self.predictor.log_probs(self.x, self.columns), self.seen).any():
            raise Unscorable(f"model(x) {problem}")
