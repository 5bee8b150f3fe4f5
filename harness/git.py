"""Git, whatever the caller's environment and configuration."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

import harness
from harness.log import DIFFERS, SEED, Description, plain_subject
from harness.record import night_record


def git_head(seed: int = SEED) -> tuple[str, str]:
    """HEAD's short hash and the description of its run (under night: as of its start); 0000000 and "" without git."""
    record = night_record()
    if "commit" in record:
        return record["commit"], record["description"]
    with suppress(OSError, subprocess.SubprocessError):
        out = run_git("log", "-1", "--format=%H%x09%s", timeout=10).stdout
        commit, _, subject = out.decode(errors="replace").rstrip("\n").partition("\t")
        diff = run_git("diff", "--quiet", "HEAD", "--", "train.py", check=False, timeout=10)
        return commit[:7], str(Description(plain_subject(subject) + DIFFERS * (diff.returncode == 1), seed))
    return "0000000", ""


# Variables that would send our git calls to another repository, index or work tree: a hook or an alias sets them
GIT_PLACES = """GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_COMMON_DIR GIT_OBJECT_DIRECTORY
GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_PREFIX GIT_NAMESPACE GIT_GRAFT_FILE GIT_SHALLOW_FILE GIT_REPLACE_REF_BASE
GIT_NO_REPLACE_OBJECTS""".split()
# What a user's configuration must not change in what we read
GIT_OPTIONS = "-c log.showSignature=false -c core.fileMode=false -c core.autocrlf=false -c core.attributesFile=".split()


def clean_environment() -> dict[str, str]:
    """The environment for git, and for programs that call it, without variables that point to another repository."""
    return {name: value for name, value in os.environ.items() if name not in GIT_PLACES}


def run_git(*args: str, check: bool = True, env: dict | None = None, **options) -> subprocess.CompletedProcess:
    """Runs git in this clone, whatever the caller's environment and configuration. env: added variables; options: for
    subprocess.run. Raises CalledProcessError if git fails and `check` is set."""
    options = {"cwd": harness.RESULTS.parent, "capture_output": True} | options
    return subprocess.run(["git", *GIT_OPTIONS, *args], env=clean_environment() | (env or {}), check=check, **options)
