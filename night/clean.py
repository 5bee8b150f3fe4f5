"""Cleans up after discarded, crashed and killed runs."""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import prepare
from night import records
from night.checkout import OWNER, SCRATCH
from night.rows import experiments


def scratch_folder() -> str:
    """A new temporary folder of this process."""
    folder = tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir="/tmp")
    Path(folder, OWNER).write_text(str(os.getpid()))
    return folder


def clean(args: argparse.Namespace) -> None:
    """Lists records of commits that were not kept, and temporary folders of dead processes; --yes deletes them."""
    kept = {row["commit"] for i, row in enumerate(experiments()) if row["status"] == "keep" or not i}
    at_work = {records.first_name(path) for path in records.running(3600)}  # a slow evaluation is silent for minutes
    folders = [path for path in sorted(records.RUNS.glob("*-*/")) if path.name.split("-")[0] not in kept]
    folders = [path for path in folders if records.first_name(path) not in at_work] + abandoned()
    sizes = [sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) for folder in folders]
    for folder, size in zip(folders, sizes, strict=True):
        print(f"{size / 1e6:10.3f} MB  {folder}")
        if args.yes:
            shutil.rmtree(folder, ignore_errors=True)
    done = ": deleted" if args.yes else "; --yes deletes them"
    print(f"{sum(sizes) / 1e6:10.3f} MB in {len(folders)} folders{done}")


def abandoned() -> list[Path]:
    """This user's temporary folders whose owner has ended: checkouts."""
    owners = {path: prepare.read(path / OWNER) for path in sorted(Path("/tmp").glob(f"{SCRATCH}*/"))}
    found = [path for path, pid in owners.items() if pid.isdigit() and not Path("/proc", pid).exists()]
    return [path for path in found if path.exists() and path.stat().st_uid == os.getuid()]  # others come and go
