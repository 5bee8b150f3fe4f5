"""The tuner: an agent of the loop that needs no language model. It reads the log, asks Optuna, and edits constants.

`python -m night tune` is a loop with this agent alone. Beside others: --agent "python $PWD/night/tune.py".
"""

import argparse
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":  # it works in a checkout, whose night/ has no log
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import harness
from harness import crashed
from night.git import branch, read_train
from night.knobs import edit, read_knobs
from night.loop import loop
from night.proposals import accepted
from night.rows import kind_here, one_seed, reference
from night.run import train_options
from night.show import last_place
from prepare import PrepareError

SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler"}


def tune(args: argparse.Namespace) -> None:
    """A loop whose agent is `propose`."""
    import optuna  # noqa: F401  better missed now than in every trial

    read_knobs(read_train(reference(kind_here(args))), args.knobs)  # so are knobs that are none
    words = [sys.executable, __file__, *train_options(args), f"--sampler={args.sampler}"]
    args.agent = [shlex.join(words + [f"--knobs={','.join(args.knobs)}"] * bool(args.knobs))]
    loop(args)


def propose(args: argparse.Namespace) -> None:
    """Moves constants of ./train.py, and describes that in ./IDEA."""
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    source = Path("train.py").read_bytes()
    knobs = read_knobs(source, args.knobs)
    study = optuna.create_study(sampler=getattr(optuna.samplers, SAMPLERS[args.sampler])())
    for commit, score in trials(args):
        with suppress(subprocess.CalledProcessError, PrepareError, KeyError):  # not in this clone; another file
            found = {knob.name: knob.value for knob in read_knobs(read_train(commit), args.knobs)}
            scales = {}
            for knob in knobs:  # an older file's value may be outside today's range
                low, _, high = sorted([knob.low, found[knob.name], knob.high])
                scales[knob.name] = optuna.distributions.FloatDistribution(low, high, log=knob.log)
            state = TrialState.RUNNING if score is None else TrialState.COMPLETE
            values = {name: found[name] for name in scales}
            study.add_trial(create_trial(state=state, value=score, params=values, distributions=scales))
    trial = study.ask()
    drawn = [knob.fit(trial.suggest_float(knob.name, knob.low, knob.high, log=knob.log)) for knob in knobs]
    moved = {knob: value for knob, value in zip(knobs, drawn, strict=True) if value != knob.value}
    most = sorted(moved, key=lambda knob: -abs(moved[knob] / knob.value - 1))  # the largest change first
    changes = ", ".join(f"{knob.name} {knob.text} -> {knob.literal(moved[knob])}" for knob in most)
    Path("IDEA").write_text(textwrap.shorten(f"tune {args.sampler}: {changes}", 100, placeholder=" ..."))
    Path("train.py").write_bytes(edit(source, moved))


def trials(args: argparse.Namespace) -> Iterator[tuple[str, float | None]]:
    """Commit and val_bpb of what was kept and of this sampler's proposals; None while one trains."""
    ours, rows = f"tune {args.sampler}: ", []
    with suppress(PrepareError):  # no row yet
        rows = one_seed(last_place(args))
    for row in rows:
        if not crashed(row) and (row["status"] == "keep" or ours in row["description"]):
            yield row["commit"], row["val_bpb"]
    ended = {row["commit"] for row in harness.read_results()}
    for commit, (_, _, subject) in accepted(branch()).items():
        if commit not in ended and ours in subject:
            yield commit, None


if __name__ == "__main__":
    from night.__main__ import parse

    propose(parse(["tune", *sys.argv[1:]]))
