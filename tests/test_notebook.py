"""colab.ipynb: what git holds of it, and 'Run all' without a GPU."""

import json
import os
import shutil
import sys

import pytest
from small_corpus import ROOT

import prepare

NOTEBOOK = ROOT / "colab.ipynb"
CELLS = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
SETTINGS: dict = {}
exec(next("".join(cell["source"]) for cell in CELLS if cell["id"] == "parameters"), SETTINGS)


def test_git_holds_no_outputs_and_the_settings_of_a_run_that_counts():
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS if "outputs" in cell)
    assert (SETTINGS["SECONDS"], SETTINGS["DATA"], SETTINGS["KEEP_ON_DRIVE"]) == (None, "climbmix", False)


def test_badge_in_the_readme_opens_it():
    repository = SETTINGS["REPOSITORY"].removeprefix("https://github.com/")
    badge = f"https://colab.research.google.com/github/{repository}/blob/main/colab.ipynb"
    assert badge in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_run_all_reaches_a_summary_a_picture_and_a_sample_and_keeps_all_on_drive(tmp_path, monkeypatch):
    reason = "not in the extra [test]: 37 packages, 105 MB"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    import nbformat

    clone, drive, binaries = (tmp_path / name for name in ("clone", "drive", "bin"))
    shutil.copytree(ROOT / "tests", clone / "tests")
    for name in ("prepare.py", "train.py", "kernels.py"):
        shutil.copy(ROOT / name, clone)
    drive.mkdir()
    where = dict(commit="abcdef0", gpu="cpu", dataset="embedded-0a1b2c3d", path=drive / "results.tsv")
    for val_bpb in (1.9, 1.8):  # an earlier session's
        prepare.log_result(val_bpb=val_bpb, memory_gb=0.0, description=f"scored {val_bpb}", **where)
    (clone / "google" / "colab").mkdir(parents=True)
    (clone / "google" / "colab" / "drive.py").write_text("def mount(path): assert path == '/content/drive'\n")
    binaries.mkdir()
    (binaries / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (binaries / "python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path / "cache"))

    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    cells = {cell["id"]: cell for cell in notebook.cells}
    cells["parameters"].source += f"\nSECONDS, DATA, KEEP_ON_DRIVE, DRIVE = 3, 'embedded', True, {str(drive)!r}\n"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(clone)}}).execute()

    def output(cell: str) -> str:
        return "".join(out.get("text", "") for out in cells[cell].outputs)

    assert "compute capability" in output("gpu") or "no GPU" in output("gpu")
    assert "ready: embedded-" in output("prepare")
    assert "val_bpb:" in output("train") and "not logged" in output("train")
    assert output("rows").splitlines()[1].startswith("1.800000  keep")
    assert any("image/png" in out.get("data", {}) for out in cells["picture"].outputs)
    assert output("sample").startswith("Once upon a time")
    assert "modelled T4" in output("t4")
    assert {"cache", "results.tsv", "model.safetensors"} <= {path.name for path in drive.iterdir()}
    assert list(drive.glob("cache/embedded*/train_00000.bin"))
