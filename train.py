"""
Five minutes of GPT pretraining on one GPU (or none), and one number: val_bpb.

    python train.py                  # 300 s on whatever GPU is there; one row in results.tsv
    python train.py --seconds 30     # a smoke run: never logged
    python train.py --sample "Once"  # text from the weights that the last run saved

In the line of nanoGPT, nanochat, modded-nanogpt and karpathy/autoresearch. This is the file to edit; prepare.py holds
what must not move (data, metric, clock, log), kernels.py the fused loss and the 4-bit linear.
"""

import os
import time

START = time.perf_counter()  # total_seconds counts the imports too
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # against fragmentation; read at first use

import argparse
import dataclasses
import faulthandler
import gc
import importlib
import itertools
import json
import math
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from kernels import Linear4bit, dequantize_4bit, fused_linear_cross_entropy, quantize_4bit
from prepare import (
    EVAL_TOKENS,
    MAX_SEQ_LEN,
    TIME_BUDGET,
    Clock,
    Tokenizer,
    TokenStream,
    budget_name,
    dataset_id,
    evaluate_bpb,
    git_head,
    log_result,
    make_dataloader,
    read_results,
)

# ---------------------------------------------------------------------------
# Hyperparameters: what an agent edits. Sizes stand in PLATFORMS below, one row a kind of GPU.
# ---------------------------------------------------------------------------

WINDOW_PATTERN = "SSSSL"   # attention per layer, repeated: S = short window, L = the whole context; the last layer is L
ROPE_BASE = 200_000        # longest wavelength of the rotary embedding, in tokens
SOFTCAP = 15.0             # logits are SOFTCAP * tanh(logits / SOFTCAP)
INIT_SCALE = 0.68          # of the uniform init of the matrices, relative to 1/sqrt(n_embd)
NGRAMS = (2, 3)            # the last n tokens together have an embedding, too, by their hash
X0_LAMBDA = 0.05           # how much of the token embedding enters each block at the start
FOUR_BIT = False           # train the block matrices as NF4, with fp32 masters

MATRIX_LR = 0.03           # everything inside the blocks (Muon)
EMBEDDING_LR = 0.8         # token and value embeddings (AdamW; for width 768, scaled by width^-1/2)
NGRAM_LR = 0.3             # n-gram embeddings (row-wise Adam, scaled likewise, without warmdown)
UNEMBEDDING_LR = 0.005     # output head (AdamW, scaled likewise)
X0_LR = 0.5                # per-layer scalars of the token embedding (AdamW)
RESIDUAL_LR = 0.005        # per-layer scalars of the residual stream (AdamW)
GATE_LR = 0.01             # attention's gates (AdamW)
ADAM_BETAS = (0.8, 0.95)
MATRIX_DECAY = 0.2         # cautious weight decay of the matrices, falls linearly to 0
VALUE_EMBED_DECAY = 0.003  # weight decay of the value embeddings
MOMENTUM_WARMUP = 200      # steps over which Muon's momentum goes from .85 to .95
WARMDOWN = 0.75            # share of the budget over which the learning rates fall ...
FINAL_LR = 0.05            # ... to this fraction

# ---------------------------------------------------------------------------
# Platform: the one place that knows about GPUs
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Platform:
    """What a kind of GPU can do, and the experiment that fits it in five minutes."""

    name: str
    device: str             # "cuda" or "cpu"
    dtype: torch.dtype      # of activations and GEMMs; parameters, gradients and optimizer state are fp32 everywhere
    attention: str          # "fa3" or "sdpa"
    depth: int              # layers
    n_embd: int             # width of the residual stream
    head_dim: int
    seq_len: int            # tokens
    window: int             # tokens that S layers see: FA3 slides it, SDPA cuts the sequence into pieces of it
    device_batch: int       # sequences in one forward and backward; halved when memory runs out
    total_batch: int        # tokens in one optimizer step of a run of TIME_BUDGET; see scale_batch
    ngram_rows: int         # of each table of n-gram embeddings
    peak_flops: float = 0.0  # dense, in dtype, for mfu_percent


PLATFORMS = {p.name: p for p in (
    #        name      device  dtype       attention depth n_embd head_dim seq_len window device_ total_ ngram_rows
    Platform("hopper", "cuda", torch.bfloat16, "fa3",  9,  640,   128,     2048,   256,   64,     2**17, 655_360),
    Platform("ampere", "cuda", torch.bfloat16, "sdpa", 8,  512,   128,     2048,   2048,  16,     2**16, 655_360),
    Platform("turing", "cuda", torch.float16,  "sdpa", 5,  384,   128,     2048,   256,   16,     2**15, 655_360),
    Platform("cpu",    "cpu",  torch.float32,  "sdpa", 4,  128,   32,      256,    256,   16,     2**12, 40_960),
)}  # fmt: skip

# Dense fp16/bf16 peak by compute capability: datasheets of V100, T4, A100, RTX 3090, 4090, H100, B200, RTX 5090
PEAK_FLOPS = {(7, 0): 125e12, (7, 5): 65e12, (8, 0): 312e12, (8, 6): 71e12, (8, 9): 165e12,
              (9, 0): 989.5e12, (10, 0): 2250e12, (12, 0): 209.5e12}  # fmt: skip


def pick_platform(capability: tuple[int, int] | None, has_fa3: bool = False, row: str | None = None) -> Platform:
    """The row for a compute capability (None: no GPU), or the named row. Pure: asks the machine nothing.

    Capability decides, never torch.cuda.is_bf16_supported(): that says True on a T4, which only emulates bf16.
    """
    if capability is None:
        if row not in (None, "cpu"):
            raise SystemExit(f"train.py: --platform {row} needs a CUDA GPU, and none is visible. Use --platform cpu.")
        return PLATFORMS["cpu"]
    if capability < (7, 0) and row != "cpu":
        raise SystemExit(f"train.py: compute capability {capability} is too old, 7.0 is the least. Use --platform cpu.")
    row = row or ("turing" if capability < (8, 0) else "hopper" if capability[0] == 9 else "ampere")
    platform = dataclasses.replace(PLATFORMS[row], peak_flops=PEAK_FLOPS.get(capability, 0.0) if row != "cpu" else 0.0)
    if platform.dtype == torch.bfloat16:
        # FA3's binaries end at Hopper: on Blackwell SDPA has cuDNN's kernels
        fa3 = has_fa3 and capability < (10, 0)
        full = {} if fa3 else {"window": platform.seq_len}
        platform = dataclasses.replace(platform, attention="fa3" if fa3 else "sdpa", **full)
    return platform


def scale_batch(platform: Platform, seconds: float) -> Platform:
    """The batch that makes most of each token grows with the tokens: as their square root, in powers of two."""
    factor = 2.0 ** round(math.log2(seconds / TIME_BUDGET) / 2)
    sequences = max(1, int(platform.total_batch * factor) // platform.seq_len)
    device_batch = min(platform.device_batch, sequences)
    return dataclasses.replace(platform, device_batch=device_batch, total_batch=sequences * platform.seq_len)


def load_fa3():
    """FlashAttention-3's official module, or None."""
    try:
        return importlib.import_module("flash_attn_interface")
    except (ImportError, OSError):
        return None


# ---------------------------------------------------------------------------
# GPT: RoPE, QK-norm, ReLU^2, gated heads, n-gram and value embeddings, residual and x0 scalars, softcapped head
# ---------------------------------------------------------------------------


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def rotate(x, cos, sin):
    """Rotary embedding of (B, T, H, D), tables (T, 1, D): the halves of D are real and imaginary parts.

    A flip exchanges the halves: it compiles to an index, where chunk and cat take 2.5 times as long (H200, backward).
    """
    return x * cos + x.unflatten(-1, (2, -1)).flip(-2).flatten(-2) * sin


class Linear(nn.Linear):
    """An fp32 master weight that computes in the dtype of its input: autocast without its bookkeeping."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def block_linear(in_features, out_features):
    return Linear4bit(in_features, out_features, trainable=True) if FOUR_BIT else Linear(in_features, out_features)


class NGramEmbedding(nn.Embedding):
    """A row for each hash of n tokens in succession. A batch touches few of the rows: gradients are sparse.

    The plainest form of what Engram (https://arxiv.org/abs/2601.07372) calls conditional memory.
    """

    HASH = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio (Knuth), as int64

    def __init__(self, n, rows, n_embd):
        super().__init__(rows, n_embd, sparse=True)
        self.n = n

    def forward(self, idx):
        key = idx
        for back in range(1, self.n):
            key = self.HASH * key + F.pad(idx, (back, -back))
        return super().forward((self.HASH * key >> 24) % self.num_embeddings)  # (B, T) -> (B, T, C)


class Attention(nn.Module):
    GATE_CHANNELS = 32  # of the input that open and close heads

    def __init__(self, platform, window, shift, has_value_embed, flash):
        super().__init__()
        self.n_head, self.head_dim = platform.n_embd // platform.head_dim, platform.head_dim
        self.window, self.shift, self.flash = window, shift, flash
        self.c_qkv = block_linear(platform.n_embd, 3 * platform.n_embd)
        self.c_proj = block_linear(platform.n_embd, platform.n_embd)
        self.gate = Linear(self.GATE_CHANNELS, (1 + has_value_embed) * self.n_head)
        shifted = torch.arange(self.head_dim) // (self.head_dim // 4) % 2 == 1  # the slow half of the frequencies
        self.register_buffer("shifted", shifted, persistent=False)

    def forward(self, x, x0, residual_lambda, x0_lambda, idx, value_table, cos, sin):
        """The residual stream after x0 has entered, and what is to be added to it: both (B, T, C)."""
        B, T, C = x.shape
        H, D = self.n_head, self.head_dim
        x = residual_lambda * x + x0_lambda * x0  # (B, T, C)
        normed = norm(x)
        q, k, v = self.c_qkv(normed).view(B, T, 3, H, D).unbind(2)  # 3 x (B, T, H, D)
        gate = 2 * torch.sigmoid(self.gate(normed[..., : self.GATE_CHANNELS]))  # 1 at init
        gate = gate.unsqueeze(-1)  # (B, T, H or 2H, 1)
        if value_table is not None:  # looked up in here, it is fused with what follows, and so is its gradient
            v = v + gate[:, :, H:] * F.embedding(idx, value_table.to(x.dtype)).view(B, T, H, D)
        q, k = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)
        # Half of a key is the previous token's: one layer is then enough to find what followed a token the last time
        k = torch.where(self.shifted, F.pad(k, (0, 0, 0, 0, 1, -1)), k)
        if self.flash is not None:
            y = self.flash.flash_attn_func(q, k, v, causal=True, window_size=(self.window, 0))
        else:
            W, S = (self.window, self.shift) if self.window < T else (T, 0)
            if S:  # zeros in front and behind move the cuts; as keys, the ones in front weigh little
                q, k, v = (F.pad(t, (0, 0, 0, 0, S, W - S)) for t in (q, k, v))
            q, k, v = (t.reshape(-1, W, H, D).transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)  # from (pieces, H, W, D)
            y = y.reshape(B, -1, H, D)[:, S : S + T]
        y = y * gate[:, :, :H]
        return x, self.c_proj(y.reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, platform):
        super().__init__()
        self.c_fc = block_linear(platform.n_embd, 4 * platform.n_embd)
        self.c_proj = block_linear(4 * platform.n_embd, platform.n_embd)

    def forward(self, x, y):
        """The residual stream x with y, and then what the MLP makes of it, added: (B, T, C)."""
        x = x + y
        return x + self.c_proj(F.relu(self.c_fc(norm(x))).square())


class Block(nn.Module):
    def __init__(self, platform, window, shift, has_value_embed, flash):
        super().__init__()
        self.attn = Attention(platform, window, shift, has_value_embed, flash)
        self.mlp = MLP(platform)

    def forward(self, *args):
        return self.mlp(*self.attn(*args))


class GPT(nn.Module):
    def __init__(self, platform: Platform, vocab_size: int, flash=None):
        super().__init__()
        self.platform = platform
        depth, n_embd, seq_len = platform.depth, platform.n_embd, platform.seq_len
        windows = [platform.window if kind == "S" else seq_len for kind in (WINDOW_PATTERN * depth)[: depth - 1] + "L"]
        has_ve = [i % 2 == (depth - 1) % 2 for i in range(depth)]  # every other layer and the last
        self.embed = nn.Embedding(vocab_size, n_embd)
        self.ngram_embeds = nn.ModuleList(NGramEmbedding(n, platform.ngram_rows, n_embd) for n in NGRAMS)
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(vocab_size, n_embd) for i in range(depth) if has_ve[i]})
        # SDPA has no sliding window: every other layer cuts its pieces elsewhere, so that text flows across the cuts
        shifts = [0 if has_ve[i] else windows[i] // 2 for i in range(depth)]
        self.blocks = nn.ModuleList(
            [Block(platform, windows[i], shifts[i], has_ve[i], flash) for i in range(depth)]
        )
        self.head = Linear(n_embd, vocab_size)
        self.residual_lambdas = nn.Parameter(torch.empty(depth))  # scale of the residual stream into each block
        self.x0_lambdas = nn.Parameter(torch.empty(depth))  # and of the token embedding
        inverse_freq = ROPE_BASE ** -torch.linspace(0, 1, platform.head_dim // 2 + 1)[:-1]
        angles = torch.outer(torch.arange(max(seq_len, MAX_SEQ_LEN)), inverse_freq)[:, None]  # (T, 1, D/2)
        cos, sin = angles.cos().repeat(1, 1, 2), torch.cat([angles.sin(), -angles.sin()], -1)  # (T, 1, D)
        self.register_buffer("cos", cos.to(platform.dtype), persistent=False)
        self.register_buffer("sin", sin.to(platform.dtype), persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        bound = 3**0.5 * self.platform.n_embd**-0.5  # uniform with standard deviation 1/sqrt(n_embd)
        nn.init.normal_(self.embed.weight)
        for ngram_embed in self.ngram_embeds:
            nn.init.zeros_(ngram_embed.weight)
        nn.init.normal_(self.head.weight, std=0.001)
        for value_embed in self.value_embeds.values():
            nn.init.uniform_(value_embed.weight, -bound, bound)
        for block in self.blocks:
            for linear in (block.attn.c_qkv, block.mlp.c_fc):
                nn.init.uniform_(linear.weight, -bound * INIT_SCALE, bound * INIT_SCALE)
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                nn.init.zeros_(linear.weight)  # every block starts as the identity
            nn.init.zeros_(block.attn.gate.weight)
        nn.init.ones_(self.residual_lambdas)
        nn.init.constant_(self.x0_lambdas, X0_LAMBDA)
        requantize(self)

    def compile_blocks(self) -> None:
        for block in self.blocks:  # halves of one kind share one compilation: of MLPs there is one kind
            block.attn.compile(fullgraph=True, dynamic=False)
            block.mlp.compile(fullgraph=True, dynamic=False)

    @torch.enable_grad()  # in evaluation, too: it then runs what training has compiled
    def hidden(self, idx):
        """Tokens (B, T) to the residual stream (B, T, C) behind the last block."""
        T = idx.size(1)
        assert T <= self.cos.size(0), f"sequence of {T} tokens, rotary table of {self.cos.size(0)}"
        dtype, cos, sin = self.platform.dtype, self.cos[:T], self.sin[:T]
        # Small tables are cast before the lookup: their (B, T, C) activations and gradients never exist in fp32
        x0 = F.embedding(idx, self.embed.weight.to(dtype))
        for ngram_embed in self.ngram_embeds:
            x0 = x0 + ngram_embed(idx).to(dtype)
        x0 = norm(x0)
        x = x0.view_as(x0)  # one tensor twice among the arguments would have the first block compiled apart
        for i, block in enumerate(self.blocks):
            value_table = self.value_embeds[str(i)].weight if str(i) in self.value_embeds else None
            x = block(x, x0, self.residual_lambdas[i], self.x0_lambdas[i], idx, value_table, cos, sin)
        return x

    def forward(self, idx, targets=None, reduction="mean"):
        """Tokens (B, T) to logits (B, T, V); with targets (B, T) to the loss in nats, a scalar or (B*T,) for 'none'."""
        x = norm(self.hidden(idx))
        if targets is None:
            return SOFTCAP * torch.tanh(self.head(x).float() / SOFTCAP)
        return fused_linear_cross_entropy(x, self.head.weight, targets, softcap=SOFTCAP, reduction=reduction)

    def flops_per_token(self) -> float:
        """Forward and backward, counted as nanochat and autoresearch do: 6 a matrix weight, 12 a channel and key."""
        matrices = sum(p.numel() for p in [*self.blocks.parameters(), *self.head.parameters()])  # (no lookups)
        return 6 * matrices + sum(12 * self.platform.n_embd * block.attn.window for block in self.blocks)


def block_linears(model):
    """The matrices inside the blocks that a 4-bit model would store as NF4."""
    return [m for b in model.blocks for m in (b.attn.c_qkv, b.attn.c_proj, b.mlp.c_fc, b.mlp.c_proj)]


def requantize(model):
    for linear in block_linears(model):
        if isinstance(linear, Linear4bit):
            linear.requantize_()  # one parameter at a time, into its own buffers


@torch.no_grad()
def round_to_nf4(model):
    """Replaces each block matrix by what NF4 would store of it."""
    for linear in block_linears(model):
        w = linear.weight
        w.copy_(dequantize_4bit(*quantize_4bit(w), w.shape, w.dtype))
    requantize(model)


# ---------------------------------------------------------------------------
# MuonAdamW: Muon (polar express, NorMuon, cautious decay) for the matrices, AdamW for the rest
# ---------------------------------------------------------------------------

# Newton-Schulz coefficients of https://arxiv.org/abs/2505.16932 (5 steps, safety factor 2e-2, cushion 2)
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def assign(old, new, skip):
    """In place; keeps the old value where `skip`, a boolean on the device, is set: the host need not know."""
    old.copy_(torch.where(skip, old, new))


def sparse_adam_update(p, ids, grad, exp_avg_sq, step, lr, beta2, grad_scale, skip):
    """Adam without momentum, with one second moment a row, on those rows of p (R, C) that a batch has touched.

    ids (N,), which repeat; grad (N, C), a part each of their rows' gradients, times grad_scale; exp_avg_sq (R, 1).
    """
    each = torch.arange(len(ids), device=ids.device)
    first = ids.new_empty(len(p)).scatter_(0, ids, each)[ids]  # (N,) of equal ids one stands for all
    rms = torch.zeros_like(grad).index_add_(0, first, grad).norm(dim=-1, keepdim=True)[first]  # (N, 1)
    rms = rms / (grad.size(1) ** 0.5 * grad_scale)
    v = exp_avg_sq[ids].lerp(rms.square(), 1 - beta2)
    exp_avg_sq[ids] = torch.where(skip, exp_avg_sq[ids], v)
    rate = lr / ((v / (1 - beta2**step)).sqrt() + 1e-10)
    p.index_add_(0, ids, torch.where(skip, 0.0, -rate / grad_scale * grad))


def muon_direction(grad, momentum_buffer, hyper, dtype, grad_scale, skip):
    """A stack of gradients (n, C, C), times grad_scale, to matrices whose spectral norm is below 1.

    hyper: (3,) learning rate, weight decay, momentum, here Nesterov's.
    """
    momentum = hyper[2]
    grad = grad / grad_scale
    buffer = momentum_buffer.lerp(grad, 1 - momentum)
    update = grad.lerp(buffer, momentum)
    assign(momentum_buffer, buffer, skip)
    return (update / (update.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)).to(dtype)


def polar_express(x):
    """Orthogonalizes a stack of squares (n, C, C) whose spectral norm is at most 1. All GEMMs: not compiled."""
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # ax + (bG + cGG)x
    return x


def muon_update(p, update, second_moment, scale, hyper, skip):
    """In place: p and the orthogonal update (n, C, C); second_moment (n, C, 1), scale (n, 1, 1)."""
    lr, decay, _ = hyper.unbind()
    update = update.float()
    # NorMuon (https://arxiv.org/abs/2510.05491): even out the rows by their running second moment, keep the whole norm
    row_sq = update.square().mean(dim=-1, keepdim=True)
    moment = second_moment.lerp(row_sq, 0.05)
    even_sq = row_sq / moment.clamp_min(1e-10)
    total, even_total = (t.sum((-2, -1), keepdim=True) for t in (row_sq, even_sq))
    update = update * (total / even_total.clamp_min(1e-10) / moment.clamp_min(1e-10)).sqrt()
    cautious = update * p >= 0  # decay only where it agrees with the update
    assign(p, p - lr * (scale * update + decay * p * cautious), skip)
    assign(second_moment, moment, skip)


def as_squares(t):
    """A matrix or its gradient as a view (k, C, C): q, k and v count apart, and so do the C x C slices of an MLP."""
    return (t.mT if t.size(0) < t.size(1) else t).unflatten(0, (-1, min(t.shape)))


class MuonAdamW(torch.optim.Optimizer):
    """Groups of kind 'muon' hold matrices made of squares of one size; 'sparse' tables with sparse gradients; 'adamw'
    the rest.

    GradScaler leaves unscaling and skipping to us (`_step_supports_amp_scaling`), so that no step waits for the GPU.
    """

    _step_supports_amp_scaling = True

    def __init__(self, groups: list[dict], dtype: torch.dtype, compile: bool):
        super().__init__(groups, defaults={})
        self.dtype = dtype  # of Newton-Schulz
        self.device = self.param_groups[0]["params"][0].device
        # steps, skipped steps, loss scale, which is 1 without a GradScaler
        self.counters = [torch.tensor(value, device=self.device) for value in (0.0, 0.0, 1.0)]
        self.hold = torch.tensor(False, device=self.device)  # set, a step computes all and changes nothing
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]
            if group["kind"] == "muon":
                squares = [as_squares(p.detach()) for p in group["params"]]
                shares = [min(1, p.size(0) / p.size(1)) for p in group["params"]]  # of a row that one square holds
                scale = [torch.full_like(s[:, :1, :1], share**0.5) for s, share in zip(squares, shares, strict=True)]
                momentum_buffer = torch.zeros_like(torch.cat(squares))  # (n, C, C)
                group["state"] = [torch.cat(scale), momentum_buffer, torch.zeros_like(momentum_buffer[..., :1])]
            elif group["kind"] == "sparse":
                group["state"] = [torch.zeros_like(p[:, :1]) for p in group["params"]]
            else:
                group["state"] = [[torch.zeros_like(p) for p in group["params"]] for _ in range(2)]
        wrap = (lambda f: torch.compile(f, fullgraph=True, dynamic=False)) if compile else (lambda f: f)
        self.muon_direction, self.muon_update = wrap(muon_direction), wrap(muon_update)

    @torch.no_grad()
    def forget_tables(self) -> None:
        """Sparse tables start over."""
        for group in self.param_groups:
            if group["kind"] == "sparse":
                for tensor in (*group["params"], *group["state"]):
                    tensor.zero_()

    @torch.no_grad()
    def step(self):
        """One update from p.grad; learning rates, decays and momenta are read from the groups."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # by GradScaler
        skip = self.hold if found_inf is None else self.hold | (found_inf.view(()) > 0)
        found_inf = skip.float()
        steps, skipped, loss_scale = self.counters
        assign(steps, steps + 1, skip)
        skipped.add_(skip)
        if grad_scale is not None:
            loss_scale.copy_(grad_scale)
        hyper = torch.tensor([[g["lr"], g["weight_decay"], g["momentum"]] for g in self.param_groups])
        for group, h in zip(self.param_groups, hyper.to(self.device, non_blocking=True), strict=True):
            if group["kind"] == "sparse":
                for p, v in zip(group["params"], group["state"], strict=True):
                    if p.grad is not None:  # None: nobody uses it
                        ids, grad = p.grad._indices()[0], p.grad._values()
                        sparse_adam_update(p, ids, grad, v, steps, h[0], group["betas"][1], loss_scale, skip)
                continue
            params = [p.detach() for p in group["params"]]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group["params"]]
            if group["kind"] == "muon":
                params, grads = ([as_squares(t) for t in tensors] for tensors in (params, grads))
                scale, momentum_buffer, second_moment = group["state"]
                # Stacked out here: inside, Inductor makes it a kernel a parameter, and they take long to compile
                update = self.muon_direction(torch.cat(grads), momentum_buffer, h, self.dtype, loss_scale, skip)
                stack = torch.cat(params)  # (n, C, C)
                self.muon_update(stack, polar_express(update), second_moment, scale, h, skip)
                torch._foreach_copy_(params, stack.split([len(p) for p in params]))
            else:
                beta1, beta2 = group["betas"]
                torch._fused_adamw_(
                    params, grads, *group["state"], [], [steps] * len(params), lr=h[0], beta1=beta1, beta2=beta2,
                    weight_decay=group["weight_decay"], eps=1e-10, amsgrad=False, maximize=False,
                    grad_scale=loss_scale, found_inf=found_inf,
                )  # fmt: skip


def make_optimizer(model: GPT) -> MuonAdamW:
    platform = model.platform
    adamw_scale = (platform.n_embd / 768) ** -0.5  # of https://github.com/karpathy/nanochat, tuned at width 768

    def adamw(params, lr, betas=ADAM_BETAS, weight_decay=0.0):
        return dict(kind="adamw", params=list(params), lr=lr, betas=betas, weight_decay=weight_decay, momentum=0.0)

    groups = [
        adamw(model.head.parameters(), UNEMBEDDING_LR * adamw_scale),
        adamw([model.embed.weight], EMBEDDING_LR * adamw_scale),
        adamw(model.ngram_embeds.parameters(), NGRAM_LR * adamw_scale) | dict(kind="sparse"),
        adamw(model.value_embeds.parameters(), EMBEDDING_LR * adamw_scale, weight_decay=VALUE_EMBED_DECAY),
        adamw([model.x0_lambdas], X0_LR, betas=(0.96, 0.95)),
        adamw([model.residual_lambdas], RESIDUAL_LR),
        adamw([block.attn.gate.weight for block in model.blocks], GATE_LR),
        dict(kind="muon", params=[linear.weight for linear in block_linears(model)], lr=MATRIX_LR, betas=None,
             weight_decay=MATRIX_DECAY, momentum=0.95),
    ]  # fmt: skip
    return MuonAdamW(groups, platform.dtype, compile=platform.device == "cuda")


# ---------------------------------------------------------------------------
# Schedules, driven by the clock
# ---------------------------------------------------------------------------


def set_schedules(optimizer: MuonAdamW, progress: float, step: int) -> None:
    """progress: share of the budget that is spent, in [0, 1]."""
    remaining = min(1.0, (1 - progress) / WARMDOWN)
    for group in optimizer.param_groups:
        if group["kind"] != "sparse":  # n-grams that come late have yet to learn
            group["lr"] = group["initial_lr"] * (FINAL_LR + (1 - FINAL_LR) * remaining)
        if group["kind"] == "muon":
            group["momentum"] = 0.85 + 0.10 * min(1.0, step / MOMENTUM_WARMUP)
            group["weight_decay"] = MATRIX_DECAY * (1 - progress)


# ---------------------------------------------------------------------------
# The run: warm-up, steps, evaluation
# ---------------------------------------------------------------------------


def train_step(model, optimizer, scaler, loader, accumulation):
    """One optimizer step over `accumulation` device batches; returns the mean loss, on the device, and the epoch."""
    total = 0.0
    for _ in range(accumulation):
        x, y, epoch = next(loader)
        loss = model(x, y) / accumulation
        scaler.scale(loss).backward()
        total = total + loss.detach()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    requantize(model)
    return total, epoch


def make_scaler(platform):
    return torch.amp.GradScaler(platform.device, enabled=platform.dtype == torch.float16)


def synchronize(platform):
    if platform.device == "cuda":
        torch.cuda.synchronize()


def warm_up(model: GPT, optimizer: MuonAdamW, platform: Platform) -> Platform:
    """Compiles on real shapes before the clock starts, by a step that the optimizer holds back: no step is free.

    When memory runs out, halves the device batch at the same total batch; returns the platform that fits.
    """
    optimizer.hold.fill_(True)
    fits = False
    while not fits:
        try:
            with torch.random.fork_rng():
                shape = platform.device_batch, platform.seq_len
                tokens = torch.randint(model.embed.num_embeddings, shape, device=platform.device)
                batches = itertools.repeat((tokens, tokens, 0))
                accumulation = platform.total_batch // tokens.numel()  # all of it: sparse gradients add up in memory
                train_step(model, optimizer, make_scaler(platform), batches, accumulation)
                synchronize(platform)
            fits = True
        except torch.OutOfMemoryError:
            if platform.device_batch == 1:
                raise
            platform = dataclasses.replace(platform, device_batch=platform.device_batch // 2)
            print(f"Out of memory: device batch halved to {platform.device_batch} sequences, total batch unchanged")
        finally:
            optimizer.zero_grad(set_to_none=True)
    optimizer.hold.fill_(False)
    optimizer.counters[1].zero_()  # what was held back counts as skipped
    return platform


class LateReader:
    """Hands device tensors to the host a step late, so that the host never waits for the step it has just launched."""

    pending = None

    def swap(self, tensor: torch.Tensor | None = None) -> list[float] | None:
        """Starts the copy of this step's tensor, if there is one, and returns the previous step's values."""
        previous, self.pending = self.pending, None
        if tensor is not None:
            event = torch.cuda.Event() if tensor.is_cuda else None
            self.pending = tensor.to("cpu", non_blocking=True), event
            if event is not None:
                event.record()
        if previous is None:
            return None
        values, event = previous
        if event is not None:
            event.synchronize()
        return values.tolist()


def check_loss(loss, step):
    if not loss < 100:  # NaN included
        raise FloatingPointError(f"training loss {loss} at step {step}: the run is lost")


def train(model, optimizer, scaler, loader, platform, clock, epoch_tokens=math.inf):
    """Steps until the budget is spent; returns their number. Raises FloatingPointError when the loss is lost.

    N-gram tables learn text by heart, and the rest of the model comes to rely on it when the text comes again. So they
    forget all when one epoch is left, or two, or three ...: they see no text twice, and end with an epoch's knowledge.
    """
    accumulation = platform.total_batch // (platform.device_batch * platform.seq_len)
    reader, live = LateReader(), sys.stdout.isatty()
    step = collapsed = epochs_left = 0
    smooth_loss, last_print = 0.0, -math.inf
    clock.start()
    while clock.progress() < 1:
        faulthandler.dump_traceback_later(120, file=sys.__stderr__)  # no step for 120 s: say where it stands
        set_schedules(optimizer, clock.progress(), step)
        loss, epoch = train_step(model, optimizer, scaler, loader, accumulation)
        late = reader.swap(torch.stack([loss, optimizer.counters[2]]))
        step += 1
        clock.advance(platform.total_batch)
        before, tokens_left = epochs_left, clock.tokens * (1 / clock.progress() - 1)
        epochs_left = math.ceil(tokens_left / (0.98 * epoch_tokens))  # with a margin for the estimate
        if 0 < epochs_left < before:
            optimizer.forget_tables()
        if late is None:
            continue
        loss, loss_scale = late
        check_loss(loss, step - 1)
        collapsed = collapsed + 1 if scaler.is_enabled() and loss_scale < 1 else 0
        if collapsed == 50:
            raise FloatingPointError(f"GradScaler below 1 for 50 steps at step {step - 1}: the gradients overflow")
        smooth_loss += (loss - smooth_loss) * max(0.1, 1 / (step - 1))
        seconds = clock.elapsed()
        if seconds - last_print >= (0.2 if live else 5):
            last_print = seconds
            rate = step * platform.total_batch / seconds
            line = f"step {step:05d} ({100 * clock.progress():.1f}%) | loss {smooth_loss:.4f} | {rate:,.0f} tok/s"
            line += f" | epoch {epoch} | {seconds:.0f} s"
            print(f"\r{line}    " if live else line, end="" if live else "\n", flush=True)
    synchronize(platform)
    clock.stop()
    check_loss(reader.swap()[0], step)
    return step


SIZES = ("depth", "n_embd", "head_dim", "seq_len", "window", "ngram_rows")  # that weights depend on
CHECKPOINT = Path(__file__).with_name("model.safetensors")


def save_checkpoint(model: GPT, metadata: dict) -> None:
    """Weights and JSON metadata, by rename: a reader never sees half a file. A full disk costs them, not the run.

    The tables of n-grams, most of the bytes, are rounded to fp16, here in the model, too: what is saved is evaluated.
    """
    part = CHECKPOINT.with_suffix(f".safetensors.{os.getpid()}")
    sizes = {key: getattr(model.platform, key) for key in SIZES}
    state = model.state_dict()
    for name, table in state.items():
        if name.startswith("ngram_embeds"):
            state[name] = table.half()
            table.copy_(state[name])
    try:
        save_file(state, part, {"train": json.dumps(metadata | {"sizes": sizes})})
        os.replace(part, CHECKPOINT)
    except (OSError, SafetensorError) as error:
        print(f"train.py: {CHECKPOINT.name} could not be written: {error}", file=sys.stderr)
    finally:
        part.unlink(missing_ok=True)


def load_checkpoint(platform: Platform, vocab_size: int, flash) -> tuple[GPT, dict]:
    if not CHECKPOINT.exists():
        raise SystemExit(f"train.py: no {CHECKPOINT.name} yet. Run python train.py first.")
    try:
        with safe_open(CHECKPOINT, "pt") as file:
            metadata = json.loads(file.metadata()["train"])
        model = build_model(dataclasses.replace(platform, **metadata.pop("sizes")), vocab_size, flash)
        model.load_state_dict(load_file(CHECKPOINT, device=platform.device))
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise SystemExit(f"train.py: {CHECKPOINT.name} does not fit this train.py ({reason}). Run it again.") from None
    return model, metadata


def build_model(platform: Platform, vocab_size: int, flash) -> GPT:
    with torch.device(platform.device):
        model = GPT(platform, vocab_size, flash if platform.attention == "fa3" else None)
        model.init_weights()
    return model


@torch.no_grad()
def sample(model: GPT, tokenizer: Tokenizer, text: str, tokens: int = 256, temperature: float = 0.8) -> str:
    """Continues a text until the model ends the document or `tokens` are written."""
    ids = tokenizer.encode(text, prepend=tokenizer.get_bos_token_id())
    for _ in range(tokens):
        context = ids[-model.platform.seq_len :]
        padded = context + [0] * (model.platform.seq_len - len(context))  # causal: no token sees it
        logits = model(torch.tensor([padded], device=model.platform.device))[0, len(context) - 1]
        token = torch.multinomial(torch.softmax(logits / temperature, -1), 1).item()
        if token == tokenizer.get_bos_token_id():
            break
        ids.append(token)
    return tokenizer.decode(ids[1:])


def evaluate(model: GPT, tokenizer: Tokenizer, platform: Platform) -> dict[str, str]:
    """val_bpb, and what a quarter of the tokens says of the model before and after its block matrices go to NF4."""
    start = time.perf_counter()
    batch, seq_len = platform.device_batch, platform.seq_len
    quarter = min(EVAL_TOKENS, len(TokenStream(tokenizer, "val")) - 1) // 4
    scores = {"val_bpb": evaluate_bpb(model, tokenizer, batch, seq_len)}
    scores["val_bpb_quarter"] = evaluate_bpb(model, tokenizer, batch, seq_len, quarter)
    round_to_nf4(model)
    scores["val_bpb_nf4"] = evaluate_bpb(model, tokenizer, batch, seq_len, quarter)
    return {k: f"{v:.6f}" for k, v in scores.items()} | {"eval_seconds": f"{time.perf_counter() - start:.1f}"}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a GPT for five minutes and prints val_bpb.")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--seconds", type=float, help=f"budget instead of {TIME_BUDGET} s; such a run is not logged")
    budget.add_argument("--tokens", type=int, help="budget in tokens; such a run is not logged")
    parser.add_argument("--platform", choices=PLATFORMS, help="force a row; such a run is not logged")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--sample", metavar="TEXT", help="continue TEXT with the saved weights, and stop")
    parser.add_argument("--eval-only", action="store_true", help="evaluate the saved weights, and stop")
    args = parser.parse_args()
    args.official = args.seconds is None and args.tokens is None and args.platform is None
    args.official |= os.environ.get("AUTORESEARCH_SCREENING") == "1"
    return args


def start_compiler() -> None:
    """Its processes get ready while FA3 is loaded and the model built; before they are, kernels compile one by one."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool(), AsyncCompile.wakeup()


def run(args: argparse.Namespace, platform: Platform, flash, tokenizer: Tokenizer) -> tuple[GPT, dict]:
    """Trains within the budget; the model and the summary so far."""
    clock = Clock(TIME_BUDGET if args.seconds is None else args.seconds, args.tokens)
    platform = scale_batch(platform, clock.seconds)
    model = build_model(platform, tokenizer.get_vocab_size(), flash)
    if platform.device == "cuda":
        model.compile_blocks()
    optimizer = make_optimizer(model)
    num_params = sum(p.numel() for p in model.parameters())
    in_tables = sum(p.numel() for p in model.ngram_embeds.parameters())
    print(
        f"{platform.name} row: {platform.attention}, {platform.dtype}, {num_params / 1e6:.1f} M parameters,",
        f"{in_tables / 1e6:.1f} M of them in tables of n-grams",
    )
    platform = warm_up(model, optimizer, platform)
    loader = make_dataloader(tokenizer, platform.device_batch, platform.seq_len, "train", platform.device)
    epoch_tokens = len(TokenStream(tokenizer, "train"))
    first_step = time.perf_counter() - START
    gc.collect(), gc.disable()  # a collection would stall a step by half a second
    try:
        steps = train(model, optimizer, make_scaler(platform), loader, platform, clock, epoch_tokens)
    finally:
        gc.enable()
        faulthandler.cancel_dump_traceback_later()
        if sys.stdout.isatty():
            print()  # below the live line
    seconds, tokens = clock.elapsed(), steps * platform.total_batch
    model.platform = platform
    return model, {
        "official": args.official,
        "training_seconds": f"{seconds:.1f}",
        "mfu_percent": f"{100 * model.flops_per_token() * tokens / seconds / (platform.peak_flops or math.inf):.2f}",
        "total_tokens_M": f"{tokens / 1e6:.1f}",
        "num_steps": steps,
        "num_params_M": f"{num_params / 1e6:.1f}",
        "depth": platform.depth,
        "tokens_per_sec": f"{tokens / seconds:.0f}",
        "first_step_sec": f"{first_step:.1f}",
        "skipped_steps": f"{optimizer.counters[1].item():.0f}",
        "platform": f"{platform.name}/{platform.attention}/{platform.dtype}",
        "seed": args.seed,
    }


def handle_signals(handler) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def on_signal(number, frame):
    """Once, and as an exception: the crash row gets written."""
    handle_signals(signal.SIG_IGN)
    sys.exit(128 + number)


def report(summary: dict, row: dict[str, str], platform: Platform) -> None:
    """Logs the row of an official run and prints the summary: karpathy/autoresearch's keys, then ours."""
    peak = torch.cuda.max_memory_allocated() / 2**20 if platform.device == "cuda" else 0.0
    status = "not logged: the budget or the platform was set by hand, or the clock ran over"
    if summary.pop("official"):
        handle_signals(signal.SIG_IGN)
        status = log_result(val_bpb=float(summary["val_bpb"]), memory_gb=peak / 1024, tokens_M=float(summary["total_tokens_M"]), **row)
    handle_signals(signal.SIG_DFL)  # the row is written: from here on a signal just ends the process
    totals = {"total_seconds": f"{time.perf_counter() - START:.1f}", "peak_vram_mb": f"{peak:.1f}", "status": status}
    summary = summary | totals | row
    print("---")
    for key in dict.fromkeys(["val_bpb", "training_seconds", "total_seconds", "peak_vram_mb", *summary]):
        print(f"{key + ':':<17} {summary[key]}")


def main() -> None:
    args = parse_args()
    use_gpu = torch.cuda.is_available() and args.platform != "cpu"
    capability = torch.cuda.get_device_capability() if use_gpu else None
    if use_gpu and args.sample is None and not args.eval_only:
        start_compiler()
    flash = load_fa3()
    platform = pick_platform(capability, flash is not None, args.platform)
    tokenizer = Tokenizer.from_directory()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # kinds of attention x halved batches
    if platform.dtype == torch.float16:
        # what a T4 has: memory-efficient attention; flash and cuDNN start at sm_80
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
    if platform.name == "hopper" and platform.attention == "sdpa":
        index = f"https://download.pytorch.org/whl/cu{torch.version.cuda.replace('.', '')}"
        print(f"FlashAttention-3 is missing, running on SDPA. To have it: pip install flash-attn-3 --index-url {index}")
    if args.sample is not None:
        model, _ = load_checkpoint(platform, tokenizer.get_vocab_size(), flash)
        return print(sample(model, tokenizer, args.sample))
    if args.eval_only:
        model, saved = load_checkpoint(platform, tokenizer.get_vocab_size(), flash)
        row = {key: saved["row"][key] for key in ("commit", "description", "gpu", "dataset")}
        if row["dataset"] != (dataset := dataset_id(tokenizer.directory)):
            raise SystemExit(f"train.py: {CHECKPOINT.name} saw {row['dataset']}, not {dataset}: prepare that again")
        # The row is missing if there were only crashes since the weights were saved
        rows = read_results()[saved["rows"] :]
        saved["summary"]["official"] &= args.official and all(row["status"] == "crash" for row in rows)
        return report(saved["summary"] | evaluate(model, tokenizer, model.platform), row, platform)
    # All of the row that another prepare.py or commit could change meanwhile
    commit, description = git_head()
    gpu = torch.cuda.get_device_name() if platform.device == "cuda" else "cpu"
    gpu += budget_name(args.seconds, args.tokens)
    row = {"commit": commit, "description": description, "gpu": gpu, "dataset": dataset_id(tokenizer.directory)}
    handle_signals(on_signal)
    try:
        model, summary = run(args, platform, flash, tokenizer)
        save_checkpoint(model, {"summary": summary, "row": row, "rows": len(read_results())})
        summary |= evaluate(model, tokenizer, model.platform)
    except BaseException as error:
        if args.official:
            handle_signals(signal.SIG_IGN)
            log_result(val_bpb=0.0, memory_gb=0.0, reason=type(error).__name__, **row)
        handle_signals(signal.SIG_DFL)
        if isinstance(error, FloatingPointError):
            raise SystemExit(f"train.py: {error}") from None
        raise
    report(summary, row, platform)


if __name__ == "__main__":
    main()
