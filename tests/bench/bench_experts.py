"""Experts where `F.grouped_mm` has no fast path (before sm_90, and on sm_12x): a whole training step of an A100's size.

    python tests/bench/bench_experts.py             # on a Hopper: compiles all three ways at a time
    python tests/bench/bench_experts.py none loop   # these only

    none    one MLP of full width: the same active FLOPs
    fast    F.grouped_mm as it is here
    loop    what F.grouped_mm does elsewhere: offsets to the host, then one GEMM per expert

Prints milliseconds per step, how much of it the host is busy, waits for the GPU per step, and the bits per byte that
experts gain in equal time: GAIN at equal tokens, less SLOPE per e-fold of the tokens that they cost.
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
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import harness
import train

# 6 x 512, batches of 2^16 (docs/experiments): none 1.0888 at 217.8 M tokens; 32 experts 1.0804 at 173.0 M; 16 experts
# 1.0809 at 183.0 M and about 1.172 at 60.0 M
SLOPE = (1.172 - 1.0809) / 1.115  # ln(183 / 60)
GAIN = 1.0888 + SLOPE * 0.230 - 1.0804  # at 173 M tokens
STEPS = 20
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


loop_rows.register_fake(lambda a, b, offs: a.new_empty(a.shape[0], b.shape[2]))
loop_outer.register_fake(lambda a, g, offs: a.new_empty(offs.shape[0], a.shape[1], g.shape[1]))


def backward(ctx, grad):
    a, b, offs = ctx.saved_tensors
    return loop_rows(grad, b.mT, offs), loop_outer(a, grad, offs), None


loop_rows.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


# ---- a step


def measure(way: str) -> None:
    """In a process of its own: compiles, says so, waits for a line, measures."""
    if way == "loop":
        F.grouped_mm = lambda a, b, offs: loop_rows(a, b, offs)
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
    ways |= {"fast": (grouped_mm, torch.bfloat16)}
    for name, (function, dtype) in ways.items():
        x, w = a.to(dtype), b.to(dtype)
        ms = triton.testing.do_bench(lambda f=function, x=x, w=w: f(x, w, offs=offs), return_mode="median")
        print(f"131,072 rows on 32 experts of 512 x 512, forward: {name:24}{ms:7.3f} ms")


def main() -> None:
    ways = ["none", "fast", "loop"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", choices=[*ways, []], default=[])
    parser.add_argument("--child", choices=ways, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return measure(args.child)
    start, results, ways = time.perf_counter(), {}, args.ways or ways
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    command = [sys.executable, __file__, "--child"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    children = {way: subprocess.Popen([*command, way], **pipes) for way in ways}
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
    print(f"(gain at equal tokens {GAIN:.4f}, {SLOPE:.4f} per e-fold of tokens)")
    one_gemm()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
