"""
A performance model of GPUs that we do not have: the time of an optimizer step, where it goes, and the tokens in 300 s.

    python tests/bench/bench_gpu.py                               # a table: each GPU that harness knows by name
    python tests/bench/bench_gpu.py T4                            # the published port, then the size that a T4 gets
    python tests/bench/bench_gpu.py A100 --set depth=11 n_embd=768    # other sizes

`train.train_step` itself runs on meta tensors, and record_kernels.py lists its kernels. Each of them takes

    GEMM:       FLOPs / gemm and bytes / memory; the longer of both from sm_80 on, else both
    attention:  FLOPs / attention + bytes / memory: its blocks are short, and overlap little
    scatter:    the longer of additions / scatter and bytes / memory
    other:      bytes / memory

and LAUNCH. The rates are figures of single kernels, by datasheet, published or measured; only ATOMICS comes from whole
steps, the difference of two. Whole runs check them (test_bench_gpu.py): on an H200 two of ours and autoresearch's
shape, and on a T4 autoresearch PR 268, here `PORT`, whose 63.4 k tokens per second are 60.8 k without its 11
untimed steps. The T4's start is a rough guess: the port's start, those steps and its evaluation of 21 M tokens come to
194 s, but 239 s were published. The model leaves out slow hosts, power caps (except those of T4 and L4), the loader and
other work on the GPU.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from record_kernels import Kernel, Recorder, nbytes
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import harness
import kernels
import train
from harness.referee import eval_shape
from prepare import EVAL_TOKENS, TIME_BUDGET, VOCAB_SIZE


class Rates(NamedTuple):
    gemm: float  # FLOP/s in 16 bits
    fp32_gemm: float
    grouped_gemm: float
    attention_forward: float  # FLOP/s, beside its bytes at `attention_memory`
    attention_backward: float
    window_attention_forward: float  # likewise, where it slides windows
    window_attention_backward: float
    memory: float  # bytes/s
    attention_memory: float
    scatter: float  # atomic additions/s
    overlap: bool  # whether a GEMM hides the shorter of arithmetic and memory traffic
    grouped_loop: float  # seconds at least of a grouped GEMM

    def seconds(self, kernel: Kernel) -> float:
        if kernel.kind == "memory":
            return kernel.bytes / self.memory + LAUNCH
        flops = kernel.flops / getattr(self, kernel.kind.lower().replace(" ", "_"))
        if "attention" in kernel.kind:
            return flops + kernel.bytes / self.attention_memory + LAUNCH
        size = kernel.bytes / self.memory
        if kernel.kind == "grouped GEMM":
            size = max(size, self.grouped_loop)
        return (max(flops, size) if self.overlap or kernel.kind == "scatter" else flops + size) + LAUNCH


# Seconds between the end of a kernel and the full speed of the next; the host is taken to keep ahead. Of an H200's step
# of 285 ms 4 ms were between kernels (docs/experiments/speed.md), of some 2,000.
LAUNCH = 3e-6
MEMORY = {  # GiB that PyTorch can have, bytes/s by datasheet
    "T4": (14.5, 320e9), "V100": (15.5, 900e9), "L4": (22, 300e9), "RTX3060": (11.5, 360e9),
    "RTX3090": (23.5, 936e9), "RTX4090": (23.5, 1008e9),
    "A100": (39, 1555e9),  # of 40 GB, as on Colab; that of 80 GB: 2039e9
    "H100": (79, 3350e9), "H200": (139, 4800e9), "B200": (178, 8000e9),
}  # fmt: skip
# Sustained share of that rate. HBM: an H200's copy, 4.24 TB/s (measured); a V100 has 87%, an A100 79%, an A800 89%
# (MLI: https://github.com/mli/transformers-benchmarks and its issue 4)
HBM = 4.24 / 4.8
GDDR = 0.85  # MLI: RTX 3090 Ti and A6000 85%; 4090: 91% (https://github.com/krrishnarraj/clpeak/issues/106)
LOW_POWER = 0.75  # T4 and L4, at 70 W: a T4's 240 GB/s of 320

BASE_CLOCK = {"T4": 585 / 1590, "L4": 795 / 2040}  # share of the boost clock at which 70 W hold their tensor cores
LOW_POWER_GEMM = {  # FLOP/s, so that large GEMMs take what they took there, once their bytes are added:
    "T4": 26e12,  # 24 TFLOP/s, 4096^3: https://forums.developer.nvidia.com/t/264462
    "L4": 60e12,  # 54 to 59 TFLOP/s, 8192^3 (ZZC: https://github.com/zzc0721/torch-performance-test-data/issues/120)
}
# Share of harness.peak_flops in the best of large GEMMs, by compute capability
BEST_GEMM = {
    (7, 0): 95 / 125,  # V100, 8192^3 (MLI)
    (8, 0): 271 / 312,  # A100 (MAMF: https://github.com/stas00/ml-engineering/tree/master/compute/accelerator)
    (8, 6): 1.0,  # RTX 3060, 8192^3: 25.4 of 25.5 TFLOP/s (ZZC, its issue 131); 3090 Ti: 81 of 80 (MLI)
    (8, 9): 160 / 165,  # RTX 4090, 8192^3 (ZZC, issue 78; MLI, issue 4)
    (9, 0): 794 / 989,  # H100, "H200 is the same" (MAMF)
    (10, 0): 1745 / 2250,  # B200 (MAMF)
}
REAL_GEMM = 0.9  # of that: our shapes run at 650 to 780 TFLOP/s on an H200 (measured)
# Share of that in F.grouped_mm: 500 TFLOP/s in an H200's training step, 262,144 rows of 768 on 32 experts; alone 610 to
# 660, 430 in the backward of very unequal ones, where one GEMM has 620 to 670 (measured)
GROUPED_GEMM = 0.7
# Before sm_90 it is a loop over the experts, which waits for the GPU: 0.44 to 0.50 ms for 131,072 rows of 512, one GEMM
# 0.11 (measured on an H200, which has that loop, too)
GROUPED_LOOP = 0.45e-3
# Share of harness.peak_flops that attention reaches, forward and backward, in what it computes of the mask's tiles.
FA2 = 0.73, 0.63  # on an A100, the highest: https://arxiv.org/abs/2307.08691; an RTX A5000: .73, .63 to .70
# H200, 64 x 2048 tokens, 5 heads of 128, both ways together: FA3 takes 2.81 ms for the whole context, cuDNN 3.02
# (measured). These shares give that, beside the bytes; and 1.42 ms where windows of 256 take FA3 1.54, 1.13 where
# cuDNN's pieces of 256 take 1.36.
FA3 = 0.61, 0.61
CUDNN_HOPPER = 0.56, 0.56
# The FlashAttention-2 inside PyTorch, in H200s: 4.98 ms for the whole context, where cuDNN takes 3.02 (measured). Of a
# B200 nothing is known: the same FLOP/s.
FA2_HOPPER = 0.34, 0.34
FA2_BLACKWELL = tuple(share * 989.5 / 2250 for share in FA2_HOPPER)
# B200, 8192 tokens, causal: 1418 and 1118 TFLOP/s with FA4, which cuDNN is taken to equal:
# https://github.com/Dao-AILab/flash-attention/pull/2280
CUDNN_BLACKWELL = 0.63, 0.50
# Memory-efficient SDPA as a whole, bytes included, on a T4, by the profiles in
# https://github.com/ssiu/flash-attention-turing: its own causal forward has 66% of the peak and is 1.95 times faster;
# its backward 47%, 1.51 times, with 7 GEMMs for 5
MEMORY_EFFICIENT = 0.66 / 1.95, 0.47 / 1.51 * 5 / 7
# Atomic additions per multiprocessor and clock, in scattered rows of a table. H200: two tables of n-grams, far larger
# than its L2 cache, take 6.3 ms of a step of 2^17 tokens x 640 (1.144 M tokens/s, without them 1.210 M, measured); 3 of
# them go by this model to kernels that do not scatter, the rest to 335 M additions. 100.7 M to the 8,192 rows of an
# embedding, which fit in that cache, take 0.247 ms (measured).
ATOMICS = 100e9 / (132 * 1980e6)
CACHED_ATOMICS = 408e9 / (132 * 1980e6)
LARGE_L2 = ("L4", "RTX4090", "A100", "H100", "H200", "B200")  # 40 MB and more, by datasheet


@functools.cache
def rates(gpu: str, fa3: bool = True) -> Rates:
    """fa3: whether FlashAttention-3 is installed, which counts on a Hopper."""
    capability, multiprocessors, mhz, *_ = harness.GPUS[gpu]
    peak = harness.named_gpu(gpu).peak_flops * BASE_CLOCK.get(gpu, 1)  # FLOP/s
    gemm = LOW_POWER_GEMM.get(gpu) or peak * REAL_GEMM * BEST_GEMM[capability]
    fp32_gemm = gemm / 2  # TF32
    if capability < (8, 0):
        attention, fp32_gemm = 2 * MEMORY_EFFICIENT, peak / 8
    elif capability < (9, 0):
        attention = 2 * FA2  # cuDNN's, where torch has it, is much the same
    elif capability < (10, 0):
        attention = 2 * FA3 if fa3 else CUDNN_HOPPER + FA2_HOPPER
    else:
        attention = CUDNN_BLACKWELL + FA2_BLACKWELL
    low_power, hbm = gpu in LOW_POWER_GEMM, capability in ((7, 0), (8, 0), (9, 0), (10, 0))
    memory = MEMORY[gpu][1] * (LOW_POWER if low_power else HBM if hbm else GDDR)
    return Rates(
        gemm,
        fp32_gemm,
        gemm * GROUPED_GEMM,
        *(peak * share for share in attention),
        memory,
        # the shares of memory-efficient attention include its bytes
        attention_memory=math.inf if capability < (8, 0) else memory,
        scatter=(CACHED_ATOMICS if gpu in LARGE_L2 else ATOMICS) * multiprocessors * mhz * 1e6,
        # Asynchronous copies start at sm_80. And at 70 W tensor cores and memory share one budget of watts.
        overlap=capability >= (8, 0) and not low_power,
        grouped_loop=GROUPED_LOOP * (capability < (9, 0)),
    )


# The start on a Colab's two virtual CPUs: seconds in all, of a compiled graph's node, of a fused kernel. The last two
# are 1.25 times what two cores of an H200's host take (measured: 17.0 s for a T4's size, and 22.5 s when Inductor tried
# several configurations of some kernels, as it does for the port). Others than the T4 are taken to have 16 cores, where
# an H200's size has started in 20 to 51 s (measured), half as many.
IMPORTS, TRACE, TRITON, TRITON_TUNED = 15.0, 0.0126, 0.086, 0.21
SERVER = 0.5

PORT = train.Config(
    depth=8, n_embd=512, seq_len=512, window=512, device_batch_size=16, total_batch_size=2**16,
    ngram_rows=0, eval_seq_len=512,
)  # fmt: skip


def size_for(gpu: str) -> train.Config:
    return train.pick_size(harness.named_gpu(gpu))


def fit(config: train.Config, gpu: str, fa3: bool = True) -> train.Config:
    """Halves the device batch until it fits into memory, with a tenth to spare, as harness.warm_up does."""
    while 1.1 * predict(config, gpu, fa3)["memory_gb"] > MEMORY[gpu][0] and config.device_batch_size > 1:
        config = dataclasses.replace(config, device_batch_size=config.device_batch_size // 2)
    return config


class Port(train.GPT):
    """PR 268's model: compiled as a whole, fp32 but for what autocast makes fp16, logits in memory. It inherits our
    gates, shifted keys and induction, too: about 2% of its time that the port does not spend."""

    def forward(self, idx, targets, reduction="mean"):
        log_probs = F.log_softmax(super().forward(idx).flatten(0, 1), -1)
        of_target = torch.arange(VOCAB_SIZE, device=idx.device) == targets.view(-1, 1)
        return -torch.where(of_target, log_probs, log_probs.new_zeros(())).mean()


def autocast_linear(linear, x):
    return F.linear(x.half(), linear.weight.half())


class Meta(str):
    """The meta device, which train.py takes for a GPU."""

    type = "cuda"

    def __enter__(self):
        self.device = torch.device("meta")
        return self.device.__enter__()

    def __exit__(self, *exception):
        return self.device.__exit__(*exception)


def cross_entropy(most_rows: int, args, out) -> list[Kernel]:
    """kernels.fused_linear_cross_entropy: the weight's cast; a row kernel and up to three GEMMs per chunk."""
    (n, d), v, where = args[0].shape, len(args[1]), "cross-entropy"
    need_dx, need_dw = (grad.numel() > 0 for grad in out[-2:])
    rows = min(n, most_rows)
    gemm = Kernel(where, "GEMM", 2 * rows * v * d, 2 * (rows * d + v * d + rows * v))
    gemm_dw = gemm._replace(bytes=gemm.bytes + (8 - 2) * v * d)  # reads and writes fp32
    row_kernel = Kernel(where, "memory", 0, 2 * rows * v * (1 + (need_dx or need_dw)))
    chunk = [gemm, row_kernel] + [gemm] * need_dx + [gemm_dw] * need_dw
    return [Kernel(where, "memory", 0, 6 * v * d)] + chunk * -(-n // rows)


def row_adam(ids, grads) -> list[Kernel]:
    """kernels.row_adam_: a radix sort of the ids, eight passes; the gradients read, as many rows read and written."""
    sort = Kernel("row_adam", "memory", 0, 4 * nbytes(ids))
    return [sort] * 8 + [Kernel("row_adam", "memory", 0, 3 * nbytes(grads))]


def memory_efficient(q, k, v, attn_mask=None, is_causal=False, plain=F.scaled_dot_product_attention):
    """What Turing and Volta have: flash and cuDNN start at sm_80. So does bf16 here; the rest is plain maths."""
    if q.dtype == torch.bfloat16:
        return plain(q, k, v, attn_mask, is_causal=is_causal)  # maths on meta
    q, k, v = (t.half() if t.dtype == torch.float32 else t for t in (q, k, v))  # autocast makes the port's fp16
    bias = None if attn_mask is None else attn_mask.to(q.dtype).expand(*q.shape[:3], -1)
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, bias is None, 0.0, is_causal)[0]


@torch.library.custom_op("bench_gpu::flash_forward", mutates_args=())
def flash_forward(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """FA3, FA2 or cuDNN, (B, T, H, D): on meta tensors only."""
    raise NotImplementedError


@flash_forward.register_fake
def _(q, k, v, window):
    return q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


@torch.library.custom_op("bench_gpu::flash_backward", mutates_args=())
def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


@flash_backward.register_fake
def _(grad, q, k, v, out, lse, window):
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def save_for_backward(ctx, inputs, output):
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


flash_forward.register_autograd(
    lambda ctx, grad, _: (*flash_backward(grad, *ctx.saved_tensors, ctx.window), None), setup_context=save_for_backward
)


def flash(q, k, v, causal, window_size):
    """As flash_attn_func of FA3."""
    return flash_forward(q, k, v, window_size[0])[0]


def fa2(q, k, v, window, shift):
    """As train.fa2."""
    return flash_forward(q, k, v, window)[0]


def sdpa_by_flash(q, k, v, mask, is_causal):
    return flash_forward(*(t.transpose(1, 2) for t in (q, k, v)), q.size(2))[0].transpose(1, 2)


FLASH_TILE = 128  # queries and keys of a block; FA3, FA2 and cuDNN skip those blocks that the mask empties


def flash_kernel(backward: bool, args, out) -> list[Kernel]:
    """Of each edge of the mask, the diagonal and the window's, half a tile is computed in vain."""
    (B, T, H, D), window = out[0].shape, min(args[-1], out[0].shape[1])
    keys = window * (1 - (window - 1) / (2 * T)) + FLASH_TILE / 2 * (2 - window / T)  # mean over queries
    flops = 2 * (5 if backward else 2) * B * T * H * D * keys
    accumulator = 3 * 4 * B * T * H * D * backward  # dq in fp32: zeroed, written, read
    kind = "window " * (window < T) + ("attention backward" if backward else "attention forward")
    return [Kernel("attn", kind, flops, nbytes(args, out) + accumulator)]


def chunk_rows(gpu: str, vocab_size: int = VOCAB_SIZE) -> int:
    """Most rows per chunk of the fused cross-entropy."""
    properties = SimpleNamespace(multi_processor_count=harness.GPUS[gpu][1])
    with patch.object(torch.cuda, "get_device_properties", lambda _: properties):
        return kernels._chunk_rows(2**30, vocab_size, 2, torch.device("cuda"))


@functools.cache
def record(
    config: train.Config, own: tuple[int, int], rows: int, evaluation: bool = False, fa3: bool = True, capability=None
) -> tuple[Recorder, train.GPT, train.MuonAdamW]:
    """One optimizer step on a GPU of compute capability `own`, or the loss of one batch without gradients.

    rows: see chunk_rows. fa3: installed, which counts on a Hopper. capability: for numerics of another GPU.
    """
    port = config == PORT
    custom = {
        "linear_cross_entropy": functools.partial(cross_entropy, rows),
        "flash_forward": functools.partial(flash_kernel, False),
        "flash_backward": functools.partial(flash_kernel, True),
    }
    with (
        Recorder(custom) as recorder,
        patch.object(F, "scaled_dot_product_attention", memory_efficient if own < (8, 0) else sdpa_by_flash),
        patch.object(train, "compiled", functools.cache(train.compiled.__wrapped__)),
        patch.object(train.GPT, "init_weights", lambda model: None),  # it looks at values
        patch.object(train, "attention", functools.cache(train.attention.__wrapped__)),
        patch("torch.optim.adam._device_dtype_check_for_fused", lambda _: None),
        patch.object(harness, "load_fa3", lambda: flash),
        patch.object(train, "fa2", fa2),
        patch.object(train, "NGRAMS", () if port else train.NGRAMS),
        patch.object(train, "row_adam_", lambda _, __, *update: recorder.kernels.extend(row_adam(*update[:2]))),
        patch.object(train.Linear, "forward", autocast_linear if port else train.Linear.forward),
    ):
        if port:
            with torch.device("meta"):
                model = Port(config, torch.float32, "sdpa")
            model.compile()
        else:
            capability = capability or own
            gpu = harness.GPU(capability, 0.0, 0, "fa3" if fa3 and capability == (9, 0) else "")
            bf16 = dataclasses.replace(config, fp8=False)  # products in FP8 count as such in bf16
            model = train.build_model(bf16, Meta("meta"), gpu)
        optimizer = train.make_optimizer(model)
        optimizer.device, optimizer.dtype = Meta("meta"), torch.float16 if port else model.dtype
        scaler = torch.amp.GradScaler("meta", enabled=optimizer.dtype == torch.float16)
        shape = eval_shape(config) if evaluation else (config.device_batch_size, config.seq_len)
        tokens = torch.empty(shape, dtype=torch.long, device="meta")
        recorder.clear()
        if evaluation:
            with torch.no_grad():
                model(tokens, tokens, reduction="none")
        else:
            step = functools.partial(train.train_step, model, optimizer, scaler, itertools.repeat((tokens, tokens, 0)))
            step()  # the first one also makes AdamW's state
            recorder.kernels, recorder.saved = [], 0
            step()
    return recorder, model, optimizer


@functools.cache
def predict(config: train.Config, gpu: str = "T4", fa3: bool = True) -> dict:
    """A step on a GPU, and what it consists of."""
    recorder, model, optimizer = record(config, harness.GPUS[gpu][0], chunk_rows(gpu), fa3=fa3)
    step_seconds, rows = 0.0, defaultdict(lambda: [0.0, 0.0, 0.0, 0])  # seconds, FLOPs, bytes, launches
    for kernel in recorder.kernels:
        took = rates(gpu, fa3).seconds(kernel)
        step_seconds += took
        key = f"{kernel.where} {kernel.kind}"
        rows[key] = [a + b for a, b in zip(rows[key], (took, kernel.flops, kernel.bytes, 1), strict=True)]
    # recorder.saved: what compiled forwards keep for their backwards, of all micro-batches
    activations = recorder.saved * config.device_batch_size * config.seq_len // config.total_batch_size
    groups = optimizer.param_groups
    states = [*optimizer.state.values(), *(group.get(key) for group in groups for key in ("state", "moments"))]
    tables = nbytes(*model.ngram_embeds.parameters())  # of whose gradient there is a row per token
    sparse = tables * config.total_batch_size // max(1, config.ngram_rows)
    gradients = nbytes(*model.parameters()) - tables + sparse
    return dict(
        seconds=step_seconds,
        tokens_per_sec=config.total_batch_size / step_seconds,
        tflops=model.flops_per_token() * config.total_batch_size / step_seconds / 1e12,
        flops_per_token=model.flops_per_token(),
        rows=dict(sorted(rows.items(), key=lambda item: -item[1][0])),
        memory_gb=(nbytes(*model.parameters(), states) + gradients + activations) / 2**30,
        dtype=model.dtype,
        attention=model.attention,
        model=model,
        recorder=recorder,
    )


def start_and_evaluation(config: train.Config, gpu: str = "T4", fa3: bool = True) -> tuple[float, float]:
    """Seconds of a run before its clock and after it."""
    evaluation, *_ = record(config, harness.GPUS[gpu][0], chunk_rows(gpu), evaluation=True, fa3=fa3)
    # Only the port's evaluation is compiled
    training = predict(config, gpu, fa3)["recorder"]
    graphs = {str(m.graph): (m, k) for m, k in [*training.graphs, *evaluation.graphs]}.values()
    nodes = sum(len(module.graph.nodes) for module, _ in graphs)
    fused = {
        kernel for _, compiled in graphs for kernel in compiled if kernel.kind in ("memory", "scatter")
    }  # equal ones once
    batches = -(-EVAL_TOKENS // math.prod(eval_shape(config)))
    seconds = sum(map(rates(gpu, fa3).seconds, evaluation.kernels))
    triton = TRITON_TUNED if config == PORT else TRITON
    start = (IMPORTS + TRACE * nodes + triton * len(fused)) * (1 if gpu == "T4" else SERVER)
    return start, batches * seconds


def describe(gpu: str, p: dict) -> str:
    """Of a prediction: dtype and kind of attention."""
    backend = {"fa3": "FA3", "fa2": "FA2", "sdpa": "memory-efficient"}[p["attention"]]
    return f"{'bf16' if p['dtype'] == torch.bfloat16 else 'fp16'}, {backend}"


def show(config: train.Config, gpu: str, fa3: bool) -> None:
    p = predict(config, gpu, fa3)
    sizes = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(config).items())
    print(f"\n{gpu}, modelled, {describe(gpu, p)}, {'the published port: ' if config == PORT else ''}{sizes}")
    print(f"{'':40}{'ms':>8}{'share':>8}{'TFLOP/s':>9}{'GB':>8}{'launches':>10}")
    small = [0.0, 0.0, 0.0, 0]
    for name, row in [*p["rows"].items(), ("the rest", small)]:
        took, flops, size, launches = row
        if took < 0.005 * p["seconds"] and row is not small:
            small[:] = [a + b for a, b in zip(small, row, strict=True)]
            continue
        rate = f"{flops / took / 1e12:.1f}" if "GEMM" in name or "attention" in name else ""
        print(f"{name:40}{1e3 * took:8.2f}{took / p['seconds']:8.1%}{rate:>9}{size / 1e9:8.2f}{launches:10}")
    per_second = f"{p['tokens_per_sec']:,.0f} tokens/s, {p['tflops']:.2f} TFLOP/s of the model"
    print(f"{'step':40}{1e3 * p['seconds']:8.2f}   {per_second}")
    start, evaluation = start_and_evaluation(config, gpu, fa3)
    tokens, total = TIME_BUDGET * p["tokens_per_sec"] / 1e6, start + TIME_BUDGET + evaluation
    print(f"{tokens:.1f} M tokens in {TIME_BUDGET} s; {p['memory_gb']:.1f} GiB; ", end="")
    print(f"start {start:.0f} s, evaluation {evaluation:.0f} s, total {total:.0f} s")


def show_all() -> None:
    print("Modelled, not measured; the head of this file says how. H100 and H200 with FlashAttention-3 and without.\n")
    print("| GPU | numerics, attention | size | sequences | tokens/s | M tokens in 300 s | MFU | peak GiB | total s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for gpu, (capability, *_) in harness.GPUS.items():
        for fa3 in (True, False) if capability[0] == 9 else (True,):
            config = fit(size_for(gpu), gpu, fa3)
            p, (start, evaluation) = predict(config, gpu, fa3), start_and_evaluation(config, gpu, fa3)
            cells = [
                gpu,
                describe(gpu, p),
                f"{config.depth} x {config.n_embd}",
                f"{config.device_batch_size} of {config.total_batch_size // config.seq_len}",
                f"{p['tokens_per_sec'] / 1e3:,.0f} k",
                f"{TIME_BUDGET * p['tokens_per_sec'] / 1e6:.1f}",
                f"{p['tflops'] * 1e12 / harness.named_gpu(gpu).peak_flops:.0%}",
                f"{p['memory_gb']:.1f}",
                f"{start + TIME_BUDGET + evaluation:.0f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicts a training step on a GPU that is not at hand.")
    parser.add_argument("gpu", nargs="?", choices=harness.GPUS, help="%(choices)s; none: a table of them all")
    parser.add_argument("--set", nargs="*", default=[], metavar="SIZE=N", help="other sizes than that GPU gets")
    parser.add_argument("--no-fa3", action="store_true", help="a Hopper without FlashAttention-3")
    args = parser.parse_args()
    if args.gpu is None:
        if args.set or args.no_fa3:
            parser.error("--set and --no-fa3 need the name of a GPU")
        return show_all()
    if args.gpu == "T4":
        show(PORT, "T4", True)
    sizes = {key: int(n) for key, n in (pair.split("=") for pair in args.set)}
    show(dataclasses.replace(size_for(args.gpu), **sizes), args.gpu, not args.no_fa3)


if __name__ == "__main__":
    main()
