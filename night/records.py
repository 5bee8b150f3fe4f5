"""Records of runs: runs/<commit>-<seed>-<budget>/ holds a run's log.txt, its curve.tsv and its summary.json."""

import itertools
import json
import math
import re
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import harness
import prepare
from harness import Description, Label
from night.rows import ROOT

RUNS = ROOT / "runs"
QUIET = 120  # seconds without a change, after which a record without a summary is that of a killed run
JUMP = 0.3  # nats per token


class Point(NamedTuple):
    """A line of curve.tsv. loss: in nats per token, the mean since the line before; lr: of the first group."""

    step: float
    seconds: float
    tokens: float
    loss: float
    lr: float


def folder_name(commit: str, seed: int | None, setting: str) -> str:
    """`74ab947-42-300s` or `74ab947-1-T4-62.4M`. setting: as harness.budget_name has it."""
    gpu, budget = re.fullmatch(r"(?: as (\w+))?(?:, (.+))?", setting).groups()
    budget = re.sub(" (M|s).*", r"\1", budget or f"{prepare.TIME_BUDGET} s")
    return "-".join(filter(None, [commit, str(harness.SEED if seed is None else seed), gpu, budget]))


def new_folder(name: str) -> Path:
    """A new folder of that name; of a repeated run it ends in .2, .3 and so on."""
    RUNS.mkdir(exist_ok=True)  # fails for a link to nowhere, where each name below would seem to exist
    for i in itertools.count(1):
        folder = RUNS / (name if i == 1 else f"{name}.{i}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def folders(row: dict) -> list[Path]:
    """The records of the runs of a row, the last one first."""
    name = folder_name(row["commit"], Description.parse(row).seed, Label.parse(row["gpu"]).setting)
    found = [*RUNS.glob(name), *RUNS.glob(f"{name}.*")]
    return sorted(found, key=lambda folder: int(folder.name[len(name) + 1 :] or 1), reverse=True)


def curve_of(row: dict) -> list[Point]:
    """That of its last run."""
    return [point for folder in folders(row)[:1] for point in curve(folder)]


def curve(folder: Path) -> list[Point]:
    """Its points, [] if there are none; a line that is being written is left out."""
    points = []
    with suppress(OSError):
        for line in (folder / "curve.tsv").read_text("utf-8", errors="replace").split("\n")[1:-1]:
            with suppress(ValueError, TypeError):
                points.append(Point(*(float(field or "nan") for field in line.split("\t"))))
    return points


def summary(folder: Path) -> dict:
    """What the run printed at its end; {} if it was killed before."""
    with suppress(ValueError):
        return json.loads(prepare.read(folder / "summary.json"))
    return {}


def training_seconds(rows: list[dict]) -> float:
    """Median of the last runs of rows; NaN if they have left no records."""
    found = [summary(folder).get("training_seconds") for row in rows for folder in folders(row)[:1]]
    return statistics.median([seconds for seconds in found if seconds] or [math.nan])


def budget(folder: Path) -> tuple[str, float]:
    """`tokens` or `seconds`, and how many."""
    number, unit = re.search(r"-(\d[\d.]*(?:e[+-]\d+)?)(M|s)(?:\.\d+)?$", folder.name).groups()
    return ("tokens", float(number) * 1e6) if unit == "M" else ("seconds", float(number))


def running(quiet: float = QUIET) -> list[Path]:
    """Records that are being written, the oldest first. quiet: seconds without a change that one may have."""
    found = [folder for folder in RUNS.glob("*-*/") if not (folder / "summary.json").exists()]
    found = [folder for folder in found if time.time() - last_change(folder) < quiet]
    return sorted(found, key=lambda folder: folder.stat().st_ctime)


def last_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))


def jump(points: list[Point]) -> float | None:
    """Where, as a share of the run, the loss rises most after the first tenth, if by more than JUMP; else None.

    Medians of five points are compared, and three times what it usually moves from one point to the next is added to
    JUMP: in a short run a point is the loss of a single batch.
    """
    if len(points) < 40:
        return None
    points = points[len(points) // 10 :]
    losses = [point.loss for point in points]
    usual = statistics.median(abs(b - a) for a, b in itertools.pairwise(losses))
    middle = [statistics.median(losses[i : i + 5]) for i in range(len(losses) - 4)]
    rise, i = max((middle[i] - middle[i - 5], i) for i in range(5, len(middle)))
    return points[i].step / points[-1].step if rise > JUMP + 3 * usual else None
