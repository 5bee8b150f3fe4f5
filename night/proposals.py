"""Proposals: their folders, verdicts and commits, the checkouts they are made in, and whether they are worth a run."""

import ast
import functools
import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import harness
import prepare
from night.git import archive, compiled, git, git_bytes, read_train
from night.run import RUNS, record_of

PROPOSALS = RUNS / "proposals"  # <n>/: prompt.md, agent.log, train.diff, verdict.txt
ENDED = "failed: the loop ended first"  # the verdict until another one replaces it
MOST = 2**18  # bytes of a file that are read
AGAIN = ", again on "  # in the subject of a change that is merged with a newer reference
# What an agent need not see
HIDDEN = r"(tests|\.ci|\.github)/|docs/(?!tried\.md$)|(results\.tsv|program\.md|.*\.ipynb)$"
# Of the throw-away repository of a checkout, whatever the user has told git
CONFIG = """
[user] name = night
    email = night@localhost
[core] autocrlf = false
    attributesFile = /dev/null
    hooksPath = /dev/null
[commit] gpgSign = false
"""


def folder(n: int) -> Path:
    return PROPOSALS / str(n)


def note(n: int, verdict: str) -> None:
    folder(n).mkdir(parents=True, exist_ok=True)
    with prepare.new_file(folder(n) / "verdict.txt") as file:
        file.write(f"{verdict}\n".encode())


def verdicts() -> dict[int, str]:
    """By number. They begin with keep, discard, crash, waits, trains, refused or failed; "" without one."""
    numbers = sorted(int(path.name) for path in PROPOSALS.glob("*") if path.name.isdecimal())
    return {n: prepare.read(folder(n) / "verdict.txt") for n in numbers}


def new_proposal(branch: str) -> int:
    """A number with its folder."""
    n = 1 + max([0, *verdicts(), *(n for n, *_ in accepted(branch).values())])
    note(n, ENDED)
    return n


def accepted(branch: str) -> dict[str, tuple[int, str, str]]:
    """(number, base, subject) of each proposal that was accepted on a branch, by commit."""
    form = "--format=%(refname:lstrip=-1)%09%(objectname)%09%(parent)%09%(subject)"
    refs = git("for-each-ref", "--sort=version:refname", form, f"refs/night/{branch}-loop/")
    lines = [line.split("\t") for line in refs.splitlines()]
    return {commit[:7]: (int(n), base[:7], subject) for n, commit, base, subject in lines if n.isdecimal()}


def checkout(work: Path, commit: str) -> dict[str, bytes]:
    """Makes a throw-away git repository of a commit's files that concern an agent; returns their contents."""
    work.mkdir()
    names = os.fsdecode(git_bytes("ls-tree", "-rz", "--name-only", commit)).split("\0")[:-1]
    files = archive(commit, *(name for name in names if not re.match(HIDDEN, name)))
    subprocess.run(["tar", "-x", "-C", work], input=files, check=True, stderr=subprocess.PIPE)
    contents = {str(path.relative_to(work)): plain(path) for path in work.rglob("*") if path.is_file()}
    harness.run_git("init", "-q", "--template=", cwd=work)
    with open(work / ".git" / "config", "a") as file:
        file.write(CONFIG)
    harness.run_git("add", "-A", cwd=work)
    harness.run_git("commit", "-q", "-m", "reference", cwd=work)
    return contents


def plain(path: Path) -> bytes:
    """The first 256 KiB of a regular file; empty for anything else, such as a symbolic link."""
    with suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with open(path, "rb") as file:
                return file.read(MOST)
    return b""


def fault(before: bytes, text: bytes, known: set[str], live: int | None = None) -> str:
    """Why this edit of `before` is not worth a run, or "". known: commits that have one; live: see `live_row`."""
    if not text.strip() or len(text) >= MOST:
        return "train.py is gone, empty or over 256 KiB"
    end = before.rstrip().splitlines()[-1]
    if not text.rstrip().endswith(end):
        return f"train.py must end with {end.decode().strip()}"
    own = program(text)
    if same := [commit for commit in known if program_of(commit) == own]:
        return f"the same train.py as {same[0]}, but for comments and whitespace"
    if live is not None and program(text, live) == program(before, live):
        return f"it changes only sizes that are not used here: SIZE is, if it is set, else SIZES[{live}]"
    return ""


def live_row(rows: list[dict]) -> int | None:
    """The row of train.py's SIZES that the latest run has printed; None if none has."""
    for row in rows[:-20:-1]:
        log = (record_of(row) or PROPOSALS) / "log.txt"
        if found := re.search(r"\bSIZES\[(\d+)\]", plain(log).decode(errors="replace")):
            return int(found[1])
    return None


def program(text: bytes, live: int | None = None) -> str:
    """Equal for files that differ in comments, docstrings and layout only. live: also in the sizes, but not the FLOP/s,
    of other rows of SIZES; if SIZE is set, in any rows."""
    if not (tree := parse(text)):
        return str(text.split())  # its words
    constants = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    sized = any(re.match(r"SIZE = (?!None$)", constant) for constant in constants)
    for node in ast.walk(tree):
        match node:
            case ast.AST(body=[ast.Expr(ast.Constant(str())), *rest]):
                node.body = rest
            case ast.Assign([ast.Name("SIZES")], ast.Tuple(rows)) if live is not None:
                kept = [row if i == live else getattr(row, "elts", [row])[0] for i, row in enumerate(rows)]
                node.value.elts = [] if sized else kept
    return ast.dump(tree)


@functools.cache
def program_of(commit: str) -> str:
    """Of a commit's train.py; "" if this clone does not have the commit."""
    with suppress(subprocess.CalledProcessError):
        return program(read_train(commit))
    return ""


def parse(text: bytes) -> ast.Module | None:
    return compiled(text, ast.PyCF_ONLY_AST)
