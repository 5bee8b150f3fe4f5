"""Waves: stubs of train.py, trained on this machine."""

import contextlib
import fcntl
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scratch import Scratch
from small_corpus import ROOT, copy_files, texts, told, write_parquet
from test_night import Night, command

import harness
import prepare
from night import pool, rows
from night import wave as waves
from night.__main__ import main, parse
from night.pool import Ended, Run
from night.rows import Kind, judge
from night.wave import table

STUB = """\
import os, signal, subprocess, sys, time
from types import SimpleNamespace
import prepare
from harness import budget_name, log_result, night_record

options = dict(word[2:].split("=") for word in sys.argv[1:])
args = SimpleNamespace(seed=int(options.get("seed", 0)))
budget = budget_name(float(options.get("seconds", 300)), int(options["tokens"]) if "tokens" in options else None)
where = dict(gpu="cpu", budget=budget, dataset=prepare.dataset_id(), seed=int(options.get("seed", 42)))
prepare.adopt_dataset(prepare.current_dataset())
try:
    print("training", flush=True)
    BODY
    where["test_bpb"] = val_bpb + 0.1 if night_record().get("score_test") else None
    print("status:", log_result(val_bpb=val_bpb, memory_gb=2.0, tokens_M=1.5, **where))
except BaseException as error:
    log_result(val_bpb=0.0, memory_gb=0.0, reason=type(error).__name__, **where)
    raise
"""
SIX = {
    "good": "val_bpb = 1.3 + args.seed / 100",
    "better": "val_bpb = 1.2",
    "worse": "val_bpb = 1.4",
    "crash": "raise MemoryError('77 GB')",
    "typo": "val_bpb = = 1.1",
    "hang": "subprocess.Popen(['sleep', '999'], start_new_session=True); time.sleep(999)",
}
REASON = {"crash": "[MemoryError]", "typo": "[SyntaxError line 13]", "hang": "[no evaluation within 0.2 min]"}
TWO_SLOTS = ["--per-gpu=2", "--tokens=1500000"]  # of a machine without a GPU, too


class Clone(Night):
    def commit(self, **bodies: str) -> None:
        """A revision and a tag for each."""
        for name, body in bodies.items():
            (self.folder / "train.py").write_text(STUB.replace("BODY", body), "utf-8")
            self.run(f"git commit -qam {name} && git tag {name}")

    def wave(self, *args: str, begin=None, **env: str) -> subprocess.Popen:
        return self.start(f"exec python -m night wave {shlex.join(args)}", begin, CUDA_VISIBLE_DEVICES="", **env)

    def finish(self, wave: subprocess.Popen, code: int = 0, timeout: float = 600) -> str:
        """What it printed; all processes of its runs are gone when it is."""
        output = wave.communicate(timeout=timeout)[0]
        assert wave.returncode == code and not self.runs(), output
        return output

    def wait(self, process: subprocess.Popen, condition: Callable[[], bool]) -> None:
        """Until something is true; the process must not end before."""
        while not condition():
            time.sleep(0.05)
            assert process.poll() is None, process.stdout.read()

    def runs(self) -> dict[int, list[str]]:
        """Its processes, but not those of a cluster that it has joined."""
        ours = {"night", "train.py"}
        return {pid: words for pid, words in self.processes().items() if ours & {Path(word).name for word in words}}

    def kill_the_rest(self) -> None:
        """Of a test that has failed."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def scores(self) -> dict[str, str]:
        """Description, seed and reason: status. A run has one score."""
        scored = [told(row) for row in self.rows() if not row["reason"]]
        assert len({*scored}) == len(scored)
        return {told(row): row["status"] for row in self.rows()}


@pytest.fixture
def clone(prepared, tmp_path):
    clone = Clone(tmp_path / "clone", prepared)
    yield clone
    clone.kill_the_rest()


class Played(Scratch):
    """Waves in this process, whose runs end at once."""

    def __init__(self, folder: Path, monkeypatch):
        super().__init__(folder, monkeypatch, {"train.py": "result(1.3)\n"})
        self.monkeypatch = monkeypatch

    def wave(self, *args: str) -> None:
        self.monkeypatch.setattr(waves, "start_pool", lambda args: (self.pool, self.kind))
        waves.wave(parse(["wave", *args]))

    def log(self, name: str, val_bpb: float, gpu: str = "cpu", **row) -> None:
        row |= dict(dataset="d", memory_gb=1.0, commit=self.shell(f"git rev-parse --short=7 {name}"))
        harness.log_result(val_bpb=val_bpb, gpu=gpu, description=name, **row)

    def statuses(self) -> list[tuple[str, str]]:
        return [(told(row), row["status"]) for row in self.rows()]


@pytest.fixture
def played(tmp_path, monkeypatch):
    return Played(tmp_path / "clone", monkeypatch)


def test_a_table_compares_means_at_the_same_seeds():
    def row(commit: str, seed: int, val_bpb: float) -> dict:
        row = dict(commit=commit, val_bpb=val_bpb, description=commit * 2, seed=seed, reason="x" * (not val_bpb))
        return row | dict(status="keep" if val_bpb else "crash", tokens_M=9.0 * bool(val_bpb))

    runs = [("r", 1, 1.2), ("r", 2, 1.4), ("r", 3, 1.9), ("i", 1, 1.1), ("i", 2, 1.28), ("i", 3, 0.0), ("k", 4, 1.5)]
    _, *lines = table([row(*run) for run in runs], "r").splitlines()
    assert [re.sub(" {2,}", "|", line) for line in lines] == [
        "1.190000 +-0.09000|-0.110000 +-0.01000|9.0|crash+keep|i ii, 2 seeds",
        "1.500000|9.0|keep|k kk, seed 4",
        "1.500000 +-0.20817|reference|9.0|keep|r rr, 3 seeds",
    ]


@pytest.mark.parametrize(
    ("where", "seed", "report", "status"),
    [
        (("A", "d"), 42, False, "keep"),
        (("A", "d"), 1, False, "discard"),
        (("A", "e"), 42, False, "discard"),
        (("B", "d"), 42, False, "discard"),
        (("B", "d"), 42, True, "report"),
    ],
)
def test_an_idea_has_to_beat_the_last_row_of_the_reference_with_its_seed_gpu_and_data(
    played, where, seed, report, status
):
    (gpu, dataset), row = where, dict(memory_gb=1.0, dataset="d", gpu="A", description="x", to_beat=math.inf)
    for commit, own, val_bpb in (("b", 42, 1.3), ("b", 42, 1.5), ("b", 1, 1.35), ("o", 42, 1.1)):
        harness.log_result(val_bpb=val_bpb, commit=commit, seed=own, **row)
    harness.log_result(val_bpb=0.0, reason="killed", commit="b", **row)
    lines = [harness.HEADER, "garbage", f"x\t1.4\t2.0\tkeep\tx\t{gpu}\t{dataset}\t300 s\t7\t9.0\t1.6\t\trun", ""]
    trainer = played.trainer(parse(["wave"]), Kind("A", "300 s", "d", report=report))
    trainer.log(Ended(Run("i", "idea", seed, "b"), "\n".join(lines), [], "no row", {}))
    *_, row = harness.read_results()
    assert row == dict(
        commit="i", val_bpb=1.4, memory_gb=2.0, status=status, description="idea", gpu=gpu, dataset=dataset,
        budget="300 s", seed=seed, tokens_M=9.0, test_bpb=1.6, reason="", by="night",
    )  # fmt: skip


def test_all_visible_gpus_of_one_model_take_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    monkeypatch.setattr(waves, "gpu_names", lambda *_: ["RTX 4090", "RTX 4090"])
    monkeypatch.setattr(waves, "Local", lambda places, *_: places)
    monkeypatch.setattr(prepare, "dataset_id", lambda: "d")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6, 7")
    places, kind = waves.start_pool(parse(["wave"]))
    assert places == ["6", "7"] and kind.gpu == "RTX 4090"
    with pytest.raises(prepare.PrepareError, match="on GPUs of one model only, not on RTX 3090, RTX 4090"):
        pool.one_model(["RTX 4090", "RTX 3090"])


def test_ideas_are_kept_by_their_mean_over_the_seeds_that_they_share_with_the_reference(played):
    """Whichever ended first. Other rows, and what is no row, stay as they are."""
    scores = {"base": (1.3, 1.4, 1.5), "lucky": (1.2, 1.6, 1.5), "fine": (1.2, 1.41, 1.5), "one": (1.2,), "tie": (1.3,)}
    row = dict(gpu="A", memory_gb=1.0, dataset="d")
    for name, bpb in (scores | {"early": (1.31, 1.31)}).items():
        for seed, val_bpb in enumerate(bpb):
            to_beat = 0.0 if name == "early" else scores["base"][seed]
            harness.log_result(val_bpb=val_bpb, to_beat=to_beat, commit=name[0], description=name, seed=seed, **row)
    harness.log_result(val_bpb=1.35, description="lucky", commit="l", to_beat=9.0, **row)
    harness.log_result(val_bpb=0, description="fine", seed=3, commit="f", reason="x", **row)
    harness.log_result(val_bpb=1.1, description="far", commit="o", to_beat=0.0, **row | {"gpu": "B"})
    runs = {rows.run_name(row) for row in harness.read_results()[:-3]} | {("o", 42)}
    with open(harness.RESULTS, "ab") as file:
        file.write(b"\xff no row\n")
    judge(runs, "b", Kind("A", "300 s", "d"))
    status = dict(played.statuses())
    kept = {name for name in status if status[name] == "keep"} - {f"base, seed {seed}" for seed in range(3)}
    moved = ["fine, seed 1", "fine, seed 2", "early, seed 0", "early, seed 1"]
    assert kept == {"lucky", "fine, seed 0", "one, seed 0", *moved} and [*status][-4:] == moved
    before = harness.RESULTS.read_bytes()
    judge(runs, "b", Kind("A", "300 s", "d"))
    assert harness.RESULTS.read_bytes() == before and b"\xff no row\n" in before


def test_an_earlier_reference_in_a_wave_is_compared_and_stays_behind(played):
    """Though it is better with one seed, whether it has that row already or gets it now."""
    played.commit(base="import sys\nresult(1.3 if '--seed=1' not in str(sys.argv) else 1.1)", idea="result(1.2)")
    played.shell("git checkout -q base")
    for name, val_bpb, seed in (("base", 1.3, 42), ("base", 1.1, 2), ("idea", 1.2, 42), ("idea", 1.2, 2)):
        played.log(name, val_bpb, seed=seed, to_beat=1.15 if seed == 2 else math.inf)
    played.shell("git checkout -q idea")
    for seeds in ("42,2", "42,1"):
        played.wave("base", f"--seeds={seeds}")
        assert rows.reference(played.kind) == played.head() and ("base", "keep") in played.statuses()


def test_what_was_kept_on_another_branch_before_the_reference_is_still_an_idea(played):
    played.commit(base="result(1.3)", side="result(1.1)")
    played.shell("git checkout -q base")
    played.commit(merged="result(1.2)")
    for name, val_bpb in dict(base=1.3, side=1.1, merged=1.2).items():
        played.log(name, val_bpb, to_beat=math.inf)
    played.wave("side", "--seeds=1")
    assert ("side, seed 1", "keep") in played.statuses()


def test_a_crash_of_the_reference_keeps_no_idea_and_is_repeated(played, capsys):
    score = "result(1.3 if __import__('os').path.exists('there') else 1 / 0)"
    played.commit(base=score, idea="result(1.2)", worse="result(1.4)")
    played.shell("git checkout -q base")
    played.wave("idea")
    assert played.statuses() == [("base [ZeroDivisionError]", "crash"), ("idea", "discard")]
    played.monkeypatch.chdir(played.folder)
    Path("there").touch()
    played.wave("idea", "worse")
    assert "-0.100000" in capsys.readouterr().out
    assert sorted(played.statuses()[1:]) == [("base", "keep"), ("idea", "keep"), ("worse", "discard")]
    assert played.statuses().index(("base", "keep")) < played.statuses().index(("idea", "keep"))


def test_a_run_on_another_dataset_than_this_clones_ends_the_wave(played):
    """As with an edit of prepare.py that is not committed, and so not in the run's checkout."""
    trainer = played.trainer(parse(["wave"]), played.kind._replace(dataset="mine"))
    with pytest.raises(prepare.PrepareError, match="was scored on cpu, 300 s, d, and not on cpu, 300 s, mine: is prep"):
        trainer.train([Run(played.head(), "base")])


def test_a_run_that_cannot_start_has_a_row_and_its_record(played):
    """As when the disk is too full to unpack its checkout."""
    run = Run(played.head(), "base", base=played.head())
    played.pool.ended = lambda: [Ended(run, "", [], "OSError", {"log.txt": b"tar: no space"})]
    played.wave()
    assert played.statuses() == [("base [OSError]", "crash")]
    assert [prepare.read(path) for path in played.folder.glob("runs/*/log.txt")] == ["tar: no space"]


def test_a_run_that_ends_by_the_same_signal_as_its_wave_leaves_no_row(played):
    played.pool.user = (played.interrupt() if look else None for look in range(2))
    with pytest.raises(SystemExit):
        played.wave()
    assert not played.rows() and not played.pool.active


def test_a_wave_says_what_makes_its_runs_unlike_what_somebody_expects(clone):
    clone.commit(base="val_bpb = 1.3")
    clone.run("echo '# another' | tee -a harness/log.py >> kernels.py && git add .")
    clone.run("git commit -qm 'odd 🚀' && git tag odd && git checkout -q base")
    (clone.folder / "train.py").write_text(STUB.replace("BODY", "val_bpb = 1.2"), "utf-8")
    (clone.folder / "harness" / "new.py").touch()
    output = clone.finish(clone.wave("base", "odd", *TWO_SLOTS, PYTHONIOENCODING="gbk"))
    assert " odd ?\n" in output, "its terminal has no rocket"
    assert {row["description"] for row in clone.rows()} == {"base", "odd 🚀"}
    odd = clone.run("git rev-parse --short=7 odd").strip()
    assert "no run includes what is not committed here: train.py, harness/new.py\n" in output
    assert f"\n{odd} differs from HEAD in harness/log.py and kernels.py: its rows may not be comparable\n" in output
    assert [row["val_bpb"] for row in clone.rows()] == [1.3, 1.3]


def test_a_log_that_is_a_link_in_the_commit_too_keeps_its_rows(clone):
    log = clone.folder.with_name("elsewhere.tsv")
    log.write_text(harness.HEADER + "\na\t1.5\t1\tkeep\told\tcpu\td\t300 s\t42\t1\t\t\t\n")
    (clone.folder / "results.tsv").symlink_to(log)
    clone.run("git update-index --no-skip-worktree results.tsv; git add results.tsv")
    clone.commit(base="val_bpb = 1.3")
    assert clone.run("git ls-tree HEAD results.tsv").startswith("120000")
    clone.finish(clone.wave(*TWO_SLOTS))
    assert [row["description"] for row in clone.rows()] == ["old", "base"]


def test_runs_and_waves_need_no_folder_for_records_and_nothing_but_the_base_packages(clone, tmp_path):
    """The others are in extras."""
    for name in ("ray", "scipy", "optuna", "matplotlib", "rich"):
        (tmp_path / "bin" / f"{name}.py").write_text("raise SystemExit('imported')")
    clone.commit(base="val_bpb = 1.3 + args.seed / 100")
    (clone.folder / "runs").symlink_to("/no/such/disk")
    clone.run("python -m night run")
    assert "imported" not in clone.finish(clone.wave("--seeds=1", *TWO_SLOTS))
    assert [row["val_bpb"] for row in clone.rows()] == [1.3, 1.31]


def test_what_a_wave_prints_on_a_full_disk_or_to_nobody_is_lost_and_no_row_is(clone):
    clone.commit(base="val_bpb = 1.3 + args.seed / 100")
    for seed, output in enumerate(("> /dev/full 2>&1", "2>&1 | true"), start=1):
        wave = f"python -m night wave --seeds={seed} {' '.join(TWO_SLOTS)}"
        assert not clone.run(f"{wave} {output}; test ${{PIPESTATUS[0]}} = 0 || echo failed", CUDA_VISIBLE_DEVICES="")
    assert [(row["val_bpb"], row["reason"]) for row in clone.rows()] == [(1.31, ""), (1.32, "")]


def test_a_row_that_a_full_disk_does_not_take_is_logged_when_there_is_room(played, monkeypatch, capsys):
    space, append = iter([False] * 4), harness.journal.append

    def full(file, lines: list[str]) -> None:
        if not next(space, True):
            raise OSError(28, "No space left on device")
        append(file, lines)

    for module in (harness.journal, harness.log):
        monkeypatch.setattr(module, "append", full)
    row = "\t".join(harness.COLUMNS) + f"\n{played.head()}\t1.2\t1.0\tdiscard\t\tcpu\td\t300 s\t42\t1.5\t\t\trun\n"
    played.pool.train = lambda *args: row
    monkeypatch.setattr(waves, "PAUSE", 0)
    played.wave()
    assert [row["val_bpb"] for row in played.rows()] == [1.2]
    assert "it is nowhere else" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wave_of_six_leaves_a_row_each_also_if_it_is_interrupted_and_repeated(clone):
    """On two slots: three good runs, a crash, a SyntaxError and a hang, and the reference, the first of the good
    rows. The wave begins as in a script, by `&`: SIGINT is ignored."""
    clone.commit(base="time.sleep(1); val_bpb = 1.35", **SIX)
    clone.run("git checkout -q base")
    begin = [*reversed(SIX), *TWO_SLOTS, "--limit=300"]
    wave = clone.wave(*begin, begin=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    clone.wait(wave, lambda: len(clone.rows()) >= 3 and "base" in clone.scores())
    folder = Path(f"/proc/{clone.process('999')}/cwd").resolve()
    assert folder.parent == Path("/tmp") and (folder / "results.tsv").exists()
    wave.send_signal(signal.SIGINT)
    assert "interrupted: the same command continues" in clone.finish(wave, code=130, timeout=200)
    before = clone.rows()
    assert not clone.processes() and not folder.exists() and 3 <= len(before) < 7

    command = [*SIX, *TWO_SLOTS, "--limit=12"]
    output = clone.finish(clone.wave(*command))
    assert clone.rows()[: len(before)] == before
    crashes = {f"{name} {REASON[name]}": "crash" for name in REASON}
    assert clone.scores() == {"base": "keep", "good": "keep", "better": "keep", "worse": "discard"} | crashes
    assert next(name for name, status in clone.scores().items() if status != "crash") == "base"
    table = re.findall(r"^([01]\.\d{6}) +(\S*) +(\S+)  .*[0-9a-f]{7} (\w+)", output, re.M)
    assert table[:3:2] == [("1.200000", "-0.150000", "1.5", "better"), ("1.350000", "reference", "1.5", "base")]
    assert {name for *_, name in table[4:]} == REASON.keys()
    assert clone.finish(clone.wave(*command)).startswith("3 runs, 4 more have a score"), "what has crashed is repeated"


def test_a_killed_wave_keeps_its_rows_and_what_a_wave_keeps_beats_the_reference_with_the_same_seed(clone, tmp_path):
    """The ideas end first: they are a `discard` until the reference ends, and their seeds differ by more than they."""
    there = f"os.path.exists({str(tmp_path / 'base')!r})"
    base = f"time.sleep(0 if {there} else 999); val_bpb = 1.3 + args.seed / 10"
    clone.commit(base=base, idea="val_bpb = 1.32 + args.seed / 10 * 0.84", typo=SIX["typo"])
    clone.run("git checkout -q base")
    three = ["idea", "typo", "--seeds=0,5", "--per-gpu=3", "--tokens=1500000"]
    wave = clone.wave(*three)
    clone.wait(wave, lambda: len(clone.rows()) >= 4)
    wave.kill()
    assert clone.all_gone()
    typos = {f"typo, seed {seed} {REASON['typo']}": "crash" for seed in (0, 5)}
    assert clone.scores() == {"idea, seed 0": "discard", "idea, seed 5": "discard"} | typos

    (tmp_path / "base").touch()
    output = clone.finish(clone.wave(*three))
    assert output.startswith("4 runs, 2 more")
    expected = {"base, seed 0": "keep", "base, seed 5": "keep", "idea, seed 0": "keep", "idea, seed 5": "keep"}
    assert clone.scores() == expected | typos
    names = [*clone.scores()]
    assert names.index("base, seed 5") < names.index("idea, seed 5"), "so that the idea is the last one kept"
    assert re.search(r"^1\.550000 \+-0\.25000  reference .* base, 2 seeds$", output, re.M)
    assert re.search(r"^1\.530000 \+-0\.21000  -0\.020000 \+-0\.04000 .* keep .* idea, 2 seeds", output, re.M)


@pytest.mark.slow
def test_a_night_of_waves_by_the_documents_while_another_clone_prepares_other_data(clone, tmp_path):
    """Every row is on the clone's own data and compares with the reference of its kind, up to the report."""
    waves = (ROOT / "docs" / "waves.md").read_text("utf-8")
    cache, other = shutil.copytree(clone.env["AUTORESEARCH_CACHE"], tmp_path / "cache"), tmp_path / "other"
    clone.env |= {"AUTORESEARCH_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": ""}

    def step(number: str, **words: str) -> str:
        text = re.search(rf"\*\*{number}\..*?```bash\n(.*?)```", waves, re.S)[1]
        for old, new in words.items():
            text = text.replace(old.replace("_", " "), new)
        return clone.run(text + "wait")

    def plan(wave: int, idea: str, val_bpb: float) -> None:
        (tmp_path / "train.py").write_text(STUB.replace("BODY", f"val_bpb = {val_bpb} + args.seed % 10 / 1000"))
        edit = {"#_edit_train.py": f"cp {tmp_path / 'train.py'} train.py", "MLP_4x_->_5x": idea}
        step("1", **edit, **{"wave=1": f"wave={wave}", "wider-mlp": idea})

    (clone.folder / "train.py").write_text(STUB.replace("BODY", "val_bpb = 1.3 + args.seed % 10 / 1000"))
    clone.run("git commit -q -m baseline train.py; python -m night run")
    copy_files(other)
    write_parquet(tmp_path / "texts" / "a.parquet", texts(7))
    write_parquet(tmp_path / "texts" / "b.parquet", texts(8))
    subprocess.run([sys.executable, "prepare.py", "--data", tmp_path / "texts"], cwd=other, env=clone.env, check=True)
    for idea, val_bpb in {"a": 1.28, "b": 1.29, "c": 1.4}.items():
        plan(1, idea, val_bpb)
    step("2")
    log = (clone.folder / "wave.log").read_text()
    assert log.startswith("3 runs, 1 more") and re.search(r"^1.280000 +-0.020000 .* keep .* a$", log, re.M), log
    assert clone.run("python -m night reference") == clone.run("git rev-parse --short=7 HEAD")

    plan(2, "all-winners", 1.25)
    clone.run("git checkout -q autoresearch/mar5")
    step("4")
    log = (clone.folder / "wave.log").read_text()
    assert log.startswith("6 runs, 0 more") and "-0.050000 +-0.00000" in log
    clone.run("python -m night keep mar5-wave2/all-winners --discard")
    step("5")
    winner = clone.run("git rev-parse --short=7 mar5-wave2/all-winners")
    assert clone.run("python -m night reference") == winner
    output = clone.run("python -m night wave mar5-wave1/a --tokens 1500000")
    assert re.search(r"^1.250000 +reference .* all-winners$", output, re.M), output
    assert re.search(r"^1.280000 +\+0.030000 .* discard .* a$", output, re.M)

    clone.run(command("## The morning after") + "wait")
    report, (baseline, *_) = (clone.folder / "report.md").read_text(), clone.rows()
    assert f"First kept: {baseline['commit']}, baseline. Last kept: {winner.strip()}, all-winners." in report
    assert "| test, mean of 3 new seeds | 1.4020 | 1.3520 | 0.0500 | 0.0000 |" in report
    assert len({row["dataset"] for row in clone.rows()}) == 1 and clone.run("git status --porcelain") == ""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is nothing to share")
def test_under_taskset_runs_share_the_threads_that_they_may_use(clone):
    """The cache has a relative path."""
    clone.env["AUTORESEARCH_CACHE"] = os.path.relpath(clone.env["AUTORESEARCH_CACHE"], clone.folder)
    clone.commit(base="val_bpb = float(os.environ['OMP_NUM_THREADS'])")
    clone.env.pop("OMP_NUM_THREADS", None)
    two = sorted(os.sched_getaffinity(0))[:2]
    clone.finish(clone.wave("base", *TWO_SLOTS, "--seeds=1,2", begin=lambda: os.sched_setaffinity(0, two)))
    assert [row["val_bpb"] for row in clone.rows()] == [1.0] * 2


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("wave HEAD no-such-branch", "bad revision 'no-such-branch'"),
        ("wave --address=auto", r"wave needs .*ray.*: pip install -e '\.\[night\]'"),
        ("wave", "asking for this machine's GPUs failed with exit status 3"),
        ("reference", "GPUs do not answer within 0.5 s"),
        ("wave", "another wave, tune, loop or report of this clone is running"),
        ("wave", r"\[Errno 21\] Is a directory: .*results.tsv.wave"),  # read-only, to a user who is not root
    ],
)
def test_what_cannot_be_says_so(played, monkeypatch, command, remedy):
    monkeypatch.setattr(prepare, "dataset_id", lambda: "d")
    monkeypatch.setattr(pool, "GPU_NAMES", f"raise SystemExit({3 * ('asking' in remedy)})")
    monkeypatch.setattr(sys, "argv", ["night", *command.split()])
    lock = played.folder / ".git" / "results.tsv.wave"
    if "ray" in remedy:
        monkeypatch.setitem(sys.modules, "ray", None)
        monkeypatch.delitem(sys.modules, "night.ray_pool", raising=False)
    if "answer" in remedy:
        monkeypatch.setattr(pool, "GPU_NAMES", "import time; time.sleep(100)")
        monkeypatch.setattr(pool, "ANSWER", 0.5)
    if "directory" in remedy:
        lock.mkdir()
    if "another" in remedy:
        other = open(lock, "ab")
        fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises((prepare.PrepareError, OSError, subprocess.CalledProcessError)) as error:
        main()
    assert re.search(remedy, harness.git_problem(error.value))


def test_a_command_that_cannot_be_ends_in_a_line(clone):
    output = clone.finish(clone.wave("no-such-branch"), code=1)
    assert re.search("^night: .*bad revision 'no-such-branch'", output, re.M) and "Traceback" not in output
