"""Commits of other versions of train.py, made beside the working tree."""

import os
import subprocess
import tempfile
from functools import partial

from night.rows import git, git_bytes


def commit_train(parent: str, text: bytes, subject: str, ref: str, *merged: str) -> str:
    """A commit on `parent` that differs in train.py only, under refs/heads/`ref`; returns its 7 digits.

    It has the date of its parent, so the same text makes the same commit again.
    """
    date = git("show", "-s", "--format=%cI", parent)
    with tempfile.TemporaryDirectory() as folder:
        env = dict(GIT_INDEX_FILE=f"{folder}/index", GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date)
        beside = partial(git, env=os.environ | env)
        blob = beside("hash-object", "-w", "--stdin", input=text)
        beside("read-tree", parent)
        beside("update-index", "--add", "--cacheinfo", f"100644,{blob},train.py")
        parents = [f"-p{one}" for one in (parent, *merged)]
        commit = beside("commit-tree", beside("write-tree"), *parents, "-m", subject)
        beside("update-ref", f"refs/heads/{ref}", commit, *[parent] * bool(merged))  # not over a later commit
    return commit[:7]


def read_train(revision: str) -> bytes:
    return git_bytes("show", f"{revision}:train.py")


def revert(text: bytes, before: bytes, after: bytes) -> bytes | None:
    """`text` without the change from `before` to `after`, by git's three-way merge; None where it conflicts."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{i}" for i in range(3)]
        for path, content in zip(paths, (text, after, before), strict=True):
            with open(path, "wb") as file:
                file.write(content)
        merged = subprocess.run(["git", "merge-file", "-p", "-q", *paths], capture_output=True)
    return merged.stdout if merged.returncode == 0 else None


def without(files: list[bytes], dropped: set[int]) -> bytes | None:
    """The last file without some of the changes that led to it, change i from files[i - 1] to files[i]; None where they
    conflict or leave no Python."""
    text = files[-1]
    for i in sorted(dropped, reverse=True):
        text = revert(text, files[i - 1], files[i])
        if text is None:
            return None
    try:
        compile(text, "train.py", "exec")
    except (SyntaxError, ValueError):
        return None
    return text


def group(files: list[bytes], i: int) -> set[int]:
    """Change i, with the fewest later ones that have to go with it since they sit on the same lines."""
    later = range(i + 1, len(files))
    chosen = {i}
    for dropped in [chosen, *({i, j} for j in later), *({i, *range(i + 1, j + 1)} for j in later)]:
        if without(files, dropped) is not None:
            return dropped
    return {i, *later}


def doubts(commits: list[str]) -> list[str]:
    """What somebody who trains them beside HEAD may not know."""
    found = []
    if git("diff", "--name-only", "HEAD", "--", "train.py"):
        found.append("train.py here has changes that are not committed: no run has them")
    for commit in commits:
        if other := git("diff", "--name-only", "HEAD", commit, "--", "harness.py", "prepare.py"):
            found.append(f"{commit} has another {' and '.join(other.split())} than HEAD: its rows may not compare")
    return found
