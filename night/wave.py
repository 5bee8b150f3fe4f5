"""Waves: trains git revisions side by side, each on its own GPU of this machine or of a Ray cluster."""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import harness
import prepare
from harness import crashed
from harness.journal import journal_of
from night.git import print_doubts, revisions
from night.noise import with_error
from night.pool import Local, News, Run, Started, gpu_names, label
from night.records import end_record, new_record
from night.rows import Kind, good, grouped, kept_before, pairs, place, reference, run_name, scores
from night.run import train_options
from night.statuses import discard_by_mean, keep_winners
from prepare import PrepareError

PAUSE = 10  # seconds until a full disk is tried again


def wave(args: argparse.Namespace) -> None:
    """Trains every revision and the reference with every seed that has no row yet; prints a table."""
    ideas = revisions(args.revisions)
    trainer = Trainer(args, *start_pool(args))
    (base,) = revisions([reference(trainer.kind)])
    print_doubts([commit for commit, _ in ideas])
    runs = [run_of(*revision, seed) for revision in [base, *ideas] for seed in args.seeds]
    print(f"\n{table(trainer.train(runs, base), base[0])}")


def run_of(commit: str, subject: str, seed: int = harness.SEED) -> Run:
    return Run(commit, harness.clean(subject), seed)


def table(rows: list[dict], base: str) -> str:
    """One line per revision: val_bpb and its difference from the reference with the same seeds, both with standard
    errors if there are several seeds."""
    lines = []
    for commit, group in grouped(rows, lambda row: row["commit"]).items():
        own = scores(group)
        change = with_error([after - before for before, after in pairs(rows, base, commit)], "+.6f", ".5f")
        change = "reference" if commit == base else change
        bpb = with_error(own.values(), ".6f", ".5f") or "0.000000"
        status = "+".join(sorted({"crash" if crashed(row) else row["status"] for row in group}))
        tokens = max(row["tokens_M"] for row in group)
        text = label(group[-1]) if len(group) == 1 else f"{group[-1]['description']}, {len(own)} seeds"
        line = f"{bpb:18}  {change:19}  {tokens:8.1f}  {status:7}  {commit}  {text}, {group[-1]['gpu']}"
        lines.append((not own, line))
    head = f"{'val_bpb':18}  {'vs reference':19}  tokens_M  status   commit   description, GPU"
    return "\n".join([head, *(line for _, line in sorted(lines))])


def start_pool(args: argparse.Namespace) -> tuple:
    """The pool at args.address, or this machine's, on its most frequent GPU model; and the kind of row that runs get.

    Raises PrepareError if another wave is at work."""
    # locked until this process ends; in the git directory, which no `git clean` touches
    args.alone = open(journal_of(harness.RESULTS).with_name("results.tsv.wave"), "ab")
    if not prepare.lock(args.alone, patience=1):
        raise PrepareError("another wave, tune, loop or report of this clone is running: wait for it, or end it first")
    if "AUTORESEARCH_CACHE" in os.environ:
        os.environ["AUTORESEARCH_CACHE"] = str(prepare.cache_dir().resolve())  # runs have other working folders
    kind = Kind("", args.budget, prepare.dataset_id(), args.gpu or "")
    if args.address:
        from night.ray_pool import RayPool

        pool = RayPool(args, kind.dataset)
        return pool, kind._replace(gpu=pool.model)
    names = gpu_names(args.gpu)
    model = statistics.mode(names or ["cpu"])
    places = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(names))))
    places = [gpu.strip() for gpu, name in zip(places.split(","), names, strict=False) if name == model]
    for other in sorted({*names} - {model}):
        print(f"no run on {other}: scores compare with those on {model} only")
    return Local(places, args.per_gpu, args.limit, args.locked), kind._replace(gpu=model)


def needs_no_repeat(row: dict, kind: Kind, base: str) -> bool:
    """All but crashes of the reference, and rows of a report without a score on test."""
    if crashed(row):
        return row["commit"] != base
    return not kind.report or row["test_bpb"] is not None


def is_logged(row: dict) -> bool:
    return any(
        run_name(row) == run_name(other) and row["budget"] == other["budget"] for other in harness.read_results()
    )


class Trainer:
    """Trains in a pool: `submit` queues a run, `ended` yields the rows of those that have ended, `train` does both."""

    def __init__(self, args: argparse.Namespace, pool, kind: Kind):
        self.args, self.pool, self.kind, self.slots = args, pool, kind, pool.slots
        self.pending = {}  # run: commit and subject of its `base`, the revision to beat
        self.records = {}  # run that has started: folder of its record
        self.lost = set()  # runs that were lost, and started again, once
        self.stopped = []  # not empty after a signal

    def begin(self) -> None:
        """From now on `ended` handles signals."""
        harness.handle_signals(lambda *_: self.stopped.append(True))

    def train(self, runs: list[Run], base=("", "")) -> list[dict]:
        """Trains the runs that have no row of this kind; returns each run's last row. base: the reference.

        A signal ends all runs and this process."""
        rows = [row for row in self.kind.rows() if needs_no_repeat(row, self.kind, base[0])]
        done = set() if self.args.again else {run_name(row) for row in rows}
        runs = list(dict.fromkeys(runs))
        todo = [run for run in runs if run.name not in done]
        print(f"{len(todo)} runs, {len(runs) - len(todo)} more have a row already")
        ideas = {run.commit for run in runs}
        for row in good(rows, base[0]):  # of a wave that was interrupted when ideas had ended before their reference
            keep_winners(ideas, row, self.kind)
        per_gpu = self.per_gpu(len(todo))
        self.begin()
        for run in todo:
            self.submit(run, base, per_gpu)
        while self.pending:
            for run, row in self.ended():
                if place(row) != self.kind.place():
                    problem = f"{run} was scored on {', '.join(place(row))}, and not on {self.kind}"
                    raise PrepareError(f"{problem}: is prepare.py committed, are a node's GPUs of one model?")
                if run.commit == base[0]:
                    keep_winners(ideas, row, self.kind)
        discard_by_mean({run.name for run in runs}, base[0], self.kind)
        last = {run_name(row): row for row in self.kind.rows()}
        return [last[run.name] for run in runs if run.name in last]

    def per_gpu(self, runs: int) -> int:
        """How many of so many runs each GPU should take."""
        return min(self.args.per_gpu, math.ceil(runs / self.pool.gpus))

    def submit(self, run: Run, base: tuple[str, str], per_gpu: int | None = None) -> None:
        """Queues a run. base: what it has to beat. per_gpu: how many a GPU should take, if fewer than it could."""
        args = self.args
        command = ["-m", "night", "run", f"--limit={args.limit}", *train_options(args, run.seed)]
        command += ["--locked"] * args.locked
        record = dict(commit=run.commit, description=run.description, log=True, score_test=self.kind.report)
        self.pool.submit(run, command, record, per_gpu or args.per_gpu)
        self.pending[run] = base

    def ended(self) -> Iterator[tuple[Run, dict]]:
        """Logs and yields the rows of runs that end within half a second; also prints starts and copies records.

        After a signal, ends all runs, then this process with status 130."""
        for event in self.pool.events():
            run = event.run
            if self.stopped:  # it may have ended a run, too
                break
            if isinstance(event, Started):
                print(f"start    {run} on {event.where}")
                with suppress(OSError):  # the run goes on without a record
                    self.records[run] = new_record(*run.name, self.args.gpu, self.args.budget)
            elif isinstance(event, News):
                with suppress(KeyError, OSError), (self.records[run] / event.name).open("ab") as file:
                    file.write(event.text)
            else:
                base = self.pending.pop(run)
                if folder := self.records.pop(run, None):
                    end_record(folder, event.reason)
                if event.lost and run not in self.lost:
                    print(f"lost     {run}: starting it again")
                    self.lost.add(run)
                    self.submit(run, base)
                    continue
                while True:
                    row, text = log_row(run, self.kind, base, event.rows, event.tail, event.reason)
                    if self.stopped or is_logged(row):
                        break
                    time.sleep(PAUSE)  # a full disk: neither the log nor its journal has taken it
                print(text)
                yield run, row
        if self.stopped:
            print("interrupted: the same command continues")
            for folder in self.records.values():
                end_record(folder, "interrupted")
            self.pool.close()
            sys.exit(130)


def log_row(run: Run, kind: Kind, base: tuple, rows: str, tail: list[str], reason: str = "no row") -> tuple[dict, str]:
    """Logs the last row that a run left in its checkout, else a crash with that reason; returns it, and text to print.

    An idea that ends before the reference is a `discard` until `keep_winners` judges it."""
    gpu, _, dataset = kind.place()
    row = dict(val_bpb=0.0, memory_gb=0.0, tokens_M=0.0, test_bpb=None, gpu=gpu, dataset=dataset, reason=reason)
    with suppress(ValueError):
        *_, row = [row, *harness.parse_log(rows)[0]]
    if kind.report:
        to_beat = None
    elif run.commit == base[0]:
        to_beat = math.inf
    elif run.commit in kept_before(kind.rows(), base[0]):
        to_beat = 0.0
    else:
        rivals = [other for other in good(kind.rows(), base[0]) if other["gpu"] == row["gpu"]]
        to_beat = scores(rivals).get(run.seed, 0.0)
    own = {key: row[key] for key in ("val_bpb", "memory_gb", "tokens_M", "test_bpb", "gpu", "dataset", "reason")}
    own |= run._asdict() | {"budget": kind.budget}
    own["status"] = harness.log_result(**own, to_beat=to_beat, report=kind.report)
    line = f"{own['status']:8} {own['val_bpb']:.6f}  {run}  {own['reason']}"
    return own, "\n    ".join([line, *tail] if own["reason"] else [line])
