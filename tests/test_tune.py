"""Tuning: which numbers of train.py are knobs, and searches over a stub of it by a real Ray and Optuna."""

import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from test_wave import STUB, TWO_SLOTS, clone  # noqa: F401

import harness
from night.__main__ import parse
from night.plot import plot
from night.report import best_of
from night.rows import arms
from night.tune import edit, read_knobs
from prepare import PrepareError

pytest.importorskip("ray", reason="it is in the extra [night]")
optuna = pytest.importorskip("optuna", reason="it is in the extra [night]")

HOSTILE = b"""\
A_LR = 0.04        # a rate
SHARE = 0.95       # a share
CAP, = 12.0,
CAP = 12.0
STEPS = 200        # [100, 300] of them, [Smith, 2020]
ROWS = 2**17       # a power
LONG = 1_000_000   # digits
FEW = 2
EMPTY, PAIR, TEXT, FLAG, NONE = "", (1, 2), "\xc3\xa9", True, None
STRING = "1"; BYTES = b"1"; TUPLE = (0.1, 0.2); TRUE = True; NO = None; CALL = float("1.0"); NAME = FEW
NOTHING = 0.0; ZERO = 0; MINUS = -0.3; COMPLEX = 1j; INF = 1e999; ERROR = 1 / 0; SHIFT = 1 << -1; TYPES = "1" + 1
SPLIT = (2
         ** 3)
A = B = 0.5
TWICE = 0.1
TWICE = 0.2
if FEW:
    INNER = 0.3

@dataclass
class Config:
    depth: int
    n_embd: int
    head_dim: int
    seq_len: int
    window: int
    full_heads: int
    total_batch_size: int
    experts: int = 0

SIZES = (  # from
    (0,     Config(3, 128, 32, 256,  256, 4, 2**12)),
    (1e12,  "\xc3\xa9", Config(9, 9, 9, 9, 9, 9, 9)),
    (1e12,  Config(5, 384, 128, 2048, 256, 1, 2**13, experts=32)),
    (70e12, Config(4, 384, 128, 2048, 256, 3, 2**15)),
)
"""

# 1.2 where LR is 0.02 and WIDTH is 32, 1.4 at the start; a DEPTH of 5 crashes
BOWL = """\
LR = 0.04     # [0.01, 0.1]
WIDTH = 2**4
DEPTH = 3
ZERO = 0.0
NEGATIVE = -1.5
PAIR = (0.8, 0.98)
""" + STUB.replace(
    "BODY",
    "import math; open(LOG, 'a').write(f'{LR} {WIDTH} {DEPTH}\\n'); time.sleep(0.3); assert DEPTH < 5;"
    " val_bpb = 1.2 + 0.1 * abs(math.log2(LR / 0.02)) + 0.1 * abs(math.log2(WIDTH / 32))",
)


class Tuned:
    """A clone whose train.py is a bowl, and the searches in it."""

    def __init__(self, clone, log: Path):  # noqa: F811
        self.clone, self.log = clone, log
        (clone.folder / "train.py").write_text(BOWL.replace("LOG", repr(str(log))))
        clone.run("git commit -qam base")

    def start(self, *args: str) -> subprocess.Popen:
        command = f"exec python -m night tune {shlex.join([*TWO_SLOTS, *args])}"
        return self.clone.start(command, CUDA_VISIBLE_DEVICES="")

    def tune(self, *args: str) -> str:
        return self.clone.finish(self.start(*args))

    def rows(self) -> list[dict]:
        return [row for row in self.clone.rows() if row["gpu"] == "cpu, 1.5 M tokens"]

    def trials(self) -> list:
        (study,) = optuna.get_all_study_names(url := f"sqlite:///{self.clone.folder}/runs/tune.db")
        return optuna.load_study(study_name=study, storage=url).trials

    def values(self, commit: str) -> tuple[float, ...]:
        """LR, WIDTH and DEPTH in a commit's train.py."""
        text = self.clone.run(f"git show {commit}:train.py")
        return tuple(eval(re.search(rf"^{name} = (\S+)", text, re.M)[1]) for name in ("LR", "WIDTH", "DEPTH"))


@pytest.fixture
def tuned(clone, tmp_path):  # noqa: F811
    return Tuned(clone, tmp_path / "trained")


def test_knobs_are_positive_numbers_that_are_set_once_and_the_sizes_in_use():
    ranges = {knob.name: knob.choices or (knob.low, knob.high, knob.log) for knob in read_knobs(HOSTILE, 5e12)}
    assert ranges.pop("SHARE") == (pytest.approx(0.9125), pytest.approx(0.9875), False)
    assert ranges == {
        "A_LR": (0.01, 0.16, True),
        "CAP": (3.0, 48.0, True),
        "STEPS": (100.0, 300.0, True),
        "ROWS": (2**15, 2**16, 2**17, 2**18, 2**19),
        "LONG": (250_000.0, 4_000_000.0, True),
        "FEW": (1, 2, 3, 4),
        "depth": (3, 4, 5, 6, 7),
        "n_embd": (128, 256, 384, 512, 640),
        "window": (64, 128, 256, 512, 1024),
        "total_batch_size": (2**11, 2**12, 2**13, 2**14, 2**15),
    }
    by_peak = {peak: {knob.name: knob for knob in read_knobs(HOSTILE, peak)} for peak in (0, 1e15)}
    assert by_peak[0]["window"].choices == (64, 128, 256) and by_peak[0]["n_embd"].choices == (128, 160, 192)
    assert by_peak[1e15]["n_embd"].choices == (384, 512, 640)
    assert [knob.name for knob in read_knobs(HOSTILE, 5e12, ["experts", "CAP"])] == ["CAP", "experts"]


def test_an_edit_moves_numbers_and_nothing_else_and_writes_them_as_they_were():
    knobs = {knob.name: knob for knob in read_knobs(HOSTILE, 1e15)}
    wanted = {"A_LR": 0.0123456, "STEPS": 123.4, "ROWS": 70_000, "LONG": 1.2345e6, "n_embd": 480, "window": 100}
    fitted = {name: knobs[name].fit(value) for name, value in wanted.items()}
    text = edit(HOSTILE, {knobs[name]: value for name, value in fitted.items()})
    assert {knob.name: knob.value for knob in read_knobs(text, 1e15)} == {
        **{name: knob.value for name, knob in knobs.items()},
        **{"A_LR": 0.0123, "STEPS": 123, "ROWS": 65536, "LONG": 1_230_000, "n_embd": 512, "window": 128},
    }
    changed = [new for new, old in zip(text.split(b"\n"), HOSTILE.split(b"\n"), strict=True) if new != old]
    assert changed == [
        b"A_LR = 0.0123      # a rate",
        b"STEPS = 123        # [100, 300] of them, [Smith, 2020]",
        b"ROWS = 2**16       # a power",
        b"LONG = 1_230_000   # digits",
        b"    (70e12, Config(4, 512, 128, 2048, 128, 3, 2**15)),",
    ]


def test_a_range_without_the_value_a_knob_that_is_none_and_cma_es_with_an_agent_are_refused():
    with pytest.raises(PrepareError, match=r"A_LR = 0.04 is not in its range \[0.1, 0.2\]"):
        read_knobs(HOSTILE.replace(b"# a rate", b"# [0.1, 0.2]"), 0)
    with pytest.raises(PrepareError, match=r"no knob ZERO, PAIR in train.py; there are A_LR, "):
        read_knobs(HOSTILE, 0, ["ZERO", "CAP", "PAIR"])
    with pytest.raises(SystemExit):
        parse(["tune", "--with-agent", "--sampler=cmaes"])


def test_20_trials_killed_in_the_middle_go_on_and_none_is_lost_or_doubled(tuned):
    """Each is a commit on the reference, the working tree stays as it is, and a crash is a row."""
    (tuned.clone.folder / "train.py").write_text("by hand")
    search = tuned.start("--runs=20")
    while len(tuned.rows()) < 7:
        time.sleep(0.05)
        assert search.poll() is None, search.stdout.read()
    search.kill()
    assert tuned.clone.all_gone(20, runs=True)
    before = tuned.rows()
    output = tuned.tune("--runs=20")
    rows, trials = tuned.rows(), tuned.trials()
    assert rows[: len(before)] == before or len(before) < 9
    assert len(trials) == 20 and {trial.state.name for trial in trials} <= {"COMPLETE", "FAIL"}
    by_commit = {row["commit"]: row for row in rows}
    assert len(by_commit) == len(rows) and by_commit.keys() == {trial.user_attrs["commit"] for trial in trials}
    assert 20 <= len(tuned.log.read_text().splitlines()) + 20 - len(rows) <= 22  # the two that were killed, once more
    base = tuned.clone.run("git rev-parse --short=7 HEAD").strip()
    for trial in trials:
        row = by_commit[trial.user_attrs["commit"]]
        lr, width, depth = tuned.values(row["commit"])
        assert 0.01 <= lr <= 0.1 and width in (4, 8, 16, 32, 64) and (row["status"] == "crash") == (depth == 5)
        assert trial.value == (None if depth == 5 else row["val_bpb"])
        if row["commit"] != base:
            assert row["description"].startswith("tune tpe: ")
            assert tuned.clone.run(f"git rev-parse --short=7 {row['commit']}^").strip() == base
            edited = tuned.clone.run(f"git diff -U0 {base} {row['commit']} | grep '^[+][A-Z]'").splitlines()
            assert {line[1:].split(" = ")[0] for line in edited} <= {"LR", "WIDTH", "DEPTH"}
    assert tuned.values(trials[0].user_attrs["commit"]) == (0.04, 16, 3) and by_commit[base]["val_bpb"] == 1.4
    best = min((row for row in rows if row["val_bpb"]), key=lambda row: row["val_bpb"])
    assert best["val_bpb"] < 1.4 and best["status"] == "keep"
    assert re.search(rf"^{best['val_bpb']:.6f} +-.*keep +{best['commit']}  tune tpe: .*\n", output, re.M)
    assert tuned.clone.run("git status --porcelain").split() == ["M", "train.py"]
    assert tuned.tune("--runs=20").startswith("20 of 20 trials have begun, 0 of them go on")


def test_with_an_agent_a_search_goes_on_from_what_was_kept_meanwhile(tuned):
    tuned.tune("--with-agent", "--sampler=random", "--runs=3", "--knobs=LR,WIDTH")
    text = (tuned.clone.folder / "train.py").read_text()
    (tuned.clone.folder / "train.py").write_text(text.replace("LR = 0.04 ", "LR = 0.03 ") + "# an idea\n")
    tuned.clone.run(
        "git commit -qam idea && python -m night wave --per-gpu=2 --tokens=1500000", CUDA_VISIBLE_DEVICES=""
    )
    idea = tuned.clone.run("git rev-parse --short=7 HEAD").strip()
    tuned.tune("--with-agent", "--sampler=random", "--runs=6", "--knobs=LR,WIDTH")
    trials = tuned.trials()
    assert [trial.user_attrs["base"] == idea for trial in trials] == 3 * [False] + 3 * [True]
    assert trials[3].user_attrs["commit"] == idea and trials[3].params == {"LR": 0.03, "WIDTH": 16.0}
    ideas = [tuned.clone.run(f"git show {trial.user_attrs['commit']}:train.py") for trial in trials]
    assert ["# an idea" in text for text in ideas] == 3 * [False] + 3 * [True]
    assert len(tuned.rows()) == len({row["commit"] for row in tuned.rows()}) == 6


def test_equal_values_are_one_run_and_cma_es_searches(tuned):
    tuned.tune("--sampler=cmaes", "--runs=12", "--knobs=WIDTH,DEPTH")
    trials, rows = tuned.trials(), tuned.rows()
    assert len(trials) == 12 > len(rows) == len({tuned.values(row["commit"]) for row in rows}) > 1
    assert all(row["description"].startswith("tune cmaes: ") for row in rows[2:])


def test_the_list_names_knobs_and_ranges(tuned):
    lines = tuned.clone.run("python -m night tune --list --gpu T4").splitlines()
    assert [re.split("  +", line) for line in lines] == [
        ["LR", "0.04", "0.01 to 0.1, log scale"],
        ["WIDTH", "2**4", "4, 8, 16, 32, 64"],
        ["DEPTH", "3", "1, 2, 3, 4, 5"],
    ]


def test_arms_are_told_apart_in_the_picture_and_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    row = dict(memory_gb=1.0, gpu="A", dataset="d", commit="c")
    for text, bpb in {"base": 1.3, "tune tpe: A 1 -> 2": 1.2, "agent 2: x": 1.25, "tune tpe: A 1 -> 3": 1.1}.items():
        harness.log_result(val_bpb=bpb, description=text, **row)
    harness.log_result(val_bpb=0.0, description="tune random: A 1 -> 4", reason="NaN", **row)
    found = arms(harness.read_results())
    assert {arm: len(rows) for arm, rows in found.items()} == {"agent": 1, "tpe": 2, "agent 2": 1, "random": 1}
    assert best_of("tpe", found["tpe"]) == "- Best of 2 by tpe: 1.1000, c, tune tpe: A 1 -> 3."
    assert best_of("random", found["random"]) == "- Best of 1 by random: none, all crashed."
    plot()
    assert capsys.readouterr().out.splitlines()[1:] == [str(tmp_path / "arms.png")]
    assert (tmp_path / "arms.png").stat().st_size > 10_000
