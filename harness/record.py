"""What night tells a run, and the files that a run leaves for night; when this process began."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path


def night_record() -> dict:
    """What `python -m night` tells a run, as JSON in the environment variable AUTORESEARCH_RUN; {} without night.

    commit, description: for the row, from when night started the run. log: log the run whatever its budget. score_test:
    score the test split, too. row: a file that gets a copy of the row. folder: where curve.tsv and summary.json go,
    logged or not. parent: the process that the run ends with. referee, logits, dataset: see harness/remote.py.
    """
    return json.loads(os.environ.get("AUTORESEARCH_RUN") or "{}")


def process_seconds() -> float:
    """Seconds since this process started, imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # starttime, since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def write_record(name: str, text: str, mode: str = "w") -> None:
    """Writes a file to the run's record folder, if night made one. A full disk costs the record, not the run."""
    with suppress(KeyError, OSError), open(Path(night_record()["folder"], name), mode) as file:
        file.write(text)
