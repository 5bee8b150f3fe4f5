"""Git, whatever the caller's environment and configuration."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import harness
from harness.record import night_record, process_seconds
from prepare import read

DECISIVE = ["train.py", "prepare.py", "kernels.py", "harness"]  # what decides a run's number


def git_head() -> tuple[str, str]:
    """The commit and the description of a run that starts now (under night: as of its start): HEAD's short hash, with
    + if files that decide the number are not as committed or another script than train.py runs, and its subject, which
    then names them. 0000000 and "" without git."""
    record = night_record()
    if "commit" in record:
        return record["commit"], record["description"]
    try:
        out = run_git("log", "-1", "--format=%H%x09%s", timeout=10).stdout
        commit, _, subject = out.decode(errors="replace").rstrip("\n").partition("\t")
        names, ran = uncommitted(), script()
        notes = f" (uncommitted: {', '.join(names)})" if names else ""
        notes += f" (ran {ran})" if ran != "train.py" else ""
        notes += " (changed while it started)" if changed_since_start() else ""
        return commit[:7] + ("+" if notes else ""), subject + notes
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no commit in this row: {' '.join(git_problem(error).split())}", file=sys.stderr)
        return "0000000", ""


def git_problem(error: Exception) -> str:
    """What git has said, such as that the clone belongs to another user; else the error itself."""
    return (getattr(error, "stderr", None) or b"").decode(errors="replace").strip() or str(error)


def main_file() -> Path:
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()


def script() -> str:
    """The file of this clone that is running, such as a copy of train.py; else train.py."""
    main = main_file()
    return main.name if main.is_file() and main.parent == harness.RESULTS.parent else "train.py"


def changed_since_start() -> bool:
    """Whether the script has been written to since this process began, and so may not be what it has read."""
    main, began = main_file(), time.time() - process_seconds() + 0.1  # both times are coarse
    return main.name == script() and main.is_file() and main.stat().st_mtime > began


def uncommitted() -> list[str]:
    """The decisive files that are not as committed, new ones (ignored or not) included, but no editor's hidden copies.
    Raises CalledProcessError."""
    files = with_imports([script(), *DECISIVE])
    changed, new = (
        run_git(*command.split(), "--", *files, timeout=10).stdout.decode(errors="replace").splitlines()
        for command in ("diff --name-only --relative HEAD", "ls-files --others")
    )
    return changed + [name for name in new if name.endswith(".py") and "/." not in f"/{name}"]


def with_imports(names: list[str]) -> list[str]:
    """Files and folders of this clone, then those that they import, and that these do."""
    root, found = harness.RESULTS.parent, [*names]
    for name in found:  # which grows
        text = "\n".join(map(read, [root / name, *(root / name).rglob("*.py")]))
        words = re.findall(r"\w+", " ".join(re.findall(r"^\s*(?:from|import) .*", text, re.M)))
        files = {f"{word}.py" for word in words if (root / f"{word}.py").is_file()}
        folders = {word for word in words if any((root / word).glob("*.py"))}
        found += (files | folders).difference(found)
    return found


# Variables that would send our git calls to another repository, index or work tree: a hook or an alias sets them. Not
# GIT_CONFIG_COUNT and GIT_CONFIG_PARAMETERS: a container may say by them that the clone is a safe.directory
GIT_PLACES = """GIT_DIR GIT_WORK_TREE GIT_IMPLICIT_WORK_TREE GIT_INDEX_FILE GIT_COMMON_DIR GIT_OBJECT_DIRECTORY
GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_QUARANTINE_PATH GIT_PREFIX GIT_INTERNAL_SUPER_PREFIX GIT_NAMESPACE GIT_CONFIG
GIT_GRAFT_FILE GIT_SHALLOW_FILE GIT_REPLACE_REF_BASE GIT_NO_REPLACE_OBJECTS""".split()
# What a user's configuration must not change in what we read
GIT_OPTIONS = "-c log.showSignature=false -c core.fileMode=false -c core.attributesFile=".split()
GIT_OPTIONS += "-c i18n.commitEncoding=UTF-8 -c i18n.logOutputEncoding=UTF-8 -c core.hooksPath=/dev/null".split()


def clean_environment() -> dict[str, str]:
    """The environment for git, and for programs that call it, without variables that point to another repository."""
    return {name: value for name, value in os.environ.items() if name not in GIT_PLACES}


def run_git(*args: str, check: bool = True, env: dict | None = None, **options) -> subprocess.CompletedProcess:
    """Runs git in this clone, whatever the caller's environment and configuration. env: added variables; options: for
    subprocess.run. Raises CalledProcessError if git fails and `check` is set."""
    options = {"cwd": harness.RESULTS.parent, "capture_output": True} | options
    return subprocess.run(["git", *GIT_OPTIONS, *args], env=clean_environment() | (env or {}), check=check, **options)
