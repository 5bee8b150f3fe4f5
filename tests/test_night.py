"""An agent's night: program.md's own commands, played in a scratch git repository with a stub for train.py."""

import argparse
import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import night_chart
import pytest
from small_corpus import ROOT, copy_files, told

import harness
import prepare
from night import git as git_of_night
from night import rows as night_rows
from night.__main__ import main, parse
from night.plot import plot
from night.rows import Kind, grouped, reference

PROGRAM = (ROOT / "program.md").read_text("utf-8")
HEADER = "\t".join(harness.COLUMNS) + "\n"
OLD = "0123456\t1.000000\t2.0\tkeep\tby the human, before the night\tcpu\td\t300 s\t42\t9.0\t\t\trun\n"

# What train.py does around its training, in 0.3 s. BODY is what an experiment does in there.
STUB = """\
import os, signal, subprocess, sys, time
from harness import log_result
from prepare import dataset_id

def interrupted(*_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupted)
seed = int(dict(option.split("=") for option in sys.argv[1:]).get("--seed", 42))
where = dict(gpu="cpu", dataset=dataset_id(), seed=seed)
try:
    print("training", flush=True)
    BODY
    status = log_result(val_bpb=val_bpb, memory_gb=2.0, **where)
    print(f"---\\nval_bpb:          {val_bpb:.6f}\\npeak_vram_mb:     2048.0\\nstatus:           {status}")
except BaseException as error:
    log_result(val_bpb=0.0, memory_gb=0.0, reason=type(error).__name__, **where)
    raise
"""


IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)"
DAEMON = f"subprocess.Popen([sys.executable, '-c', {IGNORES!r}], start_new_session=True, stdout=-1).stdout.readline()"


def command(step: str) -> str:
    """The shell command under a step of program.md."""
    return re.search(rf"{re.escape(step)}.*?```bash\n(.*?)```", PROGRAM, re.S)[1]


RUN = command("**2. Run.**") + "wait"


class Night:
    """A clone with one commit, its data prepared, at the end of program.md's set-up."""

    def __init__(self, folder: Path, cache: Path):
        self.mark = f"NIGHT={uuid.uuid4()}"  # in the environment of every process that comes of this
        self.env = os.environ | dict([self.mark.split("=")])
        binaries = folder.with_name("bin")  # `python` is the one that runs the tests, but `import torch` takes no time
        self.env |= {"AUTORESEARCH_CACHE": str(cache), "PYTHONPATH": str(binaries)}
        self.env["PATH"] = f"{binaries}:{self.env['PATH']}"
        template = cache.with_name("night")
        if not template.exists():
            self.folder = template / "clone"
            self.set_up()
        shutil.copytree(template, folder.parent, dirs_exist_ok=True)
        self.folder, self.log = folder, folder / "run.log"

    def set_up(self) -> None:
        copy_files(self.folder)
        for path, text in {
            "results.tsv": HEADER + OLD,
            ".gitignore": (ROOT / ".gitignore").read_text("utf-8"),
            "train.py": STUB.replace("BODY", "val_bpb = 1.3"),
            "../bin/python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
            "../bin/torch/__init__.py": "from . import cuda",
            "../bin/torch/cuda.py": "is_available = device_count = int",
        }.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(text, "utf-8")
        (self.folder / "../bin/python").chmod(0o755)
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

    def process(self, *words: str, leads_session: bool | None = None) -> int:
        """Waits for one that runs a script with these first arguments."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            for pid, found in self.processes().items():
                with contextlib.suppress(ProcessLookupError):
                    names = tuple(Path(word).name for word in found[1 : len(words) + 1])
                    if names == words and leads_session in (None, pid == os.getsid(pid)):
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

    def experiment(self, description: str, body: str) -> str:
        """Once through the loop; returns the status."""
        self.edit(description, body)
        self.train()
        return self.decide()

    def begin(self, word: str) -> subprocess.Popen:
        """A run, when it has printed a word."""
        self.log.unlink(missing_ok=True)
        loop = self.start(RUN)
        while not self.log.exists() or word not in self.log.read_text():
            time.sleep(0.01)
        return loop

    def train(self) -> None:
        self.run(RUN)

    def edit(self, description: str, body: str) -> None:
        (self.folder / "train.py").write_text(STUB.replace("BODY", body), "utf-8")
        self.run(command("**1. Change and commit.**").replace("what changed", description))

    def decide(self) -> str:
        row, *found = self.run(command("**3. Read the row**")).splitlines()
        status = row.split("\t")[3]
        whole = [line.split()[0] for line in found] == ["val_bpb:", "peak_vram_mb:"]
        assert whole or status == "crash"
        if status != "keep":
            self.run(command("**4. Keep or go back.**"))
        return status

    def rows(self) -> list[dict]:
        """All of them well formed, or it fails."""
        path = self.folder / "results.tsv"
        text = path.read_text("utf-8") if path.exists() else ""  # one look: runs go on writing
        rows = [row for row in map(harness.parse_row, text.split("\n")[1:]) if row]
        assert not text or (text.startswith(HEADER) and text.count("\n") == 1 + len(rows))
        return rows


@pytest.fixture
def night(prepared, tmp_path) -> Night:
    return Night(tmp_path / "clone", prepared)


def test_a_log_that_cannot_grow_and_what_a_hook_tells_git_cost_a_run_nothing(night):
    """A hook or an alias sets variables that send git calls elsewhere: train.py gets none of them."""
    talks = "sys.stderr.write('warning\\n' * 100_000)"
    night.edit("talks", f"{talks}; val_bpb = 1.2 + len({{'GIT_DIR', 'GIT_INDEX_FILE'}} & {{*os.environ}})")
    elsewhere = dict(GIT_DIR="/nowhere/.git", GIT_INDEX_FILE="/nowhere/.git/index")
    night.run("python -m night run 2> /dev/full", **elsewhere)
    assert [(row["val_bpb"], row["description"]) for row in night.rows()] == [(1.2, "talks")]


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
    names = "baseline, wider, deeper, no norm [ValueError], a typo [SyntaxError line 14], slower [KeyboardInterrupt], "
    names += "head_dim 64, head_dim 32"
    assert [told(row) for row in night.rows()] == names.split(", ")
    assert night.run("git status --porcelain") == "" and night.run("git diff --name-only main") == "train.py\n"
    assert night.run("git show HEAD:results.tsv main:results.tsv") == 2 * (HEADER + OLD), "no row is committed"
    subjects = dict(line.split(" ", 1) for line in night.run("git log --format='%h %s' --abbrev=7").splitlines())
    assert all(row["description"] == subjects[row["commit"]] for row in night.rows())
    kept = [row["commit"] for row in night.rows() if row["status"] == "keep"][-1]
    assert night.run(f"git diff {kept} -- train.py") == ""


CALLED = "[signal.signal(n, lambda *_: print('was called', flush=True)) for n in (signal.SIGALRM, signal.SIGTERM)]"


@pytest.mark.parametrize(
    ("body", "limit", "reason"),
    [
        (f"{CALLED}; time.sleep(60)", 3, "no evaluation within 0.05 min"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 60, "killed"),
        ("os.write(2, b'  File \"train.py\", line 3\\nValueError: 1\\n'); os._exit(7)", 60, "exit status 7"),
        (f"{DAEMON}; os._exit(0)", 60, "no row"),
    ],
)
def test_an_end_that_train_py_cannot_log_gets_its_true_reason_and_leaves_no_process(night, body, limit, reason):
    """Not even one that has left its session, and ignores what can be ignored."""
    night.edit("idea", body)
    night.run(RUN.replace("night run", f"night run --limit {limit}"))
    assert [told(row) for row in night.rows()] == [f"idea [{reason}]"]
    assert not night.processes() and "was called" not in night.log.read_text()


def test_an_error_while_train_py_is_imported_is_named_with_its_line(night):
    for line, reason in {
        "import json; json.loads('')": "JSONDecodeError line 1",
        "raise ValueError('of\\nmany\\nlines')": "ValueError line 1",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('size')": "KeyError line 4",
    }.items():
        (night.folder / "train.py").write_text(f"{line}\n{STUB}")
        night.run("git commit -qam idea")
        night.train()
        assert told(night.rows()[-1]) == f"idea [{reason}]"


def kill_at(night: Night, file: str, line: str) -> None:
    """train.py gets SIGKILL at that line of harness/."""
    path = night.folder / "harness" / file
    text = path.read_text()
    assert text.count(line) == 1
    kill = "__import__('sys').argv[0] == 'train.py' and __import__('os').kill(__import__('os').getpid(), 9); "
    path.write_text(text.replace(line, kill + line))
    night.run("git commit -qam deadly")


HANDED_OVER = ("log.py", "rows.append(row)\n    return")
WAITS = "print('waits', flush=True); time.sleep(200)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.parametrize(
    ("guard", "number", "body", "reason"),
    [
        (False, signal.SIGKILL, f"{DAEMON}; signal.signal(signal.SIGTERM, interrupted)", "KeyboardInterrupt"),
        (True, signal.SIGKILL, f"{DAEMON}; signal.signal(signal.SIGTERM, interrupted)", "killed"),
        pytest.param(False, signal.SIGTERM, DEAF, "killed", marks=pytest.mark.slow),  # waits ten seconds
    ],
)
def test_no_process_is_left_when_a_supervisor_is_killed_and_its_row_is(night, guard, number, body, reason):
    """train.py hands its row over if it has the time, and it has not if it ignores SIGTERM."""
    kill_at(night, *HANDED_OVER)
    night.edit("idea", f"{body}; {WAITS}")
    loop = night.begin("waits")
    os.kill(night.process("-m", "night", "run", leads_session=guard), number)
    loop.wait(90)
    assert night.all_gone()
    assert [told(row) for row in night.rows()] == [f"idea [{reason}]"]


@pytest.mark.parametrize("waits", ["waitid", "waitpid"])
def test_a_signal_that_comes_when_the_guard_has_just_ended_costs_no_row(waits):
    """Nor is it sent to whoever has the guard's process id by then."""
    script = f"""\
import os, signal, types
from night import run

real, run.ExpectedRow = os.{waits}, lambda args: types.SimpleNamespace(ensure_row=print)
run.guard_train = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
os.{waits} = lambda *args: (real(*args), os.kill(os.getpid(), signal.SIGTERM))[0]
print(run.run(None))
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True, cwd=ROOT) == "killed\n137\n"


def test_exit_status_options_and_output_are_those_of_train_py_and_a_budget_set_by_hand_leaves_no_crash_row(night):
    """Nor would it leave a row if it were good."""
    night.edit("exit", "print(sys.argv[1:]); os._exit(3)")
    process = night.start("python -m night run --seed 5 --seconds 9")
    assert "['--seconds=9.0', '--seed=5']" in process.communicate(timeout=600)[0] and process.returncode == 3
    night.run("python -m night run --tokens=5; python -m night run --seconds 0")
    assert night.rows() == []


def test_rows_survive_what_a_careless_agent_does_to_the_clone(night):
    night.train()
    before = night.rows()
    night.run("git commit -qam all; git add -A; git stash; git checkout -q .; git checkout -q main; git reset --hard")
    assert night.rows() == before and len(before) == 1
    assert night.run("git log --all --format= --name-only -- results.tsv | sort -u") == "results.tsv\n"  # of `start`


def test_a_row_is_of_what_began_whatever_changes_during_the_run(night, tmp_path):
    """The commit, the log and the dataset change; train.py forgets who has asked for it, or was not committed."""
    cache = Path(shutil.copytree(night.env["AUTORESEARCH_CACHE"], tmp_path / "cache"))
    night.env["AUTORESEARCH_CACHE"] = str(cache)
    own = (cache / "current").read_text().strip()
    shutil.copytree(cache / own, cache / "other")
    (night.folder / ".dataset").unlink(missing_ok=True)
    night.experiment("a", f"open({str(cache / 'current')!r}, 'w').write('other\\n')\n    os._exit(3)")
    (cache / "current").write_text(own)
    night.experiment("b", "os.system('git commit -q --allow-empty -m later')\n    val_bpb = 1.2")
    night.experiment("alone", "del os.environ['AUTORESEARCH_RUN']; val_bpb = 1.15")
    night.edit("c", "val_bpb = 1.1")
    night.run("echo >> train.py")
    night.train()
    expected = ["a [exit status 3]", "b", "alone", "c (uncommitted: train.py)"]
    assert [told(row) for row in night.rows()] == expected
    assert [row["commit"][7:] for row in night.rows()] == ["", "", "", "+"]
    assert {row["dataset"].partition("-")[0] for row in night.rows()} == {own.partition("@")[0]}
    night.experiment("d", "os.rename('results.tsv', 'results.tsv.old')\n    val_bpb = 1.2")
    assert [(row["description"], row["status"]) for row in night.rows()] == [("d", "keep")]


def test_the_documents_commands_overrule_a_status_and_name_the_reference(night):
    night.train()
    night.edit("half the lines", "val_bpb = 1.30")
    night.train()
    first, last = night.rows()
    keep, discard = re.findall(r"`(python -m night keep .*?)`", PROGRAM)
    for words, status, then in ((discard, "discard", first), (keep, "keep", last)):
        assert night.run(words) == f"{status} {last['commit']}; the next experiment starts from {then['commit']}\n"
        assert night.rows() == [first, last | {"status": status, "by": "person"}]
    assert night.run("python -m night reference --tokens 9") == f"{last['commit']}\n", "that of five-minute runs"
    (night.folder / "results.tsv").write_text(HEADER + OLD.replace("300 s", "5 M tokens"))
    assert "night: this is HEAD, as results.tsv has no row on cpu, " in night.run("python -m night reference")


@pytest.fixture
def history(monkeypatch, tmp_path):
    """A branch with the commits a, b, c and d, and a log: of each row the commit, val_bpb, gpu and dataset."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    monkeypatch.setattr(night_rows, "gpu_names", lambda imitates: ["A"])
    monkeypatch.setattr(prepare, "dataset_id", lambda: "d")

    def git(what: str, *args: str, **_) -> str:
        if what == "rev-list":
            return "".join(f"{letter * 40}\n" for letter in "dcba")
        return "" if what == "cat-file" else args[-2][0].replace("H", "d") * 40 + " x"

    monkeypatch.setattr(git_of_night, "git", git)

    def log(*lines: str) -> None:
        for line in lines:
            commit, val_bpb, status, *place = line.split("|")
            row = dict(zip(("gpu", "dataset", "budget"), place, strict=False), description="x", memory_gb=1.0)
            row |= dict(commit=7 * commit[0] + commit[1:], to_beat=math.inf if status == "keep" else 0.0)
            row |= dict(reason="killed" * (status == "crash"), report=status == "report")
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
        (["a|1.3|keep|A|d", "b|1.2|keep|A|d|60 s"], "a", "b"),
        (["b|1.2|report|A|d", "a|1.3|discard|A|d"], "a", "a"),
        (["a|1.3|keep|A|d", "e|1.2|keep|A|d"], "a", "a"),  # of another branch
        (["a|1.3|keep|A|d", "b|1.35|discard|A|d", "b+|1.2|keep|A|d"], "a", "a"),  # of uncommitted files
    ],
)
def test_the_commit_to_go_back_to_is_the_last_kept_one_of_the_same_kind(history, log, commit, of_60_s):
    history(*log)
    assert reference(Kind("A", "300 s", "d")) == 7 * commit
    assert reference(Kind("A", "60 s", "d")) == 7 * of_60_s
    assert reference(Kind("A as T4", "60 s", "d")) == 7 * commit, "of five minutes as this GPU"
    history("c|1.1|keep|A|d|60 s")
    assert reference(Kind("A", "300 s", "d")) == 7 * commit
    assert reference(Kind("A", "60 s", "d")) == "ccccccc"


def test_keep_and_discard_overrule_the_rows_of_a_commit_of_this_kind_and_nothing_else(history, capsys):
    history("b|1.3|keep|A|d", "c|1.3|keep|A|d", "b|1.2|discard|A|d", "b|1.3|discard|A|other", "b|1.3|discard|B|d")
    history("b|0|crash|A|d", "e|1.4|discard|A|d", "f|1.1|keep|A|d|20 s")
    path = harness.RESULTS
    path.write_bytes(path.read_bytes() + b"\xff half a row\n")
    path.chmod(0o640)
    before = path.read_bytes().split(b"\n")
    capsys.readouterr()

    def changed(commit: str, discard: bool) -> dict[int, bytes]:
        night_rows.keep(argparse.Namespace(revision=commit, budget="300 s", gpu=None, discard=discard))
        after = path.read_bytes().split(b"\n")
        return {i: b.split(b"\t")[3] for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}

    assert changed("b", False) == {3: b"keep"}
    assert capsys.readouterr().out == "keep bbbbbbb; the next experiment starts from bbbbbbb\n"
    assert changed("c", True) == {2: b"discard", 3: b"keep"}
    assert changed("b", True) == dict.fromkeys((1, 2, 3), b"discard")  # nothing is kept: the first row
    assert capsys.readouterr().out.endswith("discard bbbbbbb; the next experiment starts from bbbbbbb\n")
    assert changed("e", False) == {1: b"discard", 2: b"discard", 3: b"discard", 7: b"keep"}
    assert "eeeeeee is on another branch: merge it" in capsys.readouterr().out
    assert changed("b", False) == {1: b"discard", 2: b"discard", 3: b"keep", 7: b"keep"}  # the last one
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(prepare.PrepareError, match=r"no result of fffffff on A, 300 s, d$"):
        changed("f", False)


def test_a_persons_word_stands_until_the_next_one_and_a_discard_also_for_new_rows_of_its_commit(history):
    history("a|1.3|keep|A|d", "b|1.2|keep|A|d", "c|1.4|discard|A|d", "a|1.3|discard|A|d")
    kind = Kind("A", "300 s", "d")
    assert night_rows.set_status(7 * "b", kind, "discard", by="person")
    assert night_rows.set_status(7 * "c", kind, "keep", by="person")
    history("b|1.1|keep|A|d", "c|1.41|discard|A|d", "b|1.1|keep|B|d", "b|0|crash|A|d", "b|1.1|report|A|d")
    said = [f"{row['status']} by {row['by']}" for row in harness.read_results()]
    assert said[1:3] == ["discard by person", "keep by person"]
    assert said[4:] == ["discard by person", "discard by night", "keep by night", "crash by night", "report by night"]
    persons = [row for row in harness.read_results() if row["by"] == "person"]
    night_rows.set_status(7 * "b", kind, "keep"), night_rows.set_status(7 * "c", kind, "discard")
    night_rows.judge({(7 * "a", 42), (7 * "b", 42)}, 7 * "a", kind)
    assert reference(kind) == 7 * "c"
    with harness.edit_log() as rows:
        night_rows.change_status(rows, "discard")
    assert [row for row in harness.read_results() if row["by"] == "person"] == persons
    assert night_rows.set_status(7 * "b", kind, "keep", by="person"), "a person may think again"
    history("b|1.05|keep|A|d", "d|1.4|discard|A|d", "d|1.1|keep|A|d")
    assert [row["status"] for row in harness.read_results()[-3:]] == ["keep", "discard", "keep"], "a run's is no word"


def test_an_earlier_commit_that_runs_again_with_another_seed_does_not_become_the_reference(history):
    history("a|1.3|keep|A|d", "b|1.2|keep|A|d")
    kind = Kind("A", "300 s", "d")
    row = dict(val_bpb=1.1, memory_gb=1.0, commit=7 * "a", description="x", gpu="A", dataset="d", seed=1)
    assert harness.log_result(**row) == "keep" and reference(kind) == 7 * "b"
    assert night_rows.set_status(7 * "a", kind, "keep", by="person") and reference(kind) == 7 * "a"


def test_the_time_limit_of_a_run_follows_from_its_budget():
    for line, limit, budget in (
        ("run", 600, "300 s"),
        ("run --seconds 400", 700, "400 s"),
        ("wave --tokens 5000000 --per-gpu 3", 1800, "5 M tokens"),
        ("report --limit 7", 7, "300 s"),
    ):
        args = parse(line.split())
        assert (args.limit, args.budget) == (limit, budget)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("wave a --per-gpu=2", "--per-gpu needs --tokens"),
        ("wave a --per-gpu=0 --tokens=9", "--per-gpu needs --tokens, and a number above 0"),
        ("run --seconds=inf", "inf must be finite and above 0"),
        ("loop --agent=true --runs=0", "0 must be finite and above 0"),
        ("wave a --limit=nan", "nan must be finite and above 0"),
        ("wave a --seed=0", "unrecognized arguments: --seed=0"),
        ("wave a --seeds=1,", "invalid integers value: '1,'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(capsys, line, error):
    with pytest.raises(SystemExit):
        parse(line.split())
    assert error in capsys.readouterr().err


def test_of_two_runs_of_one_commit_at_once_a_killed_one_leaves_its_row_too(night):
    """Also if the other one ends well in between."""
    night.edit("idea", "time.sleep(999 if '--seed=1' in sys.argv else 0); val_bpb = 1.2")
    slow = night.start("python -m night run --seed 1")
    night.process("train.py", "--seed=1")
    night.run("python -m night run --seed 2")
    os.kill(night.process("train.py", "--seed=1"), signal.SIGKILL)
    slow.wait(600)
    rows = [(told(row), row["status"]) for row in night.rows()]
    assert rows == [("idea, seed 2", "keep"), ("idea, seed 1 [killed]", "crash")]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        HANDED_OVER,
        ("journal.py", "os.fsync(file.fileno())"),  # when the journal has it
        ("log.py", 'return row["status"]'),  # when the file has it
    ],
)
def test_a_run_that_is_killed_while_its_row_is_written_leaves_one_row(night, file, line):
    kill_at(night, file, line)
    night.edit("idea", "val_bpb = 1.2")
    assert night.start("python -m night run").wait(600) == 128 + signal.SIGKILL
    assert [(told(row), row["val_bpb"], row["status"]) for row in night.rows()] == [("idea", 1.2, "keep")]


def test_set_up_begins_an_empty_log_and_needs_no_git_identity_and_noise_rows_are_named_by_their_seed(night, tmp_path):
    """The rows of before are put aside."""
    assert night.rows() == [] and (night.folder / "results.tsv.before-mar5").read_text() == HEADER + OLD
    for name in [name for name in night.env if name.startswith(("GIT_AUTHOR", "GIT_COMMITTER"))]:
        del night.env[name]
    night.env |= {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
    night.run("cp results.tsv.before-mar5 results.tsv; git config user.useConfigOnly true")
    night.run(command("## Set-up").replace("mar5", "mar6"))
    assert night.run("git log -1 --format='%an %s %D'") == "autoresearch baseline HEAD -> autoresearch/mar6\n"
    night.train()
    night.run(command("## Noise") + "wait")
    assert [told(row) for row in night.rows()] == ["baseline", "baseline, seed 1"]
    night.run("touch wave.log report.log")
    assert night.run("git status --porcelain") == ""


def test_options_in_the_documents_exist():
    """Each of train.py, prepare.py and night."""
    parsers = {"train": "harness/experiment.py", "prepare": "prepare.py", "night": "night/__main__.py"}
    sources = {name: (ROOT / file).read_text("utf-8") for name, file in parsers.items()}
    known = {name: set(re.findall(r'add(?:_argument)?\(\s*"(--[\w-]+)"', text)) for name, text in sources.items()}
    known["night"] |= known["train"]  # run passes them on
    for document in ("README.md", "program.md", "docs/waves.md", "docs/loop.md", "docs/tune.md", "colab.ipynb"):
        text = (ROOT / document).read_text("utf-8")
        text = re.sub(r"""\$\(.*\)|--\w+ (['\"]).*?\1""", "", text)  # other commands within
        for script, arguments in re.findall(r"(train|prepare|night)(?:\.py| )([^`|;&>\n]*)", text):
            if script in known:
                assert set(re.findall(r"--[a-z-]+", arguments)) <= known[script], (document, script, arguments)


# ---- the picture ----


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws the log; returns the axes of each gpu and dataset. With rows, it logs them first, in short."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    monkeypatch.setattr("night.plot.in_history", lambda rows: [])  # none of their commits is in this repository
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **how: figures.append(figure))

    def draw(*rows: tuple, draw=plot) -> list:
        for commit, seed, val_bpb, *more in rows:
            row = dict(memory_gb=1.0, gpu="g", dataset="d", budget="60 s", description="idea [2]")
            row |= dict(commit=commit, seed=seed, reason="killed" * (not val_bpb))
            harness.log_result(val_bpb=val_bpb, **row | dict(*more))
        figures.clear()
        draw()
        save(figures[0], tmp_path / "progress.png")
        assert figures[0].get_facecolor() == (1, 1, 1, 1)  # on a dark page, too
        return [chart for figure in figures for chart in figure.axes]

    return draw


def labels(chart) -> list[str]:
    return [label.get_text() for label in chart.get_legend().get_texts()]


def test_a_picture_has_a_chart_for_each_gpu_with_every_experiment(drawn):
    """Of the night in the repository, and of others on another GPU, with two far outliers, long and odd words."""
    shutil.copy(ROOT / "tests" / "night" / "results.tsv", harness.RESULTS)
    others = [("a", 42, 1.3), ("b", 42, 2.3), ("c", 42, 0.0), ("d", 42, 1.29), ("e", 42, 2.2), ("f", 42, 1.28)]
    charts = drawn(*[(*run, dict(description="$x$ " + 30 * "long ")) for run in others])
    for chart, rows in zip(charts, grouped(night_rows.experiments(), night_rows.place).values(), strict=True):
        points = sorted(tuple(point) for marks in chart.collections for point in marks.get_offsets())
        assert [x for x, _ in points] == [*range(1, len(rows) + 1)]
        (bottom, top), scores = chart.get_ylim(), [row["val_bpb"] for row in rows if row["val_bpb"]]
        assert chart.get_xlim() == (0.5, len(rows) + 0.5) and all(bottom <= y <= top for _, y in points)
        assert [y < min(scores) for _, y in points] == [row["status"] == "crash" for row in rows]
        assert sum(int(label.split()[0]) for label in labels(chart) if "best" not in label) == len(rows)
        assert chart.get_title("left").startswith(f"{', '.join(night_rows.place(rows[0]))}\n")
        assert rows[0]["val_bpb"] < top < 1.4, "despite outliers"
        best = [y for y in chart.lines[0].get_ydata() if math.isfinite(y)]
        assert best == sorted(best, reverse=True)


def test_the_picture_begins_with_the_baseline_not_with_an_idea_that_ended_before_it(drawn):
    others = [("b", 42, 1.3), ("c", 42, 1.29), ("d", 42, 1.31), ("e", 42, 1.3)]
    (chart,) = drawn(("a", 42, 1.5, dict(to_beat=0.0)), *others)
    assert chart.get_title("left").endswith("\nval_bpb 1.3000 to 1.2900") and chart.get_ylim()[1] < 1.4
    log = harness.RESULTS.read_text()
    harness.RESULTS.write_text(log.replace("c\t1.290000\t1.0\tkeep", "c\t1.290000\t1.0\tdiscard"))
    assert drawn()[0].get_title("left").endswith("\nval_bpb 1.3000"), "somebody overruled that"


def test_in_the_picture_a_later_row_of_a_run_stands_for_its_crash(drawn):
    (chart,) = drawn(("a", 42, 1.3), ("a", 1, 0.0), ("a", 3, 0.0), ("a", 1, 1.2), ("a", 2, 1.25))
    assert labels(chart) == ["1 discard", "2 keep", "1 crash", "best +- 2 s.d. of a seed"]


def test_a_picture_of_nothing_or_without_matplotlib_is_an_error_that_names_the_remedy(drawn, monkeypatch):
    for rows in ((), (("a", 42, 0.0),)):
        with pytest.raises(prepare.PrepareError, match=r"run `python train\.py`"):
            drawn(*rows)
    harness.RESULTS.write_text(HEADER + OLD)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys, "argv", ["night", "plot"])
    with pytest.raises(prepare.PrepareError, match=r"pip install -e '\.\[plot\]'"):
        main()


@pytest.mark.filterwarnings("error", "ignore:Glyph")
def test_the_first_rows_make_a_picture_already_also_if_none_is_kept(drawn, tmp_path):
    for seed in (42, 43):
        (chart,) = drawn(("a", seed, 1.2, dict(to_beat=0.0, description="你好 $x")))
        assert labels(chart)[:2] == [f"{seed - 41} discard", "0 keep"]
    assert (tmp_path / "progress.png").read_bytes().startswith(b"\x89PNG")


def test_the_chart_of_readme_is_of_the_log_in_the_repository_for_light_and_dark_pages(drawn):
    light, dark = drawn(draw=lambda: night_chart.main(ROOT / "docs"))
    assert max(dark.figure.get_facecolor()[:3]) < 0.1 and labels(light) == labels(dark)
    assert light.get_title("left").endswith("val_bpb 1.2070 to 1.1945")


def test_the_band_around_the_best_is_two_standard_deviations_of_a_seed_by_all_repeated_runs(drawn):
    """Neither a seed that was repeated nor what ran on top of a commit is one more seed of it. The best and the title
    are those of the most frequent seed: another one that was lucky is no progress."""
    report = dict(report=True)
    rows = [("abc", 42, 1.3), ("abc", 42, 1.3), ("abc+", 42, 1.25), ("abc+", 1, 1.29), ("abc", 1, 1.2)]
    for commit, scores in {"abc": (1.30, 1.32), "def": (1.10, 1.14, 1.18), "one": (1.0,)}.items():
        rows += [(commit, seed, score, report) for seed, score in enumerate(scores)]
    rows += [("abc", 42, 0.0, report), ("abc", 42, 1.0, report | {"budget": "50 s"})]
    rows += [("abc", seed, seed / 1e3, report) for seed in (1001, 1002)]  # of an attribution
    (chart,) = drawn(*rows)
    noise = ((0.1**2 / 2 + 0.02**2 / 2 + 2 * 0.04**2) / 4) ** 0.5  # pooled: 1, 1 and 2 degrees of freedom
    (band,) = [patch.get_bbox() for patch in chart.patches]
    assert (band.y0, band.y1) == pytest.approx((1.25 - 2 * noise, 1.25 + 2 * noise))
    assert chart.get_title("left") == "g, 60 s, d\nval_bpb 1.3000 to 1.2500"
