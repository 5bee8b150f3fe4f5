"""The model that ships, a second time: float64, one sequence and one head at a time, straight from the formulas.

It shares no line with train.py. Every function takes plain tensors, so that autograd gives reference gradients too.
A branch that changes the model is not asked to agree with it: delete test_reference_model.py there.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GATE_CHANNELS = 32  # input channels that feed the head gates


@dataclass(frozen=True)
class Layer:
    """Attention either slides, so that a position sees `window` earlier ones, or stays within pieces of `window`.

    A shift puts that many zeros in front of the first piece, as keys and values that every position of it sees. Where
    the window holds the whole sequence, there is one piece and no shift; so it is for the first `full_heads` heads.
    With value_embed the token's embedding enters the values, and the first embeddings the stream.
    """

    window: int
    full_heads: int = 0
    shift: int = 0
    value_embed: bool = False


@dataclass(frozen=True)
class Model:
    layers: tuple[Layer, ...]
    head_dim: int
    sliding: bool = False  # windows slide (FlashAttention) or cut the sequence into pieces (SDPA)
    rope_base: float = 200_000
    softcap: float = 12.0
    slope: float = 0.3  # of the MLP's LeakyReLU^2 below zero


def rms_norm(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def seen(model: Model, layer: Layer, h: int, t: int, T: int) -> tuple[int, int]:
    """How many zeros head h of position t attends to, and the earliest of the positions before it."""
    window = T if h < layer.full_heads else layer.window
    if model.sliding:
        return 0, max(0, t - window)
    shift = layer.shift if window < T else 0
    begin = (t + shift) // window * window - shift  # of its piece
    return max(0, -begin), max(0, begin)


def ngram_row(tokens: list[int], t: int, n: int, rows: int) -> int:
    """Hash of tokens t-n+1 .. t, the latest first, in 64-bit two's complement; token 0 stands before the beginning."""
    multiplier = 0x9E3779B97F4A7C15
    key = 0
    for token in [tokens[s] if s >= 0 else 0 for s in range(t, t - n, -1)]:
        key = (key * multiplier + token) % 2**64
    key = key * multiplier % 2**64
    signed = key - 2**64 if key >= 2**63 else key
    return (signed >> 24) % rows


def follower(tokens: list[int], t: int) -> int | None:
    """The token after the last earlier place that ends in the same three tokens as place t."""

    def last_three(s: int) -> list[int]:
        return [0, 0, *tokens][s : s + 3]  # token 0 stands before the beginning

    return next((tokens[s + 1] for s in range(t - 1, -1, -1) if last_three(s) == last_three(t)), None)


def rotate(x: Tensor, base: float) -> Tensor:
    """(T, D), the halves of D real and imaginary parts, to complex (T, D/2): frequency i turns by -t base^(-2i/D)."""
    T, D = x.shape
    z = torch.complex(x[:, : D // 2], x[:, D // 2 :])
    angles = torch.tensor([[-t * base ** (-2 * i / D) for i in range(D // 2)] for t in range(T)], dtype=torch.float64)
    return z * torch.polar(torch.ones_like(angles), angles)


def attention(model: Model, weights: dict[str, Tensor], i: int, x: Tensor, tokens: list[int]) -> Tensor:
    """What layer i's attention adds to the residual stream (T, C)."""
    layer, D, (T, C) = model.layers[i], model.head_dim, x.shape
    n_head = C // D
    x = rms_norm(x)
    q, k, v = (x @ w.T for w in weights[f"block.{i}.qkv"].chunk(3))  # (T, C) each
    gates = 2 * torch.sigmoid(x[:, :GATE_CHANNELS] @ weights[f"block.{i}.gate"].T)  # (T, H), or (T, 2H)
    heads = []
    for h in range(n_head):
        mine = slice(h * D, (h + 1) * D)
        values = v[:, mine]
        if layer.value_embed:
            values = values + gates[:, n_head + h, None] * weights[f"block.{i}.value_embed"][tokens][:, mine]
        queries = rotate(rms_norm(q[:, mine]), model.rope_base)
        keys = rotate(rms_norm(k[:, mine]), model.rope_base)
        # The slow half of the frequencies is the previous token's key, rotated where it stood; nothing at the beginning
        before = torch.cat([torch.zeros_like(keys[:1]), keys[:-1]])
        keys = torch.cat([keys[:, : D // 4], before[:, D // 4 :]], dim=1)
        rows = []
        for t in range(T):
            zeros, first = seen(model, layer, h, t, T)
            scores = (queries[t] * keys[first : t + 1].conj()).real.sum(-1) / math.sqrt(D)
            weights_of_keys = scores.exp() / (zeros + scores.exp().sum())  # exp(0) for each zero
            rows.append(weights_of_keys @ values[first : t + 1])
        heads.append(gates[:, h, None] * torch.stack(rows))
    return torch.cat(heads, dim=1) @ weights[f"block.{i}.attn_out"].T


def mlp(model: Model, x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """LeakyReLU^2 between matrices (width, C) and (C, width)."""
    hidden = x @ w_in.T
    return torch.where(hidden > 0, hidden, model.slope * hidden) ** 2 @ w_out.T


def experts(model: Model, weights: dict[str, Tensor], i: int, x: Tensor) -> Tensor:
    """What layer i's experts add (T, C), one token at a time. x: (T, C), normalized.

    A token's experts are those of the highest score plus bias, together 2C wide; the bias chooses and does not scale.
    """
    scores = torch.sigmoid(x @ weights[f"block.{i}.router"].T)  # (T, E)
    w_in, w_out = weights[f"block.{i}.experts_in"], weights[f"block.{i}.experts_out"]
    ranked = (scores + weights[f"block.{i}.router_bias"]).argsort(-1, descending=True)
    rows = []
    for t, names in enumerate(ranked[:, : 2 * x.size(-1) // w_in.size(1)].tolist()):
        rows.append(sum(2 * scores[t, e] * mlp(model, x[t], w_in[e], w_out[e].T) for e in names))
    return torch.stack(rows)


def logits(model: Model, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits (T, V) of one sequence.

    weights, in float64: embed (V, C), ngram.n (rows, C), induction (V + 1, C), whose last row stands for no follower,
    lm_head (V, C), and of each block i, as block.i.qkv and so on:
    qkv (3C, C), gate (H or 2H, GATE_CHANNELS), value_embed (V, C) where there is one, attn_out (C, C), mlp_in (4C, C),
    mlp_out (C, 4C), residual_lambda (), x0_lambda () where there is a value_embed. With E experts, K to a token, mlp_in
    and mlp_out have half the width, and there are router (E, C), router_bias (E,), experts_in and experts_out
    (E, 2C / K, C).
    """
    embedded = weights["embed"][tokens]
    for name in weights:
        if name.startswith("ngram."):
            table, n = weights[name], int(name.partition(".")[2])
            embedded = embedded + table[[ngram_row(tokens, t, n, len(table)) for t in range(len(tokens))]]
    followers = [follower(tokens, t) for t in range(len(tokens))]
    embedded = embedded + weights["induction"][[-1 if token is None else token for token in followers]]
    x = x0 = rms_norm(embedded)
    for i in range(len(model.layers)):
        x = weights[f"block.{i}.residual_lambda"] * x
        if model.layers[i].value_embed:
            x = x + weights[f"block.{i}.x0_lambda"] * x0
        x = x + attention(model, weights, i, x, tokens)
        h = rms_norm(x)
        x = x + mlp(model, h, weights[f"block.{i}.mlp_in"], weights[f"block.{i}.mlp_out"])
        if f"block.{i}.router" in weights:
            x = x + experts(model, weights, i, h)
    return model.softcap * torch.tanh(rms_norm(x) @ weights["lm_head"].T / model.softcap)


def losses(logits: Tensor, targets: list[int]) -> Tensor:
    """-log softmax of logits (T, V) at the targets, (T,); 0 where a target is -1."""
    normalizer = logits.exp().sum(-1).log()
    return torch.stack([normalizer[t] - logits[t, y] if y >= 0 else 0 * normalizer[t] for t, y in enumerate(targets)])
