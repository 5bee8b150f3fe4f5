"""
Five minutes of GPT pretraining on one GPU (or none), and one number: val_bpb.

    python train.py                  # 300 s on whatever GPU is there; one row in results.tsv
    python train.py --seconds 30     # a smoke run: never logged
    python train.py --sample "Once"  # text from the saved weights

In the line of nanoGPT, nanochat, modded-nanogpt and karpathy/autoresearch. This file is the experiment: edit it.
prepare.py holds what an experiment cannot move (data, metric, clock, log), kernels.py the loss and other operators.
"""

import dataclasses
import functools
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
    window: int        # earlier tokens that the others see: FA3 slides it, SDPA cuts pieces of it
    shift: int         # of SDPA's pieces, so that text flows across the cuts of other layers
    value_embed: bool  # whether value embeddings and the first hidden states (x0) enter


def layers(config):
    """One per layer, counted from the last: another depth changes the first layers and leaves the rest.

    Only three kinds, as each costs seconds of compilation.
    """
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
    window: int             # tokens that most heads see; see `layers`
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


def pick_numerics(capability: tuple[int, int] | None, has_fa3: bool) -> tuple[torch.dtype, str]:
    """Activations' dtype and kind of attention for a compute capability (None: no GPU).

    Not by torch.cuda.is_bf16_supported(), which is True on a T4: it emulates bf16.
    """
    if capability is None:
        return torch.float32, "sdpa"
    if capability < (7, 0):
        raise prepare.PrepareError(f"compute capability {capability} is below 7.0: use --gpu cpu")
    if capability < (8, 0):
        return torch.float16, "sdpa"
    return torch.bfloat16, "fa3" if has_fa3 and capability[0] == 9 else "sdpa"


def pick_size(peak_flops: float) -> Config:
    """What TIME_BUDGET pays for on a GPU of that many FLOP/s; 0: no GPU."""
    return [config for least, config in SIZES if peak_flops >= least][-1]


def scale_batch(config: Config, seconds: float) -> Config:
    """Scales the batch by sqrt(seconds / TIME_BUDGET), rounded to 2^n: small batches learn more from each token."""
    assert config.total_batch_size % config.seq_len == 0, f"seq_len must divide total_batch_size: {config}"
    sequences = int(config.total_batch_size / config.seq_len * 2.0 ** round(math.log2(seconds / TIME_BUDGET) / 2)) or 1
    device_batch_size = math.gcd(config.device_batch_size, sequences)
    return dataclasses.replace(config, device_batch_size=device_batch_size, total_batch_size=sequences * config.seq_len)


# The fastest first; fp16, so a T4, starts with the third
SDPA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
]


def load_fa3():
    """flash_attn_func of FlashAttention-3's official module, or None."""
    try:
        from flash_attn_interface import flash_attn_func
    except (ImportError, OSError):
        return None
    return flash_attn_func


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
    """One row per hash of n successive tokens. A batch touches few of the rows, so gradients are sparse.

    The plainest form of Engram's conditional memory (https://arxiv.org/abs/2601.07372).
    """

    def __init__(self, n, rows, n_embd, dtype):
        super().__init__(rows, n_embd, dtype=dtype)
        self.n, self.weight.sparse_grads = n, []
        self.weight.register_post_accumulate_grad_hook(self.set_aside)

    @staticmethod
    def set_aside(weight):
        """Hides a sparse gradient from GradScaler, which would wait for the GPU to sum its rows."""
        if weight.grad.is_sparse:
            weight.sparse_grads.append((weight.grad._indices()[0], weight.grad._values()))
            weight.grad = None

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


class Attention(nn.Module):
    GATE_CHANNELS = 32  # input channels that feed the head gates

    def __init__(self, config, layer, flash):
        super().__init__()
        self.n_head, self.head_dim = config.n_embd // config.head_dim, config.head_dim
        self.layer, self.flash = layer, flash
        assert config.n_embd % config.head_dim == 0 and layer.full_heads <= self.n_head, config
        assert flash or config.seq_len % layer.window == 0, f"SDPA cuts whole pieces: {config}"
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
        attend = self.windows if self.flash else self.pieces
        full, rest = zip(*(t.tensor_split([self.layer.full_heads], dim=2) for t in (q, k, v)))
        heads = ((full, T), (rest, self.layer.window))
        y = torch.cat([attend(*qkv, window) for qkv, window in heads if qkv[0].numel()], 2)
        return self.c_proj((y * gate[:, :, :H]).reshape(B, T, C))

    def windows(self, q, k, v, window):
        # contiguous() is fused here; FA3 may copy twice
        return self.flash(q, k, v.contiguous(), causal=True, window_size=(window, 0))

    def pieces(self, q, k, v, window):
        """Causal attention within pieces of `window` tokens. Zeros in front and behind shift the cuts.

        Those in front are an attention sink: without them, the first 128 tokens lose 0.004 nats (measured).
        """
        B, T, H, D = q.shape
        W, S = (window, self.layer.shift) if window < T else (T, 0)
        if S:
            q, k, v = (F.pad(t, (0, 0, 0, 0, S, W - S)) for t in (q, k, v))
        q, k, v = (t.unflatten(1, (-1, W)).flatten(0, 1).transpose(1, 2) for t in (q, k, v))  # (pieces, H, W, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return y.reshape(B, -1, H, D)[:, S : S + T]


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
    def __init__(self, config, layer, flash):
        super().__init__()
        self.attn, self.mlp = Attention(config, layer, flash), MLP(config)
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
    def __init__(self, config: Config, dtype: torch.dtype, flash=None):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.ngram_embeds = nn.ModuleList(NGramEmbedding(n, config.ngram_rows, config.n_embd, dtype) for n in NGRAMS)
        self.induction_embed = nn.Embedding(config.vocab_size + 1, config.n_embd)  # the last row: nothing found
        self.blocks = nn.ModuleList(Block(config, layer, flash) for layer in layers(config))
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
        nn.init.normal_(self.lm_head.weight, std=0.001)
        for name, p in self.blocks.named_parameters():
            if p.ndim > 1 and p.size(-1) > 1:  # c_proj starts at zero, so that every block is the identity
                scale = 0 if "c_proj" in name or "attn.gate." in name else 1 if "embed" in name else INIT_SCALE
                nn.init.uniform_(p, -bound * scale, bound * scale)
        for block in self.blocks:
            nn.init.ones_(block.residual_lambda)
            if block.x0_lambda is not None:
                nn.init.constant_(block.x0_lambda, X0_LAMBDA)
            if block.experts is not None:
                nn.init.zeros_(block.experts.bias)
                nn.init.zeros_(block.experts.load)
        forgotten = [name for name, p in self.named_parameters() if p.flatten()[0].isnan()]
        assert not forgotten, f"init_weights sets no values for {forgotten}: add them there"
        update_buffers(self)

    def look_up(self, idx, followers, found, ngrams):
        """Tokens (B, T), what `induction` finds for them and their n-grams' embeddings, each (B, T, C), to the first
        hidden states (B, T, C)."""
        # cast before the lookups: no (B, T, C) in fp32
        embed, induction_embed = self.embed.weight.to(self.dtype), self.induction_embed.weight.to(self.dtype)
        x = F.embedding(idx, embed) + sum(ngrams)
        # where() instead of a lookup of the last row: most positions would add their gradients to it, one by one
        x = x + torch.where(found.unsqueeze(-1), F.embedding(followers, induction_embed), induction_embed[-1])
        return norm(x)

    def trunk(self, idx, followers, found, ngrams):
        """As look_up, to the last hidden states (B, T, C)."""
        cos, sin = self.cos[: idx.size(1)], self.sin[: idx.size(1)]
        x0 = self.look_up(idx, followers, found, ngrams)
        x = x0.view_as(x0)  # avoid aliased arguments, which would recompile block 0
        for block in self.blocks:
            x = block(x, x0, idx, cos, sin)
        return norm(x)

    def compile_trunk(self) -> None:
        """A deep trunk by halves of blocks, so that each kind of attention is compiled once, and the MLP once.

        A shallow one as a whole: a T4's step is 2% shorter (modelled), as kernels reach across blocks.
        """
        torch.compiler.config.cache_key_tag = str(SDPA_BACKENDS)  # forward() sets them, so the caches do not see them
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
        backends = SDPA_BACKENDS[2 * (self.dtype == torch.float16) :]
        # enable_grad, so that evaluation runs what training has compiled
        with torch.enable_grad(), sdpa_kernel(backends, set_priority=True):
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
    """After each step: 4-bit codes follow their weights, experts with less than their share of tokens gain in bias."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.requantize_()
        elif isinstance(module, Experts):
            module.bias += BALANCE_RATE * torch.sign(module.load.mean() - module.load)
            module.load.zero_()


def build_model(config: Config | dict, device: torch.device, capability: tuple[int, int] | None) -> GPT:
    """A fresh GPT. config: a Config, or the dict of its fields that a checkpoint holds."""
    config = Config(**config) if isinstance(config, dict) else config
    flash = load_fa3()
    dtype, attention = pick_numerics(capability, flash is not None)
    if capability == (9, 0) and attention != "fa3":
        index = f"https://download.pytorch.org/whl/cu{torch.version.cuda.replace('.', '')}"
        print(f"Running on SDPA, without FlashAttention-3: pip install flash-attn-3 --index-url {index}")
    torch.set_float32_matmul_precision("high")
    with device:
        model = GPT(config, dtype, flash if attention == "fa3" else None)
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
    """Gradients (n, R, C), times loss_scale, to matrices of spectral norm below 1. hyper (3,): learning rate, weight
    decay, Nesterov momentum."""
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


def muon_update(p, update, second_moment, scale, rate, hyper, skip):
    """In place: p and the orthogonal update (n, R, C); second_moment (n, R, 1); scale of the update, rate of both
    update and decay (n, 1, 1)."""
    lr, decay, _ = hyper.unbind()
    update = update.float()
    # NorMuon (https://arxiv.org/abs/2510.05491): rows evened out by their second moment, the norm as before
    row_sq = update.square().mean(dim=-1, keepdim=True)
    moment = second_moment.lerp(row_sq, 0.05)
    even_sq = row_sq / moment.clamp_min(1e-10)
    total, even_total = (t.sum((-2, -1), keepdim=True) for t in (row_sq, even_sq))
    update = update * (total / even_total.clamp_min(1e-10) / moment.clamp_min(1e-10)).sqrt()
    cautious = update * p >= 0  # decay only where it agrees with the update
    assign(p, p - lr * rate * (scale * update + decay * p * cautious), skip)
    assign(second_moment, moment, skip)


def as_stack(t):
    """A matrix (R, C), or one per expert (E, R, C), as a view (n, R, C), R >= C: each in squares if one side is a
    multiple of the other (so q, k and v count separately), else whole."""
    t = t.view(-1, *t.shape[-2:])
    t = t.mT if t.size(1) < t.size(2) else t
    return t.unflatten(1, (-1, t.size(2))).flatten(0, 1) if t.size(1) % t.size(2) == 0 else t


def from_stack(stack, shape):
    """The view of that shape whose as_stack is this stack."""
    t = stack.view(-1, max(shape[-2:]), min(shape[-2:]))
    return (t if shape[-2] >= shape[-1] else t.mT).view(shape)


class MuonAdamW(torch.optim.Optimizer):
    """Groups of kind 'muon' hold matrices whose stacks have one shape, 'sparse' tables with sparse gradients.

    Muon replaces the momentum of a matrix's gradient by the nearest orthogonal matrix, so that all directions learn at
    one rate (https://kellerjordan.github.io/posts/muon). Unscaling and skipping (`_step_supports_amp_scaling`) happen
    on the device: no step waits for the GPU.
    """

    _step_supports_amp_scaling = True

    def __init__(self, groups: list[dict], dtype: torch.dtype):
        super().__init__(groups, defaults={})
        self.dtype = dtype  # of Newton-Schulz
        self.device = self.param_groups[0]["params"][0].device
        self.steps, self.num_skipped, self.found_inf = (torch.zeros((), device=self.device) for _ in range(3))
        self.grad_scale = torch.ones((), device=self.device)  # GradScaler sets it and found_inf before each step
        for group in self.param_groups:
            params = group["params"]
            if group["kind"] == "muon":
                stacks = [as_stack(p.detach()) for p in params]
                # a matrix moves by sqrt(max(1, rows / columns)) times an orthogonal one
                shares = [min(1, p.size(-2) / p.size(-1)) * s.size(1) / s.size(2) for p, s in zip(params, stacks)]
                scales = [share**0.5 for share in shares]
                rates = [EXPERT_LR_SCALE if p.ndim == 3 else 1.0 for p in params]
                ones = [torch.ones_like(s[:, :1, :1]) for s in stacks]
                scale, rate = (torch.cat([one * v for one, v in zip(ones, values)]) for values in (scales, rates))
                group["stack"] = stack = torch.cat(stacks)  # (n, R, C); the parameters become views of it
                for p, part in zip(params, stack.split([len(s) for s in stacks])):
                    p.data = from_stack(part, p.shape)
                group["state"] = [scale, rate, torch.zeros_like(stack), torch.zeros_like(stack[..., :1])]
            elif group["kind"] == "sparse":
                given = group["betas"][0], group["weight_decay"]
                assert given == (0, 0), f"row_adam_ has no momentum and no weight decay, so not {given}"
                group["state"] = [torch.zeros_like(p[:, :1], dtype=torch.float32) for p in params]
                for p in params:
                    p.sparse_grads.clear()  # of a step that ran out of memory
            else:
                group["state"] = [[torch.zeros_like(p) for p in params] for _ in range(2)]

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for p in group["params"] if group["kind"] == "sparse" else ():
                p.sparse_grads.clear()

    @torch.no_grad()
    def step(self):
        """One update from p.grad, by the groups' lr, weight_decay and momentum."""
        loss_scale, found_inf = self.grad_scale, self.found_inf.view(())
        assert loss_scale is not None, "step() unscales the gradients: leave out scaler.unscale_()"
        skip = found_inf > 0
        wrap = compiled if self.device.type == "cuda" else (lambda f: f)
        self.steps += 1 - found_inf
        self.num_skipped += found_inf
        hyper = torch.tensor([[g["lr"], g["weight_decay"], g["momentum"]] for g in self.param_groups])
        for group, h in zip(self.param_groups, hyper.to(self.device, non_blocking=True)):
            if group["kind"] == "sparse":
                for p, exp_avg_sq in zip(group["params"], group["state"]):
                    assert p.grad is None, f"the gradient of an n-gram table must be sparse: {tuple(p.shape)}"
                    if p.sparse_grads:  # else an edit has left it unused
                        ids, grads = (torch.cat(t) if len(t) > 1 else t[0] for t in zip(*p.sparse_grads))
                        row_adam_(p, exp_avg_sq, ids, grads, h[0], group["betas"][1], loss_scale, found_inf)
                continue
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group["params"]]
            if group["kind"] == "muon":
                storages = {t.untyped_storage().data_ptr() for t in (group["stack"], *group["params"])}
                assert len(storages) == 1, "p.data = ... cuts a matrix off from its stack: use p.data.copy_(...)"
                scale, rate, momentum_buffer, second_moment = group["state"]
                # stacked here: Inductor would compile one kernel per parameter
                grad = torch.cat([as_stack(g) for g in grads])  # (n, R, C)
                update = wrap(muon_direction)(grad, momentum_buffer, h, self.dtype, loss_scale, skip)
                wrap(muon_update)(group["stack"], polar_express(update), second_moment, scale, rate, h, skip)
            else:
                beta1, beta2 = group["betas"]
                params = [p.detach() for p in group["params"]]
                torch._fused_adamw_(
                    params, grads, *group["state"], [], [self.steps] * len(params), lr=h[0], beta1=beta1, beta2=beta2,
                    weight_decay=group["weight_decay"], eps=1e-10, amsgrad=False, maximize=False,
                    grad_scale=loss_scale, found_inf=found_inf,
                )


def make_optimizer(model: GPT) -> MuonAdamW:
    """A parameter goes to the group whose key is a part of its name, other matrices of the blocks to Muon."""
    adamw_scale = (model.config.n_embd / 768) ** -0.5  # of nanochat, tuned at width 768

    def group(lr, betas=ADAM_BETAS, weight_decay=0.0, kind="adamw"):
        initial = dict(initial_lr=lr, initial_weight_decay=weight_decay)
        return dict(kind=kind, lr=lr, betas=betas, weight_decay=weight_decay, momentum=0.0, params=[], **initial)

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
        key = next((key for key in groups if isinstance(key, str) and f".{key}." in f".{name}."), None)
        if key is None and name.startswith("blocks.") and p.ndim == 2 + (".experts." in name) and p.size(-1) > 1:
            key = tuple(as_stack(p).shape[1:])
            groups.setdefault(key, group(MATRIX_LR, None, MATRIX_DECAY, "muon"))
        assert key is not None, f"no group for {name} {tuple(p.shape)}: give it one in make_optimizer"
        groups[key]["params"] += [p] * p.requires_grad  # decay would move a frozen one
    for table in model.ngram_embeds:
        table.sparse = True  # gradients of touched rows only
    return MuonAdamW([g for g in groups.values() if g["params"]], model.dtype)


# ---- Schedules, driven by the clock


def set_schedules(optimizer: MuonAdamW, progress: float, step: int) -> None:
    """progress: share of the budget spent, in [0, 1]."""
    for group in optimizer.param_groups:
        if group["kind"] != "sparse":  # constant LR: rows first seen late still need full steps
            group["lr"] = group["initial_lr"] * (1 - (1 - FINAL_LR) * progress)
        if group["kind"] == "muon":
            group["momentum"] = 0.85 + 0.05 * min(1.0, step / MOMENTUM_WARMUP)
            group["weight_decay"] = group["initial_weight_decay"] * (1 - progress)


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


def train(clock: harness.Clock, tokenizer: prepare.Tokenizer, device: torch.device, seed: int, gpu: harness.GPU):
    """Returns the model and numbers for the summary."""
    config = dataclasses.replace(pick_size(gpu.peak_flops), vocab_size=tokenizer.get_vocab_size())
    model = build_model(scale_batch(config, clock.seconds), device, gpu.capability)
    harness.warm_up(model, lambda loader: train_step(model, make_optimizer(model), make_scaler(model), loader))

    torch.manual_seed(seed)
    model.init_weights()
    optimizer, scaler = make_optimizer(model), make_scaler(model)
    config = model.config
    loader = make_dataloader(tokenizer, config.device_batch_size, config.seq_len, "train", device)
    epoch_tokens, epochs_left = len(prepare.TokenStream(tokenizer, "train")), 0
    clock.start()
    while clock.running():
        set_schedules(optimizer, clock.progress(), clock.steps)
        loss, epoch = train_step(model, optimizer, scaler, loader)
        clock.advance(model.config.total_batch_size, loss, epoch)
        before, epochs_left = epochs_left, clock.tokens_left() // (0.98 * epoch_tokens)
        if epochs_left < before:
            for table in model.ngram_embeds:  # start over: they know text by heart
                nn.init.zeros_(table.weight)
        if clock.steps % 100 == 0 and scaler.get_scale() < 1:
            raise FloatingPointError(f"loss scale below 1 at step {clock.steps}")
    clock.stop()
    flops = model.flops_per_token() * clock.tokens / clock.elapsed()
    return model.eval(), {
        "mfu_percent": f"{100 * flops / (gpu.peak_flops or math.inf):.2f}",
        "depth": config.depth,
        "numerics": f"{model.dtype}/{'fa3' if model.blocks[0].attn.flash else 'sdpa'}".removeprefix("torch."),
        "skipped_steps": int(getattr(optimizer, "num_skipped", 0)),
    }


if __name__ == "__main__":
    harness.run(train, build_model)
