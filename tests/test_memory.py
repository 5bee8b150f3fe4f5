"""What a night remembers: records of runs, and what was tried."""

import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from scratch import Scratch
from small_corpus import ROOT
from test_wave import TWO_SLOTS, Clone

import harness
import prepare
from night import noise as noises
from night import run, show

FIVE_MINUTES = SimpleNamespace(budget="300 s", gpu=None, revision=None)
ROW = dict(memory_gb=1.0, gpu="cpu", dataset="d")


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Scratch:
    return Scratch(tmp_path / "clone", monkeypatch, {"train.py": "LR = 0.1\n"})


def told(capsys, revision: str | None = None, **args) -> str:
    """What `night show` prints."""
    capsys.readouterr()
    show.show(SimpleNamespace(**vars(FIVE_MINUTES) | args | {"revision": revision}))
    return capsys.readouterr().out


def test_runs_and_waves_leave_records_of_what_was_seen_also_of_killed_ones(prepared, tmp_path, monkeypatch, capsys):
    """From them `show` says what is true."""
    clone = Clone(tmp_path / "clone", prepared)
    clone.commit(base="val_bpb = 1.3")
    clone.run("python -m night run --tokens 1500000; python -m night run --tokens 1500000")
    curve = "print('2.0', file=open(night_record()['folder'] + '/curve.tsv', 'w'), flush=True)"
    bodies = dict(faster="val_bpb = 1.2", crash="print('77 GB'); raise MemoryError", waits=f"{curve}; time.sleep(99)")
    clone.commit(**bodies)
    names = ("base", *bodies)
    base, faster, crash, waits = (clone.run(f"git rev-parse --short=7 {name}").strip() for name in names)
    clone.run("git checkout -q base")
    wave, runs = clone.wave(*bodies, *TWO_SLOTS), clone.folder / "runs"
    curve = runs / f"{waits}-42-1.5M" / "curve.tsv"
    # two rows of the reference, from before
    clone.wait(wave, lambda: prepare.read(curve) == "2.0" and len(clone.rows()) == 4)
    os.killpg(wave.pid, signal.SIGKILL)
    wave.wait()
    assert clone.all_gone(runs=True) and prepare.read(curve) == "2.0"
    assert {path.name for path in runs.iterdir()} == {f"{name}-42-1.5M" for name in (base, faster, crash, waits)}
    assert all("training" in (path / "log.txt").read_text() for path in runs.iterdir())

    monkeypatch.setattr(harness, "RESULTS", clone.folder / "results.tsv")
    monkeypatch.setattr(run, "RUNS", runs)
    monkeypatch.setattr("night.git.ROOT", clone.folder)
    night = told(capsys, budget="1.5 M tokens")
    assert f"-0.1000* {faster} faster" in night and f"- {crash} crash [MemoryError]" in night
    assert f"Reference: {base}, base, 1.3000." in night
    one = told(capsys, "crash")
    assert "77 GB" in one and f"runs/{crash}-42-1.5M" in one
    with pytest.raises(prepare.PrepareError, match="has no row of basis"):
        told(capsys, "basis")


def test_a_record_holds_the_beginning_and_the_end_of_a_long_log(tmp_path):
    command = [sys.executable, "-c", "print('first', 'x' * 3_000_000, 'last')"]
    script = f"import os; from night.run import guard; guard({command}, 60, os.getppid(), 'log.txt')"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith("first") and log.endswith("last\n") and "[...]" in log and len(log) < 1.2e6


def test_an_edit_is_compared_with_the_mean_of_what_it_edited_if_that_ran_again(scratch):
    scratch.commit(base="val_bpb = 1.3", idea="val_bpb = 1.3\n")
    scratch.shell("git checkout -q base; git commit -q --allow-empty -m again; git tag again")
    for name, val_bpb in dict(base=1.3, idea=1.27, again=1.2).items():
        commit = scratch.shell(f"git rev-parse --short=7 {name}")
        harness.log_result(val_bpb=val_bpb, commit=commit, description=name, **ROW)
    found = {idea.subject: idea.change for idea in show.ideas(scratch.rows(), noises.Noise(0.0, ""))}
    assert found == {"base": None, "idea": pytest.approx(0.02), "again": None}


def test_a_record_is_named_by_commit_seed_and_budget(tmp_path, monkeypatch):
    """It is of the last run; neither somebody's copy nor the run of an uncommitted train.py."""
    monkeypatch.setattr(run, "RUNS", tmp_path)
    for seed, gpu, budget, name in (
        (42, None, "300 s", "abc-42-300s"),
        (-1, "T4", "62.4 M tokens", "abc--1-T4-62.4M"),
        (1, None, "5e-06 M tokens", "abc-1-5e-06M"),
    ):
        folder = run.new_record("abc", seed, gpu, budget)
        assert folder == tmp_path / name
        (folder / "log.txt").touch()
        assert not [*run.new_record("abc", seed, gpu, budget).iterdir()]
        row = dict(commit="abc", seed=seed, gpu="H200" + f" as {gpu}" * bool(gpu), budget=budget, dataset="d")
        (tmp_path / f"{name}.bak").mkdir()
        run.new_record("abc+", seed, gpu, budget)
        assert run.record_of(row) == folder
        (folder / "summary.json").write_text(json.dumps(row | {"dataset": "e"}))
        assert run.record_of(row) is None and run.record_of(row | {"dataset": "e"}) == folder


def test_what_was_tried_is_told_with_the_change_to_the_file_that_was_edited(scratch, capsys):
    def commit(name: str, val_bpb: float, text: str = "LR = 0.1\n", seed: int = 42) -> str:
        (scratch.folder / "train.py").write_text(text)
        scratch.shell(f"git commit -q --allow-empty -am '{name}'")
        reason = {} if val_bpb else {"reason": "NaN at step 3"}
        row = ROW | dict(commit=scratch.head(), description=name, seed=seed)
        harness.log_result(val_bpb=val_bpb, **row, **reason)
        return row["commit"]

    base = commit("base", 1.30)
    harness.log_result(val_bpb=1.31, description="base", seed=1, commit=base, **ROW)
    harness.log_result(val_bpb=1.25, description="base (uncommitted: train.py)", commit=f"{base}+", **ROW)
    for name, val_bpb in (("higher, seed 42", 1.32), ("lower", 1.22), ("deeper", 1.29), ("both", 0.0)):
        commit(name, val_bpb, f"LR = 0.1\n{name.partition(',')[0]} = 1\n")
        scratch.shell(f"git checkout -q {base} -- train.py && git commit -q --allow-empty -m back train.py")
    text = told(capsys)
    assert "7 experiments with 6 commits; 3 kept, 1 crashed." in text
    assert "deviation of a seed is 0.0071: `~` marks changes below two standard errors, with one seed 0.0200." in text
    assert re.search(r"Reference: \w{7}, lower, 1.2200\.", text)
    ideas = [
        rf"- 1.3050\* {base} base",
        rf"- -0.0500\* \(likely \S+\) {base}\+ base \(uncommitted: train.py\)",
        r"- \+0.0200 \w{7} higher, seed 42",
        r"- -0.0800\* \(likely -0.0797\) \w{7} lower",
        r"- -0.0100~ \w{7} deeper",
    ]
    assert re.search("\n\n## Ideas\n" + "\n".join(ideas) + r"\n\n## Crashed\n- \w{7} both \[NaN at step 3\]$", text)

    # The luck of seeds 1 and 2, 0.01 and 0, is everybody's, but for 0.0005
    for i, name in enumerate("abcde"):
        for seed, luck in ((1, 0.01 + 0.0005 * (-1) ** i), (2, 0.0)):
            row = ROW | dict(commit=name * 7, description="x", seed=seed, report=True)
            harness.log_result(val_bpb=1.2 + 0.01 * i + luck, **row)
        assert ("between versions" in told(capsys)) == (i >= 3), "needs three degrees of freedom"
    text = told(capsys)
    assert "between versions with one seed is 0.0004: `~` marks" in text and ", with one seed 0.0011." in text
    assert re.search(r"- -0.0100 \w{7} deeper", text), "noise only if each seed had its own luck"
    other = commit("alone", 1.295, "LR = 0.3\n", seed=7)
    assert f"- 1.2950 {other} alone" in told(capsys), "it shares no seed with base"
    noise = noises.Noise(0.01, "")
    assert noise.band(4) == pytest.approx(noise.band() / 2), "the mean of four"


def test_versions_that_change_nothing_that_matters_tell_the_noise(monkeypatch, tmp_path):
    """They count as their base run again with its seed, beside what ran with several seeds."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")

    def noise(*runs: tuple) -> noises.Noise:
        """Of a log of these runs: base, whether it is a version of it, val_bpb and seed."""
        lines = []
        for i, (base, version, bpb, seed) in enumerate(runs):
            commit, text = (f"v{i}", f"noise: like {base}, constants x 1.1") if version else (base, "idea")
            row = ROW | dict(commit=commit, val_bpb=bpb, status="keep", seed=seed, description=text)
            lines.append(harness.columns.format_row(harness.columns.EMPTY | row))
        harness.RESULTS.write_text("\n".join([harness.HEADER, *lines, ""]))
        return noises.Noise.of(harness.read_results()[0])

    versions = "between versions with one seed"
    luck = np.random.default_rng(1).normal(1.2, 0.001, (300, 4)).round(6).tolist()
    runs = [(f"b{i:06}", bool(n), bpb, 42) for i, some in enumerate(luck) for n, bpb in enumerate(some)]
    assert noise(*runs, ("one", False, 5.0, 42)) == (pytest.approx(0.001, rel=0.06), versions)
    assert noise(*runs[:4]) == (pytest.approx(np.std(luck[0], ddof=1)), versions)
    assert noise(*runs[:3]) == (0.0, "of a seed"), "fewer than three degrees of freedom"
    assert noise(*runs[:3], ("b000000", False, 1.3, 1)) == (pytest.approx((1.3 - luck[0][0]) / 2**0.5), "of a seed")


def test_show_is_about_runs_of_one_budget_and_names_a_reference_that_crashed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    row = ROW | dict(commit="abc", description="x")
    harness.log_result(val_bpb=1.0, budget="1 M tokens", **row)
    with pytest.raises(prepare.PrepareError, match="no row of 300 s: give the night's --tokens"):
        told(capsys)
    harness.log_result(val_bpb=0.0, reason="killed", **row)
    harness.log_result(val_bpb=1.0, budget="1 M tokens", **row)
    harness.log_result(val_bpb=1.25, test_bpb=1.3, report=True, **row)
    harness.log_result(val_bpb=1.1, **row | {"gpu": "cpu as T4"})
    text = told(capsys)
    assert text.startswith("# cpu, 300 s, d\n") and "\nReference: abc, x, crashed.\n" in text
    text = show.about_commit("abc")
    assert "\n[killed], seed 42, cpu, 300 s, d, 0.0 M tokens\n" in text
    assert "\n1.250000 report, test 1.300000, seed 42, cpu, 300 s, d" in text, "a report refers to its rows"


def test_an_agent_reads_a_night_of_133_experiments_in_one_look(monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", ROOT / "tests" / "night" / "results.tsv")
    text = show.about_night(show.experiments())
    assert len(text) < 13_000  # characters: fewer than 5,000 tokens
    assert "133 experiments with 131 commits; 16 kept, 11 crashed." in text
    if subprocess.run(["git", "cat-file", "-e", "1164dca"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("a shallow clone does not have the commits of that night")
    assert re.search(r"- -0.0002~\* \(likely \+0.0001\) \w{7} .*0.98", text), "kept, but noise"
    assert "- -0.0047* (likely -0.0039) a8ff3c1 convolution of 3 taps" in text
