"""The model that ships, a second time: float64, one sequence and one head at a time, straight from the formulas.

It shares no line with train.py, only the names of the weights. Every function takes plain tensors, so that autograd
gives reference gradients too. A branch that changes the model is not asked to agree with it: delete
test_reference_model.py there.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GATE_CHANNELS = 32  # input channels that feed the head gates
SLOPE = 0.3  # of the MLP's LeakyReLU^2 below zero


class Model(NamedTuple):
    layers: tuple  # with window, shift and value_embed (None: it has none), as train.Attention
    head_dim: int
    sliding: bool  # windows slide (FlashAttention) or cut the sequence into pieces (SDPA)
    rope_base: float
    softcap: float


def relative_error(value: Tensor, expected: Tensor) -> float:
    """In the Euclidean norm."""
    return ((value.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)).item()


def rms_norm(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def seen(model: Model, layer, t: int, T: int) -> tuple[int, int]:
    """How many zeros position t attends to, and the earliest of the positions before it.

    Attention either slides, so that a position sees `window` earlier ones, or stays within pieces of `window`. A shift
    puts that many zeros in front of the first piece, as keys and values that every position of it sees. Where the
    window holds the whole sequence, there is one piece and no shift. A layer whose shift is None slides.
    """
    window = layer.window
    if model.sliding or layer.shift is None:
        return 0, max(0, t - window)
    shift = layer.shift if window < T else 0
    begin = (t + shift) // window * window - shift  # of its piece
    return max(0, -begin), max(0, begin)


def sliding_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal, (B, T, H, D) each, in their dtype: a position sees `window` earlier ones."""
    at = torch.arange(q.size(1), device=q.device)
    distance = at[:, None] - at
    mask = (distance >= 0) & (distance <= window)
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask).transpose(1, 2)


def ngram_row(tokens: list[int], t: int, n: int, rows: int) -> int:
    """Hash of tokens t-n+1 .. t, the latest first, in 64-bit two's complement; token 0 stands before the beginning."""
    multiplier = 0x9E3779B97F4A7C15
    key = 0
    for token in [tokens[s] if s >= 0 else 0 for s in range(t, t - n, -1)]:
        key = (key * multiplier + token) % 2**64
    key = key * multiplier % 2**64
    signed = key - 2**64 if key >= 2**63 else key
    return (signed >> 24) % rows


def follower(tokens: list[int], t: int) -> int:
    """The token after the last earlier place that ends in the same three tokens as place t; -1 if there is none."""
    padded = [0, 0, *tokens]  # token 0 stands before the beginning
    return next((tokens[s + 1] for s in range(t - 1, -1, -1) if padded[s : s + 3] == padded[t : t + 3]), -1)


def rotate(x: Tensor, base: float) -> Tensor:
    """(T, D), the halves of D real and imaginary parts, to complex (T, D/2): frequency i turns by -t base^(-2i/D)."""
    T, D = x.shape
    angles = torch.tensor([[-t * base ** (-2 * i / D) for i in range(D // 2)] for t in range(T)], dtype=torch.float64)
    return torch.complex(x[:, : D // 2], x[:, D // 2 :]) * torch.polar(torch.ones_like(angles), angles)


def attention(model: Model, layer, weights: dict[str, Tensor], x: Tensor, tokens: list[int]) -> Tensor:
    """What a layer's attention adds to the residual stream (T, C)."""
    D, (T, C) = model.head_dim, x.shape
    x = rms_norm(x)
    q, k, v = (x @ w.T for w in weights["c_qkv.weight"].chunk(3))  # (T, C) each
    gates = 2 * torch.sigmoid(x[:, :GATE_CHANNELS] @ weights["gate.weight"].T)  # (T, H), or (T, 2H)
    heads = []
    for h in range(C // D):
        mine = slice(h * D, (h + 1) * D)
        values = v[:, mine]
        if layer.value_embed:
            values = values + gates[:, C // D + h, None] * weights["value_embed.weight"][tokens][:, mine]
        queries, keys = (rotate(rms_norm(t[:, mine]), model.rope_base) for t in (q, k))
        # The slow half of the frequencies is the previous token's key, rotated where it stood; nothing at the beginning
        before = torch.cat([torch.zeros_like(keys[:1]), keys[:-1]])
        keys = torch.cat([keys[:, : D // 4], before[:, D // 4 :]], dim=1)
        rows = []
        for t in range(T):
            zeros, first = seen(model, layer, t, T)
            exps = ((queries[t] * keys[first : t + 1].conj()).real.sum(-1) / math.sqrt(D)).exp()
            rows.append(exps / (zeros + exps.sum()) @ values[first : t + 1])  # exp(0) for each zero
        heads.append(gates[:, h, None] * torch.stack(rows))
    return torch.cat(heads, dim=1) @ weights["c_proj.weight"].T


def mlp(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """LeakyReLU^2 between matrices (width, C) and (C, width)."""
    hidden = x @ w_in.T
    return torch.where(hidden > 0, hidden, SLOPE * hidden) ** 2 @ w_out.T


def experts(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """What a layer's experts add (T, C), one token at a time. x: (T, C), normalized.

    A token's experts are those of the highest score plus bias, together 2C wide; the bias chooses and does not scale.
    """
    w_in, w_out, scores = weights["c_fc"], weights["c_proj"], torch.sigmoid(x @ weights["router.weight"].T)  # (T, E)
    ranked = (scores + weights["bias"]).argsort(-1, descending=True)
    rows = []
    for t, names in enumerate(ranked[:, : 2 * x.size(-1) // w_in.size(1)].tolist()):
        rows.append(sum(2 * scores[t, e] * mlp(x[t], w_in[e], w_out[e]) for e in names))
    return torch.stack(rows)


def logits(model: Model, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits (T, V) of one sequence. weights: those of a train.GPT and the biases of its routers, in float64."""

    def below(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}

    places = range(len(tokens))
    x = weights["embed.weight"][tokens]
    for n, table in enumerate(below("ngram_embeds.").values(), start=2):
        x = x + table[[ngram_row(tokens, t, n, len(table)) for t in places]]
    x = x0 = rms_norm(x + weights["induction_embed.weight"][[follower(tokens, t) for t in places]])  # [-1]: none
    for i, layer in enumerate(model.layers):
        block = below(f"blocks.{i}.")
        x = block["residual_lambda"] * x
        if layer.value_embed:
            x = x + block["x0_lambda"] * x0
        x = x + attention(model, layer, below(f"blocks.{i}.attn."), x, tokens)
        h = rms_norm(x)
        x = x + mlp(h, block["mlp.c_fc.weight"], block["mlp.c_proj.weight"])
        if "experts.bias" in block:
            x = x + experts(below(f"blocks.{i}.experts."), h)
    return model.softcap * torch.tanh(rms_norm(x) @ weights["lm_head.weight"].T / model.softcap)
