"""The control arm: Optuna tunes train.py's constants. Each trial is a commit with a row, like an agent's idea."""

import argparse
import functools
import statistics
import subprocess
import sys
import textwrap
import zlib
from collections import defaultdict
from collections.abc import Callable

import harness
from harness import Description
from night.commits import commit_train, read_train
from night.knobs import SIZES, Knob, edit, read_knobs
from night.records import RUNS, budget, curve
from night.rows import ROOT, Kind, branch, kind_here, name_of, reference, revisions, seed_of
from night.wave import Trainer, run_of, same_gpus, settled, start_pool, table

SAMPLERS = {"tpe": "TPESampler", "cmaes": "CmaEsSampler", "random": "RandomSampler"}
SUBJECT = 120  # characters of a commit's subject
PRUNE_AT = 0.2  # share of the budget at which --prune compares losses
FIRST = 10  # trials that it lets go on for comparison
PRUNED = f"pruned at {PRUNE_AT:.0%}"  # the reason in the row


def tune(args: argparse.Namespace) -> None:
    """Searches the constants of the reference's train.py, with a trial on each free GPU; prints the best ten."""
    # In a separate process, so that this one takes no GPU memory
    ask = [sys.executable, "-c", "import harness; print(harness.this_gpu().peak_flops)"]
    peak = harness.named_gpu(args.gpu).peak_flops if args.gpu else float(subprocess.check_output(ask, cwd=ROOT))
    knobs_of = functools.partial(read_knobs, peak=peak, names=args.knobs, searched=() if args.tokens else SIZES)
    if args.list:
        return print(*knobs_of(read_train(reference(kind_here(args.setting)))), sep="\n")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pool, kind = start_pool(args)
    Tuner(args, pool, same_gpus(kind), knobs_of).search()


class Tuner(Trainer):
    """A study in runs/tune.db, each trial a commit. If killed, the same command continues it. knobs_of: of a source."""

    def __init__(self, args: argparse.Namespace, pool, kind: Kind, knobs_of: Callable[[bytes], list[Knob]]):
        import optuna

        super().__init__(args, pool, kind)
        self.knobs_of, self.states, self.waiting = knobs_of, optuna.trial.TrialState, defaultdict(list)
        self.branch = branch() or "HEAD"
        self.base = reference(kind)
        start = "with the agent" if args.with_agent else self.base
        name = "; ".join([args.sampler, start, kind.gpus[0] + kind.setting, kind.dataset, ",".join(sorted(args.knobs))])
        RUNS.mkdir(exist_ok=True)
        options = dict(storage=f"sqlite:///{RUNS}/tune.db", load_if_exists=True)
        begin = {"x0": self.values(self.base)} if args.sampler == "cmaes" else {}  # else in the middle of the ranges
        sampler = getattr(optuna.samplers, SAMPLERS[args.sampler])(**begin)
        self.study = optuna.create_study(study_name=name, sampler=sampler, **options)
        left = self.study.get_trials(states=(self.states.RUNNING,))
        self.left = [optuna.trial.Trial(self.study, trial._trial_id) for trial in left]  # by a killed tuner
        self.looked_at = set()  # runs that are past PRUNE_AT
        for trial in self.trials():  # those that ended before their reference
            self.rivals[trial.get("base")].add(trial.get("commit"))

    def values(self, commit: str) -> dict[str, float]:
        return {knob.parameter(): knob.value for knob in self.knobs_of(read_train(commit))}

    def search(self) -> None:
        print(f"{len(self.trials())} of {self.args.runs} trials so far, {len(self.left)} of them to be repeated")
        with self.at_work(self.to_end()):
            while True:
                while len(self.pending) < self.slots and (trial := self.next_trial()):
                    self.start(trial)
                if not self.pending:
                    break
                if self.args.prune:
                    self.prune()
                for run, row in self.ended():
                    for trial in self.waiting.pop(run):
                        self.tell(trial, row)
        self.show_best()

    def to_end(self) -> int:
        return self.args.runs - len(self.trials()) + len(self.waiting) + len(self.left)

    def trials(self) -> list[dict]:
        """`base` and `commit` of each trial; either may still be missing."""
        return [trial.user_attrs for trial in self.study.get_trials(deepcopy=False)]

    def next_trial(self):
        """A trial that was killed, or a new one; None if there are enough. The first one of each base is the base."""
        if self.left:
            return self.left.pop(0)
        if len(self.trials()) >= self.args.runs:
            return None
        if self.args.with_agent:
            self.base = reference(self.kind)
        if self.base not in [trial.get("base") for trial in self.trials()]:
            self.study.enqueue_trial(self.values(self.base), user_attrs={"base": self.base})
        return self.study.ask()

    def start(self, trial) -> None:
        """Commits a trial, and trains that commit unless it has a row or is being trained."""
        (base,) = revisions([trial.user_attrs.get("base", self.base)])
        trial.set_user_attr("base", base[0])
        source, values = read_train(base[0]), {}
        for knob in self.knobs_of(source):
            value = knob.fit(trial.suggest_float(knob.parameter(), knob.low, knob.high, log=knob.log))
            if value != knob.value:
                values[knob] = value
        run = run_of(*base)
        if values:
            most = sorted(values, key=lambda knob: -abs(values[knob] / knob.value - 1))  # the largest change first
            changes = ", ".join(f"{knob.name} {knob.text} -> {knob.literal(values[knob])}" for knob in most)
            subject = textwrap.shorten(f"tune {self.args.sampler}: {changes}", SUBJECT, placeholder=" ...")
            text = edit(source, values)
            ref = f"{self.branch}-tune/{self.args.sampler}-{base[0]}-{zlib.crc32(text):08x}"
            run = run_of(commit_train(base[0], text, subject, ref), subject)
        trial.set_user_attr("commit", run.commit)
        rows = [row for row in self.kind.rows() if name_of(row) == run[:2] and settled(row, self.kind, base[0])]
        if rows:
            return self.tell(trial, rows[-1])
        self.waiting[run].append(trial)
        if run not in self.runs():
            self.submit(run, base)

    def prune(self) -> None:
        """Stops trials whose loss early in the run is above the median of those before, but not the reference."""
        for run, base in self.pending.items():
            if run.commit == base[0] or run in self.looked_at or run not in self.records:
                continue
            unit, size = budget(self.records[run])
            points = [(getattr(point, unit) / size, point.loss) for point in curve(self.records[run])]
            losses = [loss for share, loss in points if PRUNE_AT / 2 < share <= PRUNE_AT]
            if not losses or points[-1][0] < PRUNE_AT:
                continue
            self.looked_at.add(run)
            loss = statistics.mean(losses)
            trials = self.study.get_trials(deepcopy=False)
            before = [trial.intermediate_values[0] for trial in trials if trial.intermediate_values]
            for trial in self.waiting[run]:
                trial.report(loss, 0)
            if len(before) >= FIRST and loss > statistics.median(before):
                self.stop(run, PRUNED)

    def tell(self, trial, row: dict) -> None:
        if row["status"] == "crash":
            pruned = Description.parse(row).reason == PRUNED
            self.study.tell(trial, state=self.states.PRUNED if pruned else self.states.FAIL)
        else:
            self.study.tell(trial, row["val_bpb"])

    def show_best(self) -> None:
        commits = {trial.get("commit") for trial in self.trials()} | {self.base}
        rows = [row for row in self.kind.rows() if row["commit"] in commits and seed_of(row) == harness.SEED]
        rows = {row["commit"]: row for row in rows if row["status"] != "crash"}
        best = sorted(rows.values(), key=lambda row: row["val_bpb"])[:10]
        best += [row for row in rows.values() if row["commit"] == self.base and row not in best]
        print(f"\n{table(best, self.base)}")
        if best and best[0]["commit"] != self.base:
            print("The best of many is partly luck: before you keep it, train it with other seeds (docs/tune.md)")
