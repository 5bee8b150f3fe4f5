"""
A model of a GPU that is not at hand: what an optimizer step takes there, where the time goes, and the tokens of 300 s.

    python tests/bench_gpu.py                              # the T4: the published port, then the size that it gets
    python tests/bench_gpu.py H200                         # another GPU of RATES
    python tests/bench_gpu.py --set depth=6 n_embd=512     # other sizes

`train.train_step` itself runs on meta tensors, and record_kernels.py lists its kernels. Each of them takes

    seconds = FLOPs / rate + bytes / memory + LAUNCH

Sums, not maxima: a T4 trains at its power cap, where tensor cores and memory share one budget of watts. The rates are
figures of single kernels; none is fitted to a training run. The one published run of a T4 checks them: autoresearch
PR 268, here `PORT`, whose 63.4 k tokens a second are 60.8 k without its 11 untimed steps. The start, a rough guess, is
checked by it, too: with those steps and 127 s for evaluating 21 M tokens it should be the 240 s outside the clock.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from record_kernels import Kernel, Recorder, nbytes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kernels
import prepare
import train
from prepare import EVAL_TOKENS, TIME_BUDGET, VOCAB_SIZE


class Rates(NamedTuple):
    gemm: float  # FLOP/s, beside the time that its operands take at `memory`
    fp32_gemm: float
    attention_forward: float  # FLOP/s, all included
    attention_backward: float
    memory: float  # bytes/s

    def seconds(self, kernel: Kernel) -> float:
        if kernel.kind == "memory":
            return kernel.bytes / self.memory + LAUNCH
        size = 0 if "attention" in kernel.kind else kernel.bytes
        return kernel.flops / getattr(self, kernel.kind.lower().replace(" ", "_")) + size / self.memory + LAUNCH


LAUNCH = 3e-6  # seconds between the end of a kernel and the full speed of the next
T4_PEAK = 24e12  # FLOP/s of a T4's tensor cores at the base clock, 585 MHz, to which 70 W throttle them
RATES = {
    "T4": Rates(
        # 4096^3 then takes what was measured, 24 TFLOP/s: https://forums.developer.nvidia.com/t/264462
        gemm=26e12,
        fp32_gemm=8.1e12 * 585 / 1590,
        # Memory-efficient SDPA as a whole, by the profiles in https://github.com/ssiu/flash-attention-turing: its own
        # causal forward has 66% of the peak and is 1.95 times faster; its backward 47%, 1.51 times, with 7 GEMMs for 5
        attention_forward=0.66 / 1.95 * T4_PEAK,
        attention_backward=0.47 / 1.51 * 5 / 7 * T4_PEAK,
        memory=240e9,  # three quarters of the datasheet's
    ),
}
# The start on a Colab's two virtual CPUs: seconds in all, of a compiled graph's node, of a fused kernel. The last two
# are half as much again as two cores of a Xeon server take.
IMPORTS, TRACE, TRITON = 15.0, 0.015, 0.25

PORT = train.Config(
    depth=8,
    n_embd=512,
    head_dim=128,
    seq_len=512,
    window=512,
    device_batch_size=16,
    total_batch_size=2**16,
    ngram_rows=0,
)


def size_for(gpu: str) -> train.Config:
    return train.pick_size(prepare.peak_flops(*prepare.GPUS[gpu]))


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


def cross_entropy(multiprocessors: int, args, out) -> list[Kernel]:
    """kernels.fused_linear_cross_entropy: the weight's cast; a row kernel and up to three GEMMs per chunk."""
    (n, d), v, where = args[0].shape, len(args[1]), "cross-entropy"
    need_dx, need_dw = (grad.numel() > 0 for grad in out[1:])
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    with patch.object(torch.cuda, "get_device_properties", lambda _: properties):
        rows = min(n, kernels._chunk_rows(n, v, 2, torch.device("cuda")))
    gemm = Kernel(where, "GEMM", 2 * rows * v * d, 2 * (rows * d + v * d + rows * v))
    gemm_dw = gemm._replace(bytes=gemm.bytes + (8 - 2) * v * d)  # reads and writes fp32
    row_kernel = Kernel(where, "memory", 0, 2 * rows * v * (1 + (need_dx or need_dw)))
    chunk = [gemm, row_kernel] + [gemm] * need_dx + [gemm_dw] * need_dw
    return [Kernel(where, "memory", 0, 6 * v * d)] + chunk * (n // rows)


def attention(q, k, v, is_causal):
    """Memory-efficient attention, for whatever fused kernel the GPU has. Autocast makes the port's fp16."""
    q, k, v = (t.half() if t.dtype == torch.float32 else t for t in (q, k, v))
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]


def attention_on_turing(q, k, v, is_causal, plain=F.scaled_dot_product_attention):
    """Flash and cuDNN start at sm_80; so does bf16 in memory-efficient attention, and the rest is plain maths."""
    return (plain if q.dtype == torch.bfloat16 else attention)(q, k, v, is_causal=is_causal)  # plain: maths on meta


def record(
    config: train.Config, gpu: str, evaluation: bool = False, capability: tuple[int, int] | None = None
) -> tuple[Recorder, train.GPT, train.MuonAdamW]:
    """One optimizer step, or the loss of one batch without gradients. capability: for numerics of another GPU."""
    port, (own, multiprocessors, *_) = config == PORT, prepare.GPUS[gpu]
    with (
        Recorder({"linear_cross_entropy": functools.partial(cross_entropy, multiprocessors)}) as recorder,
        patch.object(F, "scaled_dot_product_attention", attention if own >= (8, 0) else attention_on_turing),
        patch.object(train, "compiled", functools.cache(train.compiled.__wrapped__)),
        patch.object(train, "load_fa3", lambda: None),
        patch.object(train, "NGRAMS", () if port else train.NGRAMS),
        patch.object(train.Linear, "forward", autocast_linear if port else train.Linear.forward),
    ):
        if port:
            with torch.device("meta"):
                model = Port(config, torch.float32)
            model.compile()
        else:
            model = train.build_model(config, Meta("meta"), capability or own)
        optimizer = train.make_optimizer(model)
        optimizer.device, optimizer.dtype = Meta("meta"), torch.float16 if port else model.dtype
        scaler = torch.amp.GradScaler("meta", enabled=optimizer.dtype == torch.float16)
        tokens = torch.empty(config.device_batch_size, config.seq_len, dtype=torch.long, device="meta")
        recorder.clear()
        if evaluation:
            with torch.no_grad():
                model(tokens, tokens, reduction="none")
        else:
            train.train_step(model, optimizer, scaler, itertools.repeat((tokens, tokens, 0)))
    return recorder, model, optimizer


@functools.cache
def predict(config: train.Config, gpu: str = "T4") -> dict:
    """A step on a GPU, and what it consists of."""
    recorder, model, optimizer = record(config, gpu)
    step_seconds, rows = 0.0, defaultdict(lambda: [0.0, 0.0, 0.0, 0])  # seconds, FLOPs, bytes, launches
    for kernel in recorder.kernels:
        took = RATES[gpu].seconds(kernel)
        step_seconds += took
        key = f"{kernel.where} {kernel.kind}"
        rows[key] = [a + b for a, b in zip(rows[key], (took, kernel.flops, kernel.bytes, 1), strict=True)]
    # recorder.saved: what compiled forwards keep for their backwards, of all micro-batches
    activations = recorder.saved * config.device_batch_size * config.seq_len // config.total_batch_size
    states = [group["state"] for group in optimizer.param_groups]
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
        recorder=recorder,
    )


def start_and_evaluation(config: train.Config, gpu: str = "T4") -> tuple[float, float]:
    """Seconds of a run before its clock and after it."""
    evaluation, *_ = record(config, gpu, evaluation=True)
    # What training has compiled serves the evaluation, too, unless it is the port's
    graphs = {str(m.graph): (m, k) for m, k in [*predict(config, gpu)["recorder"].graphs, *evaluation.graphs]}.values()
    nodes = sum(len(module.graph.nodes) for module, _ in graphs)
    fused = {kernel for _, compiled in graphs for kernel in compiled if kernel.kind == "memory"}  # equal ones once
    batches = -(-EVAL_TOKENS // (config.device_batch_size * config.seq_len))
    return IMPORTS + TRACE * nodes + TRITON * len(fused), batches * sum(map(RATES[gpu].seconds, evaluation.kernels))


def tokens_in(budget: float, config: train.Config, gpu: str = "T4") -> int:
    """What a GPU trains on in so many seconds: --tokens of the run that stands for it."""
    return int(budget * predict(config, gpu)["tokens_per_sec"])


def show(config: train.Config, gpu: str) -> None:
    p = predict(config, gpu)
    sizes = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(config).items())
    print(f"\n{gpu}, {'the published port: ' if config == PORT else ''}{sizes}")
    print(f"{'':40}{'ms':>8}{'share':>8}{'TFLOP/s':>9}{'GB':>8}{'launches':>10}")
    small = [0.0, 0.0, 0.0, 0]
    for name, row in [*p["rows"].items(), ("the rest", small)]:
        took, flops, size, launches = row
        if took < 0.005 * p["seconds"] and row is not small:
            small[:] = [a + b for a, b in zip(small, row, strict=True)]
            continue
        rate = f"{flops / took / 1e12:.1f}" if flops else ""
        print(f"{name:40}{1e3 * took:8.2f}{took / p['seconds']:8.1%}{rate:>9}{size / 1e9:8.2f}{launches:10}")
    per_second = f"{p['tokens_per_sec']:,.0f} tokens/s, {p['tflops']:.2f} TFLOP/s of the model"
    print(f"{'step':40}{1e3 * p['seconds']:8.2f}   {per_second}")
    start, evaluation = start_and_evaluation(config, gpu)
    print(
        f"{tokens_in(TIME_BUDGET, config, gpu) / 1e6:.1f} M tokens in {TIME_BUDGET} s; {p['memory_gb']:.1f} GB; ",
        end="",
    )
    total = start + TIME_BUDGET + evaluation
    print(f"start {start:.0f} s, evaluation {evaluation:.0f} s, total {total:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicts a training step on a GPU that is not at hand.")
    parser.add_argument("gpu", nargs="?", default="T4", choices=RATES, help="%(choices)s")
    parser.add_argument("--set", nargs="*", default=[], metavar="SIZE=N", help="other sizes than that GPU gets")
    args = parser.parse_args()
    if args.gpu == "T4":
        show(PORT, "T4")
    sizes = {key: int(n) for key, n in (pair.split("=") for pair in args.set)}
    show(dataclasses.replace(size_for(args.gpu), **sizes), args.gpu)


if __name__ == "__main__":
    main()
