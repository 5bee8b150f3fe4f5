"""The morning after: simulated nights, their experiments drawn from a random generator, and the report on them."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_corpus import copy_files
from test_night import Night, command

import harness
import prepare
from night.report import gains
from night.rows import experiments, rows_on, seed_noise

pytest.importorskip("ray", reason="it is in the extra [night]")

NOISE = 0.002
LABEL = "cpu, 1.5 M tokens"
# A revision whose true val_bpb is known. What it has "saved" scores the same on test, with other noise.
STUB = """\
import random, sys, time, types
from pathlib import Path
import harness
import prepare

def bpb(split, seed):
    return TRUE + random.Random(f"{split} {seed} IDEA").gauss(0, NOISE)

def build_model(config, device, capability):
    raise AssertionError("this stub has no model")

config = types.SimpleNamespace(device_batch_size=1, seq_len=1)
harness.pick_gpu = lambda name: (None, types.SimpleNamespace(capability=None))
harness.load_weights = lambda *args: types.SimpleNamespace(config=config, seed=harness.WEIGHTS.read_text())
prepare.evaluate_bpb = lambda model, tokenizer, batch, length, split: bpb(split, model.seed)

if __name__ == "__main__":
    options = dict(option.removeprefix("--").split("=") for option in sys.argv[1:])
    label = "cpu" + harness.budget_name(None, int(options["tokens"]), None)
    time.sleep(0.3)
    status = harness.log_result(
        val_bpb=bpb("val", options["seed"]), memory_gb=2.0, gpu=label, dataset=prepare.dataset_id(), tokens_M=1.5
    )
    assert status == "keep", "without weights there is no test score"
    harness.WEIGHTS.write_text(options["seed"])
"""


class Clone(Night):
    def simulate(self, gain: float, runs: int = 200) -> list[dict]:
        """A night of so many experiments, their noise included, that truly gains so much; its rows.

        Only what is kept becomes a commit.
        """
        rng, best, dataset = random.Random(5), 9.0, prepare.dataset_id(self.cache / self.dataset)
        for i in range(runs):
            true = 1.2 - gain * (i // 40) / max(1, (runs - 1) // 40)
            row = dict(memory_gb=2.0, gpu=LABEL, dataset=dataset, tokens_M=1.5, commit=f"{i:07x}")
            val_bpb = true + rng.gauss(0, NOISE)
            if i and i % 20 == 0:
                harness.log_result(
                    val_bpb=0.0, reason="out of memory", description=f"idea {i}", path=self.results, **row
                )
                continue
            if val_bpb < best:
                best = val_bpb
                text = STUB.replace("TRUE", str(true)).replace("NOISE", str(NOISE)).replace("IDEA", str(i))
                (self.folder / "train.py").write_text(text)
                self.run(f"git commit -qam 'idea {i}'")
                row["commit"] = self.run("git rev-parse --short=7 HEAD").strip()
            harness.log_result(val_bpb=val_bpb, description=f"idea {i}", path=self.results, **row)
        return self.rows()

    @property
    def results(self) -> Path:
        return self.folder / "results.tsv"

    @property
    def cache(self) -> Path:
        return Path(self.env["AUTORESEARCH_CACHE"])

    @property
    def dataset(self) -> str:
        return (self.cache / "current").read_text().strip()

    def report(self, *args: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["python", "-m", "night", "report", "--per-gpu=2", "--tokens=1500000", *args],
            cwd=self.folder,
            env=self.env | {"CUDA_VISIBLE_DEVICES": ""},
            text=True,
            stdout=-1,
            stderr=-2,
            start_new_session=True,
        )

    def finish(self, report: subprocess.Popen, code: int = 0) -> str:
        output = report.communicate(timeout=600)[0]
        assert report.returncode == code and not self.processes(), output
        return output

    def report_rows(self) -> list[dict]:
        return [row for row in self.rows() if row["gpu"] == f"{LABEL}, report"]


@pytest.fixture
def clone(prepared, tmp_path) -> Clone:
    return Clone(tmp_path / "clone", prepared)


def numbers(report: str) -> dict[str, list[float]]:
    """The rows of its table: first kept, last kept, gain, standard error."""
    lines = re.findall(r"^\| (val|test)(.*?) \|(.*)\|$", report, re.M)
    return {
        split + rest[:4]: [float(cell) for cell in cells.split("|") if cell.strip()] for split, rest, cells in lines
    }


def test_of_a_night_without_a_true_gain_the_report_says_that_nothing_was_found(clone):
    rows = clone.simulate(gain=0.0)
    kept = [row for row in rows if row["status"] == "keep"]
    output = clone.finish(clone.report())
    assert f"{LABEL}, {rows[0]['dataset']}: 200 experiments, {len(kept)} kept, 9 crashed." in output
    assert "The night found nothing that stands." in output
    table = numbers(output)
    assert table["val, as"][2] == round(kept[0]["val_bpb"] - kept[-1]["val_bpb"], 4) > NOISE
    assert abs(table["val, me"][2]) < 0.004 and abs(table["test, me"][2]) < 0.004
    text = (clone.folder / "report.md").read_text("utf-8")
    assert numbers(text) == table and "nothing that stands" in text and "![](progress.png)" in text
    assert (clone.folder / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert clone.run("git status --porcelain") == ""


def test_a_true_gain_is_found_also_by_a_report_that_was_interrupted_and_its_rows_are_no_experiments(clone, monkeypatch):
    night = clone.simulate(gain=0.02)
    report = clone.report()
    while len(clone.rows()) < len(night) + 2:
        time.sleep(0.05)
        assert report.poll() is None, report.stdout.read()
    os.killpg(report.pid, signal.SIGINT)
    assert "interrupted: the same command goes on" in clone.finish(report, code=130)
    before = clone.rows()
    assert len(before) < len(night) + 6
    output = clone.finish(clone.report())
    assert clone.rows()[: len(before)] == before

    rows, (first, *_, last) = clone.report_rows(), [row["commit"] for row in night if row["status"] == "keep"]
    assert clone.rows() == night + rows
    names = sorted((row["commit"], row["description"].partition(", test ")[0]) for row in rows)
    assert names == sorted((commit, f"report: seed {seed}") for commit in (first, last) for seed in (101, 102, 103))
    assert rows[0]["status"] == "keep" and {row["status"] for row in rows} <= {"keep", "discard"}
    verdict = re.search(
        r"What stands of the (.*) gained as logged: (.*) \+- .* seeds and (.*) \+- .*The rest, (.*), was luck", output
    )
    logged, val, test, luck = map(float, verdict.groups())
    assert abs(val - 0.02) < 0.005 and abs(test - 0.02) < 0.005 and luck == pytest.approx(logged - test, abs=2e-4)

    log = clone.results.read_bytes()
    assert "\n0 runs, 6 more have a row" in clone.finish(clone.report())
    assert clone.results.read_bytes() == log

    monkeypatch.setattr(harness, "RESULTS", clone.results)
    assert experiments() == night
    assert harness.best_result(LABEL, night[0]["dataset"])["commit"] == last
    assert seed_noise(LABEL, night[0]["dataset"]) == pytest.approx(NOISE, rel=0.8)
    kept = command("**4. Keep or go back.**").partition("git checkout")[0] + "echo $kept"
    assert clone.run(kept).strip() == last
    assert rows_on(re.escape(LABEL), night[0]["dataset"]) == night  # what a wave compares with


def test_a_test_score_that_fails_costs_itself_and_not_the_run_and_is_made_up_for(clone, monkeypatch, tmp_path):
    """Here as no weights were written: the disk was full. The cache has a relative path."""
    (full := tmp_path / "full").touch()
    write = 'harness.WEIGHTS.write_text(options["seed"])'
    monkeypatch.setitem(globals(), "STUB", STUB.replace(write, f"Path({str(full)!r}).exists() or {write}"))
    clone.simulate(gain=0.02, runs=50)
    clone.env["AUTORESEARCH_CACHE"] = os.path.relpath(clone.cache, clone.folder)
    assert numbers(clone.finish(clone.report("--seeds=2"))).keys() == {"val, as", "val, me"}
    assert {row["status"] for row in clone.report_rows()} <= {"keep", "discard"}
    full.unlink()
    assert numbers(clone.finish(clone.report("--seeds=2"))).keys() == {"val, as", "val, me", "test, me"}


@pytest.mark.parametrize(
    ("runs", "option", "code", "line"),
    [
        (1, "--seeds=3", 0, "Fewer than two revisions were kept: there is no gain to report."),
        (1, "--tokens=7", 1, "night: no experiment on .* with this GPU and budget: there is nothing to report"),
        (0, "--seeds=1", 1, "night: --seeds takes 2 or more: one run has no standard error"),
    ],
)
def test_a_report_that_cannot_be_says_so_in_a_line(clone, runs, option, code, line):
    clone.simulate(gain=0.0, runs=runs)
    (clone.folder / "report.md").write_text("of yesterday")
    assert re.search(f"^{line}$", clone.finish(clone.report(option), code), re.M)
    assert (code == 0) == bool(re.search(f"^{line}$", (clone.folder / "report.md").read_text(), re.M))


def rows_of(scores: dict[str, list[float]], test: dict[str, list[float]]) -> list[dict]:
    return [
        dict(commit=commit, val_bpb=val, status="keep", description=f"report: seed {i}, test {test[commit][i]}")
        for commit in scores
        for i, val in enumerate(scores[commit])
    ]


def test_gains_and_their_standard_errors_are_those_of_the_two_means():
    first, last = dict(commit="a", val_bpb=1.210), dict(commit="b", val_bpb=1.200)
    val = {"a": [1.207, 1.209, 1.211], "b": [1.202, 1.203, 1.204]}
    test = {"a": [1.307, 1.309, 1.311], "b": [1.305, 1.306, 1.307]}
    text = gains(first, last, rows_of(val, test))
    error = (0.002**2 / 3 + 0.001**2 / 3) ** 0.5
    assert numbers(text)["val, me"] == [1.209, 1.203, 0.006, round(error, 4)]
    assert numbers(text)["test, me"] == [1.309, 1.306, 0.003, round(error, 4)]
    assert (
        "The night found nothing that stands." in text
    )  # 0.0030 is 2.3 standard errors; with so few runs it takes 2.8
    test["b"] = [1.302, 1.303, 1.304]
    text = gains(first, last, rows_of(val, test))
    assert text.splitlines()[-1] == (
        "What stands of the 0.0100 gained as logged: 0.0060 +- 0.0013 on new seeds and 0.0060 +- 0.0013 on text that "
        "no experiment has seen. The rest, 0.0040, was luck."
    )


def test_a_crash_among_the_seeds_counts_for_nothing():
    first, last = dict(commit="a", val_bpb=1.21), dict(commit="b", val_bpb=1.20)
    crash = dict(commit="b", val_bpb=0.0, status="crash", description="report: seed 103 [out of memory]")
    rows = rows_of({"a": [1.21, 1.22, 1.23], "b": [1.19, 1.20]}, {"a": [1.31, 1.32, 1.33], "b": [1.29, 1.30]})
    assert numbers(gains(first, last, [*rows, crash])) == numbers(gains(first, last, rows))
    with pytest.raises(prepare.PrepareError, match="fewer than two runs of a revision have ended well"):
        gains(first, last, [*rows[:4], crash])


def test_the_test_score_is_that_of_the_weights_which_the_run_has_trained(prepared, tmp_path):
    """On a test split that is the validation split, it is val_bpb, but for fp16. The run has no test split to read."""
    copy_files(tmp_path)
    cache = shutil.copytree(prepared, tmp_path / "cache")
    folder = cache / (cache / "current").read_text().strip()
    (folder / "test_00000.bin").unlink()
    env = os.environ | {"AUTORESEARCH_CACHE": str(cache), "AUTORESEARCH_SCREENING": "1"}
    run = [sys.executable, "-m", "night", "run", "--seconds=1", "--gpu=cpu"]
    subprocess.run(run, cwd=tmp_path, env=env, check=True, timeout=600)
    shutil.copy(folder / "val_00000.bin", folder / "test_00000.bin")
    subprocess.run([*run, "--score"], cwd=tmp_path, env=env, check=True, timeout=600)
    trained, scored = harness.read_results(tmp_path / "results.tsv")
    description, test = scored["description"].split(", test ")
    assert description == trained["description"]
    assert float(test) == pytest.approx(trained["val_bpb"], abs=1e-3)
    same = ("commit", "val_bpb", "memory_gb", "gpu", "dataset", "tokens_M")
    assert [trained[column] for column in same] == [scored[column] for column in same]
