"""Records of runs: runs/<commit>-<seed>-<budget>/ has a run's log.txt, curve.tsv and summary.json."""

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import prepare
from harness import crashed
from night.git import ROOT

RUNS = ROOT / "runs"


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


def record_of(row: dict) -> Path | None:
    """The record of the last run that a row may stand for, if there is one."""
    name = record_name(row["commit"], row["seed"], row["gpu"].partition(" as ")[2], row["budget"])
    last = None
    for folder in itertools.takewhile(Path.exists, folders(name)):
        if summary(folder).get("dataset", row["dataset"]) == row["dataset"]:  # it has none if the run was killed
            last = folder
    return last


def summary(folder: Path) -> dict:
    """The summary of a run; {} if it has none."""
    with suppress(ValueError):
        return json.loads(prepare.read(folder / "summary.json"))
    return {}


def paces(rows: list[dict]) -> list[float]:
    """Seconds per million tokens of the last run of each row, without crashes and rows that have no record."""
    found = [(row["tokens_M"], record_of(row)) for row in rows if row["tokens_M"] and not crashed(row)]
    seconds = [(tokens, summary(folder).get("training_seconds")) for tokens, folder in found if folder]
    return [number / tokens for tokens, number in seconds if number]
