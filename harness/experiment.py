"""An experiment from its command line to its row."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import harness
from harness.clock import Clock
from harness.git import git_head
from harness.gpu import GPU, gpu_name, pick_gpu, this_gpu
from harness.log import SEED, budget_name, clean, log_result
from harness.record import night_record, write_record
from harness.warmup import num_params, start_compiler
from harness.weights import load_weights, sample, save_weights
from prepare import TIME_BUDGET, PrepareError, Tokenizer, adopt_dataset, dataset_id, evaluate_bpb


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
    parser.add_argument("--save", action="store_true", help=f"write the weights to {harness.WEIGHTS.name}")
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
