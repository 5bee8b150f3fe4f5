"""The journal of results.tsv: a file in the git directory, out of reach of git reset, stash and checkout.

Only ever appended to: each row as it is logged and, whenever rows change, a header and all rows. The rows after the
last header are the log as it should be.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import subprocess
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from harness.columns import HEADER, format_row, identity, parse_row
from harness.git import run_git


@functools.cache
def journal_of(log: Path) -> Path:
    """The path of a log's journal, in the git directory of its worktree; /dev/null without git."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        out = run_git("rev-parse", "--show-prefix", "--git-path", ".", cwd=log.parent, timeout=10).stdout
        prefix, folder = os.fsdecode(out).removesuffix("\n").split("\n")
        return Path(log.parent, folder, "-".join([*Path(prefix).parts, f"{log.name}.journal"])).resolve()
    return Path(os.devnull)


def remembered(journal: Path) -> list[dict]:
    """The rows of the log as it should be."""
    with suppress(OSError):
        text = journal.read_text("utf-8", "surrogateescape").rpartition(f"{HEADER}\n")[2]
        return [row for row in map(parse_row, text.split("\n")) if row]
    return []


def remember(journal: Path, rows: list[dict]) -> None:
    """Makes these the log as it should be."""
    before, after = (list(map(format_row, some)) for some in (remembered(journal), rows))
    more = before and after[: len(before)] == before
    with suppress(OSError), open(journal, "ab+", buffering=0) as file:
        append(file, after[len(before) :] if more else [HEADER, *after])


def append(file, lines: list[str]) -> None:
    """Appends lines, none of them to half a line, and waits until they are on disk. OSError if not all fit."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read(1) not in (b"", b"\n"):
        lines = ["", *lines]
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    if file.write(data) < len(data):
        file.truncate(size)
        raise OSError(errno.ENOSPC, "the disk is full")
    os.fsync(file.fileno())


def repair(log: list[dict], journal: list[dict]) -> int:
    """Puts back the rows that a log has lost, and each status that a person had decided; returns how many rows that
    were. Also puts all rows in the journal's order, as somebody may have sorted them. A log with rows, but none of the
    journal's, is another log that somebody put there: it stays as it is."""
    found = defaultdict(list)  # the log's rows; some can be alike
    for row in log:
        found[identity(row)].append(row)
    if log and not any(identity(row) in found for row in journal):
        return 0
    ordered, restored = [], 0
    for row in journal:
        if not found[identity(row)]:
            ordered.append(row)
            restored += 1
            continue
        ordered.append(own := found[identity(row)].pop(0))
        if row["by"] == "person" and own["by"] != "person":
            own |= {key: row[key] for key in ("status", "by")}
            restored += 1
    log[:] = itertools.chain(ordered, *found.values())
    return restored
