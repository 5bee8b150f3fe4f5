"""Commits of other versions of train.py, made without touching the working tree."""

import subprocess
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from night.rows import git, git_bytes


def commit_train(parent: str, text: bytes, subject: str, ref: str, *merged: str) -> str:
    """Commits `text` as train.py on `parent`, as branch `ref`; returns the 7-digit hash.

    The date is the parent's, so the same text gives the same commit. merged: further parents, for a merge;
    then `ref` must still point to `parent`."""
    date = git("show", "-s", "--format=%cI", parent)
    with tempfile.TemporaryDirectory() as folder:
        env = dict(GIT_INDEX_FILE=f"{folder}/index", GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date)
        beside = partial(git, env=env)
        blob = beside("hash-object", "-w", "--stdin", input=text)
        beside("read-tree", parent)
        beside("update-index", "--add", "--cacheinfo", f"100644,{blob},train.py")
        parents = [f"-p{one}" for one in (parent, *merged)]
        commit = beside("commit-tree", beside("write-tree"), *parents, "-m", subject)
        beside("update-ref", f"refs/heads/{ref}", commit, *([parent] if merged else []))  # not over a later commit
    return commit[:7]


def read_train(revision: str) -> bytes:
    return git_bytes("show", f"{revision}:train.py")


def revert(text: bytes, before: bytes, after: bytes) -> bytes | None:
    """`text` without the change from `before` to `after`, by git's three-way merge; None if it conflicts."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("text", "after", "before")]
        for path, content in zip(paths, (text, after, before), strict=True):
            path.write_bytes(content)
        merged = subprocess.run(["git", "merge-file", "-p", "-q", *paths], capture_output=True)
    return merged.stdout if merged.returncode == 0 else None


def without(files: list[bytes], dropped: set[int]) -> bytes | None:
    """The last file without the dropped changes, change i being files[i - 1] to files[i]; None if they conflict or what
    is left is not valid Python."""
    text = files[-1]
    for i in sorted(dropped, reverse=True):
        text = revert(text, files[i - 1], files[i])
        if text is None:
            return None
    return text if compiles(text) else None


def compiles(text: bytes) -> bool:
    with suppress(SyntaxError, ValueError):
        return bool(compile(text, "train.py", "exec"))
    return False


def group(files: list[bytes], i: int) -> set[int]:
    """Change i and the later changes that must go with it: the shortest series that can go, minus what may stay."""
    for end in range(i + 1, len(files) + 1):
        dropped = {*range(i, end)}
        if without(files, dropped) is not None:
            break
    for other in sorted(dropped - {i}):
        if without(files, dropped - {other}) is not None:
            dropped -= {other}
    return dropped


def doubts(commits: list[str]) -> list[str]:
    """Warnings about commits that are to be compared with HEAD."""
    found = []
    if git("diff", "--name-only", "HEAD", "--", "train.py"):
        found.append("train.py here has uncommitted changes, which no run includes: commit them first")
    for commit in commits:
        if other := git("diff", "--name-only", "HEAD", commit, "--", "harness", "prepare.py"):
            found.append(f"{commit} differs from HEAD in {' and '.join(other.split())}: its rows may not be comparable")
    return found
