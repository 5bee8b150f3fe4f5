"""colab.ipynb: what git holds of it, where it takes the code from, and what it keeps on Drive."""

import io
import json
import os
import re
import shutil
import sys
import types
import urllib.request
from pathlib import Path

import pytest
from small_corpus import ROOT, copy_files

CELLS = json.loads((ROOT / "colab.ipynb").read_text("utf-8"))["cells"]
SOURCES = {cell["id"]: "".join(cell["source"]) for cell in CELLS}
SETTINGS: dict = {}
exec(SOURCES["parameters"], SETTINGS)


def test_git_holds_no_outputs_and_the_settings_of_a_run_that_counts():
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS if "outputs" in cell)
    assert (SETTINGS["SECONDS"], SETTINGS["DATA"], SETTINGS["KEEP_ON_DRIVE"]) == (None, "climbmix", False)


def test_no_address_leads_to_a_repository_that_is_not_ours():
    """Whoever owns the name would run code in a reader's Colab."""
    for document in ("README.md", "colab.ipynb", "pyproject.toml"):
        text = (ROOT / document).read_text("utf-8")
        assert not re.search(r"github\.com/autoresearch|colab\.research\.google\.com/(github|gist|drive)/", text)
    assert SETTINGS["REPOSITORY"] == ""


def install_cell(folder: Path, monkeypatch) -> dict:
    """Runs the cell that finds the code, with IPython's own lines turned into a list of what they would run."""
    names = SETTINGS | {"ran": []}
    source = re.sub(r"^( *)!(.*)$", r'\1ran.append(f"""\2""")', SOURCES["install"], flags=re.M)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    exec(source.replace("/content", str(folder / "content")), names)
    return names


@pytest.mark.parametrize("where", [".", "uploaded", "content/drive/MyDrive/mounted"])
def test_a_folder_that_is_there_is_taken_and_nothing_is_cloned(where, tmp_path, monkeypatch):
    copy_files(tmp_path / where)
    names = install_cell(tmp_path, monkeypatch)
    assert Path.cwd() == tmp_path / where and not any("git clone" in command for command in names["ran"])


@pytest.mark.parametrize(
    ("path", "repository"),
    [
        ("fileId=https%3A%2F%2Fgithub.com%2Fsomebody%2Ffork.of-it%2Fblob%2Fmain%2Fcolab.ipynb", "somebody/fork.of-it"),
        ("fileId=1aBcD", None),
        (None, None),  # not in Colab
    ],
)
def test_the_repository_that_colab_opened_the_notebook_from_is_cloned(path, repository, tmp_path, monkeypatch):
    def urlopen(url, **_):
        assert url == "http://127.0.0.1:9000/api/sessions"
        return io.BytesIO(json.dumps([{"path": path, "name": "colab.ipynb"}]).encode())

    monkeypatch.delenv("COLAB_JUPYTER_IP", raising=False)
    if path:
        monkeypatch.setenv("COLAB_JUPYTER_IP", "127.0.0.1")
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    if repository is None:
        with pytest.raises(AssertionError, match="URL of the repository into REPOSITORY"):
            install_cell(tmp_path, monkeypatch)
        return
    (tmp_path / "autoresearch").mkdir()  # what git would make
    names = install_cell(tmp_path, monkeypatch)
    assert names["ran"][0] == f"git clone -q --depth 50 https://github.com/{repository} autoresearch"


HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription"


def row(name: str, status: str = "keep") -> str:
    return f"{name}\t1.000000\t0.0\t{status}\tsome idea"


@pytest.fixture
def session(tmp_path, monkeypatch) -> types.SimpleNamespace:
    """A clone, its cache and a Drive in one folder; cell() runs the cells that restore and save."""
    drive = tmp_path / "drive"
    for name in ("drive", "cache", "clone"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "clone")
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path / "cache"))
    colab = types.SimpleNamespace(drive=types.SimpleNamespace(mount=lambda place: None))
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    names = SETTINGS | dict(KEEP_ON_DRIVE=True, DRIVE=str(drive), os=os, Path=Path, shutil=shutil)
    exec(re.search(r"def rows_of.*(?=\n\n\nREPOSITORY)", SOURCES["install"], re.S)[0], names)

    def logs() -> tuple[list[str], list[str]]:
        return tuple((place / "results.tsv").read_text().splitlines() for place in (tmp_path / "clone", drive))

    return types.SimpleNamespace(drive=drive, cell=lambda name: exec(SOURCES[name], names), logs=logs)


def write_log(folder: Path | str, *rows: str, header: str = HEADER) -> None:
    Path(folder, "results.tsv").write_text("\n".join([header, *rows, ""]))


def test_the_rows_of_two_sessions_come_together_whoever_saves_last_and_no_newer_row_is_overwritten(session):
    write_log(session.drive, row("a"), row("b"), header="\ufeff" + HEADER)
    write_log(".")  # a fresh clone
    session.cell("restore")
    assert session.logs()[0] == [HEADER, row("a"), row("b")]
    write_log(".", row("a", "discard"), row("b"), row("b"), row("mine"))
    session.cell("restore")  # a second Run all: Drive has another word about a
    assert session.logs()[0] == [HEADER, row("a", "discard"), row("b"), row("b"), row("mine")]
    write_log(session.drive, row("a"), row("b"), row("theirs"))
    session.cell("save")
    expected = [HEADER, row("theirs"), row("a", "discard"), row("b"), row("b"), row("mine")]
    assert session.logs() == (expected, expected)


def test_a_log_with_other_columns_is_kept_beside_this_one_on_drive_too(session):
    other = HEADER + "\tgpu"
    write_log(session.drive, row("old") + "\tT4", header=other)
    write_log(".", row("new"))
    for _ in range(2):
        session.cell("restore")
        session.cell("save")
        assert session.logs() == ([HEADER, row("new")],) * 2
        kept = (session.drive / "results-of-another-version.tsv").read_text().splitlines()
        assert kept == [other, row("old") + "\tT4"]


@pytest.mark.parametrize("cell", ["restore", "save"])
def test_the_log_goes_before_anything_large(session, monkeypatch, cell):
    def full(*args, **options):
        raise OSError("no space left")

    write_log(session.drive, row("a"))
    write_log(".", row("b"))  # save: after a restart, in which only what it needs was run again
    (session.drive / "cache").mkdir()
    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(OSError, match="no space left"):
        session.cell(cell)
    assert session.logs()[cell == "save"] == [HEADER, row("a"), row("b")]
