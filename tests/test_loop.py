"""The loop: scripted agents propose stubs of train.py, which a real Ray trains on two slots of this machine."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from merge_gains import simulate
from test_wave import TWO_SLOTS, Clone

from night import loop as loops

pytest.importorskip("ray", reason="it is in the extra [night]")

APART = "\n    #" * 4  # far enough for git to merge changes of both knobs
BODY = f"A = 30{APART}\n    B = 30{APART}\n    val_bpb = 1 + A / 100 + B / 1000 + args.seed / 1e5"
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
assert not {"PYTHONPATH", "AUTORESEARCH_CACHE"} & set(os.environ) and os.environ["CUDA_VISIBLE_DEVICES"] == ""
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        assert os.environ["KEY"].encode() not in path.read_bytes(), "other users see arguments"
    except OSError:
        pass
print("in a", os.environ.get("SANDBOX")) if word != "odd" else None

def edit(knob, by):
    train.write_text(re.sub(rf"\b{knob} = ([\d.]+)", lambda m: f"{knob} = {float(m[1]) + by + n / 1000}", text))

def daemon():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(99)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=-1).stdout.readline()

if word != "odd":
    pathlib.Path("IDEA").write_text(f"\n{word} {n}, seed 7\nnext\n")
if word in "AB":
    edit(word, -1)
elif word == "elsewhere":
    edit("A", -1)
    pathlib.Path("harness/log.py").write_text("COLUMNS = []")
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
elif word == "fail":
    sys.exit(1)
elif word == "endless":
    train.write_text(text + "# nothing runs\n")
elif word == "typo":
    train.write_text(text.replace("A = ", f"A = = {n}"))
elif word == "odd":
    edit("B", 1)
    print("\n\t``` <b>wider\tMLP</b>: \"4\" -> '5'" + "y" * 10_000)
"""
EVERY = "A,elsewhere,B,hang,loud,hostile,same,fail,odd,typo,endless"
# By the word of their agent, how proposals end
ENDS = dict(A="keep|discard", B="keep|discard", loud="discard", hostile="discard", odd="discard", typo="crash")
ENDS |= dict(elsewhere="refused: it changes harness/log.py", hang="refused: no proposal within 12 s")
ENDS |= dict(fail="refused: exit status 1", endless="refused: train.py must end with raise")
ENDS |= dict(same=r"refused: (the same train.py as \w{7}, except for whitespace|train.py is unchanged)")


class Loop(Clone):
    def __init__(self, folder: Path, cache: Path):
        super().__init__(folder, cache)
        self.calls, self.agent = folder.with_name("calls"), folder.with_name("agent.py")
        self.agent.write_text(AGENT)
        self.commit(base=BODY)

    def loop(self, *words: str, args=()) -> subprocess.Popen:
        """words: of agents, each a list of what it does."""
        agents = [f"--agent={sys.executable} {self.agent} {word} {self.calls} {{prompt}}" for word in words]
        options = ["--agent-env=NIGHT,KEY", "--agent-limit=12", "--pause=0", *TWO_SLOTS, *agents, *args]
        return self.start(f"exec python -m night loop {shlex.join(options)}", CUDA_VISIBLE_DEVICES="", KEY="of an API")

    def best(self) -> str:
        """The commit that the night goes on from."""
        return self.run("python -m night reference --tokens 1500000").strip()

    def all_ended(self, seconds: float = 30) -> bool:
        """But for Ray's own processes, which take a minute to end after a kill."""
        ours, end = re.compile(r"-m night|train\.py|agent\.py|sleep\(99\)"), time.monotonic() + seconds
        while left := any(ours.search(" ".join(words)) for words in self.processes().values()):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        return not left

    def verdicts(self) -> dict[int, str]:
        """Of all proposals by their numbers. Those that were trained have one row each, the others none."""
        files = (self.folder / "runs" / "proposals").glob("*/verdict.txt")
        found = {int(path.parent.name): path.read_text().strip() for path in files}
        assert sorted(found) == [*range(1, len(found) + 1)]
        rows = Counter((row["commit"], row["status"]) for row in self.rows() if "base" not in row["description"])
        trained = [verdict for verdict in found.values() if not verdict.startswith("refused")]
        assert rows == Counter((verdict[-7:], re.match(r"\w+", verdict)[0]) for verdict in trained)
        assert set(rows.values()) <= {1}
        refs = self.run("git for-each-ref --format='%(objectname:short=7)' refs/heads/autoresearch/mar5-loop/")
        assert sorted(refs.split()) == sorted(commit for commit, _ in rows)
        return found


@pytest.fixture
def loop(prepared, tmp_path):
    loop = Loop(tmp_path / "clone", prepared)
    yield loop
    loop.kill_the_rest()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("proposals", "kills"), [(12, 1), pytest.param(60, 3, marks=pytest.mark.slow)])
def test_each_proposal_is_a_row_or_a_named_refusal_also_if_the_loop_is_killed(loop, proposals, kills):
    """Nothing is lost, doubled or left running, and the clone is as a night leaves it."""
    for stage in range(1, kills + 2):
        runs = proposals * stage // (kills + 1) * 2 // 3
        night = loop.loop(EVERY, args=[f"--runs={runs if stage > kills else 999}"])
        while stage <= kills and len(loop.rows()) < runs:
            time.sleep(0.05)
            assert night.poll() is None, night.stdout.read()
        if stage <= kills:
            night.kill()
            assert loop.all_ended()
    output = loop.finish(night)
    assert loop.all_ended(0)
    verdicts = loop.verdicts()
    proposed = sum(verdict != loops.ENDED for verdict in verdicts.values())
    (trained,) = re.findall(rf"^(\d+) runs: {proposed} proposals so far", output, re.M)
    assert len(verdicts) >= proposals and runs <= int(trained) == len(loop.rows()) - 3

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
    assert max(path.stat().st_size for path in folder.glob("*/agent.log")) == 2**20

    assert loop.run("git status --porcelain") == "" and loop.run("git diff main --name-only") == "train.py\n"
    history = loop.run("git rev-list --abbrev-commit --abbrev=7 HEAD").split()
    *_, kept = (row for row in loop.rows() if row["commit"] in history)
    assert loop.best() == kept["commit"] and loop.run(f"git diff {kept['commit']} HEAD -- train.py") == ""
    assert kept["val_bpb"] == min(row["val_bpb"] for row in loop.rows() if row["status"] == "keep")
    log = (loop.folder / "results.tsv").read_bytes()
    loop.finish(loop.loop(EVERY, args=[f"--runs={runs}"]))
    assert (loop.folder / "results.tsv").read_bytes() == log and loop.verdicts() == verdicts


def test_the_prompt_holds_the_rules_the_memory_and_what_others_do(loop):
    """Whatever the user has told git."""
    (loop.folder / "program.md").write_text("## What you may change\n\nOnly train.py.\n\n## Next\n")
    hooks, config = loop.folder.with_name("hooks"), loop.folder.with_name("config")
    hooks.mkdir()
    for name in ("pre-commit", "prepare-commit-msg", "commit-msg"):
        (hooks / name).symlink_to("/bin/false")
    config.write_text(f"[core]\nautocrlf = true\nhooksPath = {hooks}\n[color]\nui = always\n[commit]\ngpgsign = true\n")
    loop.env["GIT_CONFIG_GLOBAL"] = str(config)
    loop.finish(loop.loop("A,elsewhere,odd,B,worse", args=["--runs=4", "--hours=2", "--sandbox=env SANDBOX=box"]))
    first, *_, last = sorted((loop.folder / "runs" / "proposals").glob("*/prompt.md"), key=lambda p: int(p.parent.name))
    assert "```text\nnone\n" in first.read_text()  # it was asked while the reference trained
    before, memory, _ = last.read_text().split("```")
    assert (last.parent / "agent.log").read_text() == "in a box\n"
    assert "a run of it (1.5 M tokens) ends" in before
    assert "\nOnly train.py.\n\nThe budget is in tokens, " in before and "no improvement.\n\n2.0 hours" in before
    assert "Reference: " in memory and "not in this clone" not in memory
    assert "- refused: it changes harness/log.py" in memory and "the loop ended" not in memory
    assert re.search(r"# Being tried now by others\n- ", memory) and "A seed's standard deviation is 0.0000" in memory


@pytest.mark.parametrize(
    ("words", "args", "reason"),
    [
        ("fail", [], "5 proposals in a row were refused"),
        ("A" + ",worse" * 15, ["--patience=3"], "3 experiments without a gain"),
        ("A", ["--hours=0"], "the hours are over: 0 proposals"),
        ("hang", ["--agent-limit=1"], r"refused  proposal \d, .*: no proposal within 1 s"),
        ("typo", [], "10 runs in a row crashed"),
        ("hang", [], "ended early: 0 proposals so far"),
    ],
)
def test_the_loop_ends_with_a_reason(loop, words, args, reason):
    night = loop.loop(words, args=args)
    if stop := reason.startswith("ended early"):
        while not loop.calls.exists():
            time.sleep(0.05)
        night.send_signal(signal.SIGINT)
    output = loop.finish(night, code=130 * stop)
    assert re.search(rf"^{reason}", output, re.M) and "python -m night report" in output, output
    assert not loop.processes() and not list(Path("/tmp").glob(f"t4-night-{night.pid}-*"))


def test_agents_take_turns_and_what_a_person_does_meanwhile_stays(loop):
    """A commit on the branch is merged with what is kept; a train.py with changes is left alone. Then the report."""
    loop.finish(loop.wave("base", *TWO_SLOTS))
    loop.run("echo x > notes && git add notes && git commit -qm notes && echo '# mine' >> train.py")
    output = loop.finish(loop.loop("A", "B", args=["--runs=3", "--report", "--agents=1"]))
    assert {"agent 1: A 0", "agent 2: B 1"} <= loop.scores().keys()
    assert loop.run("git diff --name-only main HEAD; tail -n1 train.py") == "notes\ntrain.py\n# mine\n"
    assert "train.py here has uncommitted changes" in output and "train.py has uncommitted changes: the" in output
    assert loop.run(f"git diff {loop.best()} HEAD -- train.py") == ""
    assert "it holds up." in (loop.folder / "report.md").read_text()


@pytest.mark.parametrize("first", ["A 0", "A 1"])
def test_of_two_gains_on_the_same_line_the_better_one_stays(loop, first):
    """A 0 is better. Both begin at the same reference."""
    loop.commit(base=BODY.replace("val_bpb", f"time.sleep(5 * (A == {29.001 if first == 'A 0' else 29.0})); val_bpb"))
    loop.finish(loop.loop("A,A,B,B", args=["--runs=2"]))
    *_, kept, last = rows = [row for row in loop.rows() if row["description"] in ("A 0", "A 1")]
    assert kept["description"] == first and [row["status"] for row in rows] == ["keep", "keep"]
    assert loop.best() == next(row["commit"] for row in rows if row["description"] == "A 0")
    verdict = f"but it conflicts with {kept['commit']}, which is better: {last['commit']}"
    assert (f"keep, {verdict}" in loop.verdicts().values()) == (first == "A 0")
    kept = "; 3 kept (2 on this branch), 0 crashed" if first == "A 0" else "; 3 kept, 0 crashed"
    assert kept in loop.run("python -m night show --md --tokens 1500000")


def test_a_gain_over_an_older_reference_is_trained_again_on_the_new_one(loop):
    loop.finish(loop.loop("A,B,worse", args=["--runs=2"]))
    kept, older, both = loop.rows()[3:]
    assert both["description"] == f"{older['description']}, again on {kept['commit']}"
    assert {row["status"] for row in (kept, older, both)} == {"keep"} and both["val_bpb"] == 1.319001
    assert loop.run("git rev-parse HEAD").startswith(both["commit"])


class Merging:
    """A loop without git, agents and runs. A train.py is a set of letters, each of which gains its place in the
    alphabet; so is a commit. Capitals of one letter conflict with small ones."""

    advance, decided, merging = loops.Loop.advance, loops.Loop.decided, loops.Loop.merging

    def __init__(self, monkeypatch):
        self.now, self.gains, self.trains, self.is_over, self.verdicts = "", [], [], False, {}
        self.kind, self.broken = SimpleNamespace(rows=lambda: [gain.row for gain in self.gains]), set()
        monkeypatch.setattr(loops, "compiles", lambda text: text != self.broken)
        monkeypatch.setattr(loops, "reference", lambda kind: self.now)
        monkeypatch.setattr(loops, "read_train", set)
        monkeypatch.setattr(loops, "revert", self.revert)

    def revert(self, text: set, after: set, before: set) -> set | None:
        both = text | after - before
        return both if len({letter.lower() for letter in both}) == len(both) else None

    def gain(self, base: str, change: str, subject: str = "") -> None:
        row = dict(commit=base + change, val_bpb=self.score(base + change), description=subject or change)
        n, size = len(self.verdicts) + len(self.gains), self.score(base) - row["val_bpb"]
        self.gains.append(loops.Gain(n, base, row | dict(status="keep"), size))

    def runs(self) -> list:
        return [SimpleNamespace(description=subject) for subject, _ in self.trains]

    pending = property(runs)

    def over(self) -> bool:
        return self.is_over

    def score(self, commit: str) -> float:
        return -sum(ord(letter.lower()) - 96 for letter in commit)

    def move(self, row: dict) -> None:
        self.now = row["commit"]

    def new_number(self) -> int:
        return 99

    def propose(self, n: int, base: str, text: set, subject: str) -> None:
        self.trains.append((subject, "".join(sorted(text))))

    def note(self, n: int, verdict: str) -> None:
        self.verdicts[n] = verdict


def test_the_largest_gain_comes_first_and_is_not_overtaken_while_it_is_trained_again(monkeypatch):
    night = Merging(monkeypatch)
    night.gain("", "a")
    night.advance()
    assert night.now == "a" and night.verdicts == {0: "keep: a"}
    for change in "bzc":
        night.gain("", change)
    night.gain("a", "d")  # the reference itself was edited: at once
    night.advance()
    assert night.now == "ad" and night.trains == [("z, again on ad", "adz")]
    night.gain("ad", "e")
    night.advance()
    assert night.now == "ad" and len(night.trains) == 1 and len(night.gains) == 3
    night.trains.clear()  # z gains on top of d, too
    night.gain("ad", "z", "z, again on ad")
    night.advance()
    assert night.now == "adz" and night.trains == [("e, again on adz", "adez")]
    assert night.verdicts[2] == "keep, and again on ad as proposal 99: z"


def test_a_change_that_is_merged_a_second_time_is_named_after_the_newest_reference_only(monkeypatch):
    night = Merging(monkeypatch)
    night.now = "c"
    night.gain("b", "a", "wider, again on b")
    night.advance()
    assert night.trains == [("wider, again on c", "ac")]


def test_what_a_person_discards_or_what_does_not_compile_together_is_not_merged(monkeypatch):
    night = Merging(monkeypatch)
    night.now, night.broken = "c", set("bc")
    night.gain("", "b")
    night.gain("", "a")
    night.gain("", "d")
    night.gains[2].row["status"] = "discard"
    night.advance()
    assert night.verdicts == {
        0: "keep, but it conflicts with c, which is better: b",
        1: "keep, and again on c as proposal 99: a",
        2: "discard: d",
    }


def test_when_the_night_is_over_what_waits_is_merged_together(monkeypatch):
    """Once all runs have ended. A gain that conflicts with a better one is left out."""
    night = Merging(monkeypatch)
    night.now, night.is_over, night.trains = "a", True, [("f", "")]
    for change in "bdCc":
        night.gain("", change)
    night.advance()
    assert len(night.trains) == 1 and not night.verdicts
    night.trains.clear()
    night.advance()
    assert night.trains == [("d and 2 more, again on a", "Cabd")] and len(night.gains) == 1
    night.trains, night.now = [], "Cabd"
    night.advance()
    assert not night.trains and not night.gains
    assert night.verdicts[3] == "keep, but it conflicts with Cabd, which is better: c"


def test_gains_are_trained_again_before_new_proposals_and_at_the_end_alone_spread_over_all_gpus(monkeypatch):
    monkeypatch.setattr(loops, "revisions", lambda names: [(name, "") for name in names])
    submitted, args = [], SimpleNamespace(per_gpu=6)
    night = SimpleNamespace(queue=[], pending={}, slots=14, gpus=2, args=args, note=lambda *_: None, over=lambda: False)
    night.runs = lambda: [*submitted, *(run for run, _ in night.queue)]

    def submit(run, base, per_gpu):
        night.pending[run] = base
        submitted.append(run)
        shares.append(per_gpu)

    def accept(*subjects: str) -> list[str]:
        for subject in subjects:
            loops.Loop.accept(night, 1, subject, "base", subject)
        return [run.description for run, _ in night.queue]

    night.submit, night.per_gpu, shares = submit, lambda runs: loops.Loop.per_gpu(night, runs), []
    night.due = lambda: loops.Loop.due(night)
    assert accept("a", "b", "c, again on b", "d") == ["c, again on b", "a", "b", "d"]
    loops.Loop.fill(night)
    assert shares == [6] * 4 and not night.queue
    night.over = lambda: True
    accept("e", "f", "g, again on f", "h, again on f")
    night.slots = 5
    loops.Loop.fill(night)
    assert shares == [6] * 4 + [3] and accept() == ["g, again on f", "e", "f"]
    night.slots = 14
    loops.Loop.fill(night)
    assert shares == [6] * 4 + [3, 3] and accept() == ["e", "f"]


def test_in_simulated_nights_of_many_slots_it_pays_that_the_largest_gain_comes_first():
    at_once, now = ([simulate(14, 150, 0.0003, rule, seed) for seed in range(30)] for rule in (True, False))
    gains, again, late = (np.mean(now, 0) - np.mean(at_once, 0)).tolist()
    assert gains > 0.005 and again < -30 and late < -8
    assert simulate(1, 100, 0.001, False, 1) == simulate(1, 100, 0.001, True, 1)


def test_a_better_gain_that_conflicts_with_the_reference_is_the_reference_though_its_row_is_older(loop):
    """A 2 ends while A 1 is trained again on B 0."""
    loop.commit(
        base=BODY.replace(
            "val_bpb =",
            "time.sleep({29.001: 3 if B == 30 else 9, 29.002: 7}.get(A, 0)); val_bpb = -0.05 * (A == 29.002) +",
        )
    )
    output = loop.finish(loop.loop("B,A,A,worse", args=["--runs=3", "--per-gpu=3"]))
    (best,) = (row["commit"] for row in loop.rows() if row["description"] == "A 2")
    assert loop.best() == best and loop.run(f"git diff {best} HEAD -- train.py") == "", output
    assert "which no run has kept" not in output


def test_an_agents_description_cannot_pass_for_a_merge(tmp_path, monkeypatch):
    agent = loops.Agent(1, 0.0, "agent 1: ", "base", tmp_path, {}, None)
    (tmp_path / "IDEA").write_text("wider, again on 1234567, seed 7\n")
    assert agent.idea() == "agent 1: wider"


def test_patience_does_not_end_while_a_gain_waits_or_is_trained_again():
    args = SimpleNamespace(hours=1, runs=None, patience=3)
    night = SimpleNamespace(args=args, start=time.monotonic(), crashed=0, refused=0, gains=[], dry=lambda: 3)
    night.merging = lambda: False
    assert loops.Loop.over(night) == "3 experiments without a gain"
    night.gains = [1]
    assert loops.Loop.over(night) == ""
    night.gains, night.merging = [], lambda: True
    assert loops.Loop.over(night) == ""


def test_a_row_that_has_no_verdict_yet_is_settled_and_not_trained_again(loop):
    """As if the loop had been killed between the two."""
    loop.finish(loop.loop("A", args=["--runs=1"]))
    rows, path = loop.rows(), loop.folder / "runs" / "proposals" / "1" / "verdict.txt"
    verdict = path.read_text()
    path.write_text(f"trains as {rows[-1]['commit']}\n")
    loop.finish(loop.loop("A", args=["--runs=1"]))
    assert loop.rows() == rows and path.read_text() == verdict and verdict.startswith("keep: ")


def test_a_night_goes_on_while_somebodys_git_holds_the_index(loop):
    (loop.folder / ".git" / "index.lock").touch()
    output = loop.finish(loop.loop("A", args=["--runs=1"]))
    assert "git cannot write train.py: the branch moves on" in output
    assert loop.run("git rev-parse HEAD").startswith(loop.best())
    (loop.folder / ".git" / "index.lock").unlink()
    loop.finish(loop.loop("A", args=["--runs=2"]))
    assert loop.run("git rev-parse HEAD").startswith(loop.best()) and loop.run("git status --porcelain") == ""


def test_a_reference_that_crashed_is_mended_by_a_commit_and_a_new_night_measures_its_noise(loop):
    loop.commit(broken="raise MemoryError")
    loop.finish(loop.loop("A", args=["--runs=1"]), code=1)
    loop.commit(mended=BODY)
    loop.finish(loop.wave("HEAD", *TWO_SLOTS))  # one seed of three
    loop.finish(loop.loop("A", args=["--runs=1"]))
    mended = ["mended", "mended, seed 1", "mended, seed 2"]
    rows = [(row["description"], row["status"]) for row in loop.rows() if row["status"] != "crash"]
    assert rows[0] == ("mended", "keep") and sorted(rows[:3]) == [(name, "keep") for name in mended]
    assert rows[-1][1] == "keep" and rows[-1][0].startswith("A ")


def test_of_agents_that_fail_together_one_counts(tmp_path):
    """As when their provider is down: each round of them makes the pause longer."""
    process = SimpleNamespace(returncode=1)
    night = SimpleNamespace(
        agents=[], args=SimpleNamespace(pause=30), refused=0, next_ask=0.0, propose=lambda *_: False
    )

    def judge(asked: float) -> tuple[int, float]:
        agent = SimpleNamespace(
            n=1, asked=asked, base="", work=tmp_path / "a" / "b", files={}, process=process, idea=str
        )
        night.agents.append(agent)
        loops.Loop.judge(night, agent)
        return night.refused, night.next_ask - time.monotonic()

    assert [judge(time.monotonic()) for _ in range(6)] == [(1, pytest.approx(30, abs=1))] * 6
    assert judge(night.next_ask) == (2, pytest.approx(90, abs=1))
    night.propose = lambda *_: True
    assert judge(0.0) == (0, pytest.approx(0, abs=1))


def test_without_its_records_a_night_goes_on(loop):
    loop.finish(loop.loop("A,worse", args=["--runs=2"]))
    before = loop.rows()
    shutil.rmtree(loop.folder / "runs")
    loop.finish(loop.loop("A,worse", args=["--runs=3"]))
    assert loop.rows()[:-1] == before and len(loop.verdicts()) >= 3


def test_a_loop_ends_when_another_branch_is_checked_out_and_goes_on_when_its_own_is_again(loop):
    night = loop.loop("worse", args=["--runs=6"])
    while len(loop.rows()) < 4:
        time.sleep(0.05)
        assert night.poll() is None, night.stdout.read()
    loop.run("git checkout -q main")
    output = loop.finish(night, code=1)
    assert output.endswith("night: the night is on autoresearch/mar5: check it out again, and rerun the command\n")
    loop.run("git checkout -q autoresearch/mar5")
    rows = loop.rows()
    output = loop.finish(loop.loop("worse", args=["--hours=0"]))  # starts no run
    assert loop.rows() == rows and re.search("^the hours are over: .* [1-4] not trained", output, re.M)
    loop.finish(loop.loop("worse", args=["--runs=6"]))  # trains these first
    bases = loop.run("git for-each-ref --format='%(parent)' refs/heads/autoresearch/mar5-loop/").split()
    assert len(loop.verdicts()) >= 6 and {*bases} == {loop.run("git rev-parse autoresearch/mar5").strip()}


def test_a_killed_loop_takes_its_agents_along(loop):
    night = loop.loop("hang", args=["--agent-limit=99"])
    while not loop.calls.exists():
        time.sleep(0.05)
    night.kill()
    assert loop.all_ended()
    assert loop.verdicts() == {1: "refused: the loop ended first", 2: "refused: the loop ended first"}


@pytest.mark.parametrize(
    ("before", "agent", "remedy"),
    [
        ("", "no-such-program -p", ": there is no program no-such-program"),
        ("", "", ": '' is no command: check --agent"),  # a variable that is not set
        ("", 'an "open quote', """: 'an "open quote' is no command"""),
        ("", "true' --runs '0", " loop: error: argument --runs: 0 must be above 0"),
        ("git checkout -q --detach; ", "true", ": HEAD is on no branch: git checkout -b"),
        (
            "sed -i 's/val_bpb = /val_bpb = = /' train.py; git commit -qam x; ",
            "true",
            ": the reference crashes: python -m night show ",
        ),
    ],
)
def test_a_loop_that_cannot_be_says_so_in_a_line(loop, before, agent, remedy):
    output = loop.run(f"{before} python -m night loop --agent '{agent}' --seconds 5", CUDA_VISIBLE_DEVICES="")
    assert re.search(f"^night{remedy}", output, re.M), output
