"""Whole runs of train.py, each in a process of its own and under real faults: a clear line, one row, nothing left over.

The model is tiny and the clock goes a second a look, three looks a step, so that the 300 s take a moment and are the same
300 s on every machine. A fault is an edit to train.py, made after its import, or a signal, or a file that goes away.
"""

import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_corpus import ROOT

import prepare
import train

PRELUDE = """
import dataclasses, itertools, math, os, resource, shutil, signal, sys, time
from types import SimpleNamespace
import torch, prepare, train

sys.argv[0] = "train.py"
tiny = dict(depth=2, n_embd=64, head_dim=32, seq_len=64, window=64, device_batch=2, total_batch=128)
train.PLATFORMS["cpu"] = dataclasses.replace(train.PLATFORMS["cpu"], **tiny)

def clock_goes(seconds):
    looks = itertools.count()
    prepare.time = SimpleNamespace(**vars(time) | {"perf_counter": lambda: float(seconds * next(looks))})

def replace(name, new):
    real = getattr(train, name)
    setattr(train, name, lambda *args, **kwargs: new(real, *args, **kwargs))

def at_step(number, fault):
    '''`fault` gets the loss of that step of the training and returns another, or does worse.'''
    steps = itertools.count(1)
    def step(real, *args):
        loss, epoch = real(*args)
        return fault(loss) if epoch and next(steps) == number else loss, epoch  # epoch 0 is the warm-up
    replace("train_step", step)

def fail(error):
    raise error

def for_ever(phase):
    def again(real, *args):
        print("here", flush=True)
        while True:
            real(*args)
    replace(phase, again)

def terminate(signal=signal.SIGTERM):
    os.kill(os.getpid(), signal)

clock_goes(1)
"""


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, str]:
        return dict(re.findall(r"^(\w+): +(.+)$", self.out, re.MULTILINE))


class Clone:
    """The three files in a folder of their own, where runs leave their rows and weights."""

    def __init__(self, folder: Path, cache: Path):
        self.folder, self.cache = folder, cache
        folder.mkdir(parents=True)
        for name in ("train.py", "prepare.py", "kernels.py"):
            shutil.copy(ROOT / name, folder)
        self.git("init", "-q")
        self.git("add", ".")
        self.commit("baseline")

    def git(self, *args: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def commit(self, subject: str) -> None:
        self.git("commit", "-q", "--allow-empty", "-m", subject)

    def start(self, *args: str, edit: str | None = "", **options) -> subprocess.Popen:
        """edit: code that changes train.py before its main() is called; None: the plain command line."""
        command = ["train.py"] if edit is None else ["-c", f"{PRELUDE}\n{edit}\ntrain.main()"]
        environment = os.environ | {"AUTORESEARCH_CACHE": str(self.cache), "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"} | options
        return subprocess.Popen(
            [sys.executable, *command, *args], cwd=self.folder, env=environment, start_new_session=True, **pipes
        )

    def run(self, *args: str, **options) -> Ended:
        return ended(self.start(*args, **options))

    @property
    def rows(self) -> list[dict]:
        return prepare.read_results(self.folder / "results.tsv")

    @property
    def statuses(self) -> list[str]:
        lines = (self.folder / "results.tsv").read_text().splitlines() if self.rows else ["header"]
        assert len(lines) == len(self.rows) + 1, lines  # nothing but a header and rows
        return [row["status"] for row in self.rows]

    @property
    def left_over(self) -> set[str]:
        ours = {"train.py", "prepare.py", "kernels.py", "results.tsv", "model.safetensors", ".git"}
        return {path.name for path in self.folder.iterdir()} - ours


def ended(process: subprocess.Popen) -> Ended:
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    with pytest.raises(ProcessLookupError):  # no process is left of its session
        os.killpg(process.pid, 0)
    return Ended(process.returncode, out, err)


def two_at_a_time(jobs: dict[str, Callable]) -> dict:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(jobs, pool.map(lambda job: job(), jobs.values()), strict=True))


@pytest.fixture
def clone(prepared, tmp_path) -> Clone:
    return Clone(tmp_path / "clone", prepared)


# A good run


@pytest.fixture(scope="module")
def night(prepared, tmp_path_factory) -> tuple[Clone, list[Ended]]:
    """An experiment, a worse one, a better one."""
    clone = Clone(tmp_path_factory.mktemp("night") / "clone", prepared)
    runs = [clone.run()]
    edits = {"learn nothing": "train.MATRIX_LR = train.EMBEDDING_LR = 0", "take smaller looks": "clock_goes(0.5)"}
    for subject, edit in edits.items():
        clone.commit(subject)
        runs.append(clone.run(edit=edit))
    return clone, runs


def test_an_official_run_ends_with_status_zero_and_silence_on_stderr(night):
    assert [(run.code, run.err) for run in night[1]] == [(0, "")] * 3
    assert not night[0].left_over


def test_rows_say_keep_for_the_best_so_far_and_name_the_commit(night):
    clone, runs = night
    assert clone.statuses == ["keep", "discard", "keep"]
    assert [row["description"] for row in clone.rows] == ["baseline", "learn nothing", "take smaller looks"]
    commits = clone.git("log", "--reverse", "--format=%H").split()
    assert [row["commit"] for row in clone.rows] == [commit[:7] for commit in commits]
    assert [f"{row['val_bpb']:.6f}" for row in clone.rows] == [run.summary["val_bpb"] for run in runs]
    assert [row["status"] for row in clone.rows] == [run.summary["status"] for run in runs]


def test_the_summary_parses_as_autoresearchs_agents_do_it(night):
    """grep "^val_bpb:\\|^peak_vram_mb:" run.log, and its other keys in its order before ours."""
    for run in night[1]:
        assert len(re.findall(r"^(?:val_bpb|peak_vram_mb): +\d+\.\d+$", run.out, re.MULTILINE)) == 2
        keys = list(run.summary)
        theirs = "val_bpb training_seconds total_seconds peak_vram_mb mfu_percent total_tokens_M num_steps num_params_M"
        assert [key for key in keys if key in theirs.split()] == theirs.split() and "depth" in keys
        assert len(re.findall(r"^val_bpb:", run.out, re.MULTILINE)) == 1, "each key once"
        assert float(run.summary["training_seconds"]) == pytest.approx(300, abs=3)


def test_into_a_file_go_lines(night):
    for run in night[1]:
        assert "\r" not in run.out
        line = r"^step \d{5} \(\d+\.\d%\) \| loss \d\.\d{4} \| [\d,]+ tok/s \| epoch 1 \| \d+ s$"
        assert len(re.findall(line, run.out, re.MULTILINE)) >= 40


def test_a_terminal_gets_one_live_line_also_before_an_error(clone, tmp_path_factory):
    def on_a_terminal(edit: str) -> str:
        ours, theirs = pty.openpty()
        process = clone.start("--tokens", "5120", edit=edit, stdout=theirs, stderr=theirs)
        os.close(theirs)
        text = b""
        while True:
            try:
                text += os.read(ours, 4096)
            except OSError:  # the last holder of the other end is gone
                break
        os.close(ours)
        process.wait(60)
        return text.decode().replace("\r\n", "\n")

    edits = {"good": "", "lost": "at_step(20, lambda loss: loss * math.nan)"}
    texts = two_at_a_time({name: lambda edit=edit: on_a_terminal(edit) for name, edit in edits.items()})
    for text in texts.values():
        (line,) = [line for line in text.split("\n") if "step 000" in line]
        assert line.startswith("\r") and line.count("\rstep 000") >= 10
    assert "\ntrain.py: training loss nan at step 20" in texts["lost"]


# Runs that are not logged

UNLOGGED = {
    "budget in seconds": (["--seconds", "20"], ""),
    "the official budget, but by hand": (["--seconds", "300"], ""),
    "budget in tokens": (["--tokens", "1280"], ""),
    "forced row": (["--platform", "cpu"], ""),
    "budget edited": ([], "train.TIME_BUDGET = 600"),
    "last step too long": ([], "at_step(60, lambda loss: clock_goes(310) or loss)"),
    "plain command line": (["--seconds", "0.3"], None),
}


@pytest.fixture(scope="module")
def unlogged(prepared, tmp_path_factory) -> dict[str, tuple[Clone, Ended]]:
    def job(args: list[str], edit: str) -> tuple[Clone, Ended]:
        clone = Clone(tmp_path_factory.mktemp("unlogged") / "clone", prepared)
        return clone, clone.run(*args, edit=edit)

    return two_at_a_time({name: lambda case=case: job(*case) for name, case in UNLOGGED.items()})


@pytest.mark.parametrize("name", UNLOGGED)
def test_a_run_with_another_budget_or_a_forced_row_is_not_logged_and_says_so(unlogged, name):
    clone, run = unlogged[name]
    assert run.code == 0 and run.err == "" and 0 < float(run.summary["val_bpb"]) < 10
    assert run.summary["status"].startswith("not logged")
    assert not (clone.folder / "results.tsv").exists() and not clone.left_over


def test_a_run_beyond_303_seconds_says_that_its_clock_ran_over(unlogged):
    run = unlogged["last step too long"][1]
    assert float(run.summary["training_seconds"]) > 303 and "clock" in run.summary["status"]


# Lost runs: a crash row, the reason last on stderr, exit status not zero

FAULTS = {
    "nan": ("at_step(60, lambda loss: loss * math.nan)", "train.py: training loss nan at step 60: the run is lost"),
    "nan at the end": ("at_step(100, lambda loss: loss * math.nan)", "train.py: training loss nan at step 100: the run"),
    "inf": ("at_step(1, lambda loss: loss * math.inf)", "train.py: training loss inf at step 1: the run is lost"),
    "explosion": ("at_step(60, lambda loss: loss * 1e4)", r"train.py: training loss \d{4,}\.\d+ at step 60: the run is"),
    "edited model": ("train.GPT.forward = lambda self, idx, *a, **k: self.haed(idx)", "no attribute 'haed'"),
    "edited shape": ("train.PLATFORMS['cpu'] = dataclasses.replace(train.PLATFORMS['cpu'], head_dim=48)", "Error"),
    "out of memory": ("at_step(5, lambda _: fail(torch.OutOfMemoryError('CUDA out of memory.')))", "out of memory"),
    "out of host memory": ("at_step(5, lambda _: torch.empty(2**60))", "memory"),
    "GPU lost": ("at_step(5, lambda _: fail(torch.AcceleratorError('CUDA error: device lost')))", "device lost"),
    "GPU error": ("at_step(5, lambda _: fail(RuntimeError('CUDA error: unspecified launch failure')))", "launch failure"),
    "in evaluation": ("replace('evaluate_bpb', lambda *_: fail(ValueError('no bytes')))", "no bytes"),
    "cache gone": ("at_step(5, lambda loss: shutil.rmtree(prepare.cache_dir()) or loss)", r"run `?(python )?prepare\.py"),
}  # fmt: skip


@pytest.fixture(scope="module")
def faults(prepared, tmp_path_factory) -> dict[str, tuple[Clone, Ended]]:
    def job(edit: str) -> tuple[Clone, Ended]:
        folder = tmp_path_factory.mktemp("fault")
        clone = Clone(folder / "clone", shutil.copytree(prepared, folder / "cache"))
        return clone, clone.run(edit=edit)

    return two_at_a_time({name: lambda edit=edit: job(edit) for name, (edit, _) in FAULTS.items()})


@pytest.mark.parametrize("name", FAULTS)
def test_a_lost_run_leaves_a_crash_row_its_reason_and_a_status(faults, prepared, name, monkeypatch):
    clone, run = faults[name]
    assert run.code == 1
    *before, last = run.err.splitlines()
    assert re.search(FAULTS[name][1], last), run.err
    assert not before or before[0].startswith("Traceback")
    assert "val_bpb:" not in run.out and not clone.left_over
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(prepared))
    row = dict(val_bpb=0.0, memory_gb=0.0, status="crash", description="baseline", gpu="cpu")
    assert clone.statuses == ["crash"] and clone.rows[0].items() >= row.items()
    assert clone.rows[0]["dataset"] == prepare.dataset_id()


def test_the_traceback_of_an_edited_model_names_its_line(faults):
    assert "haed" in faults["edited model"][1].err and "in <lambda>" in faults["edited model"][1].err


def test_a_lost_loss_is_one_line(faults):
    assert [faults[name][1].err.count("\n") for name in ("nan", "nan at the end", "inf", "explosion")] == [1] * 4


@pytest.mark.parametrize("name", ["in evaluation", "cache gone"])
def test_weights_are_saved_before_the_evaluation_and_eval_only_finishes_the_job(faults, night, prepared, name):
    """With the numbers of an undisturbed run, in the row of the commit that was trained, once."""
    clone, _ = faults[name]
    clone.cache = prepared
    trained = clone.git("log", "-1", "--format=%h", "--abbrev=7").strip()
    clone.commit("the next idea")
    run = clone.run("--eval-only")
    assert run.code == 0, run.err
    expected = night[1][0].summary
    same = ("val_bpb", "val_bpb_quarter", "val_bpb_nf4", "num_steps", "training_seconds", "dataset", "gpu")
    assert {key: run.summary[key] for key in same} == {key: expected[key] for key in same}
    assert clone.statuses == ["crash", "keep"] and f"{clone.rows[1]['val_bpb']:.6f}" == expected["val_bpb"]
    assert (clone.rows[1]["commit"], clone.rows[1]["description"]) == (trained, "baseline")
    again = clone.run("--eval-only")
    assert again.code == 0 and again.summary["val_bpb"] == expected["val_bpb"]
    assert clone.statuses == ["crash", "keep"]


def test_eval_only_gives_no_row_to_weights_that_have_theirs(clone):
    """Those of the run before the crashed one."""
    clone.run()
    clone.commit("a bad idea")
    clone.run(edit="at_step(5, lambda loss: loss * math.nan)")
    run = clone.run("--eval-only")
    assert run.code == 0 and run.summary["status"].startswith("not logged")
    assert clone.statuses == ["keep", "crash"]


# Signals


PHASES = {"warm-up": "warm_up", "training": "train", "evaluation": "evaluate"}
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(scope="module")
def interrupted(prepared, tmp_path_factory) -> dict[tuple[str, int], tuple[Clone, Ended]]:
    """Runs that never leave a phase, and are interrupted half a second into it."""

    def job(phase: str, number: int) -> tuple[Clone, Ended]:
        clone = Clone(tmp_path_factory.mktemp("interrupted") / "clone", prepared)
        process = clone.start(edit=f"for_ever('{PHASES[phase]}')")
        while process.stdout.readline() not in ("here\n", ""):
            pass
        time.sleep(random.Random(phase).uniform(0, 0.5))
        process.send_signal(number)
        return clone, ended(process)

    cases = [(phase, number) for phase in PHASES for number in SIGNALS]
    return two_at_a_time({case: lambda case=case: job(*case) for case in cases})


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_in_any_phase_leaves_one_row_and_no_process(interrupted, phase, number):
    clone, run = interrupted[phase, number]
    assert run.code == {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 128 + signal.SIGTERM}[number]
    assert clone.statuses == ["crash"] and not clone.left_over


INTERRUPTED_LOGS = {
    "a good run's": ("", "keep", 0),
    "an interrupted run's": ("at_step(5, lambda loss: terminate())", "crash", 143),
}


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("case", INTERRUPTED_LOGS)
def test_a_signal_while_the_row_is_written_neither_loses_nor_doubles_it(clone, case, number):
    """`timeout` sends two SIGTERM, impatient people two Ctrl-C."""
    edit, status, code = INTERRUPTED_LOGS[case]
    edit += f"""
def append_row(*args, real=prepare.append_row):
    terminate({int(number)})
    status = real(*args)
    terminate({int(number)})
    return status
prepare.append_row = append_row
"""
    run = clone.run(edit=edit)
    assert (clone.statuses, run.code) == ([status], code), run.err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_a_signal_at_any_moment_leaves_exactly_one_row(clone, seed):
    choose = random.Random(seed)
    process = clone.start(edit="sys.stdout.reconfigure(line_buffering=True)")
    process.stdout.readline()
    time.sleep(choose.uniform(0, 1.2))
    process.send_signal(choose.choice(SIGNALS))
    run = ended(process)
    assert len(clone.statuses) == 1 and not clone.left_over, (run, clone.rows)
    assert run.code != 0 or clone.statuses == ["keep"]


# A reader of the output, the log, the disk that go away; a step that hangs


def test_a_reader_that_goes_away_does_not_make_a_second_row(clone):
    """`python train.py | head`: the summary finds a closed pipe."""
    process = clone.start(edit="replace('log_result', lambda real, **row: (real(**row), os.close(1), os.pipe())[0])")
    run = ended(process)
    assert clone.statuses == ["keep"], run.err


def without_the_log(clone: Clone, edit: str) -> Ended:
    clone.run()
    return clone.run(edit=f"at_step(5, lambda loss: ({edit}) or loss)")


def test_a_log_removed_while_training_is_begun_anew(clone):
    run = without_the_log(clone, "os.remove('results.tsv')")
    assert run.code == 0 and clone.statuses == ["keep"] and not clone.left_over


def test_a_log_that_refuses_the_row_has_it_rescued(clone):
    run = without_the_log(clone, "os.remove('results.tsv'), os.mkdir('results.tsv')")
    assert run.code == 0 and run.err.count("\n") == 2 and "refuses this row" in run.err
    (row,) = prepare.read_results(clone.folder / "results.tsv.rescued")
    assert f"{row['val_bpb']:.6f}" == run.summary["val_bpb"] and row["status"] == "keep"


def test_a_clone_that_is_gone_leaves_the_row_on_stderr(clone):
    run = clone.run(edit="at_step(5, lambda loss: shutil.rmtree(os.getcwd()) or loss)")
    assert re.search(rf"^0000000\t{run.summary['val_bpb']}\t0.0\tkeep\t\tcpu\tcorpus-\w+$", run.err, re.MULTILINE), run
    assert run.code == 0


def test_a_disk_too_full_for_the_weights_costs_the_weights_alone(clone):
    (clone.folder / "model.safetensors").write_bytes(b"those of before")
    run = clone.run(edit="resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))")
    assert clone.statuses == ["keep"] and not clone.left_over
    assert run.err.count("\n") == 1 and "model.safetensors" in run.err
    assert (clone.folder / "model.safetensors").read_bytes() == b"those of before"


def test_killed_while_the_weights_are_written_leaves_those_of_before(clone):
    clone.run("--tokens", "1280")
    before = (clone.folder / "model.safetensors").read_bytes()
    edit = (
        "replace('save_file', lambda real, tensors, path, *_: (path.write_bytes(b'half'), terminate(signal.SIGKILL)))"
    )
    assert clone.run(edit=edit).code == -signal.SIGKILL
    assert (clone.folder / "model.safetensors").read_bytes() == before


def test_a_step_that_hangs_says_where(clone):
    """After 120 s, which are one here; and the run goes on when the step does."""
    edit = """
dump = train.faulthandler.dump_traceback_later
def soon(seconds, **options):
    assert seconds == 120
    dump(1, **options)
train.faulthandler.dump_traceback_later = soon
def wait_for_data(loss):
    time.sleep(1.5)
    return loss
at_step(5, wait_for_data)
"""
    run = clone.run(edit=edit)
    assert re.search(r"^Timeout \(0:00:01\)!\n(.*\n)+?.* in wait_for_data\n", run.err, re.MULTILINE), run.err
    assert run.code == 0 and clone.statuses == ["keep"]


# What cannot start


TOO_OLD = "torch.cuda.is_available = lambda: True; torch.cuda.get_device_capability = lambda *_: (6, 1)"
REFUSED = {
    "no data": ([], None, "none", r"run `python prepare\.py` first"),
    "no GPU": (["--platform", "hopper"], None, "prepared", "train.py: --platform hopper needs a CUDA GPU.*--platform cpu"),
    "GPU too old": ([], TOO_OLD, "prepared", r"train.py: compute capability \(6, 1\) is too old.*--platform cpu"),
    "damaged shard": ([], None, "damaged", r"train_00001\.bin: .*; delete it and run prepare\.py again"),
    "no weights to sample": (["--sample", "Once"], None, "prepared", r"train.py: no model\.safetensors.*train\.py first"),
    "no weights to evaluate": (["--eval-only"], None, "prepared", r"train.py: no model\.safetensors.*train\.py first"),
    "no time": (["--seconds", "0"], "", "prepared", "give more than 0"),
    "no tokens": (["--tokens", "0"], "", "prepared", "give more than 0"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refused(prepared, tmp_path_factory) -> dict[str, tuple[Clone, Ended]]:
    caches = tmp_path_factory.mktemp("caches")
    shutil.copytree(prepared, caches / "damaged")
    (shard,) = (caches / "damaged").rglob("train_00001.bin")
    shard.write_bytes(shard.read_bytes()[:-1])

    def job(args: list[str], edit: str | None, cache: str, _) -> tuple[Clone, Ended]:
        clone = Clone(tmp_path_factory.mktemp("refused") / "clone", prepared if cache == "prepared" else caches / cache)
        return clone, clone.run(*args, edit=edit)

    return two_at_a_time({name: lambda case=case: job(*case) for name, case in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_start_is_one_line_with_its_remedy_and_no_row(refused, name):
    clone, run = refused[name]
    assert run.code == 1 and run.err.count("\n") == 1 and re.search(REFUSED[name][-1], run.err), run
    assert not (clone.folder / "results.tsv").exists() and not clone.left_over


def test_sequences_longer_than_the_text_are_one_line_and_a_crash_row(clone, prepared, tmp_path):
    """The second, for it may be an experiment that asked for them."""
    (tmp_path / "short").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "short" / name).write_text("a few words")
    clone.cache = tmp_path / "cache"
    command = [sys.executable, ROOT / "prepare.py", "--data", tmp_path / "short", "--cache", clone.cache]
    subprocess.run(command, check=True, capture_output=True)
    run = clone.run()
    assert run.code == 1 and run.err.count("\n") == 1 and "T=64 is too long" in run.err, run
    assert clone.statuses == ["crash"]


def test_help_names_every_option(clone):
    run = clone.run("--help", edit=None)
    options = ("--seconds", "--tokens", "--platform", "--seed", "--sample", "--eval-only")
    assert run.code == 0 and run.err == "" and all(option in run.out for option in options)


def test_importing_touches_no_gpu_network_or_file(clone):
    """Audited: no socket, no process, nothing written, and of the clone and the cache only the source is read."""
    code = """
import sys
touched = []
def audit(event, args):
    if event == "open":
        path, mode = str(args[0]), str(args[1])
        source = path.endswith((".py", ".pyc")) and mode.startswith("r")
        if set(mode) & set("wax+") or path.startswith(HERE) and not source:
            touched.append((event, path, mode))
    elif event.startswith(("socket.", "subprocess.", "os.", "shutil.")) and event not in ("os.listdir", "os.scandir"):
        touched.append((event, *map(str, args)))
sys.addaudithook(audit)
import train
assert not touched, touched
assert not train.torch.cuda.is_initialized()
"""
    here = repr(str(clone.folder.parent))
    command = [sys.executable, "-B", "-c", f"HERE = {here}\n{code}"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["AUTORESEARCH_CACHE"] = str(clone.folder.parent / "cache")
    subprocess.run(command, cwd=clone.folder, env=environment, check=True, timeout=60)


# Saved weights


def test_a_sample_continues_its_text_with_the_saved_weights(night):
    clone, _ = night
    texts = ["Once upon", "größer 你好 <|reserved_0|>", ""]
    runs = two_at_a_time({text: lambda text=text: clone.run("--sample", text) for text in texts})
    for text, run in runs.items():
        assert run.code == 0 and run.err == "" and run.out.startswith(text) and len(run.out) > len(text) + 20, run
        assert "step 0" not in run.out
    assert clone.statuses == ["keep", "discard", "keep"]


def strangers(good: Path) -> dict[str, Callable[[Path], None]]:
    """Files that are no weights of this model: each is written under the name it gets."""
    tensors, data = load_file(good), good.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["train"]
    metadata = json.loads(header)
    sizes = metadata["sizes"]

    def with_metadata(value) -> Callable:
        return lambda path: save_file(tensors, path, {"train": value if isinstance(value, str) else json.dumps(value)})

    return {
        "empty": lambda path: path.write_bytes(b""),
        "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(10_000)),
        "truncated": lambda path: path.write_bytes(data[:-100]),
        "a pickle": lambda path: torch.save(tensors, path),
        "a folder": lambda path: path.mkdir(),
        "no metadata": lambda path: save_file(tensors, path),
        "no JSON": with_metadata("{"),
        "a list": with_metadata([1]),
        "no sizes": with_metadata({"gpu": "cpu"}),
        "sizes that are none": with_metadata(metadata | {"sizes": {"depth": "deep"}}),
        "more than sizes": with_metadata(metadata | {"sizes": sizes | {"name": "x", "system": "y"}}),
        "other shapes": with_metadata(metadata | {"sizes": sizes | {"n_embd": 128}}),
        "fewer layers": with_metadata(metadata | {"sizes": sizes | {"depth": 1}}),
        "other tensors": lambda path: save_file({"a": torch.zeros(1)}, path, {"train": header}),
    }


STRANGERS = ["empty", "garbage", "truncated", "a pickle", "a folder", "no metadata", "no JSON", "a list", "no sizes",
             "sizes that are none", "more than sizes", "other shapes", "fewer layers", "other tensors"]  # fmt: skip


@pytest.mark.parametrize("name", STRANGERS)
def test_weights_of_another_model_or_none_are_one_line_with_the_remedy(night, tokenizer, tmp_path, monkeypatch, name):
    monkeypatch.setattr(train, "CHECKPOINT", tmp_path / "model.safetensors")
    strangers(night[0].folder / "model.safetensors")[name](tmp_path / "model.safetensors")
    with pytest.raises(SystemExit, match=r"^train\.py: model\.safetensors .*[Rr]un python train\.py") as error:
        train.load_checkpoint(train.PLATFORMS["cpu"], tokenizer.get_vocab_size(), None)
    assert "\n" not in str(error.value)


def test_garbage_in_place_of_the_weights_ends_the_process_with_its_line_alone(clone):
    (clone.folder / "model.safetensors").write_bytes(b"\xff" * 1000)
    run = clone.run("--sample", "Once")
    assert run.code == 1 and run.err.count("\n") == 1 and run.out == "", run


def test_weights_are_not_scored_on_other_data_than_they_saw(night, corpus, tmp_path):
    trained, _ = night
    clone = Clone(tmp_path / "clone", tmp_path / "cache")
    shutil.copy(trained.folder / "model.safetensors", clone.folder)
    shutil.copytree(corpus, tmp_path / "fewer", ignore=lambda *_: ["shard_00000.parquet"])
    command = [sys.executable, ROOT / "prepare.py", "--data", tmp_path / "fewer", "--cache", clone.cache]
    subprocess.run(command, check=True, capture_output=True)
    run = clone.run("--eval-only")
    assert run.code == 1 and run.err.count("\n") == 1 and "fewer-" in run.err and "corpus-" in run.err, run


# Two at once, and twice the same


def at_once(clone: Clone, count: int) -> None:
    """Official runs that save and log at the same moment."""
    edit = f"""
def meet(real, *args):
    open(f"ready.{{os.getpid()}}", "w").close()
    while sum(name.startswith("ready.") for name in os.listdir()) < {count}:
        time.sleep(0.001)
    return real(*args)
replace("save_file", meet)
"""
    processes = [clone.start("--seed", str(seed), edit=edit) for seed in range(count)]
    runs = [ended(process) for process in processes]
    assert [(run.code, run.err) for run in runs] == [(0, "")] * count
    assert sorted(f"{row['val_bpb']:.6f}" for row in clone.rows) == sorted(run.summary["val_bpb"] for run in runs)
    best = 10.0
    for row, status in zip(clone.rows, clone.statuses, strict=True):
        assert status == ("keep" if row["val_bpb"] < best else "discard")
        best = min(best, row["val_bpb"])
    assert all(name.startswith("ready.") for name in clone.left_over)
    assert clone.run("--eval-only").summary["val_bpb"] in [run.summary["val_bpb"] for run in runs]


def test_two_at_once_lose_no_row_and_leave_one_whole_file_of_weights(clone):
    at_once(clone, 2)


@pytest.mark.slow
def test_six_at_once_lose_no_row(clone):
    at_once(clone, 6)


def test_the_same_seed_gives_the_same_bits_in_another_process_and_another_seed_others(prepared, tmp_path):
    clones = {name: Clone(tmp_path / name, prepared) for name in ("first", "second", "other")}
    seeds = {"first": "7", "second": "7", "other": "8"}
    runs = two_at_a_time({n: lambda n=n: clones[n].run("--tokens", "5120", "--seed", seeds[n]) for n in clones})
    scores = {name: [run.summary[f"val_bpb{kind}"] for kind in ("", "_quarter", "_nf4")] for name, run in runs.items()}
    weights = {name: load_file(clone.folder / "model.safetensors") for name, clone in clones.items()}
    assert scores["first"] == scores["second"]
    assert all(torch.equal(tensor, weights["second"][key]) for key, tensor in weights["first"].items())
    assert scores["first"][0] != scores["other"][0]
    assert not torch.equal(weights["first"]["head.weight"], weights["other"]["head.weight"])
