"""
Many experiments: supervised runs, waves over the GPUs of a machine or a Ray cluster, nights of agents, what has been
tried, and the report on the morning after. `python -m night COMMAND --help` lists the options.

tune, report and Ray need pip install -e '.[night]'; plot needs '.[plot]'.
"""

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import harness
import prepare
from night.loop import loop
from night.plot import plot
from night.report import report
from night.rows import keep, print_reference
from night.run import LIMIT, run
from night.show import show
from night.tune import SAMPLERS, tune
from night.wave import wave
from prepare import PrepareError


def parse(words: list[str] | None = None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("night", description=__doc__, formatter_class=layout, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parser.set_defaults(per_gpu=1, locked=False, seeds=3, attribute=False)
    options = partial(argparse.ArgumentParser, add_help=False)

    budget = options()
    add = budget.add_mutually_exclusive_group().add_argument
    add("--seconds", type=duration, help="training budget, instead of five minutes")
    add("--tokens", type=positive, help="training budget in tokens")
    names, text = [*harness.GPUS, "cpu"], "use another GPU's numerics and model size"
    budget.add_argument("--gpu", choices=names, metavar="NAME", help=text)
    add = (limit := options()).add_argument
    text = f"kill a run after this ({LIMIT} x --per-gpu, plus --seconds above {prepare.TIME_BUDGET})"
    add("--limit", type=duration, metavar="SECONDS", help=text)
    add("--locked", action="store_true", help="score in another process than train.py's: docs/referee.md")
    add = (many := options(parents=[budget, limit])).add_argument
    add("--per-gpu", type=int, default=1, metavar="K", help="run K at once on each GPU; needs --tokens")
    text = "of a Ray cluster ($RAY_ADDRESS; else this machine alone)"
    add("--address", default=os.environ.get("RAY_ADDRESS"), help=text)
    add = (nights := options(parents=[many])).add_argument
    add("--agents", type=positive, metavar="N", help="agents at once (as many as runs at once)")
    add("--agent-limit", type=duration, default=600, metavar="SECONDS", help="for each call (600)")
    add("--agent-env", default="", metavar="NAME,...", help="more environment variables to pass on")
    add("--hours", type=float, default=8.0, help="length of the night (8)")
    add("--runs", type=positive, metavar="N", help="end after this many, earlier ones included")
    add("--report", action="store_true", help="write a report at the end")

    def command(function: Callable, *parents, help: str) -> Callable:
        name = function.__name__.replace("print_", "")
        own = commands.add_parser(name, parents=parents, help=help, description=help, allow_abbrev=False)
        own.set_defaults(function=function)
        return own.add_argument

    add = command(run, budget, limit, help="run one experiment here; it gets a row however it ends")
    add("--seed", type=harness.seed, default=harness.SEED)
    command(print_reference, budget, help="print the commit that the next experiment starts from")
    add = command(keep, budget, help="set the status of a commit's last row to keep")
    add("revision", metavar="COMMIT")
    add("--discard", action="store_true", help="set all its rows to discard instead")
    add = command(wave, many, help="train each git revision's train.py on a GPU of its own, all at once")
    add("revisions", nargs="*", default=["HEAD"], metavar="REV")
    add("--seeds", type=integers, default=[harness.SEED], metavar="N,N,...", help="train each with each of these")
    add = command(loop, nights, help="ask agents for one idea after another, train each, keep what is better")
    text = "gets a prompt on standard input, or in the file {prompt}; several of them take turns"
    add("--agent", action="append", required=True, metavar="COMMAND", help=text)
    add = command(tune, nights, help="a loop whose agent is Optuna, which moves train.py's constants")
    add("--sampler", choices=[*SAMPLERS], default="tpe", help="Optuna sampler (tpe)")
    add("--knobs", type=lambda text: text.split(","), default=[], metavar="NAME,...", help="search only these")
    add = command(report, many, help="how much of the night's gain was luck?")
    add("--seeds", type=int, default=3, metavar="N", help="number of new seeds (3)")
    add("--attribute", action="store_true", help="also tell which kept changes are real, and prune the others")
    add = command(show, budget, help="print what has been tried so far, or all about one commit's runs")
    add("revision", nargs="?", metavar="COMMIT")
    command(plot, help="draw results.tsv as progress.png")

    args = parser.parse_args(words)
    if args.per_gpu < 1 or (args.per_gpu > 1 and not args.tokens):
        parser.error("--per-gpu needs --tokens, and a number above 0: runs on one GPU slow each other down")
    if "seconds" in args:
        args.budget = harness.budget_name(args.seconds, args.tokens)
    if "limit" in args:
        args.limit = args.limit or LIMIT * args.per_gpu + max(0, (args.seconds or 0) - prepare.TIME_BUDGET)
    return args


def positive(text: str, kind: type = int) -> float:
    if not 0 < kind(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be finite and above 0")
    return kind(text)


def duration(text: str) -> float:
    return positive(text, float)


def integers(text: str) -> list[int]:
    return [harness.seed(number) for number in text.split(",")]


def main() -> int | None:
    args = parse()
    try:
        return args.function(args)
    except ImportError as error:
        extra = "plot" if args.command == "plot" else "night"
        raise PrepareError(f"{args.command} needs more packages ({error}): pip install -e '.[{extra}]'") from None


if __name__ == "__main__":
    prepare.patient_output()  # rows are in a log as they come
    try:
        sys.exit(main())
    except (PrepareError, OSError, subprocess.SubprocessError) as error:  # OSError: no git, a read-only clone
        sys.exit(f"night: {harness.git_problem(error)}")
    except KeyboardInterrupt:
        sys.exit("night: interrupted")
