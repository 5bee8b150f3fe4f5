"""
Five minutes of GPT pretraining on one GPU (or none), and one number: val_bpb.

    python train.py                  # 300 s on the GPU you have; one row in results.tsv
    python train.py --seconds 30     # a smoke run, not logged
    python train.py --sample "Once"  # text by saved weights

In the line of nanoGPT, nanochat, modded-nanogpt and autoresearch. This file is the experiment: edit it.
Data and metric: prepare.py; clock and log: harness/; operators: kernels.py.
"""

import dataclasses
import functools
import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import harness
from kernels import Linear4bit, fused_linear_cross_entropy, row_adam_, sum_rows
from prepare import TIME_BUDGET, VOCAB_SIZE, PrepareError, TokenStream, make_dataloader

# ---- Hyperparameters; sizes by GPU are in SIZES

ROPE_BASE = 200_000        # of the rotary embedding
SOFTCAP = 12.0             # of the logits, or None
INIT_SCALE = 0.68          # standard deviation of the matrices at init, times 1/sqrt(n_embd)
NGRAMS = (2, 3, 4)         # n-grams that have embeddings
X0_LAMBDA = 1.0            # initial scale of x0 in every other block
FOUR_BIT = False           # attention and MLP matrices (not experts) in NF4, with fp32 masters

MATRIX_LR = 0.04           # matrices inside the blocks (Muon)
EXPERT_LR_SCALE = 0.5      # of MATRIX_LR, for experts, which see few tokens each
EMBEDDING_LR = 0.8         # token and value embeddings (AdamW; at width 768, else times sqrt(768 / width))
NGRAM_LR = 0.4             # n-gram embeddings (row-wise Adam, scaled likewise, constant over the run)
INDUCTION_LR = 0.4         # induction embedding (AdamW, scaled likewise)
UNEMBEDDING_LR = 0.005     # lm_head (AdamW, scaled likewise)
X0_LR = 0.5                # per-layer scalars of the first hidden states (AdamW)
RESIDUAL_LR = 0.005        # per-layer scalars of the residual stream (AdamW)
GATE_LR = 0.01             # head gates (AdamW)
ROUTER_LR = 0.003          # routers of the experts (AdamW)
BALANCE_RATE = 0.01        # step of an expert's routing bias: up if it got few tokens, else down
ADAM_BETAS = (0.8, 0.98)
MATRIX_DECAY = 0.1         # cautious weight decay of the matrices, falls linearly to 0
VALUE_EMBED_DECAY = 0.003  # weight decay of the value embeddings
MOMENTUM = 0.9             # of Muon, Nesterov's
FINAL_LR = 0.05            # learning rates fall linearly to this fraction


# ---- What a GPU can do (numerics), and what TIME_BUDGET pays for (size)


@dataclass(frozen=True)
class Config:
    """Sizes; goes into the checkpoint."""

    depth: int              # layers
    n_embd: int             # of the residual stream
    head_dim: int
    seq_len: int            # tokens
    window: int             # earlier tokens that most heads see; SDPA: length of its pieces
    full_heads: int         # heads with the whole context, in every fourth layer from the last
    device_batch_size: int  # sequences per forward and backward; fewer if memory runs out
    total_batch_size: int   # tokens per optimizer step of a run of TIME_BUDGET
    ngram_rows: int         # in each table of n-gram embeddings
    num_experts: int = 0    # next to an MLP of half the width; 0: only an MLP of full width
    experts_per_token: int = 1  # each of width 2 * n_embd / this
    vocab_size: int = VOCAB_SIZE

    def __post_init__(self):
        rest = self.total_batch_size % (self.device_batch_size * self.seq_len)
        assert not rest, f"device_batch_size * seq_len must divide total_batch_size: {self}"


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
    """The activations' dtype and the kind of attention. A T4 only emulates bf16, whatever torch says."""
    if gpu.capability is None:
        return torch.float32, "sdpa"
    if gpu.capability < (7, 0):
        raise PrepareError(f"compute capability {gpu.capability} is below 7.0: use --gpu cpu")
    if gpu.capability < (8, 0):
        return torch.float16, "sdpa"
    return torch.bfloat16, "fa3" if gpu.has_fa3 else "fa2"


def pick_size(gpu: harness.GPU) -> Config:
    """The n-gram tables take at most half of the memory."""
    config = [config for least, config in SIZES if gpu.peak_flops >= least][-1]
    rows, row_bytes = config.ngram_rows, 2 * config.n_embd * len(NGRAMS)
    while 0 < gpu.memory < 2 * rows * row_bytes:
        rows //= 2
    return dataclasses.replace(config, ngram_rows=rows)


def scale_batch(config: Config, seconds: float) -> Config:
    """Scales the batch by sqrt(seconds / TIME_BUDGET), rounded to 2^n: small batches learn more per token."""
    scale = 2.0 ** round(math.log2(seconds / TIME_BUDGET) / 2)
    total_batch_size = max(config.seq_len, int(config.total_batch_size * scale))
    device_batch_size = math.gcd(config.device_batch_size, total_batch_size // config.seq_len)
    return dataclasses.replace(config, device_batch_size=device_batch_size, total_batch_size=total_batch_size)


# ---- GPT: RoPE, QK-norm, head gates, LeakyReLU^2, experts; n-gram, induction and value embeddings


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def rotate(x, cos, sin):
    """Rotary embedding of (B, T, H, D), tables (T, 1, D)."""
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
    """One row per hash of n successive tokens, as in Engram (https://arxiv.org/abs/2601.07372)."""

    def __init__(self, n, rows, n_embd, dtype):
        super().__init__(rows, n_embd, dtype=dtype)
        self.n = n

    def forward(self, idx):
        return super().forward((ngram_hash(idx, self.n) >> 24) % self.num_embeddings)  # (B, T) -> (B, T, C)


def induction(idx):
    """An induction head by lookup: what followed the last three tokens when they last occurred, and whether they did.

    Tokens (B, T) to tokens and bools (B, T)."""
    key, order = ngram_hash(idx, 3).sort(dim=1, stable=True)  # equal ones in the order of the text
    before = torch.where(key[:, 1:] == key[:, :-1], order[:, :-1], -1)
    before = torch.full_like(order, -1).scatter_(1, order[:, 1:], before)  # where they ended, or -1
    return idx.gather(1, before + 1), before >= 0


# SDPA's kernels, the fastest first; fp16 takes the last two
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fa2(q, k, v, window, shift):
    """PyTorch's FlashAttention-2. Whole contexts by SDPA: cuDNN is faster there."""
    T, flash = q.size(1), torch.ops.aten._flash_attention_forward
    if window >= T:
        return sdpa(q, k, v, T, 0)
    return flash(q, k, v, None, None, T, T, 0.0, True, False, window_size_left=window, window_size_right=0)[0]


def sdpa(q, k, v, window, shift):
    """SDPA has no windows: the sequence is cut into pieces of `window` tokens that see only themselves.

    Zeros in front shift every other layer's cuts, so that information crosses them, and act as an attention sink.
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
    """Causal attention of q, k and v (B, T, H, D). With fa3 and fa2 a token sees `window` earlier ones."""
    if kind == "fa3":
        flash = harness.load_fa3()
        # Inductor fuses contiguous(); else FA3 copies v
        return lambda q, k, v, window, shift: flash(q, k, v.contiguous(), causal=True, window_size=(window, 0))
    return {"fa2": fa2, "sdpa": sdpa}[kind]


class Attention(nn.Module):
    def __init__(self, config, i, kind):
        super().__init__()
        C, D, self.attend = config.n_embd, config.head_dim, attention(kind)
        self.n_head = C // D
        self.full_heads = config.full_heads * (i % 4 == 0)  # the first heads: whole context
        self.window = min(config.window, config.seq_len)  # of the other heads
        self.shift = i % 2 * self.window // 2  # where `sdpa` cuts, in tokens
        assert C == self.n_head * D and self.full_heads <= self.n_head and self.window > 0, config
        assert kind != "sdpa" or config.seq_len % self.window == 0, f"SDPA cuts whole pieces: {config}"
        self.c_qkv, self.c_proj = block_linear(C, 3 * C), block_linear(C, C)
        self.value_embed = nn.Embedding(config.vocab_size, C) if i % 2 == 0 else None
        self.gate = Linear(32, self.n_head * (2 if self.value_embed else 1))  # of the first 32 channels
        self.register_buffer("shifted", torch.arange(D) % (D // 2) >= D // 4, persistent=False)  # low frequencies

    def forward(self, x, idx, cos, sin):
        T, H = x.size(1), self.n_head
        q, k, v = self.c_qkv(x).unflatten(-1, (3, H, -1)).unbind(2)  # 3 x (B, T, H, D)
        gate = 2 * torch.sigmoid(self.gate(x[..., :32])).unsqueeze(-1)  # (B, T, H or 2H, 1), 1 at init
        if self.value_embed is not None:
            v = v + gate[:, :, H:] * F.embedding(idx, self.value_embed.weight.to(x.dtype)).view_as(v)
        q, k = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)
        # Half of each key comes from the previous token: an induction head in one layer
        k = torch.where(self.shifted, F.pad(k, (0, 0, 0, 0, 1, -1)), k)
        parts = zip(*(t.tensor_split([self.full_heads], dim=2) for t in (q, k, v)), (T, self.window))
        y = torch.cat([self.attend(q, k, v, window, self.shift) for q, k, v, window in parts if q.numel()], 2)
        return self.c_proj((y * gate[:, :, :H]).flatten(2))


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
    """The MLP's other half: many small MLPs; a router picks some for each token. No token is dropped, and no auxiliary
    loss: experts with too few tokens gain in bias (https://arxiv.org/abs/2408.15664)."""

    def __init__(self, config):
        super().__init__()
        E, K, C = config.num_experts, config.experts_per_token, config.n_embd
        assert 0 < K <= E <= 256 and 2 * C % K == 0, config
        self.experts_per_token = K
        self.router = Linear(C, E)
        self.c_fc, self.c_proj = (nn.Parameter(torch.empty(E, 2 * C // K, C)) for _ in range(2))
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("load", torch.zeros(E), persistent=False)  # tokens since the last step, evaluation's too

    def forward(self, x):
        K, E = self.experts_per_token, len(self.bias)
        score = torch.sigmoid(self.router(x)).view(-1, E)  # (B*T, E)
        expert = (score + self.bias).sort(descending=True, stable=True).indices[:, :K]  # Inductor has no topk
        ranked, order = expert.flatten().to(torch.uint8).sort(stable=True)  # a radix sort: fewer bits are faster
        ends = torch.searchsorted(ranked.long(), torch.arange(E, device=x.device), right=True, out_int32=True)
        self.load += ends.diff(prepend=ends.new_zeros(1))
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device)).view(-1, K)
        token_at, order = order[:, None] // K, order[:, None]
        weight = sum_rows(2 * score.gather(1, expert).view(-1, 1), order, place.view(-1, 1))
        h = sum_rows(x.flatten(0, 1), token_at, place)  # (B*T*K, C), by expert
        h = weight * leaky_relu_squared(F.grouped_mm(h, self.c_fc.to(x.dtype).mT, offs=ends))  # here: saves memory
        return sum_rows(F.grouped_mm(h, self.c_proj.to(x.dtype), offs=ends), place, token_at).view_as(x)


class Block(nn.Module):
    """i counts from the last block (0), so a deeper model adds its blocks in front."""

    def __init__(self, config, i, kind):
        super().__init__()
        self.attn, self.mlp = Attention(config, i, kind), MLP(config)
        self.experts = Experts(config) if config.num_experts else None
        self.residual_lambda = nn.Parameter(torch.empty(()))  # of the residual stream
        self.x0_lambda = nn.Parameter(torch.empty(())) if i % 2 == 0 else None  # of x0

    def forward(self, x, x0, idx, cos, sin):
        x = self.residual_lambda * x  # (B, T, C)
        if self.x0_lambda is not None:
            x = x + self.x0_lambda * x0
        x = x + self.attn(norm(x), idx, cos, sin)
        h = norm(x)
        x = x + self.mlp(h)
        return x if self.experts is None else x + self.experts(h)


@functools.cache
def compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=False)


class GPT(nn.Module):
    def __init__(self, config: Config, dtype: torch.dtype, attention: str):
        super().__init__()
        self.config, self.dtype, self.attention = config, dtype, attention
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.ngram_embeds = nn.ModuleList(NGramEmbedding(n, config.ngram_rows, config.n_embd, dtype) for n in NGRAMS)
        self.induction_embed = nn.Embedding(config.vocab_size + 1, config.n_embd)  # the last row: nothing found
        self.blocks = nn.ModuleList(Block(config, i, attention) for i in reversed(range(config.depth)))
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        inverse_freq = ROPE_BASE ** -torch.linspace(0, 1, config.head_dim // 2 + 1)[:-1]
        inverse_freq = torch.cat([inverse_freq, -inverse_freq])  # (D,)
        angles = torch.outer(torch.arange(config.seq_len), inverse_freq)[:, None]  # (T, 1, D)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        seed, bound = torch.initial_seed(), (3 / self.config.n_embd) ** 0.5
        for name, p in self.named_parameters():
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # a new parameter changes no other's
            if name == "embed.weight":
                nn.init.normal_(p)
            elif name == "lm_head.weight":
                nn.init.normal_(p, std=0.001)
            elif name.startswith(("ngram_embeds.", "induction_embed.")):
                nn.init.zeros_(p)
            elif name.endswith((".x0_lambda", ".residual_lambda")):
                nn.init.constant_(p, X0_LAMBDA if "x0" in name else 1)
            else:  # standard deviation scale / sqrt(n_embd); c_proj is 0: blocks start as the identity
                assert name.startswith("blocks.") and p.ndim > 1 and p.size(-1) > 1, f"init_weights sets no {name}"
                zero = "c_proj" in name.split(".") or "attn.gate." in name
                scale = 0 if zero else 1 if "embed" in name else INIT_SCALE
                nn.init.uniform_(p, -bound * scale, bound * scale)
        for table in self.ngram_embeds:
            table.sparse = False  # make_optimizer may turn it on
        update_buffers(self)

    def trunk(self, idx, followers, found, ngrams):
        """Tokens, followers, found (B, T) and one (B, T, C) per n-gram table to the final hidden states (B, T, C)."""
        # cast first: no fp32 (B, T, C)
        embed, induction_embed = self.embed.weight.to(self.dtype), self.induction_embed.weight.to(self.dtype)
        x = F.embedding(idx, embed) + sum(ngrams)
        # where(), not a lookup: most gradients would be atomic adds to the last row
        x = x + torch.where(found.unsqueeze(-1), F.embedding(followers, induction_embed), induction_embed[-1])
        x = x0 = norm(x)
        cos, sin = self.cos[: idx.size(1)], self.sin[: idx.size(1)]
        for block in self.blocks:
            x = block(x, x0, idx, cos, sin)
        return norm(x)

    def compile_trunk(self) -> None:
        torch.compiler.config.cache_key_tag = str(BACKENDS)  # the cache key does not see sdpa_kernel()
        self.trunk = functools.partial(compiled(GPT.trunk), self)  # not a bound method: copies would share it

    def forward(self, idx, targets=None, reduction="mean"):
        """Tokens (B, T) to logits (B, T, V); with targets (B, T) to the loss in nats, a scalar or (B*T,) for 'none'."""
        # enable_grad: evaluation reuses training's compiled graph
        with torch.enable_grad(), sdpa_kernel(BACKENDS[2 * (self.dtype == torch.float16) :], set_priority=True):
            x = self.trunk(idx, *induction(idx), [table(idx) for table in self.ngram_embeds])
        assert x.dtype == self.dtype, f"an fp32 tensor makes activations {x.dtype}: cast it to x.dtype"
        if targets is None:
            logits = self.lm_head(x).float()
            return SOFTCAP * torch.tanh(logits / SOFTCAP) if SOFTCAP else logits
        return fused_linear_cross_entropy(x, self.lm_head.weight, targets, softcap=SOFTCAP, reduction=reduction)

    def flops_per_token(self) -> float:
        """As in nanochat: 6 per active matrix weight, 12 * head_dim per head and key in its window."""
        tables = {m.weight for m in self.modules() if isinstance(m, nn.Embedding)}
        active = self.config.experts_per_token / max(1, self.config.num_experts)  # share of the experts
        weights = sum(p.numel() * (active if p.ndim == 3 else 1) for p in {*self.parameters()} - tables if p.ndim > 1)
        T, layers = self.config.seq_len, [block.attn for block in self.blocks]
        keys = sum(a.full_heads * T + (a.n_head - a.full_heads) * a.window for a in layers)
        return 6 * weights + 12 * self.config.head_dim * keys


@torch.no_grad()
def update_buffers(model):
    """After each step: requantizes 4-bit weights, rebalances the experts."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.requantize_()
        elif isinstance(module, Experts):
            module.bias += BALANCE_RATE * torch.sign(module.load.mean() - module.load)
            module.load.zero_()


def build_model(config: Config | dict, device: torch.device, gpu: harness.GPU) -> GPT:
    """A fresh GPT. config: a Config, or its fields, as in a checkpoint."""
    config = Config(**config) if isinstance(config, dict) else config
    torch.set_float32_matmul_precision("high")
    with device:
        model = GPT(config, *pick_numerics(gpu))
        model.init_weights()
    if device.type == "cuda":
        model.compile_trunk()
    return model


# ---- Muon for the matrices, AdamW for the rest

# Newton-Schulz coefficients of https://arxiv.org/abs/2505.16932 (safety factor 2e-2, cushion 2)
POLAR_EXPRESS = [
    (8.156554, -22.483292, 15.878769),
    (4.042929, -2.808917, 0.500017),
    (3.891667, -2.772484, 0.506064),
    (3.285753, -2.368129, 0.464490),
    (2.346541, -1.709782, 0.423235),
]


def muon_direction(grad, momentum_buffer, rate, loss_scale, dtype):
    """Gradients (n, R, C) to Nesterov's momentum, scaled to a spectral norm below 1. rate: 1 - momentum, or 0."""
    grad = torch.where(rate > 0, grad / loss_scale, 0)
    momentum_buffer.lerp_(grad, rate)
    update = momentum_buffer.lerp(grad, rate)
    return (update / (update.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)).to(dtype)


def polar_express(x):
    """Orthogonalizes a stack of matrices (n, R, C), R >= C, of spectral norm at most 1. All GEMMs: not compiled."""
    for a, b, c in POLAR_EXPRESS:  # ax + x(bG + cGG) as x(c(G + dI)^2 + eI): baddbmm would copy its addend
        gram = x.mT @ x
        gram.diagonal(dim1=-2, dim2=-1).add_(b / (2 * c))
        gram = torch.baddbmm(gram, gram, gram, beta=0, alpha=c)
        gram.diagonal(dim1=-2, dim2=-1).add_(a - b * b / (4 * c))
        x = x @ gram
    return x


def muon_update(p, update, scale, lr, decay):
    """p (n, R, C) moves by scale (n, 1, 1) times the update, and decays only where that agrees with it."""
    p.sub_(lr * (scale * update + decay * p * (update * p >= 0)))


def as_stack(t):
    """View of a matrix (R, C), or of one per expert (E, R, C), as Muon's stack (n, R, C) with R >= C.

    Wide matrices are transposed. (kC, C) becomes k squares, each orthogonalized separately: q, k and v, and MLPs, too.
    """
    wide = t.size(-2) < t.size(-1)
    squares = max(t.shape[-2:]) % min(t.shape[-2:]) == 0 and not (wide and t.ndim == 3)  # would need a copy
    t = t.view(-1, *t.shape[-2:])
    t = t.mT if wide else t
    return t.unflatten(1, (-1, t.size(2))).flatten(0, 1) if squares else t


class MuonAdamW(torch.optim.AdamW):
    """AdamW, but Muon for groups of kind 'muon' (stacks of one shape), row_adam_ for groups of kind 'sparse'.

    Muon (https://kellerjordan.github.io/posts/muon) replaces a matrix's momentum by the nearest orthogonal matrix, so
    that all directions learn at the same rate. step() never waits for the GPU.
    """

    def __init__(self, groups: list[dict], dtype: torch.dtype):
        super().__init__(groups, eps=1e-10, fused=True)  # fused: GradScaler lets step() unscale and skip
        self.dtype = dtype  # of Newton-Schulz
        self.device = self.param_groups[0]["params"][0].device
        self.num_skipped, self.found_inf = (torch.zeros((), device=self.device) for _ in range(2))
        self.grad_scale = torch.ones((), device=self.device)  # fp16: GradScaler sets both before step()
        self.tables = {}  # by group; hidden from GradScaler, which would coalesce sparse gradients: a sync
        for i, group in enumerate(self.param_groups):
            params = group["params"]
            if group["kind"] == "muon":
                stacks = [as_stack(p.detach()) for p in params]
                # a matrix (R, C) moves by sqrt(max(1, R / C)) times an orthogonal one
                scales = [(s.size(1) / p.size(-1)) ** 0.5 for p, s in zip(params, stacks) for _ in s]
                group["state"] = [stacks[0].new_tensor(scales).view(-1, 1, 1), torch.zeros_like(torch.cat(stacks))]
            elif group["kind"] == "sparse":
                given = group["betas"][0], group["weight_decay"]
                assert given == (0, 0), f"row_adam_ has no momentum and no weight decay: {given}"
                group["state"] = [torch.zeros_like(p[:, :1], dtype=torch.float32) for p in params]
                self.tables[i], group["params"] = params, []

    @torch.no_grad()
    def step(self):
        """One update from p.grad, by the groups' lr, weight_decay and momentum."""
        assert self.grad_scale is not None, "step() unscales the gradients: leave out scaler.unscale_()"
        self.num_skipped += self.found_inf  # 1.0: skip the step
        for i, group in enumerate(self.param_groups):
            if group["kind"] == "muon":
                self.step_muon(group, 1 - self.found_inf)
            elif group["kind"] == "sparse":
                self.step_tables(self.tables[i], group)
        super().step()  # Muon and row_adam_ have set their gradients to None

    def step_muon(self, group, live):
        wrap = compiled if self.device.type == "cuda" else (lambda f: f)
        scale, momentum_buffer = group["state"]
        lr, decay, rate = (live * x for x in (group["lr"], group["weight_decay"], 1 - group["momentum"]))
        stacks, grads = [], []
        for p in group["params"]:
            stacks.append(as_stack(p.detach()))
            grads.append(torch.zeros_like(stacks[-1]) if p.grad is None else as_stack(p.grad))
            p.grad = None
        stack = torch.cat(stacks)  # (n, R, C)
        update = wrap(muon_direction)(torch.cat(grads), momentum_buffer, rate, self.grad_scale, self.dtype)
        wrap(muon_update)(stack, polar_express(update), scale, lr, decay)
        torch._foreach_copy_(stacks, stack.split([len(s) for s in stacks]))

    def step_tables(self, tables, group):
        for p, exp_avg_sq in zip(tables, group["state"]):
            if p.grad is not None:  # else an edit has left it unused
                assert p.grad.is_sparse, f"the gradient of an n-gram table must be sparse: {tuple(p.shape)}"
                ids, grads = p.grad._indices()[0], p.grad._values()
                row_adam_(p, exp_avg_sq, ids, grads, group["lr"], group["betas"][1], self.grad_scale, self.found_inf)
                p.grad = None


def make_optimizer(model: GPT) -> MuonAdamW:
    """A parameter with a group's key in its name goes there, a block's other matrices to Muon."""
    wide = (model.config.n_embd / 768) ** -0.5  # as in nanochat

    def group(lr, betas=ADAM_BETAS, weight_decay=0.0, kind="adamw"):
        return dict(kind=kind, lr=lr, betas=betas, weight_decay=weight_decay, momentum=MOMENTUM, params=[])

    groups = {
        "lm_head": group(UNEMBEDDING_LR * wide),
        "ngram_embeds": group(NGRAM_LR * wide, betas=(0.0, 0.8), kind="sparse"),
        "induction_embed": group(INDUCTION_LR * wide),
        "value_embed": group(EMBEDDING_LR * wide, weight_decay=VALUE_EMBED_DECAY),
        "embed": group(EMBEDDING_LR * wide),
        "x0_lambda": group(X0_LR, betas=(0.96, 0.95)),
        "residual_lambda": group(RESIDUAL_LR),
        "attn.gate": group(GATE_LR),
        "router": group(ROUTER_LR),
    }
    for name, p in model.named_parameters():
        key = next((key for key in groups if f".{key}." in f".{name}."), None)
        inside = "blocks." in name and not name.endswith("embed.weight")
        if key is None and inside and p.ndim == 2 + (".experts." in name) and p.size(-1) > 1:
            lr = MATRIX_LR * (EXPERT_LR_SCALE if p.ndim == 3 else 1)
            key = f"{lr} {tuple(as_stack(p).shape[1:])}"  # one shape per group
            groups.setdefault(key, group(lr, weight_decay=MATRIX_DECAY, kind="muon"))
        assert key is not None, f"no group for {name} {tuple(p.shape)}: give it one in make_optimizer"
        groups[key]["params"] += [p] * p.requires_grad  # not frozen ones: decay would move them
    for table in model.ngram_embeds:
        table.sparse = groups["ngram_embeds"]["kind"] == "sparse"  # gradients of touched rows only
    return MuonAdamW([g for g in groups.values() if g["params"]], model.dtype)


# ---- Schedules


def set_schedules(optimizer: MuonAdamW, progress: float) -> None:
    """progress: share of the budget spent."""
    for group in optimizer.param_groups:
        if group.get("kind") != "sparse":  # constant LR: rows first seen late still need full steps
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - (1 - FINAL_LR) * progress)
        if group.get("kind") == "muon":
            group["weight_decay"] = group.setdefault("initial_weight_decay", group["weight_decay"]) * (1 - progress)


# ---- Training


def make_scaler(model):
    return torch.amp.GradScaler(model.embed.weight.device.type, enabled=model.dtype == torch.float16)


def train_step(model, optimizer, scaler, loader):
    """One optimizer step; returns the mean loss and the epoch."""
    config, total = model.config, 0.0
    grad_accum_steps = config.total_batch_size // (config.device_batch_size * config.seq_len)
    for _ in range(grad_accum_steps):
        x, y, epoch = next(loader)
        loss = model(x, y) / grad_accum_steps
        scaler.scale(loss).backward()
        total = total + loss.detach()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    update_buffers(model)
    return total, epoch


def train(clock: harness.Clock, tokenizer, device, seed: int, gpu: harness.GPU):
    """Returns model and numbers for the summary."""
    config = dataclasses.replace(pick_size(gpu), vocab_size=tokenizer.get_vocab_size())
    model = build_model(scale_batch(config, clock.seconds), device, gpu)
    harness.warm_up(model, lambda loader: train_step(model, make_optimizer(model), make_scaler(model), loader))

    torch.manual_seed(seed)
    model.init_weights()
    optimizer, scaler = make_optimizer(model), make_scaler(model)
    config = model.config
    loader = make_dataloader(tokenizer, config.device_batch_size, config.seq_len, "train", device)
    epoch_tokens, epochs_left = len(TokenStream(tokenizer, "train")), math.nan
    clock.start()
    while clock.running():
        set_schedules(optimizer, clock.progress())
        loss, epoch = train_step(model, optimizer, scaler, loader)
        clock.advance(config.total_batch_size, loss, epoch, optimizer.param_groups[0]["lr"])
        left = clock.tokens_left()  # inf, and epochs_left nan, until the pace is known
        before = epochs_left if epochs_left >= 0 else (clock.tokens + left) // epoch_tokens
        epochs_left = left // epoch_tokens
        if epochs_left < before:  # whole epochs left: zero the tables, so that they see no text twice
            for table in model.ngram_embeds:
                nn.init.zeros_(table.weight)
        if clock.steps % 100 == 0 and scaler.get_scale() < 1:
            raise FloatingPointError(f"loss scale below 1 at step {clock.steps}")
    clock.stop()
    return model.eval(), {
        "depth": config.depth,
        "numerics": f"{model.dtype}/{model.attention}".removeprefix("torch."),
        "skipped_steps": int(getattr(optimizer, "num_skipped", 0)),
    }


if __name__ == "__main__":
    harness.run(train, build_model)
