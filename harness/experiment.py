"""An experiment from its command line to its row."""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import harness
from harness import remote
from harness.clock import Clock
from harness.columns import SEED, budget_name, clean
from harness.device import pick_gpu
from harness.ending import crash_reason, handle_signals, on_signal
from harness.git import git_head
from harness.gpu import GPU, gpu_name, this_gpu
from harness.log import log_result
from harness.record import night_record, write_record
from harness.referee import eval_shape, evaluate_bpb
from harness.warmup import num_params, start_compiler
from harness.weights import load_weights, sample, save_weights
from prepare import TIME_BUDGET, PrepareError, Tokenizer, adopt_dataset, dataset_id


def run(train: Callable, build_model: Callable) -> None:
    """The command line of an experiment: trains, scores and logs, or samples from saved weights.

    train(clock, tokenizer, device, seed, gpu) returns the model and a dict of numbers for the summary.
    build_model(config, device, gpu) rebuilds a model from a saved config. model.config is a dataclass with `seq_len`,
    `device_batch_size` and, if longer rows are scored, `eval_seq_len`; model(x) returns logits (B, T, V).
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
    if isinstance(sys.stdout, io.TextIOWrapper):  # not None, as under `>&-`, and not a notebook's
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a subject's emoji, or what the model writes
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

    Once the row is written, SIGINT and SIGTERM simply end the process, and SIGHUP is ignored.
    """
    import torch

    clock = Clock(TIME_BUDGET if args.seconds is None else args.seconds, args.tokens)
    by_hand = " and ".join(f"--{name}" for name in ("seconds", "tokens", "gpu") if getattr(args, name) is not None)
    logged = not by_hand or night_record().get("log")
    refusal = "" if logged else f"not logged: {by_hand} set by hand (python -m night wave logs it)"
    dataset = night_record().get("dataset") or dataset_id(tokenizer.directory)  # a locked run cannot read val
    commit, description = git_head()  # now: HEAD may move during the run
    row = dict(commit=commit, description=description, gpu=gpu_name(args.gpu), dataset=dataset)
    row |= dict(budget=budget_name(args.seconds, args.tokens), seed=args.seed)
    if logged:
        adopt_dataset(tokenizer.directory)
    print("{gpu}, {budget}, {dataset}, seed {seed}".format(**row), flush=True)
    handle_signals(on_signal)
    try:
        model, numbers = train(clock, tokenizer, device, args.seed, gpu)
        assert clock.stopped is not None and clock.steps, "train() must start, advance and stop the clock"
        if not hasattr(model, "config"):  # it is wrapped, as an average of weights may be
            model.config = next(module.config for module in model.modules() if hasattr(module, "config"))
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
            "depth": numbers.get("depth", "?"),
            "tokens_per_sec": round(clock.tokens / seconds),
            "first_step_sec": round(total - (time.perf_counter() - clock.started), 1),
            "eval_seconds": round(eval_seconds, 1),
            "bpb_by_length": " ".join(f"{bpb:.6f}" for bpb in getattr(val_bpb, "quarters", ())),
        }
        summary |= numbers | summary  # train() adds numbers, and changes none
        result = dict(val_bpb=val_bpb, test_bpb=test_bpb, memory_gb=memory / 2**30, tokens_M=tokens_M)
    except BaseException as error:
        clock.release()
        reason = crash_reason(error)
        remote.tell(reason=reason)
        summary, result = {"status": "crash", "reason": reason}, dict(val_bpb=0.0, memory_gb=0.0, reason=reason)
        raise
    finally:
        handle_signals(signal.SIG_IGN)  # a second one must not lose or repeat the row
        status = refusal or (log_result(**row, **result) if not remote.channel() else "")  # else night logs it
        status = "in results.tsv" if night_record().get("log") else status  # a wave may change it later
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
    if remote.channel():
        return remote.answer(model, tokenizer.get_vocab_size(), split)
    bpb = evaluate_bpb(model, tokenizer, *eval_shape(model.config), split)
    if not math.isfinite(bpb):
        raise FloatingPointError(f"{split}_bpb is {bpb}")
    return bpb


def process_seconds() -> float:
    """Seconds since this process started, imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # starttime, since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
