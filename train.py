"""
Five minutes of GPT pretraining on one GPU (or none), and one number: val_bpb.

    python train.py                  # 300 s on whatever GPU is there; one row in results.tsv
    python train.py --seconds 30     # a smoke run: never logged
    python train.py --sample "Once"  # text from the saved weights

In the line of nanoGPT, nanochat, modded-nanogpt and karpathy/autoresearch. This file is the experiment: edit it.
What an experiment cannot move is in prepare.py (data, metric) and harness.py (clock, log), operators in kernels.py.
"""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import harness
import prepare
from kernels import Linear4bit, fused_linear_cross_entropy, group_rows, row_adam_, sum_rows
from prepare import TIME_BUDGET, VOCAB_SIZE, make_dataloader

# ---- Hyperparameters; sizes by GPU follow below, in SIZES

ROPE_BASE = 200_000        # of the rotary embedding, whose longest wavelength is about 2 pi times as many tokens
SOFTCAP = 12.0             # logits are SOFTCAP * tanh(logits / SOFTCAP); None: as they are
INIT_SCALE = 0.68          # of the uniform init of the matrices, relative to 1/sqrt(n_embd)
NGRAMS = (2, 3, 4)         # the last n tokens together have an embedding, too
X0_LAMBDA = 0.05           # share of the first hidden states that enters every other block at the start
FOUR_BIT = False           # train the matrices of attention and MLPs, not of experts, as NF4 with fp32 masters

MATRIX_LR = 0.04           # matrices inside the blocks (Muon)
EXPERT_LR_SCALE = 0.5      # of those that are experts', as each sees few of the tokens
EMBEDDING_LR = 0.8         # token and value embeddings (AdamW; for width 768, scaled by width^-1/2)
NGRAM_LR = 0.4             # n-gram embeddings (row-wise Adam, scaled likewise, constant over the run)
INDUCTION_LR = 0.4         # induction embedding (AdamW, scaled likewise)
UNEMBEDDING_LR = 0.005     # lm_head (AdamW, scaled likewise)
X0_LR = 0.5                # per-layer scalars of the first hidden states (AdamW)
RESIDUAL_LR = 0.005        # per-layer scalars of the residual stream (AdamW)
GATE_LR = 0.01             # head gates (AdamW)
ROUTER_LR = 0.003          # routers of the experts (AdamW)
BALANCE_RATE = 0.01        # step of an expert's bias: up below its share of tokens, down above it
ADAM_BETAS = (0.8, 0.98)
MATRIX_DECAY = 0.1         # cautious weight decay of the matrices, falls linearly to 0
VALUE_EMBED_DECAY = 0.003  # weight decay of the value embeddings
MOMENTUM_WARMUP = 200      # steps over which Muon's momentum goes from .85 to .9
FINAL_LR = 0.05            # the learning rates fall linearly to this fraction


@dataclass(frozen=True)
class Layer:
    full_heads: int    # heads, the first ones, that see the whole context
    window: int        # earlier tokens that the others see
    shift: int         # tokens by which `sdpa` shifts its pieces
    value_embed: bool  # whether value embeddings and the first hidden states (x0) enter


def layers(config):
    """One per layer, counted from the last: another depth changes the first layers and leaves the rest."""
    window = min(config.window, config.seq_len)
    return [
        Layer(config.full_heads * (i % 4 == 0), window, shift=i % 2 * window // 2, value_embed=i % 2 == 0)
        for i in reversed(range(config.depth))  # i = 0 is the last layer
    ]


# ---- What a GPU can do (numerics), and what five minutes of it pay for (size)


@dataclass(frozen=True)
class Config:
    """Sizes of model and batches; goes into the checkpoint."""

    depth: int              # layers
    n_embd: int             # of the residual stream
    head_dim: int
    seq_len: int            # tokens
    window: int             # earlier tokens that most heads see; see `layers`
    full_heads: int         # heads that see the whole context, in the last of every four layers
    device_batch_size: int  # sequences in one forward and backward; halved when memory runs out
    total_batch_size: int   # tokens in one optimizer step of a run of TIME_BUDGET; see `scale_batch`
    ngram_rows: int         # in each table of n-gram embeddings
    num_experts: int = 0    # beside an MLP of half the width; 0: one MLP for all tokens
    experts_per_token: int = 1  # together as wide as that MLP
    vocab_size: int = VOCAB_SIZE


SIZES = (  # from this many FLOP/s on
    #        depth n_embd head_dim seq_len window full_heads device_ total_ ngram_rows experts per_token
    (0,      Config(3, 128, 32,    256,    256,   4,         16,     2**12, 40_960)),  # no GPU
    (1e12,   Config(3, 384, 128,   2048,   256,   1,         16,     2**15, 2_621_440)),
    (70e12,  Config(4, 384, 128,   2048,   256,   3,         16,     2**15, 2_621_440)),
    (145e12, Config(6, 512, 128,   2048,   256,   4,         32,     2**16, 2_621_440)),
    (250e12, Config(6, 512, 128,   2048,   256,   4,         32,     2**16, 2_621_440, 32,     2)),
    (600e12, Config(7, 768, 128,   2048,   256,   6,         64,     2**17, 2_621_440, 32,     2)),
)


def pick_numerics(gpu: harness.GPU) -> tuple[torch.dtype, str]:
    """Activations' dtype and kind of attention. torch.cuda.is_bf16_supported() is True on a T4, too: it emulates."""
    if gpu.capability is None:
        return torch.float32, "sdpa"
    if gpu.capability < (7, 0):
        raise prepare.PrepareError(f"compute capability {gpu.capability} is below 7.0: use --gpu cpu")
    if gpu.capability < (8, 0):
        return torch.float16, "sdpa"
    return torch.bfloat16, "fa3" if gpu.has_fa3 else "fa2"


def pick_size(gpu: harness.GPU) -> Config:
    """What TIME_BUDGET pays for on that GPU, with n-gram tables that take at most half of its memory."""
    config = [config for least, config in SIZES if gpu.peak_flops >= least][-1]
    rows, row_bytes = config.ngram_rows, 2 * config.n_embd * len(NGRAMS)
    while 0 < gpu.memory < 2 * rows * row_bytes:
        rows //= 2
    return dataclasses.replace(config, ngram_rows=rows)


def scale_batch(config: Config, seconds: float) -> Config:
    """Scales the batch by sqrt(seconds / TIME_BUDGET), rounded to 2^n: small batches learn more from each token."""
    assert config.total_batch_size % config.seq_len == 0, f"seq_len must divide total_batch_size: {config}"
    sequences = int(config.total_batch_size / config.seq_len * 2.0 ** round(math.log2(seconds / TIME_BUDGET) / 2)) or 1
    device_batch_size = math.gcd(config.device_batch_size, sequences)
    return dataclasses.replace(config, device_batch_size=device_batch_size, total_batch_size=sequences * config.seq_len)


# ---- GPT: RoPE, QK-norm, LeakyReLU^2, gated heads, n-gram, induction and value embeddings


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def rotate(x, cos, sin):
    """Rotary embedding of (B, T, H, D), tables (T, 1, D). flip is 2.5 times as fast as chunk and cat."""
    return x * cos + x.unflatten(-1, (2, -1)).flip(-2).flatten(-2) * sin


class Linear(nn.Linear):
    """fp32 weight, cast to the activation dtype on use."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def block_linear(in_features, out_features):
    return Linear4bit(in_features, out_features, trainable=True) if FOUR_BIT else Linear(in_features, out_features)


def ngram_hash(idx, n):
    """Hashes (B, T) of each token and the n - 1 before it."""
    golden = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio (Knuth), as int64
    key = golden * idx
    for back in range(1, n):
        key = golden * (key + F.pad(idx, (back, -back)))
    return key


class NGramEmbedding(nn.Embedding):
    """One row per hash of n successive tokens: Engram (https://arxiv.org/abs/2601.07372) in its plainest form."""

    def __init__(self, n, rows, n_embd, dtype):
        super().__init__(rows, n_embd, dtype=dtype)
        self.n = n

    def forward(self, idx):
        return super().forward((ngram_hash(idx, self.n) >> 24) % self.num_embeddings)  # (B, T) -> (B, T, C)


def induction(idx):
    """An induction head by lookup: what followed the last three tokens when they last occurred in the row.

    Tokens (B, T) to tokens (B, T), and whether they did occur, (B, T).
    """
    key, order = ngram_hash(idx, 3).sort(dim=1, stable=True)  # equal ones in the order of the text
    before = F.pad(torch.where(key[:, 1:] == key[:, :-1], order[:, :-1], -1), (1, 0), value=-1)
    before = torch.empty_like(order).scatter_(1, order, before)  # where they ended, or -1
    return idx.gather(1, before + 1), before >= 0


# Of SDPA, the fastest first; fp16, so a T4, starts with the third
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fa2(q, k, v, window, shift):
    """PyTorch's own FlashAttention-2; whole contexts by SDPA, as cuDNN is faster there."""
    T, flash = q.size(1), torch.ops.aten._flash_attention_forward
    if window >= T:
        return sdpa(q, k, v, T, 0)
    return flash(q, k, v, None, None, T, T, 0.0, True, False, window_size_left=window, window_size_right=0)[0]


def sdpa(q, k, v, window, shift):
    """SDPA has no windows: a token sees the earlier ones of its piece of `window` tokens.

    Zeros in front shift the cuts, so that text flows across those of other layers. They are an attention sink, too:
    without them, the first 128 tokens lose 0.004 nats (measured).
    """
    B, T, H, D = q.shape
    W, S = (window, shift) if window < T else (T, 0)
    if S:
        q, k, v = (F.pad(t, (0, 0, 0, 0, S, W - S)) for t in (q, k, v))
    q, k, v = (t.unflatten(1, (-1, W)).flatten(0, 1).transpose(1, 2) for t in (q, k, v))  # (pieces, H, W, D)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return y.reshape(B, -1, H, D)[:, S : S + T]


@functools.cache
def attention(kind):
    """Causal attention of q, k and v (B, T, H, D). By fa3 and fa2 a token sees `window` earlier ones, exactly."""
    if kind == "fa3":
        flash = harness.load_fa3()
        # contiguous() is fused here; FA3 may copy twice
        return lambda q, k, v, window, shift: flash(q, k, v.contiguous(), causal=True, window_size=(window, 0))
    return {"fa2": fa2, "sdpa": sdpa}[kind]


class Attention(nn.Module):
    GATE_CHANNELS = 32  # input channels that feed the head gates

    def __init__(self, config, layer, kind):
        super().__init__()
        self.n_head, self.head_dim = config.n_embd // config.head_dim, config.head_dim
        self.layer, self.attend = layer, attention(kind)
        assert config.n_embd % config.head_dim == 0 and layer.full_heads <= self.n_head, config
        assert kind != "sdpa" or config.seq_len % layer.window == 0, f"SDPA cuts whole pieces: {config}"
        self.c_qkv = block_linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = block_linear(config.n_embd, config.n_embd)
        self.value_embed = nn.Embedding(config.vocab_size, config.n_embd) if layer.value_embed else None
        self.gate = Linear(self.GATE_CHANNELS, (1 + layer.value_embed) * self.n_head)
        shifted = torch.arange(self.head_dim) % (self.head_dim // 2) >= self.head_dim // 4  # the slow frequencies
        self.register_buffer("shifted", shifted, persistent=False)

    def forward(self, x, idx, cos, sin):
        B, T, C = x.shape
        H, D = self.n_head, self.head_dim
        q, k, v = self.c_qkv(x).view(B, T, 3, H, D).unbind(2)  # 3 x (B, T, H, D)
        gate = 2 * torch.sigmoid(self.gate(x[..., : self.GATE_CHANNELS])).unsqueeze(-1)  # (B, T, H or 2H, 1), 1 at init
        if self.value_embed is not None:
            v = v + gate[:, :, H:] * F.embedding(idx, self.value_embed.weight.to(x.dtype)).view(B, T, H, D)
        q, k = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)
        # Half of a key is the previous token's: one layer finds what followed a token last time
        k = torch.where(self.shifted, F.pad(k, (0, 0, 0, 0, 1, -1)), k)
        full, rest = zip(*(t.tensor_split([self.layer.full_heads], dim=2) for t in (q, k, v)))
        heads = ((full, T), (rest, self.layer.window))
        y = torch.cat([self.attend(*qkv, window, self.layer.shift) for qkv, window in heads if qkv[0].numel()], 2)
        return self.c_proj((y * gate[:, :, :H]).reshape(B, T, C))


def leaky_relu_squared(x):
    return F.leaky_relu(x, 0.3).square()


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = (2 if config.num_experts else 4) * config.n_embd
        self.c_fc, self.c_proj = block_linear(config.n_embd, width), block_linear(width, config.n_embd)

    def forward(self, x):
        return self.c_proj(leaky_relu_squared(self.c_fc(x)))


class Experts(nn.Module):
    """Half of an MLP: many small ones, of which a router chooses some for each token.

    No token is dropped: they are sorted into blocks for batched GEMMs. No loss balances the load: experts with less
    than their share gain in bias (https://arxiv.org/abs/2408.15664).
    """

    def __init__(self, config):
        super().__init__()
        E, K, C = config.num_experts, config.experts_per_token, config.n_embd
        assert 0 < K <= E and 2 * C % K == 0, config
        self.experts_per_token = K
        self.router = Linear(C, E)
        self.c_fc, self.c_proj = (nn.Parameter(torch.empty(E, 2 * C // K, C)) for _ in range(2))
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("load", torch.zeros(E), persistent=False)  # tokens since the last step

    def forward(self, x):
        B, T, C = x.shape
        N, K, E = B * T, self.experts_per_token, len(self.bias)
        score = torch.sigmoid(self.router(x)).view(N, E)
        rank, best = score + self.bias, []
        for _ in range(K):  # Inductor has no kernel for topk
            best.append(rank.argmax(-1, keepdim=True))
            rank = rank.masked_fill(torch.arange(E, device=x.device) == best[-1], -math.inf)
        expert = torch.cat(best, 1)  # (N, K)
        place, row_at, owner, tokens = group_rows(expert.flatten(), E)
        self.load += tokens
        owner = owner.to(x.dtype)  # a GEMM picks each block's weights and sums up each expert's gradient
        # transpose the experts, not their blocks (nine times as large); flatten() keeps the gradient contiguous
        c_fc = self.c_fc.flatten(0, 1).unflatten(0, (E, -1)).mT
        c_fc, c_proj = ((owner @ w.to(x.dtype).flatten(1)).view(-1, *w.shape[1:]) for w in (c_fc, self.c_proj))
        place, row_at = place.view(N, K), row_at.view(-1, 1)
        token_at = row_at // K
        h = sum_rows(x.reshape(N, C), token_at, place).view(len(owner), -1, C)
        h = leaky_relu_squared(h @ c_fc) @ c_proj
        weight = sum_rows(2 * score.gather(1, expert).view(-1, 1), row_at, place.view(-1, 1))
        return sum_rows(h.view(-1, C) * weight, place, token_at).view(B, T, C)


class Block(nn.Module):
    def __init__(self, config, layer, kind):
        super().__init__()
        self.attn, self.mlp = Attention(config, layer, kind), MLP(config)
        self.experts = Experts(config) if config.num_experts else None
        self.residual_lambda = nn.Parameter(torch.empty(()))  # scale of the residual stream into this block
        self.x0_lambda = nn.Parameter(torch.empty(())) if layer.value_embed else None  # and of the first embeddings

    def mix_tokens(self, x, x0, idx, cos, sin):
        x = self.residual_lambda * x  # (B, T, C)
        if self.x0_lambda is not None:
            x = x + self.x0_lambda * x0
        return x + self.attn(norm(x), idx, cos, sin)

    def mix_channels(self, x):
        h = norm(x)
        x = x + self.mlp(h)
        return x if self.experts is None else x + self.experts(h)

    def forward(self, x, x0, idx, cos, sin):
        return self.mix_channels(self.mix_tokens(x, x0, idx, cos, sin))


@functools.cache  # all blocks and steps share one
def compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=False)


class GPT(nn.Module):
    def __init__(self, config: Config, dtype: torch.dtype, attention: str):
        super().__init__()
        self.config, self.dtype, self.attention = config, dtype, attention
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.ngram_embeds = nn.ModuleList(NGramEmbedding(n, config.ngram_rows, config.n_embd, dtype) for n in NGRAMS)
        self.induction_embed = nn.Embedding(config.vocab_size + 1, config.n_embd)  # the last row: nothing found
        self.blocks = nn.ModuleList(Block(config, layer, attention) for layer in layers(config))
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        inverse_freq = ROPE_BASE ** -torch.linspace(0, 1, config.head_dim // 2 + 1)[:-1]
        angles = torch.outer(torch.arange(config.seq_len), inverse_freq)[:, None]  # (T, 1, D/2)
        cos, sin = angles.cos().repeat(1, 1, 2), torch.cat([angles.sin(), -angles.sin()], -1)  # (T, 1, D)
        self.register_buffer("cos", cos.to(dtype), persistent=False)
        self.register_buffer("sin", sin.to(dtype), persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        for p in self.parameters():
            nn.init.constant_(p, math.nan)
        bound = 3**0.5 * self.config.n_embd**-0.5  # uniform, standard deviation 1/sqrt(n_embd)
        nn.init.normal_(self.embed.weight)
        for table in (*self.ngram_embeds, self.induction_embed):
            nn.init.zeros_(table.weight)
            table.sparse = False  # gradients, unless make_optimizer asks for it
        nn.init.normal_(self.lm_head.weight, std=0.001)
        for name, p in self.blocks.named_parameters():
            if p.ndim > 1 and p.size(-1) > 1:  # c_proj starts at zero, so that every block is the identity
                scale = 0 if "c_proj" in name or "attn.gate." in name else 1 if "embed" in name else INIT_SCALE
                nn.init.uniform_(p, -bound * scale, bound * scale)
        for block in self.blocks:
            nn.init.ones_(block.residual_lambda)
            if block.x0_lambda is not None:
                nn.init.constant_(block.x0_lambda, X0_LAMBDA)
            for part in block.children():
                matrices = [name for name, p in part.named_parameters() if p.ndim > 1]
                assert not matrices or "c_proj" in str(matrices), f"name the last of {matrices} c_proj: it starts at 0"
        forgotten = [name for name, p in self.named_parameters() if p.flatten()[0].isnan()]
        assert not forgotten, f"init_weights sets no values for {forgotten}: add them there"
        update_buffers(self)

    def look_up(self, idx, followers, found, ngrams):
        """Tokens, followers and found (B, T), n-grams' embeddings (B, T, C) each, to first hidden states (B, T, C)."""
        # cast before the lookups: no (B, T, C) in fp32
        embed, induction_embed = self.embed.weight.to(self.dtype), self.induction_embed.weight.to(self.dtype)
        x = F.embedding(idx, embed) + sum(ngrams)
        # where(): a lookup would add the gradients of most positions to the last row one by one
        x = x + torch.where(found.unsqueeze(-1), F.embedding(followers, induction_embed), induction_embed[-1])
        return norm(x)

    def trunk(self, idx, followers, found, ngrams):
        """As look_up, to the last hidden states."""
        cos, sin = self.cos[: idx.size(1)], self.sin[: idx.size(1)]
        x0 = self.look_up(idx, followers, found, ngrams)
        x = x0.view_as(x0)  # aliased arguments would recompile block 0
        for block in self.blocks:
            x = block(x, x0, idx, cos, sin)
        return norm(x)

    def compile_trunk(self) -> None:
        """A deep trunk by halves of blocks: each kind of attention is compiled once, and the MLP once. A shallow one
        whole, as kernels reach across blocks: a T4's step is 2% shorter (modelled)."""
        torch.compiler.config.cache_key_tag = str(BACKENDS)  # forward() sets them, so the caches do not see them
        torch._dynamo.config.recompile_limit = 64  # kinds of layers, times batch sizes until one fits
        # partial() and not the bound method, which a copy of the model would share
        if self.config.depth <= 4:
            self.trunk = functools.partial(compiled(GPT.trunk), self)
        else:
            self.look_up = functools.partial(compiled(GPT.look_up), self)
            for block in self.blocks:
                block.mix_tokens = functools.partial(compiled(Block.mix_tokens), block)
                block.mix_channels = functools.partial(compiled(Block.mix_channels), block)

    def forward(self, idx, targets=None, reduction="mean"):
        """Tokens (B, T) to logits (B, T, V); with targets (B, T) to the loss in nats, a scalar or (B*T,) for 'none'."""
        assert idx.size(1) <= self.config.seq_len, f"{idx.size(1)} tokens for seq_len={self.config.seq_len}"
        # enable_grad: evaluation runs what training has compiled
        with torch.enable_grad(), sdpa_kernel(BACKENDS[2 * (self.dtype == torch.float16) :], set_priority=True):
            x = self.trunk(idx, *induction(idx), [table(idx) for table in self.ngram_embeds])
        if targets is None:
            logits = self.lm_head(x).float()
            return SOFTCAP * torch.tanh(logits / SOFTCAP) if SOFTCAP else logits
        return fused_linear_cross_entropy(x, self.lm_head.weight, targets, softcap=SOFTCAP, reduction=reduction)

    def flops_per_token(self) -> float:
        """As nanochat and autoresearch count: 6 per matrix weight, 12 per channel and key."""
        lookups = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Embedding))
        experts = [m for m in self.modules() if isinstance(m, Experts)]
        idle = sum((m.c_fc.numel() + m.c_proj.numel()) * (1 - m.experts_per_token / len(m.bias)) for m in experts)
        matrices = sum(p.numel() for p in self.parameters() if p.ndim > 1) - lookups - idle
        H, T = self.config.n_embd // self.config.head_dim, self.config.seq_len
        keys = sum(layer.full_heads * T + (H - layer.full_heads) * layer.window for layer in layers(self.config))
        return 6 * matrices + 12 * self.config.head_dim * keys


@torch.no_grad()
def update_buffers(model):
    """After each step: 4-bit codes follow weights, experts with less than their share of tokens gain in bias."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.requantize_()
        elif isinstance(module, Experts):
            module.bias += BALANCE_RATE * torch.sign(module.load.mean() - module.load)
            module.load.zero_()


def build_model(config: Config | dict, device: torch.device, gpu: harness.GPU) -> GPT:
    """A fresh GPT. config: a Config, or the dict of its fields that a checkpoint holds."""
    config = Config(**config) if isinstance(config, dict) else config
    torch.set_float32_matmul_precision("high")
    with device:
        model = GPT(config, *pick_numerics(gpu))
        model.init_weights()
    if device.type == "cuda":
        model.compile_trunk()
    return model


# ---- MuonAdamW: Muon (polar express, NorMuon, cautious decay) for the matrices, AdamW for the rest

# Newton-Schulz coefficients of https://arxiv.org/abs/2505.16932 (safety factor 2e-2, cushion 2)
POLAR_EXPRESS = [
    (8.156554, -22.483292, 15.878769),
    (4.042929, -2.808917, 0.500017),
    (3.891667, -2.772484, 0.506064),
    (3.285753, -2.368129, 0.464490),
    (2.346541, -1.709782, 0.423235),
]


def assign(old, new, skip):
    """old = new unless skip, a boolean on the device; no host sync."""
    old.copy_(torch.where(skip, old, new))


def muon_direction(grad, momentum_buffer, hyper, dtype, loss_scale, skip):
    """Scaled gradients (n, R, C) to matrices of spectral norm below 1. hyper (3,): learning rate, decay, momentum."""
    momentum = hyper[2]
    grad = grad / loss_scale
    buffer = momentum_buffer.lerp(grad, 1 - momentum)
    update = grad.lerp(buffer, momentum)
    assign(momentum_buffer, buffer, skip)
    return (update / (update.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)).to(dtype)


def polar_express(x):
    """Orthogonalizes a stack of matrices (n, R, C), R >= C, of spectral norm at most 1. All GEMMs: not compiled."""
    for a, b, c in POLAR_EXPRESS:  # ax + x(bG + cGG) as x(c(G + dI)^2 + eI), as baddbmm copies what it adds to
        gram = x.mT @ x
        gram.diagonal(dim1=-2, dim2=-1).add_(b / (2 * c))
        gram = torch.baddbmm(gram, gram, gram, beta=0, alpha=c)
        gram.diagonal(dim1=-2, dim2=-1).add_(a - b * b / (4 * c))
        x = x @ gram
    return x


def muon_update(p, update, second_moment, scale, hyper, skip):
    """In place: p and the orthogonal update (n, R, C), second_moment (n, R, 1); scale (n, 1, 1): of the update."""
    lr, decay, _ = hyper.unbind()
    update = update.float()
    # NorMuon (https://arxiv.org/abs/2510.05491): rows evened out by their second moment, the norm as before
    row_sq = update.square().mean(dim=-1, keepdim=True)
    moment = second_moment.lerp(row_sq, 0.05)
    even_sq = row_sq / moment.clamp_min(1e-10)
    total, even_total = (t.sum((-2, -1), keepdim=True) for t in (row_sq, even_sq))
    update = update * (total / even_total.clamp_min(1e-10) / moment.clamp_min(1e-10)).sqrt()
    cautious = update * p >= 0  # decay only where it agrees with the update
    assign(p, p - lr * (scale * update + decay * p * cautious), skip)
    assign(second_moment, moment, skip)


def as_stack(t):
    """View of a matrix (R, C), or of one per expert (E, R, C), as what Muon orthogonalizes: (n, R, C) with R >= C.

    Wide matrices are transposed. One with sides 1 : k is k squares, so q, k and v count separately.
    """
    wide, squares = t.size(-2) < t.size(-1), max(t.shape[-2:]) % min(t.shape[-2:]) == 0
    squares = squares and not (wide and t.ndim == 3)  # no view
    t = t.view(-1, *t.shape[-2:])
    t = t.mT if wide else t
    return t.unflatten(1, (-1, t.size(2))).flatten(0, 1) if squares else t


def join(parts):  # uncompiled: Inductor would make one kernel per part
    return torch.cat(parts) if len(parts) > 1 else parts[0]


class MuonAdamW(torch.optim.Optimizer):
    """Groups of kind 'muon' hold matrices whose stacks have one shape, 'sparse' tables with sparse gradients.

    Muon (https://kellerjordan.github.io/posts/muon) replaces a matrix's momentum by the nearest orthogonal matrix, so
    that all directions learn at one rate. No step waits for the GPU.
    """
    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and skipping to step()

    def __init__(self, groups: list[dict], dtype: torch.dtype):
        super().__init__(groups, defaults={})
        self.dtype = dtype  # of Newton-Schulz
        self.device = self.param_groups[0]["params"][0].device
        self.num_skipped, self.found_inf = (torch.zeros((), device=self.device) for _ in range(2))
        self.grad_scale = torch.ones((), device=self.device)  # GradScaler sets it and found_inf before each step
        self.tables = {}  # by group; GradScaler must not see them, as it would wait for the GPU to sum their rows
        for i, group in enumerate(self.param_groups):
            params = group["params"]
            if group["kind"] == "muon":
                stacks = [as_stack(p.detach()) for p in params]
                stack, scales = join(stacks), [(s.size(1) / p.size(-1)) ** 0.5 for p, s in zip(params, stacks)]
                # a matrix (R, C) moves by sqrt(max(1, R / C)) times an orthogonal one
                scale = join([torch.full_like(s[:, :1, :1], scale) for s, scale in zip(stacks, scales)])
                group["state"] = [scale, torch.zeros_like(stack), torch.zeros_like(stack[..., :1])]
            elif group["kind"] == "sparse":
                given = group["betas"][0], group["weight_decay"]
                assert given == (0, 0), f"row_adam_ has no momentum and no weight decay: {given}"
                group["state"] = [torch.zeros_like(p[:, :1], dtype=torch.float32) for p in params]
                self.tables[i], group["params"] = params, []
            else:
                steps = [torch.zeros((), device=self.device)] * len(params)
                group["state"] = [*([torch.zeros_like(p) for p in params] for _ in range(2)), steps]

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for p in itertools.chain(*self.tables.values()):
            p.grad = None

    @torch.no_grad()
    def step(self):
        """One update from p.grad, by the groups' lr, weight_decay and momentum."""
        loss_scale, found_inf = self.grad_scale, self.found_inf.view(())
        assert loss_scale is not None, "step() unscales the gradients: leave out scaler.unscale_()"
        skip = found_inf > 0
        wrap = compiled if self.device.type == "cuda" else (lambda f: f)
        self.num_skipped += found_inf
        hyper = torch.tensor([[g["lr"], g["weight_decay"], g["momentum"]] for g in self.param_groups])
        for i, (group, h) in enumerate(zip(self.param_groups, hyper.to(self.device, non_blocking=True))):
            for p, exp_avg_sq in zip(self.tables.get(i, ()), group["state"]):
                if p.grad is not None:  # else an edit has left it unused
                    assert p.grad.is_sparse, f"the gradient of an n-gram table must be sparse: {tuple(p.shape)}"
                    ids, grads = p.grad._indices()[0], p.grad._values()
                    row_adam_(p, exp_avg_sq, ids, grads, h[0], group["betas"][1], loss_scale, found_inf)
            if i in self.tables:
                continue
            params = [p.detach() for p in group["params"]]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group["params"]]
            if group["kind"] == "muon":
                scale, momentum_buffer, second_moment = group["state"]
                stacks = [as_stack(p) for p in params]
                stack, grad = join(stacks), join([as_stack(g) for g in grads])  # (n, R, C)
                update = wrap(muon_direction)(grad, momentum_buffer, h, self.dtype, loss_scale, skip)
                wrap(muon_update)(stack, polar_express(update), second_moment, scale, h, skip)
                if len(stacks) > 1:  # else `stack` is a view of the parameter
                    torch._foreach_copy_(stacks, stack.split([len(s) for s in stacks]))
            else:
                (beta1, beta2), (exp_avgs, exp_avg_sqs, steps) = group["betas"], group["state"]
                steps[0] += 1 - found_inf  # all are one tensor
                torch._fused_adamw_(
                    params, grads, exp_avgs, exp_avg_sqs, [], steps, lr=h[0], beta1=beta1, beta2=beta2,
                    weight_decay=group["weight_decay"], eps=1e-10, amsgrad=False,
                    maximize=False, grad_scale=loss_scale, found_inf=found_inf,
                )


def make_optimizer(model: GPT) -> MuonAdamW:
    """A parameter goes to the group whose key is part of its name, other matrices of a block to Muon."""
    adamw_scale = (model.config.n_embd / 768) ** -0.5  # of nanochat, tuned at width 768

    def group(lr, betas=ADAM_BETAS, weight_decay=0.0, kind="adamw"):
        return dict(kind=kind, lr=lr, betas=betas, weight_decay=weight_decay, momentum=0.0, params=[])

    groups = {
        "lm_head": group(UNEMBEDDING_LR * adamw_scale),
        "ngram_embeds": group(NGRAM_LR * adamw_scale, betas=(0.0, 0.8), kind="sparse"),
        "induction_embed": group(INDUCTION_LR * adamw_scale),
        "value_embed": group(EMBEDDING_LR * adamw_scale, weight_decay=VALUE_EMBED_DECAY),
        "embed": group(EMBEDDING_LR * adamw_scale),
        "x0_lambda": group(X0_LR, betas=(0.96, 0.95)),
        "residual_lambda": group(RESIDUAL_LR),
        "attn.gate": group(GATE_LR),
        "router": group(ROUTER_LR),
    }
    for name, p in model.named_parameters():
        key = next((key for key in groups if f".{key}." in f".{name}."), None)
        if key is None and name.startswith("blocks.") and p.ndim == 2 + (".experts." in name) and p.size(-1) > 1:
            kind, scale = ("experts", EXPERT_LR_SCALE) if p.ndim == 3 else ("matrices", 1)
            key = f"{kind} {tuple(as_stack(p).shape[1:])}"  # one shape per group
            groups.setdefault(key, group(MATRIX_LR * scale, None, MATRIX_DECAY, "muon"))
        assert key is not None, f"no group for {name} {tuple(p.shape)}: give it one in make_optimizer"
        groups[key]["params"] += [p] * p.requires_grad  # decay would move a frozen one
    for table in model.ngram_embeds:
        table.sparse = groups["ngram_embeds"]["kind"] == "sparse"  # gradients of touched rows only
    return MuonAdamW([g for g in groups.values() if g["params"]], model.dtype)


# ---- Schedules, driven by the clock


def set_schedules(optimizer: MuonAdamW, progress: float, step: int) -> None:
    """progress: share of the budget spent, in [0, 1]. Takes any torch.optim.Optimizer."""
    for group in optimizer.param_groups:
        kind = group.get("kind")
        if kind != "sparse":  # constant LR: rows first seen late still need full steps
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - (1 - FINAL_LR) * progress)
        if kind == "muon":
            group["momentum"] = 0.85 + 0.05 * min(1.0, step / MOMENTUM_WARMUP)
            group["weight_decay"] = group.setdefault("initial_weight_decay", group["weight_decay"]) * (1 - progress)


# ---- Training


def make_scaler(model):
    return torch.amp.GradScaler(model.embed.weight.device.type, enabled=model.dtype == torch.float16)


def train_step(model, optimizer, scaler, loader):
    """One optimizer step; returns the mean loss and the epoch."""
    config, total = model.config, 0.0
    grad_accum_steps, rest = divmod(config.total_batch_size, config.device_batch_size * config.seq_len)
    assert not rest, f"device_batch_size * seq_len must divide total_batch_size: {config}"
    for _ in range(grad_accum_steps):
        x, y, epoch = next(loader)
        loss = model(x, y) / grad_accum_steps
        scaler.scale(loss).backward()
        total = total + loss.detach()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    update_buffers(model)
    return total, epoch


class Resets:
    """When to zero the n-gram tables: with whole epochs left, so that they never see the same text twice."""

    def __init__(self, epoch_tokens):
        self.epoch_tokens, self.epochs_left = 0.98 * epoch_tokens, math.inf  # 2% for errors of the pace

    def due(self, clock):
        left = clock.tokens_left()
        if left == math.inf:  # in the first 5%: what is due there comes right after
            return False
        before = min(self.epochs_left, (clock.tokens + left) // self.epoch_tokens)
        self.epochs_left = min(before, left // self.epoch_tokens)
        return self.epochs_left < before


def train(clock: harness.Clock, tokenizer: prepare.Tokenizer, device: torch.device, seed: int, gpu: harness.GPU):
    """Returns the model and numbers for the summary."""
    config = dataclasses.replace(pick_size(gpu), vocab_size=tokenizer.get_vocab_size())
    model = build_model(scale_batch(config, clock.seconds), device, gpu)
    harness.warm_up(model, lambda loader: train_step(model, make_optimizer(model), make_scaler(model), loader))

    torch.manual_seed(seed)
    model.init_weights()
    optimizer, scaler = make_optimizer(model), make_scaler(model)
    config = model.config
    loader = make_dataloader(tokenizer, config.device_batch_size, config.seq_len, "train", device)
    resets = Resets(len(prepare.TokenStream(tokenizer, "train")))
    clock.start()
    while clock.running():
        set_schedules(optimizer, clock.progress(), clock.steps)
        loss, epoch = train_step(model, optimizer, scaler, loader)
        clock.advance(model.config.total_batch_size, loss, epoch, optimizer.param_groups[0]["lr"])
        if resets.due(clock):
            for table in model.ngram_embeds:
                nn.init.zeros_(table.weight)
        if clock.steps % 100 == 0 and scaler.get_scale() < 1:
            raise FloatingPointError(f"loss scale below 1 at step {clock.steps}")
    clock.stop()
    flops = model.flops_per_token() * clock.tokens / clock.elapsed()
    peak = harness.this_gpu().peak_flops * (device.type == "cuda")  # not of the GPU that --gpu names
    return model.eval(), {
        "mfu_percent": f"{100 * flops / (peak or math.inf):.2f}",
        "depth": config.depth,
        "numerics": f"{model.dtype}/{model.attention}".removeprefix("torch."),
        "skipped_steps": int(getattr(optimizer, "num_skipped", 0)),
    }


if __name__ == "__main__":
    harness.run(train, build_model)
