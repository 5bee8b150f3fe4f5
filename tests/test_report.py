"""The morning after: simulated nights, their experiments drawn from a random generator, and the report on them."""

import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
from keep_rules import Case, draw
from scratch import Scratch

import harness
import prepare
from night import report as reports
from night.__main__ import parse
from night.noise import interval, miss_of_look, seed_noise, shrink
from night.report import gains, remember_look
from night.rows import experiments, reference

pytest.importorskip("scipy", reason="it is in the extra [night]")

NOISE = 0.002
BUDGET = "1.5 M tokens"
LABEL = dict(gpu="cpu", budget=BUDGET)
# A revision whose true val_bpb is known, and its score on test, with other noise.
STUB = """\
import random

def bpb(split):
    return TRUE + random.Random(f"{split} {seed} IDEA").gauss(0, NOISE)

result(bpb("val"), bpb("test"))
"""


class Morning(Scratch):
    """Nights in a clone, and reports in this process, whose runs end at once."""

    def __init__(self, folder: Path, monkeypatch, **files: str):
        super().__init__(folder, monkeypatch, {"train.py": "", **files}, BUDGET)
        kind, self.stub = self.kind, STUB
        monkeypatch.setattr(reports, "start_pool", lambda args: (self.pool, kind._replace(budget=args.budget)))

    def simulate(self, gain: float, runs: int = 200) -> list[dict]:
        """A night of so many experiments that truly gains so much; its rows. Only what is kept becomes a commit."""
        rng, best = random.Random(5), 9.0
        for i in range(runs):
            true = 1.2 - gain * (i // 40) / max(1, (runs - 1) // 40)
            row = dict(memory_gb=2.0, **LABEL, dataset="d", tokens_M=1.5, commit=f"{i:07x}")
            val_bpb = true + rng.gauss(0, NOISE)
            if i and i % 20 == 0:
                harness.log_result(val_bpb=0.0, reason="out of memory", description=f"idea {i}", **row)
                continue
            if val_bpb < best:
                best = val_bpb
                text = self.stub.replace("TRUE", str(true)).replace("NOISE", str(NOISE)).replace("IDEA", str(i))
                (self.folder / "train.py").write_text(text)
                self.shell(f"git commit -qam 'idea {i}'")
                row["commit"] = self.head()
            harness.log_result(val_bpb=val_bpb, description=f"idea {i}", **row)
        return self.rows()

    def report(self, *options: str) -> None:
        reports.report(parse(["report", "--per-gpu=2", "--tokens=1500000", *options]))

    def written(self) -> str:
        return (self.folder / "report.md").read_text("utf-8")


@pytest.fixture
def morning(tmp_path, monkeypatch) -> Morning:
    return Morning(tmp_path / "clone", monkeypatch)


def numbers(report: str) -> dict[str, list[float]]:
    """The rows of its table: before, after, gain, standard error."""
    lines = re.findall(r"^\| (val|test)(.*?) \|(.*)\|$", report, re.M)
    return {
        split + rest[:4]: [float(cell) for cell in cells.split("|") if cell.strip()] for split, rest, cells in lines
    }


def test_of_a_night_without_a_true_gain_the_report_says_that_nothing_was_found(morning, capsys):
    kept = [row for row in morning.simulate(gain=0.0) if row["status"] == "keep"]
    morning.report()
    output = capsys.readouterr().out
    assert f"cpu, {BUDGET}, d: 200 experiments, {len(kept)} kept on this branch, 9 crashed." in output
    assert "it may be chance.\nThis is look 1 at it. The next one, with --seeds 6, has a 99% interval" in output
    table = numbers(output)
    assert table["val, as"][2] == round(kept[0]["val_bpb"] - kept[-1]["val_bpb"], 4) > NOISE
    assert abs(table["val, me"][2]) < 0.004 and abs(table["test, me"][2]) < 0.004
    assert numbers(morning.written()) == table and "![](progress.png)" in morning.written()
    assert (morning.folder / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert morning.shell("git status --porcelain") == ""


def test_a_true_gain_is_found_also_by_a_report_that_was_interrupted_and_its_rows_are_no_experiments(morning, capsys):
    night = morning.simulate(gain=0.02)
    morning.pool.user = (morning.interrupt() if look == 2 else None for look in itertools.count())
    with pytest.raises(SystemExit):
        morning.report()
    assert len(morning.rows()) == len(night) + 2
    morning.report()
    output, rows = capsys.readouterr().out, morning.rows()[len(night) :]
    assert "\n4 runs, 2 more have a score" in output and experiments() == night == morning.kind.rows()
    first, *_, last = (row for row in night if row["status"] == "keep")
    runs = {(row["commit"], row["description"], row["seed"], row["status"]) for row in rows}
    ends = {(row["commit"], row["description"]) for row in (first, last)}
    assert runs == {(*end, seed, "report") for end in ends for seed in (101, 102, 103)} and len(rows) == 6
    assert f"First kept: {first['commit']}, {first['description']}. Last kept: {last['commit']}, " in output
    table = numbers(output)
    assert abs(table["val, me"][2] - 0.02) < 0.005 and abs(table["test, me"][2] - 0.02) < 0.005
    assert "it holds up." in output
    log = harness.RESULTS.read_bytes()
    morning.report()
    assert "\n0 runs, 6 more have a score" in capsys.readouterr().out and harness.RESULTS.read_bytes() == log
    assert seed_noise(night[0])[0] == pytest.approx(NOISE, rel=0.8) and reference(morning.kind) == last["commit"]


def test_a_gain_is_written_down_before_an_attribution_that_may_fail(morning, capsys):
    morning.stub = "assert seed < 1000\n" + STUB
    morning.simulate(gain=0.02, runs=50)
    with pytest.raises(prepare.PrepareError, match=r"0 of \d+ runs succeeded"):
        morning.report("--seeds=2", "--attribute")
    assert "the gain's 97% confidence interval" in morning.written()


def test_runs_without_a_test_score_are_repeated(morning, tmp_path, capsys):
    (old := tmp_path / "old").touch()
    morning.stub = STUB.replace('bpb("test"))', f"None if __import__('os').path.exists({str(old)!r}) else bpb('test'))")
    morning.simulate(gain=0.02, runs=50)
    morning.report("--seeds=2")
    assert numbers(capsys.readouterr().out).keys() == {"val, as", "val, me"}
    old.unlink()
    morning.report("--seeds=2")
    assert numbers(capsys.readouterr().out).keys() == {"val, as", "val, me", "test, me"}


def test_a_report_that_cannot_be_says_so_and_leaves_the_one_before(morning):
    (morning.folder / "report.md").write_text("of yesterday")
    with pytest.raises(prepare.PrepareError, match="--seeds must be at least 2"):
        morning.report("--seeds=1")
    morning.simulate(gain=0.0, runs=1)
    with pytest.raises(prepare.PrepareError, match="no experiment on cpu, 7e-06 M tokens, d"):
        morning.report("--tokens=7")
    assert morning.written() == "of yesterday"
    morning.report()
    assert "there is no gain to report." in morning.written()


FIRST = dict(commit="a", val_bpb=1.210, status="keep", tokens_M=9.0, description="baseline", seed=7, reason="")
LAST = dict(commit="b", val_bpb=1.200, status="keep", tokens_M=9.0, description="wider", seed=7, reason="")


def rows_of(val: dict[str, list[float]], test: dict[str, list[float]]) -> list[dict]:
    rows = []
    for commit, values in val.items():
        for i, val_bpb in enumerate(values):
            row = dict(commit=commit, dataset="d", val_bpb=val_bpb, status="report", tokens_M=9.0, **LABEL)
            row |= dict(description="x", seed=i, test_bpb=test[commit][i] if val_bpb else None)
            rows.append(row | {"reason": "killed" * (not val_bpb)})
    return rows


def told(val: dict[str, list[float]], test: dict[str, list[float]]) -> str:
    return gains(FIRST, LAST, [FIRST, LAST], rows_of(val, test))


def test_an_interval_of_pairs_excludes_what_is_beyond_chance():
    """Student's t for 95% and 2 degrees of freedom, by a table: 4.303."""
    for mean, excludes in ((4.303 / 3**0.5 * 1.01, True), (4.303 / 3**0.5 * 0.99, False)):
        gain, error, low, high = interval([mean - 1, mean, mean + 1])
        assert (gain, error, (low + high) / 2) == pytest.approx((mean, 1 / 3**0.5, mean))
        assert (low > 0) == excludes


def test_however_often_one_looks_again_an_interval_misses_in_one_night_of_twenty():
    """Each look misses at its own rate; always at 95%, one of three misses in 12%."""
    looks = 3, 6, 12
    nights = np.random.default_rng(1).normal(0.003, 0.002, (2000, max(looks)))
    ends = [interval(nights[:, :seeds], miss_of_look(look))[2:] for look, seeds in enumerate(looks, start=1)]
    missed = np.array([(low > 0.003) | (high < 0.003) for low, high in ends])
    assert missed.mean(1) == pytest.approx([0.03, 0.01, 0.005], abs=0.008)
    assert missed.any(0).mean() == pytest.approx(0.041, abs=0.01)
    assert sum(miss_of_look(look) for look in range(1, 100)) == pytest.approx(0.05)


@pytest.mark.parametrize("ideas", [10, 100])
def test_the_gains_of_ideas_that_scored_lower_are_shown_as_large_as_they_are_on_average(ideas):
    rng, found = np.random.default_rng(0), []
    for _ in range(4000 // ideas):
        truth = draw(Case(), ideas, rng)
        gains_ = truth + rng.normal(0, 0.001, ideas)
        found += [*np.transpose([gains_, shrink(gains_, 0.001), truth])[gains_ > 0]]
    raw, shrunk, truth = np.transpose(found)
    assert (raw - truth).mean() > 0.0005 and abs((shrunk - truth).mean()) < 0.0001
    assert np.square(shrunk - truth).mean() < 0.75 * np.square(raw - truth).mean()
    assert shrink([0.01, -0.3], [1e-5, 1e-4]) == pytest.approx([0.01, -0.3]), "without noise nothing is luck"


def test_the_report_names_its_ends_and_judges_the_gain_by_test_with_new_seeds():
    val = {"a": [1.207, 1.209, 1.211], "b": [1.202, 1.203, 1.204]}
    test = {"a": [1.307, 1.309, 1.311], "b": [1.3046, 1.3063, 1.3081]}
    text = told(val, test)
    assert text.startswith("First kept: a, baseline. Last kept: b, wider.\n") and "mean of 3 new seeds" in text
    assert numbers(text) == {
        "val, as": [1.21, 1.2, 0.01],
        "val, me": [1.209, 1.203, 0.006, 0.0006],
        "test, me": [1.309, 1.3063, 0.0027, 0.0001],
    }
    assert "On test, which no other report has scored, the gain's 97% confidence interval is 0.0018 to 0.0035" in text
    assert "it holds up." in text and "The errors cover seeds, not texts" in text
    assert "may be chance" in told(val, test | {"b": [1.303, 1.309, 1.3075]}), "test gains less, and nothing sure"
    assert "it is a loss." in told(val, test | {"b": [1.407, 1.409, 1.4112]})


def test_a_gain_as_logged_is_that_of_the_seeds_which_trained_both():
    """A wave or loop trains the baseline with several seeds, and the lucky one may end first."""
    val = {"a": [1.207, 1.209, 1.211], "b": [1.206, 1.208, 1.2102]}
    lucky = FIRST | {"seed": 42, "val_bpb": 1.218}
    both = [lucky, FIRST, LAST, FIRST | {"seed": 1, "val_bpb": 1.21}, LAST | {"seed": 1, "val_bpb": 1.208}]
    assert numbers(gains(lucky, LAST, both, rows_of(val, val)))["val, as"] == [1.21, 1.204, 0.006]
    assert "logged" not in gains(lucky, LAST, [lucky, LAST], rows_of(val, val))


def test_a_report_knows_how_often_it_has_looked_and_whose_report_has_scored_test_before(morning):
    commit = "git commit -q --allow-empty -m x; git rev-parse --short=7 HEAD; "
    a, b, c, d = morning.shell(4 * commit).split()
    other = morning.shell(f"git checkout -q -b other {a}; {commit}")

    def look(first: str, last: str, seeds: int, dataset: str = "d") -> tuple[int, list[str]]:
        rows = rows_of({name: [1.2] * seeds for name in (first, last)}, {name: [1.3] * seeds for name in (first, last)})
        return remember_look(first, last, rows, dataset)

    assert [look(a, b, seeds) for seeds in (3, 6, 3, 1, 12)] == [(1, []), (2, []), (1, []), (3, []), (3, [])]
    assert look(a, b, 24, "e") == (1, []), "another text"
    assert look(c, d, 5) == (1, [f"{a}-{b}"]) and look(a, other, 3) == (1, [])
    val = {"a": [1.207, 1.209], "b": [1.202, 1.203]}
    text = gains(FIRST, LAST, [FIRST, LAST], rows_of(val, val), 2, ["c-d"])
    assert "On test, which the report on c-d has scored, too, the gain's 99% confidence" in text
    assert "This is look 2 at it. The next one, with --seeds 4, has a 99.5% interval" in text


def test_many_seeds_and_crashes_among_them():
    val = {"a": [1.21 + i / 1000 for i in range(12)], "b": [1.20 + i / 1000 for i in range(11)] + [0.0]}
    text = told(val, {commit: [1.3 + i % 3 / 100 for i in range(12)] for commit in val})
    assert "| val, mean of 11 new seeds | 1.2150 | 1.2050 | 0.0100 |" in text, "of those that both have"
    line = "b crashed with 1 of the seeds: the numbers are those of the others."
    assert text.count("crashed") == text.count(line) == 1
    with pytest.raises(prepare.PrepareError, match="fewer than two seeds succeeded with both"):
        told({"a": [1.2, 1.3], "b": [1.2, 0.0]}, {"a": [1.3, 1.4], "b": [1.3]})
