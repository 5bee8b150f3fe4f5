"""What changes a row's status after its run: night's verdicts, and a person's word, which stands."""

import argparse
import statistics
from collections.abc import Collection, Iterable

import harness
from night.git import commit_of, in_history
from night.rows import Kind, good, kept_before, kind_here, pairs, reference, run_name
from prepare import PrepareError


def change_status(rows: Iterable[dict], status: str, by: str = "night") -> list[dict]:
    """Sets the status of rows, unless a person has; returns those that have it now. Nothing else changes a status."""
    for row in rows:
        if by == "person" or row["by"] != "person":
            row |= {"status": status, "by": by}
    return [row for row in rows if row["status"] == status]


def move_to_end(log: list[dict], rows: list[dict]) -> None:
    """The last kept row is the reference."""
    log[:] = [other for other in log if not any(other is row for row in rows)] + rows


def judge(runs: Collection[tuple[str, int]], base: str, kind: Kind) -> None:
    """Keeps the ideas among these runs (see `run_name`) whose mean is below that of `base` with the same seeds, and
    discards the others. Rows that are kept from now on move to the end of the log."""
    with harness.edit_log() as log:
        held = list(filter(kind.holds, log))
        rows = [row for row in held if run_name(row) in runs]
        ideas = dict.fromkeys(row["commit"] for row in rows if row["commit"] != base)
        for commit in [commit for commit in ideas if commit not in kept_before(held, base)]:
            if changes := [after - before for before, after in pairs(rows, base, commit)]:
                status = "keep" if statistics.mean(changes) < 0 else "discard"
                changed = change_status([row for row in good(rows, commit) if row["status"] != status], status)
                move_to_end(log, changed if status == "keep" else [])


def set_status(commit: str, kind: Kind, status: str, by: str = "night") -> bool:
    """Sets a commit's status: `keep` in its last row, which moves behind later kept ones, or `discard` in all its rows.
    Returns whether it has a row."""
    with harness.edit_log() as log:
        rows = list(filter(kind.holds, log))
        found = good(rows, commit)
        changed = change_status(found[-1:] if status == "keep" else found, status, by)
        for row in changed if status == "keep" else []:
            if in_history([other for other in rows[rows.index(row) + 1 :] if other["status"] == "keep"]):
                move_to_end(log, [row])
    return bool(found)


def keep(args: argparse.Namespace) -> None:
    """Sets a commit's status for good and prints the new reference."""
    kind = kind_here(args)
    commit = commit_of(args.revision)
    status = "discard" if args.discard else "keep"
    if not set_status(commit, kind, status, by="person"):
        raise PrepareError(f"results.tsv has no result of {commit} on {kind}")
    print(f"{status} {commit}; the next experiment starts from {reference(kind)}")
    if not args.discard and not in_history(good(kind.rows(), commit)):
        print(f"{commit} is on another branch: merge it, or it will not count")
