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

import numpy as np
import pytest
from merge_gains import simulate
from scratch import Scratch
from small_corpus import ROOT
from test_wave import TWO_SLOTS, Clone

import harness
import prepare
from night import agent as agents
from night import git as night_git
from night import loop as loops
from night import proposals, rows
from night.__main__ import parse
from night.gains import Gain, Gains, merge, next_step
from night.git import in_history
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
with open(calls, "a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(0)
    n = len(file.readlines())
    file.write("call\n")
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
print("in a", os.environ.get("SANDBOX")) if word != "odd" else None

def edit(knob, by):
    train.write_text(re.sub(rf"\b{knob} = ([\d.]+)", lambda m: f"{knob} = {float(m[1]) + by + n / 1000}", text))

def run_out_of_time():
    guard = os.getppid()
    while not int(re.search(r"SigCgt:\s*(\w+)", open(f"/proc/{guard}/status").read())[1], 16) >> 13 & 1:
        time.sleep(0.01)  # until it handles SIGALRM
    os.kill(guard, 14)
    time.sleep(99)

def daemon():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(99)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=-1).stdout.readline()

if word not in ("odd", "banner", "half"):
    pathlib.Path("IDEA").write_text(f"\n{word} {n}\nnext\n")
if word in "AB":
    edit(word, -1)
elif word == "elsewhere":
    edit("A", -1)
    pathlib.Path("prepare.py").write_text("COLUMNS = []")
elif word == "hang":
    daemon()
    time.sleep(99)
elif word in ("worse", "loud"):
    edit("A", 1)
    print("x" * 5 * 10**7 * (word == "loud"), end="")
elif word == "hostile":
    daemon()
    os.system("git commit -qam mine; git reset -q --hard HEAD~1; rm -rf .git ../results.tsv ../../results.tsv")
    edit("A", 2)
elif word == "same":
    train.write_text(text.replace("\n", "  \n") + "\n\n")
elif word == "comment":
    train.write_text("'A docstring.'\n" + text.replace("#", "# a remark"))
elif word == "fail":
    print("Warning: True color is not detected\nError: 401 Unauthorized\n")
    sys.exit(1)
elif word == "pretends":
    print("Thinking ...\nError: 429 RESOURCE_EXHAUSTED")
elif word == "banner":
    print("OpenAI Codex v0.169.0\n--------")
    edit("A", -1)
elif word == "crlf":
    edit("B", -1)
    train.write_bytes(train.read_bytes().replace(b"\n", b"\r\n"))
elif word == "half":
    train.write_text(text.replace("A = ", "A = 3 *"))
    run_out_of_time()
elif word == "killed":
    edit("A", -1)
    os.kill(os.getpid(), 9)
elif word == "stopped":
    edit("A", -1)
    sys.exit("Error: 529 Overloaded")
elif word == "endless":
    train.write_text(text + "# nothing runs\n")
elif word == "typo":
    train.write_text(text.replace("A = ", f"A = = {n}"))
elif word == "odd":
    pathlib.Path("IDEA").write_text("\n\t``` <b>wider\tMLP</b>: \"4\" -> '5'" + "y" * 10_000)
    edit("B", 1)
"""


# --------------------------------------------------------------------------------- nights with a pool that is not there
class Clock:
    """Time that passes while the loop sleeps: hardly while an agent is at work, however slow this machine is."""

    def __init__(self):
        self.time, self.night = 0.0, SimpleNamespace(agents=(), next_ask=0.0)

    def sleep(self, seconds: float) -> None:
        time.sleep(0.05 if self.night.agents else 0)
        self.time += seconds / 100 if self.night.agents else 60
        if not self.night.agents:
            self.time = max(self.time, self.night.next_ask)


class Played(Scratch):
    """A clone, and loops in this process."""

    def __init__(self, folder: Path, monkeypatch):
        files = ("prepare.py", "program.md", "notebook.ipynb", "tests/results.tsv")
        super().__init__(folder, monkeypatch, {name: f"{name}\n" for name in files} | {"train.py": TRAIN})
        self.monkeypatch, self.start = monkeypatch, agents.start
        self.calls, self.agent = folder.with_name("calls"), folder.with_name("agent.py")
        self.agent.write_text(AGENT)
        self.clock = Clock()
        monkeypatch.setattr(loops, "monotonic", lambda: self.clock.time)
        monkeypatch.setattr(loops, "sleep", lambda seconds: self.clock.sleep(seconds))
        monkeypatch.setenv("KEY", KEY)

    def loop(self, *options: str) -> loops.Loop:
        args = parse(["loop", *options])
        return loops.Loop(args, self.trainer(args))

    def puppet(self, args, name: str, command: str, base: str, branch: str, text: str, now: float) -> agents.Agent:
        """In place of agents.start: an agent without a process, which has ended at once."""
        words = command.split()[2].split(",")
        files = {"train.py": loops.read_train(base)}
        n = proposals.new_proposal(branch)
        word, scratch = words[(n - 1) % len(words)], tempfile.TemporaryDirectory()
        work = Path(scratch.name) / "work"
        old, new = {"A": ("A = ", "A = -1 + "), "B": ("B = ", "B = -1 + "), "typo": ("A =", f"A = = {n}")}.get(
            word, ("A = ", f"A = {n} + ")
        )
        work.mkdir()
        (work / "IDEA").write_text(f"{word} {n - 1}")
        (work / "train.py").write_bytes(
            files["train.py"].replace(old.encode(), new.encode() if word != "fail" else b"A = ")
        )
        ended = SimpleNamespace(poll=lambda: 0, returncode=int(word == "fail"), terminate=str, wait=str)
        print(f"ask      proposal {n}")
        return agents.Agent(n, now, name, base, scratch, work, files, ended)

    def night(self, *words: str, args=(), real: bool = True, prefix: str = "") -> loops.Loop:
        """A night until its end. words: of agents, each a list of what it does. real: in processes of their own."""
        self.monkeypatch.setattr(agents, "start", self.start if real else self.puppet)
        command = [f"--agent={prefix}{sys.executable} {self.agent} {word} {self.calls} {{prompt}}" for word in words]
        options = ["--agents=1", "--agent-env=KEY,GIT_DIR", "--agent-limit=200", *command, *args]
        night = self.clock.night = self.loop(*options)
        if not self.kind.rows():
            night.trainer.train([Run(self.head(), "base", base=self.head())])
        try:
            night.work()
        finally:
            night.end_agents()
        print(night.summary())
        assert not [*Path("/tmp").glob(f"t4-night-{os.getpid()}-*/work")], "checkouts are left"
        return night

    def command(self, word: str, *options: str) -> None:
        """`night loop` with the puppet."""
        self.monkeypatch.setattr(loops, "start_pool", lambda args: (self.pool, self.kind))
        self.monkeypatch.setattr(agents, "start", self.puppet)
        agent = f"--agent={sys.executable} {self.agent} {word} {self.calls} {{prompt}}"
        loops.loop(parse(["loop", agent, "--agents=1", *options]))

    def tried(self) -> list[tuple[str, str]]:
        """Description and status of each row but the first."""
        return [(row["description"], row["status"]) for row in self.rows()[1:]]

    def verdicts(self) -> list[str]:
        return [*proposals.verdicts().values()]


@pytest.fixture
def played(tmp_path, monkeypatch):
    return Played(tmp_path / "clone", monkeypatch)


def test_what_an_agent_leaves_is_described_by_its_edit_if_it_has_no_words_of_its_own(played, capfd):
    """One prints a banner and no IDEA, one writes other line ends, one exits with 0 after an error."""
    played.night("banner,crlf,pretends", args=["--runs=2"])
    assert played.tried()[:2] == [("A = 29.0", "keep"), ("crlf 1", "keep")]
    assert (proposals.folder(2) / "train.diff").read_text().count("\n-B") == 1
    assert played.shell("git diff --stat night~2 night | tail -n1").endswith("2 insertions(+), 2 deletions(-)")
    played.night("pretends", args=["--hours=0.2"])
    assert "train.py is unchanged: Error: 429 RESOURCE_EXHAUSTED" in capfd.readouterr().out


def test_a_night_begins_with_versions_that_differ_by_luck_alone_and_keeps_none_of_them(played):
    """Also if it is ended before it has judged them. Here C stands for luck."""
    base = played.head()
    for runs in (0, 1):
        played.command("worse", f"--runs={4 * runs + 1}")
        first, *others = played.rows()[:4]
        assert (first["commit"], first["status"]) == (base, "keep") and reference(played.kind) == base
        found = {(row["description"], row["val_bpb"], row["status"]) for row in others}
        noise = ("1.001", 1.3301), ("0.999", 1.3299), ("1.0005", 1.33005)
        assert found == {(f"noise: like {base}, constants x {factor}", bpb, "discard") for factor, bpb in noise}
        commits = [row["commit"] for row in played.rows()]
        assert len({*commits}) == len(commits) > 4 + runs, "new ideas, and nothing again"
        for row in others:
            set_status(row["commit"], played.kind, "keep")
    assert Noise.of(played.rows()[0]).sd == pytest.approx(statistics.stdev([0, 1e-4, -1e-4, 5e-5]), rel=1e-6)
    told = about_night(played.rows())
    assert "\n## Noise: constants moved by too little to matter\n- +0.0001~" in told
    assert "The standard deviation between versions with one seed is 0.0001" in told
    for runs in (6, 8):  # the first has a gain, the second goes on from it
        played.command("A", f"--runs={runs}")
    assert reference(played.kind) != base and sum("noise: " in row["description"] for row in played.rows()) == 3


def test_a_reference_that_crashed_is_mended_by_a_commit(played):
    played.shell("echo 'raise MemoryError' > train.py; git commit -qam broken")
    with pytest.raises(prepare.PrepareError, match="the reference crashes: python -m night show"):
        played.command("A", "--runs=1")
    (played.folder / "train.py").write_text(TRAIN)
    played.shell("git commit -qam mended")
    played.command("A", "--runs=5")
    ended = [(row["description"], row["status"]) for row in played.rows() if row["status"] != "crash"]
    assert ended[0] == ("mended", "keep") and ended[4][0].startswith("A ") and ended[4][1] == "keep"


def test_one_proposal_per_agent_waits_for_a_gpu_and_what_is_decided_stays_so(played, monkeypatch):
    looks, ended, turn, waiting = itertools.count(), played.pool.ended, loops.Loop.turn, []
    monkeypatch.setattr(played.pool, "ended", lambda: [] if next(looks) % 5 else ended())  # runs take five looks
    monkeypatch.setattr(loops.Loop, "turn", lambda night: (turn(night), waiting.append(len(night.trainer.todo)))[0])
    played.night("A,B,worse", args=["--runs=9"], real=False)
    assert max(waiting) == 1
    decided, tried = played.verdicts(), played.tried()
    assert any(verdict.startswith("keep, and again on ") for verdict in decided)
    played.night("A", args=["--hours=0"], real=False)
    assert (played.verdicts(), played.tried()) == (decided, tried)


def test_half_an_edit_of_an_agent_that_was_cut_off_is_not_trained(played):
    played.night("half", args=["--hours=0.01"])
    played.night("killed", args=["--hours=0.01"])
    assert not played.tried()
    assert {*played.verdicts()} == {"failed: cut off after 200 s", "failed: killed"}
    played.night("stopped", args=["--runs=1"])
    assert played.tried()[0][0].endswith(" (exit status 1)"), "an error of its own may have cut it off"


def test_what_breaks_a_rule_or_was_tried_is_refused(played):
    """A change of comments, docstrings and layout is none."""
    played.night("A,elsewhere,same,comment,endless,B", args=["--runs=2"])
    first, *refused, _ = played.verdicts()
    known = f"refused: the same train.py as {first[-7:]}, but for comments and whitespace"
    elsewhere, endless = "refused: it changes prepare.py", "refused: train.py must end with result(total(A, B) + "
    assert refused == [elsewhere, known, known, f"{endless}(C - 1) / 10)"]


def test_the_loop_ends_after_ten_crashes_in_a_row(played, capfd):
    played.night("typo", real=False)
    assert "\n10 runs in a row crashed: " in capfd.readouterr().out and len(played.tried()) in (10, 11)


def test_of_agents_that_fail_together_one_counts(played):
    """As by their provider's limit: each round of them makes the pause longer."""
    night = played.loop("--agent=true")
    work, scratch = played.folder.with_name("a") / "work", SimpleNamespace(cleanup=str)

    def judge(asked: float, code: int = 1, *edited: str) -> tuple[int, float]:
        agent = agents.Agent(1, asked, "", "base", scratch, work, {"train.py": b""}, SimpleNamespace(returncode=code))
        for name in ("IDEA", *edited):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text("x = 1")
        night.agents.append(agent)
        night.collect(agent)
        return night.in_vain, night.next_ask - played.clock.time

    night.propose = lambda *_: False
    proposals.note(1, "")
    assert [judge(0.0) for _ in range(6)] == [(1, 30)] * 6
    assert judge(night.next_ask) == (2, 90)
    assert judge(night.next_ask, 0, "train.py") == (3, 210), "refused"
    assert [judge(night.next_ask)[1] for _ in range(9)][-2:] == [1800, 1800]
    night.in_vain = 3000
    assert judge(night.next_ask)[1] == 1800
    night.propose = lambda *_: True
    assert judge(0.0, 0, "train.py") == (0, 0)


def test_git_that_fails_for_good_leaves_the_gains_to_the_next_loop(played, capfd):
    """A stale lock of the branch; and refs that are not ours."""
    lock = played.folder / ".git" / "refs" / "heads" / "night.lock"
    played.shell("git branch night-loop/best; git update-ref refs/night/night-loop/best HEAD")
    lock.touch()
    played.night("A", args=["--hours=0.2"], real=False)
    output = capfd.readouterr().out
    assert output.count("trouble  ") == 1 and "night.lock" in output
    assert "what waits is left for the next loop" in output
    assert 0.2 * 3600 < played.clock.time < 1000 and played.verdicts()[0].startswith("waits")
    lock.unlink()
    tried = played.tried()
    played.night("A", args=["--hours=0"], real=False)
    assert played.shell("git rev-parse night").startswith(played.rows()[1]["commit"])
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
    steps = itertools.chain.from_iterable([[line, ""] for line in script])
    played.pool.user = (played.shell(f"{step} 2>&1") if step else None for step in steps)
    played.night("A,B,worse", args=["--runs=16"], real=False)
    assert not [*played.pool.user]
    output, errors = capfd.readouterr()
    assert "results.tsv has lost " in errors
    tried = dict(played.tried())
    assert len(tried) == len(played.tried()) >= 16 and {*tried.values()} == {"keep", "discard"}
    trained = Counter(run.commit for run in played.pool.trained)
    assert Counter(row["commit"] for row in played.rows()) == trained, "a row per run, and none without"
    assert harness.parse_log(harness.RESULTS.read_text())[0] == played.rows(), "in the file, too"
    assert played.shell("git log --format=%s other").split("\n")[0] == "elsewhere"
    assert "notes" in played.shell("git log --format=%s night").split("\n")
    assert "# mine" in played.shell("git stash show -p")
    assert "trouble  the night is on night, which is not checked out: trying again" in output
    *_, best = (row for row in in_history(played.rows()) if row["status"] == "keep")
    assert played.shell(f"git diff {best['commit']} night -- train.py") == ""
    assert played.shell("git branch --format='%(refname:short)'").split() == ["night", "other"]


def test_whatever_the_user_has_told_git_a_proposal_is_its_edit(played, monkeypatch):
    """Line ends, hooks, colours and signatures; another repository, as a hook or an alias does."""
    theirs = played.folder.with_name("theirs")
    played.shell(f"git init -q {theirs}; cp .git/index {theirs}/.git/index")
    before = {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()}
    for name, place in dict(GIT_DIR=".git", GIT_WORK_TREE="", GIT_INDEX_FILE=".git/index").items():
        monkeypatch.setenv(name, str(theirs / place))
    hooks, config, attributes = (played.folder.with_name(name) for name in ("hooks", "config", "attributes"))
    hooks.mkdir()
    for name in ("pre-commit", "prepare-commit-msg", "commit-msg"):
        (hooks / name).symlink_to("/bin/false")
    attributes.write_text("* text=auto eol=crlf\n")
    text = f"[core]\nautocrlf = true\nattributesFile = {attributes}\nhooksPath = {hooks}\n"
    config.write_text(f"{text}[color]\nui = always\n[commit]\ngpgsign = true\n[log]\nshowSignature = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    home = played.folder.with_name("home")  # agents get this, but no GIT_CONFIG_GLOBAL
    home.mkdir()
    shutil.copy(config, home / ".gitconfig")
    monkeypatch.setenv("HOME", str(home))
    played.night("A,B", args=["--runs=2"])
    diffs = [(proposals.folder(n) / "train.diff").read_text() for n in (1, 2)]
    assert [len(re.findall("^[-+][AB]", diff, re.M)) for diff in diffs] == [2, 2]
    assert {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()} == before
    assert {status for _, status in played.tried()} == {"keep"}


def test_the_prompt_says_what_an_agent_needs_from_the_first_on(played):
    """And its checkout shows what concerns it."""
    script = "assert sorted(os.listdir()) == ['.git', '.gitignore', 'prepare.py', 'train.py'], os.listdir()\n"
    played.agent.write_text(AGENT.replace("\nprint(", "\n" + script + "print(", 1))
    played.night(
        "A,elsewhere,B,fail,odd,worse",
        args=["--runs=4", "--hours=3"],
        prefix="env SANDBOX=box ",
    )
    first, *_, last = (proposals.folder(n) for n in proposals.verdicts())
    before, memory, _ = (last / "prompt.md").read_text().split("```")
    assert "in a box\n" in (last / "agent.log").read_text()
    for text in ((first / "prompt.md").read_text(), before):
        assert "a run of it\n(300 s, on cpu, with dataset d) ends" in text and "Nobody can answer questions" in text
        assert f"{sys.executable} -c 'import train'" in text and "- **All of `train.py`**" in text
        assert "results.tsv" not in text.split("```")[0] and "reset" not in text
    assert "Reference: " in memory and "## Ideas\n" in memory
    assert "- refused: it changes prepare.py" in memory and "exit status" not in memory
    assert "failed: exit status 1: Error: 401 Unauthorized" in proposals.verdicts().values()


@pytest.mark.skipif(subprocess.call("bwrap --ro-bind / / true 2> /dev/null", shell=True) != 0, reason="no bubblewrap")
def test_in_the_sandbox_of_the_documents_an_agent_can_do_its_work_and_no_more(played):
    box, stolen = played.folder.with_name("box"), played.folder.with_name("stolen")
    box.write_text(re.search(r"> ~/box <<'END'\n(.*?)END\n", (ROOT / "docs/loop.md").read_text(), re.S)[1])
    box.chmod(0o755)
    work = f"grep -q researcher {{prompt}}; echo x > /tmp/own; echo idea > IDEA; touch {stolen} {ROOT}/stolen && exit 1"
    agent = f"{box} sh -ec \"{work}; sed -i 's/A = 30/A = 29/' train.py; git diff --quiet && exit 1; true\""
    played.night(args=[f"--agent={agent}", "--runs=1", "--hours=0.1"])
    assert played.tried() == [("idea", "keep")] and not stolen.exists() and not (ROOT / "stolen").exists()


def test_the_prompts_memory_has_a_budget_and_the_best_is_in_it(played, monkeypatch):
    """3,000 rows, in seconds; what was kept on this branch stays."""
    header = harness.HEADER + "\n"
    start, head = played.shell("git log --reverse --format=%h --abbrev=7").split()

    def line(commit: str, val_bpb: float, status: str, text: str) -> str:
        return f"{commit}\t{val_bpb:.6f}\t1.0\t{status}\t{text}\tcpu\td\t300 s\t42\t1.0\t\t\trun"

    lines = [line(f"{i:07x}", 1.5 + i / 1e5, "discard", f"idea number {i} that was tried") for i in range(1, 3000)]
    lines.insert(2000, line("abcdef0", 1.4, "discard", "the best idea"))
    lines.insert(1000, line(head, 1.6, "keep", "kept all the same"))
    lines.insert(0, line(start, 1.5, "keep", "base"))
    harness.RESULTS.write_text(header + "\n".join(lines) + "\n")
    begun = time.process_time()
    text = agents.memory(played.rows())
    assert time.process_time() - begun < 30  # about 1 on an idle machine
    assert "\n200 experiments" in text and len(text) < 25_000
    assert "the best idea" in text and "idea number 1 " in text and "idea number 2999" not in text and start in text
    assert "kept all the same" in text
    assert re.search(r"\n\d{4} more experiments, none of them better than these, are left out\.$", text)
    assert agents.memory([]) == "none" and "left out" not in agents.memory(played.rows()[:50])


# ------------------------------------------------------------------------------------------------- gains that wait
def gain(n: int, size: float, base: str = "old") -> Gain:
    return Gain(n, f"c{n}", base, f"idea {n}", 1.5 - size, size)


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
    """Gains on a branch of their own clone, with merges that a test has trained as it likes."""

    def __init__(self, played: Played):
        self.played, self.kind = played, played.kind
        self.merged, self.asked, self.refuses, self.runs = [], [], False, []
        self.gains = Gains(self.kind, "night", self.propose, lambda: self.runs)
        self.base = played.head()
        self.log(self.base, "base", 1.33)

    def log(self, commit: str, subject: str, val_bpb: float, status: str = "keep") -> dict:
        where = dict(gpu="cpu", dataset="d", memory_gb=1.0)
        to_beat = 9.0 if status == "keep" else 0.0
        harness.log_result(val_bpb=val_bpb, commit=commit, description=subject, to_beat=to_beat, **where)
        return harness.read_results()[-1]

    def gain(self, n: int, old: str, new: str, val_bpb: float, base: str = "", again: str = "") -> str:
        """Proposal n, which replaces some text."""
        text = loops.read_train(base or self.base).replace(old.encode(), new.encode())
        commit = loops.commit_train(base or self.base, text, f"idea {n}{again}", f"night-loop/{n}")
        self.gains.settle(n, base or self.base, self.log(commit, f"idea {n}{again}", val_bpb))
        return commit

    def propose(self, n: int, base: str, text: bytes, subject: str) -> bool:
        self.asked.append(subject.partition(", again")[0])
        if not self.refuses:
            self.merged.append((n, subject, loops.commit_train(base, text, subject, f"night-loop/{n}"), base))
            self.runs.append(Run(self.merged[-1][2], subject, 42))
        return not self.refuses

    def ends(self, val_bpb: float, status: str = "keep") -> None:
        """The run of the last merge."""
        n, subject, commit, base = self.merged[-1]
        self.runs.clear()
        self.gains.settle(n, base, self.log(commit, subject, val_bpb, status))

    def verdict(self, n: int) -> str:
        return proposals.verdicts()[n][:-9]


@pytest.fixture
def waiting(played):
    return Waiting(played)


def test_a_gain_over_an_older_reference_is_named_after_the_newest_only_and_others_wait_for_its_run(waiting):
    first, _ = waiting.gain(1, "A = 30", "A = 29", 1.31), waiting.gain(2, "B = 30", "B = 29", 1.32)
    waiting.gains.advance(over=False)
    assert waiting.verdict(1) == "keep"
    assert [subject for _, subject, *_ in waiting.merged] == [f"idea 2, again on {first}"]
    assert waiting.verdict(2) == f"keep, and again on {first} as proposal 3"
    waiting.gain(4, "return 1", "return 0.9", 1.3, again=", again on 1234567")
    waiting.gains.advance(over=False)
    assert len(waiting.merged) == 1, "the others wait"
    waiting.ends(1.29)
    waiting.gains.advance(over=False)
    assert waiting.merged[1][1] == f"idea 4, again on {waiting.merged[0][2]}"
    assert waiting.played.shell("git rev-parse night").startswith(waiting.merged[0][2])
    assert waiting.verdict(4) == f"keep, and again on {waiting.merged[0][2]} as proposal 5"


def test_of_conflicting_gains_the_better_one_stays_and_what_a_person_discards_is_left_out(waiting):
    better = waiting.gain(1, "A = 30", "A = 28", 1.31)
    waiting.gain(2, "A = 30", "A = 29", 1.32)
    gone = waiting.gain(3, "B = 30", "B = 29", 1.325)
    set_status(gone, waiting.kind, "discard")
    waiting.gains.advance(over=False)
    assert not waiting.merged and not waiting.gains.waiting
    assert waiting.verdict(2) == f"keep, but it conflicts with {better}, which is better"
    assert waiting.verdict(3) == "discard"


def test_a_better_gain_that_conflicts_with_the_reference_becomes_it_though_its_row_is_older(waiting):
    best = waiting.gain(2, "A = 30", "A = 28", 1.3)
    waiting.gains.waiting.clear()
    waiting.gain(1, "A = 30", "A = 29", 1.31)
    waiting.gains.advance(over=False)
    waiting.gains.settle(2, waiting.base, next(row for row in waiting.kind.rows() if row["commit"] == best))
    waiting.gains.advance(over=False)
    assert rows.reference(waiting.kind) == best and waiting.played.shell(f"git diff {best} HEAD -- train.py") == ""


def test_of_a_merge_that_is_refused_all_gains_are_decided(waiting):
    """As when the loop was killed after it had submitted the merge."""
    for n, (old, new) in enumerate([("A = 30", "A = 29"), ("B = 30", "B = 29"), ("1 +", "0.999 +")], start=1):
        waiting.gain(n, old, new, 1.33 - n / 100)
    waiting.played.shell("git commit -q --allow-empty -m now")
    now = waiting.played.head()
    waiting.log(now, "now", 1.329)
    waiting.refuses = True
    waiting.gains.advance(over=True)
    assert not waiting.gains.waiting and waiting.asked == ["idea 3 and 2 more"]
    assert [waiting.verdict(n) for n in (1, 2, 3)] == [f"keep, and again on {now} as proposal 4"] * 3


def test_in_simulated_nights_of_many_slots_it_pays_that_the_largest_gain_comes_first():
    at_once, now = ([simulate(14, 150, 0.0003, rule, seed) for seed in range(30)] for rule in (True, False))
    gains, again, late = (np.mean(now, 0) - np.mean(at_once, 0)).tolist()
    assert gains > 0.005 and again < -30 and late < -8
    assert simulate(1, 100, 0.001, False, 1) == simulate(1, 100, 0.001, True, 1)


# -------------------------------------------------------------------------------------- parts of the loop, and restarts
def test_gains_are_trained_again_before_new_proposals_and_at_the_end_alone(played, monkeypatch):
    night = played.loop("--agent=true")
    trainer, started = night.trainer, []
    trainer.start = lambda run: (started.append(run.description), trainer.pending.update({run: None}))
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
    for text, idea in (("a = 1\nb = 3  # , again on 7\n", "b = 3  #"), ("a = 1\n", "")):
        (tmp_path / "train.py").write_text(text)
        assert agent.idea() == (idea and f"agent 1: {idea}")


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
    train = "SIZE = f(2)\nSIZES = (\n    (0, f(3)),\n    (1e12, f(4)),\n    (7e12, f(5)),\n)\nrun()\n"
    log = played.folder / "log.txt"
    monkeypatch.setattr(proposals, "record_of", lambda row: row.get("folder"))
    log.write_text("Size by SIZES[1], for 3e12 FLOP/s\n")
    assert proposals.live_row([dict(folder=played.folder), {}]) == 1 and proposals.live_row([{}]) is None

    def fault(old: str, new: str, live: int | None = 1) -> str:
        return proposals.fault(train.encode(), train.replace(old, new).encode(), set(), live)

    refusal = "it changes only sizes that are not used here: SIZE is, if it is set, else SIZES[1]"
    assert fault("f(3)", "f(6)") == fault("f(4)", "f(6)") == fault("1e12", "2e12") == refusal
    assert not fault("f(2)", "f(6)") and not fault("f(2)", "None") and not fault("run()", "x = 1\nrun()")
    train = train.replace("f(2)", "None")
    assert fault("f(5)", "f(6)") == fault("f(3)", "g(3, 3)") == refusal
    assert not fault("f(4)", "f(6)") and not fault("7e12", "2e12") and not fault("f(5)", "f(6)", None)
    assert not fault("run()", "x = 1\nrun()") and not fault("f(5)),", "f(5)),\n    (2e12, f(9)),")
    assert not fault("None", "f(4)"), "it sets SIZE to what counted before, perhaps"


@pytest.mark.parametrize(
    ("script", "agent", "remedy"),
    [
        ("", "no-such-program -p", "'no-such-program -p' is no command: --agent"),
        ("", "", "'' is no command: --agent"),  # a variable that is not set
        ("", 'an "open quote', """'an "open quote' is no command"""),
        ("git checkout -q --detach", "true", "HEAD is on no branch: git checkout -b"),
        ("rm -rf .git", "true", "fatal: not a git repository"),
        (
            "install /bin/true a.sh",
            "./a.sh",
            "'./a.sh' is no command: --agent needs a program's name or absolute path",
        ),
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
    for module, name, value in (
        (night_git, "ROOT", played.folder / "sub"),
        (harness, "RESULTS", played.folder / "sub" / "results.tsv"),
    ):
        monkeypatch.setattr(module, name, value)
    played.night("A", args=["--runs=1"], real=False)
    assert dict(played.tried()) == {"A 0": "keep"} and played.shell("git status --porcelain -- sub/train.py") == ""
    assert "A = -1 + 30" in (played.folder / "sub" / "train.py").read_text()
    assert played.shell("git ls-tree -r --name-only HEAD").count("train.py") == 1


def test_a_night_goes_on_if_its_records_are_deleted_while_an_agent_thinks(played, capfd):
    start = played.puppet

    def puppet(*args):
        agent = start(*args)
        shutil.rmtree(played.folder / "runs", ignore_errors=True)
        return agent

    played.puppet = puppet
    played.night("A", args=["--runs=3"], real=False)
    assert [status for _, status in played.tried()] == 3 * ["keep"] and "trouble" not in capfd.readouterr().out


def test_proposals_of_an_earlier_branch_of_the_same_name_are_not_trained_first(played):
    played.shell("git branch old")
    played.night("A", args=["--runs=1"], real=False)
    own = played.rows()[-1]["commit"]
    played.shell("git checkout -q --orphan new; git commit -q -m anew; git branch -q -M night")
    harness.RESULTS.unlink()
    shutil.rmtree(proposals.PROPOSALS)
    played.night("B", args=["--runs=1"], real=False)
    assert own not in [row["commit"] for row in played.rows()] and dict(played.tried()) == {"B 1": "keep"}


def test_a_row_that_has_no_verdict_yet_is_settled_and_not_trained_again(played):
    """As if the loop had been killed between the two. Without its records, a night goes on, too."""
    played.night("A", args=["--runs=1"], real=False)
    before, path = played.rows(), proposals.folder(1) / "verdict.txt"
    verdict = path.read_text()
    path.write_text(f"trains as {before[-1]['commit']}\n")
    played.night("A", args=["--runs=1"], real=False)
    assert played.rows() == before and path.read_text() == verdict and verdict.startswith("keep: ")
    shutil.rmtree(proposals.PROPOSALS)
    played.night("A,worse", args=["--runs=2"], real=False)
    assert played.rows()[: len(before)] == before and len(played.rows()) > len(before)


def test_a_night_goes_on_while_somebodys_git_holds_the_index(played, capfd):
    lock = played.folder / ".git" / "index.lock"
    lock.touch()
    played.night("A", args=["--runs=1"], real=False)
    assert "git cannot write train.py: the branch moves on" in capfd.readouterr().out
    assert rows.reference(played.kind) == played.rows()[-1]["commit"]
    lock.unlink()
    played.night("A", args=["--runs=2"], real=False)
    assert played.shell("git rev-parse HEAD").startswith(rows.reference(played.kind))
    assert played.shell("git status --porcelain") == ""


def test_agents_take_turns_and_what_a_person_has_begun_stays(played, capfd):
    """A commit on the branch is merged with what is kept; a train.py with changes is left alone."""
    played.night("worse", args=["--runs=1"])
    played.shell("echo x > notes; git add notes; git commit -q -m notes; echo '# mine' >> train.py")
    played.night("A", "B", args=["--runs=3"])
    assert {"agent 1: A 1", "agent 2: B 2"} <= dict(played.tried()).keys()
    assert played.shell("tail -n1 train.py; git log --format=%s").split("\n")[0] == "# mine"
    assert "notes" in played.shell("git log --format=%s")
    assert "train.py has uncommitted changes: the branch" in capfd.readouterr().out
    assert played.shell(f"git diff {rows.reference(played.kind)} HEAD -- train.py") == ""


# --------------------------------------------------------------------------------------- whole nights by `night loop`
APART = "\n    #" * 4  # far enough for git to merge changes of both knobs
BODY = f"A = 30{APART}\n    B = 30{APART}\n    val_bpb = 1 + A / 100 + B / 1000 + args.seed / 1e5"
EVERY = "A,elsewhere,B,hang,loud,hostile,same,fail,odd,typo,endless"
# By the word of their agent, how proposals end
ENDS = dict(A="keep|discard", B="keep|discard", loud="discard", hostile="discard", odd="discard", typo="crash")
ENDS |= dict(elsewhere="refused: it changes prepare.py", hang="failed: cut off after 12 s")
ENDS |= dict(fail="failed: exit status 1: Error: 401 Unauthorized", endless="refused: train.py must end with raise")
ENDS |= dict(same=r"refused: the same train.py as \w{7}, but for comments and whitespace")


class Loop(Clone):
    def __init__(self, folder: Path, cache: Path):
        super().__init__(folder, cache)
        self.calls, self.agent = folder.with_name("calls"), folder.with_name("agent.py")
        self.agent.write_text(AGENT)
        source = folder / "night" / "loop.py"
        source.write_text(source.read_text().replace("PAUSE, LONGEST = 30,", "PAUSE, LONGEST = 0,"))
        self.run("git commit -qam impatient; git tag impatient")
        self.commit(base=BODY)

    def loop(self, *words: str, args=()) -> subprocess.Popen:
        """words: of agents, each a list of what it does."""
        commands = [f"--agent={sys.executable} {self.agent} {word} {self.calls} {{prompt}}" for word in words]
        options = ["--agent-env=NIGHT,KEY", "--agent-limit=12", *TWO_SLOTS, *commands, *args]
        return self.start(f"exec python -m night loop {shlex.join(options)}", CUDA_VISIBLE_DEVICES="", KEY=KEY)

    def best(self) -> str:
        """The commit that the night goes on from."""
        return self.run("python -m night reference --tokens 1500000").strip()

    def verdicts(self) -> dict[int, str]:
        """Of all proposals by their numbers. Those that were trained have one row each, the others none."""
        folders = (self.folder / "runs" / "proposals").glob("[0-9]*")  # a loop may be killed before the first verdict
        found = {int(path.name): prepare.read(path / "verdict.txt") or proposals.ENDED for path in folders}
        assert sorted(found) == [*range(1, len(found) + 1)]
        trained = [verdict for verdict in found.values() if not re.match("refused|failed", verdict)]
        counted = Counter((row["commit"], row["status"]) for row in self.rows() if "base" not in row["description"])
        assert counted == Counter((verdict[-7:], re.match(r"\w+", verdict)[0]) for verdict in trained)
        assert set(counted.values()) <= {1}
        refs = self.run("git for-each-ref --format='%(objectname:short=7)' refs/night/autoresearch/mar5-loop/")
        assert sorted(refs.split()) == sorted(commit for commit, _ in counted)
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
    runs, kills = 40, 3
    for name in ("ray", "scipy", "optuna", "matplotlib", "rich"):
        loop.folder.with_name("bin").joinpath(f"{name}.py").write_text("raise ImportError('not installed')")
    for stage in range(1, kills + 2):
        most = runs * stage // (kills + 1)
        night = loop.loop(EVERY, args=[f"--runs={runs if stage > kills else 999}"])
        if stage <= kills:
            loop.wait(night, lambda most=most: len(loop.rows()) >= most)
            night.kill()
            assert loop.all_gone()
    output = loop.finish(night)
    assert loop.all_gone(0)
    verdicts = loop.verdicts()
    failed = sum(verdict.startswith("failed") and verdict != proposals.ENDED for verdict in verdicts.values())
    (trained,) = re.findall(rf"^(\d+) runs: proposals so far: .*\b{failed} failed", output, re.M)
    assert runs <= int(trained) == len(loop.rows()) - 1

    folder = loop.folder / "runs" / "proposals"
    found = {row["commit"]: row["description"] for row in loop.rows()}
    for number, verdict in verdicts.items():
        word = found.get(verdict[-7:], "").split(" ")[0]
        if word in ENDS:
            assert re.match(ENDS[word], verdict)
        elif (folder / str(number) / "prompt.md").exists() and "the loop ended" not in verdict:
            assert word == "```" or any(re.fullmatch(end, verdict) for end in ENDS.values()), (number, word, verdict)
    assert all(path.read_text().count("```") == 2 for path in folder.glob("*/prompt.md"))
    (odd,) = {text for text in found.values() if "wider" in text} or [""]
    assert re.fullmatch("``` <b>wider MLP</b>: '4' -> '5'y*", odd) and len(odd) == 100
    assert 2**20 < max(path.stat().st_size for path in folder.glob("*/agent.log")) < 1.1e6

    assert loop.run("git status --porcelain") == "" and loop.run("git diff impatient --name-only") == "train.py\n"
    history = loop.run("git rev-list --abbrev-commit --abbrev=7 HEAD").split()
    *_, kept = (row for row in loop.rows() if row["commit"] in history)
    assert loop.best() == kept["commit"] and loop.run(f"git diff {kept['commit']} HEAD -- train.py") == ""
    assert kept["val_bpb"] == min(row["val_bpb"] for row in loop.rows() if row["status"] == "keep")
    log = (loop.folder / "results.tsv").read_bytes()
    loop.finish(loop.loop(EVERY, args=[f"--runs={runs}"]))
    assert (loop.folder / "results.tsv").read_bytes() == log and loop.verdicts() == verdicts


@pytest.mark.slow
def test_a_night_ends_with_its_report_whatever_git_and_agents_did(loop):
    """A lock that is there when the first gain is found; agents that fail before they work. Its prompts begin before
    there is a row."""
    locked = loop.folder.with_name("locked")
    loop.commit(base2=BODY + f"\n    while A < 30 and not os.path.exists({str(locked)!r}): time.sleep(0.05)")
    night = loop.loop("fail,A,elsewhere", args=["--runs=2", "--report", "--agents=1"])
    while "trains as" not in "".join(path.read_text() for path in loop.folder.glob("runs/proposals/*/verdict.txt")):
        time.sleep(0.02)
    lock = loop.folder / ".git" / "refs" / "heads" / "autoresearch" / "mar5.lock"
    lock.touch(), locked.touch()
    while "mar5.lock" not in (line := night.stdout.readline()):
        assert line, "no word about the lock"
    lock.unlink()
    output = loop.finish(night)
    assert "\n2 runs: " in output and (loop.folder / "report.md").exists(), output
    assert "```text\nnone\n" in (loop.folder / "runs" / "proposals" / "1" / "prompt.md").read_text()
    before = (loop.folder / "runs" / "proposals" / "2" / "prompt.md").read_text()
    assert "a run of it\n(1.5 M tokens, on cpu, with " in before and "no improvement.\n\n8.0 hours" in before


def test_a_loop_that_is_stopped_or_killed_takes_its_agents_along(loop):
    for end, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        loop.calls.unlink(missing_ok=True)
        night = loop.loop("hang", args=["--agent-limit=99"])
        loop.wait(night, lambda: prepare.read(loop.calls).count("call") == 2)  # as many as are asked at a time
        night.send_signal(end)
        output = night.communicate(timeout=120)[0]
        assert night.returncode == code and loop.all_gone()
        ended = "\nended early: proposals so far: none.\n"
        assert (ended in output) == (end == signal.SIGINT), "agents that were cut off have not failed"
    assert {*loop.verdicts().values()} == {proposals.ENDED}
