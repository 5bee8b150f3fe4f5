"""
The 4-bit linear beside bitsandbytes and naive dequantize + F.linear: memory per layer, then speed.

    python tests/bench/bench_linear4bit.py            # about three minutes on an H200; the tables are printed last
    python tests/bench/bench_linear4bit.py --host     # the last table alone: host time per call, eager and compiled

Without a CUDA device only the host times are measured; there they include the arithmetic.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bitsandbytes
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kernels
from kernels import Linear4bit, dequantize_4bit

# A 70 B model's layer with grouped queries, cut to d 4096: 240 M weights, 0.48 GB in bf16
D, KV, FF, M = 4096, 1024, 16128, 256
SHAPES = [(D, D), (D, KV), (D, KV), (D, D), (D, FF), (D, FF), (FF, D)]  # q k v o, gate, up, down: (in, out)
WEIGHTS = sum(k * n for k, n in SHAPES)


# ---- the ways to multiply by a 4-bit weight ----


@torch.library.custom_op("bench::dequantize", mutates_args=())
def dequantize(packed: torch.Tensor, absmax: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Ours as one opaque node."""
    return dequantize_4bit(packed, absmax, (n, k), torch.bfloat16)


@dequantize.register_fake
def _(packed, absmax, n, k):
    return absmax.new_empty(n, k, dtype=torch.bfloat16)


class FrozenLinear(nn.Linear):
    """A frozen bf16 weight: the reference, which keeps only activations."""

    def __init__(self, k, n):
        super().__init__(k, n, bias=False, dtype=torch.bfloat16)
        self.weight.requires_grad_(False)


class Random(Linear4bit):
    """Random bytes: neither time nor memory depends on them."""

    def __init__(self, k, n):
        super().__init__(k, n)
        self.packed.random_(0, 256)
        self.absmax.uniform_(0, 0.1)


class Naive(Random):
    def forward(self, x):
        return F.linear(x, dequantize(self.packed, self.absmax, self.out_features, self.in_features))


class BitsAndBytes(Random):
    def __init__(self, k, n):
        super().__init__(k, n)
        self.matmul, code = bitsandbytes.matmul_4bit, kernels._code("nf4", self.packed.device)
        self.state = bitsandbytes.functional.QuantState(
            self.absmax, shape=torch.Size((n, k)), code=code, blocksize=64, quant_type="nf4", dtype=torch.bfloat16
        )

    def forward(self, x):
        return self.matmul(x, self.packed, quant_state=self.state)


METHODS = {
    "bf16 weight": FrozenLinear,
    "ours": Random,
    "naive": Naive,
    "bitsandbytes": BitsAndBytes,
}


class Layer(nn.Module):
    """The seven matrices of a transformer layer, combined in the cheapest way that uses them all."""

    def __init__(self, linear):
        super().__init__()
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (linear(k, n) for k, n in SHAPES)

    def forward(self, x):
        kv = self.k(x) * self.v(x)  # (M, KV)
        x = x + self.o(self.q(x) + kv.repeat(1, D // KV))
        return x + self.down(F.relu(self.gate(x)) * self.up(x))


# ---- memory: a fresh process for each cell of the table ----


def memory_cell(method: str, mode: str, layers: int) -> dict[str, int]:
    """Bytes: resident weights; live after a forward, without them; the forward's peak, without them."""
    with torch.device("cuda"):
        model = nn.Sequential(*[Layer(METHODS[method]) for _ in range(layers)])
        x = torch.randn(M, D, dtype=torch.bfloat16, requires_grad=True)
    resident = torch.cuda.memory_allocated() - x.nbytes
    run = torch.compile(model, fullgraph=method != "bitsandbytes") if mode == "inductor" else model
    run(x).sum().backward()  # compiles, and brings cuBLAS's workspace
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = run(x)  # noqa: F841, its graph is what is measured
    torch.cuda.synchronize()
    live, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    return {"resident": resident, "live": live, "peak": peak}


def memory_table() -> list[str]:
    cells = [(method, mode, layers) for method in METHODS for mode in ("eager", "inductor") for layers in (4, 8)]

    def child(cell):
        command = [sys.executable, __file__, "--cell", *map(str, cell)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip().splitlines()[-1][:100]
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(5) as pool:  # they share the GPU; each counts its own allocations
        results = dict(zip(cells, pool.map(child, cells), strict=True))
    rows = [
        f"Memory, GB per layer of {WEIGHTS / 1e6:.0f} M weights, M {M}; (8 layers less 4 layers) / 4.",
        "live: after a forward, beyond the weights. kept: live less the bf16 weight's, which is activations alone.",
        "peak: of a forward of 8 layers, beyond what was live before it.",
        f"{'':18} {'':9} {'resident':>9} {'live':>8} {'kept':>8} {'peak':>8} {'32 layers':>10}",
    ]
    for method in METHODS:
        for mode in ("eager", "inductor"):
            four, eight = (results[method, mode, layers] for layers in (4, 8))
            reference = [results["bf16 weight", mode, layers] for layers in (4, 8)]
            failed = [r for r in (four, eight, *reference) if isinstance(r, str)]
            if failed:
                rows.append(f"{method:18} {mode:9} {failed[0]}")
                continue
            resident, live = ((eight[key] - four[key]) / 4e9 for key in ("resident", "live"))
            activations = (reference[1]["live"] - reference[0]["live"]) / 4e9
            rows.append(
                f"{method:18} {mode:9} {resident:9.3f} {live:8.3f} {live - activations:8.3f} {eight['peak'] / 1e9:8.3f}"
                f" {32 * resident:10.2f}"
            )
    return rows


# ---- speed ----


def graph_us(calls: list) -> float:
    """Median microseconds per call of `calls`, replayed as one CUDA graph: GPU time without Python's."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return 1e3 * median_ms(graph.replay) / len(calls)


def median_ms(call, repeats: int = 30) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times)


def dequantize_rows() -> list[str]:
    n, rotation = 4096, 12  # 12 x 43 MB pass through the 60 MB L2, so reads come from memory
    traffic = int(n * n * (0.5 + 4 / 64 + 2))

    def copier(nbytes):
        a, b = torch.zeros(2, nbytes // 4, device="cuda")
        return lambda: b.copy_(a)

    big = 2**31 / median_ms(copier(2**30)) / 1e9  # TB/s, read and written
    small = traffic / graph_us([copier(traffic // 2) for _ in range(rotation)] * 4) / 1e6
    sets = []
    for _ in range(rotation):
        packed = torch.randint(256, (n * n // 2, 1), dtype=torch.uint8, device="cuda")
        absmax = torch.rand(n * n // 64, device="cuda")
        sets.append((packed, absmax, torch.empty(n, n, dtype=torch.bfloat16, device="cuda")))

    def ours(packed, absmax, out):
        kernels._dequantize_triton(packed, absmax, out, "nf4", 64)

    def theirs(packed, absmax, out):
        torch.ops.bitsandbytes.dequantize_4bit.out(packed, absmax, 64, "nf4", [n, n], torch.bfloat16, out=out)

    methods = {"ours": ours, "bitsandbytes": theirs}
    rows = [
        f"Dequantize {n} x {n} NF4 -> bf16, {traffic / 1e6:.1f} MB per call, rotating over {rotation} sets of buffers.",
        f"100% is {big:.2f} TB/s, copying 1 GiB; copying {traffic / 2e6:.1f} MB reaches {100 * small / big:.0f}%.",
    ]
    for name, method in methods.items():
        us = graph_us([lambda s=s, method=method: method(*s) for s in sets] * 4)
        rows.append(f"{name:18} {us:6.2f} us {100 * traffic / us / 1e6 / big:4.0f}%")
    return rows


def requantize_rows() -> list[str]:
    layer = Linear4bit(4096, 4096, trainable=True).cuda()
    ms = median_ms(layer.requantize_)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer.requantize_()
    extra = (torch.cuda.max_memory_allocated() - before) / layer.weight.nbytes
    return [f"Requantize 4096 x 4096: {1e3 * ms:.0f} us, extra peak {extra:.2f} of the fp32 parameter"]


def step_rows() -> list[str]:
    rows = ["Forward + backward to x of one 4096 x 4096 layer in bf16, median ms of five turns"]
    names = ["bf16 weight", "ours", "bitsandbytes"]
    rows.append(f"{'M':>6} {'':9} " + " ".join(f"{name:>13}" for name in names))
    for m in (4096, 16384):
        x = torch.randn(m, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        dy = torch.randn(m, 4096, dtype=torch.bfloat16, device="cuda")
        for mode in ("eager", "inductor"):
            steps = {}
            for name in names:
                with torch.device("cuda"):
                    layer = METHODS[name](4096, 4096)
                run = torch.compile(layer) if mode == "inductor" else layer
                steps[name] = lambda run=run, x=x, dy=dy: torch.autograd.grad(run(x), x, dy)
            turns = {name: [] for name in names}
            for _ in range(5):  # in turn, so that a change of the clock affects all of them
                for name, step in steps.items():
                    turns[name].append(median_ms(step, 50))
            rows.append(f"{m:6} {mode:9} " + " ".join(f"{statistics.median(turns[name]):13.3f}" for name in names))
    return rows


def host_rows(device: str) -> list[str]:
    """The fastest of many short turns, as other processes make some of them slower, but none faster."""

    def host_us(calls: dict, turns: int = 40, repeats: int = 25) -> dict[str, float]:
        times = dict.fromkeys(calls, float("inf"))
        for _ in range(turns):
            for name, call in calls.items():
                call()
                if device == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                times[name] = min(times[name], (time.perf_counter() - start) / repeats * 1e6)
        return times

    def no_grad(run, x):
        with torch.no_grad():
            return run(x)

    names = ["bf16 weight", "ours", "bitsandbytes"]
    rows = ["Host time of one 64 x 64 layer in bf16, us per call: what bounds a step that leaves the GPU idle"]
    rows.append(f"{'':28} " + " ".join(f"{name:>13}" for name in names))
    for m in (4, 64):  # bitsandbytes' kernel for a few rows, and dequantize + GEMM
        x = torch.randn(m, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        for mode in ("eager", "inductor"):
            torch._dynamo.reset()
            layers = {}
            for name in names:
                with torch.device(device):
                    layer = METHODS[name](64, 64)
                layers[name] = torch.compile(layer) if mode == "inductor" else layer
            for what, call in {
                "no_grad": no_grad,
                "forward": lambda run, x: run(x),
                "forward + backward": lambda run, x: torch.autograd.grad(run(x), x, x),
            }.items():
                times = host_us({name: lambda c=call, r=run, x=x: c(r, x) for name, run in layers.items()})
                rows.append(f"M {m:<3} {mode:8} {what:18} " + " ".join(f"{times[name]:13.1f}" for name in names))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", nargs=3, metavar=("METHOD", "MODE", "LAYERS"), help="one memory cell, as JSON")
    parser.add_argument("--host", action="store_true", help="host times only")
    arguments = parser.parse_args()
    if arguments.cell:
        method, mode, layers = arguments.cell
        print(json.dumps(memory_cell(method, mode, int(layers))))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    versions = f"torch {torch.__version__}, bitsandbytes {bitsandbytes.__version__}"
    header = f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, {versions}"
    if arguments.host or device == "cpu":
        print("\n".join([header, "", *host_rows(device)]))
        return
    memory, kernel = memory_table(), dequantize_rows() + requantize_rows()
    print("\n".join([header, "", *memory, "", *kernel, "", *step_rows(), "", *host_rows(device)]))


if __name__ == "__main__":
    main()
