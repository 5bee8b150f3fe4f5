"""What discarded, crashed and killed runs have left."""

import argparse
import os
import re
import shutil
import tempfile
from pathlib import Path

from night import records
from night.rows import experiments

SCRATCH = "night-"  # begins the names of temporary folders; the number of the process that owns one follows


def scratch_folder() -> str:
    """A new temporary folder of this process."""
    return tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir="/tmp")  # Ray's sockets need a short path


def clean(args: argparse.Namespace) -> None:
    """Lists the records of commits that were not kept, and folders of processes that have ended; deletes on --yes."""
    rows = experiments()
    kept = {row["commit"] for row in rows if row["status"] == "keep"} | {row["commit"] for row in rows[:1]}
    at_work = records.running()
    folders = [path for path in sorted(records.RUNS.glob("*-*/")) if path.name.split("-")[0] not in kept]
    folders = [path for path in folders if path not in at_work] + abandoned()
    total = 0
    for folder in folders:
        size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
        total += size
        print(f"{size / 1e6:10.3f} MB  {folder}")
        if args.yes:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{total / 1e6:10.3f} MB in {len(folders)} folders" + (": deleted" if args.yes else "; --yes deletes them"))


def abandoned() -> list[Path]:
    """Temporary folders of this user whose process has ended: checkouts, and Ray's sessions in them."""
    found = []
    for path in Path("/tmp").glob(f"{SCRATCH}*-*/"):
        owner = re.match(rf"{SCRATCH}(\d+)-", path.name)
        if owner and path.owner() == Path("/proc/self").owner() and not Path("/proc", owner[1]).exists():
            found.append(path)
    return sorted(found)
