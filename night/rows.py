"""Reads results.tsv as experiments, and finds the commit that the next one starts from."""

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

import harness
import prepare
from harness import Description
from prepare import PrepareError

ROOT = Path(__file__).resolve().parent.parent
ATTRIBUTION_SEEDS = 1001  # from here on
AGAIN = ", again on "  # in the subject of a change that is merged with a newer reference


class Label(NamedTuple):
    """The gpu column. Rows are comparable if their labels and datasets are equal."""

    gpu: str  # harness.gpu_name()
    setting: str = ""  # harness.budget_name(): what the command line changed
    report: bool = False  # rows of a report are only compared with each other

    @classmethod
    def parse(cls, text: str) -> "Label":
        pattern = r"(.*?)((?: as \w+)?(?:, [\d.e+-]+ (?:M tokens|s))?)(, report)?"
        gpu, setting, report = re.fullmatch(pattern, text, re.S).groups()
        return cls(gpu, setting, bool(report))

    def __str__(self) -> str:
        return self.gpu + self.setting + ", report" * self.report


class Kind(NamedTuple):
    """What comparable rows have in common."""

    gpus: list[str]  # names; rows on any of these belong to it
    setting: str  # from harness.budget_name
    dataset: str
    report: bool = False  # rows of a report, or of experiments
    anywhere: bool = False  # in a cluster: any GPU

    def __str__(self) -> str:
        return f"{self.gpus[0]}{self.setting}, {self.dataset}"

    def rows(self) -> list[dict]:
        return [row for row in harness.read_results() if self.holds(row)]

    def holds(self, row: dict) -> bool:
        gpu, *rest = Label.parse(row["gpu"])
        here = self.anywhere or gpu in self.gpus
        return here and rest == [self.setting, self.report] and row["dataset"] == self.dataset


def kind_here(setting: str) -> Kind:
    return Kind([harness.gpu_name(setting)], setting, prepare.dataset_id())


def name_of(row: dict) -> tuple[str, str]:
    """A run's name: commit, and description without test score and reason of a crash."""
    return row["commit"], str(Description.parse(row)._replace(test_bpb=None, reason=""))


def experiments() -> list[dict]:
    """The rows of results.tsv, except those of reports, and crashes whose run has a later row."""
    rows = [row for row in harness.read_results() if not Label.parse(row["gpu"]).report]
    last = {(*name_of(row), *place(row)): i for i, row in enumerate(rows)}
    return [row for i, row in enumerate(rows) if row["status"] != "crash" or i in last.values()]


def place(row: dict) -> tuple[str, str]:
    """GPU and dataset: rows that agree in both are comparable."""
    return row["gpu"], row["dataset"]


def grouped(rows: Iterable[dict], key: Callable) -> dict:
    """Lists of rows by key(row), in order of first appearance."""
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def arm(row: dict) -> str:
    """Who made the commit: `tpe` or `agent 2` if its subject begins with `tune tpe: ` or `agent 2: `, else `agent`."""
    prefix = re.match(r"(?:tune (tpe|cmaes|random)|(agent \d+)): ", row["description"])
    return prefix[1] or prefix[2] if prefix else "agent"


def seed_of(row: dict) -> int:
    return Description.parse(row).seed


def usual_seed(rows: list[dict]) -> int:
    """The seed that most scores have."""
    return statistics.mode([seed_of(row) for row in rows if row["val_bpb"]] or [harness.SEED])


def one_seed(rows: list[dict]) -> list[dict]:
    """The rows with the usual seed: these can be compared."""
    seed = usual_seed(rows)
    return [row for row in rows if seed_of(row) == seed]


def baseline(rows: list[dict]) -> dict:
    """The first kept row, else the first score, else the first crash. A wave's ideas may end before it."""
    return min(rows, key=lambda row: (row["status"] != "keep", row["status"] == "crash"))


def count_kept(rows: list[dict]) -> str:
    """`43 kept (10 on this branch)`: commits. Others are on side branches, as gains over older references can be."""
    kept = {row["commit"] for row in rows if row["status"] == "keep"}
    here = kept & {row["commit"] for row in in_history(rows)}
    return f"{len(kept)} kept" + f" ({len(here)} on this branch)" * (0 < len(here) < len(kept))


def arms(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows with one seed by arm, without the baseline's."""
    rows = one_seed(rows)
    first = baseline(rows)["commit"] if rows else None
    return grouped([row for row in rows if row["commit"] != first], arm)


def good(rows: list[dict], commit: str) -> list[dict]:
    """Rows of a commit that did not crash and ran the committed train.py."""
    return [row for row in rows if row["commit"] == commit and row["status"] != "crash" and not uncommitted(row)]


def uncommitted(row: dict) -> bool:
    """Whether the train.py that ran had uncommitted changes."""
    return Description.parse(row).subject.endswith(harness.DIFFERS)


def scores(rows: list[dict], split: str = "val") -> dict[int, float]:
    """Bits per byte of a split by seed, from the rows that have it; the last of a seed counts."""
    found = {}
    for row in rows:
        bpb = row["val_bpb"] if split == "val" else Description.parse(row).test_bpb
        if row["status"] != "crash" and bpb is not None:
            found[seed_of(row)] = bpb
    return found


def with_error(values: Collection[float], form: str, error_form: str) -> str:
    """The mean of values with its standard error, if there are several, as text."""
    if not values:
        return ""
    text = f"{statistics.mean(values):{form}}"
    if len(values) > 1:
        text += f" +-{statistics.stdev(values) / math.sqrt(len(values)):{error_form}}"
    return text


def seed_noise(row: dict, same_seed: bool = False) -> tuple[float, int]:
    """Standard deviation of val_bpb over seeds, and its degrees of freedom; (0.0, 0) if nothing was repeated.

    Pooled over all commits with several seeds on the row's GPU, budget and dataset, reports included, but without runs
    of an attribution, which estimates the noise itself. same_seed: after removing the mean of each seed over commits.
    """
    gpu, setting, _ = Label.parse(row["gpu"])
    runs = []
    for report in (False, True):
        rows = Kind([gpu], setting, row["dataset"], report).rows()
        for commit, group in grouped(rows, lambda row: row["commit"]).items():
            found = scores(good(group, commit))  # one per seed: repeating a seed may give the same score
            found = [run for run in found.items() if not report or run[0] < ATTRIBUTION_SEEDS]
            runs += [(f"{commit}{report}", f"{seed}{report}", bpb) for seed, bpb in found if len(found) > 1]
    if not runs:
        return 0.0, 0
    commits, seeds, bpb = map(np.array, zip(*runs, strict=True))
    means = commits[:, None] == np.unique(commits)
    if same_seed:
        means = np.hstack([means, seeds[:, None] == np.unique(seeds)])
    fit, _, rank, _ = np.linalg.lstsq(means.astype(float), bpb, rcond=None)
    freedom = len(runs) - int(rank)
    return (math.sqrt(((bpb - means @ fit) ** 2).sum() / freedom), freedom) if freedom else (0.0, 0)


# ------------------------------------------------------------------------------------------ the commit to go back to
def git_bytes(*args: str, **options) -> bytes:
    """What git prints. options: of harness.run_git. Raises CalledProcessError."""
    return harness.run_git(*args, cwd=ROOT, **options).stdout


def git(*args: str, **options) -> str:
    return git_bytes(*args, **options).decode(errors="replace").strip()


def commit_of(revision: str) -> str:
    """A revision's 7-digit commit hash. Raises PrepareError if there is none."""
    try:
        return git("rev-parse", "--verify", "-q", f"{revision}^{{commit}}")[:7]
    except subprocess.CalledProcessError:
        raise PrepareError(f"there is no commit {revision}") from None


def revisions(names: list[str]) -> list[tuple[str, str]]:
    """(7-digit hash, subject) of each revision. Raises PrepareError if any is unknown."""
    run = harness.run_git("log", "--no-walk=unsorted", "--format=%H %s", *names, "--", check=False, cwd=ROOT)
    log, problem = (text.decode(errors="replace").strip() for text in (run.stdout, run.stderr))
    if not log:
        raise PrepareError(problem.removeprefix("fatal: ") or f"{' '.join(names)}: there are no such commits")
    return [(line[:7], harness.plain_subject(line[41:])) for line in log.split("\n")]


def branch() -> str:
    """The branch that is checked out, "" if none is."""
    return git("branch", "--show-current")


def in_history(rows: list[dict]) -> list[dict]:
    """Rows whose commit is HEAD or an ancestor of it: ideas on other branches count once they are merged."""
    history = {line[:7] for line in git("rev-list", "HEAD").split()}
    return [row for row in rows if row["commit"] in history and not uncommitted(row)]


def reference(kind: Kind) -> str:
    """The commit that the next experiment of a kind starts from: that of the last kept row, else of the first row.

    Only rows in HEAD's history count, and no crashes. Without any: the reference of the five-minute runs, else HEAD.
    """
    for setting in (kind.setting, ""):
        rows = [row for row in in_history(kind._replace(setting=setting).rows()) if row["status"] != "crash"]
        kept = [row["commit"] for row in rows if row["status"] == "keep"]
        if rows:
            return kept[-1] if kept else rows[0]["commit"]
    return commit_of("HEAD")


def print_reference(args: argparse.Namespace) -> None:
    kind = kind_here(args.setting)
    print(reference(kind))
    if not (kind.rows() or kind._replace(setting="").rows()) and (has := elsewhere(experiments(), kind)):
        print(f"night: this is HEAD, as results.tsv has no row on {kind}{has}", file=sys.stderr)


def elsewhere(rows: list[dict], kind: Kind) -> str:
    """`, but on cpu, 1 M tokens, d: give that budget` about rows of other kinds; "" without rows."""
    places = sorted({", ".join(place(row)) for row in rows})
    remedy = ": give that budget" * any(Label.parse(row["gpu"]).setting != kind.setting for row in rows)
    return f", but on {' and '.join(places)}{remedy}" if places else ""


@contextmanager
def edit_log() -> Iterator[list[str]]:
    """The lines of results.tsv, to be edited in place while the file is locked."""
    path, keep_bytes = harness.RESULTS.resolve(), dict(encoding="utf-8", errors="surrogateescape")
    with harness.locked(path) as log:
        log.seek(0)
        before = log.read()
        lines = before.decode(**keep_bytes).split("\n")
        yield lines
        if (after := "\n".join(lines).encode(**keep_bytes)) != before:
            with prepare.new_file(path) as file:
                os.fchmod(file.fileno(), os.fstat(log.fileno()).st_mode & 0o777)
                file.write(after)


def numbered(lines: list[str], kind: Kind) -> dict[int, dict]:
    """The rows of a kind among the lines of the log, by line."""
    return {i: row for i, row in enumerate(map(harness.parse_row, lines)) if row and kind.holds(row)}


def with_status(line: str, status: str) -> str:
    fields = line.split("\t")
    fields[harness.COLUMNS.index("status")] = status
    return "\t".join(fields)


def decide(ideas: Collection[str], base: dict, kind: Kind) -> None:
    """base: a row of the reference. If ideas (commits) ran with its seed on its GPU, ended before it and beat it, their
    rows move to the end of the log, as `keep`."""
    with edit_log() as lines:
        like_base = base["gpu"], seed_of(base)
        rows = {i: row for i, row in numbered(lines, kind).items() if (row["gpu"], seed_of(row)) == like_base}
        last = {name_of(row): i for i, row in rows.items()}
        end = last.get(name_of(base), 0)
        ended = [i for i in sorted(last.values()) if i < end and rows[i]["commit"] in ideas]
        better = [i for i in ended if rows[i]["val_bpb"] < base["val_bpb"] and good([rows[i]], rows[i]["commit"])]
        *rest, empty = [line for i, line in enumerate(lines) if i not in better]  # the log ends with a line break
        lines[:] = [*rest, *(with_status(lines[i], "keep") for i in better), empty]


def discard_by_mean(runs: Collection[tuple[str, str]], base: str, kind: Kind) -> None:
    """Of ideas that ran with several seeds, discards those whose mean is not below that of `base` with the same seeds
    on the same GPU: one seed may be lucky. runs: see `name_of`."""
    with edit_log() as lines:
        rows = numbered(lines, kind)
        found = [i for i, row in rows.items() if row["status"] != "crash" and name_of(row) in runs]
        groups = grouped(found, lambda i: (rows[i]["gpu"], rows[i]["commit"]))
        for (gpu, commit), group in groups.items():
            own, other = (scores([rows[i] for i in some]) for some in (group, groups.get((gpu, base), [])))
            changes = [own[seed] - other[seed] for seed in own if seed in other]
            if commit != base and len(changes) > 1 and statistics.mean(changes) >= 0:
                for i in group:
                    lines[i] = with_status(lines[i], "discard")


def set_status(commit: str, kind: Kind, status: str) -> bool:
    """Sets a commit's status: `keep` in its last row, which moves behind later kept ones, or `discard` in all its rows.
    Returns whether it has a row."""
    with edit_log() as lines:
        rows = numbered(lines, kind)
        found = [i for i, row in rows.items() if good([row], commit)]
        for i in found[-1:] if status == "keep" else found:
            lines[i] = with_status(lines[i], status)
        later = [rows[i] for i in rows if found and i > found[-1] and rows[i]["status"] == "keep"]
        if status == "keep" and in_history(later):
            first = baseline([*rows.values()])["commit"] == commit  # the night's first kept row stays where it is
            line = lines[found[-1]] if first else lines.pop(found[-1])
            lines.insert(max(rows) + first, line)  # the last one is the reference
    return bool(found)


def keep(args: argparse.Namespace) -> None:
    """Sets a commit's status and prints the new reference."""
    commit, kind = commit_of(args.revision), kind_here(args.setting)
    status = "discard" if args.discard else "keep"
    if not set_status(commit, kind, status):
        has = elsewhere(good(harness.read_results(), commit), kind) or ": train it first"
        raise PrepareError(f"results.tsv has no result of {commit} on {kind}{has}")
    print(f"{status} {commit}; the next experiment starts from {reference(kind)}")
    if not in_history(good(kind.rows(), commit)):
        print(f"{commit} is on another branch: merge it, or it will not count")
