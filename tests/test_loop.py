"""The loop: scripted agents in processes of their own, real git, a pool whose runs end at once; and whole nights."""

import itertools
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from merge_gains import simulate
from scratch import Scratch
from small_corpus import ROOT, tree
from test_wave import TWO_SLOTS, Clone

import harness
import prepare
from night import agent as agents
from night import git as night_git
from night import loop as loops
from night import proposals
from night import wave as waves
from night.__main__ import parse
from night.gains import Gain, merge, next_step
from night.noise import Noise
from night.pool import Run
from night.rows import reference, set_status
from night.show import about_night

KEY = f"of an API {uuid.uuid4()}"  # which no other process on this machine has among its arguments
TRAIN = """\
A = 30
#
#
#
#
B = 30
#
#
#
#

def total(a, b):
    return 1 + a / 100 + b / 1000
C = 1.0
result(total(A, B) + (C - 1) / 10)
"""
# Each call does what the next word says, in a checkout of the reference. A and B lower a knob: a gain.
AGENT = r"""
import fcntl, os, pathlib, re, subprocess, sys, time

words, calls, prompt = sys.argv[1].split(","), *sys.argv[2:]
with open(calls, "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    n = file.seek(0, 2)
    file.write(".")
word, train = words[n % len(words)], pathlib.Path("train.py")
text = train.read_text()
assert b"\r" not in train.read_bytes()
assert sys.stdin.read() == open(prompt).read() and not os.path.exists("results.tsv")
assert subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip() == os.getcwd()
assert subprocess.run("rm train.py && git checkout train.py", shell=True, stderr=-3).returncode == 0
assert b"\r" not in train.read_bytes()
assert not {"PYTHONPATH", "AUTORESEARCH_CACHE", "GIT_DIR"} & set(os.environ)
assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        assert os.environ["KEY"].encode() not in path.read_bytes(), "other users see arguments"
    except OSError:
        pass

def edit(knob, by):
    train.write_text(re.sub(rf"\b{knob} = ([\d.]+)", lambda m: f"{knob} = {float(m[1]) + by + n / 1000}", text))

def daemon():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(99)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=-1).stdout.readline()

if word != "banner":
    pathlib.Path("IDEA").write_text(f"\n{word} {n}\nnext\n")
if word in ("A", "elsewhere", "hang", "banner", "killed", "stopped"):
    edit("A", -1)
elif word in ("B", "crlf"):
    edit("B", -1)
if word == "elsewhere":
    pathlib.Path("prepare.py").write_text("COLUMNS = []")
elif word == "hang":
    daemon()
    time.sleep(99)
elif word == "hostile":
    daemon()
    os.system("git commit -qam mine; git reset -q --hard HEAD~1; rm -rf .git ../results.tsv ../../results.tsv")
    edit("A", 2)
elif word == "same":
    train.write_text("'A docstring.'\n" + text.replace("#", "#  a remark") + "\n\n")
elif word == "fail":
    sys.exit("Warning: True color is not detected\nError: 401 Unauthorized\n")
elif word == "banner":
    print("OpenAI Codex v0.169.0\n--------")
elif word == "crlf":
    train.write_bytes(train.read_bytes().replace(b"\n", b"\r\n"))
elif word == "killed":
    os.kill(os.getpid(), 9)
elif word == "stopped":
    sys.exit("Error: 529 Overloaded")
elif word == "endless":
    train.write_text(text + "# nothing runs\n")
elif word == "odd":
    pathlib.Path("IDEA").write_text("\n\t``` <b>wider\tMLP</b>: \"4\" -> '5'" + "y" * 10_000)
    edit("B", 1)
elif word == "typo":
    train.write_text(text.replace("A = ", f"A = = {n}"))
"""


# --------------------------------------------------------------------------------- nights with a pool that is not there
class Played(Scratch):
    """A clone, and loops in this process."""

    def __init__(self, folder: Path, monkeypatch):
        files = ("prepare.py", "program.md", "notebook.ipynb", "tests/results.tsv")
        super().__init__(folder, monkeypatch, {name: f"{name}\n" for name in files} | {"train.py": TRAIN})
        self.monkeypatch, self.start, self.time = monkeypatch, agents.start, 0.0
        self.calls, self.agent = folder.with_name("calls"), folder.with_name("agent.py")
        self.agent.write_text(AGENT)
        turn = loops.Loop.turn

        def watched(night: loops.Loop) -> bool:
            self.now = night
            return turn(night)

        monkeypatch.setattr(loops.Loop, "turn", watched)
        monkeypatch.setattr(loops, "monotonic", lambda: self.time)
        monkeypatch.setattr(loops, "sleep", self.sleep)
        monkeypatch.setattr(loops, "start_pool", lambda args: (self.pool, self.kind))
        monkeypatch.setenv("KEY", KEY)

    def sleep(self, seconds: float) -> None:
        """Time passes while the loop sleeps: hardly while an agent is at work, however slow this machine is."""
        if self.now.agents:
            time.sleep(0.05)
            self.time += seconds / 100
        else:
            self.time = max(self.time + 60, self.now.next_ask)
            assert self.time < 10 * 3600, "a night of eight hours has an end"

    def puppet(self, args, name: str, command: str, base: str, branch: str, text: str, now: float) -> agents.Agent:
        """In place of agents.start: an agent without a process, which has ended at once."""
        n, words, train = proposals.new_proposal(branch), command.split()[2].split(","), loops.read_train(base)
        word, scratch = words[(n - 1) % len(words)], tempfile.TemporaryDirectory()
        edits = dict(A=("A = ", "A = -1 + "), B=("B = ", "B = -1 + "), typo=("A =", f"A = = {n}"))
        edits["worse"], work = ("A = ", f"A = {n} + "), Path(scratch.name)
        (work / "IDEA").write_text(f"{word} {n - 1}")
        (work / "train.py").write_text(train.decode().replace(*edits[word]))
        ended = SimpleNamespace(poll=lambda: 0, returncode=0, terminate=str, wait=str)
        return agents.Agent(n, now, name, base, scratch, work, {"train.py": train}, ended)

    def night(self, *words: str, args=(), real: bool = False) -> None:
        """`night loop`. words: of agents, each a list of what it does. real: in processes of their own."""
        self.monkeypatch.setattr(agents, "start", self.start if real else self.puppet)
        command = [f"--agent={sys.executable} {self.agent} {word} {self.calls} {{prompt}}" for word in words]
        loops.loop(parse(["loop", "--agents=1", "--agent-env=KEY,GIT_DIR", "--agent-limit=200", *command, *args]))
        assert not [*Path("/tmp").glob(f"t4-night-{os.getpid()}-*/work")], "checkouts are left"

    def loop(self) -> loops.Loop:
        args = parse(["loop", "--agent=true"])
        return loops.Loop(args, self.trainer(args))

    def tried(self) -> list[tuple[str, str]]:
        """Description and status of each row, but those of the first commit and of what measures noise."""
        rows = [row for row in self.rows()[1:] if not row["description"].startswith("noise: ")]
        return [(row["description"], row["status"]) for row in rows]

    def verdicts(self) -> list[str]:
        return [*proposals.verdicts().values()]


@pytest.fixture
def played(tmp_path, monkeypatch):
    return Played(tmp_path / "clone", monkeypatch)


def test_what_an_agent_leaves_is_described_by_its_edit_if_it_has_no_words_of_its_own(played):
    """One prints a banner and writes no IDEA, one writes other line ends, one changes nothing."""
    played.night("banner,crlf,nothing", args=["--runs=2"], real=True)
    assert played.tried()[:2] == [("A = 29.0", "keep"), ("crlf 1", "keep")]
    assert (proposals.folder(2) / "train.diff").read_text().count("\n-B") == 1
    assert played.shell("git diff --stat night~2 night | tail -n1").endswith("2 insertions(+), 2 deletions(-)")
    played.night("nothing", args=["--hours=0.2"], real=True)
    assert "failed: train.py is unchanged" in played.verdicts()


def test_a_night_begins_with_versions_that_differ_by_luck_alone_and_keeps_none_of_them(played):
    """Also if it is ended before it has judged them. Here C stands for luck."""
    base = played.head()
    for runs in (1, 5):
        played.night("worse", args=[f"--runs={runs}"])
        first, *others = played.rows()[:4]
        assert (first["commit"], first["status"]) == (base, "keep") and reference(played.kind) == base
        found = {(row["description"], row["val_bpb"], row["status"]) for row in others}
        noise = ("1.001", 1.3301), ("0.999", 1.3299), ("1.0005", 1.33005)
        assert found == {(f"noise: like {base}, constants x {factor}", bpb, "discard") for factor, bpb in noise}
        commits = [row["commit"] for row in played.rows()]
        assert len({*commits}) == len(commits) >= 4 + runs, "new ideas, and nothing again"
        for row in others:
            set_status(row["commit"], played.kind, "keep")
    assert Noise.of(played.rows()[0]).sd == pytest.approx(statistics.stdev([0, 1e-4, -1e-4, 5e-5]), rel=1e-6)
    assert "\n## Noise: constants moved by too little to matter\n- +0.0001~" in about_night(played.rows())
    for runs in (6, 8):  # the first has a gain, the second goes on from it
        played.night("A", args=[f"--runs={runs}"])
    assert reference(played.kind) != base and sum("noise: " in row["description"] for row in played.rows()) == 3


def test_a_reference_that_crashes_ends_the_loop(played):
    played.commit(broken="raise MemoryError")
    with pytest.raises(prepare.PrepareError, match="the reference crashes: python -m night show"):
        played.night("A", args=["--runs=1"])


def test_one_proposal_per_agent_waits_for_a_gpu_and_what_is_decided_stays_so(played, monkeypatch):
    looks, ended, turn, waiting = itertools.count(), played.pool.ended, loops.Loop.turn, []
    monkeypatch.setattr(played.pool, "ended", lambda: [] if next(looks) % 5 else ended())  # runs take five looks
    monkeypatch.setattr(loops.Loop, "turn", lambda night: (turn(night), waiting.append(len(night.trainer.todo)))[0])
    played.night("A,B,worse", args=["--runs=9"])
    assert max(waiting) == 1
    decided, tried = played.verdicts(), played.tried()
    assert any(verdict.startswith("keep, and again on ") for verdict in decided)
    played.night("A", args=["--hours=0"])
    assert (played.verdicts(), played.tried()) == (decided, tried)


def test_half_an_edit_of_an_agent_that_was_cut_off_is_not_trained(played):
    played.night("hang", args=["--hours=0.01", "--agent-limit=1"], real=True)
    played.night("killed", args=["--hours=0.01"], real=True)
    assert not played.tried()
    assert {*played.verdicts()} == {"failed: cut off after 1 s", "failed: killed"}
    played.night("stopped", args=["--runs=1"], real=True)
    assert played.tried()[0][0].endswith(" (exit status 1)"), "an error of its own may have cut it off"


def test_what_breaks_a_rule_or_was_tried_is_refused(played):
    """A change of comments, docstrings and layout is none."""
    played.night("A,elsewhere,same,endless,B", args=["--runs=2"], real=True)
    first, elsewhere, same, endless, _ = played.verdicts()
    assert same == f"refused: the same train.py as {first[-7:]}, but for comments and whitespace"
    assert elsewhere == "refused: it changes prepare.py"
    assert endless == "refused: train.py must end with result(total(A, B) + (C - 1) / 10)"


def test_the_loop_ends_after_ten_crashes_in_a_row_with_its_report(played, monkeypatch, capfd):
    reported = []
    monkeypatch.setattr(loops, "report", lambda args, pool, kind: reported.append((pool, kind)))
    played.night("typo", args=["--report"])
    assert "\n10 runs in a row crashed: " in capfd.readouterr().out and len(played.tried()) in (10, 11)
    assert reported == [(played.pool, played.kind)]


def test_of_agents_that_fail_together_one_counts(played):
    """As by their provider's limit: each round of them makes the pause longer."""
    night, work = played.loop(), played.folder.with_name("work")
    work.mkdir()

    def collect(asked: float, text: str = "", code: int = 0) -> tuple[int, float]:
        (work / "train.py").write_text(text)
        process, scratch = SimpleNamespace(returncode=code), SimpleNamespace(cleanup=str)
        night.agents.append(agents.Agent(1, asked, "", "base", scratch, work, {"train.py": b""}, process))
        night.collect(night.agents[0])
        return night.in_vain, night.next_ask - played.time

    night.propose = lambda *_: False
    assert [collect(0.0, code=1) for _ in range(6)] == [(1, 30)] * 6
    assert collect(night.next_ask) == (2, 90)
    assert collect(night.next_ask, "refused") == (3, 210)
    assert [collect(night.next_ask)[1] for _ in range(9)][-2:] == [1800, 1800]
    night.propose = lambda *_: True
    assert [collect(0.0, "trained", code) for code in (0, 255)] == [(0, 0)] * 2


def test_git_that_fails_when_a_run_has_ended_costs_no_row(played, monkeypatch, capfd):
    to_beat, fails = waves.to_beat, itertools.cycle([True, False])

    def fail(run: Run, *args) -> float:
        if not run.description.startswith(("base", "noise")) and next(fails):
            raise subprocess.CalledProcessError(128, "git", stderr=b"index.lock")
        return to_beat(run, *args)

    monkeypatch.setattr(waves, "to_beat", fail)
    played.night("A,B", args=["--runs=4"])
    assert "trouble  index.lock" in capfd.readouterr().out
    trained = Counter(run.commit for run in played.pool.trained)
    assert len(trained) >= 4 and Counter(row["commit"] for row in played.rows()) == trained


def test_git_that_fails_for_good_leaves_the_gains_to_the_next_loop(played, capfd):
    """A stale lock of the branch; and refs that are not ours."""
    lock = played.folder / ".git" / "refs" / "heads" / "night.lock"
    played.shell("git branch night-loop/best; git update-ref refs/night/night-loop/best HEAD")
    lock.touch()
    played.night("A", args=["--hours=0.2"])
    output = capfd.readouterr().out
    assert output.count("trouble  ") == 1 and "night.lock" in output
    assert "what waits is left for the next loop" in output
    assert 0.2 * 3600 < played.time < 1000 and played.verdicts()[0].startswith("waits")
    lock.unlink()
    tried = played.tried()
    played.night("A", args=["--hours=0"])
    assert played.shell("git rev-parse night").startswith(reference(played.kind))
    assert played.tried() == tried, "nothing is tried twice"


def test_what_a_person_does_with_git_meanwhile_costs_no_row_and_moves_no_commit(played, capfd):
    """Commits, stashes, resets, a branch of another name and back; with the log in git, which takes its rows away."""
    harness.RESULTS.write_text(f"{harness.HEADER}\n")
    played.shell("git add -f results.tsv; git commit -q -m log")
    script = """\
        echo notes > notes; git add notes; git commit -q -m notes
        echo '# mine' >> train.py; git stash -q
        git commit -q --allow-empty -m second; git reset -q --hard HEAD~1
        git checkout -q -b other; git commit -q --allow-empty -m elsewhere
        git checkout -q night
        git branch -D night-loop/1 || true; git gc -q --prune=now
        git checkout -q --detach; git commit -q --allow-empty -m apart
        git checkout -q night""".splitlines()
    played.pool.user = (played.shell(f"{step} 2>&1") for line in script for step in (line, "true"))
    played.night("A,B,worse", args=["--runs=16"])
    assert not [*played.pool.user]
    output, errors = capfd.readouterr()
    assert "results.tsv has lost " in errors
    assert "trouble  the night is on night, which is not checked out: trying again" in output
    assert len({*played.tried()}) >= 16 and {status for _, status in played.tried()} == {"keep", "discard"}
    trained = Counter(run.commit for run in played.pool.trained)
    assert Counter(row["commit"] for row in played.rows()) == trained, "a row per run, and none without"
    assert harness.parse_log(harness.RESULTS.read_text())[0] == played.rows(), "in the file, too"
    assert played.shell("git log -1 --format=%s other") == "elsewhere"
    assert "notes" in played.shell("git log --format=%s night").split("\n")
    assert "# mine" in played.shell("git stash show -p")
    assert played.shell(f"git diff {reference(played.kind)} night -- train.py") == ""
    assert played.shell("git branch --format='%(refname:short)'").split() == ["night", "other"]


def test_whatever_the_user_has_told_git_a_proposal_is_its_edit(played, monkeypatch):
    """Line ends, hooks, colours and signatures; another repository, as a hook or an alias does."""
    theirs, home = played.folder.with_name("theirs"), played.folder.with_name("home")
    played.shell(f"git init -q {theirs}; cp .git/index {theirs}/.git/index; mkdir {home}")
    before = tree(theirs)
    for name, place in dict(GIT_DIR=".git", GIT_WORK_TREE="", GIT_INDEX_FILE=".git/index").items():
        monkeypatch.setenv(name, str(theirs / place))
    for name in ("pre-commit", "prepare-commit-msg", "commit-msg"):
        (home / name).symlink_to("/bin/false")
    (home / "attributes").write_text("* text=auto eol=crlf\n")
    text = f"[core]\nautocrlf = true\nattributesFile = {home}/attributes\nhooksPath = {home}\n[color]\nui = always\n"
    (home / ".gitconfig").write_text(f"{text}[commit]\ngpgsign = true\n[log]\nshowSignature = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", f"{home}/.gitconfig")
    monkeypatch.setenv("HOME", str(home))  # agents get this, but no GIT_CONFIG_GLOBAL
    played.night("A,B", args=["--runs=2"], real=True)
    diffs = [(proposals.folder(n) / "train.diff").read_text() for n in (1, 2)]
    assert [len(re.findall("^[-+][AB]", diff, re.M)) for diff in diffs] == [2, 2]
    assert tree(theirs) == before and {status for _, status in played.tried()} == {"keep"}


def test_the_prompt_says_what_an_agent_needs_from_the_first_on(played):
    """And its checkout shows what concerns it."""
    script = "assert sorted(os.listdir()) == ['.git', '.gitignore', 'prepare.py', 'train.py'], os.listdir()\n"
    played.agent.write_text(AGENT.replace("\ndef edit", f"\n{script}def edit", 1))
    played.night("A,elsewhere,B,fail,odd", args=["--runs=4", "--hours=3"], real=True)
    first, *_, last = ((proposals.folder(n) / "prompt.md").read_text() for n in proposals.verdicts())
    for text in (first, last):
        before, memory, _ = text.split("```")
        assert "a run of it\n(300 s, on cpu, with dataset d) ends" in before and "Nobody can answer questions" in before
        assert f"{sys.executable} -c 'import train'" in before and "- **All of `train.py`**" in before
        assert not re.search("results.tsv|reset|tokens, but", before)
    assert "```text\nnone\n" in first and "Reference: " in memory and "## Ideas\n" in memory
    assert "- refused: it changes prepare.py" in memory and "exit status" not in memory
    assert "failed: exit status 1: Error: 401 Unauthorized" in played.verdicts()
    description = dict(played.tried()).keys() & {f"``` <b>wider MLP</b>: '4' -> '5'{68 * 'y'}"}
    assert description, "in 100 characters, on one line"
    args = parse(["loop", "--agent=true", "--tokens=9000"])
    assert "no improvement.\n\n8.0 hours" in agents.prompt(args, played.kind, [], 8.0, [], [])


@pytest.mark.skipif(subprocess.call("bwrap --ro-bind / / true 2> /dev/null", shell=True) != 0, reason="no bubblewrap")
def test_in_the_sandbox_of_the_documents_an_agent_can_do_its_work_and_no_more(played):
    box, stolen = played.folder.with_name("box"), played.folder.with_name("stolen")
    box.write_text(re.search(r"> ~/box <<'END'\n(.*?)END\n", (ROOT / "docs/loop.md").read_text(), re.S)[1])
    box.chmod(0o755)
    work = f"grep -q researcher {{prompt}}; echo x > /tmp/own; echo idea > IDEA; touch {stolen} {ROOT}/stolen && exit 1"
    agent = f"{box} sh -ec \"{work}; sed -i 's/A = 30/A = 29/' train.py; git diff --quiet && exit 1; true\""
    played.night(args=[f"--agent={agent}", "--runs=1", "--hours=0.1"], real=True)
    assert played.tried() == [("idea", "keep")] and not stolen.exists() and not (ROOT / "stolen").exists()


def test_the_prompts_memory_has_a_budget_and_the_best_is_in_it(played):
    """3,000 rows, in seconds; what was kept on this branch stays."""
    start, head = played.shell("git log --reverse --format=%h --abbrev=7").split()
    tried = [(f"{i:07x}", 1.5 + i / 1e5, "discard", f"idea number {i} that was tried") for i in range(1, 3000)]
    tried.insert(2000, ("abcdef0", 1.4, "discard", "the best idea"))
    tried.insert(1000, (head, 1.6, "keep", "kept all the same"))
    form = "{}\t{:.6f}\t1.0\t{}\t{}\tcpu\td\t300 s\t42\t1.0\t\t\trun".format
    rows = [form(*row) for row in [(start, 1.5, "keep", "base"), *tried]]
    harness.RESULTS.write_text("\n".join([harness.HEADER, *rows, ""]))
    begun = time.process_time()
    text = agents.memory(played.rows())
    assert time.process_time() - begun < 30  # about 1 on an idle machine
    assert "\n200 experiments" in text and len(text) < 25_000
    assert all(told in text for told in ("the best idea", "idea number 1 ", "kept all the same", start))
    assert text.endswith("\n2802 more experiments, none of them better than the best of these, are left out.")
    assert "left out" not in agents.memory(played.rows()[:50])


# ------------------------------------------------------------------------------------------------- gains that wait
def gain(n: int, size: float, base: str = "old") -> Gain:
    return Gain(n, f"c{n}", base, f"idea {n}", size)


def test_a_gain_over_the_reference_itself_comes_first_then_the_largest_and_after_the_night_all():
    small, large, on_top = gain(1, 0.1), gain(2, 0.3), gain(3, 0.01, "now")
    assert next_step("now", [small, large], False) == [large] and next_step("now", [], True) == []
    assert next_step("now", [small, large], True) == [large, small]
    assert next_step("now", [small, large, on_top], True) == [on_top], "and then the others"


def test_a_merge_leaves_out_what_conflicts_or_does_not_compile_with_the_gains_before(monkeypatch):
    base = b"def f():\n    a = 1\n    b = 1\n    c = 1\n    d = 1\n"
    files = dict(old=base, c1=base.replace(b":\n", b":\n    n = 1\n"), c2=base + b"    global n\n")
    files |= dict(c3=base.replace(b"b = 1", b"b = 2"), c4=base.replace(b"b = 1", b"b = 3"))
    monkeypatch.setattr("night.gains.read_train", files.get)
    text, merged = merge(base, [gain(n, 0.1) for n in (1, 2, 3, 4)])
    assert text == files["c1"].replace(b"b = 1", b"b = 2") and [gain.n for gain in merged] == [1, 3]


class Waiting:
    """A night whose proposals have been trained as a test likes. todo: its runs; none of them begins."""

    def __init__(self, played: Played):
        self.played, self.kind, self.base = played, played.kind, played.head()
        self.log(self.base, "base", 1.33)
        self.restart()

    def restart(self) -> None:
        self.night = self.played.loop()
        self.todo, self.gains = self.night.trainer.todo, self.night.gains

    def log(self, commit: str, subject: str, val_bpb: float) -> None:
        where = dict(gpu="cpu", dataset="d", memory_gb=1.0, to_beat=9.0)
        harness.log_result(val_bpb=val_bpb, commit=commit, description=subject, **where)

    def gain(self, n: int, old: str, new: str, val_bpb: float, again: str = "") -> str:
        """Proposal n, which replaces some text of the base and was kept."""
        text, subject = loops.read_train(self.base).replace(old.encode(), new.encode()), f"idea {n}{again}"
        commit = loops.commit_train(self.base, text, subject, f"night-loop/{n}")
        proposals.note(n, "trains")
        self.log(commit, subject, val_bpb)
        return commit

    def advance(self, over: bool = False) -> None:
        self.night.settle()
        self.gains.advance(over)

    def ends(self, val_bpb: float) -> str:
        """The run of the merge that waits; returns its commit."""
        (run,) = self.todo
        self.todo.clear()
        self.log(run.commit, run.description, val_bpb)
        return run.commit

    def verdict(self, n: int) -> str:
        return proposals.verdicts()[n][:-9]


@pytest.fixture
def waiting(played):
    return Waiting(played)


def test_a_gain_over_an_older_reference_is_named_after_the_newest_only_and_others_wait_for_its_run(waiting):
    first, _ = waiting.gain(1, "A = 30", "A = 29", 1.31), waiting.gain(2, "B = 30", "B = 29", 1.32)
    waiting.advance()
    assert [run.description for run in waiting.todo] == [f"idea 2, again on {first}"]
    assert [waiting.verdict(n) for n in (1, 2)] == ["keep", f"keep, and again on {first} as proposal 3"]
    waiting.gain(4, "return 1", "return 0.9", 1.3, again=", again on 1234567")
    waiting.advance()
    assert len(waiting.todo) == 1, "the others wait"
    second = waiting.ends(1.29)
    waiting.advance()
    assert [run.description for run in waiting.todo] == [f"idea 4, again on {second}"]
    assert waiting.played.shell("git rev-parse night").startswith(second)
    assert waiting.verdict(4) == f"keep, and again on {second} as proposal 5"


def test_of_conflicting_gains_the_better_one_stays_and_what_a_person_discards_is_left_out(waiting):
    better = waiting.gain(1, "A = 30", "A = 28", 1.31)
    waiting.gain(2, "A = 30", "A = 29", 1.32)
    gone = waiting.gain(3, "B = 30", "B = 29", 1.325)
    waiting.night.settle()
    set_status(gone, waiting.kind, "discard")
    waiting.advance()
    assert not waiting.todo and not waiting.gains.waiting
    assert waiting.verdict(2) == f"keep, but it conflicts with {better}, which is better"
    assert waiting.verdict(3) == "discard"


def test_a_better_gain_that_conflicts_with_the_reference_becomes_it_though_its_row_is_older(waiting):
    best = waiting.gain(2, "A = 30", "A = 28", 1.3)
    waiting.night.settled.add(2)
    waiting.gain(1, "A = 30", "A = 29", 1.31)
    waiting.advance()
    waiting.night.settled.remove(2)
    waiting.advance()
    assert reference(waiting.kind) == best and waiting.played.shell(f"git diff {best} HEAD -- train.py") == ""


def test_what_was_kept_stays_the_reference_after_an_amended_commit_or_a_squashed_merge(waiting):
    """If a rebase has changed train.py, too, the loop says so: nothing could be kept against a file without a score."""
    idea, shell = waiting.gain(1, "A = 30", "A = 29", 1.31), waiting.played.shell
    shell(f"git branch base; git reset -q --hard {idea}")
    squash = "git reset -q --hard base; git merge -q --squash night@{1}; git commit -qm squashed"
    for script in ("git commit -q --amend -m words", squash):
        shell(script)
        assert waiting.played.head() != idea == reference(waiting.kind)
    shell("git reset -q --hard base")
    assert reference(waiting.kind) == waiting.base
    shell("git checkout -q --orphan other; echo 'A = 3' > train.py; git add -f .; git commit -qm rebased")
    with pytest.raises(prepare.PrepareError, match=rf"{waiting.played.head()} has no result \(a rebase\?"):
        waiting.night.ask()


def test_of_a_merge_that_was_tried_all_gains_are_decided(waiting):
    """As when the loop was killed after it had submitted the merge."""
    for n, (old, new) in enumerate([("A = 30", "A = 29"), ("B = 30", "B = 29"), ("1 +", "0.999 +")], start=1):
        waiting.gain(n, old, new, 1.33 - n / 100)
    waiting.played.shell("git commit -q --allow-empty -m now")
    waiting.log(now := waiting.played.head(), "now", 1.329)
    waiting.advance(over=True)
    assert [run.description for run in waiting.todo] == [f"idea 3 and 2 more, again on {now}"]
    set_status(waiting.ends(1.4), waiting.kind, "discard")
    for n in (1, 2, 3):
        proposals.note(n, "waits")
    waiting.restart()
    waiting.advance(over=True)
    assert not waiting.todo
    assert [waiting.verdict(n) for n in (1, 2, 3)] == [f"keep, and again on {now} as proposal 5"] * 3


def test_in_a_simulated_night_of_many_slots_it_pays_that_the_largest_gain_comes_first():
    (gain, again, late), (gain_at_once, again_at_once, late_at_once) = (
        simulate(14, 150, 0.0003, at_once, 1) for at_once in (False, True)
    )
    assert gain > gain_at_once and again < again_at_once / 2 and late < late_at_once


# -------------------------------------------------------------------------------------- parts of the loop, and restarts
def test_gains_are_trained_again_before_new_proposals_and_at_the_end_alone(played):
    night = played.loop()
    trainer, started = night.trainer, []
    trainer.start = lambda run: (started.append(run.description), trainer.pending.append(run))
    night.settle = night.may_ask = lambda: False
    for subject in ("a", "b", "c, again on b", "d"):
        night.accept(1, subject, "base", subject)
    night.turn()
    assert started == ["c, again on b", "a"] and [run.description for run in night.runs()][2:] == ["b", "d"]
    night.over = lambda: "the hours are over"
    night.accept(1, "e", "base", "e, again on f")
    trainer.pending.clear()
    night.turn()
    assert started[2:] == ["e, again on f"] and not trainer.todo, "the next loop trains the others"


def test_an_agents_description_cannot_pass_for_a_merge_and_is_short(tmp_path):
    agent = agents.Agent(1, 0.0, "agent 1: ", "base", None, tmp_path, {"train.py": b"a = 1\nb = 2\n"}, None)
    for text, idea in (("wider, again on 1234567\n", "wider"), ("x" * 200, "x" * 100)):
        (tmp_path / "IDEA").write_text(text)
        assert agent.idea() == f"agent 1: {idea}"
    (tmp_path / "IDEA").unlink()
    for text, idea in (("a = 1\nb = 3  # , again on 7\n", "agent 1: b = 3  #"), ("a = 1\n", "")):
        (tmp_path / "train.py").write_text(text)
        assert agent.idea() == idea


def test_two_files_are_one_program_if_they_differ_in_comments_docstrings_and_layout_only():
    program = proposals.program
    text = b"def f(x):\n    return x + 1  # one\n"
    same = b"def f(x):\n    'adds'\n    return (x +\n            1)\n", b"'file'\n" + text, text.replace(b"one", b"1")
    assert {*map(program, same)} == {program(text)}
    others = text.replace(b"1", b"1.0"), text.replace(b"x + 1", b"'one'"), b"def f(x) return", b"(" * 9999
    assert program(text) not in map(program, others)
    assert program(b"x =  =") == program(b"x = =\n") != program(b"x = = 1")


def test_an_edit_of_sizes_alone_that_do_not_count_here_is_refused(played, monkeypatch):
    """Not if it changes which GPUs a row is for. The live row is the one that the latest run has printed."""
    log = played.folder / "log.txt"
    monkeypatch.setattr(proposals, "record_of", lambda row: row.get("folder"))
    log.write_text("Size by SIZES[1], for 3e12 FLOP/s\n")
    assert proposals.live_row([dict(folder=played.folder), {}]) == 1 and proposals.live_row([{}]) is None

    def fault(size: str, old: str, new: str, live: int | None = 1) -> str:
        train = f"SIZE = {size}\nSIZES = (\n    (0, f(3)),\n    (1e12, f(4)),\n    (7e12, f(5)),\n)\nrun()\n"
        return proposals.fault(train.encode(), train.replace(old, new).encode(), set(), live)

    refused = [("f(2)", "f(3)", "f(6)"), ("f(2)", "f(4)", "f(6)"), ("f(2)", "1e12", "2e12")]
    refused += [("None", "f(5)", "f(6)"), ("None", "f(3)", "g(3, 3)")]
    assert {fault(*edit)[:44] for edit in refused} == {"it changes only sizes that are not used here"}
    fine = [("f(2)", "f(2)", "f(6)"), ("f(2)", "f(2)", "None"), ("f(2)", "run()", "x = 1\nrun()")]
    fine += [("None", "f(4)", "f(6)"), ("None", "7e12", "2e12"), ("None", "run()", "x = 1\nrun()")]
    fine += [("None", "f(5)),", "f(5)),\n    (2e12, f(9)),"), ("None", "f(5)", "f(6)", None)]
    fine += [("None", "None", "f(4)")]  # it sets SIZE to what counted before, perhaps
    assert not any(fault(*edit) for edit in fine)


@pytest.mark.parametrize(
    ("script", "agent", "remedy"),
    [
        ("", "", "'' is no command: --agent"),  # a variable that is not set
        ("", 'an "open quote', """'an "open quote' is no command"""),
        ("install /bin/true a.sh", "./a.sh", "'./a.sh' is no command: --agent needs a program's name or absolute path"),
        ("git checkout -q --detach", "true", "HEAD is on no branch: git checkout -b"),
        ("rm -rf .git", "true", "fatal: not a git repository"),
    ],
)
def test_a_loop_that_cannot_be_says_so_in_a_line(played, script, agent, remedy):
    played.shell(script)
    played.monkeypatch.chdir(played.folder)
    with pytest.raises((prepare.PrepareError, subprocess.CalledProcessError)) as error:
        loops.loop(parse(["loop", "--agent", agent]))
    assert harness.git_problem(error.value).startswith(remedy)


def test_a_clone_may_be_a_folder_of_another_repository(played, monkeypatch):
    played.shell("mkdir sub; git mv train.py prepare.py program.md notebook.ipynb tests sub; git commit -qm sub")
    sub = played.folder / "sub"
    monkeypatch.setattr(night_git, "ROOT", sub)
    monkeypatch.setattr(harness, "RESULTS", sub / "results.tsv")
    played.night("A", args=["--runs=1"])
    assert dict(played.tried()) == {"A 0": "keep"} and played.shell("git status --porcelain -- sub/train.py") == ""
    assert "A = -1 + 30" in (sub / "train.py").read_text()
    assert played.shell("git ls-tree -r --name-only HEAD").count("train.py") == 1


def test_a_night_goes_on_if_its_records_are_deleted_while_an_agent_thinks(played, capfd):
    puppet = played.puppet

    def tidy(*args):
        agent = puppet(*args)
        shutil.rmtree(played.folder / "runs")
        return agent

    played.puppet = tidy
    played.night("A", args=["--runs=3"])
    assert [status for _, status in played.tried()] == 3 * ["keep"] and "trouble" not in capfd.readouterr().out


def test_proposals_of_an_earlier_branch_of_the_same_name_are_not_trained_first(played):
    played.night("A", args=["--runs=1"])
    own = reference(played.kind)
    played.shell("git checkout -q --orphan new; git commit -q -m anew; git branch -q -M night")
    harness.RESULTS.unlink()
    shutil.rmtree(proposals.PROPOSALS)
    played.night("B", args=["--runs=1"])
    assert own not in [row["commit"] for row in played.rows()] and dict(played.tried()) == {"B 1": "keep"}


def test_a_row_that_has_no_verdict_yet_is_settled_and_not_trained_again(played):
    """As if the loop had been killed between the two. Without its records, a night goes on, too."""
    played.night("A", args=["--runs=1"])
    before, (verdict,) = played.rows(), played.verdicts()
    for lose in (lambda: proposals.note(1, f"trains as {verdict[-7:]}"), lambda: shutil.rmtree(proposals.PROPOSALS)):
        lose()
        played.night("A", args=["--runs=1"])
        assert played.rows() == before and played.verdicts() == [verdict] and verdict.startswith("keep: ")


def test_a_night_goes_on_while_somebodys_git_holds_the_index(played, capfd):
    lock = played.folder / ".git" / "index.lock"
    lock.touch()
    played.night("A", args=["--runs=1"])
    assert "git cannot write train.py: the branch moves on" in capfd.readouterr().out
    assert dict(played.tried()) == {"A 0": "keep"}
    lock.unlink()
    played.night("A", args=["--runs=2"])
    assert played.shell("git rev-parse HEAD").startswith(reference(played.kind))
    assert played.shell("git status --porcelain") == ""


def test_agents_take_turns_and_what_a_person_has_begun_stays(played, capfd):
    """A commit on the branch is merged with what is kept; a train.py with changes is left alone."""
    played.night("worse", args=["--runs=1"])
    played.shell("echo x > notes; git add notes; git commit -q -m notes; echo '# mine' >> train.py")
    played.night("worse,A", "A,worse,B", args=["--runs=3"])
    assert {"agent 1: A 1", "agent 2: B 2"} <= dict(played.tried()).keys()
    assert played.shell("tail -n1 train.py") == "# mine" and "notes" in played.shell("git log --format=%s").split("\n")
    assert "train.py has uncommitted changes: the branch" in capfd.readouterr().out
    assert played.shell(f"git diff {reference(played.kind)} HEAD -- train.py") == ""


# --------------------------------------------------------------------------------------- whole nights by `night loop`
class Loop(Clone):
    def __init__(self, folder: Path, cache: Path):
        super().__init__(folder, cache)
        self.calls, self.agent = folder.with_name("calls"), folder.with_name("agent.py")
        self.agent.write_text(AGENT)
        source = folder / "night" / "loop.py"
        source.write_text(source.read_text().replace("PAUSE, LONGEST = 30,", "PAUSE, LONGEST = 0,"))
        self.run("git commit -qam impatient; git tag impatient")
        apart = "\n    #" * 4  # far enough for git to merge changes of both knobs
        self.commit(base=f"A = 30{apart}\n    B = 30{apart}\n    val_bpb = 1 + A / 100 + B / 1000")

    def loop(self, words: str, *args: str) -> subprocess.Popen:
        """words: what agents do."""
        command = f"{sys.executable} {self.agent} {words} {self.calls} {{prompt}}"
        options = [f"--agent={command}", "--agent-env=NIGHT,KEY", "--agent-limit=12", *TWO_SLOTS, *args]
        return self.start(f"exec python -m night loop {shlex.join(options)}", CUDA_VISIBLE_DEVICES="", KEY=KEY)

    def verdicts(self) -> dict[int, str]:
        """Of all proposals by their numbers. Those that were trained have one row each, the others none."""
        folders = (self.folder / "runs" / "proposals").glob("[0-9]*")  # a loop may be killed before the first verdict
        found = {int(path.name): prepare.read(path / "verdict.txt") or proposals.ENDED for path in folders}
        assert sorted(found) == [*range(1, len(found) + 1)]
        trained = [verdict for verdict in found.values() if not re.match("refused|failed", verdict)]
        rows = sorted((row["commit"], row["status"]) for row in self.rows() if "base" not in row["description"])
        assert rows == sorted((verdict[-7:], re.match(r"\w+", verdict)[0]) for verdict in trained)
        refs = self.run("git for-each-ref --format='%(objectname:short=7)' refs/night/autoresearch/mar5-loop/")
        assert sorted(refs.split()) == [commit for commit, _ in rows]
        return found


@pytest.fixture
def loop(prepared, tmp_path):
    loop = Loop(tmp_path / "clone", prepared)
    yield loop
    loop.kill_the_rest()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_proposal_is_a_row_or_a_named_refusal_also_if_the_loop_is_killed(loop):
    """Nothing is lost, doubled or left running, and the clone is as a night leaves it. The base packages suffice."""
    words = "A,elsewhere,B,hang,hostile,same,fail,odd,typo,endless"
    for name in ("ray", "scipy", "optuna", "matplotlib", "rich"):
        loop.folder.with_name("bin").joinpath(f"{name}.py").write_text("raise ImportError('not installed')")
    for rows in (10, 20):
        night = loop.loop(words, "--runs=999")
        loop.wait(night, lambda rows=rows: len(loop.rows()) >= rows)
        night.kill()
        assert loop.all_gone()
    output = loop.finish(loop.loop(words, "--runs=25"))
    assert loop.all_gone(0)
    verdicts = loop.verdicts()
    ends = {re.match(r"\w+", verdict)[0] for verdict in verdicts.values()}
    assert ends == {"keep", "discard", "crash", "refused", "failed"}
    (trained,) = re.findall(r"^(\d+) runs: proposals so far: ", output, re.M)
    assert 25 <= int(trained) == len(loop.rows()) - 1

    assert loop.run("git status --porcelain") == "" and loop.run("git diff impatient --name-only") == "train.py\n"
    best = loop.run("python -m night reference --tokens 1500000").strip()
    assert loop.run(f"git diff {best} HEAD -- train.py") == "" and best in loop.run("git log --format=%h --abbrev=7")
    kept = {row["commit"]: row["val_bpb"] for row in loop.rows() if row["status"] == "keep"}
    assert kept[best] == min(kept.values())
    log = (loop.folder / "results.tsv").read_bytes()
    loop.finish(loop.loop(words, "--runs=25"))
    assert (loop.folder / "results.tsv").read_bytes() == log and loop.verdicts() == verdicts


def test_a_loop_that_is_stopped_or_killed_takes_its_agents_along(loop):
    for end, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        loop.calls.unlink(missing_ok=True)
        night = loop.loop("hang", "--agent-limit=99")
        loop.wait(night, lambda: len(prepare.read(loop.calls)) == 2)  # as many as are asked at a time
        night.send_signal(end)
        output = night.communicate(timeout=60)[0]  # its agents have this pipe, too
        assert night.returncode == code and loop.all_gone()
        ended = "\nended early: proposals so far: none.\n"
        assert (ended in output) == (end == signal.SIGINT), "agents that were cut off have not failed"
    assert {*loop.verdicts().values()} == {proposals.ENDED}
