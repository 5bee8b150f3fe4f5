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


def keep_winners(ideas: Collection[str], base: dict, kind: Kind) -> None:
    """Keeps ideas (commits) that ran with the seed of `base`, a row of the reference, ended before it and beat it:
    their rows move to the end of the log."""
    with harness.edit_log() as log:
        held = list(filter(kind.holds, log))
        rows = [row for row in held if row["seed"] == base["seed"]]
        last = {run_name(row): i for i, row in enumerate(rows)}
        end = last.get(run_name(base), 0)
        new = {*ideas} - kept_before(held, base["commit"])
        ended = [rows[i] for i in sorted(last.values()) if i < end and rows[i]["commit"] in new]
        better = [row for row in ended if good([row], row["commit"]) and row["val_bpb"] < base["val_bpb"]]
        move_to_end(log, change_status(better, "keep"))


def discard_by_mean(runs: Collection[tuple[str, int]], base: str, kind: Kind) -> None:
    """Discards ideas whose mean over several seeds is not below that of `base` with these: one seed may be lucky. runs:
    see `run_name`."""
    with harness.edit_log() as log:
        held = list(filter(kind.holds, log))
        rows = [row for row in held if run_name(row) in runs]
        for commit in {commit for commit, _ in runs} - kept_before(held, base) - {base}:
            changes = [after - before for before, after in pairs(rows, base, commit)]
            if len(changes) > 1 and statistics.mean(changes) >= 0:
                change_status(good(rows, commit), "discard")


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
