"""Tuning: which numbers of train.py are knobs, and searches over a stub of it by a real Optuna."""

import functools
import re
import shlex
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from scratch import Scratch
from test_wave import STUB, TWO_SLOTS, Clone

import harness
from night import agent as agents
from night import loop as loops
from night import proposals, tune
from night.__main__ import parse
from night.git import commit_train
from night.knobs import edit, read_knobs
from prepare import PrepareError

optuna = pytest.importorskip("optuna", reason="it is in the extra [night]")

HOSTILE = b"""\
A_LR = 0.04        # a rate
SHARE = 0.95
STEPS = 200        # of them, [100, 300], [Smith, 2020]
ROWS = 2**17       # a power
LONG = 1_234_567   # digits
STRING = "1"; BYTES = b"1"; TUPLE = (0.1, 0.2); FLAG = True; NONE = None; CALL = float("1.0"); NAME = ROWS
NOTHING = 0.0; ZERO = 0; MINUS = -0.3; LESS = 1 - 2; COMPLEX = 1j; INF = 1e999; ERROR = 1 / 0; TYPES = "1" + 1
SPLIT = (2
         ** 3)
A = B = 0.5; LEFT, RIGHT = 0.6, 12.0; TWICE = 0.2; TWICE = 0.3
if NAME: INNER = 1 << -1
"""

# 1.203 where LR is 0.02 and WIDTH is 32, 1.403 at the start; a DEPTH of 1, 4 or 5 crashes
BOWL = """\
LR = 0.04001  # [0.01, 0.1]
WIDTH = 2**4
DEPTH = 3
import math
assert DEPTH in (2, 3)
result(1.2 + DEPTH / 1000 + 0.1 * abs(math.log2(LR * 50)) + 0.1 * abs(5 - math.log2(WIDTH)))
"""
PATH = "a?b%20c #1"  # of clones: no part of a URL or command line may read it as its own


class Searched(Scratch):
    """A clone, and searches in this process, always with the same luck: one night of 20 runs in 50 gains nothing."""

    luck = 0

    def propose(self, base: str, *options: str) -> tuple[tempfile.TemporaryDirectory, Path]:
        """The tuner's folder, and its checkout there. self.study: what Optuna knew, and the trial."""
        create, scratch = optuna.create_study, tempfile.TemporaryDirectory()
        proposals.checkout(work := Path(scratch.name, "work"), base)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(work)
            patch.setattr(optuna, "create_study", lambda **args: setattr(self, "study", create(**args)) or self.study)
            patch.setattr(optuna.samplers, "TPESampler", functools.partial(optuna.samplers.TPESampler, seed=self.luck))
            self.luck += 1
            tune.propose(parse(["tune", "--tokens=1500000", *options]))
        return scratch, work

    def agent(self, args, name: str, command: str, base: str, branch: str, text: str, now: float) -> agents.Agent:
        """In place of agents.start: the tuner, without a process of its own."""
        n, files = proposals.new_proposal(branch), {"train.py": tune.read_train(base)}
        folders = self.propose(base, *shlex.split(command)[2:])
        return agents.Agent(n, now, name, base, *folders, files, SimpleNamespace(poll=lambda: 0, returncode=0))

    def log(self, commit: str, val_bpb: float, description: str, reason: str = "") -> None:
        where = dict(memory_gb=1.0, gpu="cpu", dataset="d", budget="1.5 M tokens")
        harness.log_result(val_bpb=val_bpb, commit=commit, description=description, reason=reason, **where)


@pytest.fixture
def quick(tmp_path, monkeypatch):
    quick = Searched(tmp_path / PATH, monkeypatch, {"train.py": BOWL}, "1.5 M tokens")
    monkeypatch.setattr(agents, "start", quick.agent)
    monkeypatch.setattr(tune, "kind_here", lambda args: quick.kind)
    monkeypatch.setattr(loops, "start_pool", lambda args: (quick.pool, quick.kind))
    return quick


def test_knobs_are_positive_numbers_that_are_set_once():
    assert {knob.name: (knob.low, knob.high, knob.log) for knob in read_knobs(HOSTILE)} == {
        "A_LR": (0.02, 0.08, True),
        "SHARE": (pytest.approx(0.9125), pytest.approx(0.9875), False),
        "STEPS": (100, 400, True),
        "ROWS": (2**16, 2**18, True),
        "LONG": (617283.5, 2469134, True),
    }


def test_an_edit_moves_numbers_and_nothing_else_and_writes_them_as_they_were():
    knobs = {knob.name: knob for knob in read_knobs(HOSTILE)}
    wanted = {"A_LR": 0.0234567, "SHARE": 0.98741, "STEPS": 123.4, "LONG": 2.3e6, "ROWS": 1e5}
    values = {knobs[name]: knobs[name].fit(value) for name, value in wanted.items()}
    assert [line for line in edit(HOSTILE, values).split(b"\n") if line not in HOSTILE.split(b"\n")] == [
        b"A_LR = 0.0235        # a rate",
        b"SHARE = 0.987",
        b"STEPS = 123        # of them, [100, 300], [Smith, 2020]",
        b"LONG = 2_300_000   # digits",
    ]
    pair = read_knobs(b"A = 2**17; B = 1.0")
    assert edit(b"A = 2**17; B = 1.0", dict(zip(pair, (32, 0.5), strict=True))) == b"A = 2**5; B = 0.5"


def test_an_unknown_knob_and_a_file_without_any_are_refused(quick):
    quick.commit(hostile=HOSTILE.decode())
    quick.log(quick.head(), 1.3, "the reference")
    quick.commit(other="A = 1")
    with pytest.raises(PrepareError, match=r"no knob ZERO, TUPLE in train.py: use some of A_LR, "):
        tune.tune(parse(["tune", "--knobs=ZERO,A_LR,TUPLE"]))
    for source, reason in ((b"A = = 1", "no valid Python"), (b"A = -1\nB = 1e308\nC = 5e-324\n", "has no knob")):
        with pytest.raises(PrepareError, match=f"train.py .*{reason}"):
            read_knobs(source)


def test_a_night_of_the_tuner_moves_constants_to_new_values_within_their_ranges(quick):
    tune.tune(parse(["tune", "--tokens=1500000", "--runs=20"]))
    base, rows = quick.rows()[0], quick.rows()[4:]  # in between are three that tell the noise
    assert len(rows) >= 20 and {row["status"] for row in rows} == {"keep", "discard", "crash"}
    assert min(row["val_bpb"] for row in rows if row["val_bpb"]) < base["val_bpb"]
    found = [quick.shell(f"git show {row['commit']}:train.py") for row in rows]
    assert len({*found}) == len(rows), "each is new"
    for row, text in zip(rows, found, strict=True):
        lr, width, *_ = (knob.value for knob in read_knobs(text.encode()))
        assert 0.01 <= lr <= 0.1 and width in range(1, 257) and text.split("\n")[3:] == BOWL.strip().split("\n")[3:]
        assert re.match(r"tune tpe: \w+ \S+ -> ", row["description"])
        for name, before, after in re.findall(r"(\w+) (\S+) -> ([^\s,]+)", row["description"]):
            assert before != after and f"{name} = {after}" in text, "what stays is no change"


def test_optuna_learns_from_what_was_kept_and_from_the_trials_of_its_own_sampler(quick):
    """By whichever agent of several; not from files that lack the constant, nor from crashes and commits that this
    clone lacks. An older file had other ranges."""
    base, text = quick.head(), BOWL.encode()
    files = {name: text.replace(b"2**4", name.encode()) for name in ("2", "4", "8", "32", "64")}
    files["none"], files["typo"] = text.replace(b"WIDTH = 2**4", b"WIDTH = None"), text + b"= ="
    commits = {name: commit_train(base, file, name, f"x/{name}") for name, file in files.items()}
    quick.log(base, 1.4, "base")
    quick.log(commits["2"], 1.3, "an idea that was kept")
    quick.log(commits["4"], 1.35, "agent 2: tune tpe: WIDTH 2**4 -> 4")
    quick.log(commits["8"], 1.35, "agent 1: an idea")
    quick.log(commits["none"], 1.35, "tune tpe: a")
    quick.log("0123456+", 1.2, "what was kept, but not committed")
    quick.log(commits["typo"], 0.0, "tune tpe: b", reason="SyntaxError")
    quick.log(commits["32"], 0.0, "tune tpe: c", reason="NaN")
    quick.log(commits["64"], 1.35, "tune random: d")
    commit_train(base, text.replace(b"2**4", b"128"), "tune tpe: e", "night-loop/7")
    quick.propose(base)
    known = [(trial.params["WIDTH"], trial.value, trial.state.name) for trial in quick.study.trials]
    assert known[:4] == [
        (16, 1.4, "COMPLETE"), (2, 1.3, "COMPLETE"), (4, 1.35, "COMPLETE"), (128, None, "RUNNING"),
    ]  # fmt: skip
    assert len(known) == 5 and 8 <= known[-1][0] <= 32


@pytest.mark.slow
def test_the_command_searches_what_it_is_told_to_and_goes_on(prepared, tmp_path):
    """A user's edit is left alone."""
    clone = Clone(tmp_path / PATH / "clone", prepared)
    (clone.folder / "train.py").write_text(f"LR = 0.04\nB = 2.0\n{STUB.replace('BODY', 'val_bpb = 1 + LR')}")
    clone.run("git commit -qam base; echo by hand > train.py")
    for runs in (2, 4):
        search = f"exec python -m night tune {' '.join(TWO_SLOTS)} --knobs LR --runs={runs}"
        output = clone.finish(clone.start(search, CUDA_VISIBLE_DEVICES=""))
        trials = [row["description"] for row in clone.rows()[4:]]  # after the base and three that tell the noise
        assert len(trials) == len({*trials}) >= runs, output
        assert all(re.fullmatch(r"tune tpe: LR \S+ -> \S+", trial) for trial in trials)
        assert clone.run("cat train.py") == "by hand\n"
