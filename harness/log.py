"""results.tsv: one row per run."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import harness
from harness.record import night_record
from prepare import lock

SEED = 42  # unless --seed is given
COLUMNS = ["commit", "val_bpb", "memory_gb", "status", "description", "gpu", "dataset", "tokens_M"]
HEADER = "\t".join(COLUMNS)
DIFFERS = " (train.py differs)"  # ends the subject of a row whose train.py had uncommitted changes


class Description(NamedTuple):
    """The description column."""

    subject: str  # of the commit; may end in DIFFERS
    seed: int = SEED  # written unless it is the default
    test_bpb: float | None = None
    reason: str = ""  # why it crashed

    @classmethod
    def parse(cls, row: dict) -> Description:
        pattern = r"(.*?)(?:, seed (\d+))?(?:, test (\d+\.\d{6}))?"
        pattern += r" ?(?:\[([^[]*)\])?" if row["status"] == "crash" else "()"
        subject, seed, test, reason = re.fullmatch(pattern, row["description"]).groups()
        return cls(subject, int(seed or SEED), test and float(test), reason or "")

    def __str__(self) -> str:
        text = self.subject if self.seed == SEED else f"{self.subject}, seed {self.seed}"
        text += "" if self.test_bpb is None else f", test {self.test_bpb:.6f}"
        return f"{text} [{self.reason}]" if self.reason else text


def plain_subject(subject: str) -> str:
    """A commit's subject whose end does not look like what Description adds."""
    return re.sub(r", (seed \d+|test \d+\.\d{6})$", r"; \1", subject)


def budget_name(seconds: float | None, tokens: int | None, gpu: str | None) -> str:
    """The command line's settings as a suffix for the GPU's name: ` as T4, 38.6 M tokens`, `, 60 s` or ``."""
    name = f" as {gpu}" if gpu else ""
    if tokens is not None:
        return f"{name}, {tokens / 1e6:g} M tokens"
    return name if seconds is None else f"{name}, {seconds:g} s"


def read_results(path: str | Path | None = None) -> list[dict]:
    """The rows of results.tsv, numbers as floats. Skips lines that are not rows; [] without a file."""
    with suppress(OSError):
        lines = Path(path or harness.RESULTS).read_text("utf-8", errors="replace").split("\n")
        return [row for row in map(parse_row, lines) if row]
    return []


def parse_row(line: str) -> dict | None:
    with suppress(ValueError):
        row = dict(zip(COLUMNS, line.split("\t"), strict=True))
        numbers = {key: float(row[key]) for key in ("val_bpb", "memory_gb", "tokens_M")}
        if row["status"] in ("keep", "discard", "crash") and all(map(math.isfinite, numbers.values())):
            return row | numbers


def log_result(
    *, val_bpb, memory_gb, gpu, dataset, tokens_M=0.0, reason="", test_bpb=None, to_beat=None, commit=None,
    description="", path=None,
) -> str:  # fmt: skip
    """Appends one row to results.tsv, or prints it to stderr if the file cannot take it. Returns the row's status.

    `crash` if there is a reason; `keep` if val_bpb is below to_beat (default: the lowest so far on that gpu and
    dataset); otherwise `discard`. Without a commit, commit and description are those of HEAD.
    """
    path = Path(path or harness.RESULTS)
    if commit is None:
        commit, description = harness.git_head()
    if reason:
        reason = reason.replace("[", "(").replace("]", ")")
        val_bpb, memory_gb, tokens_M, test_bpb = 0.0, 0.0, 0.0, None
    text = str(Description(description, test_bpb=test_bpb, reason=reason))
    commit, text, gpu, dataset = map(clean, (commit[:7], text, gpu, dataset))

    def judge() -> str:
        same = [row for row in read_results(path) if (row["gpu"], row["dataset"]) == (gpu, dataset)]
        best = min((row["val_bpb"] for row in same if row["status"] != "crash"), default=math.inf)
        better = round(val_bpb, 6) < (best if to_beat is None else to_beat)
        return "crash" if reason else "keep" if better else "discard"

    def row(status: str) -> str:
        return "\t".join((commit, f"{val_bpb:.6f}", f"{memory_gb:.1f}", status, text, gpu, dataset, f"{tokens_M:.1f}"))

    try:
        with locked(path) as file:  # reading the rows and appending this one are one step
            status = judge()
            append_row(file, row(status))
    except (OSError, ValueError) as error:
        status = judge()
        print(f"{path} cannot take this row ({error}):\n{row(status)}", file=sys.stderr, flush=True)
    return status


@contextmanager
def locked(path: Path) -> Iterator:
    """The log, open for appending, under an exclusive lock (or without one after a minute's wait)."""
    while True:
        with open(path, "a+b", buffering=0) as file:
            if not lock(file, patience=60):
                print(f"{path} has been locked for a minute: writing this row without the lock", file=sys.stderr)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return  # else `night keep` replaced the file while we waited


def append_row(file, line: str) -> None:
    """Appends the whole line or nothing; hands a copy to night. Raises ValueError for another header."""
    header = HEADER.encode()
    file.seek(0)
    text = file.read()
    if text and text.split(b"\n")[0].rstrip() != header:
        raise ValueError(f"its first line must be `{' '.join(COLUMNS)}`, separated by tabs: put that there")
    before = b"" if text.endswith(b"\n") else b"\n" if text else header + b"\n"
    data = before + f"{line}\n".encode()
    if file.write(data) < len(data):
        file.truncate(len(text))
        raise OSError("the disk is full")
    with suppress(KeyError, OSError):
        Path(night_record()["row"]).write_text(line, "utf-8")
    os.fsync(file.fileno())


def clean(field: str) -> str:
    """One line of printable text. Double quotes become single: pandas would see a quoted field."""
    return "".join(c if c.isprintable() else " " for c in str(field)).replace('"', "'").strip()
