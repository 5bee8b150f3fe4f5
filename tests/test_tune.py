"""Tuning: which numbers of train.py are knobs, and searches over a stub of it by a real Optuna."""

import functools
import itertools
import json
import re
import statistics
import time
from collections import Counter

import pytest
from scratch import Scratch, StubPool
from test_wave import STUB, TWO_SLOTS, Clone

import harness
import night.plot
from night import live, records, tune
from night.__main__ import parse
from night.knobs import edit, read_knobs
from night.plot import plot
from night.records import curve
from night.report import best_of
from night.rows import arms
from prepare import PrepareError

optuna = pytest.importorskip("optuna", reason="it is in the extra [night]")

HOSTILE = """\
A_LR = 0.04        # a rate
SHARE = 0.95
STEPS = 200        # [100, 300] of them, [Smith, 2020]
ROWS = 2**17       # a power
LONG = 1_234_567   # digits
STRING = "1"; BYTES = b"1"; TUPLE = (0.1, 0.2); FLAG = True; NONE = None; CALL = float("1.0"); NAME = ROWS
NOTHING = 0.0; ZERO = 0; MINUS = -0.3; LESS = 1 - 2; COMPLEX = 1j; INF = 1e999; ERROR = 1 / 0; TYPES = "1" + 1
SPLIT = (2
         ** 3)
A = B = 0.5; LEFT, RIGHT = 0.6, 12.0; TWICE = 0.2; TWICE = 0.3
if NAME: INNER = 1 << -1
class Config:
    depth: int; n_embd: int; head_dim: int; seq_len: int; window: int; full_heads: int; total_batch_size: int
SIZES = (  # from
    (0, Config(3, 128, 32, 256, full_heads=4, window=256)), (7e13, Config(4, 384)),
    (1e12, "é", Config(9)), (1e12, Config(5, 384, 128, 2048, 256, 1, 2**13, experts=32)))
""".encode()

# 1.203 where LR is 0.02 and WIDTH is 32, 1.403 at the start; a DEPTH of 1, 4 or 5 crashes
BOWL = "LR = 0.04001  # [0.01, 0.1]\nWIDTH = 2**4\nDEPTH = 3\nimport math\n" + STUB.replace("BODY", """\
    open(LOG, "a").write("one "); time.sleep(0.3); assert DEPTH in (2, 3)
    val_bpb = 1.2 + DEPTH / 1000 + 0.1 * abs(math.log2(LR * 50)) + 0.1 * abs(5 - math.log2(WIDTH))"""[4:])  # fmt: skip
QUICK = """\
LR = 0.04001  # [0.01, 0.1]
WIDTH = 2**4
DEPTH = 3
import math
assert DEPTH in (2, 3)
result(1.2 + DEPTH / 1000 + 0.1 * abs(math.log2(LR * 50)) + 0.1 * abs(5 - math.log2(WIDTH)))
"""


class Tuned(Clone):
    def search(self, *args: str, rows: int = 0):
        search = self.start(f"exec python -m night tune {' '.join([*TWO_SLOTS, *args])}", CUDA_VISIBLE_DEVICES="")
        while len(self.rows()) < rows:
            time.sleep(0.05)
            assert search.poll() is None, search.stdout.read()
        return search

    def tune(self, *args: str) -> str:
        return self.finish(self.search(*args))

    def trials(self) -> list:
        return optuna.load_study(study_name=None, storage=f"sqlite:///{self.folder}/runs/tune.db").trials

    def train(self, commit: str) -> tuple[str, tuple]:
        text = self.run(f"git show {commit}:train.py")
        return text, tuple(knob.value for knob in read_knobs(text.encode(), 0))


class Searched(Scratch):
    """A clone, and searches in this process."""

    def tune(self, *options: str, user=()) -> str:
        args = parse(["tune", "--tokens=1500000", "--per-gpu=2", *options])
        knobs_of = functools.partial(read_knobs, peak=0, names=args.knobs, searched=())
        self.pool = StubPool(self.kind, self.folder.parent)
        self.pool.user = iter(user)
        search = tune.Tuner(args, self.pool, self.kind, knobs_of)
        search.search()
        return search.study.get_trials()

    def train(self, commit: str) -> str:
        return self.shell(f"git show {commit}:train.py")


@pytest.fixture
def quick(tmp_path, monkeypatch):
    return Searched(tmp_path / "clone", monkeypatch, {"train.py": QUICK}, ", 1.5 M tokens")


@pytest.fixture
def clone(prepared, tmp_path):
    clone = Tuned(tmp_path / "clone", prepared)
    (clone.folder / "train.py").write_text(BOWL.replace("LOG", repr(str(tmp_path / "trained"))))
    clone.run("git commit -qam base")
    return clone


def test_knobs_are_positive_numbers_that_are_set_once_and_the_sizes_in_use():
    assert {knob.name: knob.choices or (knob.low, knob.high, knob.log) for knob in read_knobs(HOSTILE, 5e12)} == {
        "A_LR": (0.02, 0.08, True),
        "SHARE": (pytest.approx(0.9125), pytest.approx(0.9875), False),
        "STEPS": (100.0, 300.0, True),
        "ROWS": (2**15, 2**16, 2**17, 2**18, 2**19),
        "LONG": (617283.5, 2469134.0, True),
        "depth": (3, 4, 5, 6, 7),
        "n_embd": (128, 256, 384, 512, 640),
        "window": (64, 128, 256, 512, 1024),
        "total_batch_size": (2**11, 2**12, 2**13, 2**14, 2**15),
    }
    choices = {knob.name: knob.choices for knob in read_knobs(HOSTILE, 0, ["n_embd", "window", "seq_len"])}
    assert choices == {"n_embd": (128, 160, 192), "window": (64, 128, 256), "seq_len": (64, 128, 256, 512, 1024)}


def test_a_size_that_replaces_all_rows_is_the_one_in_use_and_defaults_count_beside_it():
    source = HOSTILE.replace(b"head_dim: int;", b"head_dim: int = 32;") + b"SIZE = Config(7, 64, full_heads=2)\n"
    choices = {knob.name: knob.choices for knob in read_knobs(source, 5e12, ["depth", "n_embd"])}
    assert choices == {"depth": (5, 6, 7, 8, 9), "n_embd": (64, 96, 128)}
    (head_dim,) = read_knobs(source, 5e12, ["head_dim"])
    assert b"head_dim: int = 16;" in edit(source, {head_dim: 16})
    assert read_knobs(source.replace(b"SIZE = Config(7", b"SIZE = None  # Config(7"), 0, ["n_embd"])[0].value == 128


def test_an_edit_moves_numbers_and_nothing_else_and_writes_them_as_they_were():
    knobs = {knob.name: knob for knob in read_knobs(HOSTILE, 5e12)}
    wanted = {"A_LR": 0.0234567, "STEPS": 123.4, "LONG": 2.3e6, "n_embd": 600, "window": 999}
    values = {knobs[name]: knobs[name].fit(value) for name, value in (wanted | {"total_batch_size": 2e4}).items()}
    assert [line for line in edit(HOSTILE, values).split(b"\n") if line not in HOSTILE.split(b"\n")] == [
        b"A_LR = 0.0235      # a rate",
        b"STEPS = 123        # [100, 300] of them, [Smith, 2020]",
        b"LONG = 2_300_000   # digits",
        '    (1e12, "é", Config(9)), (1e12, Config(5, 640, 128, 2048, 1024, 1, 2**14, experts=32)))'.encode(),
    ]


def test_a_range_without_the_value_an_unknown_knob_and_cma_es_with_an_agent_are_refused():
    with pytest.raises(PrepareError, match=r"A_LR = 0.04 is outside its range \[0.01, 0.02\]"):
        read_knobs(HOSTILE.replace(b"# a rate", b"# [0.01, 0.02]"), 0)
    with pytest.raises(PrepareError, match=r"no knob ZERO, TUPLE in train.py: use some of A_LR, "):
        read_knobs(HOSTILE, 0, ["ZERO", "A_LR", "TUPLE"])
    with pytest.raises(SystemExit):
        parse(["tune", "--with-agent", "--sampler=cmaes"])


def test_by_tokens_no_size_is_searched_as_it_may_make_a_token_dearer(monkeypatch, capsys):
    monkeypatch.setattr(tune, "kind_here", str)
    monkeypatch.setattr(tune, "reference", str)
    monkeypatch.setattr(tune, "read_train", lambda commit: HOSTILE)
    names = []
    for budget in ("--seconds=5", "--tokens=5"):
        tune.tune(parse(["tune", "--list", "--gpu=T4", budget]))
        names.append({line.split()[0] for line in capsys.readouterr().out.splitlines()})
    tune.tune(parse(["tune", "--list", "--gpu=T4", "--knobs=ROWS,STEPS"]))
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert lines == [["STEPS", "200", "100", "to"], ["ROWS", "2**17", "32768,", "65536,"]]
    assert names[0] - names[1] == {"depth", "n_embd", "window", "total_batch_size"} and "A_LR" in names[1]


@pytest.mark.slow
def test_trials_killed_in_the_middle_go_on_and_none_is_doubled(clone, tmp_path):
    (clone.folder / "train.py").write_text("by hand")
    clone.search("--runs=7", rows=3).kill()
    assert clone.all_gone(20, runs=True)
    before, output = clone.rows(), clone.tune("--runs=7")
    rows, trials = clone.rows(), clone.trials()
    by_commit = {row["commit"]: row for row in rows}
    assert len(trials) == 7 and by_commit.keys() == {trial.user_attrs["commit"] for trial in trials}
    assert rows[: len(before)] == before and rows == [*by_commit.values()]
    assert 0 <= len((tmp_path / "trained").read_text().split()) - len(rows) <= 2  # killed at work, and repeated
    base, (start, _) = trials[0].user_attrs["commit"], clone.train("HEAD")
    assert base == clone.run("git rev-parse --short=7 HEAD").strip() and by_commit[base]["val_bpb"] > 1.403
    for trial, row in [(trial, by_commit[trial.user_attrs["commit"]]) for trial in trials]:
        text, (lr, width, depth) = clone.train(row["commit"])
        assert 0.01 <= lr <= 0.1 and width in (4, 8, 16, 32, 64) and text.split("\n")[3:] == start.split("\n")[3:]
        assert trial.value == (row["val_bpb"] or None) and (row["status"] == "crash") == (depth not in (2, 3))
        parent = clone.run(f"git rev-parse --short=7 {row['commit']}^").strip()
        assert row["commit"] == base or (parent == base and row["description"].startswith("tune tpe: "))
    best = min((row for row in rows if row["val_bpb"]), key=lambda row: row["val_bpb"])
    assert re.search(rf"vs reference.*\n{best['val_bpb']:.6f} .* keep +{best['commit']}  ", output)
    assert clone.run("git status --porcelain").split() == ["M", "train.py"]
    assert clone.tune("--runs=7").startswith("7 of 7 trials so far, 0 of them")


def test_a_trial_that_begins_badly_is_stopped_and_its_row_says_so(quick, monkeypatch, capsys):
    """Runs begin by turns with the lowest loss so far and the highest."""
    begun = quick.folder.with_name("begun")
    train = f"""
with open({str(begun)!r}, "ab", buffering=0) as file: file.write(b"."); n = file.tell()
loss = 5 + n / 100 if n % 2 else 5 - n / 100
lines = [f"1\\t1\\t{{share * 1.5e6}}\\t{{loss}}\\t0" for share in (0, 0.15, 0.3, 0.3)]
news("curve.tsv", "\\n".join(lines).encode())
"""
    quick.shell(f"cat >> train.py <<'END'\n{train}\nEND\ngit commit -qam curves")
    monkeypatch.setattr(tune, "FIRST", 3)
    now = itertools.count(0, 100)  # the board says how far it is at each look
    monkeypatch.setattr(live.time, "monotonic", lambda: next(now))
    trials = quick.tune("--sampler=random", "--runs=14", "--knobs=LR,WIDTH", "--prune")
    output = capsys.readouterr().out
    ended = re.findall(r"(\d+) of 14 runs have ended(, \d+ min left)?", output)
    assert (ended[0], ended[-1]) == (("0", ""), ("14", "")), output
    assert all(left for n, left in ended if 0 < int(n) < 14), output
    pruned = [row for row in quick.rows() if row["description"].endswith("[pruned at 20%]")]
    ends = Counter((trial.state.name, trial.user_attrs["commit"]) for trial in trials)
    stopped = {commit for state, commit in ends if state == "PRUNED"}  # trials of equal values are one run
    assert stopped and stopped == {row["commit"] for row in pruned}, output
    assert {state for state, _ in ends} == {"PRUNED", "COMPLETE"} and len(pruned) == len(stopped), output
    assert len(quick.pool.trained) == len(quick.rows()) - len(pruned)  # equal values are one run
    for row in pruned:
        (folder,) = (quick.folder / "runs").glob(f"{row['commit']}-*")
        assert curve(folder)[-1].loss > 5


def test_with_an_agent_a_search_goes_on_from_what_is_kept_meanwhile(quick):
    """The idea also has a rate searched on a linear scale from now on."""

    def keep_an_idea() -> None:
        quick.shell("sed -i '$ a # an idea\ns/0.01, 0.1/0, 0.1/' train.py; git commit -qam idea")
        row = {key: quick.rows()[0][key] for key in ("gpu", "dataset", "memory_gb")}
        harness.log_result(val_bpb=1.1, commit=quick.head(), description="idea", **row)

    user = (keep_an_idea() if look == 2 else None for look in itertools.count())
    trials = quick.tune("--with-agent", "--sampler=random", "--knobs=LR,WIDTH", "--runs=12", user=user)
    commits = [trial.user_attrs["commit"] for trial in trials]
    edits = ["# an idea" in quick.train(commit) for commit in commits]
    assert 1 < edits.index(True) < 6 and edits == sorted(edits) and commits[edits.index(True)] == quick.head()
    assert len(quick.rows()) == len({row["commit"] for row in quick.rows()}) == 12


def test_equal_values_are_one_run_and_cma_es_searches(quick):
    trials = quick.tune("--sampler=cmaes", "--runs=12", "--knobs=WIDTH,DEPTH")
    rows = quick.rows()
    assert len(trials) == 12 > len(rows) == len({quick.train(row["commit"]) for row in rows}) > 1
    assert all(row["description"].startswith("tune cmaes: ") for row in rows[2:])


def test_cma_es_begins_at_the_constants_as_they_are_not_in_the_middle_of_their_ranges(quick):
    quick.shell("sed -i 's/0.01, 0.1/0.04, 100/' train.py; git commit -qam wide")
    trials = quick.tune("--sampler=cmaes", "--runs=8", "--knobs=LR,WIDTH")
    assert statistics.median(trial.params["LR"] for trial in trials[1:]) < 0.6, "the middle is 2"


def test_arms_are_told_apart_in_the_picture_and_the_report(tmp_path, monkeypatch, capsys):
    """Neither the baseline nor a run with another seed belongs to an arm. Two seeds of a commit differ by 0.02."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    monkeypatch.setattr(records, "RUNS", tmp_path / "runs")
    row = dict(memory_gb=1.0, gpu="A", dataset="d")
    ideas = {
        "no tune tpe: a": 1.3,
        "no tune tpe: a, seed 1": 1.32,
        "tune tpe: A 1 -> 2": 1.2,
        "agent 2: x": 1.25,
        "tune tpe: A 1 -> 3": 1.1,
        "tune random: A": 0,
        "tune random: B": 1.4,
        "tune tpe: C, seed 1": 1.0,
    }
    ideas |= {f"tune random: {letter}, seed 1": 0 for letter in "DEFGH"}
    for i, (text, bpb) in enumerate(ideas.items()):
        commit = f"c{max(1, i)}"
        harness.log_result(val_bpb=bpb, description=text, reason="NaN" * (not bpb), commit=commit, **row)
        if "seed" not in text:
            records.RUNS.mkdir(exist_ok=True)
            folder = records.new_folder(f"{commit}-42-300s")
            (folder / "curve.tsv").write_text(f"step\tseconds\ttokens\tloss\tlr\n1\t{30 * i}\t1\t9\t0\n")
            (folder / "summary.json").write_text(json.dumps({"total_seconds": 60 * i} if bpb else {"reason": "NaN"}))
    found = arms(harness.read_results())
    assert {name: len(rows) for name, rows in found.items()} == {"tpe": 2, "agent 2": 1, "random": 2}
    assert not arms([row for row in harness.read_results() if row["status"] == "crash"])
    assert best_of("tpe", found["tpe"]) == "- Best of 2 by tpe: 1.1000, c4, tune tpe: A 1 -> 3."
    figures, save = [], night.plot.save
    monkeypatch.setattr(night.plot, "save", lambda figure, name: figures.append(figure) or save(figure, name))
    plot()
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "progress.png"), str(tmp_path / "arms.png")]
    left, right = figures[-1].axes
    drawn = [[[*line.get_xdata()] for line in ax.lines] for ax in (left, right)]
    assert drawn == [[[1, 2], [1], [1, 2]], [[2, 6], [3], [2.5, 8.5]]], "a crash took what it trained"
    assert [[*line.get_ydata()] for line in left.lines] == [[1.2, 1.1], [1.25], [1.3, 1.3]], "baseline: 1.3"
    assert [text.get_text() for text in right.get_legend().get_texts()][-1] == "random, 1.4000"
    low, high = (edge(left.collections[0].get_paths()[0].vertices[:, 1]) for edge in (min, max))
    assert low == pytest.approx(1.1 - 0.02 / 2**0.5) and high == pytest.approx(1.2 + 0.02 / 2**0.5)
