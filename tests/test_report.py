"""The morning after: simulated nights, their experiments drawn from a random generator, and the report on them."""

import os
import random
import re
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
from scratch import Scratch
from small_corpus import ROOT
from test_night import Night

import harness
import prepare
from harness import Description
from night import report as reports
from night.__main__ import parse
from night.report import difference, gains
from night.rows import Kind, Label, experiments, seed_noise

pytest.importorskip("scipy", reason="it is in the extra [night]")

NOISE = 0.002
SETTING = ", 1.5 M tokens"
LABEL = f"cpu{SETTING}"
# A revision whose true val_bpb is known, and its score on test, with other noise.
STUB = """\
import random

def bpb(split):
    return TRUE + random.Random(f"{split} {seed} IDEA").gauss(0, NOISE)

result(bpb("val"), bpb("test"))
"""
STUB_RUN = """\
import sys, time
import harness
import prepare

options = dict(option.removeprefix("--").split("=") for option in sys.argv[1:])
seed = int(options["seed"])

def result(val_bpb, test_bpb):
    time.sleep(0.3)
    gpu = "cpu" + harness.budget_name(None, int(options["tokens"]), None)
    harness.log_result(
        val_bpb=val_bpb, memory_gb=2.0, gpu=gpu, dataset=prepare.dataset_id(), tokens_M=1.3,
        test_bpb=test_bpb if harness.night_record()["score_test"] else None,
    )

"""


class Simulated:
    """Nights in a clone: `folder`, `shell` and `rows` are its own."""

    dataset = "d"
    stub = STUB

    def simulate(self, gain: float, runs: int = 200) -> list[dict]:
        """A night of so many experiments, their noise included, that truly gains so much; its rows.

        Only what is kept becomes a commit.
        """
        rng, best = random.Random(5), 9.0
        for i in range(runs):
            true = 1.2 - gain * (i // 40) / max(1, (runs - 1) // 40)
            row = dict(memory_gb=2.0, gpu=LABEL, dataset=self.dataset, tokens_M=1.5, commit=f"{i:07x}")
            row["path"] = self.folder / "results.tsv"
            val_bpb = true + rng.gauss(0, NOISE)
            if i and i % 20 == 0:
                harness.log_result(val_bpb=0.0, reason="out of memory", description=f"idea {i}", **row)
                continue
            if val_bpb < best:
                best = val_bpb
                text = self.stub.replace("TRUE", str(true)).replace("NOISE", str(NOISE)).replace("IDEA", str(i))
                (self.folder / "train.py").write_text(text)
                self.shell(f"git commit -qam 'idea {i}'")
                row["commit"] = self.shell("git rev-parse --short=7 HEAD").strip()
            harness.log_result(val_bpb=val_bpb, description=f"idea {i}", **row)
        return self.rows()

    def report_rows(self) -> list[dict]:
        return [row for row in self.rows() if row["gpu"] == f"{LABEL}, report"]


class Morning(Simulated, Scratch):
    """Reports in this process, whose runs end at once and see fewer tokens than those of the night."""

    def __init__(self, folder: Path, monkeypatch, **files: str):
        super().__init__(folder, monkeypatch, {"train.py": "", **files}, SETTING)
        monkeypatch.setattr(reports, "start_pool", lambda args: (self.pool, self.kind))
        self.pool.tokens_M = 1.3

    def report(self, *options: str) -> None:
        reports.report(parse(["report", "--per-gpu=2", "--tokens=1500000", *options]))

    def written(self) -> str:
        return (self.folder / "report.md").read_text("utf-8")


@pytest.fixture
def morning(tmp_path, monkeypatch) -> Morning:
    return Morning(tmp_path / "clone", monkeypatch)


class Clone(Simulated, Night):
    """Reports in processes."""

    shell = Night.run
    stub = STUB_RUN + STUB

    def __init__(self, folder: Path, cache: Path):
        super().__init__(folder, cache)
        self.dataset = prepare.dataset_id(cache / (cache / "current").read_text().strip())

    def report(self, *args: str) -> subprocess.Popen:
        command = ["exec python -m night report --per-gpu=2 --tokens=1500000", *args]
        return self.start(" ".join(command), CUDA_VISIBLE_DEVICES="")

    def finish(self, report: subprocess.Popen, code: int = 0) -> str:
        output = report.communicate(timeout=600)[0]
        assert report.returncode == code and not self.processes(), output
        return output


@pytest.fixture
def clone(prepared, tmp_path) -> Clone:
    return Clone(tmp_path / "clone", prepared)


def numbers(report: str) -> dict[str, list[float]]:
    """The rows of its table: before, after, gain, standard error."""
    lines = re.findall(r"^\| (val|test)(.*?) \|(.*)\|$", report, re.M)
    return {
        split + rest[:4]: [float(cell) for cell in cells.split("|") if cell.strip()] for split, rest, cells in lines
    }


def test_of_a_night_without_a_true_gain_the_report_says_that_nothing_was_found(morning, capsys):
    rows = morning.simulate(gain=0.0)
    kept = [row for row in rows if row["status"] == "keep"]
    morning.report()
    output = capsys.readouterr().out
    assert f"{LABEL}, d: 200 experiments, {len(kept)} kept, 9 crashed." in output
    assert "it may be chance. More" in output
    table = numbers(output)
    assert table["val, as"][2] == round(kept[0]["val_bpb"] - kept[-1]["val_bpb"], 4) > NOISE
    assert abs(table["val, me"][2]) < 0.004 and abs(table["test, me"][2]) < 0.004
    text = morning.written()
    assert numbers(text) == table and "it may be chance" in text and "![](progress.png)" in text
    assert (morning.folder / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert morning.shell("git status --porcelain") == ""


@pytest.mark.slow
def test_a_true_gain_is_found_also_by_a_report_that_was_interrupted_and_its_rows_are_no_experiments(clone, monkeypatch):
    night = clone.simulate(gain=0.02)
    report = clone.report()
    while len(clone.rows()) < len(night) + 2:
        time.sleep(0.05)
        assert report.poll() is None, report.stdout.read()
    os.killpg(report.pid, signal.SIGINT)
    assert "interrupted: the same command continues" in clone.finish(report, code=130)
    before = clone.rows()
    assert len(before) < len(night) + 6
    output = clone.finish(clone.report())
    assert clone.rows()[: len(before)] == before

    rows, (first, *_, last) = clone.report_rows(), [row["commit"] for row in night if row["status"] == "keep"]
    assert clone.rows() == night + rows
    subject = {row["commit"]: row["description"] for row in night}
    names = sorted((row["commit"], row["description"].partition(", test ")[0]) for row in rows)
    seeds = (101, 102, 103)
    assert names == sorted((commit, f"{subject[commit]}, seed {seed}") for commit in (first, last) for seed in seeds)
    assert rows[0]["status"] == "keep" and {row["status"] for row in rows} <= {"keep", "discard"}
    assert f"First kept: {first}, {subject[first]}. Last kept: {last}, {subject[last]}." in output
    table = numbers(output)
    assert abs(table["val, me"][2] - 0.02) < 0.005 and abs(table["test, me"][2] - 0.02) < 0.005
    assert "it holds up." in output
    assert output.count(" saw 1.3 M tokens here, 1.5 M as logged") == 2

    log = (clone.folder / "results.tsv").read_bytes()
    assert "\n0 runs, 6 more have a row" in clone.finish(clone.report())
    assert (clone.folder / "results.tsv").read_bytes() == log

    monkeypatch.setattr(harness, "RESULTS", (clone.folder / "results.tsv"))
    assert experiments() == night
    assert seed_noise(night[0])[0] == pytest.approx(NOISE, rel=0.8)
    assert clone.run("python -m night reference --tokens 1500000").strip() == last
    assert Kind(["cpu"], ", 1.5 M tokens", night[0]["dataset"]).rows() == night  # what a wave compares with


def test_a_gain_is_written_down_before_an_attribution_that_may_fail(morning, capsys):
    morning.stub = "assert seed < 1000\n" + STUB
    morning.simulate(gain=0.02, runs=50)
    with pytest.raises(prepare.PrepareError, match="0 of 16 runs succeeded, too few"):
        morning.report("--seeds=2", "--attribute")
    assert "\n16 runs, 0 more " in capsys.readouterr().out, "different ones, although changes may have to go together"
    assert "the gain's 95% confidence interval" in morning.written()


def test_runs_without_a_test_score_are_repeated(morning, tmp_path, capsys):
    (old := tmp_path / "old").touch()
    morning.stub = STUB.replace('bpb("test"))', f"None if __import__('os').path.exists({str(old)!r}) else bpb('test'))")
    morning.simulate(gain=0.02, runs=50)
    morning.report("--seeds=2")
    assert numbers(capsys.readouterr().out).keys() == {"val, as", "val, me"}
    old.unlink()
    morning.report("--seeds=2")
    assert numbers(capsys.readouterr().out).keys() == {"val, as", "val, me", "test, me"}


@pytest.mark.parametrize(
    ("runs", "option", "code", "line"),
    [
        (1, "--seeds=3", 0, "Fewer than two revisions were kept on this branch: there is no gain to report."),
        (
            1,
            "--tokens=7",
            1,
            "night: no experiment on cpu, 7e-06 M tokens, .*, but on cpu, 1.5 M tokens, .*: give that budget",
        ),
        (0, "--seeds=1", 1, "night: --seeds must be at least 2, not 1: one run has no standard error"),
    ],
)
def test_a_report_that_cannot_be_says_so_in_a_line(clone, runs, option, code, line):
    clone.simulate(gain=0.0, runs=runs)
    (clone.folder / "report.md").write_text("of yesterday")
    assert re.search(f"^{line}$", clone.finish(clone.report(option), code), re.M)
    assert (code == 0) == bool(re.search(f"^{line}$", (clone.folder / "report.md").read_text(), re.M))


FIRST = dict(commit="a", val_bpb=1.210, status="keep", tokens_M=9.0, description="baseline, seed 7")
LAST = dict(commit="b", val_bpb=1.200, status="keep", tokens_M=9.0, description="wider, seed 7")


def rows_of(val: dict[str, list[float]], test: dict[str, list[float]], tokens_M: float = 9.0) -> list[dict]:
    rows = []
    for commit, scores in val.items():
        for i, val_bpb in enumerate(scores):
            row = dict(
                commit=commit,
                gpu=f"{LABEL}, report",
                dataset="d",
                val_bpb=val_bpb,
                status="keep" if val_bpb else "crash",
                tokens_M=tokens_M,
            )
            text = Description("x", i, test[commit][i]) if val_bpb else Description("x", i, None, "killed")
            rows.append(row | {"description": str(text)})
    return rows


def told(val: dict[str, list[float]], test: dict[str, list[float]], tokens_M: float = 9.0) -> str:
    return gains(FIRST, LAST, [FIRST, LAST], rows_of(val, test, tokens_M))


# Student's t for 95%, by a table: 4.303 and 2.776 of 2 and 4 degrees of freedom
@pytest.mark.parametrize(
    ("differences", "error", "t"), [([5, 6, 7], 1 / 3**0.5, 4.303), ([4, 5, 6, 7, 8], 0.5**0.5, 2.776)]
)
def test_a_gain_is_that_of_pairs_and_stands_beyond_chance(differences, error, t):
    spread = [0.0, 0.1, 0.04, 0.02, 0.07][: len(differences)]  # from seed to seed, alike in both
    for mean, stands in ((t * error * 1.01, True), (t * error * 0.99, False)):
        gains_ = [(d - statistics.mean(differences) + mean) / 1000 for d in differences]
        gain, sd, low, high = difference([(1.2 + x, 1.2 + x - y) for x, y in zip(spread, gains_, strict=True)])
        assert (gain, sd, (low + high) / 2) == pytest.approx((mean / 1000, error / 1000, mean / 1000))
        assert (low > 0) == stands


def test_the_report_names_its_ends_and_says_luck_of_what_is_missing_on_new_seeds_only():
    val = {"a": [1.207, 1.209, 1.211], "b": [1.202, 1.203, 1.204]}
    test = {"a": [1.307, 1.309, 1.311], "b": [1.3055, 1.306, 1.3075]}
    text = told(val, test)
    assert text.startswith("First kept: a, baseline. Last kept: b, wider.\n")
    assert numbers(text) == {
        "val, as": [1.21, 1.2, 0.01],
        "val, me": [1.209, 1.203, 0.006, 0.0006],
        "test, me": [1.309, 1.3063, 0.0027, 0.0006],
    }
    assert "mean of 3 new seeds" in text and "saw" not in text
    assert "is 0.0001 to 0.0053: it holds up." in text and "logged, 0.0040 was luck" in text
    test["b"] = [1.303, 1.309, 1.3075]  # test gains less, and nothing that is sure
    val["b"] = [1.197, 1.1985, 1.2005]  # as much as logged
    text = told(val, test)
    assert "may be chance" in text and "luck" not in text
    assert "another text" in text
    val["b"] = [1.201, 1.1995, 1.1995]  # 0.0010 less, with an error of 0.0016
    assert "luck" not in told(val, test)
    val["b"] = [1.217, 1.2185, 1.2205]  # worse
    assert "logged, 0.0100 was luck" in told(val, test)


def test_a_gain_as_logged_is_that_of_the_seeds_which_trained_both():
    """A wave or loop trains the baseline with several seeds, and the lucky one may end first."""
    val = {"a": [1.207, 1.209, 1.211], "b": [1.206, 1.208, 1.2102]}
    lucky = FIRST | {"description": "baseline", "val_bpb": 1.218}
    both = [lucky, FIRST, LAST, FIRST | {"description": "baseline, seed 1", "val_bpb": 1.21}]
    both.append(LAST | {"description": "wider, seed 1", "val_bpb": 1.208})
    text = gains(lucky, LAST, both, rows_of(val, val))
    assert numbers(text)["val, as"] == [1.21, 1.204, 0.006] and "logged, 0.0051 was luck" in text
    text = gains(lucky, LAST, [lucky, LAST], rows_of(val, val))
    assert "logged" not in text and "val, mean of 3 new seeds" in text
    worse = val | {"b": [1.307, 1.309, 1.3112]}
    assert "it is a loss." in told(worse, worse)


def test_many_seeds_and_crashes_among_them():
    val = {"a": [1.21 + i / 1000 for i in range(12)], "b": [1.20 + i / 1000 for i in range(11)] + [0.0]}
    text = told(val, {commit: [1.3 + i % 3 / 100 for i in range(12)] for commit in val})
    assert "| val, mean of 11 new seeds | 1.2150 | 1.2050 | 0.0100 |" in text, "of those that both have"
    line = "b crashed with 1 of the seeds: the numbers are those of the others."
    assert text.count("crashed") == text.count(line) == 1
    with pytest.raises(prepare.PrepareError, match="fewer than two seeds succeeded with both"):
        told({"a": [1.2, 1.3], "b": [1.2, 0.0]}, {"a": [1.3, 1.4], "b": [1.3]})


@pytest.mark.parametrize(("tokens", "said"), [(8.81, 2), (8.83, 0)])
def test_a_report_says_if_its_runs_saw_fewer_tokens(tokens, said):
    val = {"a": [1.207, 1.209], "b": [1.202, 1.203]}
    assert told(val, val, tokens).count("saw 8.8 M tokens here, 9.0 M as logged") == said


@pytest.mark.parametrize(("before", "after", "said"), [([60.0], [72.0], 1), ([60.0], [66.0], 0), ([], [66.0], 0)])
def test_a_report_says_if_what_the_night_found_takes_longer(before, after, said, monkeypatch):
    val = {"a": [1.207, 1.209], "b": [1.202, 1.203]}
    seconds = {FIRST["commit"]: before, LAST["commit"]: after}
    monkeypatch.setattr("night.report.run_seconds", lambda rows: seconds[rows[0]["commit"]])
    text = told(val, val)
    assert text.count("It takes 1.20 times as long") == text.count("times as long") == said


def test_the_reports_rows_of_earlier_nights_stay_readable(monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", ROOT / "tests" / "night" / "results.tsv")
    rows = harness.read_results()
    assert len(experiments()) == 133 and len(rows) == 139
    kept = [row for row in experiments() if row["status"] == "keep"]
    text = gains(kept[0], kept[-1], kept, [row for row in rows if Label.parse(row["gpu"]).report])
    assert "| val, mean of 3 new seeds | 1.2081 | 1.1954 | 0.0127 |" in text
    assert "| test, mean of 3 new seeds | 1.2321 | 1.2216 | 0.0105 |" in text and "luck" not in text
