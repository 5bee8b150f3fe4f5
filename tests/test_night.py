"""An agent's night: program.md's own commands, played in a scratch git repository with a stub for train.py."""

import argparse
import contextlib
import itertools
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from small_corpus import ROOT, WORDS, copy_files

import harness
import prepare
from harness import Description
from night import rows
from night.__main__ import main, parse
from night.plot import plot
from night.rows import Kind, Label, name_of, reference

PROGRAM = (ROOT / "program.md").read_text("utf-8")
HEADER = "\t".join(harness.COLUMNS) + "\n"
OLD = "0123456\t1.000000\t2.0\tkeep\tby the human, before the night\tcpu\td\t9.0\n"

# What train.py does around its training, in 0.3 s. BODY is what an experiment does in there.
STUB = """\
import os, signal, subprocess, sys, threading, time
from harness import log_result
from prepare import dataset_id

def interrupted(*_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupted)
if "KILL_AFTER" in os.environ:
    threading.Timer(float(os.environ["KILL_AFTER"]), os.kill, (os.getpid(), signal.SIGKILL)).start()
where = dict(gpu="cpu", dataset=dataset_id())
try:
    print("training", flush=True)
    BODY
    status = log_result(val_bpb=val_bpb, memory_gb=2.0, **where)
    print(f"---\\nval_bpb:          {val_bpb:.6f}\\npeak_vram_mb:     2048.0\\nstatus:           {status}")
except BaseException as error:
    log_result(val_bpb=0.0, memory_gb=0.0, reason=type(error).__name__, **where)
    raise
"""


IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
DAEMON = f"subprocess.Popen([sys.executable, '-c', {IGNORES!r}], start_new_session=True, stdout=-1).stdout.readline()"


def command(step: str) -> str:
    """The shell command under a step of program.md."""
    return re.search(rf"{re.escape(step)}.*?```bash\n(.*?)```", PROGRAM, re.S)[1]


RUN = command("**2. Run.**") + "wait"


class Night:
    """A clone with one commit, its data prepared, at the end of program.md's set-up."""

    def __init__(self, folder: Path, cache: Path):
        self.folder, self.log = folder, folder / "run.log"
        copy_files(folder)
        binaries = folder.with_name("bin")  # `python` is the one that runs the tests, but `import torch` takes no time
        for path, text in {
            folder / "results.tsv": HEADER + OLD,
            folder / ".gitignore": (ROOT / ".gitignore").read_text("utf-8"),
            folder / "train.py": STUB.replace("BODY", "val_bpb = 1.3"),
            binaries / "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
            binaries / "torch" / "__init__.py": "from . import cuda",
            binaries / "torch" / "cuda.py": "is_available = device_count = int",
        }.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        (binaries / "python").chmod(0o755)
        who = {
            f"GIT_{role}_{key}": "night@example.org" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")
        }
        self.mark = f"NIGHT={uuid.uuid4()}"  # in the environment of every process that comes of this
        self.env = os.environ | who | dict([self.mark.split("=")])
        self.env |= {"AUTORESEARCH_CACHE": str(cache), "PYTHONPATH": str(binaries)}
        self.env["PATH"] = f"{binaries}:{self.env['PATH']}"
        self.run("git init -q -b main && git add . && git commit -q -m start")
        self.run(command("## Set-up"))

    def processes(self) -> dict[int, list[str]]:
        """Those that come of this and still run: pid and arguments."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
        return found

    def process(self, script: str, *args: str, leads_session: bool | None = None) -> int:
        """Waits for one that runs a script with these first arguments."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            for pid, words in self.processes().items():
                with contextlib.suppress(ProcessLookupError):
                    leads = leads_session in (None, pid == os.getsid(pid))
                    names = [Path(word).name for word in words[1 : len(args) + 2]]
                    if leads and names == [script, *args]:
                        return pid
            time.sleep(0.01)
        raise TimeoutError(self.processes())

    def all_gone(self, seconds: float = 60, runs: bool = False) -> bool:
        """Within that time; `runs`: those of runs at least."""
        deadline = time.monotonic() + seconds
        while (left := self.runs() if runs else self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not left

    def start(self, script: str, begin=None, **env: str) -> subprocess.Popen:
        options = dict(cwd=self.folder, env=self.env | env, start_new_session=True, preexec_fn=begin)
        return subprocess.Popen(["bash", "-c", script], text=True, stdout=-1, stderr=-2, **options)

    def run(self, script: str, **env: str) -> str:
        return self.start(script, **env).communicate(timeout=600)[0]

    def experiment(self, description: str, body: str, **env: str) -> str:
        """Once through the loop; returns the status."""
        self.edit(description, body)
        self.train(**env)
        return self.decide("KILL_AFTER" in env)

    def begin(self, word: str) -> subprocess.Popen:
        """A run, when it has printed a word."""
        self.log.unlink(missing_ok=True)
        loop = self.start(RUN)
        while not self.log.exists() or word not in self.log.read_text():
            time.sleep(0.01)
        return loop

    def train(self, **env: str) -> None:
        self.run(RUN, **env)

    def edit(self, description: str, body: str) -> None:
        (self.folder / "train.py").write_text(STUB.replace("BODY", body), "utf-8")
        self.run(command("**1. Change and commit.**").replace("what changed", description))

    def decide(self, killed: bool = False) -> str:
        row, *found = self.run(command("**3. Read the row**")).splitlines()
        status = row.split("\t")[3]
        whole = [line.split()[0] for line in found] == ["val_bpb:", "peak_vram_mb:"]
        assert whole or status == "crash" or killed  # after it had logged
        if status != "keep":
            self.run(command("**4. Keep or go back.**"))
        return status

    def rows(self) -> list[dict]:
        """All of them well formed, or it fails."""
        path = self.folder / "results.tsv"
        if not path.exists() or not (text := path.read_text("utf-8")):  # just created
            return []
        header, *lines = text.split("\n")[:-1]
        rows = [row for row in map(harness.parse_row, lines) if row]  # of one look: runs go on writing
        assert header + "\n" == HEADER and len(rows) == len(lines)
        return rows

    def assert_nothing_else_changed(self) -> None:
        """The branch holds train.py of the last kept row, every commit that has a row, and no row."""
        assert self.run("git status --porcelain") == ""
        assert self.run("git diff --name-only main") in ("", "train.py\n")
        assert self.run("git show HEAD:results.tsv main:results.tsv") == 2 * (HEADER + OLD)
        *_, kept = (row["commit"] for row in self.rows() if row["status"] == "keep")
        assert self.run(f"git diff {kept} -- train.py") == ""
        subjects = dict(line.split(" ", 1) for line in self.run("git log --format='%h %s' --abbrev=7").splitlines())
        for row in self.rows():
            assert re.fullmatch(re.escape(subjects[row["commit"]]) + r"( \[.+\])?", row["description"])


@pytest.fixture
def night(prepared, tmp_path) -> Night:
    return Night(tmp_path / "clone", prepared)


def test_a_log_that_cannot_grow_costs_the_log_and_not_the_run(night):
    night.edit("talks a lot", "sys.stderr.write('warning\\n' * 100_000)\n    val_bpb = 1.2")
    night.run("python -m night run 2> /dev/full")
    assert [row["val_bpb"] for row in night.rows()] == [1.2]


def test_a_run_gets_no_variable_that_sends_its_git_calls_elsewhere(night):
    """As a hook or an alias sets them."""
    night.edit(
        "asks git", "val_bpb = 1.2 + len([name for name in os.environ if name in ('GIT_DIR', 'GIT_INDEX_FILE')])"
    )
    night.run("python -m night run", GIT_DIR="/nowhere/.git", GIT_INDEX_FILE="/nowhere/.git/index")
    assert [(row["val_bpb"], row["description"]) for row in night.rows()] == [(1.2, "asks git")]


def test_three_keeps_two_discards_a_crash_a_syntax_error_and_an_interrupt(night):
    night.train()
    assert night.decide() == "keep"
    assert night.experiment("wider", "val_bpb = 1.2") == "keep"
    assert night.experiment("deeper", "val_bpb = 1.25") == "discard"
    assert night.experiment("no norm", "raise ValueError('shapes')") == "crash"
    assert night.experiment("a typo", "val_bpb = = 1.1") == "crash"
    night.edit("slower", "time.sleep(60)")
    loop = night.begin("training")
    os.kill(night.process("-m", "night", "run", leads_session=False), signal.SIGINT)
    loop.wait(600)
    assert "KeyboardInterrupt" in night.log.read_text()
    assert night.decide() == "crash"
    assert night.experiment("head_dim 64", "val_bpb = 1.1") == "keep"
    assert night.experiment("head_dim 32", "val_bpb = 1.10") == "discard"  # a tie is no gain
    names = "baseline, wider, deeper, no norm [ValueError], a typo [SyntaxError line 15], slower [KeyboardInterrupt], "
    names += "head_dim 64, head_dim 32"
    assert [row["description"] for row in night.rows()] == names.split(", ")
    night.assert_nothing_else_changed()


@pytest.mark.parametrize(
    ("body", "limit", "reason"),
    [
        ("[signal.signal(n, signal.SIG_IGN) for n in (14, 15)]; time.sleep(60)", 3, "no evaluation within 0.05 min"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 60, "killed"),
        ("os.write(2, b'  File \"train.py\", line 3\\nValueError: 1\\n'); os._exit(7)", 60, "exit status 7"),
        (f"{DAEMON}; os._exit(0)", 60, "no row"),
    ],
)
def test_an_end_that_train_py_cannot_log_gets_its_true_reason_and_leaves_no_process(night, body, limit, reason):
    """Not even one that has left its session, and ignores what can be ignored."""
    night.edit("idea", body)
    night.run(RUN.replace("night run", f"night run --limit {limit}"))
    assert [row["description"] for row in night.rows()] == [f"idea [{reason}]"]
    assert not night.processes()


def test_an_error_while_train_py_is_imported_is_named_with_its_line(night):
    reasons = {
        "import no_such_module": "ModuleNotFoundError line 1",
        "import json; json.loads('')": "JSONDecodeError line 1",
        "    SIZE = 1": "IndentationError line 1",
        "raise ValueError('of\\nmany\\nlines')": "ValueError line 1",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('size')": "KeyError line 4",
    }
    for line in reasons:
        (night.folder / "train.py").write_text(f"{line}\n{STUB}")
        night.run("git commit -qam idea")
        night.train()
    assert [row["description"] for row in night.rows()] == [f"idea [{reason}]" for reason in reasons.values()]


WAITS = "print('waits', flush=True); time.sleep(60)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.parametrize(
    ("guard", "number", "body", "reason"),
    [
        (False, signal.SIGKILL, f"{DAEMON}; signal.signal(signal.SIGTERM, interrupted)", "KeyboardInterrupt"),
        (True, signal.SIGKILL, f"{DAEMON}; signal.signal(signal.SIGTERM, interrupted)", "killed"),
        (False, signal.SIGTERM, DEAF, "killed"),
    ],
)
def test_no_process_is_left_when_a_supervisor_is_killed_and_its_row_is(night, guard, number, body, reason):
    """train.py logs its row itself if it has the time, and it has not if it ignores SIGTERM."""
    night.edit("idea", f"{body}; {WAITS}")
    loop = night.begin("waits")
    os.kill(night.process("-m", "night", "run", leads_session=guard), number)
    loop.wait(30)
    assert night.all_gone(20)
    assert [row["description"] for row in night.rows()] == [f"idea [{reason}]"]


def test_a_guard_passes_on_a_signal_that_comes_before_its_child_has_started():
    script = """\
import os, signal
from night import run

def prctl(option, value, of_the_system=run.prctl):
    of_the_system(option, value)
    if (option, value) == (run.PR_SET_PDEATHSIG, signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)

run.prctl = prctl
code, ended_by, _ = run.guard(["sleep", "99"], 60, os.getppid(), os.devnull)
print(-code == ended_by == signal.SIGTERM)
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True, cwd=ROOT) == "True\n"


@pytest.mark.parametrize("moment", ["while it waits", "after it has waited"])
def test_a_signal_that_comes_when_the_guard_has_just_ended_costs_no_row(moment):
    """Nor is it sent to whoever has the guard's process id by then."""
    script = f"""\
import os, signal, types
import harness
from night import run

wait = os.waitpid

def waitpid(pid, options):
    result = wait(pid, options)
    if {moment == "after it has waited"}:
        os.kill(os.getpid(), signal.SIGTERM)
    return result

def waitid(*args):
    result = real(*args)
    if {moment == "while it waits"}:
        os.kill(os.getpid(), signal.SIGTERM)
    return result

real, os.waitpid, os.waitid = os.waitid, waitpid, waitid
run.Row = lambda args: types.SimpleNamespace(make_up=print)
run.guard_train = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
print(run.run(None))
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True, cwd=ROOT) == "killed\n137\n"


def test_exit_status_options_and_output_are_those_of_train_py(night):
    night.edit("exit", "print(sys.argv[1:]); sys.exit(3)")
    process = night.start("python -m night run --seed 5 --limit 60")
    assert "['--seed=5']" in process.communicate(timeout=600)[0] and process.returncode == 3


def test_a_budget_set_by_hand_leaves_no_crash_row(night):
    """Nor would it leave a row if it were good."""
    night.edit("smoke", "os._exit(1)")
    night.run("python -m night run --seconds 5; python -m night run --tokens=5; python -m night run --seconds 0")
    assert night.rows() == []


def test_rows_survive_what_a_careless_agent_does_to_the_clone(night):
    night.train()
    before = night.rows()
    night.run(
        "git commit -qam all; git add -A; git stash; git checkout -q -- .; git checkout -q main; git reset --hard"
    )
    assert night.rows() == before and len(before) == 1
    assert night.run("git log --all --format= --name-only -- results.tsv | sort -u") == "results.tsv\n"  # of `start`


def test_a_row_is_of_what_began_whatever_changes_during_the_run(night, tmp_path):
    """The commit, the log and the dataset change; or train.py was not committed."""
    cache = Path(shutil.copytree(night.env["AUTORESEARCH_CACHE"], tmp_path / "cache"))
    night.env["AUTORESEARCH_CACHE"] = str(cache)
    own = (cache / "current").read_text().strip()
    shutil.copytree(cache / own, cache / "other")
    (night.folder / ".dataset").unlink(missing_ok=True)
    night.experiment("a", f"open({str(cache / 'current')!r}, 'w').write('other\\n')\n    os._exit(3)")
    (cache / "current").write_text(own)
    night.experiment("b", "os.system('git commit -q --allow-empty -m later')\n    val_bpb = 1.2")
    night.edit("c", "val_bpb = 1.1")
    (night.folder / "train.py").write_text(STUB.replace("BODY", "val_bpb = 1.1 + 0.01"), "utf-8")
    night.train()
    expected = ["a [exit status 3]", "b", "c (train.py differs)"]
    assert [row["description"] for row in night.rows()] == expected
    assert {row["dataset"].partition("-")[0] for row in night.rows()} == {own.partition("@")[0]}
    night.experiment("d", "os.rename('results.tsv', 'results.tsv.old')\n    val_bpb = 1.2")
    assert [(row["description"], row["status"]) for row in night.rows()] == [("d", "keep")]


@pytest.mark.slow
def test_overruling_a_status_moves_what_the_next_discard_goes_back_to(night):
    night.train()
    night.edit("half the lines", "val_bpb = 1.30")
    night.train()
    log = (night.folder / "results.tsv").read_text()
    keep, discard = re.findall(r"`(python -m night keep .*?)`", PROGRAM)
    assert night.run(discard).startswith("discard ") and (night.folder / "results.tsv").read_text() == log
    assert night.run(keep).startswith("keep ")
    assert (night.folder / "results.tsv").read_text() == log[::-1].replace("discard"[::-1], "keep"[::-1], 1)[::-1]
    assert night.decide() == "keep"
    assert night.experiment("worse", "val_bpb = 1.4") == "discard"
    night.assert_nothing_else_changed()
    baseline = night.run("git rev-parse --short=7 HEAD~3").strip()
    assert night.run("python -m night keep HEAD~3").endswith(f"starts from {baseline}\n"), "though its row is older"
    commits = [row["commit"] for row in night.rows()]
    assert commits[0] == commits[-1] == baseline, "what the night began with is still its first row"
    night.run("python -m night run --seed 1; python -m night keep HEAD~2; python -m night keep HEAD~2 --discard")
    assert night.run("python -m night reference") == f"{baseline}\n"
    for command_ in ("reference", "report"):
        said = night.run(f"python -m night {command_} --tokens 9")
        assert ("but on cpu" in said) == (command_ == "report"), "the reference of five-minute runs serves, too"
    (night.folder / "results.tsv").write_text(HEADER + "a\t1.3\t1.0\tkeep\tx\tcpu, 5 M tokens\td\t5.0\n")
    assert "night: this is HEAD, as results.tsv has no row on cpu, " in night.run("python -m night reference")


@pytest.fixture
def history(monkeypatch, tmp_path):
    """A branch with the commits a, b, c and d, and a log: of each row the commit, val_bpb, gpu and dataset."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    monkeypatch.setattr(harness, "gpu_name", lambda setting: "A")
    monkeypatch.setattr(prepare, "dataset_id", lambda: "d")
    commits = "".join(f"{letter * 40}\n" for letter in "dcba")

    def git(what: str, *args: str) -> str:
        return commits if what == "rev-list" else args[-1][0].replace("H", "d") * 40

    monkeypatch.setattr(rows, "git", git)

    def log(*lines: str) -> None:
        for line in lines:
            commit, val_bpb, status, *place = line.split("|")
            row = dict(zip(("gpu", "dataset"), place, strict=True), commit=7 * commit, description="x", memory_gb=1.0)
            row |= dict(reason="killed" * (status == "crash"), to_beat=math.inf if status == "keep" else 0.0)
            harness.log_result(val_bpb=float(val_bpb), **row)

    return log


@pytest.mark.parametrize(
    ("log", "commit", "of_60_s"),
    [
        ([], "d", "d"),
        (["a|1.3|discard|A|d", "b|1.4|discard|A|d"], "a", "a"),
        (["a|1.3|keep|A|d", "b|1.2|keep|A|d", "c|1.4|discard|A|d", "d|0|crash|A|d"], "b", "b"),
        (["a|1.3|keep|A|d", "b|1.2|keep|B|d"], "a", "a"),
        (["a|1.3|keep|A|d", "b|1.2|keep|A|other"], "a", "a"),
        (["a|1.3|keep|A|d", "b|1.2|keep|A, 60 s|d"], "a", "b"),
        (["a|1.3|keep|A|d", "b|1.2|keep|A, report|d"], "a", "a"),
        (["a|1.3|keep|A|d", "e|1.2|keep|A|d"], "a", "a"),  # of another branch
    ],
)
def test_the_commit_to_go_back_to_is_the_last_kept_one_of_the_same_kind(history, log, commit, of_60_s):
    history(*log)
    assert reference(Kind(["A"], "", "d")) == 7 * commit
    assert reference(Kind(["A"], ", 60 s", "d")) == 7 * of_60_s
    harness.log_result(val_bpb=1.1, memory_gb=1.0, gpu="A, 60 s", dataset="d", commit="ccccccc", description="x")
    assert reference(Kind(["A"], "", "d")) == 7 * commit
    assert reference(Kind(["A"], ", 60 s", "d")) == "ccccccc"


def test_a_row_of_an_uncommitted_train_py_does_not_make_its_commit_the_reference(history):
    history("a|1.3|keep|A|d", "b|1.35|discard|A|d")
    row = dict(memory_gb=1.0, gpu="A", dataset="d", commit=7 * "b", description=f"x{harness.DIFFERS}")
    assert harness.log_result(val_bpb=1.2, **row) == "keep"
    assert reference(Kind(["A"], "", "d")) == 7 * "a"


def test_keep_and_discard_overrule_the_rows_of_a_commit_of_this_kind_and_nothing_else(history, capsys):
    history("b|1.3|keep|A|d", "c|1.3|keep|A|d", "b|1.2|discard|A|d", "b|1.3|discard|A|other", "b|1.3|discard|B|d")
    history("b|0|crash|A|d", "e|1.4|discard|A|d", "f|1.1|keep|A, 20 s|d")
    path = harness.RESULTS
    path.write_bytes(path.read_bytes() + b"\xff half a row")
    path.chmod(0o640)
    before = path.read_bytes().split(b"\n")
    capsys.readouterr()

    def changed(commit: str, discard: bool) -> dict[int, bytes]:
        rows.keep(argparse.Namespace(revision=commit, setting="", discard=discard))
        after = path.read_bytes().split(b"\n")
        return {i: b.split(b"\t")[3] for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}

    assert changed("b", False) == {3: b"keep"}
    assert capsys.readouterr().out == "keep bbbbbbb; the next experiment starts from bbbbbbb\n"
    assert changed("c", True) == {2: b"discard", 3: b"keep"}
    assert changed("b", True) == {1: b"discard", 2: b"discard"}  # nothing is kept: the first row
    assert capsys.readouterr().out.endswith("discard bbbbbbb; the next experiment starts from bbbbbbb\n")
    assert changed("e", False) == {1: b"discard", 2: b"discard", 7: b"keep"}
    assert "eeeeeee is on another branch: merge it" in capsys.readouterr().out
    assert changed("b", False) == {1: b"discard", 2: b"discard", 3: b"keep", 7: b"keep"}  # the last one
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(prepare.PrepareError, match=r"no result of aaaaaaa on A, d: train it first"):
        changed("a", False)
    with pytest.raises(
        prepare.PrepareError, match=r"no result of fffffff on A, d, but on A, 20 s, d: give that budget"
    ):
        changed("f", False)


def test_a_row_that_waits_while_the_log_is_replaced_goes_into_the_new_one(history):
    history("a|1.3|keep|A|d")
    with rows.edit_log():
        writer = threading.Thread(target=history, args=["b|1.2|keep|A|d"])
        writer.start()
        time.sleep(0.2)
    writer.join()
    assert [row["val_bpb"] for row in harness.read_results()] == [1.3, 1.2]


@pytest.mark.parametrize(
    ("line", "limit", "setting"),
    [
        ("run", 600, ""),
        ("run --seconds 400", 700, ", 400 s"),
        ("run --seconds 60 --gpu T4", 600, " as T4, 60 s"),
        ("wave --tokens 5000000 --per-gpu 3", 1800, ", 5 M tokens"),
        ("report --limit 7", 7, ""),
    ],
)
def test_the_time_limit_of_a_run_follows_from_its_budget(line, limit, setting):
    args = parse(line.split())
    assert (args.limit, args.setting) == (limit, setting)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("watch x", "unrecognized arguments: x"),
        ("keep", "required: COMMIT"),
        ("keep a b", "unrecognized arguments: b"),
        ("wave a --per-gpu=2", "--per-gpu needs --tokens"),
        ("wave a --per-gpu=0 --tokens=9", "--per-gpu needs --tokens, and a number above 0"),
        ("run --seconds=inf", "inf must be finite and above 0"),
        ("run --tokens=0", "0 must be above 0"),
        ("wave a --limit=nan", "nan must be finite and above 0"),
        ("wave a --seed=0", "unrecognized arguments: --seed=0"),
        ("run --seeds=1", "unrecognized arguments: --seeds=1"),
        ("wave a --seeds=1,", "invalid integers value: '1,'"),
        ("run --gpu=t4", "invalid choice: 't4' (choose from"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(capsys, line, error):
    with pytest.raises(SystemExit):
        parse(line.split())
    assert error in capsys.readouterr().err


@pytest.mark.slow
def test_runs_killed_at_random_moments_leave_a_row_each(night):
    rng, killed = random.Random(10), {2, 5}  # about when it logs, and before
    for i in range(6):
        kill = {"KILL_AFTER": str(rng.uniform(0, 0.1))} if i in killed else {}  # while it trains, logs or prints
        night.experiment(f"idea {i}", f"val_bpb = {rng.gauss(1.2, 0.1):.4f}; time.sleep(0.05)", **kill)
    rows = night.rows()
    assert [row["description"].removesuffix(" [killed]") for row in rows] == [f"idea {i}" for i in range(6)]
    crashed = {i for i, row in enumerate(rows) if row["status"] == "crash"}
    assert crashed and crashed <= killed  # the others had logged before
    night.assert_nothing_else_changed()


def test_of_two_runs_of_one_commit_at_once_a_killed_one_leaves_its_row_too(night):
    """Also if the other one ends well in between."""
    night.edit("idea", "time.sleep(999 if '--seed=1' in sys.argv else 0); val_bpb = 1.2")
    slow = night.start("python -m night run --seed 1")
    night.process("train.py", "--seed=1")
    night.run("python -m night run --seed 2")
    os.kill(night.process("train.py", "--seed=1"), signal.SIGKILL)
    slow.wait(600)
    rows = [(row["description"], row["status"]) for row in night.rows()]
    assert rows == [("idea, seed 2", "keep"), ("idea, seed 1 [killed]", "crash")]


def test_a_run_that_is_killed_right_after_its_row_was_written_leaves_one_row(night):
    """Before it could hand over a copy."""
    log_py = night.folder / "harness" / "log.py"
    text = log_py.read_text().replace('["row"]).write_text(line', '["row"]); os.kill(os.getpid(), 9) #')
    log_py.write_text(text)
    night.edit("idea", "val_bpb = 1.2")
    assert night.start("python -m night run").wait(600) == 128 + signal.SIGKILL
    assert [(row["description"], row["status"]) for row in night.rows()] == [("idea", "keep")]


def test_set_up_begins_an_empty_log_and_needs_no_git_identity(night, tmp_path):
    """The rows of before are put aside."""
    assert night.rows() == [] and (night.folder / "results.tsv.before-mar5").read_text() == HEADER + OLD
    for name in [name for name in night.env if name.startswith(("GIT_AUTHOR", "GIT_COMMITTER"))]:
        del night.env[name]
    night.env |= {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
    night.run("cp results.tsv.before-mar5 results.tsv; git config user.useConfigOnly true")
    night.run(command("## Set-up").replace("mar5", "mar6"))
    assert night.run("git log -1 --format='%an %s %D'") == "autoresearch baseline HEAD -> autoresearch/mar6\n"
    night.train()
    assert [row["description"] for row in night.rows()] == ["baseline"]
    night.run("touch wave.log report.log")
    assert night.run("git status --porcelain") == ""


def test_noise_rows_are_named_by_their_seed(night):
    for seed in "12":
        night.run(command("## Noise").replace("--seed 1", f"--seed {seed}") + "wait")
    assert [row["description"] for row in night.rows()] == ["baseline, seed 1", "baseline, seed 2"]


def test_options_in_the_documents_exist():
    """Each of train.py, prepare.py and night."""
    parsers = {"train": "harness/experiment.py", "prepare": "prepare.py", "night": "night/__main__.py"}
    sources = {name: (ROOT / file).read_text("utf-8") for name, file in parsers.items()}
    known = {name: set(re.findall(r'add(?:_argument)?\(\s*"(--[\w-]+)"', text)) for name, text in sources.items()}
    known["night"] |= known["train"]  # run passes them on
    for document in ("README.md", "program.md", "docs/waves.md", "docs/loop.md", "docs/tune.md", "colab.ipynb"):
        text = re.sub(r"\$\(.*\)|--\w+ '.*?'", "", (ROOT / document).read_text("utf-8"))  # other commands within
        for script, arguments in re.findall(r"(train|prepare|night)(?:\.py| )([^`|;&>\n]*)", text):
            if script in known:
                assert set(re.findall(r"--[a-z-]+", arguments)) <= known[script], (document, script, arguments)


# ---- the picture, and autoresearch's notebook ----


def simulate(runs: int, crash_every: int) -> None:
    """Logs runs on two GPUs."""
    rng = random.Random(0)
    for i in range(runs):
        val_bpb = 1.3 - 0.1 * (1 - math.exp(-i / 40)) + abs(rng.gauss(0, 0.01)) + (i in (5, 6))  # two far outliers
        row = dict(val_bpb=val_bpb, memory_gb=3.0, gpu="H200" if i % 3 else "T4", dataset="d-1", commit=f"{i:07x}")
        row["description"] = f"{rng.choice(WORDS)} $x$ {i} " + 30 * "long " * (i % 7 == 0)
        harness.log_result(**row, reason="killed" if i > 2 and i % crash_every == 0 else "")


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws the log; returns the axes of each gpu and dataset."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))

    def draw() -> list:
        plot()
        assert figures[-1].get_facecolor() == (1, 1, 1, 1)  # on a dark page, too
        return figures[-1].axes

    return draw


def check_chart(chart, rows: list[dict]) -> None:
    """Each experiment is a mark, crashes lie below all others, each kept one and ten near misses are in the tables."""
    points = [tuple(point) for marks in chart.collections for point in marks.get_offsets()]
    assert sorted(x for x, _ in points) == list(range(1, len(rows) + 1))
    (left, right), (bottom, top) = chart.get_xlim(), chart.get_ylim()
    assert (left, right) == (0.5, len(rows) + 0.5)
    assert all(left < x < right and bottom <= y <= top for x, y in points)
    scores = [row["val_bpb"] for row in rows if row["status"] != "crash"]
    assert all((y < min(scores)) == (rows[int(x) - 1]["status"] == "crash") for x, y in points)
    assert 0.003 * min(scores) < top - bottom
    text, _, missed = chart.texts[0].get_text().partition("kept before)\n")
    kept = [(str(number), row["val_bpb"]) for number, row in enumerate(rows, start=1) if row["status"] == "keep"]
    numbers = [int(number) for number, _ in kept]
    gains = ["", *(f"{before - after:.4f}" for (_, before), (_, after) in itertools.pairwise(kept))]
    expected = [(number, f"{bpb:.4f}", gain) for (number, bpb), gain in zip(kept, gains, strict=True)]
    assert re.findall(r"^ *(\d+) +(\d\.\d{4}) +(-?\d\.\d{4}|)  ", text, re.M) == expected
    for number in numbers:
        assert " ".join(rows[number - 1]["description"].split()) in " ".join(text.split())
    missed = [int(number) for number in re.findall(r"^ *(\d+) +\d\.\d{4} +-?\d\.\d{4}  ", missed, re.M)]
    keeps = [row["val_bpb"] if row["status"] == "keep" else None for row in rows]
    before = {n: [bpb for bpb in keeps[: n - 1] if bpb][-1:] for n in range(1, len(rows) + 1)}
    left = [n for n, row in enumerate(rows, start=1) if row["status"] == "discard" and before[n]]
    by = {n: round(rows[n - 1]["val_bpb"] - before[n][0], 6) for n in left}  # which two may share
    assert [by[n] for n in missed] == sorted(by.values())[:10] and len({*missed}) == len(missed)
    labels = [label.get_text() for label in chart.get_legend().get_texts()]
    counts = [int(label.split()[0]) for label in labels if "best" not in label]
    assert sum(counts) == len(rows)


@pytest.mark.parametrize(("runs", "crash_every"), [(1, 10), (5, 1), (120, 10), (300, 7)])
def test_picture_has_a_chart_for_each_gpu_with_every_experiment_and_a_table_of_the_kept_ones(drawn, runs, crash_every):
    simulate(runs, crash_every)
    rows = harness.read_results()
    for chart, gpu in zip(drawn(), ("T4", "H200")[:runs], strict=True):
        panel = [row for row in rows if row["gpu"] == gpu]
        check_chart(chart, panel)
        assert chart.get_title("left").startswith(f"{gpu}, d-1\n")
        scores = [row["val_bpb"] for row in panel if row["status"] != "crash"]
        bottom, top = chart.get_ylim()
        assert scores[0] < top and (runs < 100 or top - bottom < 1.6 * (scores[0] - min(scores)))  # despite outliers
        best = [y for y in chart.lines[0].get_ydata() if math.isfinite(y)]
        assert best == sorted(best, reverse=True)


def test_the_picture_begins_with_the_baseline_not_with_an_idea_that_ended_before_it(drawn):
    where = dict(memory_gb=1.0, gpu="g", dataset="d")
    harness.log_result(val_bpb=1.5, description="idea", commit="a", to_beat=0.0, **where)
    for commit, val_bpb in (("b", 1.3), ("c", 1.29), ("d", 1.31), ("e", 1.3)):
        harness.log_result(val_bpb=val_bpb, description="x", commit=commit, **where)
    (chart,) = drawn()
    assert chart.get_title("left").endswith("\nval_bpb 1.3000 to 1.2900") and chart.get_ylim()[1] < 1.4
    harness.RESULTS.write_text(
        harness.RESULTS.read_text().replace("c\t1.290000\t1.0\tkeep", "c\t1.290000\t1.0\tdiscard")
    )
    (chart,) = drawn()
    assert chart.get_title("left").endswith("\nval_bpb 1.3000"), "somebody overruled that"


def test_what_was_merged_later_is_no_near_miss(drawn):
    where = dict(memory_gb=1.0, gpu="g", dataset="d")
    for commit, val_bpb, subject in (
        ("a", 1.5, "baseline"),
        ("b", 1.3, "wider"),
        ("c", 1.4, "deeper"),
        ("d", 1.41, "wider"),
        ("e", 1.2, "deeper, again on b"),
    ):
        harness.log_result(val_bpb=val_bpb, description=subject, commit=commit, **where)
    (chart,) = drawn()
    assert re.findall(r"\w+", chart.texts[0].get_text().partition("kept before)")[2])[-1:] == ["wider"]
    assert "deeper" not in chart.texts[0].get_text().partition("near misses")[2]


def test_in_the_picture_a_later_row_of_a_run_stands_for_its_crash(drawn):
    where = dict(memory_gb=1.0, gpu="g", dataset="d", commit="abc")
    harness.log_result(val_bpb=1.3, description="idea [2]", **where)
    harness.log_result(val_bpb=0.0, description="idea, seed 1", reason="killed", **where)
    harness.log_result(val_bpb=0.0, description="other, seed 1", reason="killed", **where)
    harness.log_result(val_bpb=1.2, description="idea, seed 1", **where)
    harness.log_result(val_bpb=1.25, description="other, seed 2", **where)
    (chart,) = drawn()
    assert [label.get_text() for label in chart.get_legend().get_texts()] == [
        "1 discard",
        "2 keep",
        "1 crash",
        "best +- 2 s.d. of a seed",
    ]


def test_gpu_column_and_description_are_read_as_they_are_written():
    no_fa3, tiny = "NVIDIA H200, without FA3", ", 5e-06 M tokens"
    for text, *parts in (
        ("cpu", "cpu", "", False),
        ("Tesla T4, 60 s", "Tesla T4", ", 60 s", False),
        (f"{no_fa3} as T4, 38.6 M tokens", no_fa3, " as T4, 38.6 M tokens", False),
        (f"{no_fa3}, report", no_fa3, "", True),
        (f"cpu{tiny}, report", "cpu", tiny, True),
        ("", "", "", False),
    ):
        assert [*Label.parse(text)] == parts and str(Label(*parts)) == text
    for status, text, *parts in (
        ("keep", "wide (train.py differs), seed 7, test 1.234567", "wide (train.py differs)", 7, 1.234567, ""),
        ("crash", "idea [2], seed 0 [NaN (1) at step 5]", "idea [2]", 0, None, "NaN (1) at step 5"),
        ("discard", "idea [2]", "idea [2]", 42, None, ""),
        ("crash", "", "", 42, None, ""),
    ):
        row = dict(status=status, description=text)
        assert [*Description.parse(row)] == parts and str(Description(*parts)) == text
    row = dict(commit="c", status="keep", description="idea, seed 42, test 1.234567")
    assert name_of(row) == ("c", "idea"), "the default seed is the same run, given or not"
    row["description"] = str(Description(harness.plain_subject("LR 1 -> 2, seed 42"), 7))
    assert Description.parse(row) == ("LR 1 -> 2; seed 42", 7, None, "")


@pytest.mark.parametrize("rows", ["", "a\t0.000000\t0.0\tcrash\tx\tcpu\td\n"])
def test_a_picture_of_nothing_is_an_error_that_names_the_remedy(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    harness.RESULTS.write_text(HEADER + rows)
    with pytest.raises(prepare.PrepareError, match=r"run `python train\.py`"):
        plot()


def test_the_chart_of_readme_is_of_the_log_in_the_repository_for_light_and_dark_pages(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    monkeypatch.setattr(harness, "RESULTS", harness.RESULTS)  # plot sets it
    figures, saved = [], []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure) or saved.append(path))
    plot(argparse.Namespace(revisions=[], log=ROOT / "tests/night/results.tsv", chart=tmp_path / "night.png"))
    assert saved == [tmp_path / "night.png", tmp_path / "night-dark.png"]
    assert all((ROOT / "docs" / path.name).exists() for path in saved)
    light, dark = figures
    assert light.get_facecolor() == (1, 1, 1, 1) and max(dark.get_facecolor()[:3]) < 0.1
    for figure in figures:
        (chart,) = figure.axes
        assert sum(len(marks.get_offsets()) for marks in chart.collections) == 133
        assert all(not text.get_text() for text in chart.texts), "no tables"
        assert chart.get_title("left").endswith("val_bpb 1.2070 to 1.1945")
        assert 133 == sum(int(label.get_text().split()[0]) for label in chart.get_legend().get_texts()[:3])


@pytest.mark.filterwarnings("error", "ignore:Glyph")
@pytest.mark.parametrize("scores", [(1.2,), (1.2, 1.3), (1.2, 1.1)])
@pytest.mark.parametrize("to_beat", [None, 0.0])
def test_the_first_rows_make_a_picture_already_also_if_none_is_kept(tmp_path, monkeypatch, capsys, scores, to_beat):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    monkeypatch.setattr(rows, "ROOT", tmp_path)  # no git there
    for seed, score in enumerate(scores):
        row = dict(val_bpb=score, memory_gb=1.0, gpu="g", dataset="d", commit="1", description=f"你好 $x, seed {seed}")
        harness.log_result(**row, to_beat=to_beat)
        harness.log_result(**row | {"gpu": "g, report"})
    plot()
    assert (tmp_path / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{tmp_path / 'progress.png'}\n"


def test_the_band_around_the_best_is_two_standard_deviations_of_a_seed_by_all_repeated_runs(drawn):
    """Neither a seed that was repeated nor what ran on top of a commit is one more seed of it. The best, its gain and
    the title are those of one seed, the most frequent: another one that was lucky is no progress."""
    where = dict(memory_gb=1.0, dataset="d", commit="abc")
    for text, score in {"x": 1.3, "x, seed 42": 1.3, "x (train.py differs)": 1.25, "x, seed 1": 1.2}.items():
        harness.log_result(val_bpb=score, gpu="g, 60 s", description=text, **where)
    for commit, scores in {"abc": (1.30, 1.32), "def": (1.10, 1.14, 1.18), "one": (1.0,)}.items():
        for seed, score in enumerate(scores):
            row = where | {"commit": commit, "description": f"x, seed {seed}"}
            harness.log_result(val_bpb=score, gpu="g, 60 s, report", **row)
    harness.log_result(val_bpb=0.0, gpu="g, 60 s, report", reason="killed", **where)
    harness.log_result(val_bpb=1.0, gpu="g, 50 s, report", **where)
    for seed in (1001, 1002):  # of an attribution
        harness.log_result(val_bpb=seed / 1e3, gpu="g, 60 s, report", description=f"x, seed {seed}", **where)
    (chart,) = drawn()
    noise = ((0.1**2 / 2 + 0.02**2 / 2 + 2 * 0.04**2) / 4) ** 0.5  # pooled: 1, 1 and 2 degrees of freedom
    (band,) = [patch.get_bbox() for patch in chart.patches]
    assert (band.y0, band.y1) == pytest.approx((1.25 - 2 * noise, 1.25 + 2 * noise))
    assert chart.get_title("left") == "g, 60 s, d\nval_bpb 1.3000 to 1.2500"
    (lines,) = [text.get_text().split("\n") for text in chart.texts]
    assert [line.split() for line in lines[1:3]] == [
        ["1", "1.3000", "x"],
        ["3", "1.2500", "0.0500", "x", "(train.py", "differs)"],
    ]
    assert not any("seed 1" in line for line in lines)


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys, "argv", ["night", "plot", "HEAD"])
    with pytest.raises(prepare.PrepareError, match=r"pip install -e '\.\[plot\]'"):
        main()
