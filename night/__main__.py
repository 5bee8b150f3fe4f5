"""
Many experiments: one run under supervision, waves of runs on every GPU of a machine or a Ray cluster, and the morning
after: a report and a picture.

    python -m night run [--seed N] [--gpu ...]   # one experiment here; it leaves a row, however it ends
    python -m night reference                    # the commit that the next experiment starts from
    python -m night keep COMMIT [--discard]      # overrules the status of a commit's last row
    python -m night wave REV ... [--seeds 1,2]   # each git revision's train.py on a GPU of its own, all at once
    python -m night report                       # how much of the night's gain was luck?
    python -m night plot                         # draws results.tsv as progress.png

`wave` and `report` need the extra [night] (pip install -e '.[night]'), `plot` needs [plot], the others need none.
"""

import argparse
import os
import subprocess
import sys

import harness
import prepare
from night.plot import plot
from night.report import report
from night.rows import keep, print_reference
from night.run import LIMIT, run
from night.wave import wave
from prepare import PrepareError

COMMANDS = {"run": run, "reference": print_reference, "keep": keep, "wave": wave, "report": report, "plot": plot}


def main() -> int | None:
    sys.stdout.reconfigure(line_buffering=True)  # a log shows the rows as they come
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("night", description=__doc__, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "revisions", nargs="*", metavar="REV", help="git revisions: of a wave (HEAD), or the one to keep"
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--seconds", type=float, help="of training, instead of five minutes")
    budget.add_argument("--tokens", type=int, help="to train on, instead of five minutes")
    parser.add_argument("--gpu", metavar="NAME", help="take another GPU's numerics and size")
    parser.add_argument("--seed", type=int, help="seed of a run")
    numbers = dict(type=lambda text: [int(number) for number in text.split(",")], metavar="N")
    parser.add_argument("--seeds", **numbers, help="of a wave, such as 1,2,3; of a report, how many (3)")
    parser.add_argument("--per-gpu", type=int, default=1, metavar="K", help="K runs at once on a GPU; needs --tokens")
    parser.add_argument("--again", action="store_true", help="repeat runs that have a row already")
    parser.add_argument("--limit", type=float, help=f"kill a run after so many seconds ({LIMIT} times K)")
    cluster = dict(default=os.environ.get("RAY_ADDRESS"), help="of Ray ($RAY_ADDRESS, else this machine alone)")
    parser.add_argument("--address", **cluster)
    parser.add_argument("--discard", action="store_true", help="instead of keep")
    args = parser.parse_intermixed_args()
    if args.revisions and args.command not in ("wave", "keep"):
        parser.error(f"{args.command} takes no {args.revisions[0]}")
    if args.command == "keep" and len(args.revisions) != 1:
        parser.error("keep takes one commit")
    if args.seeds if args.command == "run" else args.seed is not None:
        parser.error("--seed is for a run, --seeds for a wave or a report")
    if args.per_gpu < 1 or (args.per_gpu > 1 and not args.tokens):
        parser.error("--per-gpu needs --tokens, and a number above 0: runs that share a GPU slow each other down")
    args.limit = args.limit or LIMIT * args.per_gpu + max(0, (args.seconds or 0) - prepare.TIME_BUDGET)
    args.setting = harness.budget_name(args.seconds, args.tokens, args.gpu)
    return COMMANDS[args.command](args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PrepareError, FileNotFoundError, subprocess.CalledProcessError) as error:  # no file: no git
        sys.exit(f"night: {error}")
    except KeyboardInterrupt:
        sys.exit("night: interrupted")
