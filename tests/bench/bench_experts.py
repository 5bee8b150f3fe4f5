"""Experts where `F.grouped_mm` has no fast path (before sm_90, and on sm_12x): a whole training step of an A100's size.

    python tests/bench/bench_experts.py             # on a Hopper, about 80 s: compiles three ways at a time
    python tests/bench/bench_experts.py none loop   # these only

    none    one MLP of full width: the same active FLOPs
    fast    F.grouped_mm as it is here
    loop    what F.grouped_mm does elsewhere: offsets to the host, then one GEMM per expert
    triton  one kernel for all experts, which reads the offsets on the device
    batch   batches of equal size: what is over an expert's share of 1.25 times the mean is dropped

Prints milliseconds per step, how much of it the host is busy, waits for the GPU per step, and the bits per byte that
experts gain in equal time: GAIN at equal tokens, less SLOPE per e-fold of the tokens that they cost. Of `batch` only
the time counts: a dropped token gets another one's gradient, and what dropping costs is not known.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import harness
import train
from kernels import sum_rows

# 6 x 512, batches of 2^16 (docs/experiments): none 1.0888 at 217.8 M tokens; 32 experts 1.0804 at 173.0 M; 16 experts
# 1.0809 at 183.0 M and about 1.172 at 60.0 M
SLOPE = (1.172 - 1.0809) / 1.115  # ln(183 / 60)
GAIN = 1.0888 + SLOPE * 0.230 - 1.0804  # at 173 M tokens
STEPS = 20
CAPACITY = 1.25
grouped_mm = F.grouped_mm


# ---- one GEMM per expert


def each(offs: Tensor):
    """Slices of the rows of each expert. Waits for the GPU."""
    return [slice(a, b) for a, b in itertools.pairwise([0, *offs.tolist()])]


@torch.library.custom_op("bench::loop_rows", mutates_args=())
def loop_rows(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """a (M, K), b (E, K, N): rows of expert e times b[e] -> (M, N)."""
    out = a.new_empty(len(a), b.shape[2])
    for e, rows in enumerate(each(offs)):
        torch.mm(a[rows], b[e], out=out[rows])
    return out


@torch.library.custom_op("bench::loop_outer", mutates_args=())
def loop_outer(a: Tensor, g: Tensor, offs: Tensor) -> Tensor:
    """a (M, K), g (M, N): for each expert a^T g over its rows -> (E, K, N)."""
    out = a.new_empty(len(offs), a.shape[1], g.shape[1])
    for e, rows in enumerate(each(offs)):
        torch.mm(a[rows].T, g[rows], out=out[e])
    return out


# ---- Triton


@triton.jit
def rows_kernel(
    a, b, out, offs, N, K, b_e, b_k, b_n,
    E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program per tile (BM, BN). Tiles are numbered expert by expert; the last ones have nothing to do."""
    tiles_n = tl.cdiv(N, BN)
    tile, cols = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n * BN + tl.arange(0, BN)
    expert = tl.arange(0, E)
    end = tl.load(offs + expert)
    start = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    tiles = (end - start + BM - 1) // BM
    last = tl.cumsum(tiles, 0)
    mine = (last - tiles <= tile) & (tile < last)
    if tl.sum(mine.to(tl.int32), 0) == 1:
        e = tl.sum(tl.where(mine, expert, 0), 0)
        first = tl.sum(tl.where(mine, start + (tile - last + tiles) * BM, 0), 0)
        stop = tl.sum(tl.where(mine, end, 0), 0)
        rows, inner = first + tl.arange(0, BM), tl.arange(0, BK)
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            x = tl.load(a + rows[:, None] * K + k + inner[None, :], mask=rows[:, None] < stop, other=0.0)
            w = tl.load(b + e * b_e + (k + inner)[:, None] * b_k + cols[None, :] * b_n)
            total = tl.dot(x, w, total)
        tl.store(out + rows[:, None] * N + cols[None, :], total.to(out.dtype.element_ty), mask=rows[:, None] < stop)


@triton.jit
def outer_kernel(a, g, out, offs, K, N, BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """One program per expert and tile (BK, BN) of its matrix."""
    e, k, n = tl.program_id(0), tl.program_id(1) * BK + tl.arange(0, BK), tl.program_id(2) * BN + tl.arange(0, BN)
    start, stop = tl.load(offs + e - 1, mask=e > 0, other=0), tl.load(offs + e)
    total = tl.zeros((BK, BN), tl.float32)
    for first in range(start, stop, BM):
        rows = first + tl.arange(0, BM)
        x = tl.load(a + rows[None, :] * K + k[:, None], mask=rows[None, :] < stop, other=0.0)
        y = tl.load(g + rows[:, None] * N + n[None, :], mask=rows[:, None] < stop, other=0.0)
        total = tl.dot(x, y, total)
    tl.store(out + e * K * N + k[:, None] * N + n[None, :], total.to(out.dtype.element_ty))


@torch.library.custom_op("bench::triton_rows", mutates_args=())
def triton_rows(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    (m, k), (e, _, n), a = a.shape, b.shape, a.contiguous()
    tile = min(128, n)
    out = a.new_empty(m, n)
    options = dict(E=e, BM=min(128, tile), BN=tile, BK=min(64, k), num_warps=8, num_stages=3)
    grid = ((triton.cdiv(m, options["BM"]) + e) * (n // tile),)
    rows_kernel[grid](a, b, out, offs, n, k, *b.stride(), **options)
    return out


@torch.library.custom_op("bench::triton_outer", mutates_args=())
def triton_outer(a: Tensor, g: Tensor, offs: Tensor) -> Tensor:
    (_, k), (_, n), a, g = a.shape, g.shape, a.contiguous(), g.contiguous()
    out = a.new_empty(len(offs), k, n)
    tile = min(128, k, n)
    grid = (len(offs), k // tile, n // tile)
    outer_kernel[grid](a, g, out, offs, k, n, BK=tile, BN=tile, BM=min(64, tile), num_warps=8, num_stages=3)
    return out


for rows_op, outer_op in ((loop_rows, loop_outer), (triton_rows, triton_outer)):
    rows_op.register_fake(lambda a, b, offs: a.new_empty(a.shape[0], b.shape[2]))
    outer_op.register_fake(lambda a, g, offs: a.new_empty(offs.shape[0], a.shape[1], g.shape[1]))

    def backward(ctx, grad, rows_op=rows_op, outer_op=outer_op):
        a, b, offs = ctx.saved_tensors
        return rows_op(grad, b.mT, offs), outer_op(a, grad, offs), None

    rows_op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


# ---- batches of equal size


class EqualBatches(train.Experts):
    def forward(self, x):
        K, E = self.experts_per_token, len(self.bias)
        score = torch.sigmoid(self.router(x)).view(-1, E)  # (N, E)
        expert = (score + self.bias).sort(descending=True, stable=True).indices[:, :K]  # (N, K)
        ranked, pair = expert.flatten().to(torch.uint8).sort(stable=True)  # (N * K,), by expert
        ends = torch.searchsorted(ranked.long(), torch.arange(E, device=x.device), right=True)
        count = ends.diff(prepend=ends.new_zeros(1))
        self.load += count
        size = -(-int(CAPACITY * len(pair)) // E // 8) * 8
        number = torch.arange(size, device=x.device)
        source = (ends - count)[:, None] + number  # (E, size), places in the sorted order
        full, pair_at = number < count[:, None], pair[source.clamp(max=len(pair) - 1)]
        place = torch.empty_like(pair).scatter_(0, pair, torch.arange(len(pair), device=x.device)).view(-1, K)
        slot = place - (ends - count)[expert]  # in the expert's batch, (N, K)
        kept, slot = slot < size, expert * size + slot.clamp(max=size - 1)
        weight = (2 * score.gather(1, expert).view(-1))[pair_at] * full  # (E, size)
        h = sum_rows(x.flatten(0, 1), (pair_at // K).view(-1, 1), slot).view(E, size, -1)
        h = weight[..., None].to(x.dtype) * train.leaky_relu_squared(h @ self.c_fc.to(x.dtype).mT)
        h = (h @ self.c_proj.to(x.dtype).mT).flatten(0, 1)
        return (h[slot] * kept[..., None]).sum(1).view_as(x)


# ---- a step


def set_up(way: str) -> None:
    if way in ("loop", "triton"):
        op = loop_rows if way == "loop" else triton_rows
        F.grouped_mm = lambda a, b, offs: op(a, b, offs)
    if way == "batch":
        train.Experts = EqualBatches


def measure(way: str) -> None:
    """In a process of its own: compiles, says so, waits for a line, measures."""
    set_up(way)
    harness.start_compiler()
    gpu, device = harness.named_gpu("A100")._replace(memory=0), torch.device("cuda")
    experts = 0 if way == "none" else 32
    rows = 655_360  # a quarter of each table: three ways fit in a GPU
    config = dataclasses.replace(train.pick_size(gpu), ngram_rows=rows, num_experts=experts)
    torch.manual_seed(0)
    model = train.build_model(config, device, gpu)
    optimizer, scaler = train.make_optimizer(model), train.make_scaler(model)
    tokens = torch.randint(config.vocab_size, (8, config.device_batch_size, config.seq_len), device=device)
    loader = itertools.cycle([(t, t, 0) for t in tokens])
    step = lambda: train.train_step(model, optimizer, scaler, loader)  # noqa: E731
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        step()
    times, host = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        host.append(1000 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(w.message) for w in waits)
    gib = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(dict(ms=statistics.median(times), host=statistics.median(host), waits=waits, gib=gib)), flush=True)


def one_gemm() -> None:
    """The loop above beside PyTorch's own, which runs for fp16 on a Hopper, too: is it a fair stand-in?"""
    a = torch.randn(131072, 512, device="cuda", dtype=torch.float16)
    b = torch.randn(32, 512, 512, device="cuda", dtype=torch.float16)
    offs = torch.arange(1, 33, device="cuda", dtype=torch.int32) * 4096
    ways = {"PyTorch's loop (fp16)": (grouped_mm, torch.float16), "loop": (loop_rows, torch.bfloat16)}
    ways |= {"triton": (triton_rows, torch.bfloat16), "fast": (grouped_mm, torch.bfloat16)}
    for name, (function, dtype) in ways.items():
        x, w = a.to(dtype), b.to(dtype)
        ms = triton.testing.do_bench(lambda f=function, x=x, w=w: f(x, w, offs=offs), return_mode="median")
        print(f"131,072 rows on 32 experts of 512 x 512, forward: {name:24}{ms:7.3f} ms")


def main() -> None:
    ways = ["none", "fast", "loop", "triton", "batch"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", choices=[*ways, []], default=[])
    parser.add_argument("--child", choices=ways, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return measure(args.child)
    start, results, ways = time.perf_counter(), {}, args.ways or ways
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for group in (ways[:3], ways[3:]):
        children = {
            way: subprocess.Popen(
                [sys.executable, __file__, "--child", way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for way in group
        }
        for child in children.values():
            while child.stdout.readline() not in ("ready\n", ""):
                pass
        for way, child in children.items():  # one at a time
            out = child.communicate("go\n")[0].splitlines()
            results[way] = json.loads(out[-1]) if child.returncode == 0 and out else None
    print(f"{'':8}{'ms':>8}{'/ none':>8}{'host ms':>9}{'waits':>7}{'GiB':>7}{'bpb gained in equal time':>26}")
    for way, r in results.items():
        if r is None:
            print(f"{way:8} failed: see above")
            continue
        ratio = r["ms"] / results["none"]["ms"] if results.get("none") else float("nan")
        gain = 0.0 if way == "none" else GAIN - SLOPE * float(torch.tensor(ratio).log())
        print(f"{way:8}{r['ms']:8.2f}{ratio:8.3f}{r['host']:9.2f}{r['waits']:7}{r['gib']:7.1f}{gain:26.4f}")
    print(f"(gain at equal tokens {GAIN:.4f}, {SLOPE:.4f} per e-fold of tokens; batch: as if dropping cost nothing)")
    one_gemm()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
