"""A corpus of a few hundred documents in climbmix's layout, and what the tests do with folders and the command line."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import prepare

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [str(path.relative_to(ROOT)) for name in ("harness", "night") for path in ROOT.glob(f"{name}/*.*")]
FILES = ["train.py", "prepare.py", "kernels.py", *FOLDERS]
WORDS = "the of and to in is that it was for on with as naïve café größer 你好 🙂 1234 56 don't\n  if x == 1:\n"


def texts(seed: int, count: int = 60, words: int = 400) -> list[str]:
    """Documents of unequal length in a made-up language, with characters of one to four bytes."""
    random = np.random.RandomState(seed)
    return [" ".join(random.choice(WORDS.split(" "), random.randint(1, words))) for _ in range(count)]


def write_parquet(path: Path, documents: list, column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: documents}), path, row_group_size=25)


def write_corpus(folder: Path) -> Path:
    """Three train files and climbmix's files for test and validation, of seeds 0, 1, 2, 6541 and 6542."""
    for seed in (0, 1, 2, 6541, 6542):
        write_parquet(folder / f"shard_{seed:05d}.parquet", texts(seed))
    return folder


def copy_files(folder: Path) -> None:
    """The programs, as a clone has them."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())


def mostly_slow(names, *quick: str) -> list:
    """Parameters, of which only the quick ones run by default."""
    import pytest

    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


def told(row: dict) -> str:
    """A row of the log in short: `idea, seed 1 [killed]`. The usual seed is left out."""
    reason = f" [{row['reason']}]" if row["reason"] else ""
    return row["description"] + f", seed {row['seed']}" * (row["seed"] != 42) + reason


def tree(folder: Path) -> dict[str, bytes]:
    """Each file's content, without huggingface_hub's own notes."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if ".cache/" not in name}


def run_prepare(*args, cache: Path | str, clone: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    """The command line, in a fresh clone unless one is given."""
    with tempfile.TemporaryDirectory() as fresh:
        script = shutil.copy(ROOT / "prepare.py", clone or fresh)
        env = os.environ | {"AUTORESEARCH_CACHE": str(cache)} | env
        command = [sys.executable, "-B", script, *map(str, args)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def main_of_prepare(capsys, monkeypatch, *args: str) -> str:
    """The command line in this process; returns what it prints or, after `failed: `, the line that it ends with."""
    monkeypatch.setattr(sys, "argv", ["prepare.py", *args])
    try:
        prepare.main()
    except SystemExit as end:
        assert isinstance(end.code, str) and "\n" not in end.code and len(end.code) > 20
        return f"failed: {end.code}"
    return capsys.readouterr().out
