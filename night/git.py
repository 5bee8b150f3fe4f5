"""Git: what night asks it, and commits of other versions of train.py, made without touching the working tree.

What is not meant for people is under refs/night/, where `git branch` does not look. A ref is only created where there
is none, and moved only from the commit that it was seen at: so nobody's commit is ever left without a ref.
"""

import tempfile
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import harness

ROOT = Path(__file__).resolve().parent.parent


def git_bytes(*args: str, **options) -> bytes:
    """What git prints. options: of harness.run_git. Raises CalledProcessError."""
    return harness.run_git(*args, cwd=ROOT, **options).stdout


def git(*args: str, **options) -> str:
    return git_bytes(*args, **options).decode(errors="replace").strip()


def branch() -> str:
    """The branch that is checked out, "" if none is."""
    return git("branch", "--show-current")


def revisions(names: list[str]) -> list[tuple[str, str]]:
    """(7-digit hash, clean subject) of each revision. CalledProcessError if any is unknown."""
    log = git("log", "--no-walk=unsorted", "--format=%H %s", *names, "--")
    return [(line[:7], harness.clean(line.partition(" ")[2])) for line in log.split("\n") if line]


def commit_of(revision: str) -> str:
    """A revision's 7-digit hash."""
    return revisions([revision])[0][0]


def train_blobs(names: list[str]) -> list[str]:
    """The blob hash of train.py in each revision; where there is none, git's word on that, which ends in `missing`."""
    lines = "".join(f"{name}:./train.py\n" for name in names)
    return git("cat-file", "--batch-check=%(objectname)", input=lines.encode(), check=False).split("\n")


def in_history(rows: list[dict]) -> list[dict]:
    """Rows whose commit is HEAD or an ancestor of it: ideas on other branches count once they are merged. So do those
    that were kept and have HEAD's train.py, as after an amended commit, a rebase or a squashed merge."""
    history = {line[:7] for line in git("rev-list", "HEAD").split()}
    kept = [row["commit"] for row in rows if row["status"] == "keep" and row["commit"] not in history]
    if kept:
        own, *blobs = train_blobs(["HEAD", *kept])
        history |= {commit for commit, blob in zip(kept, blobs, strict=False) if blob == own}
    return [row for row in rows if row["commit"] in history]


def new_commit(parent: str, text: bytes, subject: str, *merged: str) -> str:
    """Commits `text` as train.py on `parent` and `merged`, without a ref to it; returns the hash. The date is the
    parent's, so the same text gives the same commit."""
    date = git("show", "-s", "--format=%cI", parent)
    blob = git("hash-object", "-w", "--stdin", input=text)
    path = git("rev-parse", "--show-prefix") + "train.py"  # the clone may be a folder of another repository
    with tempfile.TemporaryDirectory() as folder:
        env = dict(GIT_INDEX_FILE=f"{folder}/index", GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date)
        git("read-tree", parent, env=env)
        git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", env=env)
        parents = [f"-p{one}" for one in (parent, *merged)]
        return git("commit-tree", git("write-tree", env=env), *parents, env=env, input=f"{subject}\n".encode())


def commit_train(parent: str, text: bytes, subject: str, place: str) -> str:
    """A new commit, kept by the ref refs/night/<place>; if that ends in /, named by its hash. Returns 7 digits."""
    commit = new_commit(parent, text, subject)
    create_ref(f"refs/night/{place}{commit if place.endswith('/') else ''}", commit)
    return commit[:7]


def create_ref(ref: str, commit: str) -> None:
    """Raises CalledProcessError if there is such a ref to another commit."""
    if git("rev-parse", "-q", "--verify", ref, check=False) != git("rev-parse", commit):
        git("update-ref", ref, commit, "")


def move_branch(name: str, commit: str, before: str) -> None:
    """Raises CalledProcessError if the branch is no longer at `before`."""
    git("update-ref", "-m", "night loop", f"refs/heads/{name}", commit, before)


def archive(commit: str, *paths: str) -> bytes:
    """A tar of a commit's files, or of these."""
    return git_bytes("-c", "core.autocrlf=false", "--literal-pathspecs", "archive", commit, "--", *paths)


def read_train(revision: str) -> bytes:
    return git_bytes("show", f"{revision}:./train.py")


@lru_cache(1000)  # most sets of changes that an attribution leaves out are alike
def revert(text: bytes, before: bytes, after: bytes) -> bytes | None:
    """`text` without the change from `before` to `after`, by git's three-way merge; None if it conflicts. With
    the two exchanged, it applies the change."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in zip("123", (text, after, before), strict=True):
            Path(folder, name).write_bytes(content)
        merged = harness.run_git("merge-file", "-p", "-q", *"123", cwd=folder, check=False)
    return merged.stdout if merged.returncode == 0 else None


def without(files: list[bytes], dropped: set[int]) -> bytes | None:
    """The last file without the dropped changes (i: files[i - 1] to files[i]); None if that conflicts or is invalid."""
    text = files[-1]
    for i in sorted(dropped, reverse=True):
        text = revert(text, files[i - 1], files[i])
        if text is None:
            return None
    return text if compiled(text) else None


def compiled(text: bytes, flags: int = 0):
    """A train.py's code; with flags=ast.PyCF_ONLY_AST its syntax tree. None if it is invalid or nested too deeply."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(text, "train.py", "exec", flags)


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


def print_doubts(commits: list[str]) -> None:
    """Warns about commits that are to be compared with HEAD."""
    if names := harness.uncommitted():
        print(f"no run includes what is not committed here: {', '.join(names)}")
    around = [name for name in harness.DECISIVE if name != "train.py"]
    for commit in commits:
        if other := git("diff", "--name-only", "HEAD", commit, "--", *around):
            print(f"{commit} differs from HEAD in {' and '.join(other.split())}: its rows may not be comparable")
