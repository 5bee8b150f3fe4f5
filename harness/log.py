"""results.tsv: one row per run, and no row is lost. All reading and writing of it is here."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import harness
from harness.columns import COLUMNS, EMPTY, HEADER, LAYOUTS, format_row, identity, parse_row
from harness.journal import append, journal_of, remember, remembered, repair
from harness.record import night_record
from prepare import lock, new_file


def read_results(path: str | Path | None = None) -> list[dict]:
    """The rows of results.tsv, [] if there is none. Puts back rows that it has lost."""
    path, rows = Path(path or harness.RESULTS), []
    with suppress(OSError, ValueError):
        rows, *_ = parse_log(path.read_bytes().decode("utf-8", "surrogateescape"))
    if path.exists() and repair(rows, remembered(journal_of(path))):
        with suppress(OSError, ValueError), edit_log(path):
            pass
    return rows


def parse_log(text: str) -> tuple[list[dict], list[str], bool]:
    """The rows of a log, its other lines, and whether its header is today's. ValueError without a header."""
    header, *lines = text.removeprefix("\ufeff").removesuffix("\n").split("\n") if text else [HEADER]
    columns, rows, others = LAYOUTS.get(header.rstrip("\r")), [], []
    if not columns:
        raise ValueError(f"its first line must be `{' '.join(COLUMNS)}`, separated by tabs: put that there")
    for line in lines:
        if row := parse_row(line, columns):
            rows.append(row)
        else:
            others.append(line)
    return rows, others, columns == COLUMNS


@contextmanager
def edit_log(path: str | Path | None = None) -> Iterator[list[dict]]:
    """Yields the log's rows, to be changed in place; then writes them, first to the journal.

    A log that was moved away begins anew; any other gets back the rows that it has lost. If it cannot be read, the rows
    are the journal's. Raises OSError or ValueError, at the end, if it cannot be read or written.
    """
    path = Path(path or harness.RESULTS)
    journal, problem, rows = journal_of(path), None, []
    if not os.path.lexists(path) and remembered(journal):
        print(f"{path.name} is gone: a new one begins; the rows so far stay in {journal}", file=sys.stderr)
        remember(journal, [])
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "a+b", buffering=0))
            if not lock(file, patience=60):
                print(f"{path} has been locked for a minute: writing without the lock", file=sys.stderr)
            file.seek(0)
            data = file.read()
            rows, others, current = parse_log(data.decode("utf-8", "surrogateescape"))
        except (OSError, ValueError) as error:
            problem = error
        before = list(map(format_row, rows))
        if (count := repair(rows, remembered(journal))) and not problem:
            print(f"{path.name} has lost {count} rows, put back from {journal}: delete that to forget", file=sys.stderr)
        yield rows
        after = list(map(format_row, rows))
        remember(journal, rows)
        if problem:
            raise problem
        if current and after[: len(before)] == before:
            append(file, after[len(before) :] if data else [HEADER, *after])
        else:
            if not current:
                with new_file(copy := path.with_name(f"{path.name}.old-columns")) as old:
                    old.write(data)
                print(f"{path.name} gets a new header; {copy.name} is a copy of what it was", file=sys.stderr)
            replace(path, [HEADER, *after, *others])


def replace(path: Path, lines: list[str]) -> None:
    """In place: no other file can take the place of one that is mounted. The journal has all of it by now."""
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, len(data))  # on a full disk, fails before anything has changed
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def log_result(*, to_beat=None, report=False, path=None, **values) -> str:
    """Appends a row of these values; returns its status. Without a commit, commit and description are those of HEAD.

    `crash` if there is a reason; `report` for a report's row; `keep` if val_bpb is below to_beat (default: the lowest
    so far on that gpu and dataset with that budget, and with that seed if it has a score); otherwise `discard`. If a
    person has discarded the commit, its new rows are discarded, too; a person's keep holds for one row alone.
    """
    if "commit" not in values:
        values["commit"], values["description"] = harness.git_head()
    if values.get("reason"):
        values |= dict(val_bpb=0.0, memory_gb=0.0, tokens_M=0.0, test_bpb=None)
    status = "report" if report else "crash" if values.get("reason") else "discard"
    by = "run" if to_beat is None and not report else "night"
    row = parse_row(format_row(EMPTY | values | dict(status=status, by=by)))  # as it will be read
    with edit_for(row, path) as rows:
        same = comparable(rows, row)
        verdicts = [other["status"] for other in same if other["commit"] == row["commit"] and other["by"] == "person"]
        if status == "discard" and verdicts[-1:] == ["discard"]:
            row["by"] = "person"
        elif status == "discard" and row["val_bpb"] < (lowest(same, row["seed"]) if to_beat is None else to_beat):
            row["status"] = "keep"
        with suppress(KeyError, OSError):
            Path(night_record()["row"]).write_text(format_row(row), "utf-8")
        rows.append(row)
    return row["status"]


def comparable(rows: list[dict], row: dict) -> list[dict]:
    """The scored rows with the gpu, dataset and budget of `row`; of uncommitted files only for another such row."""
    same = [other for other in rows if all(other[key] == row[key] for key in ("gpu", "dataset", "budget"))]
    same = [other for other in same if not other["commit"].endswith("+") or row["commit"].endswith("+")]
    return [other for other in same if other["status"] in ("keep", "discard")]


def lowest(rows: list[dict], seed: int) -> float:
    rows = [other for other in rows if other["seed"] == seed] or rows
    return min((other["val_bpb"] for other in rows), default=math.inf)


def add_row(row: dict) -> None:
    """Appends a row unless it is there."""
    with edit_for(row) as rows:
        if identity(row) not in map(identity, rows):
            rows.append(row)


@contextmanager
def edit_for(row: dict, path: str | Path | None = None) -> Iterator[list[dict]]:
    """edit_log for a new row. If the file cannot take it, prints the row, which waits in the journal until it can."""
    path = Path(path or harness.RESULTS)
    try:
        with edit_log(path) as rows:
            yield rows
    except (OSError, ValueError) as error:
        journal = journal_of(path)
        waits = f"it waits in {journal}" if row in remembered(journal) else "it is nowhere else"
        print(f"{path} cannot take this row ({error}), {waits}:\n{format_row(row)}", file=sys.stderr, flush=True)
