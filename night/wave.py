"""Waves: trains git revisions side by side, each on its own GPU of this machine or of a Ray cluster."""

import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress

import harness
import prepare
from harness import crashed
from harness.columns import EMPTY, identity
from harness.journal import journal_of
from night.git import archive, print_doubts, revisions
from night.noise import with_error
from night.pool import Ended, Local, Run, gpu_names, one_model
from night.rows import Kind, good, grouped, judge, kept_before, kind_here, pairs, place, reference, run_name, scores
from night.run import new_record, record_folder, train_options
from prepare import PrepareError

PAUSE = 10  # seconds until a full disk is tried again


def wave(args: Namespace) -> None:
    """Trains every revision and the reference with every seed, unless it has a score; prints a table."""
    ideas = revisions(args.revisions)
    trainer = Trainer(args, *start_pool(args))
    base = reference(trainer.kind)
    print_doubts([commit for commit, _ in ideas])
    runs = [Run(*revision, seed, base) for revision in [*revisions([base]), *ideas] for seed in args.seeds]
    trainer.train(runs)
    judge({run.name for run in runs}, base, trainer.kind)
    print(f"\n{table(trainer.last_rows(runs), base)}")


def table(rows: list[dict], base: str) -> str:
    """A line per revision: val_bpb, and its difference from the reference with the same seeds."""
    lines = []
    for commit, group in grouped(rows, lambda row: row["commit"]).items():
        own, last = scores(group), group[-1]
        changes = [after - before for before, after in pairs(rows, base, commit)]
        change = "reference" if commit == base else with_error(changes, "+.6f", ".5f")
        bpb = with_error(own.values(), ".6f", ".5f") or "0.000000"
        status = "+".join(sorted({"crash" if crashed(row) else row["status"] for row in group}))
        tokens = max(row["tokens_M"] for row in group)
        text = str(Run(commit, last["description"], last["seed"]))
        if len(group) > 1:
            text = f"{commit} {last['description']}, {len(own)} seeds"
        lines.append((not own, f"{bpb:18}  {change:19}  {tokens:8.1f}  {status:7}  {text}"))
    head = f"{'val_bpb':18}  {'vs reference':19}  tokens_M  status   commit  description"
    return "\n".join([head, *(line for _, line in sorted(lines))])


def start_pool(args: Namespace) -> tuple:
    """The pool at args.address, or this machine's; and the kind of row that runs get."""
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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(names))))
    places = [gpu.strip() for gpu in visible.split(",")][: len(names)]
    return Local(places, args.per_gpu, args.limit, args.locked), kind_here(args, one_model(names or ["cpu"]))


class Trainer:
    """Trains in a pool: `fill` starts what is in `todo`, `ended` yields rows of what has ended, `train` does both.

    After a signal, `ended` ends all runs and this process."""

    def __init__(self, args: Namespace, pool, kind: Kind):
        self.args, self.pool, self.kind, self.slots = args, pool, kind, pool.slots
        self.todo: list[Run] = []  # runs that wait for a slot
        self.pending: list[Run] = []  # runs in the pool, or not yet logged
        self.unlogged: list[Ended] = []
        self.stopped = []  # not empty after a signal

    def train(self, runs: list[Run]) -> list[dict]:
        """Trains the runs that have no score of this kind; returns each run's last row."""
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
        with suppress(OSError):  # the run goes on without a record
            record["folder"] = str(new_record(*run.name, args.gpu, args.budget))
        self.pool.submit(run, packed, command, record)
        self.pending.append(run)
        print(f"start    {run}")

    def ended(self) -> Iterator[tuple[Run, dict]]:
        """Logs and yields the rows of runs that end within half a second."""
        self.unlogged += self.pool.ended()
        while self.unlogged and not self.stopped:  # a signal may have ended a run, too
            run, row = self.unlogged[0].run, self.log(self.unlogged[0])  # git may fail for a while
            self.unlogged.pop(0)
            self.pending.remove(run)
            yield run, row
        if self.stopped:
            print("interrupted: the same command continues")
            self.pool.close()
            sys.exit(130)

    def log(self, result: Ended) -> dict:
        """Logs the last row that a run has left in its checkout, else a crash, and keeps its record. That row's own
        status means nothing: the log of a checkout is empty."""
        run, kind = result.run, self.kind
        for name, content in result.record.items():
            with suppress(OSError):
                (record_folder(*run.name, self.args.gpu, self.args.budget) / name).write_bytes(content)
        crash = dict(val_bpb=0.0, memory_gb=0.0, gpu=kind.gpu, dataset=kind.dataset, reason=result.reason)
        rows = [EMPTY | crash]
        with suppress(ValueError):
            rows += harness.parse_log(result.rows)[0]
        row = rows[-1] | dict(commit=run.commit, description=run.description, seed=run.seed, budget=kind.budget)
        bar = to_beat(run, row, kind)

        def times_logged() -> int:
            return [*map(identity, harness.read_results())].count(identity(row))

        before = times_logged()  # it may have crashed earlier
        while True:
            row["status"] = harness.log_result(**row, to_beat=bar, report=kind.report)
            if self.stopped or times_logged() > before:
                break
            time.sleep(PAUSE)  # a full disk: neither the log nor its journal has taken it
        text = f"{row['status']:8} {row['val_bpb']:.6f}  {run}  {row['reason']}"
        print(text, *(result.tail if row["reason"] else []), sep="\n    ")
        return row


def to_beat(run: Run, row: dict, kind: Kind) -> float:
    """Below this, the score of a run that has just ended is a `keep`: that of the reference with the same seed; if that
    has none yet, 0.0 until `judge` has its say."""
    if run.commit == run.base:
        return math.inf
    rows = kind.rows()
    if place(row) != kind[:3] or run.commit in kept_before(rows, run.base):
        return 0.0
    return scores(good(rows, run.base)).get(run.seed, 0.0)
