"""What the rows of results.tsv say of experiments, and the commit that the next one starts from."""

import argparse
import math
import os
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import harness
import prepare
from harness import Description, Label
from prepare import PrepareError

ROOT = Path(__file__).resolve().parent.parent


class Kind(NamedTuple):
    """Rows that compare with each other."""

    gpus: list[str]  # their names
    setting: str  # what was set by hand, as harness.budget_name has it
    dataset: str
    report: bool = False
    anywhere: bool = False  # in a cluster: on other GPUs, too

    def rows(self) -> list[dict]:
        return [row for row in harness.read_results() if self.holds(row)]

    def holds(self, row: dict) -> bool:
        gpu, *rest = Label.parse(row["gpu"])
        here = self.anywhere or gpu in self.gpus
        return here and rest == [self.setting, self.report] and row["dataset"] == self.dataset


def name_of(row: dict) -> tuple[str, str]:
    """Commit, and description without the reason of a crash and the score on the test split: the name of the run."""
    return row["commit"], str(Description.parse(row)._replace(test_bpb=None, reason=""))


def experiments() -> list[dict]:
    """The rows of results.tsv, without those of reports and without a crash whose run has a later row."""
    rows = [row for row in harness.read_results() if not Label.parse(row["gpu"]).report]
    last = {(*name_of(row), row["gpu"], row["dataset"]): i for i, row in enumerate(rows)}
    return [row for i, row in enumerate(rows) if row["status"] != "crash" or i in last.values()]


def arms(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows by who made their commits: `tpe` if the subject begins with `tune tpe:`, `agent 2` if with that, else
    `agent`."""
    found = defaultdict(list)
    for row in rows:
        prefix = re.match(r"(?:tune (\w+)|(agent \d+)): ", row["description"])
        found[(prefix and (prefix[1] or prefix[2])) or "agent"].append(row)
    return found


def good(rows: list[dict], commit: str) -> list[dict]:
    """Those of a commit that did not crash."""
    return [row for row in rows if row["commit"] == commit and row["status"] != "crash"]


def seed_noise(gpu: str, dataset: str) -> tuple[float, int]:
    """Standard deviation of val_bpb from seed to seed, and its degrees of freedom; 0.0, 0 if nothing was repeated.

    Pooled over all commits with several runs on that gpu and dataset, those of reports included.
    """
    name, setting, _ = Label.parse(gpu)
    kinds = [Kind([name], setting, dataset, report) for report in (False, True)]
    squares = freedom = 0
    for rows in (kind.rows() for kind in kinds):
        for commit in {row["commit"] for row in rows}:
            scores = [row["val_bpb"] for row in good(rows, commit)]
            freedom += max(0, len(scores) - 1)
            squares += statistics.variance(scores) * (len(scores) - 1) if len(scores) > 1 else 0
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)


# ------------------------------------------------------------------------------------------ the commit to go back to
def git(*args: str) -> bytes:
    return subprocess.check_output(["git", *args], cwd=ROOT)


def in_history(rows: list[dict]) -> list[dict]:
    """Those whose commit is HEAD or an ancestor of it: ideas on side branches count once they are merged."""
    history = {line[:7] for line in git("rev-list", "HEAD").decode().split()}
    return [row for row in rows if row["commit"] in history]


def reference(kind: Kind) -> str:
    """The commit that the next experiment of a kind starts from: that of the last kept row, if there is none the first.

    Without any row of the kind, that of the five-minute runs; without those, HEAD.
    """
    for setting in (kind.setting, ""):
        rows = in_history(kind._replace(setting=setting).rows())
        kept = [row["commit"] for row in rows if row["status"] == "keep"]
        if rows:
            return kept[-1] if kept else rows[0]["commit"]
    return git("rev-parse", "HEAD").decode()[:7]


def print_reference(args: argparse.Namespace) -> None:
    print(reference(Kind([harness.gpu_name()], args.setting, prepare.dataset_id())))


@contextmanager
def edit_log() -> Iterator[list[str]]:
    """The lines of results.tsv, to be changed in place; nobody else writes to it meanwhile."""
    path, keep_bytes = harness.RESULTS.resolve(), dict(encoding="utf-8", errors="surrogateescape")
    with harness.locked(path) as log:
        log.seek(0)
        lines = log.read().decode(**keep_bytes).split("\n")
        yield lines
        with prepare.new_file(path) as file:
            os.fchmod(file.fileno(), os.fstat(log.fileno()).st_mode & 0o777)
            file.write("\n".join(lines).encode(**keep_bytes))


def with_status(line: str, status: str) -> str:
    fields = line.split("\t")
    fields[harness.COLUMNS.index("status")] = status
    return "\t".join(fields)


def keep(args: argparse.Namespace) -> None:
    """Overrules a commit's status, `keep` in its last row or `discard` in all; prints the commit to go back to."""
    commit = git("rev-parse", "--verify", f"{args.revision}^{{commit}}").decode()[:7]
    kind = Kind([harness.gpu_name()], args.setting, prepare.dataset_id())
    status = "discard" if args.discard else "keep"
    with edit_log() as lines:
        rows = enumerate(map(harness.parse_row, lines))
        found = [i for i, row in rows if row and kind.holds(row) and good([row], commit)]
        if not found:
            where = f"{kind.gpus[0]}{kind.setting}, {kind.dataset}"
            raise PrepareError(f"results.tsv has no result of {commit} on {where}: train it first")
        for i in found if args.discard else found[-1:]:
            lines[i] = with_status(lines[i], status)
    print(f"{status} {commit}; the next experiment starts from {reference(kind)}")
    if not in_history([{"commit": commit}]):
        print(f"{commit} is on another branch: merge it, or it does not count")
