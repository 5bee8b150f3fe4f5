"""Rows of results.tsv: which belong together, night's verdicts and a person's, the commit to start from."""

import statistics
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import harness
import prepare
from harness import crashed
from night.git import commit_of, in_history
from night.pool import gpu_names
from prepare import PrepareError


class Kind(NamedTuple):
    """What comparable rows have in common: see `place`."""

    gpu: str
    budget: str
    dataset: str
    report: bool = False  # rows of a report, or of experiments

    def __str__(self) -> str:
        return ", ".join(self[:3])

    def rows(self) -> list[dict]:
        return [row for row in harness.read_results() if self.holds(row)]

    def holds(self, row: dict) -> bool:
        return place(row) == self[:3] and (row["status"] == "report") == self.report


def kind_here(args: Namespace, gpu: str = "") -> Kind:
    """The kind of row that a run with these options gets, on this machine's GPU unless another one is named."""
    gpu = gpu or (gpu_names(args.gpu) or ["cpu"])[0]
    return Kind(gpu + f" as {args.gpu}" * bool(args.gpu), args.budget, prepare.dataset_id())


def place(row: dict) -> tuple[str, str, str]:
    return row["gpu"], row["budget"], row["dataset"]


def run_name(row: dict) -> tuple[str, int]:
    """What tells runs of a kind apart."""
    return row["commit"], row["seed"]


def experiments() -> list[dict]:
    """The rows of results.tsv but those of reports, and crashes whose run has a later row."""
    rows = [row for row in harness.read_results() if row["status"] != "report"]
    last = {(*run_name(row), *place(row)): i for i, row in enumerate(rows)}
    return [row for i, row in enumerate(rows) if not crashed(row) or i in last.values()]


def grouped(rows: Iterable[dict], key: Callable) -> dict:
    """Lists of rows by key(row), in the order of their first rows."""
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def one_seed(rows: list[dict]) -> list[dict]:
    """The rows with the seed that most scores have."""
    seed = statistics.mode([row["seed"] for row in rows if not crashed(row)] or [harness.SEED])
    return [row for row in rows if row["seed"] == seed]


def baseline(rows: list[dict]) -> dict:
    """The first kept row, as a wave's ideas may end before it; else the first score, else the first crash."""
    return min(rows, key=lambda row: (row["status"] != "keep", crashed(row)))


def good(rows: list[dict], commit: str) -> list[dict]:
    """Rows of a commit that did not crash."""
    return [row for row in rows if row["commit"] == commit and not crashed(row)]


def scores(rows: list[dict], split: str = "val") -> dict[int, float]:
    """Bits per byte of a split by seed, from the rows that have it; the last of a seed counts."""
    found = [(row["seed"], row[f"{split}_bpb"]) for row in rows if not crashed(row)]
    return {seed: bpb for seed, bpb in found if bpb is not None}


def pairs(rows: list[dict], first: str, last: str, split: str = "val") -> list[tuple[float, float]]:
    """Scores of two commits with the same seeds."""
    before, after = (scores(good(rows, commit), split) for commit in (first, last))
    return [(before[seed], after[seed]) for seed in before if seed in after]


def reference(kind: Kind) -> str:
    """The commit that the next experiment of a kind starts from: that of the last kept row, else of the first score, in
    HEAD's history. Without any: the reference of the five-minute runs, else HEAD."""
    for each in (kind, five_minutes(kind)):
        rows = [row for row in in_history(each.rows()) if not crashed(row)]
        if rows:
            return (kept(rows) or rows[:1])[-1]["commit"]
    return commit_of("HEAD")


def kept(rows: list[dict]) -> list[dict]:
    """The kept rows; the last one is that of the reference. If an earlier commit runs again, with another seed, its new
    `keep` does not make it the reference."""
    rows = [row for row in rows if row["status"] == "keep"]
    first = {row["commit"]: row for row in reversed(rows)}
    return [row for row in rows if row is first[row["commit"]] or row["by"] != "run"]


def kept_before(rows: list[dict], commit: str) -> set[str]:
    """The commits in HEAD's history that were kept before a commit's first row: they are no ideas to judge by it."""
    rows = in_history(rows)
    first = next((i for i, row in enumerate(rows) if row["commit"] == commit), len(rows))
    return {row["commit"] for row in rows[:first] if row["status"] == "keep"}


def five_minutes(kind: Kind) -> Kind:
    """Runs on the same GPU without options."""
    return kind._replace(gpu=kind.gpu.partition(" as ")[0], budget=harness.budget_name())


def change_status(rows: Iterable[dict], status: str, by: str = "night") -> list[dict]:
    """Sets the status of rows, unless a person has; returns those that have it now."""
    for row in rows:
        if by == "person" or row["by"] != "person":
            row |= {"status": status, "by": by}
    return [row for row in rows if row["status"] == status]


def move_to_end(log: list[dict], rows: list[dict]) -> None:
    """As the last kept row is the reference."""
    log[:] = [other for other in log if not any(other is row for row in rows)] + rows


def judge(runs: Collection[tuple[str, int]], base: str, kind: Kind) -> None:
    """Keeps the ideas among these runs (see `run_name`) whose mean is below that of `base` with the same seeds, and
    discards the others. Rows that become a `keep` move to the end of the log."""
    with harness.edit_log() as log:
        held = list(filter(kind.holds, log))
        rows = [row for row in held if run_name(row) in runs]
        no_ideas = {base} | kept_before(held, base)
        for commit in dict.fromkeys(row["commit"] for row in rows if row["commit"] not in no_ideas):
            if changes := [after - before for before, after in pairs(rows, base, commit)]:
                status = "keep" if statistics.mean(changes) < 0 else "discard"
                changed = change_status([row for row in good(rows, commit) if row["status"] != status], status)
                move_to_end(log, changed if status == "keep" else [])


def set_status(commit: str, kind: Kind, status: str, by: str = "night") -> bool:
    """Sets `keep` in a commit's last row, which moves behind later kept ones, or `discard` in all its rows. Returns
    whether it has one."""
    with harness.edit_log() as log:
        rows = list(filter(kind.holds, log))
        found = good(rows, commit)
        changed = change_status(found[-1:] if status == "keep" else found, status, by)
        for row in changed if status == "keep" else []:
            if in_history([other for other in rows[rows.index(row) + 1 :] if other["status"] == "keep"]):
                move_to_end(log, [row])
    return bool(found)


def keep(args: Namespace) -> None:
    """Sets a commit's status for good and prints the new reference."""
    kind, commit, status = kind_here(args), commit_of(args.revision), "discard" if args.discard else "keep"
    if not set_status(commit, kind, status, by="person"):
        raise PrepareError(f"results.tsv has no result of {commit} on {kind}")
    print(f"{status} {commit}; the next experiment starts from {reference(kind)}")
    if not args.discard and not in_history(good(kind.rows(), commit)):
        print(f"{commit} is on another branch: merge it, or it will not count")


def print_reference(args: Namespace) -> None:
    kind = kind_here(args)
    print(reference(kind))
    if not (kind.rows() or five_minutes(kind).rows()) and experiments():
        print(f"night: this is HEAD, as results.tsv has no row on {kind}", file=sys.stderr)
