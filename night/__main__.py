"""
Many experiments: one run under supervision, waves of runs on every GPU of a machine or a Ray cluster, what they have
shown so far, and the morning after. `python -m night COMMAND --help` has the options.

`wave`, `tune`, `report`, `watch` and `page` need the extra [night] (pip install -e '.[night]'), `plot` needs [plot].
"""

import argparse
import os
import subprocess
import sys

import harness
import prepare
from night.clean import clean
from night.live import watch
from night.loop import loop
from night.page import page
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
    parser.set_defaults(per_gpu=1, again=False)

    budget = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    one = budget.add_mutually_exclusive_group()
    one.add_argument("--seconds", type=float, help="of training, instead of five minutes")
    one.add_argument("--tokens", type=int, help="to train on, instead of five minutes")
    budget.add_argument("--gpu", metavar="NAME", help="take another GPU's numerics and size")
    limit = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    limit.add_argument("--limit", type=float, help=f"kill a run after so many seconds ({LIMIT} times K)")
    many = argparse.ArgumentParser(add_help=False, allow_abbrev=False, parents=[budget, limit])
    many.add_argument("--per-gpu", type=int, default=1, metavar="K", help="K runs at once on a GPU; needs --tokens")
    cluster = dict(default=os.environ.get("RAY_ADDRESS"), help="of Ray ($RAY_ADDRESS, else this machine alone)")
    many.add_argument("--address", **cluster)
    again = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    again.add_argument("--again", action="store_true", help="repeat runs that have a row already")

    def command(function, *parents, help: str) -> argparse.ArgumentParser:
        name = function.__name__.replace("print_", "")
        own = commands.add_parser(name, parents=parents, help=help, description=help, allow_abbrev=False)
        own.set_defaults(function=function)
        return own

    one = command(run, budget, limit, help="one experiment here; it leaves a row, however it ends")
    one.add_argument("--seed", type=int)
    command(print_reference, budget, help="print the commit that the next experiment starts from")
    one = command(keep, budget, help="overrule the status of a commit's last row")
    one.add_argument("revision", metavar="COMMIT")
    one.add_argument("--discard", action="store_true", help="instead of keep, in all its rows")
    one = command(wave, many, again, help="train each git revision's train.py on a GPU of its own, all at once")
    one.add_argument("revisions", nargs="*", default=["HEAD"], metavar="REV")
    numbers = dict(type=lambda text: [int(number) for number in text.split(",")], metavar="N,N,...")
    one.add_argument("--seeds", **numbers, help="train each revision once with each of these seeds")
    one = command(tune, many, help="search train.py's constants, beside an agent or to compare with one")
    one.add_argument("--sampler", choices=[*SAMPLERS], default="tpe", help="of Optuna (tpe)")
    one.add_argument("--runs", type=positive, default=30, metavar="N", help="in all, interrupted ones included (30)")
    one.add_argument("--knobs", type=lambda text: text.split(","), default=[], metavar="NAME,...", help="these only")
    one.add_argument("--list", action="store_true", help="print the knobs and their ranges")
    one.add_argument("--with-agent", action="store_true", help="go on from whatever commit the night keeps meanwhile")
    one = command(loop, many, help="ask agents for one idea after another, train them, and keep what is better")
    text = "reads a prompt on standard input, or in the file {prompt}; several of them take turns"
    one.add_argument("--agent", action="append", required=True, metavar="COMMAND", help=text)
    one.add_argument("--agents", type=positive, metavar="N", help="at once (one for each run at once)")
    one.add_argument("--agent-limit", type=float, default=600, metavar="SECONDS", help="for each call (600)")
    one.add_argument("--agent-env", default="", metavar="NAME,...", help="what else it sees of the environment")
    one.add_argument("--sandbox", default="", metavar="COMMAND", help="put before that of the agent")
    one.add_argument("--hours", type=float, default=8.0, help="(8)")
    one.add_argument("--runs", type=positive, metavar="N", help="end after so many in this night")
    one.add_argument("--patience", type=positive, metavar="N", help="end after so many without a gain")
    text = "before the next call after a refused proposal; three, seven, ... times that after more in a row (30)"
    one.add_argument("--pause", type=float, default=30, metavar="SECONDS", help=text)
    one.add_argument("--report", action="store_true", help="at the end")
    one = command(report, many, again, help="how much of the night's gain was luck?")
    one.add_argument("--seeds", type=int, default=3, metavar="N", help="how many new seeds (3)")
    one.add_argument("--attribute", action="store_true", help="and which kept changes are real, without the others?")
    one = command(show, budget, help="what has been tried so far, or all about one commit's runs")
    one.add_argument("revision", nargs="?", metavar="COMMIT")
    one.add_argument("--md", action="store_true", help="Markdown on a terminal, too")
    one = command(plot, help="draw results.tsv as progress.png, or the curves of some commits' runs as curves.png")
    one.add_argument("revisions", nargs="*", metavar="COMMIT")
    command(page, help="write the whole night as night.html, a page without server and network")
    command(watch, help="show the runs at work in this clone until there is none")
    one = command(clean, help="list what is left of discarded and killed runs")
    one.add_argument("--yes", action="store_true", help="delete it")

    args = parser.parse_args(words)
    if args.per_gpu < 1 or (args.per_gpu > 1 and not args.tokens):
        parser.error("--per-gpu needs --tokens, and a number above 0: runs that share a GPU slow each other down")
    if "seconds" in args:
        args.setting = harness.budget_name(args.seconds, args.tokens, args.gpu)
    if args.command == "tune" and args.with_agent and args.sampler == "cmaes":
        parser.error("--with-agent moves the ranges, and CMA-ES needs fixed ones: take tpe or random")
    if "limit" in args:
        args.limit = args.limit or LIMIT * args.per_gpu + max(0, (args.seconds or 0) - prepare.TIME_BUDGET)
    return args


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def main() -> int | None:
    sys.stdout.reconfigure(line_buffering=True)  # a log shows the rows as they come
    args = parse()
    return args.function(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PrepareError, FileNotFoundError, subprocess.CalledProcessError) as error:  # no file: no git
        sys.exit(f"night: {error}")
    except KeyboardInterrupt:
        sys.exit("night: interrupted")
