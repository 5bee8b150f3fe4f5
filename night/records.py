"""Records of runs: runs/<commit>-<seed>-<budget>/ has a run's log.txt, curve.tsv and summary.json.

`Board` shows those of the runs at work.
"""

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import prepare
from night.git import ROOT

RUNS = ROOT / "runs"


class Point(NamedTuple):
    """A line of curve.tsv. loss: nats per token, mean since the line before; lr: of the first parameter group."""

    step: float
    seconds: float
    tokens: float
    loss: float
    lr: float


def record_name(commit: str, seed: int, gpu: str | None, budget: str) -> str:
    """`74ab947-42-300s` or `74ab947-1-T4-62.4M`. gpu: that of --gpu; budget: as in the log."""
    return "-".join(filter(None, [commit, str(seed), gpu, budget.removesuffix(" tokens").replace(" ", "")]))


def folders(name: str) -> Iterator[Path]:
    """Where the record of a first run of that name goes, of a second one, ..., without end."""
    return (RUNS / (name if i == 1 else f"{name}_{i}") for i in itertools.count(1))


def new_record(commit: str, seed: int, gpu: str | None, budget: str) -> Path:
    """Makes the folder of a run; if it is a repeated one, _2, _3, ... ends its name."""
    RUNS.mkdir(exist_ok=True)  # fails if runs/ is a dangling link; otherwise the loop below would never end
    for folder in folders(record_name(commit, seed, gpu, budget)):
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def end_record(folder: Path, reason: str) -> None:
    """Marks a run without a summary as ended."""
    with suppress(OSError), (folder / "summary.json").open("x") as file:
        json.dump({"reason": reason}, file)


def record_of(row: dict) -> Path | None:
    """The record of the last run that a row may stand for, if there is one."""
    name = record_name(row["commit"], row["seed"], row["gpu"].partition(" as ")[2], row["budget"])
    last = None
    for folder in itertools.takewhile(Path.exists, folders(name)):
        if summary(folder).get("dataset", row["dataset"]) == row["dataset"]:  # it has none if the run was killed
            last = folder
    return last


def curve(folder: Path) -> list[Point]:
    """The points of curve.tsv, [] without one; skips a line that is still being written."""
    points = []
    with suppress(OSError):
        for line in (folder / "curve.tsv").read_text("utf-8", errors="replace").split("\n")[1:-1]:
            with suppress(ValueError, TypeError):
                points.append(Point(*(float(field or "nan") for field in line.split("\t"))))
    return points


def summary(folder: Path) -> dict:
    """The summary of a run; {} if there is none yet."""
    with suppress(ValueError):
        return json.loads(prepare.read(folder / "summary.json"))
    return {}


def run_seconds(rows: list[dict]) -> list[float]:
    """Seconds that the last run of each row trained, without rows that have no record."""
    found = [summary(folder).get("training_seconds") for folder in map(record_of, rows) if folder]
    return [number for number in found if number]


class Board:
    """Prints one line per active run every minute."""

    def __init__(self, total: int = 0):
        """total: number of runs; 0 if unknown."""
        self.total = total
        self.start = self.shown = time.monotonic()

    def update(self, records: list[Path], pending: int = 0) -> None:
        """records: of the active runs; pending: number of runs that have not ended."""
        now, done = time.monotonic(), self.total - pending
        if now - self.shown < 60:
            return
        self.shown = now
        lines = [line(folder) for folder in records if folder.exists()]
        if self.total:
            left = f", {(now - self.start) / done * pending / 60:.0f} min left" if done and pending else ""
            lines.append(f"{done} of {self.total} runs have ended{left}")
        print("\n".join(lines))


def line(folder: Path) -> str:
    """A run's name, step, loss, speed and seconds so far."""
    points = [point for point in curve(folder) if point.seconds > 0 and point.tokens > 0]
    if not points:
        return f"{folder.name:32} starts, {time.time() - folder.stat().st_ctime:.0f} s so far"
    last = points[-1]
    pace = f"{last.tokens / last.seconds:,.0f} tok/s, {last.seconds:.0f} s so far"
    return f"{folder.name:32} step {last.step:.0f}, loss {last.loss:.4f}, {pace}"
