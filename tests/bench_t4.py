"""
A model of a Tesla T4: what an optimizer step of a recipe takes there, where the time goes, and the tokens of 300 s.

    python tests/bench_t4.py                                            # the published port and the turing row
    python tests/bench_t4.py --set depth=6 n_embd=512 device_batch=16   # the row with other sizes

`train.train_step` itself runs on meta tensors, and record_kernels.py lists its kernels. On a T4 each of them takes

    seconds = FLOPs / rate + bytes / MEMORY + LAUNCH

Sums, not maxima: a T4 trains at its power cap, where tensor cores and memory share one budget of watts. The rates are
published figures of single kernels; none is fitted to a training run. The one published run checks them: autoresearch
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
from unittest.mock import patch

import torch
import torch.nn.functional as F
from record_kernels import Kernel, Recorder, nbytes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kernels
import train
from prepare import EVAL_TOKENS, TIME_BUDGET, VOCAB_SIZE

MEMORY = 240e9  # bytes/s, three quarters of the datasheet's
LAUNCH = 3e-6  # seconds between the end of a kernel and the full speed of the next
PROCESSORS = 40
PEAK = 24e12  # FLOP/s of the tensor cores at the base clock, 585 MHz, to which 70 W throttle them
RATES = {
    # 4096^3 then takes what was measured, 24 TFLOP/s: https://forums.developer.nvidia.com/t/264462
    "GEMM": 26e12,
    "fp32 GEMM": 8.1e12 * 585 / 1590,
    # Memory-efficient SDPA as a whole, by the profiles in https://github.com/ssiu/flash-attention-turing: its own
    # causal forward has 66% of the peak and is 1.95 times faster; its backward 47%, 1.51 times, with 7 GEMMs for 5
    "attention forward": 0.66 / 1.95 * PEAK,
    "attention backward": 0.47 / 1.51 * 5 / 7 * PEAK,
}
# The start on a Colab's two virtual CPUs: seconds in all, of a compiled graph's node, of a fused kernel. The last two
# are half as much again as two cores of a Xeon server take.
IMPORTS, TRACE, TRITON = 15.0, 0.015, 0.25

PORT = dataclasses.replace(
    train.PLATFORMS["turing"],
    **dict(name="port", depth=8, n_embd=512, head_dim=128, seq_len=512, window=512, device_batch=16, total_batch=2**16),
)


class Port(train.GPT):
    """PR 268's model: compiled as a whole, fp32 but for what autocast makes fp16, logits in memory. It inherits our
    gates and shifted keys, too: about 2% of its time that the port does not spend."""

    def __init__(self, platform, *args):
        super().__init__(dataclasses.replace(platform, dtype=torch.float32), *args)

    hidden = train.GPT.hidden.__wrapped__

    def compile_blocks(self):
        self.compile()

    def forward(self, idx, targets, reduction="mean"):
        log_probs = F.log_softmax(super().forward(idx).flatten(0, 1), -1)
        of_target = torch.arange(VOCAB_SIZE, device=idx.device) == targets.view(-1, 1)
        return -torch.where(of_target, log_probs, log_probs.new_zeros(())).mean()


def autocast_linear(linear, x):
    return F.linear(x.half(), linear.weight.half())


class Meta(str):
    """The meta device, for which train.py does all that it does for a GPU."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return other in ("meta", "cuda")


def cross_entropy(args, out) -> list[Kernel]:
    """kernels.fused_linear_cross_entropy in fp16: the weight's cast; a row kernel and up to three GEMMs a chunk."""
    (n, d), v, where = args[0].shape, len(args[1]), "cross-entropy"
    need_dx, need_dw = (grad.numel() > 0 for grad in out[1:])
    with patch.object(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=PROCESSORS)):
        rows = min(n, kernels._chunk_rows(n, v, 2, torch.device("cuda")))
    gemm = Kernel(where, "GEMM", 2 * rows * v * d, 2 * (rows * d + v * d + rows * v))
    gemm_dw = gemm._replace(bytes=gemm.bytes + (8 - 2) * v * d)  # reads and writes fp32
    row_kernel = Kernel(where, "memory", 0, 2 * rows * v * (1 + (need_dx or need_dw)))
    chunk = [gemm, row_kernel] + [gemm] * need_dx + [gemm_dw] * need_dw
    return [Kernel(where, "memory", 0, 6 * v * d)] + chunk * (n // rows)


def sdpa_on_t4(q, k, v, is_causal, sdpa=F.scaled_dot_product_attention):
    """Flash and cuDNN start at sm_80; so does bf16 in memory-efficient attention, and the rest is plain maths."""
    if q.dtype == torch.bfloat16:
        return sdpa(q, k, v, is_causal=is_causal)  # of meta tensors: maths
    q, k, v = q.half(), k.half(), v.half()  # what autocast does in the port
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]


def record(platform: train.Platform, evaluation: bool = False) -> tuple[Recorder, train.GPT, train.MuonAdamW]:
    """One optimizer step, or the loss of one batch without gradients."""
    port = platform.name == "port"
    platform = dataclasses.replace(platform, device=Meta("meta"))
    with (
        Recorder({"linear_cross_entropy": cross_entropy}) as recorder,
        torch._dynamo.config.patch(recompile_limit=64),
        patch.object(F, "scaled_dot_product_attention", sdpa_on_t4),
        patch.object(train, "GPT", Port if port else train.GPT),
        patch.object(train, "NGRAMS", () if port else train.NGRAMS),
        patch.object(train.Linear, "forward", autocast_linear if port else train.Linear.forward),
    ):
        model = train.build_model(platform, VOCAB_SIZE, None)
        optimizer = train.make_optimizer(model)
        optimizer.dtype = platform.dtype
        model.compile_blocks()
        scaler = torch.amp.GradScaler("meta", enabled=platform.dtype == torch.float16)
        tokens = torch.empty(platform.device_batch, platform.seq_len, dtype=torch.long, device="meta")
        accumulation = platform.total_batch // tokens.numel()
        recorder.clear()
        if evaluation:
            with torch.no_grad():
                model(tokens, tokens, reduction="none")
        else:
            train.train_step(model, optimizer, scaler, itertools.repeat((tokens, tokens, 0)), accumulation)
    return recorder, model, optimizer


def seconds(kernel: Kernel) -> float:
    size = 0 if "attention" in kernel.kind else kernel.bytes  # which attention's rates include
    return kernel.flops / RATES.get(kernel.kind, 1.0) + size / MEMORY + LAUNCH


@functools.cache
def predict(platform: train.Platform) -> dict:
    """A step of a recipe on a T4, and what it consists of."""
    recorder, model, optimizer = record(platform)
    step_seconds, rows = 0.0, defaultdict(lambda: [0.0, 0.0, 0.0, 0])  # seconds, FLOPs, bytes, launches
    for kernel in recorder.kernels:
        step_seconds += seconds(kernel)
        key = f"{kernel.where} {kernel.kind}"
        rows[key] = [a + b for a, b in zip(rows[key], (seconds(kernel), kernel.flops, kernel.bytes, 1), strict=True)]
    activations = recorder.saved * platform.device_batch * platform.seq_len // platform.total_batch
    states = [group["state"] for group in optimizer.param_groups]
    sparse = len(model.ngram_embeds) * platform.total_batch * platform.n_embd * 4
    gradients = nbytes(*model.parameters()) - nbytes(*model.ngram_embeds.parameters()) + sparse
    return dict(
        seconds=step_seconds,
        tokens_per_sec=platform.total_batch / step_seconds,
        tflops=model.flops_per_token() * platform.total_batch / step_seconds / 1e12,
        flops_per_token=model.flops_per_token(),
        rows=dict(sorted(rows.items(), key=lambda item: -item[1][0])),
        # the last: what compiled forwards keep
        memory_gb=(nbytes(*model.parameters(), states) + gradients + activations) / 2**30,
        recorder=recorder,
    )


def start_and_evaluation(platform: train.Platform) -> tuple[float, float]:
    """Seconds of a run before its clock and after it."""
    evaluation, *_ = record(platform, evaluation=True)
    # What training has compiled serves the evaluation, too, unless it is the port's
    graphs = {str(m.graph): (m, k) for m, k in [*predict(platform)["recorder"].graphs, *evaluation.graphs]}.values()
    nodes = sum(len(module.graph.nodes) for module, _ in graphs)
    fused = {kernel for _, compiled in graphs for kernel in compiled if kernel.kind == "memory"}  # equal ones once
    batches = 1.5 * EVAL_TOKENS / platform.device_batch / platform.seq_len  # train.evaluate: all, and a quarter twice
    return IMPORTS + TRACE * nodes + TRITON * len(fused), batches * sum(map(seconds, evaluation.kernels))


def tokens_in(budget: float, platform: train.Platform) -> int:
    """What a T4 trains on in so many seconds: --tokens of the run that stands for it."""
    return int(budget * predict(platform)["tokens_per_sec"])


def show(platform: train.Platform) -> None:
    p = predict(platform)
    sizes = ("depth", "n_embd", "head_dim", "seq_len", "window", "device_batch", "total_batch")
    print(f"\n{platform.name}: " + ", ".join(f"{size} {getattr(platform, size)}" for size in sizes))
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
    start, evaluation = start_and_evaluation(platform)
    print(
        f"{tokens_in(TIME_BUDGET, platform) / 1e6:.1f} M tokens in {TIME_BUDGET} s; {p['memory_gb']:.1f} GB; ", end=""
    )
    print(f"start {start:.0f} s; evaluation {evaluation:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicts a training step on a Tesla T4.")
    parser.add_argument("--set", nargs="*", default=[], metavar="SIZE=N", help="other sizes than the turing row's")
    sizes = {key: int(n) for key, n in (pair.split("=") for pair in parser.parse_args().set)}
    show(PORT)
    show(dataclasses.replace(train.PLATFORMS["turing"], **sizes))


if __name__ == "__main__":
    main()
