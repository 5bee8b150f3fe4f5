"""What the rows of results.tsv say of experiments, and the commit that the next one starts from."""

import argparse
import math
import os
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
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


def kind_here(setting: str) -> Kind:
    """That of a run on this machine."""
    return Kind([harness.gpu_name()], setting, prepare.dataset_id())


def name_of(row: dict) -> tuple[str, str]:
    """Commit, and description without the reason of a crash and the score on the test split: the name of the run."""
    return row["commit"], str(Description.parse(row)._replace(test_bpb=None, reason=""))


def experiments() -> list[dict]:
    """The rows of results.tsv, without those of reports and without a crash whose run has a later row."""
    rows = [row for row in harness.read_results() if not Label.parse(row["gpu"]).report]
    last = {(*name_of(row), *place(row)): i for i, row in enumerate(rows)}
    return [row for i, row in enumerate(rows) if row["status"] != "crash" or i in last.values()]


def place(row: dict) -> tuple[str, str]:
    """Rows of one place compare."""
    return row["gpu"], row["dataset"]


def grouped(rows: Iterable[dict], key: Callable) -> dict:
    """Lists of rows by key(row), in the order of the first ones."""
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def arm(row: dict) -> str:
    """Who made the commit: `tpe` if the subject begins with `tune tpe:`, `agent 2` if with that, else `agent`."""
    prefix = re.match(r"(?:tune (\w+)|(agent \d+)): ", row["description"])
    return (prefix and (prefix[1] or prefix[2])) or "agent"


def good(rows: list[dict], commit: str) -> list[dict]:
    """Those of a commit, as it is, that did not crash."""
    return [row for row in rows if row["commit"] == commit and row["status"] != "crash" and not uncommitted(row)]


def uncommitted(row: dict) -> bool:
    """Whether what ran was not the commit's train.py, but one with changes that were not committed."""
    return Description.parse(row).subject.endswith(" (train.py differs)")


def scores(rows: list[dict], split: str = "val") -> dict[int, float]:
    """Bits per byte by seed, where a run has scored that split."""
    found = {}
    for row in rows:
        parts = Description.parse(row)
        bpb = row["val_bpb"] if split == "val" else parts.test_bpb
        if row["status"] != "crash" and bpb is not None:
            found[harness.SEED if parts.seed is None else parts.seed] = bpb
    return found


def with_error(values: Collection[float], form: str, error_form: str) -> str:
    """Their mean and, if there are several, its standard error."""
    if not values:
        return ""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return f"{statistics.mean(values):{form}}" + ("" if error is None else f" +-{error:{error_form}}")


def seed_noise(row: dict) -> tuple[float, int]:
    """Standard deviation of val_bpb from seed to seed, and its degrees of freedom; 0.0, 0 if nothing was repeated.

    Pooled over all commits with several runs on the row's gpu and dataset, those of reports included.
    """
    gpu, setting, _ = Label.parse(row["gpu"])
    squares = freedom = 0
    for report in (False, True):
        rows = Kind([gpu], setting, row["dataset"], report).rows()
        for commit in {row["commit"] for row in rows}:
            if found := scores(good(rows, commit)).values():  # one for each seed: a repeated one may give the same
                freedom += len(found) - 1
                squares += statistics.pvariance(found) * len(found)
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)


# ------------------------------------------------------------------------------------------ the commit to go back to
def git_bytes(*args: str, **options) -> bytes:
    """What git prints. options: of subprocess."""
    return subprocess.check_output(["git", *args], cwd=ROOT, **options)


def git(*args: str, **options) -> str:
    return git_bytes(*args, **options).decode(errors="replace").strip()


def archive(commit: str, *paths: str) -> bytes:
    """A tar of its files, byte by byte: no line ends of a user's core.autocrlf."""
    return git_bytes("-c", "core.autocrlf=false", "archive", commit, "--", *paths)


def commit_of(revision: str) -> str:
    """Its 7 digits."""
    try:
        return git("rev-parse", "--verify", "-q", f"{revision}^{{commit}}")[:7]
    except subprocess.CalledProcessError:
        raise PrepareError(f"there is no commit {revision}") from None


def revisions(names: list[str]) -> list[tuple[str, str]]:
    """Their commits (7 digits) and subjects."""
    command = ["git", "log", "--no-walk=unsorted", "--no-show-signature", "--format=%H %s", *names, "--"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True).stdout.decode(errors="replace").strip()
    if not log:
        raise PrepareError(f"{' '.join(names)}: there are no such commits")
    return [(line[:7], line[41:]) for line in log.split("\n")]


def branch() -> str:
    """The one that is checked out, "" if none is."""
    return git("branch", "--show-current")


def in_history(rows: list[dict]) -> list[dict]:
    """Those whose commit is HEAD or an ancestor of it: ideas on side branches count once they are merged."""
    history = {line[:7] for line in git("rev-list", "HEAD").split()}
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
    return commit_of("HEAD")


def print_reference(args: argparse.Namespace) -> None:
    print(reference(kind_here(args.setting)))


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


def decide(ideas: set[tuple[str, str]], base: dict, kind: Kind) -> None:
    """Moves the rows of ideas that ended before the reference behind `base`, its row, as `keep` if they are better."""
    with edit_log() as lines:
        rows = [harness.parse_row(line) for line in lines]
        last = {name_of(row): i for i, row in enumerate(rows) if row and kind.holds(row)}
        moved = {}
        for i in sorted(last[name] for name in ideas & last.keys()):
            if rows[i]["gpu"] == base["gpu"] and rows[i]["status"] != "crash":
                better = rows[i]["val_bpb"] < base["val_bpb"]
                moved[i] = with_status(lines[i], "keep") if better else lines[i]
        *rest, end = [line for i, line in enumerate(lines) if i not in moved]
        lines[:] = [*rest, *moved.values(), end]  # the log ends with a line break, so the last line is empty


def keep(args: argparse.Namespace) -> None:
    """Overrules a commit's status, `keep` in its last row or `discard` in all; prints the commit to go back to."""
    commit, kind = commit_of(args.revision), kind_here(args.setting)
    status = "discard" if args.discard else "keep"
    with edit_log() as lines:
        rows = enumerate(map(harness.parse_row, lines))
        found = [i for i, row in rows if row and kind.holds(row) and good([row], commit)]
        if not found:
            others = {", ".join(place(row)) for row in good(harness.read_results(), commit)}
            has = f", but on {' and '.join(sorted(others))}: give that budget" if others else ": train it first"
            where = f"{kind.gpus[0]}{kind.setting}, {kind.dataset}"
            raise PrepareError(f"results.tsv has no result of {commit} on {where}{has}")
        for i in found if args.discard else found[-1:]:
            lines[i] = with_status(lines[i], status)
    print(f"{status} {commit}; the next experiment starts from {reference(kind)}")
    if not in_history([{"commit": commit}]):
        print(f"{commit} is on another branch: merge it, or it does not count")
