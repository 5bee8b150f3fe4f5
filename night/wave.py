"""Waves: trains git revisions side by side, each on its own GPU of this machine or of a Ray cluster."""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import harness
import prepare
from harness import crashed
from harness.journal import journal_of
from night.git import archive, print_doubts, revisions
from night.noise import with_error
from night.pool import Ended, Local, Run, gpu_names, label, one_model
from night.records import new_record
from night.rows import Kind, good, grouped, judge, kept_before, kind_here, pairs, place, reference, run_name, scores
from night.run import train_options
from prepare import PrepareError

PAUSE = 10  # seconds until a full disk is tried again


def wave(args: argparse.Namespace) -> None:
    """Trains every revision and the reference with every seed that has no row yet; prints a table."""
    ideas = revisions(args.revisions)
    trainer = Trainer(args, *start_pool(args))
    base = reference(trainer.kind)
    print_doubts([commit for commit, _ in ideas])
    runs = [Run(*revision, seed, base) for revision in [*revisions([base]), *ideas] for seed in args.seeds]
    trainer.train(runs)
    judge({run.name for run in runs}, base, trainer.kind)
    print(f"\n{table(trainer.last_rows(runs), base)}")


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
    """The pool at args.address, or this machine's; and the kind of row that runs get.

    Raises PrepareError if another wave is at work."""
    # locked until this process ends; in the git directory, which no `git clean` touches
    args.alone = open(journal_of(harness.RESULTS).with_name("results.tsv.wave"), "ab")
    if not prepare.lock(args.alone, patience=1):
        raise PrepareError("another wave, tune, loop or report of this clone is running: wait for it, or end it first")
    if "AUTORESEARCH_CACHE" in os.environ:
        os.environ["AUTORESEARCH_CACHE"] = str(prepare.cache_dir().resolve())  # runs have other working folders
    if args.address:
        from night.ray_pool import RayPool

        pool = RayPool(args, prepare.dataset_id())
        return pool, kind_here(args, pool.model)
    names = gpu_names(args.gpu)
    places = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(names))))
    places = [gpu.strip() for gpu, _ in zip(places.split(","), names, strict=False)]
    return Local(places, args.per_gpu, args.limit, args.locked), kind_here(args, one_model(names or ["cpu"]))


class Trainer:
    """Trains in a pool: `fill` starts what is in `todo`, `ended` yields rows of what has ended, `train` does both."""

    def __init__(self, args: argparse.Namespace, pool, kind: Kind):
        self.args, self.pool, self.kind, self.slots = args, pool, kind, pool.slots
        self.todo: list[Run] = []  # runs that wait for a slot
        self.pending: dict[Run, Path | None] = {}  # runs in the pool, with the folders of their records
        self.stopped = []  # not empty after a signal

    def train(self, runs: list[Run]) -> list[dict]:
        """Trains the runs that have no score of this kind; returns each run's last row.

        From now on, a signal ends all runs and this process: see `ended`."""
        rows = [row for row in self.kind.rows() if not crashed(row) and (not self.kind.report or row["test_bpb"])]
        done = {run_name(row) for row in rows}
        runs = list(dict.fromkeys(runs))
        self.todo = [run for run in runs if run.name not in done]
        print(f"{len(self.todo)} runs, {len(runs) - len(self.todo)} more have a score already")
        harness.handle_signals(lambda *_: self.stopped.append(True))
        while self.todo or self.pending:
            self.fill()
            for run, row in self.ended():
                if place(row) != self.kind[:3]:
                    problem = f"{run} was scored on {', '.join(place(row))}, and not on {self.kind}"
                    raise PrepareError(f"{problem}: is prepare.py committed, are a node's GPUs of one model?")
        return self.last_rows(runs)

    def last_rows(self, runs: list[Run]) -> list[dict]:
        last = {run_name(row): row for row in self.kind.rows()}
        return [last[run.name] for run in dict.fromkeys(runs) if run.name in last]

    def fill(self) -> None:
        """Starts what waits while slots are free."""
        while self.todo and len(self.pending) < self.slots:
            self.start(self.todo[0])
            self.todo.pop(0)

    def start(self, run: Run) -> None:
        args, packed = self.args, archive(run.commit)  # first of all: git may fail for a while
        command = ["-m", "night", "run", f"--limit={args.limit}", *train_options(args, run.seed)]
        command += ["--locked"] * args.locked
        record = dict(commit=run.commit, description=run.description, log=True, score_test=self.kind.report)
        folder = None
        with suppress(OSError):  # the run goes on without a record
            folder = new_record(*run.name, args.gpu, args.budget)
            record["folder"] = str(folder)
        self.pool.submit(run, packed, command, record)
        self.pending[run] = folder
        print(f"start    {run}")

    def ended(self) -> Iterator[tuple[Run, dict]]:
        """Logs and yields the rows of runs that end within half a second.

        After a signal, ends all runs, then this process with status 130."""
        for result in self.pool.ended():
            if self.stopped:  # it may have ended a run, too
                break
            yield result.run, self.log(result, self.pending.pop(result.run))
        if self.stopped:
            print("interrupted: the same command continues")
            self.pool.close()
            sys.exit(130)

    def log(self, result: Ended, folder: Path | None) -> dict:
        """Logs a run's row, and keeps its record."""
        for name, content in result.record.items() if folder else ():
            with suppress(OSError):
                (folder / name).write_bytes(content)
        while True:
            row = log_row(result, self.kind)
            name = *run_name(row), *place(row)
            if self.stopped or name in [(*run_name(other), *place(other)) for other in harness.read_results()]:
                break
            time.sleep(PAUSE)  # a full disk: neither the log nor its journal has taken it
        text = f"{row['status']:8} {row['val_bpb']:.6f}  {result.run}  {row['reason']}"
        print(text, *(result.tail if row["reason"] else []), sep="\n    ")
        return row


def log_row(result: Ended, kind: Kind) -> dict:
    """Logs the last row that a run left in its checkout, else a crash; returns it.

    An idea that ends before the reference is a `discard` until `judge` has its say."""
    (commit, description, seed, base), rows = result.run, kind.rows()
    row = dict(val_bpb=0.0, memory_gb=0.0, gpu=kind.gpu, dataset=kind.dataset, reason=result.reason)
    row = harness.columns.EMPTY | row
    with suppress(ValueError):
        *_, row = [row, *harness.parse_log(result.rows)[0]]
    if kind.report:
        to_beat = None
    elif commit == base:
        to_beat = math.inf
    elif row["gpu"] != kind.gpu or commit in kept_before(rows, base):
        to_beat = 0.0
    else:
        to_beat = scores(good(rows, base)).get(seed, 0.0)
    row |= dict(commit=commit, description=description, seed=seed, budget=kind.budget)
    return row | {"status": harness.log_result(**row, to_beat=to_beat, report=kind.report)}
