"""
Five minutes of GPT pretraining on one GPU (or none), and one number: val_bpb.

    python train.py  # 300 s, one row in results.tsv

After nanoGPT, nanochat, modded-nanogpt and autoresearch. This file is the experiment: edit it.
Data: prepare.py; clock, score and log: harness/; operators: kernels.py.
"""

import functools
import math
import re
import weakref
import zlib
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import harness
from kernels import Linear4bit, fused_linear_cross_entropy, linear_fp8, row_adam_, sum_rows
from prepare import TIME_BUDGET, VOCAB_SIZE, TokenStream, make_dataloader

# ---- Hyperparameters. Model sizes: SIZES below. LRs of embeddings and lm_head: at width 768

ROPE_BASE = 200_000
SOFTCAP = 12.0          # bound of the logits, or None
INIT_SCALE = 0.68       # standard deviation of the matrices at init, times sqrt(n_embd)
NGRAMS = (2, 3, 4)      # lengths of the n-grams that have embeddings
FOUR_BIT = False        # attention and MLP (not experts) in NF4, with fp32 masters

MATRIX_LR = 0.04        # matrices inside the blocks (Muon)
EXPERT_LR_SCALE = 0.5   # times MATRIX_LR: an expert sees few tokens
EMBEDDING_LR = 0.8      # token and value embeddings
NGRAM_HALF_LR = 1024    # updates that halve a 2-gram row's LR (longer: 1/4); falls to 1/16
INDUCTION_LR = 0.4
UNEMBEDDING_LR = 0.005  # lm_head
X0_LR = 0.5             # per-layer scales of x0
RESIDUAL_LR = 0.005     # per-layer scales of the residual stream
GATE_LR = 0.01          # head gates
ROUTER_LR = 0.003
BALANCE_RATE = 0.01     # step of an expert's bias, up after few tokens
ADAM_BETAS = (0.8, 0.98)
MATRIX_DECAY = 0.1      # cautious decay of matrices, falls to 0
VALUE_EMBED_DECAY = 0.003
MOMENTUM = 0.9          # of Muon (Nesterov)
FINAL_LR = 0.05         # LRs fall to this fraction

say_once = functools.cache(print)

# ---- Numerics and size by GPU

@dataclass(frozen=True)
class Config:  # saved with the weights
    depth: int  # layers
    n_embd: int  # width of the residual stream
    head_dim: int = 128
    seq_len: int = 1024  # of training; every fourth layer sees that far back
    window: int = 256  # earlier tokens that others see; SDPA: length of pieces
    device_batch_size: int = 32  # sequences at once; fewer if memory runs out
    total_batch_size: int = 2**15  # tokens per step of a run of TIME_BUDGET
    ngram_rows: int = 2_621_440  # rows of each n-gram table
    ngram_lr: float = 0.4
    num_experts: int = 0  # they replace half of every other MLP
    experts_per_token: int = 2  # each of width 2 * n_embd / experts_per_token
    fp8: bool = False  # MLPs, q, k and v by linear_fp8()
    vocab_size: int = VOCAB_SIZE
    eval_seq_len: int = 16384  # of scoring: few targets near a row's start

    def __post_init__(self):
        for rule in (
            "total_batch_size % (device_batch_size * seq_len) == 0",
            "n_embd % head_dim == 0",
            "window > 0",
            "num_experts == 0 or 0 < experts_per_token <= num_experts <= 256",
            "num_experts == 0 or 2 * n_embd % experts_per_token == 0",
        ):
            assert eval(rule, {}, vars(self)), f"{rule} must hold in {self}"

SIZE = None  # or Config(...), which replaces all of SIZES
SIZES = (  # (least FLOP/s, size): a GPU takes the last row that it reaches
    (0, Config(depth=3, n_embd=128, head_dim=32, seq_len=128, eval_seq_len=1024,
               device_batch_size=32, total_batch_size=2**12, ngram_rows=655_360)),  # no GPU
    (1e12, Config(depth=3, n_embd=384, ngram_lr=0.65)),
    (70e12, Config(depth=4, n_embd=384, ngram_lr=0.65)),
    (145e12, Config(depth=6, n_embd=512, device_batch_size=64, total_batch_size=2**16, ngram_rows=10_485_760)),
    (600e12, Config(depth=7, n_embd=768, device_batch_size=128, total_batch_size=2**17,
                    ngram_rows=10_485_760, num_experts=32, fp8=True)),
)

def pick_numerics(gpu: harness.GPU) -> tuple[torch.dtype, str]:
    """Dtype of activations, kind of attention. A T4 only emulates bf16, whatever torch says."""
    if gpu.capability is None:
        return torch.float32, "sdpa"
    if gpu.capability < (8, 0):
        return torch.float16, "sdpa"
    return torch.bfloat16, gpu.flash or "fa2"

def pick_size(gpu: harness.GPU) -> Config:
    """SIZE, or this GPU's row of SIZES, cut to what the GPU can train."""
    row = max(i for i, (flops, _) in enumerate(SIZES) if gpu.peak_flops >= flops)
    say_once(f"Size by {'SIZE instead of ' if SIZE else ''}SIZES[{row}], for {gpu.peak_flops:.3g} FLOP/s")
    config = SIZE or SIZES[row][1]
    if (config.num_experts or config.fp8) and gpu.capability and gpu.capability[0] not in (9, 10):
        say_once("No experts, no FP8: only for sm_90 and sm_10x")
        config = replace(config, num_experts=0, fp8=False)
    row_bytes = 2 * config.n_embd * len(NGRAMS)
    while 0 < gpu.memory / 2 < config.ngram_rows * row_bytes:  # the tables get up to half
        config = replace(config, ngram_rows=config.ngram_rows // 2)
    return config

def scale_batch(config: Config, seconds: float) -> Config:
    """The batch times sqrt(seconds / TIME_BUDGET), rounded to a power of two."""
    scale = 2.0 ** round(math.log2(seconds / TIME_BUDGET) / 2)
    sequences = max(1, int(config.total_batch_size // config.seq_len * scale))
    batch, total = math.gcd(config.device_batch_size, sequences), sequences * config.seq_len
    return replace(config, device_batch_size=batch, total_batch_size=total)

# ---- A parameter declares its init and its optimizer where it is made

def declare(x, init, optim):
    """x: a parameter, or a module with a weight. init: a standard deviation (0: zeros), a function that
    fills x, or None (as made). optim: from below, or None (by shape)."""
    p = x if isinstance(x, nn.Parameter) else x.weight
    assert p.is_leaf, "declare() its parameters"
    p.init, p.optim, p.made = init, optim, str(p.detach().sum())
    return x

def muon(lr, split=None):
    """split: torch.split's arguments, for parts that are orthogonalized separately."""
    return dict(kind="muon", lr=lr, weight_decay=MATRIX_DECAY, momentum=MOMENTUM, split=split)

def adamw(lr, width=768, betas=None, weight_decay=0.0):
    lr, betas = lr * (width / 768) ** -0.5, betas or ADAM_BETAS
    return dict(kind="adamw", lr=lr, betas=betas, weight_decay=weight_decay)

def row_adam(lr, width, beta2, half_lr):
    """Adam without momentum, for rows that are looked up. half_lr: see row_adam_()."""
    return dict(kind="rows", lr=lr * (width / 768) ** -0.5, beta2=beta2, half_lr=half_lr)

# ---- GPT with head gates, experts; n-gram, induction and value embeddings

def norm(x):
    return F.rms_norm(x, (x.size(-1),))

class Linear(nn.Linear):  # fp32 weight, cast on use
    def __init__(self, inputs, outputs, fp8=False):
        super().__init__(inputs, outputs, bias=False)
        self.fp8 = fp8

    def forward(self, x):
        if self.fp8 and x.dtype == torch.bfloat16 and torch.is_grad_enabled():
            return linear_fp8(x, self.weight)
        return F.linear(x, self.weight.to(x.dtype))

def block_linear(inputs, outputs, std, split=None, fp8=False):
    layer = Linear4bit(inputs, outputs, trainable=True) if FOUR_BIT else Linear(inputs, outputs, fp8)
    return declare(layer, std, muon(MATRIX_LR, split))

def ngram_hash(idx, n):
    """Hashes (B, T) of each token and the n - 1 before it."""
    golden = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio (Knuth), as int64
    key = golden * idx
    for back in range(1, n):
        key = golden * (key + F.pad(idx, (back, -back)))
    return key

class RowLookup(torch.autograd.Function):  # F.embedding; gradients go to a list, not table.grad
    @staticmethod
    def forward(ctx, table, ids, row_grads):
        ctx.ids, ctx.row_grads = ids, row_grads
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx, grad):
        ctx.row_grads.append((ctx.ids.flatten(), grad.flatten(0, -2)))
        return None, None, None

class NGramEmbedding(nn.Embedding):
    """One row per hash of n tokens, as in Engram (https://arxiv.org/abs/2601.07372)."""
    def __init__(self, n, config, dtype):
        super().__init__(config.ngram_rows, config.n_embd, dtype=dtype)
        self.n, self.dtype = n, dtype
        half_lr = NGRAM_HALF_LR / (1 if n == 2 else 4)
        declare(self, nn.init.zeros_, row_adam(config.ngram_lr, config.n_embd, 0.8, half_lr))

    def forward(self, idx):  # (B, T) -> (B, T, C)
        table, ids = self.weight, (ngram_hash(idx, self.n) >> 24) % self.num_embeddings
        if optimizer := getattr(table, "optimizer", lambda: None)():  # the MuonAdamW that has it
            return RowLookup.apply(table, ids, optimizer.row_grads[table])
        if self.training and table.requires_grad and table.dtype != torch.float32:
            say_once("n-gram tables: fp32, dense gradients without MuonAdamW")
            self.float()
        return F.embedding(ids, table).to(self.dtype)

def induction(idx):
    """An induction head by lookup: which token followed the last three where they occurred before?
    Tokens (B, T) -> followers, and whether there is one (B, T)."""
    key, order = ngram_hash(idx, 3).sort(dim=1, stable=True)  # equal keys in text order
    before = torch.where(key[:, 1:] == key[:, :-1], order[:, :-1], -1)
    before = torch.full_like(order, -1).scatter_(1, order[:, 1:], before)  # previous match, or -1
    return idx.gather(1, before + 1), before >= 0

def rotate(x, cos, sin):
    """Rotary embedding of (B, T, H, D), tables (T, 1, D)."""
    return x * cos + x.unflatten(-1, (2, -1)).flip(-2).flatten(-2) * sin

# SDPA's kernels, the fastest first; fp16 takes the last two
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

def fa2(q, k, v, window, shift):
    """PyTorch's FlashAttention-2. Whole contexts by SDPA: cuDNN is faster there."""
    T, flash = q.size(1), torch.ops.aten._flash_attention_forward
    if window >= T:
        return sdpa(q, k, v, window, shift)
    args = q, k, v, None, None, T, T, 0.0, True, False
    return flash(*args, window_size_left=window, window_size_right=0)[0]

def sdpa_piece(q, k, v, mask=None):
    """Tokens (B, T, H, D), causal or by a mask (query, key)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).transpose(1, 2)

def sdpa_window(q, k, v, window):
    """Pieces of `window` queries, each with its own keys and those of the piece before."""
    i, pieces = torch.arange(q.size(1), device=q.device), []
    for start in range(0, len(i), window):
        here, seen = slice(start, start + window), slice(max(0, start - window), start + window)
        mask = (i[seen] <= i[here, None]) & (i[seen] >= i[here, None] - window)
        pieces.append(sdpa_piece(q[:, here], k[:, seen], v[:, seen], mask))
    return torch.cat(pieces, dim=1)

def sdpa(q, k, v, window, shift):
    """SDPA has no windows: the text is cut into pieces of `window` tokens that see only themselves.
    Zeros in front shift every other layer's cuts: an attention sink, too. Shift None: a true window."""
    B, T, H, D = q.shape
    if shift is None and window < T:
        return sdpa_window(q, k, v, window)
    W, S = (T, 0) if window >= T else (window, shift)
    end = -(S + T) % W  # zeros that fill the last piece
    if S + end > 0:
        q, k, v = (F.pad(t, (0, 0, 0, 0, S, end)) for t in (q, k, v))
    pieces = (t.unflatten(1, (-1, W)).flatten(0, 1) for t in (q, k, v))  # (pieces, W, H, D)
    return sdpa_piece(*pieces).reshape(B, -1, H, D)[:, S : S + T]

@functools.cache
def attention(kind):
    """A causal f(q, k, v, window, shift): tokens of (B, T, H, D) see `window` earlier ones."""
    if kind in ("fa3", "fa4"):
        flash = getattr(harness, f"load_{kind}")()  # copies v, unless Inductor fuses contiguous()
        return lambda q, k, v, W, _: flash(q, k, v.contiguous(), causal=True, window_size=(W, 0))
    return {"fa2": fa2, "sdpa": sdpa}[kind]

class Attention(nn.Module):
    def __init__(self, config, i, kind):
        super().__init__()
        C, D, H = config.n_embd, config.head_dim, config.n_embd // config.head_dim
        self.n_head, self.head_dim, self.attend = H, D, attention(kind)
        self.window = config.seq_len if i % 4 == 0 else min(config.window, config.seq_len)
        self.shift = None if self.window == config.seq_len else (i % 2) * self.window // 2
        self.qkv = [C, C, C]  # widths of queries, keys, values
        self.c_qkv = block_linear(C, sum(self.qkv), INIT_SCALE * C**-0.5, (self.qkv, -2), config.fp8)
        self.c_proj = block_linear(C, C, 0)  # 0: blocks start as the identity
        self.value_embed, gates = None, H
        if i % 2 == 0:
            optim = adamw(EMBEDDING_LR, C, weight_decay=VALUE_EMBED_DECAY)
            self.value_embed = declare(nn.Embedding(config.vocab_size, C), C**-0.5, optim)
            gates = 2 * H
        self.gate = declare(Linear(32, gates), 0, adamw(GATE_LR))  # reads 32 channels
        slow = torch.arange(D) % (D // 2) >= D // 4  # the lower half of the frequencies
        self.register_buffer("slow", slow, persistent=False)

    def forward(self, x, idx, cos, sin):
        H = self.n_head
        q, k, v = self.c_qkv(x).split(self.qkv, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # (B, T, H, D)
        gate = 2 * torch.sigmoid(self.gate(x[..., :32])).unsqueeze(-1)  # (B, T, H or 2H, 1)
        if self.value_embed is not None:
            value = F.embedding(idx, self.value_embed.weight.to(x.dtype))  # (B, T, C)
            v = v + gate[:, :, H:] * value.view_as(v)
        q, k = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)
        # Half of each key is the previous token's: an induction head in one layer
        k = torch.where(self.slow, F.pad(k, (0, 0, 0, 0, 1, -1)), k)
        y = self.attend(q, k, v, self.window, self.shift) * gate[:, :, :H]
        return self.c_proj(y.flatten(2))

def leaky_relu_squared(x):
    return F.leaky_relu(x, 0.3).square()

class MLP(nn.Module):
    def __init__(self, config, factor):
        super().__init__()
        C, fp8 = config.n_embd, config.fp8  # split into squares
        self.c_fc = block_linear(C, factor * C, INIT_SCALE * C**-0.5, (C, -2), fp8)
        self.c_proj = block_linear(factor * C, C, 0, (C, -1), fp8)

    def forward(self, x):
        return self.c_proj(leaky_relu_squared(self.c_fc(x)))

class Experts(nn.Module):
    """Half of an MLP: a router picks some of many small ones for each token, and drops none.
    A bias, not a loss, balances the experts (https://arxiv.org/abs/2408.15664)."""

    def __init__(self, config):
        super().__init__()
        E, K, C = config.num_experts, config.experts_per_token, config.n_embd
        self.experts_per_token, std, lr = K, INIT_SCALE * C**-0.5, MATRIX_LR * EXPERT_LR_SCALE
        self.router = declare(Linear(C, E), std, adamw(ROUTER_LR))
        hidden, half = 2 * C // K, C // 2  # Muon on halves: 3% faster
        self.c_fc = declare(nn.Parameter(torch.empty(E, hidden, C)), std, muon(lr, (half, -2)))
        self.c_proj = declare(nn.Parameter(torch.empty(E, C, hidden)), 0, muon(lr, (half, -1)))
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("load", torch.zeros(E), persistent=False)  # tokens since the last step

    def forward(self, x):
        """(B, T, C) -> (B, T, C). N = B * T tokens, P = N * K pairs of a token and an expert."""
        K, E = self.experts_per_token, len(self.bias)
        score = torch.sigmoid(self.router(x)).view(-1, E)  # (N, E)
        # Inductor lacks topk. The second sort is faster with 8 bits
        expert = (score + self.bias).sort(descending=True, stable=True).indices[:, :K]  # (N, K)
        ranked, pair = expert.flatten().to(torch.uint8).sort(stable=True)  # (P,)
        number = torch.arange(max(E, len(pair)), device=x.device)
        ends = torch.searchsorted(ranked.long(), number[:E], right=True, out_int32=True)
        self.load += ends.diff(prepend=ends.new_zeros(1))
        place = torch.empty_like(pair).scatter_(0, pair, number[: len(pair)]).view(-1, K)  # (N, K)
        pair, token = pair[:, None], pair[:, None] // K  # (P, 1)
        weight = sum_rows(2 * score.gather(1, expert).view(-1, 1), pair, place.view(-1, 1))
        h = sum_rows(x.flatten(0, 1), token, place)  # (P, C)
        h = F.grouped_mm(h, self.c_fc.to(x.dtype).mT, offs=ends)  # (P, 2C / K)
        h = weight * leaky_relu_squared(h)  # weighted here: saves memory
        h = F.grouped_mm(h, self.c_proj.to(x.dtype).mT, offs=ends)  # (P, C)
        return sum_rows(h, place, token).view_as(x)

class Block(nn.Module):  # i: number of blocks behind it: deeper models add blocks in front
    def __init__(self, config, i, kind):
        super().__init__()
        self.residual_lambda = declare(nn.Parameter(torch.ones(())), None, adamw(RESIDUAL_LR))
        self.x0_lambda, x0_optim = None, adamw(X0_LR, betas=(0.96, 0.95))
        if i % 2 == 0:
            self.x0_lambda = declare(nn.Parameter(torch.ones(())), None, x0_optim)
        self.experts = Experts(config) if config.num_experts and i % 2 == 0 else None
        self.attn, self.mlp = Attention(config, i, kind), MLP(config, 2 if self.experts else 4)

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
    def __init__(self, config, dtype, attention):
        super().__init__()
        V, C, D = config.vocab_size, config.n_embd, config.head_dim
        self.config, self.dtype, self.attention = config, dtype, attention
        self.backends = BACKENDS[2:] if dtype == torch.float16 else BACKENDS
        self.embed = declare(nn.Embedding(V, C), nn.init.normal_, adamw(EMBEDDING_LR, C))
        self.ngram_embeds = nn.ModuleList(NGramEmbedding(n, config, dtype) for n in NGRAMS)
        self.induction_embed = declare(nn.Embedding(V + 1, C), 0, adamw(INDUCTION_LR, C))
        self.blocks = nn.ModuleList(Block(config, i, attention) for i in reversed(range(config.depth)))
        self.lm_head = declare(Linear(C, V), lambda p: p.normal_(std=0.001), adamw(UNEMBEDDING_LR, C))
        freqs = ROPE_BASE ** -torch.linspace(0, 1, D // 2 + 1)[:-1]
        i = torch.arange(max(config.seq_len, config.eval_seq_len))
        angles = torch.outer(i, torch.cat([freqs, -freqs]))[:, None]  # (T, 1, D)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    @torch.no_grad()
    def init_weights(self, again=False):
        """From seed and name alone: a new parameter changes no other's values. What is written into
        one stays, unless `again`."""
        seed = torch.initial_seed()
        for name, p in self.named_parameters():
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            if getattr(p, "init", None) is None or (not again and p.made != str(p.detach().sum())):
                p.init = functools.partial(torch.Tensor.copy_, other=p.clone())
            p.init(p) if callable(p.init) else nn.init.uniform_(p, -p.init * 3**0.5, p.init * 3**0.5)
            p.made = str(p.detach().sum())
        torch.manual_seed(seed)
        update_buffers(self)

    def trunk(self, idx, followers, found, ngrams):
        """Tokens, followers, found (B, T), n-grams' embeddings (B, T, C) -> final states (B, T, C)."""
        x = F.embedding(idx, self.embed.weight.to(self.dtype)) + sum(ngrams)  # no fp32 (B, T, C)
        embed = self.induction_embed.weight.to(self.dtype)  # last row: nothing found
        x = x + torch.where(found.unsqueeze(-1), F.embedding(followers, embed), embed[-1])
        x = x0 = norm(x)
        cos, sin = self.cos[: idx.size(1)], self.sin[: idx.size(1)]
        for block in self.blocks:
            x = block(x, x0, idx, cos, sin)
        return norm(x)

    def compile_trunk(self):
        torch.compiler.config.cache_key_tag = str(BACKENDS)  # the cache does not see sdpa_kernel()
        self.trunk = functools.partial(compiled(type(self).trunk), self)  # deepcopy() rebinds it

    def forward(self, idx, targets=None, reduction="mean"):
        """Tokens (B, T) -> logits (B, T, V), or with targets the loss in nats ('none': (B*T,))."""
        assert idx.size(1) <= len(self.cos), f"{idx.size(1)} tokens exceed eval_seq_len: {self.config}"
        trunk = self.trunk if torch.is_grad_enabled() else type(self).trunk.__get__(self)  # not compiled
        with sdpa_kernel(self.backends, set_priority=True):
            x = trunk(idx, *induction(idx), [table(idx) for table in self.ngram_embeds])
        assert x.dtype == self.dtype, f"a tensor makes activations {x.dtype}: cast it to x.dtype"
        if targets is None:
            logits = self.lm_head(x).float()
            return SOFTCAP * logits.div_(SOFTCAP).tanh_() if SOFTCAP else logits
        assert type(self.lm_head).forward is Linear.forward, "the loss takes lm_head.weight alone"
        options = dict(softcap=SOFTCAP, reduction=reduction)
        return fused_linear_cross_entropy(x, self.lm_head.weight, targets, **options)

    def flops_per_token(self):
        """As in nanochat: 6 per active matrix weight, 12 * n_embd per key that a layer sees."""
        c, tables = self.config, {m.weight for m in self.modules() if isinstance(m, nn.Embedding)}
        share = c.experts_per_token / max(1, c.num_experts)  # of the experts
        matrices = [p for p in {*self.parameters()} - tables if p.ndim > 1]
        weights = sum(p.numel() * (share if p.ndim == 3 else 1) for p in matrices)
        return 6 * weights + 12 * c.n_embd * sum(block.attn.window for block in self.blocks)

@torch.no_grad()
def update_buffers(model):
    """After each step: requantizes 4-bit weights, balances experts."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.requantize_()
        elif isinstance(module, Experts):
            module.bias += BALANCE_RATE * torch.sign(module.load.mean() - module.load)
            module.load.zero_()

def build_model(config: Config | dict, device: torch.device, gpu: harness.GPU) -> GPT:
    config = Config(**config) if isinstance(config, dict) else config  # a checkpoint's
    torch.set_float32_matmul_precision("high")
    with device:
        model = GPT(config, *pick_numerics(gpu))
        model.init_weights()
    if device.type == "cuda":
        model.compile_trunk()
    return model

# ---- Muon for the matrices, AdamW for the rest

POLAR_EXPRESS = [  # https://arxiv.org/abs/2505.16932
    (8.156554, -22.483292, 15.878769),
    (4.042929, -2.808917, 0.500017),
    (3.891667, -2.772484, 0.506064),
    (3.285753, -2.368129, 0.464490),
    (2.346541, -1.709782, 0.423235),
]

def muon_direction(grad, buffer, rate, loss_scale, dtype):
    """Gradients (n, R, C) -> Nesterov momentum of norm below 1. rate: 1 - momentum, or 0."""
    grad = torch.where(rate > 0, grad / loss_scale, 0)
    buffer.lerp_(grad, rate)
    update = buffer.lerp(grad, rate)
    return (update / (update.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)).to(dtype)

def polar_express(x):
    """Orthogonalizes (n, R, C), R >= C, of norm up to 1, by Newton-Schulz. Not compiled: GEMMs."""
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        x = x @ polynomial  # ax + bxG + cxGG
    return x

def muon_update(p, update, scale, lr, decay):
    """Moves p (n, R, C) by scale (n, 1, 1) times update. Cautious decay: only where signs agree."""
    p.sub_(lr * (scale * update + decay * p * (update * p >= 0)))

def matrices(t, split):
    """Views (n, R, C), R >= C, of a matrix or of one per expert, split as muon() says."""
    parts = t.view(-1, *t.shape[-2:]).split(*split or (t.size(-2), -2))
    return [part.mT if part.size(1) < part.size(2) else part for part in parts]

class MuonAdamW(torch.optim.AdamW):
    """AdamW, but Muon for groups of kind "muon" and row_adam_() for groups of kind "rows".
    Muon (https://kellerjordan.github.io/posts/muon) replaces a matrix's momentum by the nearest
    orthogonal matrix: all directions learn at the same rate. step() never waits for the GPU."""

    def __init__(self, groups, dtype):
        super().__init__(groups, eps=1e-10, fused=True)  # fused: GradScaler leaves all to step()
        self.dtype, self.device = dtype, groups[0]["params"][0].device
        self.num_skipped, self.zero = torch.zeros(2, device=self.device)
        self.row_grads = {}  # by table: (ids, gradients) of its lookups since zero_grad()
        for group in self.param_groups:
            if group["kind"] == "rows":
                tables = group["params"]
                group["moments"] = [torch.zeros(len(p), 2, device=p.device) for p in tables]
                for p in tables:  # weak: without it, gradients are dense
                    self.row_grads[p], p.optimizer = [], weakref.ref(self)

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for row_grads in self.row_grads.values():
            row_grads.clear()

    @torch.no_grad()
    def step(self):
        # GradScaler sets both; after its unscale_() there is no scale
        loss_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        loss_scale = 1 + self.zero if loss_scale is None else loss_scale
        found_inf = self.zero if found_inf is None else found_inf  # 1.0: skip the step
        self.num_skipped += found_inf
        for group in self.param_groups:
            if group.get("kind") == "muon":
                self.step_muon(group, loss_scale, found_inf)
            elif group.get("kind") == "rows":
                self.step_rows(group, loss_scale, found_inf)
        super().step()  # AdamW, for all that still has a gradient

    def step_muon(self, group, loss_scale, found_inf):
        wrap = compiled if self.device.type == "cuda" else (lambda f: f)
        settings = group["lr"], group["weight_decay"], 1 - group["momentum"]
        lr, decay, rate = ((1 - found_inf) * x for x in settings)
        state, by_shape = group.setdefault("state", {}), {}  # matrices of a shape move together
        for p in group["params"]:
            split = p.optim["split"]
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            for part, part_grad in zip(matrices(p.detach(), split), matrices(grad, split)):
                by_shape.setdefault(part.shape[1:], []).append((p, part, part_grad))
        for shape, members in by_shape.items():
            params, parts, grads = zip(*members)
            stack = torch.cat(parts)  # (n, R, C)
            if shape not in state:
                # a parameter moves by sqrt(max(1, out / in)) times an orthogonal matrix
                scale = [(part.size(1) / p.size(-1)) ** 0.5 for p, part in zip(params, parts) for _ in part]
                state[shape] = stack.new_tensor(scale).view(-1, 1, 1), torch.zeros_like(stack)
            scale, buffer = state[shape]
            update = wrap(muon_direction)(torch.cat(grads), buffer, rate, loss_scale, self.dtype)
            wrap(muon_update)(stack, polar_express(update), scale, lr, decay)
            for p, part, moved in zip(params, parts, stack.split([*map(len, parts)])):
                if p.grad is not None:  # else it would decay
                    part.copy_(moved)
        for p in group["params"]:
            p.grad = None

    def step_rows(self, group, loss_scale, found_inf):
        """After unscale_(), row_grads are still scaled: Adam does not mind."""
        settings = group["lr"], group["beta2"], group["half_lr"]
        for p, moments in zip(group["params"], group["moments"]):
            assert p.grad is None, f"a table {tuple(p.shape)} that is not only looked up needs adamw()"
            if row_grads := self.row_grads[p]:
                ids, grads = (torch.cat(t) if len(t) > 1 else t[0] for t in zip(*row_grads))
                row_adam_(p, moments, ids, grads, *settings, loss_scale, found_inf)
                row_grads.clear()

def make_optimizer(model: GPT) -> MuonAdamW:
    groups = {}
    for name, p in model.named_parameters():
        if getattr(p, "optim", None) is None:  # Muon for a matrix that has no row per token
            matrix = p.ndim == 2 and min(p.shape) > 1 and model.config.vocab_size not in p.shape
            p.optim = muon(MATRIX_LR) if matrix else adamw(GATE_LR)
            name = re.sub(r"\d+", "*", name)
            say_once(f"{name} declares no optimizer: {p.optim['kind']}, lr {p.optim['lr']}")
        settings = {key: value for key, value in p.optim.items() if key != "split"}
        groups.setdefault(str(settings), settings | dict(params=[]))["params"].append(p)
    return MuonAdamW([*groups.values()], model.dtype)

# ---- Schedules and training

def set_schedules(optimizer, progress):
    for group in optimizer.param_groups:
        keys = "lr", "weight_decay", "half_lr"
        lr, decay, half_lr = group.setdefault("initial", [group.get(key) for key in keys])
        if group.get("kind") == "rows":  # by its updates: late rows need full steps
            group["lr"], group["half_lr"] = lr, half_lr * (1 - 15 / 16 * progress)
        else:
            group["lr"] = lr * (1 - (1 - FINAL_LR) * progress)
        if group.get("kind") == "muon":
            group["weight_decay"] = decay * (1 - progress)

def make_scaler(model):
    device = next(model.parameters()).device.type
    return torch.amp.GradScaler(device, enabled=model.dtype == torch.float16)

def train_step(model, optimizer, scaler, loader):
    config, total, tokens = model.config, 0.0, 0
    grad_accum_steps = config.total_batch_size // (config.device_batch_size * config.seq_len)
    for _ in range(grad_accum_steps):
        x, y, epoch = next(loader)
        loss = model(x, y) / grad_accum_steps
        scaler.scale(loss).backward()
        total, tokens = total + loss.detach(), tokens + x.numel()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    update_buffers(model)
    return total, epoch, tokens

def reset_tables(model, optimizer, clock, epoch_tokens, epochs_left):
    """n-gram tables start anew when whole epochs are left: they never see the same text twice.
    Returns how many are left; None: not known yet."""
    left = clock.tokens_left()
    if left == math.inf:
        return None
    if epochs_left is None:
        epochs_left = (clock.tokens + left) // epoch_tokens
    if left // epoch_tokens < epochs_left:
        tensors = [table.weight for table in model.ngram_embeds]
        for group in optimizer.param_groups:
            tensors += group.get("moments", [])
        for tensor in tensors:
            nn.init.zeros_(tensor)
    return left // epoch_tokens

def train(clock: harness.Clock, tokenizer, device, seed: int, gpu: harness.GPU) -> tuple[GPT, dict]:
    torch.manual_seed(seed)
    config = replace(pick_size(gpu), vocab_size=tokenizer.get_vocab_size())
    model = build_model(scale_batch(config, clock.seconds), device, gpu)
    model.init_weights()
    harness.warm_up(
        model, lambda loader: train_step(model, make_optimizer(model), make_scaler(model), loader))
    torch.manual_seed(seed)
    model.init_weights(again=True)
    optimizer, scaler, config = make_optimizer(model), make_scaler(model), model.config
    loader = make_dataloader(tokenizer, config.device_batch_size, config.seq_len, "train", device)
    epoch_tokens, epochs_left = len(TokenStream(tokenizer, "train")), None
    clock.start()
    while clock.running():
        set_schedules(optimizer, clock.progress())
        loss, epoch, tokens = train_step(model, optimizer, scaler, loader)
        clock.advance(tokens, loss, epoch, optimizer.param_groups[0]["lr"])
        epochs_left = reset_tables(model, optimizer, clock, epoch_tokens, epochs_left)
        if clock.steps % 100 == 0 and scaler.get_scale() < 1:
            raise FloatingPointError(f"loss scale below 1 at step {clock.steps}")
    clock.stop()
    return model.eval(), dict(
        depth=config.depth,
        numerics=f"{model.dtype}/{model.attention}".removeprefix("torch."),
        skipped_steps=int(getattr(optimizer, "num_skipped", 0)))

if __name__ == "__main__":
    harness.run(train, build_model)
