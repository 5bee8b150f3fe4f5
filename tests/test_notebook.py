"""colab.ipynb: what git holds of it, where it takes the code from, and 'Run all' without a GPU."""

import io
import json
import os
import re
import shutil
import sys
import urllib.request
from pathlib import Path

import pytest
from small_corpus import ROOT, copy_files

import harness

NOTEBOOK = ROOT / "colab.ipynb"
CELLS = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
SOURCES = {cell["id"]: "".join(cell["source"]) for cell in CELLS}
SETTINGS: dict = {}
exec(SOURCES["parameters"], SETTINGS)


def test_git_holds_no_outputs_and_the_settings_of_a_run_that_counts():
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS if "outputs" in cell)
    assert (SETTINGS["SECONDS"], SETTINGS["DATA"], SETTINGS["KEEP_ON_DRIVE"]) == (None, "climbmix", False)


@pytest.mark.parametrize("document", ["README.md", "colab.ipynb", "pyproject.toml"])
def test_no_address_leads_to_a_repository_that_is_not_ours(document):
    """Whoever owns the name would run code in a reader's Colab. OWNER and NAME stand for the reader's fork."""
    text = (ROOT / document).read_text("utf-8").replace("github/OWNER/NAME/", "")
    assert not re.search(r"github\.com/autoresearch|colab\.research\.google\.com/(github|gist|drive)/", text)
    assert SETTINGS["REPOSITORY"] == ""


def install_cell(folder: Path, monkeypatch, **settings) -> dict:
    """Runs the cell that finds the code, with IPython's own lines turned into a list of what they would run."""
    ran: list = []
    source = re.sub(r"^( *)!(.*)$", r'\1ran.append(f"""\2""")', SOURCES["install"], flags=re.M)
    source = source.replace("/content", str(folder / "content"))
    names = SETTINGS | settings | {"ran": ran}
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    exec(source, names)
    return names


@pytest.mark.parametrize("where", [".", "uploaded", "content/uploaded", "content/drive/MyDrive/mounted"])
def test_a_folder_that_is_there_is_taken_and_nothing_is_cloned(where, tmp_path, monkeypatch):
    copy_files(tmp_path / where)
    names = install_cell(tmp_path, monkeypatch)
    assert Path.cwd() == tmp_path / where
    assert not any("git clone" in command for command in names["ran"])


def test_without_folder_and_address_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("COLAB_JUPYTER_IP", raising=False)
    with pytest.raises(AssertionError, match="URL of the repository into REPOSITORY"):
        install_cell(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("path", "repository"),
    [
        ("fileId=https%3A%2F%2Fgithub.com%2Fsomebody%2Ffork.of-it%2Fblob%2Fmain%2Fcolab.ipynb", "somebody/fork.of-it"),
        ("fileId=https%3A//github.com/somebody/fork/blob/main/colab.ipynb", "somebody/fork"),
        ("fileId=1aBcD", None),
    ],
)
def test_a_notebook_that_colab_opened_from_github_clones_what_it_came_from(path, repository, tmp_path, monkeypatch):
    def urlopen(url, **_):
        assert url == "http://127.0.0.1:9000/api/sessions"
        return io.BytesIO(json.dumps([{"path": path, "name": "colab.ipynb"}]).encode())

    monkeypatch.setenv("COLAB_JUPYTER_IP", "127.0.0.1")
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    if repository is None:
        with pytest.raises(AssertionError, match="REPOSITORY"):
            install_cell(tmp_path, monkeypatch)
        return
    (tmp_path / "autoresearch").mkdir()  # what git would make
    names = install_cell(tmp_path, monkeypatch)
    assert names["REPOSITORY"] == f"https://github.com/{repository}"
    assert names["ran"][0] == f"git clone -q --depth 50 https://github.com/{repository} autoresearch"


@pytest.mark.slow
def test_run_all_reaches_a_summary_a_text_and_a_picture_and_keeps_all_on_drive(tmp_path, monkeypatch):
    reason = "not in the extra [test]: 37 packages, 105 MB"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    import nbformat

    clone, drive, binaries = (tmp_path / name for name in ("clone", "drive", "bin"))
    shutil.copytree(ROOT / "tests", clone / "tests")
    copy_files(clone)
    drive.mkdir()
    where = dict(commit="abcdef0", gpu="cpu", dataset="embedded-0a1b2c3d", path=drive / "results.tsv")
    for val_bpb in (1.9, 1.8):  # an earlier session's
        harness.log_result(val_bpb=val_bpb, memory_gb=0.0, description=f"scored {val_bpb}", **where)
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
    assert "val_bpb:" in output("train") and "not logged" in output("train") and "The model writes:" in output("train")
    assert output("rows").splitlines()[1].startswith("1.800000  keep")
    assert any("image/png" in out.get("data", {}) for out in cells["picture"].outputs)
    assert "modelled T4" in output("t4")
    assert "no second GPU" in output("wave")
    assert {"cache", "results.tsv"} <= {path.name for path in drive.iterdir()}
    assert list(drive.glob("cache/embedded*/train_00000.bin"))
