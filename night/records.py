"""Records of runs: runs/<commit>-<seed>-<budget>/ has log.txt, curve.tsv and summary.json of the last such run."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import prepare
from night.git import ROOT

RUNS = ROOT / "runs"


def record_folder(commit: str, seed: int, gpu: str | None, budget: str) -> Path:
    """`runs/74ab947-42-300s` or `runs/74ab947-1-T4-62.4M`. gpu: that of --gpu; budget: as in the log."""
    return RUNS / "-".join(filter(None, [commit, str(seed), gpu, budget.removesuffix(" tokens").replace(" ", "")]))


def new_record(commit: str, seed: int, gpu: str | None, budget: str) -> Path:
    """Makes an empty folder for a run, in place of what an earlier one has left."""
    folder = record_folder(commit, seed, gpu, budget)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def record_of(row: dict) -> Path | None:
    """The record of the last run that a row may stand for, if there is one."""
    folder = record_folder(row["commit"], row["seed"], row["gpu"].partition(" as ")[2], row["budget"])
    same = summary(folder).get("dataset", row["dataset"]) == row["dataset"]  # there is none if the run was killed
    return folder if folder.exists() and same else None


def summary(folder: Path) -> dict:
    """The summary of a run; {} if it has none."""
    with suppress(ValueError):
        return json.loads(prepare.read(folder / "summary.json"))
    return {}
