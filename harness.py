"""
Everything around an experiment: clock, warm-up, log, GPU, signals, summary, sample text. Not edited during research.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import gc
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

# torch is imported inside functions, because night supervises runs without it
import prepare
from prepare import TIME_BUDGET, PrepareError, Tokenizer, adopt_dataset, dataset_id, evaluate_bpb, lock, one_line

RESULTS = Path(__file__).resolve().with_name("results.tsv")
WEIGHTS = RESULTS.with_name("model.safetensors")
SEED = 42  # unless --seed is given


# ---- Clock
class Clock:
    """The budget of a run, in tokens or in seconds of wall time from the first training step to the end of the last.

    Call start(), then advance() after each optimizer step while running(), then stop(). progress() drives the
    schedules. A run counts if its last step began within the budget.
    """

    OVERRUN = 3  # seconds past the budget: no step starts that would probably end later
    HANG = 120  # seconds: a step that takes longer prints its stack traces and goes on

    def __init__(self, seconds: float = TIME_BUDGET, tokens: int | None = None):
        if not 0 < seconds < math.inf or (tokens is not None and tokens <= 0):
            raise PrepareError(f"the budget must be finite and above 0, not {seconds if tokens is None else tokens}")
        self.seconds, self.limit = seconds, tokens
        self.steps = self.tokens = 0
        self.started = self.stopped = None
        self._step_began = 0.0  # when the current step began, in seconds after start()
        self._pending = None  # the last step, whose loss is unread
        self._losses = []  # since the last printed line
        self._line = -1  # how many 1/200 of the budget had passed then

    def start(self) -> None:
        gc.collect()
        write_record("curve.tsv", "step\tseconds\ttokens\tloss\tlr\n")
        self.started = time.perf_counter()

    def elapsed(self) -> float:
        """Training time so far, in seconds."""
        return 0.0 if self.started is None else (self.stopped or time.perf_counter()) - self.started

    def progress(self) -> float:
        """Fraction of the budget spent, in [0, 1]."""
        return min(1.0, self.tokens / self.limit if self.limit else self.elapsed() / self.seconds)

    def tokens_left(self) -> float:
        """Estimated from the pace so far; inf during the first 5%."""
        progress = self.progress()
        return self.tokens * (1 / progress - 1) if progress > 0.05 else math.inf

    def running(self) -> bool:
        if sys.__stderr__:  # None under `2>&-`
            faulthandler.dump_traceback_later(self.HANG, file=sys.__stderr__)
        if self.limit:
            return self.tokens < self.limit
        elapsed = self.elapsed()
        expected_end = elapsed * (1 + 1 / max(1, self.steps))  # if one more step starts now
        return elapsed < self.seconds and expected_end < self.seconds + self.OVERRUN

    def advance(self, tokens: int, loss, epoch: int, lr: float | None = None) -> None:
        """Call after each step. loss: scalar tensor on the device; epoch: of the training text; lr: for curve.tsv."""
        import torch

        if self.limit is None and self._step_began >= self.seconds:
            raise RuntimeError(f"a step began {self._step_began:.0f} s into a budget of {self.seconds:.0f} s")
        self.tokens += tokens
        self.steps += 1
        now = self._step_began = self.elapsed()
        host = loss.detach().to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if loss.is_cuda else None  # host holds the loss after this
        pending = host, copied, self.progress(), self.steps, now, self.tokens, epoch, lr
        self._read_loss()
        self._pending = pending

    def _read_loss(self, last: bool = False) -> None:
        """Reads losses one step late, so that the host never waits for the step it has just launched.

        Prints a line per 1/200 of the budget. Raises FloatingPointError unless loss < 100.
        """
        if self._pending is None:
            return
        host, copied, progress, step, now, tokens, epoch, lr = self._pending
        if copied is not None:
            copied.synchronize()
        loss = host.item()
        if not loss < 100:  # NaN included
            raise FloatingPointError(f"{'NaN' if math.isnan(loss) else f'loss {loss:.4g}'} at step {step}")
        self._losses.append(loss)
        if last or int(200 * progress) > self._line:
            mean, rate = statistics.fmean(self._losses), "" if lr is None else f"{lr:.6g}"
            line = f"step {step:05d} ({100 * progress:.1f}%) | loss {mean:.4f} | {tokens / now:,.0f} tok/s"
            print(f"{line} | epoch {epoch} | {now:.0f} s", flush=True)
            write_record("curve.tsv", f"{step}\t{now:.2f}\t{tokens}\t{mean:.4f}\t{rate}\n", "a")
            self._losses, self._line = [], int(200 * progress)

    def stop(self) -> float:
        """Waits for the last step, checks its loss and returns the training time in seconds."""
        if self.stopped is None:
            synchronize()
            self.stopped = time.perf_counter()
            self.release()
            self._read_loss(last=True)
        return self.elapsed()

    def release(self) -> None:
        """Cancels the pending stack trace."""
        faulthandler.cancel_dump_traceback_later()


def write_record(name: str, text: str, mode: str = "w") -> None:
    """Writes a file to the run's record folder, if night made one. A full disk costs the record, not the run."""
    with suppress(KeyError, OSError), open(Path(night_record()["folder"], name), mode) as file:
        file.write(text)


def warm_up(model, step: Callable) -> None:
    """Compiles the model: one call of step(loader) on random tokens. If memory runs out, halves device_batch_size and
    tries again. Restores buffers and RNG state, but not the weights: reinitialize them."""
    import torch

    device, dtype = next(model.parameters()).device, getattr(model, "dtype", torch.float32)
    print(f"{num_params(model) / 1e6:.1f} M parameters, {dtype}, {model.config}", flush=True)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        while True:
            config = model.config
            try:
                tokens = torch.randint(config.vocab_size, (config.device_batch_size, config.seq_len), device=device)
                step(itertools.repeat((tokens, tokens, 0)))
                synchronize()
                break
            except torch.OutOfMemoryError:
                if config.device_batch_size == 1:
                    raise
            gc.collect()
            sequences = config.total_batch_size // config.seq_len
            smaller = next(b for b in range(config.device_batch_size // 2, 0, -1) if sequences % b == 0)
            model.config = dataclasses.replace(config, device_batch_size=smaller)
            model.zero_grad()
            print(f"Out of memory: device batch reduced to {smaller} sequences, total batch unchanged")
    model.zero_grad()
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)


def synchronize() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# ---- Log
COLUMNS = ["commit", "val_bpb", "memory_gb", "status", "description", "gpu", "dataset", "tokens_M"]
HEADER = "\t".join(COLUMNS)
DIFFERS = " (train.py differs)"  # ends the subject of a row whose train.py had uncommitted changes


class Description(NamedTuple):
    """The description column."""

    subject: str  # of the commit; may end in DIFFERS
    seed: int = SEED  # written unless it is the default
    test_bpb: float | None = None
    reason: str = ""  # why it crashed

    @classmethod
    def parse(cls, row: dict) -> Description:
        pattern = r"(.*?)(?:, seed (\d+))?(?:, test (\d+\.\d{6}))?"
        pattern += r" ?(?:\[([^[]*)\])?" if row["status"] == "crash" else "()"
        subject, seed, test, reason = re.fullmatch(pattern, row["description"]).groups()
        return cls(subject, int(seed or SEED), test and float(test), reason or "")

    def __str__(self) -> str:
        text = self.subject if self.seed == SEED else f"{self.subject}, seed {self.seed}"
        text += "" if self.test_bpb is None else f", test {self.test_bpb:.6f}"
        return f"{text} [{self.reason}]" if self.reason else text


def plain_subject(subject: str) -> str:
    """A commit's subject whose end does not look like what Description adds."""
    return re.sub(r", (seed \d+|test \d+\.\d{6})$", r"; \1", subject)


def budget_name(seconds: float | None, tokens: int | None, gpu: str | None) -> str:
    """The command line's settings as a suffix for the GPU's name: ` as T4, 38.6 M tokens`, `, 60 s` or ``."""
    name = f" as {gpu}" if gpu else ""
    if tokens is not None:
        return f"{name}, {tokens / 1e6:g} M tokens"
    return name if seconds is None else f"{name}, {seconds:g} s"


def read_results(path: str | Path | None = None) -> list[dict]:
    """The rows of results.tsv, numbers as floats. Skips lines that are not rows; [] without a file."""
    with suppress(OSError):
        lines = Path(path or RESULTS).read_text("utf-8", errors="replace").split("\n")
        return [row for row in map(parse_row, lines) if row]
    return []


def parse_row(line: str) -> dict | None:
    with suppress(ValueError):
        row = dict(zip(COLUMNS, line.split("\t"), strict=True))
        numbers = {key: float(row[key]) for key in ("val_bpb", "memory_gb", "tokens_M")}
        if row["status"] in ("keep", "discard", "crash") and all(map(math.isfinite, numbers.values())):
            return row | numbers


def log_result(
    *, val_bpb, memory_gb, gpu, dataset, tokens_M=0.0, reason="", test_bpb=None, to_beat=None, commit=None,
    description="", path=None,
) -> str:  # fmt: skip
    """Appends one row to results.tsv, or prints it to stderr if the file cannot take it. Returns the row's status.

    `crash` if there is a reason; `keep` if val_bpb is below to_beat (default: the lowest so far on that gpu and
    dataset); otherwise `discard`. Without a commit, commit and description are those of HEAD.
    """
    path = Path(path or RESULTS)
    if commit is None:
        commit, description = git_head()
    if reason:
        reason = reason.replace("[", "(").replace("]", ")")
        val_bpb, memory_gb, tokens_M, test_bpb = 0.0, 0.0, 0.0, None
    text = str(Description(description, test_bpb=test_bpb, reason=reason))
    commit, text, gpu, dataset = map(clean, (commit[:7], text, gpu, dataset))

    def judge() -> str:
        same = [row for row in read_results(path) if (row["gpu"], row["dataset"]) == (gpu, dataset)]
        best = min((row["val_bpb"] for row in same if row["status"] != "crash"), default=math.inf)
        better = round(val_bpb, 6) < (best if to_beat is None else to_beat)
        return "crash" if reason else "keep" if better else "discard"

    def row(status: str) -> str:
        return "\t".join((commit, f"{val_bpb:.6f}", f"{memory_gb:.1f}", status, text, gpu, dataset, f"{tokens_M:.1f}"))

    try:
        with locked(path) as file:  # reading the rows and appending this one are one step
            status = judge()
            append_row(file, row(status))
    except (OSError, ValueError) as error:
        status = judge()
        print(f"{path} cannot take this row ({error}):\n{row(status)}", file=sys.stderr, flush=True)
    return status


@contextmanager
def locked(path: Path) -> Iterator:
    """The log, open for appending, under an exclusive lock (or without one after a minute's wait)."""
    while True:
        with open(path, "a+b", buffering=0) as file:
            if not lock(file, patience=60):
                print(f"{path} has been locked for a minute: writing this row without the lock", file=sys.stderr)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return  # else `night keep` replaced the file while we waited


def append_row(file, line: str) -> None:
    """Appends the whole line or nothing; hands a copy to night. Raises ValueError for another header."""
    header = HEADER.encode()
    file.seek(0)
    text = file.read()
    if text and text.split(b"\n")[0].rstrip() != header:
        raise ValueError(f"its first line must be `{' '.join(COLUMNS)}`, separated by tabs: put that there")
    before = b"" if text.endswith(b"\n") else b"\n" if text else header + b"\n"
    data = before + f"{line}\n".encode()
    if file.write(data) < len(data):
        file.truncate(len(text))
        raise OSError("the disk is full")
    with suppress(KeyError, OSError):
        Path(night_record()["row"]).write_text(line, "utf-8")
    os.fsync(file.fileno())


def clean(field: str) -> str:
    """One line of printable text. Double quotes become single: pandas would see a quoted field."""
    return "".join(c if c.isprintable() else " " for c in str(field)).replace('"', "'").strip()


def night_record() -> dict:
    """What `python -m night` tells a run, as JSON in the environment variable AUTORESEARCH_RUN; {} without night.

    commit, description: of its row, as of its start. log: whether to log it whatever its budget. score_test: whether
    to score the test split, too. row: a file that gets a copy of the row. folder: for curve.tsv and summary.json,
    written whether or not it is logged.
    """
    return json.loads(os.environ.get("AUTORESEARCH_RUN") or "{}")


def git_head(seed: int = SEED) -> tuple[str, str]:
    """HEAD's short hash and the description of its run (under night: as of its start); 0000000 and "" without git."""
    record = night_record()
    if "commit" in record:
        return record["commit"], record["description"]
    with suppress(OSError, subprocess.SubprocessError):
        out = run_git("log", "-1", "--format=%H%x09%s", timeout=10).stdout
        commit, _, subject = out.decode(errors="replace").rstrip("\n").partition("\t")
        diff = run_git("diff", "--quiet", "HEAD", "--", "train.py", check=False, timeout=10)
        return commit[:7], str(Description(plain_subject(subject) + DIFFERS * (diff.returncode == 1), seed))
    return "0000000", ""


# Variables that would send our git calls to another repository, index or work tree: a hook or an alias sets them
GIT_PLACES = """GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_COMMON_DIR GIT_OBJECT_DIRECTORY
GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_PREFIX GIT_NAMESPACE GIT_GRAFT_FILE GIT_SHALLOW_FILE GIT_REPLACE_REF_BASE
GIT_NO_REPLACE_OBJECTS""".split()
# What a user's configuration must not change in what we read
GIT_OPTIONS = "-c log.showSignature=false -c core.fileMode=false -c core.autocrlf=false -c core.attributesFile=".split()


def clean_environment() -> dict[str, str]:
    """The environment for git, and for programs that call it, without variables that point to another repository."""
    return {name: value for name, value in os.environ.items() if name not in GIT_PLACES}


def run_git(*args: str, check: bool = True, env: dict | None = None, **options) -> subprocess.CompletedProcess:
    """Runs git in this clone, whatever the caller's environment and configuration. env: added variables; options: for
    subprocess.run. Raises CalledProcessError if git fails and `check` is set."""
    command, env = ["git", *GIT_OPTIONS, *args], clean_environment() | (env or {})
    return subprocess.run(command, cwd=RESULTS.parent, env=env, capture_output=True, check=check, **options)


# ---- GPU
class GPU(NamedTuple):
    """What an experiment needs to know about a GPU."""

    capability: tuple[int, int] | None  # CUDA compute capability, None without a GPU: decides the numerics
    peak_flops: float  # dense 16-bit FLOP/s from the datasheet: decides the model size
    memory: int = 0  # total bytes, not those that are free: limits the n-gram tables
    has_fa3: bool = False  # whether FlashAttention-3 runs here


# --gpu NAME: compute capability, multiprocessors, clock in MHz, GeForce or not, GiB of memory as the driver reports it
GPUS = {
    "T4": ((7, 5), 40, 1590, False, 14.6), "V100": ((7, 0), 80, 1530, False, 15.8),
    "L4": ((8, 9), 58, 2040, False, 22.0), "RTX3060": ((8, 6), 28, 1777, True, 11.8),
    "RTX3090": ((8, 6), 82, 1695, True, 23.7), "RTX4090": ((8, 9), 128, 2520, True, 23.6),
    "A100": ((8, 0), 108, 1410, False, 39.5), "H100": ((9, 0), 132, 1980, False, 79.1),
    "H200": ((9, 0), 132, 1980, False, 139.8), "B200": ((10, 0), 148, 1965, False, 178.4),
}  # fmt: skip
# Dense FLOP per clock and multiprocessor with fp32 accumulation; 1024 for all others. Hopper and B200 datasheets assume
# less than the maximum clock: their FLOP/s / (multiprocessors * maximum clock).
FLOPS = {(8, 0): 2048, (9, 0): 3786, (10, 0): 7737}


def peak_flops(capability: tuple[int, int], multiprocessors: int, mhz: float, geforce: bool) -> float:
    return FLOPS.get(capability, 1024) * multiprocessors * mhz * 1e6 / (1 + geforce)  # GeForce: half rate


def named_gpu(name: str) -> GPU:
    """A GPU from the table GPUS, or "cpu". Raises PrepareError for other names."""
    if name == "cpu":
        return GPU(None, 0.0)
    if name not in GPUS:
        raise PrepareError(f"--gpu {name} is unknown: use one of {', '.join(GPUS)}, cpu")
    *compute, gib = GPUS[name]
    return GPU(compute[0], peak_flops(*compute), int(gib * 2**30))


def this_gpu() -> GPU:
    """The current CUDA device, else no GPU."""
    import torch

    if not torch.cuda.is_available():
        return named_gpu("cpu")
    p = torch.cuda.get_device_properties()
    capability = p.major, p.minor
    peak = peak_flops(capability, p.multi_processor_count, p.clock_rate / 1000, "GeForce" in p.name)
    return GPU(capability, peak, p.total_memory, capability == (9, 0) and fa3_installed())


def imitate(name: str | None = None) -> GPU:
    """The GPU that a run imitates (default: this one), with the numerics that both support."""
    here = this_gpu()
    gpu = named_gpu(name) if name else here
    if None in (here.capability, gpu.capability):
        return gpu._replace(capability=None)
    capability = min(here.capability, gpu.capability)
    return gpu._replace(capability=capability, has_fa3=here.has_fa3 and capability == (9, 0))


def pick_gpu(name: str | None = None) -> tuple:
    """The torch device, and imitate(name)."""
    import torch

    if torch.version.hip and torch.cuda.is_available() and name != "cpu":
        raise PrepareError("kernels.py needs an NVIDIA GPU: on an AMD GPU, use --gpu cpu")
    gpu = imitate(name)
    if gpu.capability == (9, 0) and not gpu.has_fa3:
        print(f"Running without FlashAttention-3, which is faster: {install_fa3()}")
    return torch.device("cuda" if gpu.capability else "cpu"), gpu


def gpu_name(setting: str = "") -> str:
    """For the gpu column, before a budget_name(). A Hopper without FlashAttention-3 is slower, so it counts as another
    GPU, unless it imitates one that never uses that."""
    import torch

    if this_gpu().capability is None:
        return "cpu"
    other = re.match(r" as (\w+)", setting)
    gpu = imitate(other and other[1])
    return torch.cuda.get_device_name() + ", without FA3" * (gpu.capability == (9, 0) and not gpu.has_fa3)


def fa3_installed() -> bool:
    return importlib.util.find_spec("flash_attn_interface") is not None


def install_fa3() -> str:
    """The command that installs FlashAttention-3."""
    import torch

    index = f"https://download.pytorch.org/whl/cu{torch.version.cuda.replace('.', '')}"
    return f"pip install flash-attn-3 --index-url {index}"


def load_fa3() -> Callable:
    """flash_attn_func from FlashAttention-3's official module. Raises PrepareError if the import fails."""
    try:
        from flash_attn_interface import flash_attn_func
    except Exception as error:
        fix = f"reinstall it ({install_fa3()}) or remove it (pip uninstall flash-attn-3)"
        raise PrepareError(f"flash_attn_interface cannot be imported ({one_line(error)}): {fix}") from error
    return flash_attn_func


def start_compiler() -> None:
    """Starts Inductor's workers while the model is built, and overrides six PyTorch defaults.

    By default, Inductor benchmarks several configurations of short reductions, pointwise kernels and padded GEMMs: 9 s
    of start-up on an H200 for no speed. It also reads RMSNorm's rows several times when the same kernel flips or sums
    them: 3% of a step (both measured). AOTAutograd does not cache graphs with custom autograd functions. And Dynamo
    gives up after eight shapes, more of which Muon meets if layers differ in width.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as aot_autograd
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    AsyncCompile.warm_pool()
    AsyncCompile.wakeup()
    config.triton.autotune_pointwise = config.shape_padding = False
    dynamo.recompile_limit = 64
    config.test_configs.force_filter_reduction_configs = True  # as in deterministic mode
    aot_autograd.autograd_cache_allow_custom_autograd_functions = True
    default = InductorChoices.should_use_persistent_reduction

    def in_one_pass(features, cooperative_reduction: bool) -> bool:
        unsure = features.get_reduction_hint() == ReductionHint.DEFAULT and not cooperative_reduction
        short = V.graph.sizevars.statically_known_leq(features.reduction_numel, 1024)
        return (unsure and short) or default(features, cooperative_reduction)

    InductorChoices.should_use_persistent_reduction = staticmethod(in_one_pass)


# ---- Run
def run(train: Callable, build_model: Callable) -> None:
    """The command line of an experiment: trains, scores and logs, or samples from saved weights.

    train(clock, tokenizer, device, seed, gpu) returns the model and a dict of numbers for the summary.
    build_model(config, device, gpu) rebuilds a model from a saved config. model.config is a dataclass with `seq_len`
    and `device_batch_size`; model(x) returns logits (B, T, V).
    """
    import torch

    parser = argparse.ArgumentParser(description="Train a GPT for five minutes, print val_bpb and log it.")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--seconds", type=float, help=f"training budget instead of {TIME_BUDGET} s; not logged")
    budget.add_argument("--tokens", type=int, help="training budget in tokens; not logged")
    parser.add_argument("--gpu", metavar="NAME", help="train as on another GPU (T4, ...) or on cpu; not logged")
    parser.add_argument("--seed", type=int, default=SEED, help=f"default: {SEED}")
    parser.add_argument("--save", action="store_true", help=f"write the weights to {WEIGHTS.name}")
    text = "don't train: continue TEXT with the saved weights; with the --gpu that trained them, if any"
    parser.add_argument("--sample", metavar="TEXT", help=text)
    args = parser.parse_args()
    gc.disable()  # collecting took 1.6 s of start-up (measured), and would stall a step for half a second
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # against fragmentation
    torch.ones(1).exp()  # workaround: call MKL once before threads do, or one of them gets 4 digits
    try:
        device, gpu = pick_gpu(args.gpu)
        if device.type == "cuda":
            start_compiler()
        tokenizer = Tokenizer.from_directory()
        if args.sample is None:
            model = train_and_score(train, args, device, gpu, tokenizer)
            with suppress(Exception):  # of an edited model that returns no logits, say
                text = textwrap.fill(clean(sample(model, tokenizer, "", args.seed, tokens=64)), 100)
                print("The model writes:", textwrap.indent(text, "    "), sep="\n")  # indented, unlike the summary
            if args.save:
                save_weights(model, tokenizer)
        else:
            print(sample(load_weights(build_model, device, gpu, tokenizer), tokenizer, args.sample, args.seed))
    except (PrepareError, FloatingPointError) as error:
        sys.exit(f"train.py: {error}")


def train_and_score(train: Callable, args: argparse.Namespace, device, gpu: GPU, tokenizer: Tokenizer):
    """Trains, scores, logs one row however that ends (none if `refusal`), prints the summary and returns the model.

    From the row on, SIGINT and SIGTERM just end the process; SIGHUP stays ignored.
    """
    import torch

    clock = Clock(TIME_BUDGET if args.seconds is None else args.seconds, args.tokens)
    by_hand = " and ".join(f"--{name}" for name in ("seconds", "tokens", "gpu") if getattr(args, name) is not None)
    logged = not by_hand or night_record().get("log")
    refusal = "" if logged else f"not logged: {by_hand} set by hand (python -m night wave logs it)"
    commit, description = git_head(args.seed)  # now: HEAD may move during the run
    setting = budget_name(args.seconds, args.tokens, args.gpu)
    label = gpu_name(setting) + setting
    row = dict(commit=commit, description=description, gpu=label, dataset=dataset_id(tokenizer.directory))
    if logged:
        adopt_dataset(tokenizer.directory)
    print(f"{label}, {row['dataset']}, seed {args.seed}", flush=True)
    handle_signals(on_signal)
    try:
        model, numbers = train(clock, tokenizer, device, args.seed, gpu)
        assert clock.stopped is not None, "train() must start, advance and stop the clock"
        start = time.perf_counter()
        val_bpb, test_bpb = score(model, tokenizer, "val"), None
        eval_seconds = time.perf_counter() - start
        if night_record().get("score_test"):
            test_bpb = score(model, tokenizer, "test")
            numbers["test_bpb"] = round(test_bpb, 6)
        memory = torch.cuda.max_memory_allocated()  # bytes; 0 without a GPU
        seconds, total, tokens_M = clock.elapsed(), process_seconds(), clock.tokens / 1e6
        summary = {
            "val_bpb": round(val_bpb, 6),
            "training_seconds": round(seconds, 1),
            "total_seconds": round(total, 1),
            "peak_vram_mb": round(memory / 2**20, 1),
            "mfu_percent": round(mfu_percent(model, clock, device), 2),
            "total_tokens_M": round(tokens_M, 1),
            "num_steps": clock.steps,
            "num_params_M": round(num_params(model) / 1e6, 1),
            "depth": "?",
            "tokens_per_sec": round(clock.tokens / seconds),
            "first_step_sec": round(total - (time.perf_counter() - clock.started), 1),
            "eval_seconds": round(eval_seconds, 1),
            **numbers,
            "seed": args.seed,
        }
        result = dict(val_bpb=val_bpb, test_bpb=test_bpb, memory_gb=memory / 2**30, tokens_M=tokens_M)
    except BaseException as error:
        clock.release()
        reason = crash_reason(error)
        summary, result = {"status": "crash", "reason": reason}, dict(val_bpb=0.0, memory_gb=0.0, reason=reason)
        raise
    finally:
        handle_signals(signal.SIG_IGN)  # a second one must not lose or repeat the row
        status = refusal or log_result(**row, **result)
        status = "in results.tsv" if night_record().get("log") else status  # a wave judges by other runs, too
        summary.setdefault("status", status)  # a crash has set it
        summary |= row
        write_record("summary.json", json.dumps(summary, indent=1, default=str))
        handle_signals(signal.SIG_DFL)
    print("---", *(f"{key + ':':<17} {value}" for key, value in summary.items()), sep="\n", flush=True)
    return model


def mfu_percent(model, clock: Clock, device) -> float:
    """Share of the peak FLOP/s of this GPU (not of --gpu's); 0 without a GPU or model.flops_per_token()."""
    if device.type != "cuda" or not hasattr(model, "flops_per_token"):
        return 0.0
    return 100 * model.flops_per_token() * clock.tokens / clock.elapsed() / this_gpu().peak_flops


def score(model, tokenizer: Tokenizer, split: str) -> float:
    """Bits per byte of a split. Raises FloatingPointError if not finite."""
    bpb = evaluate_bpb(model, tokenizer, model.config.device_batch_size, model.config.seq_len, split)
    if not math.isfinite(bpb):
        raise FloatingPointError(f"{split}_bpb is {bpb}")
    return bpb


def num_params(model) -> int:
    return sum(p.numel() for p in model.parameters())


def handle_signals(handler) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # leave it ignored under nohup
            signal.signal(number, handler)


def on_signal(number, frame):
    """Ends the run by an exception, so that it leaves a crash row."""
    handle_signals(signal.SIG_IGN)
    sys.exit(128 + number)


def crash_reason(error: BaseException) -> str:
    """`out of memory`, `NaN at step 40`, or the error's type with train.py's two innermost lines: if Linear.forward
    fails on a wrong shape, its caller is the line to fix."""
    if isinstance(error, SystemExit):
        reasons = {129: "terminal closed", 130: "interrupted", 143: "killed"}
        return reasons.get(error.code, f"exit status {error.code}")
    if isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", str(error)):
        return "out of memory"
    if isinstance(error, (FloatingPointError, PrepareError)):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == "train.py"]
    lines += re.findall(r'File ".*train\.py", line (\d+)', str(error))  # torch.compile names them in its message
    where = ", called from".join(f" line {line}" for line in lines[:-3:-1])
    return type(error).__name__ + where


def process_seconds() -> float:
    """Seconds since this process started, imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # starttime, since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


# ---- Weights and text
def save_weights(model, tokenizer: Tokenizer) -> None:
    """Writes weights (16-bit), config and the tokenizer's hash. A full disk costs the file, not the run."""
    import torch
    from safetensors.torch import save_file

    state = {name: (t.half() if t.dtype == torch.float32 else t).contiguous() for name, t in model.state_dict().items()}
    try:
        config = json.dumps(dataclasses.asdict(model.config))
        with prepare.new_file(WEIGHTS) as file:
            save_file(state, file.name, {"config": config, "tokenizer": tokenizer.fingerprint.hex()})
    except Exception as error:
        print(f"train.py: {WEIGHTS.name} could not be written: {one_line(error)}", file=sys.stderr)


def load_weights(build_model: Callable, device, gpu: GPU, tokenizer: Tokenizer):
    """The model last saved with --save. Raises PrepareError if there is none, or it does not fit train.py."""
    from safetensors import safe_open

    if not WEIGHTS.exists():
        raise PrepareError(f"no {WEIGHTS.name} yet: run python train.py --save first")
    try:
        with safe_open(WEIGHTS, "pt") as file:
            if file.metadata()["tokenizer"] != tokenizer.fingerprint.hex():
                raise ValueError("trained with another tokenizer")
            model = build_model(json.loads(file.metadata()["config"]), device, gpu)
            model.eval().load_state_dict({name: file.get_tensor(name) for name in file.keys()})
    except Exception as error:
        text = f"{WEIGHTS.name} does not fit train.py and dataset ({one_line(error)}): run python train.py --save again"
        raise PrepareError(text) from None
    return model


def sample(model, tokenizer: Tokenizer, text: str, seed: int, tokens: int = 256) -> str:
    """`text` and its continuation, at temperature 0.8, up to the end of the document or `tokens` tokens."""
    import torch

    torch.manual_seed(seed)
    bos, seq_len, device = tokenizer.get_bos_token_id(), model.config.seq_len, next(model.parameters()).device
    ids = tokenizer.encode(text, prepend=bos)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # this shape is not compiled
        for _ in range(tokens):
            context = ids[-seq_len:]
            padded = context + [bos] * (seq_len - len(context))  # causal: no token sees the padding
            logits = model(torch.tensor([padded], device=device))[0, len(context) - 1]
            token = torch.multinomial(torch.softmax(logits / 0.8, -1), 1).item()
            if token == bos:
                break
            ids.append(token)
    return tokenizer.decode(ids[1:])
