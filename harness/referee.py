"""The score, from predictions alone: the model is given tokens, never targets, and the loss is computed here.

Some batches are also predicted with their rows in reverse order and the tokens after a random position of each row
replaced: nothing at or before that position may move. What a model could still do is in docs/referee.md.
"""

from __future__ import annotations

import math
import random

from prepare import PrepareError, Tokenizer, eval_batches, evaluating

CUTS = 32  # rows per split whose future is replaced, at least
TOKENS = 64  # evenly spaced tokens whose log-probabilities are compared, besides each position's own next one
# Log-probabilities may differ by this many rounding errors of the compute dtype, times their standard deviation: some
# kernels round by what else is in the batch, though most give the same bits
ROUNDING = 8


class Unscorable(PrepareError):
    """The model's output is no prediction, or it depends on what it must not."""


def evaluate_bpb(model, tokenizer: Tokenizer, batch_size: int, seq_len: int, split: str = "val") -> float:
    """The number of prepare.evaluate_bpb, from model(x) -> logits (B, T, V). Raises Unscorable."""
    predictor = Predictor(model, tokenizer.get_vocab_size())
    with evaluating(model):
        return predictor.bits_per_byte(*eval_batches(tokenizer, split, batch_size, seq_len, predictor.device))


def eval_shape(config) -> tuple[int, int]:
    """Rows and tokens (B, T) of the batches that are scored: T is the config's `eval_seq_len`, if it has one that is
    longer than its `seq_len`; B * T at most about as many tokens as a batch of training has."""
    T = max(config.seq_len, getattr(config, "eval_seq_len", 0))
    return max(1, config.device_batch_size * config.seq_len // T), T


def check(model, x, vocab: int) -> None:
    """Probes the model on tokens (B, T): before training, so that a leak costs no five minutes. Raises Unscorable."""
    with evaluating(model):
        Predictor(model, vocab).probe(x, x.roll(-1, 1))


class Predictor:
    """Scores a model in this process; harness/remote.py has the logits from another process."""

    def __init__(self, model, vocab: int):
        import torch

        self.model, self.vocab, self.device = model, vocab, next(model.parameters()).device
        dtype = getattr(model, "dtype", None) or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.eps = torch.finfo(dtype).eps  # how much it rounds

    def rows(self, x):
        """The logits (T, V) of each row, of a copy of the tokens."""
        import torch

        logits, shape = self.model(x.clone()), (*x.shape, self.vocab)
        if type(logits) is not torch.Tensor or logits.shape != shape or not logits.is_floating_point():
            found = f"{logits.dtype} {(*logits.shape,)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise Unscorable(f"model(x) must give logits {shape}, not {found}")
        return logits.detach()

    def log_probs(self, x, tokens):
        """Log-probabilities (B, T, K) of these tokens and of others, in float32: by rows, as all logits may not fit."""
        import torch

        others = torch.arange(0, self.vocab, -(-self.vocab // TOKENS), device=x.device).expand(*x.shape, -1)
        rows = zip(self.rows(x), torch.cat([tokens.clamp(min=0).unsqueeze(-1), others], -1), strict=True)
        return torch.stack([(row := r.float()).gather(-1, c) - row.logsumexp(-1, True) for r, c in rows])

    def bits_per_byte(self, inputs, targets, sizes) -> float:
        """inputs, targets, sizes: of prepare.eval_batches. Raises Unscorable."""
        probed = random.SystemRandom().sample(range(len(inputs)), min(len(inputs), -(-CUTS // inputs.size(1))))
        nats, last = 0.0, self.log_probs(inputs[-1], targets[-1])
        for i, (x, y, scored) in enumerate(zip(inputs, targets, sizes > 0, strict=True)):
            found = self.probe(x, y) if i in probed else self.log_probs(x, y)
            nats -= found[..., 0][scored].double().sum()
        if self.moved(found, last).any():
            raise Unscorable("model(x) is not the same after other batches")
        return (nats / (math.log(2) * sizes.sum())).item()

    def probe(self, x, y):
        """log_probs(x, y). Raises Unscorable if they depend on what they must not."""
        import torch

        T, reverse, targets = x.size(1), x.flip(0), y.flip(0)
        last = torch.tensor([[random.SystemRandom().randrange(T)] for _ in x], device=x.device)  # of those that stay
        stays = torch.arange(T, device=x.device) <= last
        other = reverse.roll(1, 0).roll(T // 2 + 1, 1)  # another row's text, from elsewhere
        other = torch.where(other == reverse, (reverse + 1) % self.vocab, other)
        changed = torch.where(stays, reverse, other)
        before = self.log_probs(changed, targets)  # first, so that no earlier answer helps
        found = self.log_probs(x, y)
        early = self.moved(before, found.flip(0)) & stays
        if early.any():
            if self.moved(self.log_probs(x, y), found).any():
                raise Unscorable("model(x) is not the same twice")
            others = reverse.clone()
            others[1::2] = changed[1::2]
            if self.moved(self.log_probs(others, targets), found.flip(0))[::2].any():
                raise Unscorable("a row depends on the others of its batch, or on their order")
            row, position = early.nonzero()[-1].tolist()
            raise Unscorable(f"sees the future: position {position} changes with token {last[row].item() + 1}")
        return found

    def moved(self, a, b):
        """Where predictions differ by more than rounding: (B, T)."""
        a, b = (t.nan_to_num(nan=1.0).clamp(min=-20) for t in (a, b))  # tokens ruled out must not set the scale
        step = max(min(2**-7, self.eps), 2**-10 if a.is_cuda else 2**-15)  # bf16's at most; TF32's
        return ((a - b).abs() > ROUNDING * (step * b.std() + 20 * 2**-23)).any(-1)  # 2**-23: float32's
