"""What night asks git."""

import subprocess
from pathlib import Path

import harness
from prepare import PrepareError

ROOT = Path(__file__).resolve().parent.parent


def git_bytes(*args: str, **options) -> bytes:
    """What git prints. options: of harness.run_git. Raises CalledProcessError."""
    return harness.run_git(*args, cwd=ROOT, **options).stdout


def git(*args: str, **options) -> str:
    return git_bytes(*args, **options).decode(errors="replace").strip()


def branch() -> str:
    """The branch that is checked out, "" if none is."""
    return git("branch", "--show-current")


def commit_of(revision: str) -> str:
    """A revision's 7-digit commit hash. Raises PrepareError if there is none."""
    try:
        return git("rev-parse", "--verify", "-q", f"{revision}^{{commit}}")[:7]
    except subprocess.CalledProcessError:
        raise PrepareError(f"there is no commit {revision}") from None


def revisions(names: list[str]) -> list[tuple[str, str]]:
    """(7-digit hash, subject) of each revision. Raises PrepareError if any is unknown."""
    run = harness.run_git("log", "--no-walk=unsorted", "--format=%H %s", *names, "--", check=False, cwd=ROOT)
    log, problem = (text.decode(errors="replace").strip() for text in (run.stdout, run.stderr))
    if not log:
        raise PrepareError(problem.removeprefix("fatal: ") or f"{' '.join(names)}: there are no such commits")
    return [(commit[:7], subject) for commit, _, subject in (line.partition(" ") for line in log.split("\n"))]


def train_blobs(names: list[str]) -> list[str]:
    """The blob hash of train.py in each revision; where there is none, git's word on that, which ends in `missing`."""
    lines = "".join(f"{name}:train.py\n" for name in names)
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
