"""What a night remembers: records of runs, and what was tried."""

import argparse
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_corpus import ROOT
from test_night import Night
from test_wave import TWO_SLOTS, Clone

import harness
import prepare
from night import noise as noises
from night import run, show

LOG = ROOT / "tests" / "night" / "results.tsv"
FIVE_MINUTES = dict(budget="300 s", gpu=None)
CURVE = """\
folder = night_record()["folder"]
    with open(folder + "/curve.tsv", "w") as file:
        file.write("step\\tseconds\\ttokens\\tloss\\tlr\\n")
        for i in range(1, 41):
            file.write(f"{i}\\t{i / 4}\\t{i * 37500}\\t{4 - i / 20}\\t0.1\\n")
    """


@pytest.fixture
def clone(prepared, tmp_path):
    clone = Clone(tmp_path / "clone", prepared)
    yield clone
    clone.kill_the_rest()


def at(monkeypatch, folder: Path) -> None:
    """This process's night is the one in that clone."""
    monkeypatch.setattr(harness, "RESULTS", folder / "results.tsv")
    monkeypatch.setattr(run, "RUNS", folder / "runs")
    monkeypatch.setattr("night.git.ROOT", folder)


def printed(capsys, function, **args) -> str:
    capsys.readouterr()
    function(argparse.Namespace(**args))
    return capsys.readouterr().out


def test_runs_and_waves_leave_records_of_what_was_seen_also_of_killed_ones(clone, monkeypatch, capsys):
    """From them `show` says what is true."""
    clone.commit(base=CURVE + "val_bpb = 1.3")
    clone.run("python -m night run --tokens 1500000; python -m night run --tokens 1500000")
    clone.commit(faster=CURVE + "val_bpb = 1.2", crash="print('77 GB'); raise MemoryError")
    clone.commit(waits=CURVE + "time.sleep(99)")
    at(monkeypatch, clone.folder)
    names = [clone.run(f"git rev-parse --short=7 {name}").strip() for name in ("base", "faster", "crash", "waits")]
    base, faster, crash, waits = names
    clone.run("git checkout -q base")
    wave = clone.wave("faster", "crash", "waits", *TWO_SLOTS)
    folder = run.RUNS / f"{waits}-42-1.5M"
    curve = folder / "curve.tsv"
    while not prepare.read(curve).endswith("\t2.0\t0.1") or "training" not in prepare.read(folder / "log.txt"):
        time.sleep(0.05)
        assert wave.poll() is None, wave.stdout.read()
    while len(clone.rows()) < 4:  # two of the reference, from before
        time.sleep(0.05)
    os.killpg(wave.pid, signal.SIGKILL)
    wave.wait()
    assert clone.all_gone(runs=True)
    assert {path.name for path in run.RUNS.iterdir()} == {f"{commit}-42-1.5M" for commit in names}
    assert all("training" in (path / "log.txt").read_text() for path in run.RUNS.iterdir())
    assert curve.read_text().splitlines()[-1] == "40\t10.0\t1500000\t2.0\t0.1"

    night = printed(capsys, show.show, revision=None, budget="1.5 M tokens", gpu=None)
    assert f"-0.1000* {faster} faster" in night
    assert f"- {crash} crash" in night and "[MemoryError]" in night
    assert f"Reference: {base}, base, 1.3000." in night
    told = printed(capsys, show.show, revision="crash", **FIVE_MINUTES)
    assert "77 GB" in told and f"runs/{crash}-42-1.5M" in told
    with pytest.raises(subprocess.CalledProcessError):
        show.show(argparse.Namespace(revision="basis", **FIVE_MINUTES))


def test_an_edit_is_compared_with_the_mean_of_what_it_edited_if_that_ran_again(clone, monkeypatch):
    clone.commit(base="val_bpb = 1.3")
    clone.run("git checkout -q base; echo >> train.py; git commit -qam idea; git tag idea")
    clone.run("git checkout -q base; git commit -q --allow-empty -m again; git tag again")
    at(monkeypatch, clone.folder)
    for name, val_bpb in dict(base=1.3, idea=1.27, again=1.2).items():
        commit = clone.run(f"git rev-parse --short=7 {name}").strip()
        harness.log_result(val_bpb=val_bpb, memory_gb=1.0, commit=commit, description=name, gpu="T4", dataset="d")
    found = {idea.subject: idea.change for idea in show.ideas(harness.read_results(), noises.Noise(0.0, ""))}
    assert found == {"base": None, "idea": pytest.approx(0.02), "again": None}


def test_a_record_holds_the_beginning_and_the_end_of_a_long_log(prepared, tmp_path):
    night = Night(tmp_path / "clone", prepared)
    night.edit("talks a lot", "print('first'); print('x' * 3_000_000); print('last'); val_bpb = 1.2")
    night.train()
    (log,) = (night.folder / "runs").glob("*/log.txt")
    text = log.read_text()
    assert "first" in text[:100] and "last" in text[-200:] and "[...]" in text and log.stat().st_size < 1.2e6
    assert "last" in night.log.read_text()[-300:] and night.log.stat().st_size > 3e6


@pytest.mark.parametrize(
    ("seed", "gpu", "budget", "name"),
    [
        (42, None, "300 s", "abc-42-300s"),
        (-1, "T4", "62.4 M tokens", "abc--1-T4-62.4M"),
        (1, "T4", "300 s", "abc-1-T4-300s"),
        (1, None, "5e-06 M tokens", "abc-1-5e-06M"),
    ],
)
def test_a_record_is_named_by_commit_seed_and_budget(seed, gpu, budget, name, tmp_path, monkeypatch):
    at(monkeypatch, tmp_path)
    folder = run.new_record("abc", seed, gpu, budget)
    assert folder == run.RUNS / name
    (folder / "log.txt").touch()
    assert not [*run.new_record("abc", seed, gpu, budget).iterdir()], "of the last run only"
    row = dict(commit="abc", seed=seed, gpu="H200" + f" as {gpu}" * bool(gpu), budget=budget, dataset="d")
    (run.RUNS / f"{name}.bak").mkdir()
    run.new_record("abc+", seed, gpu, budget)
    assert run.record_of(row) == folder, "neither somebody's copy nor the run of an uncommitted train.py"
    (folder / "summary.json").write_text(json.dumps(row | {"dataset": "e"}))
    assert run.record_of(row) is None and run.record_of(row | {"dataset": "e"}) == folder


def test_what_was_tried_is_told_with_the_change_to_the_file_that_was_edited(clone, monkeypatch, capsys):
    def commit(name: str, val_bpb: float, old: str = "", new: str = "", seed: int = 42) -> str:
        text = "LR = 0.1  # matrices\nDEPTH = 3\n"
        text = text.replace(old or "\0", new)
        (clone.folder / "train.py").write_text(text)
        clone.run(f"git add . ; git commit -q --allow-empty -m '{name}' train.py")
        head = clone.run("git rev-parse --short=7 HEAD").strip()
        row = dict(memory_gb=1.0, gpu="cpu", dataset="d", tokens_M=2.0, commit=head, seed=seed)
        reason = {} if val_bpb else {"reason": "NaN at step 3"}
        harness.log_result(val_bpb=val_bpb, description=name, **row, **reason)
        return head

    at(monkeypatch, clone.folder)
    base = commit("base", 1.30)
    row = dict(memory_gb=1.0, gpu="cpu", dataset="d", tokens_M=2.0, commit=base)
    harness.log_result(val_bpb=1.31, description="base", seed=1, **row)
    harness.log_result(val_bpb=1.25, description="base (uncommitted: train.py)", **row | {"commit": f"{base}+"})
    for name, val_bpb, old, new in (
        ("higher, seed 42", 1.32, "0.1", "0.2"),
        ("lower", 1.22, "0.1", "0.05"),
        ("deeper", 1.29, "DEPTH = 3", "DEPTH = 5"),
        ("both", 0.0, "DEPTH = 3", "DEPTH = 4"),
    ):
        commit(name, val_bpb, old, new)
        clone.run(f"git checkout -q {base} -- train.py && git commit -q --allow-empty -m back train.py")
    told = printed(capsys, show.show, revision=None, **FIVE_MINUTES)
    assert "7 experiments with 6 commits; 3 kept, 1 crashed." in told, told
    assert "deviation of a seed is 0.0071: `~` marks changes below two standard errors, with one seed 0.0200." in told
    assert re.search(r"Reference: \w{7}, lower, 1.2200\.", told)
    ideas = [
        rf"- 1.3050\* {base} base",
        rf"- -0.0500\* \(likely \S+\) {base}\+ base \(uncommitted: train.py\)",
        r"- \+0.0200 \w{7} higher, seed 42",
        r"- -0.0800\* \(likely -0.0797\) \w{7} lower",
        r"- -0.0100~ \w{7} deeper",
    ]
    assert re.search("\n\n## Ideas\n" + "\n".join(ideas) + r"\n\n## Crashed\n- \w{7} both \[NaN at step 3\]$", told)
    with pytest.raises(prepare.PrepareError, match="no row of 60 s"):
        show.show(argparse.Namespace(revision=None, budget="60 s", gpu=None))

    # The luck of seeds 1 and 2, 0.01 and 0, is everybody's, but for 0.0005
    row |= dict(report=True, tokens_M=2.0)
    for i, name in enumerate("abcde"):
        for seed, luck in ((1, 0.01 + 0.0005 * (-1) ** i), (2, 0.0)):
            one = dict(commit=name * 7, description="x", seed=seed)
            harness.log_result(val_bpb=1.2 + 0.01 * i + luck, **row | one)
        told = printed(capsys, show.show, revision=None, **FIVE_MINUTES)
        assert ("between versions" in told) == (i >= 3), "needs three degrees of freedom"
    assert "between versions with one seed is 0.0004: `~` marks" in told and ", with one seed 0.0011." in told
    assert re.search(r"- -0.0100 \w{7} deeper", told), "noise only if each seed had its own luck"
    other = commit("alone", 1.295, "LR = 0.1", "LR = 0.3", seed=7)
    told = printed(capsys, show.show, revision=None, **FIVE_MINUTES)
    assert f"- 1.2950 {other} alone" in told, "it shares no seed with base"
    noise = noises.Noise(0.01, "")
    assert noise.band(4) == pytest.approx(noise.band() / 2), "the mean of four"


def test_versions_that_change_nothing_that_matters_tell_the_noise(monkeypatch, tmp_path):
    """They count as their base run again with its seed, beside what ran with several seeds."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    row = dict(memory_gb=1.0, gpu="cpu", dataset="d")

    def noise(*runs: tuple) -> noises.Noise:
        """Of a log of these runs: base, whether it is a version of it, val_bpb and seed."""
        lines = []
        for i, (base, version, bpb, seed) in enumerate(runs):
            commit, text = (f"v{i}", f"noise: like {base}, constants x 1.1") if version else (base, "idea")
            line = harness.columns.EMPTY | row | dict(commit=commit, val_bpb=bpb, status="keep", seed=seed)
            lines.append(harness.columns.format_row(line | dict(description=text)))
        harness.RESULTS.write_text("\n".join([harness.HEADER, *lines, ""]))
        return noises.Noise.of(harness.read_results()[0])

    versions = "between versions with one seed"
    luck = np.random.default_rng(1).normal(1.2, 0.001, (300, 4)).round(6).tolist()
    runs = [(f"b{i:06}", bool(n), bpb, 42) for i, some in enumerate(luck) for n, bpb in enumerate(some)]
    assert noise(*runs, ("one", False, 5.0, 42)) == (pytest.approx(0.001, rel=0.06), versions)
    one = pytest.approx(np.std(luck[0], ddof=1))
    assert noise(*runs[:4]) == (one, versions)
    assert noise(*runs[:3]) == (0.0, "of a seed"), "fewer than three degrees of freedom"
    assert noise(*runs[:3], ("b000000", False, 1.3, 1)) == (pytest.approx((1.3 - luck[0][0]) / 2**0.5), "of a seed")


def test_show_is_about_runs_of_one_budget_and_names_a_reference_that_crashed(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    row = dict(memory_gb=1.0, gpu="cpu", dataset="d", commit="abc", description="x")
    args = SimpleNamespace(**FIVE_MINUTES)
    harness.log_result(val_bpb=1.0, budget="1 M tokens", **row)
    with pytest.raises(prepare.PrepareError, match="no row of 300 s: give the night's --tokens"):
        show.last_place(args)
    harness.log_result(val_bpb=0.0, reason="killed", **row)
    harness.log_result(val_bpb=1.0, budget="1 M tokens", **row)
    harness.log_result(val_bpb=1.25, test_bpb=1.3, report=True, **row)
    harness.log_result(val_bpb=1.1, **row | {"gpu": "cpu as T4"})
    told = show.about_night(show.last_place(args))
    assert told.startswith("# cpu, 300 s, d\n") and "\nReference: abc, x, crashed.\n" in told
    told = show.about_commit("abc")
    assert "\n[killed], seed 42, cpu, 300 s, d, 0.0 M tokens\n" in told
    assert "\n1.250000 report, test 1.300000, seed 42, cpu, 300 s, d" in told, "a report refers to its rows"


def test_an_agent_reads_a_night_of_133_experiments_in_one_look(monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", LOG)
    told = show.about_night(show.experiments())
    assert len(told) < 13_000  # characters: fewer than 5,000 tokens
    assert "133 experiments with 131 commits; 16 kept, 11 crashed." in told
    if subprocess.run(["git", "cat-file", "-e", "1164dca"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("a shallow clone does not have the commits of that night")
    assert re.search(r"- -0.0002~\* \(likely \+0.0001\) \w{7} .*0.98", told), "kept, but noise"
    assert "- -0.0047* (likely -0.0039) a8ff3c1 convolution of 3 taps" in told


def test_a_log_of_many_rows_is_told_in_time_that_grows_with_their_number_only(monkeypatch):
    looks = []
    monkeypatch.setattr(show, "crashed", lambda row: bool(looks.append(1)))
    row = harness.read_results(LOG)[0]
    show.about_night([row | dict(commit=f"{i:07x}", description=f"idea {i}") for i in range(500)])
    assert 0 < len(looks) < 10 * 500
