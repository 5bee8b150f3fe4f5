"""An experiment from its command line to its row."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import harness
from harness import remote
from harness.clock import Clock
from harness.columns import SEED, budget_name, clean, seed
from harness.git import git_head, script
from harness.gpu import GPU, gpu_name, pick_gpu
from harness.log import log_result
from harness.record import night_record, write_record
from harness.summary import summarize
from harness.warmup import is_out_of_memory, start_compiler
from harness.weights import load_weights, sample, save_weights
from prepare import TIME_BUDGET, VOCAB_SIZE, PrepareError, Tokenizer, adopt_dataset, dataset_id, patient_output


def run(train: Callable, build_model: Callable) -> None:
    """The command line of an experiment: trains, scores and logs, or samples from saved weights.

    train(clock, tokenizer, device, seed, gpu) returns the model, or it and a dict of numbers for the summary.
    build_model(config, device, gpu) rebuilds a model from a saved config. model.config is a dataclass with `seq_len`,
    `device_batch_size` and, if longer rows are scored, `eval_seq_len`; model(x) returns logits (B, T, V).
    """
    import torch

    parser = argparse.ArgumentParser(description="Train a GPT for five minutes, print val_bpb and log it.")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--seconds", type=float, help=f"training budget instead of {TIME_BUDGET} s; not logged")
    budget.add_argument("--tokens", type=int, help="training budget in tokens; not logged")
    parser.add_argument("--gpu", metavar="NAME", help="train as on another GPU (T4, ...) or on cpu; not logged")
    parser.add_argument("--seed", type=seed, default=SEED, help=f"default: {SEED}")
    parser.add_argument("--save", action="store_true", help=f"write the weights to {harness.WEIGHTS.name}")
    text = "don't train: continue TEXT with the saved weights; with the --gpu that trained them, if any"
    parser.add_argument("--sample", metavar="TEXT", help=text)
    args = parser.parse_args()
    patient_output()
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
    """Trains, scores, logs one row however that ends, prints the summary and returns the model.

    Once the row is written, SIGINT and SIGTERM simply end the process, and SIGHUP is ignored.
    """
    clock = Clock(TIME_BUDGET if args.seconds is None else args.seconds, args.tokens)
    by_hand = " and ".join(f"--{name}" for name in ("seconds", "tokens", "gpu") if getattr(args, name) is not None)
    logged = not by_hand or night_record().get("log")
    commit, description = git_head()  # HEAD may move during the run
    dataset = night_record().get("dataset") or dataset_id(tokenizer.directory)  # a locked run cannot read val
    row = dict(commit=commit, description=description, gpu=gpu_name(args.gpu), dataset=dataset)
    row |= dict(budget=budget_name(args.seconds, args.tokens), seed=args.seed)
    if logged:
        adopt_dataset(tokenizer.directory)
    print("{gpu}, {budget}, {dataset}, seed {seed}".format(**row), flush=True)
    if (size := tokenizer.get_vocab_size()) != VOCAB_SIZE:
        why = "the text has no more, or that was edited: then run prepare.py again, with its --data"
        print(f"The vocabulary has {size} tokens, not VOCAB_SIZE = {VOCAB_SIZE}: {why}")
    handle_signals(on_signal)
    try:
        trained = train(clock, tokenizer, device, args.seed, gpu)
        model, numbers = trained if isinstance(trained, tuple) else (trained, {})
        assert clock.stopped is not None and clock.steps, "train() must start, advance and stop the clock"
        if not hasattr(model, "config"):  # it is wrapped, as an average of weights may be
            model.config = next(module.config for module in model.modules() if hasattr(module, "config"))
        summary, result = summarize(model, clock, device, tokenizer, numbers)
    except BaseException as error:
        reason = crash_reason(error)
        remote.tell(reason=reason)
        summary, result = {"status": "crash", "reason": reason}, dict(val_bpb=0.0, memory_gb=0.0, reason=reason)
        raise
    finally:
        handle_signals(signal.SIG_IGN)  # a second one must not lose or repeat the row
        status = f"not logged: {by_hand} set by hand (python -m night wave logs it)"
        if logged and not remote.channel():
            status = log_result(**row, **result)
        if remote.channel() or night_record().get("log"):
            status = "in results.tsv"  # night logs a locked run, and a wave may change the status later
        summary.setdefault("status", status)  # a crash has set it
        summary |= row
        write_record("summary.json", json.dumps(summary, indent=1, default=str))
        handle_signals(signal.SIG_DFL)
    print("---", *(f"{key + ':':<17} {value}" for key, value in summary.items()), sep="\n", flush=True)
    return model


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
    if is_out_of_memory(error):
        return "out of memory"
    if isinstance(error, (FloatingPointError, PrepareError)):
        return str(error)
    frames, name = traceback.extract_tb(error.__traceback__), script()
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == name]
    # torch.compile names them in its message
    lines += re.findall(rf'File ".*{re.escape(name)}", line (\d+)', str(error))
    where = ", called from".join(f" line {line}" for line in lines[:-3:-1])
    return type(error).__name__ + where
