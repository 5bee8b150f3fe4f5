"""Whole runs of train.py, in processes of their own and under real faults: each ends in a clear line and one row.

The model is tiny and the clock goes 2 s a look, of which a step takes a few, and stops at 301 s: so the five minutes
take a moment and are the same on every machine. A fault is an edit of train.py, a signal, or a file that goes away.
"""

import contextlib
import itertools
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_corpus import ROOT, run_prepare
from warm_python import Warm

import harness
import prepare
import train

PRELUDE = """
import dataclasses, itertools, math, os, resource, shutil, signal, sys, time
from types import SimpleNamespace
import torch, harness, prepare, train

sys.argv[0] = "train.py"
train.SIZES = ((0, train.Config(2, 64, 32, 64, 64, 2, 8, 512, 512)),)

def clock_goes(seconds, until=301.0, first=0):
    looks = itertools.count(first)
    harness.time = SimpleNamespace(**vars(time) | {"perf_counter": lambda: min(seconds * next(looks), until)})

def replace(module, name, new):
    real = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: new(real, *args, **kwargs))

def at_step(number, fault):
    '''`fault` gets the loss of that step of the training and returns another, or does worse.'''
    steps = itertools.count(1)
    def step(real, *args):
        loss, epoch = real(*args)
        return fault(loss) if epoch and next(steps) == number else loss, epoch  # epoch 0 is the warm-up
    replace(train, "train_step", step)

def fail(error):
    raise error

def forever(module, phase):
    def again(real, *args):
        print("here", flush=True)
        while True:
            real(*args)
    replace(module, phase, again)

def send(number):
    os.kill(os.getpid(), number)

clock_goes(2)
"""
NO_GPU = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
    "CUDA_VISIBLE_DEVICES": ""
}


class Run:
    """A run of train.py, begun or ended."""

    def __init__(self, start: Callable, out: int | None):
        self.files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = start(out or self.files[0].fileno(), self.files[1].fileno())
        self.code = None

    def wait(self) -> "Run":
        try:
            self.code = self.process.wait(timeout=600)
        except (TimeoutError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        with pytest.raises(ProcessLookupError):  # nobody is left of its session
            os.killpg(self.process.pid, 0)
        return self

    @property
    def out(self) -> str:
        return os.pread(self.files[0].fileno(), 10**6, 0).decode()

    @property
    def err(self) -> str:
        return os.pread(self.files[1].fileno(), 10**6, 0).decode()

    @property
    def summary(self) -> dict[str, str]:
        return dict(re.findall(r"^(\w+): +(.+)$", self.out, re.MULTILINE))

    def ends_in_one_line(self) -> bool:
        return self.code == 1 and self.err.count("\n") == 1

    def __repr__(self) -> str:
        return f"exit status {self.code}\n{self.out}\n{self.err}"


class Clone:
    """The three files in a folder of their own, where runs leave their rows and weights."""

    def __init__(self, folder: Path, cache: Path, warm: Warm):
        self.folder, self.cache, self.warm = folder, cache, warm
        folder.mkdir()
        for name in ("train.py", "prepare.py", "harness.py", "kernels.py"):
            shutil.copy(ROOT / name, folder)
        self.git("init", "-q")
        self.git("add", ".")
        self.commit("baseline")

    def replace(self, old: str, new: str) -> None:
        """Edits train.py, which keeps its lines."""
        source = (self.folder / "train.py").read_text()
        assert source.count(old) == 1, old
        (self.folder / "train.py").write_text(source.replace(old, new))

    def git(self, *args: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def commit(self, subject: str) -> None:
        self.git("commit", "-q", "--allow-empty", "-m", subject)

    def start(self, *args: str, edit: str = "", out: int | None = None) -> Run:
        """edit: code that changes train.py before the run; out: instead of into a file."""
        code = f"{PRELUDE}\n{edit}\nharness.run(train.train, train.build_model)"
        environment = {"AUTORESEARCH_CACHE": str(self.cache)}
        return Run(lambda *outputs: self.warm.start(code, list(args), self.folder, environment, *outputs), out)

    def run(self, *args: str, edit: str = "") -> Run:
        return self.start(*args, edit=edit).wait()

    def plain(self, *args: str, **variables: str) -> Run:
        """The command line as it is, with the real sizes and the real clock."""
        environment = NO_GPU | {"AUTORESEARCH_CACHE": str(self.cache)} | variables
        settings = {"cwd": self.folder, "env": environment, "start_new_session": True}
        command = [sys.executable, "-B", "train.py", *args]
        return Run(lambda out, err: subprocess.Popen(command, stdout=out, stderr=err, **settings), None).wait()

    @property
    def rows(self) -> list[dict]:
        return harness.read_results(self.folder / "results.tsv")

    @property
    def statuses(self) -> list[str]:
        """Of all rows; there is nothing else in the file but its header."""
        if self.rows:
            assert len((self.folder / "results.tsv").read_text().splitlines()) == 1 + len(self.rows)
        return [row["status"] for row in self.rows]

    @property
    def left_over(self) -> set[str]:
        expected = {
            "train.py",
            "prepare.py",
            "harness.py",
            "kernels.py",
            "results.tsv",
            ".dataset",
            "__pycache__",
            ".git",
        }
        return {path.name for path in self.folder.iterdir()} - expected


@pytest.fixture(scope="module")
def new_clone(prepared, tmp_path_factory) -> Callable[..., Clone]:
    warm = Warm(NO_GPU | {"OMP_NUM_THREADS": "1"})
    yield lambda cache=prepared: Clone(tmp_path_factory.mktemp("run") / "clone", cache, warm)
    warm.stop()


@pytest.fixture
def clone(new_clone) -> Clone:
    return new_clone()


def two_at_a_time(jobs: dict[str, Callable]) -> dict:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(jobs, pool.map(lambda job: job(), jobs.values()), strict=True))


# A good run


@pytest.fixture(scope="module")
def saved(new_clone) -> Clone:
    """Where a run has saved its weights."""
    clone = new_clone()
    assert clone.run("--save").code == 0
    return clone


@pytest.fixture(scope="module")
def night(new_clone) -> tuple[Clone, list[Run]]:
    """An experiment, a worse one, a better one."""
    clone = new_clone()
    runs = [clone.run()]
    edits = {
        "learn nothing": "train.MATRIX_LR = train.EMBEDDING_LR = 0",
        "take five times the steps": "clock_goes(0.4)",
    }
    for subject, edit in edits.items():
        clone.commit(subject)
        runs.append(clone.run(edit=edit))
    return clone, runs


def test_an_official_run_ends_with_status_zero_and_says_nothing_on_stderr(night):
    """The third takes more than 100 steps: what is looked at every 100 finds nothing wrong."""
    clone, runs = night
    assert [(run.code, run.err) for run in runs] == [(0, "")] * 3
    assert not clone.left_over
    assert int(runs[2].summary["num_steps"]) > 100


def test_before_the_first_step_a_run_says_what_it_trains_on_what_and_for_how_long(night):
    clone, (run, *_) = night
    first, second, third, *_ = run.out.splitlines()
    assert first == f"cpu, 300 s, {clone.rows[0]['dataset']}, seed 42"
    assert re.match(r"0\.\d M parameters, torch\.float32, Config\(depth=2, n_embd=64, .*total_batch_size=512", second)
    assert f"{run.summary['num_params_M']} M" in second and third.startswith("step 0000")


def test_a_run_ends_with_a_few_lines_that_its_model_wrote(night):
    assert not (night[0].folder / "model.safetensors").exists(), "weights are saved when asked for"
    for run in night[1]:
        lines = run.out.partition("\nThe model writes:\n")[2].splitlines()
        assert len(run.out.splitlines()) > len(lines) > 1 and len("".join(lines)) > 150
        assert all(line.startswith("    ") and len(line) <= 104 for line in lines), "none looks like a summary's"
        assert run.out.index("\nseed: ") < run.out.index("\nThe model writes:\n")


@pytest.mark.parametrize("fault", ["sample", "textwrap"])
def test_a_model_that_cannot_write_costs_one_line_and_not_the_run(clone, fault):
    edit = {
        "sample": "replace(train.GPT, 'forward', lambda real, self, x, y, **reduction: real(self, x, y, **reduction))",
        "textwrap": "harness.textwrap.wrap = lambda *_: fail(UnicodeEncodeError('ascii', 'é', 0, 1, 'no'))",
    }[fault]
    run = clone.run(edit=edit)
    assert run.code == 0 and clone.statuses == ["keep"] and "val_bpb" in run.summary, run
    assert re.fullmatch(r"train\.py: no sample: \w+Error\n", run.err), run


def test_rows_keep_the_best_so_far_and_name_the_commit(night):
    clone, runs = night
    assert clone.statuses == ["keep", "discard", "keep"]
    assert [row["description"] for row in clone.rows] == ["baseline", "learn nothing", "take five times the steps"]
    assert [row["commit"] for row in clone.rows] == clone.git("log", "--reverse", "--abbrev=7", "--format=%h").split()
    for row, run in zip(clone.rows, runs, strict=True):
        assert (f"{row['val_bpb']:.6f}", row["status"]) == (run.summary["val_bpb"], run.summary["status"])
        assert f"{row['tokens_M']:.1f}" == run.summary["total_tokens_M"]
        assert (row["gpu"], row["dataset"]) == (run.summary["gpu"], run.summary["dataset"])


def test_the_summary_is_found_by_autoresearchs_grep_and_begins_with_its_keys(night):
    for run in night[1]:
        assert len(re.findall(r"^val_bpb:|^peak_vram_mb:", run.out, re.MULTILINE)) == 2
        theirs = ["val_bpb", "training_seconds", "total_seconds", "peak_vram_mb"]
        theirs += ["mfu_percent", "total_tokens_M", "num_steps", "num_params_M", "depth"]
        assert [key for key in run.summary if key in theirs] == theirs
        assert 285 < float(run.summary["training_seconds"]) < 303 and float(run.summary["val_bpb"]) > 0


def test_into_a_file_go_lines(night):
    for run in night[1]:
        line = r"^step \d{5} \(\d+\.\d%\) \| loss \d\.\d{4} \| [\d,]+ tok/s \| epoch 1 \| \d+ s$"
        assert len(re.findall(line, run.out, re.MULTILINE)) > 20 and "\r" not in run.out


def test_a_terminal_gets_one_live_line_and_an_error_below_it(new_clone):
    def on_a_terminal(edit: str) -> str:
        ours, theirs = pty.openpty()
        run = new_clone().start(edit=f"sys.stderr = sys.stdout\n{edit}", out=theirs)
        os.close(theirs)
        text = b""
        try:
            while data := os.read(ours, 4096):
                text += data
        except OSError:  # nobody holds the other end any longer
            os.close(ours)
        run.wait()
        return text.decode().replace("\r\n", "\n")

    edits = {"good": "", "lost": "at_step(20, lambda loss: loss * math.nan)"}
    texts = two_at_a_time({name: lambda edit=edit: on_a_terminal(edit) for name, edit in edits.items()})
    for text in texts.values():
        (line,) = [line for line in text.split("\n") if "step 000" in line]
        assert line.startswith("\r") and line.count("\rstep 000") > 10
    assert "\ntrain.py: NaN at step 20" in texts["lost"]


def test_the_same_seed_gives_the_same_bits_in_two_plain_runs(new_clone):
    clones = [new_clone(), new_clone()]
    start = time.perf_counter()
    runs = [clone.plain("--tokens", "8192", "--seed", "7", "--save") for clone in clones]  # each with all threads
    both = time.perf_counter() - start
    assert runs[0].summary["val_bpb"] == runs[1].summary["val_bpb"] and runs[0].summary["num_steps"] == "2", runs
    weights = [load_file(clone.folder / "model.safetensors") for clone in clones]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    for clone, run in zip(clones, runs, strict=True):
        assert (run.code, run.err) == (0, "") and clone.left_over == {"model.safetensors"}
    times = ("first_step_sec", "training_seconds", "eval_seconds", "total_seconds", "tokens_per_sec", "num_params_M")
    seconds = [[float(run.summary[name]) for name in times] for run in runs]
    assert both - 30 < sum(total for *_, total, _, _ in seconds) < both
    for first, training, evaluation, total, rate, params in seconds:
        assert first + training + evaluation == pytest.approx(total, abs=1) and min(first, training, evaluation) > 0
        assert rate * training == pytest.approx(8192, rel=0.05 / training + 1e-3)
        assert params == pytest.approx(sum(tensor.numel() for tensor in weights[0].values()) / 1e6, rel=0.01)


# Runs that are not logged

UNLOGGED = {  # arguments, the first words, the status
    "seconds": (["--seconds", "20"], "cpu, 20 s", "--seconds set by hand"),
    "the official seconds": (["--seconds", "300"], "cpu, 300 s", "--seconds set by hand"),
    "tokens": (["--tokens", "1280"], "cpu, 0.00128 M tokens", "--tokens set by hand"),
    "another GPU's size": (["--gpu", "cpu", "--seconds", "20"], "cpu as cpu, 20 s", "--seconds and --gpu set by hand"),
}


@pytest.fixture(scope="module")
def unlogged(new_clone) -> dict[str, tuple[Clone, Run]]:
    def job(args: list[str]) -> tuple[Clone, Run]:
        clone = new_clone()
        return clone, clone.run(*args)

    return two_at_a_time({name: lambda args=args: job(args) for name, (args, *_) in UNLOGGED.items()})


@pytest.mark.parametrize("name", UNLOGGED)
def test_a_run_with_another_budget_or_gpu_is_not_logged_and_says_why(unlogged, name):
    clone, run = unlogged[name]
    assert (run.code, run.err) == (0, "") and 0 < float(run.summary["val_bpb"]) < 10
    args, first_words, reason = UNLOGGED[name]
    assert run.summary["status"] == f"not logged: {reason}" and run.out.startswith(f"{first_words}, corpus-"), run
    if "20" in args:
        assert 15 < float(run.summary["training_seconds"]) < 24
    assert not (clone.folder / "results.tsv").exists() and not clone.left_over


@pytest.mark.parametrize(
    ("args", "gpu"),
    [
        (["--seconds", "20"], "cpu, 20 s"),
        (["--tokens", "38600"], "cpu, 0.0386 M tokens"),
        (["--gpu", "T4", "--tokens", "5120"], "cpu as T4, 0.00512 M tokens"),
    ],
)
def test_screening_is_logged_with_the_budget_in_the_gpu_column(clone, args, gpu):
    run = clone.run(*args, edit="os.environ['AUTORESEARCH_RUN'] = '{\"log\": true}'")
    assert [(row["status"], row["gpu"]) for row in clone.rows] == [("keep", gpu)] and run.summary["status"] == "keep"


def test_night_has_the_test_split_scored_in_the_run_and_logged_with_its_row(clone):
    edit = """
os.environ["AUTORESEARCH_RUN"] = '{"score_test": true}'
split_of = lambda real, model, tokenizer, B, T, split: 1.5 if split == "test" else real(model, tokenizer, B, T, split)
replace(harness, "evaluate_bpb", split_of)
"""
    run = clone.run(edit=edit)
    assert run.summary["test_bpb"] == "1.500000" and run.summary["val_bpb"] != "1.500000", run
    assert [(row["status"], row["description"]) for row in clone.rows] == [("keep", "baseline, test 1.500000")]
    run = clone.run("--seconds", "20", edit=edit.replace('": true', '": false, "log": false'))
    assert "test_bpb" not in run.summary and len(clone.rows) == 1, "night has asked for neither"


def test_a_last_step_that_began_in_time_counts_however_long_it_takes(clone):
    run = clone.run(edit="at_step(8, lambda loss: clock_goes(340, until=340, first=1) or loss)")
    assert clone.statuses == ["keep"] and float(run.summary["training_seconds"]) == 340


def test_no_step_starts_that_would_probably_end_after_303_s(clone):
    """By the pace so far: steps of 70 s leave room for four."""
    slow = "replace(train, 'train_step', lambda real, *args: (real(*args), slow())[0])\n"
    slow += "def slow():\n    harness.time.now += 70\n"
    slow += (
        "harness.time = SimpleNamespace(**vars(time), now=0.0)\nharness.time.perf_counter = lambda: harness.time.now"
    )
    run = clone.run(edit=slow)
    assert run.summary["num_steps"] == "4" and run.summary["training_seconds"] == "280.0", run
    assert clone.statuses == ["keep"]


def test_a_loop_that_ignores_the_clock_is_a_crash(clone):
    run = clone.run(edit="harness.Clock.running = lambda self: True")
    assert run.code == 1 and "into a budget of 300 s" in run.err
    assert clone.statuses == ["crash"]


def test_a_run_that_never_used_the_clock_is_a_crash(clone):
    edit = "train.train = lambda clock, _, device, seed, gpu: (train.build_model(train.SIZES[0][1], device, gpu), {})"
    assert clone.run(edit=edit).code == 1 and clone.statuses == ["crash"]


@pytest.mark.skipif(not hasattr(prepare, "adopt_dataset"), reason="prepare.py knows no dataset of a clone yet")
def test_the_first_logged_run_gives_the_clone_its_dataset(clone, prepared, tmp_path):
    clone.cache = shutil.copytree(prepared, tmp_path / "cache")
    own = (clone.cache / "current").read_text().strip()
    shutil.copytree(clone.cache / own, clone.cache / "other")
    clone.run("--seconds", "20")
    assert not (clone.folder / ".dataset").exists(), "it was not logged"
    clone.run()
    (clone.cache / "current").write_text("other\n")  # by another clone
    clone.run()
    assert (clone.folder / ".dataset").read_text().strip() == own
    assert len({row["dataset"] for row in clone.rows}) == 1 and clone.statuses == ["keep", "discard"]


def test_a_run_with_far_fewer_tokens_than_the_best_says_so(clone):
    tokens = 512 * int(clone.run().summary["num_steps"]) / 1e6
    for share, slower in ((0.91, False), (0.89, True)):
        saw = f"lambda real, *args: real(*args) | dict(tokens_M={tokens / share})"
        run = clone.run(edit=f"replace(harness, 'best_result', {saw})")
        assert ("slower" in run.summary) is slower, run
    assert f"where {clone.rows[0]['commit']}, the best so far, saw 0.0 M" in run.summary["slower"]


# Lost runs

LOOP = "loss, epoch = train_step(model, optimizer, scaler, loader)"


def line_of(text: str) -> int:
    (line,) = [i for i, line in enumerate((ROOT / "train.py").read_text().splitlines(), start=1) if text in line]
    return line


LINE = f" line {line_of(LOOP)}"
FAULTS = {  # edit, last line on stderr, reason in the row
    "nan": ("at_step(20, lambda loss: loss * math.nan)", "^train.py: NaN at step 20$", "NaN at step 20"),
    "inf": ("at_step(1, lambda loss: loss * math.inf)", "^train.py: loss inf at step 1$", "loss inf at step 1"),
    "explosion": ("at_step(20, lambda loss: loss * 1e4)", r"^train.py: loss \S+ at step 20$", r"loss \S+ at step 20"),
    "out of memory": (
        "at_step(5, lambda _: fail(torch.OutOfMemoryError('CUDA out of memory')))",
        "out of memory",
        "out of memory",
    ),
    "out of host memory": ("at_step(5, lambda _: torch.empty(2**60))", "memory", "out of memory"),
    "GPU lost": (
        "at_step(5, lambda _: fail(torch.AcceleratorError('CUDA error: device lost')))",
        "device lost",
        f"AcceleratorError{LINE}",
    ),
    "evaluation": (
        "replace(harness, 'evaluate_bpb', lambda *_: fail(ValueError('no bytes')))",
        "ValueError: no bytes",
        "ValueError",
    ),
    "val_bpb of nan": (
        "replace(harness, 'evaluate_bpb', lambda *_: math.nan)",
        "^train.py: val_bpb is nan$",
        "val_bpb is nan",
    ),
    "cache gone": (
        "at_step(5, lambda loss: shutil.rmtree(prepare.cache_dir()) or loss)",
        "run `?(python )?prep",
        ".*run `?(python )?prep.*",
    ),
}


@pytest.fixture(scope="module")
def lost(new_clone, prepared, tmp_path_factory) -> dict[str, tuple[Clone, Run]]:
    def job(edit: str) -> tuple[Clone, Run]:
        clone = new_clone(shutil.copytree(prepared, tmp_path_factory.mktemp("cache") / "cache"))
        return clone, clone.run(edit=edit)

    return two_at_a_time({name: lambda edit=edit: job(edit) for name, (edit, *_) in FAULTS.items()})


@pytest.mark.parametrize("name", FAULTS)
def test_a_lost_run_leaves_a_crash_row_and_its_reason_last_on_stderr(lost, night, name):
    clone, run = lost[name]
    lines = run.err.splitlines()
    assert run.code == 1 and re.search(FAULTS[name][1], lines[-1]), run
    assert len(lines) == 1 or lines[0].startswith("Traceback"), run
    assert "val_bpb:" not in run.out and not clone.left_over
    assert clone.statuses == ["crash"]
    assert re.fullmatch(rf"baseline \[{FAULTS[name][2]}\]", clone.rows[0]["description"])
    crash = {"val_bpb": 0.0, "memory_gb": 0.0, "gpu": "cpu"}
    assert clone.rows[0].items() >= crash.items() and clone.rows[0]["dataset"] == night[0].rows[0]["dataset"]


def test_a_lost_loss_needs_no_traceback(lost):
    assert all(lost[name][1].ends_in_one_line() for name in ("nan", "inf", "explosion"))


MLP, CALL, HEAD_DIM = (
    "self.c_proj(leaky_relu_squared(self.c_fc(x)))",
    "x = x + self.mlp(h)",
    "config.n_embd % config.head_dim",
)
EDITS = {  # of train.py: old, new; the error and the lines, innermost first, that its row names
    "a name": (MLP, MLP.replace("c_fc", "c_fk"), ("AttributeError", MLP, CALL)),
    "a shape": (MLP, MLP.replace("(x)", "(x[..., 1:])"), ("RuntimeError", "F.linear(x, self.weight.to(x.dtype))", MLP)),
    "sizes": (f"{HEAD_DIM} == 0", f"{HEAD_DIM} == 1", ("AssertionError", HEAD_DIM, "self.attn, self.mlp = ")),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_crash_row_names_the_edited_line_even_where_a_helper_raises(clone, name):
    old, new, (error, line, caller) = EDITS[name]
    clone.replace(old, new)
    clone.git("add", "train.py")  # which no commit holds yet
    run = clone.run()
    reason = f"{error} line {line_of(line)}, called from line {line_of(caller)}"
    assert run.code == 1 and [row["description"] for row in clone.rows] == [f"baseline (train.py differs) [{reason}]"]
    assert "val_bpb:" not in run.out and error in run.err.splitlines()[-1]


def test_row_and_summary_are_safe_before_anything_else_is_done_with_the_run(clone):
    for i, late in enumerate(("print_sample", "save_weights")):
        run = clone.run("--save", edit=f"replace(harness, '{late}', lambda *_: send(signal.SIGKILL))")
        assert run.code == -signal.SIGKILL and len(clone.statuses) == i + 1 and "val_bpb" in run.summary, run


# Signals

PHASES = {"warm-up": "harness, 'warm_up'", "training": "train, 'train'", "evaluation": "harness, 'evaluate_bpb'"}
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(scope="module")
def interrupted(new_clone) -> dict[tuple[str, int], tuple[Clone, Run]]:
    """Runs that never leave a phase and are interrupted within half a second."""

    def job(phase: str, number: int) -> tuple[Clone, Run]:
        clone = new_clone()
        run = clone.start(edit=f"forever({PHASES[phase]})")
        give_up = time.monotonic() + 300
        while "here\n" not in run.out:
            assert time.monotonic() < give_up, run
            time.sleep(0.01)
        time.sleep(random.Random(phase).uniform(0, 0.5))
        os.kill(run.process.pid, number)
        return clone, run.wait()

    cases = [(phase, number) for phase in PHASES for number in SIGNALS]
    return two_at_a_time({case: lambda case=case: job(*case) for case in cases})


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_in_any_phase_leaves_one_row_and_no_process(interrupted, phase, number):
    clone, run = interrupted[phase, number]
    assert run.code == 128 + number and clone.statuses == ["crash"] and not clone.left_over, run
    reason = {signal.SIGINT: "interrupted", signal.SIGTERM: "killed"}[number]
    assert clone.rows[0]["description"] == f"baseline [{reason}]"


def test_a_signal_between_evaluation_and_row_leaves_a_row(clone):
    run = clone.run(edit="replace(harness, 'best_result', lambda real, *args: send(15) or real(*args))")
    assert run.code == 143 and [row["description"] for row in clone.rows] == ["baseline [killed]"], run


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("begun", ["a good run", "an interrupt"])
def test_a_signal_while_the_row_is_written_neither_loses_nor_doubles_it(clone, begun, number):
    """`timeout` sends SIGTERM twice, impatient people Ctrl-C."""
    edit = f"""
def append_row(*args, real=harness.append_row):
    send({int(number)})
    status = real(*args)
    send({int(number)})
    return status
harness.append_row = append_row
"""
    if begun == "an interrupt":
        edit += "at_step(5, lambda loss: send(signal.SIGTERM) or loss)\n"
        edit += f"replace(harness.Clock, 'release', lambda real, clock: send({int(number)}) or real(clock))"
    run = clone.run(edit=edit)
    expected = (0, ["keep"]) if begun == "a good run" else (143, ["crash"])
    assert (run.code, clone.statuses) == expected, run


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_after_the_row_just_ends_the_process(clone, number):
    run = clone.run(edit=f"replace(harness, 'print_sample', lambda *_: send({int(number)}))")
    assert run.code == -number and clone.statuses == ["keep"] and "val_bpb" in run.summary, run


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_a_signal_at_any_moment_leaves_exactly_one_row(clone, seed):
    choose = random.Random(seed)
    run = clone.start(edit="sys.stdout.reconfigure(line_buffering=True)")
    while not run.out:
        time.sleep(0.01)
    time.sleep(choose.uniform(0, 1))
    with contextlib.suppress(ProcessLookupError):  # the run may be over by then
        os.kill(run.process.pid, choose.choice(SIGNALS))
    run.wait()
    assert len(clone.statuses) == 1 and not clone.left_over, (run, clone.rows)
    assert run.code != 0 or clone.statuses == ["keep"]


# Files and readers that go away, a disk that is full, a step that hangs


def test_a_log_removed_during_the_run_is_begun_anew(clone):
    (clone.folder / "results.tsv").write_text("\t".join(harness.COLUMNS) + "\n")
    run = clone.run(edit="at_step(5, lambda loss: os.remove('results.tsv') or loss)")
    assert run.code == 0 and clone.statuses == ["keep"] and not clone.left_over, run


def test_a_log_that_refuses_the_row_leaves_it_on_stderr(clone):
    (clone.folder / "results.tsv").mkdir()
    run = clone.run()
    row = rf"^\w{{7}}\t{run.summary['val_bpb']}\t0\.0\tkeep\tbaseline\tcpu\tcorpus-\w+\t\S+$"
    assert run.code == 0 and "refuses this row" in run.err and re.search(row, run.err, re.MULTILINE), run


def test_a_folder_that_is_gone_leaves_the_row_on_stderr(clone):
    run = clone.run(edit="at_step(5, lambda loss: shutil.rmtree(os.getcwd()) or loss)")
    row = rf"^\w{{7}}\t{run.summary.get('val_bpb')}\t0\.0\tkeep\t.*\tcpu\tcorpus-\w+\t\S+$"
    assert run.code == 0 and re.search(row, run.err, re.MULTILINE), run


def test_a_disk_too_full_for_the_weights_costs_them_and_nothing_else(clone):
    (clone.folder / "model.safetensors").write_bytes(b"those of before")
    run = clone.run("--save", edit="resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))")
    assert run.code == 0 and clone.statuses == ["keep"] and clone.left_over == {"model.safetensors"}, run
    assert run.err.count("\n") == 1 and "model.safetensors" in run.err
    assert (clone.folder / "model.safetensors").read_bytes() == b"those of before"


def test_a_kill_while_the_weights_are_written_leaves_those_of_before(clone):
    (clone.folder / "model.safetensors").write_bytes(b"those of before")
    half = "lambda real, tensors, path, *_: (path.write_bytes(b'half'), send(signal.SIGKILL))"
    edit = f"import safetensors.torch\nreplace(safetensors.torch, 'save_file', {half})"
    assert clone.run("--save", edit=edit).code == -signal.SIGKILL and len(clone.left_over) == 2
    assert (clone.folder / "model.safetensors").read_bytes() == b"those of before"
    assert clone.run("--seconds", "20", "--save").code == 0 and clone.left_over == {"model.safetensors"}
    assert len((clone.folder / "model.safetensors").read_bytes()) > 10**5


def test_a_reader_that_goes_away_makes_no_second_row(clone):
    """`python train.py | head`: the summary finds a broken pipe."""
    edit = "sys.stdout.reconfigure(line_buffering=True)\n"
    edit += "replace(harness, 'log_result', lambda real, **row: (real(**row), print('here'), time.sleep(0.5))[0])"
    ours, theirs = os.pipe()
    run = clone.start(edit=edit, out=theirs)
    os.close(theirs)
    with open(ours) as lines:
        assert "here\n" in lines
    run.wait()
    assert "BrokenPipeError" in run.err
    assert clone.statuses == ["keep"], run


def test_a_step_that_hangs_says_where_and_the_run_goes_on_with_it(clone):
    """It is told after 120 s, which are one here."""
    edit = """
dump = harness.faulthandler.dump_traceback_later
def soon(seconds, **options):
    assert seconds == 120
    dump(1, **options)
harness.faulthandler.dump_traceback_later = soon
def wait_for_data(loss):
    time.sleep(1.5)
    return loss
at_step(5, wait_for_data)
replace(harness, "evaluate_bpb", lambda real, *args: time.sleep(1.5) or real(*args))
"""
    run = clone.run(edit=edit)
    assert re.search(r"^Timeout \(0:00:01\)!\n(.*\n)*?.* in wait_for_data\n", run.err), run
    assert run.err.count("Timeout") == 1
    assert run.code == 0 and clone.statuses == ["keep"]


# What cannot start

REFUSED = {
    "no data": ([], "none", r"run `python prepare\.py` first"),
    "damaged shard": (
        [],
        "damaged",
        r"train_00001\.bin: .*; delete it and train_shards there, and run prepare\.py as before",
    ),
    "unknown GPU": (["--gpu", "T5"], "whole", r"^train\.py: --gpu T5 is unknown: give one of T4.*cpu"),
    "no weights": (
        ["--sample", "Once"],
        "whole",
        r"^train\.py: no model\.safetensors yet: run python train\.py --save first",
    ),
    "no weights, empty text": (["--sample", ""], "whole", r"^train\.py: no model\.safetensors yet"),
    "no time": (["--seconds", "0"], "whole", "give more than 0"),
    "no tokens": (["--tokens", "0"], "whole", "give more than 0"),
}


@pytest.fixture(scope="module")
def refused(new_clone, prepared, tmp_path_factory) -> dict[str, tuple[Clone, Run]]:
    caches = tmp_path_factory.mktemp("caches")
    for name in ("whole", "damaged"):
        shutil.copytree(prepared, caches / name)
    (shard,) = (caches / "damaged").rglob("train_00001.bin")
    shard.write_bytes(shard.read_bytes()[:-1])

    def job(args: list[str], cache: str, _) -> tuple[Clone, Run]:
        clone = new_clone(caches / cache)
        return clone, clone.run(*args)

    return two_at_a_time({name: lambda case=case: job(*case) for name, case in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_start_is_one_line_with_its_remedy_and_no_row(refused, name):
    clone, run = refused[name]
    assert run.ends_in_one_line() and re.search(REFUSED[name][-1], run.err), run
    assert not (clone.folder / "results.tsv").exists() and not clone.left_over


def test_sequences_longer_than_the_text_are_one_line_and_a_crash_row(clone, tmp_path):
    """A row, for it may be the experiment that asked for them."""
    (tmp_path / "short").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "short" / name).write_text("a few words<|endoftext|>and a few more")
    clone.cache = tmp_path / "cache"
    run_prepare("--data", tmp_path / "short", cache=clone.cache)
    run = clone.run()
    assert run.ends_in_one_line() and "T=64 is too long" in run.err and clone.statuses == ["crash"], run


def test_help_names_every_option(clone):
    run = clone.plain("--help")
    options = ("--seconds", "--tokens", "--gpu", "--seed", "--save", "--sample")
    assert (run.code, run.err) == (0, "") and all(option in run.out for option in options)


def test_importing_touches_no_gpu_network_or_file(clone):
    """Audited: no socket, no process, nothing written, and nothing read of the clone and the cache but the source."""
    code = f"""
import sys
import torch  # some of them ask ldconfig
touched = []
def audit(event, args):
    if event == "open":
        path, mode = str(args[0]), str(args[1])
        here = path.startswith({str(clone.folder.parent)!r}) and not path.endswith((".py", ".pyc"))
        if here or set(mode) & set("wax+"):
            touched.append((event, path, mode))
    elif event.startswith(("socket.", "subprocess.", "shutil.", "os.fork", "os.mkdir", "os.remove", "os.rename")):
        touched.append((event, *map(str, args)))
sys.addaudithook(audit)
import train
assert not touched, touched
assert not train.torch.cuda.is_initialized()
open({str(clone.folder / "seen")!r}, "w").close()
assert touched, "the audit sees what there is"
"""
    environment = NO_GPU | {"AUTORESEARCH_CACHE": str(clone.folder.parent / "cache")}
    subprocess.run([sys.executable, "-B", "-c", code], cwd=clone.folder, env=environment, check=True, timeout=600)


# Saved weights


def test_a_sample_continues_its_text_with_the_saved_weights(saved):
    clone = saved
    before = (clone.folder / "model.safetensors").stat().st_mtime_ns
    texts = ["Once upon", "größer 你好 <|reserved_0|>", ""]
    runs = two_at_a_time({text: lambda text=text: clone.run("--sample", text) for text in texts})
    for text, run in runs.items():
        assert (run.code, run.err) == (0, "") and run.out.startswith(text) and len(run.out) > len(text) + 20, run
    assert (clone.folder / "model.safetensors").stat().st_mtime_ns == before and len(clone.rows) == 1


class Next(torch.nn.Module):
    """Sure of itself: after each token comes the next id. Compiled for one shape."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.config, self.vocab_size = SimpleNamespace(seq_len=16), vocab_size
        self.weight = torch.nn.Parameter(torch.full((1,), 100.0))
        self.compilations = torch._dynamo.testing.CompileCounter()
        self.logits = torch.compile(self.logits, backend=self.compilations, fullgraph=True, dynamic=False)
        self(torch.zeros(2, 16, dtype=torch.int64))

    def logits(self, idx):
        return self.weight * torch.nn.functional.one_hot((idx + 1) % self.vocab_size, self.vocab_size)

    def forward(self, idx):
        return self.logits(idx)


def test_a_sample_follows_what_the_model_says_of_its_text_and_compiles_nothing(tokenizer):
    model = Next(tokenizer.get_vocab_size())
    (first,) = tokenizer.encode("a")
    assert harness.sample(model, tokenizer, "a", seed=0, tokens=30) == tokenizer.decode(list(range(first, first + 31)))
    to_the_end = tokenizer.decode(list(range(first, tokenizer.get_bos_token_id())))
    assert harness.sample(model, tokenizer, "a", seed=0, tokens=10**4) == to_the_end
    assert model.compilations.frame_count == 1


def test_a_sample_ends_when_its_seconds_are_over(tokenizer, monkeypatch):
    looks = itertools.count(100, 0.5)
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: next(looks)))
    model = Next(tokenizer.get_vocab_size())
    (first,) = tokenizer.encode("a")
    text = harness.sample(model, tokenizer, "a", seed=0, tokens=30, seconds=2)
    assert text == tokenizer.decode(list(range(first, first + 4)))


def save_with(path: Path, tensors: dict, metadata) -> None:
    save_file(tensors, path, {"config": metadata if isinstance(metadata, str) else json.dumps(metadata)})


STRANGERS = {  # what lies in place of the weights, made from the tensors and config of good ones
    "empty": lambda path, tensors, config: path.write_bytes(b""),
    "garbage": lambda path, tensors, config: path.write_bytes(b"\xff" * 1000),
    "truncated": lambda path, tensors, config: (save_with(path, tensors, config), os.truncate(path, 100_000)),
    "a pickle": lambda path, tensors, config: torch.save(tensors, path),
    "a folder": lambda path, tensors, config: path.mkdir(),
    "no metadata": lambda path, tensors, config: save_file(tensors, path),
    "no JSON": lambda path, tensors, config: save_with(path, tensors, "{"),
    "a list": lambda path, tensors, config: save_with(path, tensors, [1]),
    "no sizes": lambda path, tensors, config: save_with(path, tensors, {}),
    "words for sizes": lambda path, tensors, config: save_with(path, tensors, config | {"depth": "two"}),
    "more than sizes": lambda path, tensors, config: save_with(path, tensors, config | {"shell": "sh"}),
    "other shapes": lambda path, tensors, config: save_with(path, tensors, config | {"n_embd": 128}),
    "fewer layers": lambda path, tensors, config: save_with(path, tensors, config | {"depth": 1}),
    "other tensors": lambda path, tensors, config: save_with(path, {"a": torch.zeros(1)}, config),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_weights_of_another_model_or_none_are_one_line_with_the_remedy(saved, tmp_path, monkeypatch, name):
    good = saved.folder / "model.safetensors"
    with safe_open(good, "pt") as file:
        config = json.loads(file.metadata()["config"])
    cpu = torch.device("cpu")
    monkeypatch.setattr(harness, "WEIGHTS", good)
    assert harness.load_weights(train.build_model, cpu, harness.GPU(None, 0.0)).config == train.Config(**config)
    monkeypatch.setattr(harness, "WEIGHTS", tmp_path / "model.safetensors")
    STRANGERS[name](harness.WEIGHTS, load_file(good), config)
    with pytest.raises(
        prepare.PrepareError, match=r"^model\.safetensors does not fit .*: run python train.py --save again$"
    ) as error:
        harness.load_weights(train.build_model, cpu, harness.GPU(None, 0.0))
    assert "\n" not in str(error.value)


def test_saved_weights_are_the_models_in_fp16(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "WEIGHTS", tmp_path / "model.safetensors")
    config = train.Config(2, 64, 32, 64, 16, 1, 2, 128, 512, 2, vocab_size=300)
    torch.manual_seed(0)
    model = train.build_model(config, torch.device("cpu"), harness.GPU(None, 0.0))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    for block in model.blocks:
        block.experts.bias.copy_(torch.tensor([-1.0, 1.0]))  # without it tokens would find other experts
    train.make_optimizer(model)  # from now on, matrices are views, wide ones with another layout
    before = [p.clone() for p in model.parameters()]
    (tmp_path / "model.safetensors.yesterday").touch()
    harness.save_weights(model)
    assert all(map(torch.equal, before, model.parameters())), "saving changes nothing"
    loaded = harness.load_weights(train.build_model, torch.device("cpu"), harness.GPU(None, 0.0))
    assert not loaded.training
    tokens = torch.randint(300, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens), model(tokens), rtol=0, atol=0.02)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "model.safetensors.yesterday"}


def test_garbage_in_place_of_the_weights_ends_the_process_with_its_line_alone(clone):
    (clone.folder / "model.safetensors").write_bytes(b"\xff" * 1000)
    run = clone.run("--sample", "Once")
    assert run.ends_in_one_line() and run.out == "", run


# Several at once


def at_once(clone: Clone, count: int) -> None:
    """Official runs that save and log at the same moment."""
    edit = f"""
def together(real, **row):
    open(f"ready.{{os.getpid()}}", "w").close()
    while sum(name.startswith("ready.") for name in os.listdir()) < {count}:
        time.sleep(0.001)
    return real(**row)
replace(harness, "log_result", together)
"""
    runs = [run.wait() for run in [clone.start("--seed", str(seed), "--save", edit=edit) for seed in range(count)]]
    assert [(run.code, run.err) for run in runs] == [(0, "")] * count
    scores = [run.summary["val_bpb"] for run in runs]
    assert sorted(f"{row['val_bpb']:.6f}" for row in clone.rows) == sorted(scores) and len(set(scores)) == count
    best = 10.0
    for row, status in zip(clone.rows, clone.statuses, strict=True):
        assert status == ("keep" if row["val_bpb"] < best else "discard")
        best = min(best, row["val_bpb"])
    assert all(name.startswith("ready.") for name in clone.left_over - {"model.safetensors"})
    assert clone.run("--sample", "Once").code == 0  # one whole file of weights


def test_two_at_once_lose_no_row_and_leave_one_whole_file_of_weights(clone):
    at_once(clone, 2)


@pytest.mark.slow
def test_six_at_once_lose_no_row_and_leave_one_whole_file_of_weights(clone):
    at_once(clone, 6)
