"""Whole runs of train.py, in processes of their own and under real faults: each ends in a clear line and one row.

The model is tiny and the clock goes 2 s a look, of which a step takes a few, and stops at 301 s: so the five minutes
take a moment and are the same on every machine. A fault is an edit of train.py, a signal, or a file that goes away.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_corpus import FILES, ROOT, copy_files, mostly_slow, told
from warm_python import Warm

import harness
import prepare
import train

PRELUDE = """
import itertools, math, os, resource, shutil, signal, sys, time
from types import SimpleNamespace
import torch, harness, prepare, train
from harness import experiment, summary

sys.argv[0] = "train.py"
train.SIZES = ((0, train.Config(2, 64, 32, 64, 64, 8, 512, 512, eval_seq_len=128)),)

def clock_goes(seconds):
    looks = itertools.count()
    now = lambda: min(seconds * next(looks), 301.0)
    harness.clock.time = summary.time = SimpleNamespace(**vars(time) | {"perf_counter": now})

def replace(module, name, new):
    real = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: new(real, *args, **kwargs))

def at_step(number, fault):
    '''`fault` gets the loss of that step of the training and returns another, or does worse.'''
    steps = itertools.count(1)
    def step(real, *args):
        loss, epoch, tokens = real(*args)
        loss = fault(loss) if epoch and next(steps) == number else loss  # epoch 0 is the warm-up
        return loss, epoch, tokens
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
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS"):
    NO_GPU.pop(name, None)


class Run:
    """A run of train.py, begun or ended."""

    def __init__(self, start: Callable, out: int | None):
        self.files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = start(out or self.files[0].fileno(), self.files[1].fileno())
        self.code = None

    def wait(self) -> "Run":
        self.code = self.process.wait(timeout=250)
        give_up = time.monotonic() + 60
        with pytest.raises(ProcessLookupError):  # nobody is left of its session
            while time.monotonic() < give_up:
                os.killpg(self.process.pid, 0)
                time.sleep(0.01)
        return self

    @property
    def out(self) -> str:
        return self.read(0)

    @property
    def err(self) -> str:
        return self.read(1)

    def read(self, i: int) -> str:
        return os.pread(self.files[i].fileno(), 10**6, 0).decode()

    @property
    def summary(self) -> dict[str, str]:
        return dict(re.findall(r"^(\w+): +(.+)$", self.out, re.MULTILINE))

    def __repr__(self) -> str:
        return f"exit status {self.code}\n{self.out}\n{self.err}"


class Clone:
    """The programs in a folder of their own, where runs leave their rows and weights."""

    def __init__(self, folder: Path, cache: Path, warm: Warm):
        self.folder, self.cache, self.warm = folder, cache, warm
        copy_files(folder)
        self.git("init", "-q")
        self.git("add", ".")
        self.commit("baseline")

    def replace(self, old: str, new: str) -> None:
        """Edits train.py, which keeps its lines."""
        source = (self.folder / "train.py").read_text()
        assert source.count(old) == 1, old
        (self.folder / "train.py").write_text(source.replace(old, new))

    def git(self, *args: str) -> str:
        return subprocess.run(["git", *args], cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def commit(self, subject: str) -> None:
        self.git("commit", "-q", "--allow-empty", "-m", subject)

    def start(self, *args: str, edit: str = "", out: int | None = None) -> Run:
        """edit: code that changes train.py before the run; out: instead of into a file."""
        code = f"{PRELUDE}\n{edit}\nharness.run(train.train, train.build_model)"
        environment = {"AUTORESEARCH_CACHE": str(self.cache)}
        return Run(lambda *outputs: self.warm.start(code, list(args), self.folder, environment, *outputs), out)

    def run(self, *args: str, edit: str = "") -> Run:
        return self.start(*args, edit=edit).wait()

    def plain(self, *args: str) -> Run:
        """The command line as it is, with the real sizes and the real clock."""
        environment = NO_GPU | {"AUTORESEARCH_CACHE": str(self.cache), "OMP_NUM_THREADS": "2"}  # else by who is at work
        options = {"cwd": self.folder, "env": environment, "start_new_session": True}
        command = [sys.executable, "-B", "train.py", *args]
        return Run(lambda out, err: subprocess.Popen(command, stdout=out, stderr=err, **options), None).wait()

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
    def descriptions(self) -> list[str]:
        return [told(row) for row in self.rows]

    @property
    def left_over(self) -> set[str]:
        expected = {*(name.split("/")[0] for name in FILES), "results.tsv", ".dataset", "__pycache__", ".git"}
        return {path.name for path in self.folder.iterdir()} - expected


@pytest.fixture(scope="module")
def new_clone(prepared, tmp_path_factory) -> Callable[..., Clone]:
    warm = Warm(NO_GPU | {"OMP_NUM_THREADS": "1"})
    yield lambda cache=prepared: Clone(tmp_path_factory.mktemp("run") / "clone", cache, warm)
    warm.stop()


@pytest.fixture
def clone(new_clone) -> Clone:
    return new_clone()


@pytest.fixture(scope="module")
def night(new_clone) -> tuple[Clone, list[Run]]:
    """An experiment, a worse one, a better one."""
    clone = new_clone()
    runs = [clone.run()]
    clone.commit('learn\t"nothing"')
    runs.append(clone.run("--seed", "43", edit="train.MATRIX_LR = train.EMBEDDING_LR = 0"))
    clone.commit("take more steps 🚀")
    runs.append(clone.run(edit="clock_goes(1.4); sys.stdout.reconfigure(encoding='ascii', errors='strict')"))
    return clone, runs


# A good run


@pytest.mark.slow
def test_an_official_run_prints_what_the_documents_say_and_nothing_on_stderr(night, new_clone):
    clone, runs = night
    assert not clone.left_over, "weights are saved when asked for"
    long = new_clone().run(edit="clock_goes(0.4)")
    assert long.code == 0 and int(long.summary["num_steps"]) > 100, "what is looked at every 100 steps finds nothing"
    for run, row, seed in zip(runs, clone.rows, (42, 43, 42), strict=True):
        first, vocabulary, size, second, third, *_ = run.out.splitlines()
        assert run.err == "" and first == f"cpu, 300 s, {row['dataset']}, seed {seed}"
        assert re.match(r"The vocabulary has \d{3} tokens, not VOCAB_SIZE = 8192", vocabulary)
        assert size == "Size by SIZES[0], for 0 FLOP/s" and third.startswith("step 00001 ")
        assert re.match(r"0\.\d M parameters, torch\.float32, Config\(depth=2, .*total_batch_size=512", second)
        line = r"^step \d{5} \(\d+\.\d%\) \| loss \d\.\d{4} \| [\d,]+ tok/s \| epoch 1 \| \d+ s$"
        assert 20 < len(re.findall(line, run.out, re.MULTILINE)) < 203
        assert len(re.findall(r"^val_bpb:|^peak_vram_mb:", run.out, re.MULTILINE)) == 2  # autoresearch's grep
        theirs = "val_bpb training_seconds total_seconds peak_vram_mb mfu_percent total_tokens_M num_steps"
        assert [*run.summary][:9] == [*theirs.split(), "num_params_M", "depth"]
        assert 285 < float(run.summary["training_seconds"]) < 303
        text = run.out.partition("\nThe model writes:\n")[2]
        assert len(text) > 100 and all(re.match(" {4}.{,100}$", line) for line in text.splitlines()), "none like a key"


def test_rows_keep_the_best_so_far_and_name_the_commit(night):
    clone, runs = night
    assert clone.statuses == ["keep", "discard", "keep"]
    assert clone.descriptions == ["baseline", "learn 'nothing', seed 43", "take more steps 🚀"]
    assert [row["commit"] for row in clone.rows] == clone.git("log", "--reverse", "--abbrev=7", "--format=%h").split()
    assert runs[2].summary["description"] == "take more steps ?", "its terminal has no rocket"
    for row, run in zip(clone.rows, runs, strict=True):
        for key in ("status", "gpu", "budget", "dataset", "seed"):
            assert str(row[key]) == run.summary[key]
        assert row["val_bpb"] == float(run.summary["val_bpb"])
        assert f"{row['tokens_M']:.1f}" == run.summary["total_tokens_M"]


def test_nothing_stalls_a_step_to_collect_garbage_and_a_sample_that_fails_costs_no_run(clone):
    edit = "import gc\nat_step(3, lambda loss: fail(AssertionError('collects')) if gc.isenabled() else loss)"
    edit += "\nreplace(experiment, 'sample', lambda *_, **__: fail(ValueError('of an edited model')))"
    run = clone.run("--tokens", "4096", edit=edit)
    assert run.code == 0 and "val_bpb" in run.summary, run


LEAK = "replace(train.Attention, 'forward', lambda real, *args: (y := real(*args)) + y.roll(-1, 1))"


@pytest.mark.parametrize(("edit", "trained"), [(LEAK, False), (f"at_step(3, lambda loss: {LEAK} or loss)", True)])
def test_a_leak_is_a_crash_before_training_and_one_that_training_opens_after_it(clone, edit, trained):
    run = clone.run(edit=edit)
    assert run.code == 1 and run.err.count("\n") == 1, run
    assert ("| 296 s" in run.out) == ("tok/s" in run.out) == trained, run
    assert clone.statuses == ["crash"]
    assert all("sees the future: position" in text for text in (run.err, *clone.descriptions))


def test_a_false_loss_makes_no_better_score(night, clone):
    """The loss is halved where it is asked for without a mean."""
    halved = "lambda real, *args, reduction='mean': real(*args, reduction=reduction) / (1 + (reduction == 'none'))"
    clone.run(edit=f"replace(train.GPT, 'forward', {halved})")
    assert clone.rows[0]["val_bpb"] == night[0].rows[0]["val_bpb"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_in_two_plain_runs(new_clone):
    clones = [new_clone(), new_clone()]
    start = time.perf_counter()
    runs = [clone.plain("--tokens", "8192", "--seed", "7", "--save") for clone in clones]
    both = time.perf_counter() - start
    assert runs[0].summary["val_bpb"] == runs[1].summary["val_bpb"] and runs[0].summary["num_steps"] == "2", runs
    first, second = (load_file(clone.folder / "model.safetensors") for clone in clones)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    whole = 0.0
    for clone, run in zip(clones, runs, strict=True):
        assert (run.code, run.err) == (0, "") and clone.left_over == {"model.safetensors"}
        start, training, evaluation, total, rate, params = (
            float(run.summary[name])
            for name in "first_step_sec training_seconds eval_seconds total_seconds tokens_per_sec num_params_M".split()
        )
        whole += total
        assert start + training + evaluation == pytest.approx(total, abs=1) and min(start, training, evaluation) > 0
        assert rate * training == pytest.approx(8192, abs=0.05 * rate + training), "as far as a tenth of a second tells"
        assert params == pytest.approx(sum(tensor.numel() for tensor in first.values()) / 1e6, rel=0.01)
    assert min(both - 30, both / 2) < whole < both


# What night asks for, and what it finds


def asks(**record) -> str:
    return f"os.environ['AUTORESEARCH_RUN'] = {json.dumps(record)!r}\n"


def curve(folder: Path) -> list[list[str]]:
    return [line.split("\t") for line in (folder / "curve.tsv").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_leaves_its_curve_and_its_summary_in_the_folder_of_its_record(clone, tmp_path):
    clone.commit("1e3")
    run = clone.run("--tokens", "51200", edit=asks(folder=str(tmp_path)))
    (header, *lines), printed = curve(tmp_path), run.summary
    assert header == ["step", "seconds", "tokens", "loss", "lr"]
    assert lines[-1][0] == printed["num_steps"] and lines[-1][2] == str(512 * int(printed["num_steps"]))
    assert [loss for *_, loss, _ in lines] == re.findall(r"^step .* loss (\S+) ", run.out, re.MULTILINE)
    rates = [float(rate) for *_, rate in lines]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.2 * rates[0], "that of the schedule"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == list(printed) and summary["description"] == "1e3", "no number"
    for key, value in summary.items():
        text = key in ("numerics", "status", "commit", "description", "gpu", "budget", "dataset")
        assert value == (printed[key] if text else float(printed[key])), key


def test_a_run_that_crashes_unlogged_or_is_killed_leaves_the_curve_so_far(clone, tmp_path):
    asked = asks(folder=str(tmp_path))
    run = clone.run(edit=f"{asked}at_step(9, lambda loss: send(signal.SIGKILL))")
    assert run.code == -signal.SIGKILL and not (tmp_path / "summary.json").exists()
    assert [line[0] for line in curve(tmp_path)[1:]] == [str(step) for step in range(1, 8)]
    assert clone.run("--tokens", "51200", edit=f"{asked}at_step(9, lambda loss: loss * math.nan)").code == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [*summary.values()][:2] == ["crash", "NaN at step 9"] and summary["budget"] == "0.0512 M tokens"
    assert curve(tmp_path)[-1][0] == "8" and not clone.rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "place", "reason"),
    [
        ("--tokens 38600", "cpu, 0.0386 M tokens", "--tokens set by hand"),
        ("--gpu T4 --seconds 20", "cpu as T4, 20 s", "--seconds and --gpu set by hand"),
    ],
)
def test_a_run_with_another_budget_or_gpu_is_logged_only_if_night_asks_for_it(clone, args, place, reason):
    run = clone.run(*args.split(), edit="clock_goes(0.5)")
    assert (run.code, run.err) == (0, "") and 0 < float(run.summary["val_bpb"]) < 10
    assert run.summary["status"] == f"not logged: {reason} (python -m night wave logs it)", run
    assert run.out.startswith(f"{place}, corpus-"), run
    if "20" in args:
        assert 15 < float(run.summary["training_seconds"]) < 24
    assert not (clone.folder / "results.tsv").exists() and not clone.left_over
    run = clone.run(*args.split(), edit=asks(log=True))
    assert [(row["status"], f"{row['gpu']}, {row['budget']}") for row in clone.rows] == [("keep", place)]
    assert run.summary["status"] == "in results.tsv"


@pytest.mark.slow
def test_night_has_the_test_split_scored_in_the_run_and_logged_with_its_row(clone):
    edit = """
split_of = lambda real, model, tokenizer, B, T, split: 1.5 if split == "test" else real(model, tokenizer, B, T, split)
replace(summary, "evaluate_bpb", split_of)
"""
    run = clone.run(edit=asks(score_test=True) + edit)
    assert run.summary["test_bpb"] == "1.5" and run.summary["val_bpb"] != "1.5", run
    assert [(row["status"], row["test_bpb"]) for row in clone.rows] == [("keep", 1.5)]
    run = clone.run("--seconds", "20", edit=asks(score_test=False, log=False) + edit)
    assert "test_bpb" not in run.summary and len(clone.rows) == 1, "night has asked for neither"


@pytest.mark.parametrize("use", ["pass", "clock.advance(1, 2.0, 1)", "clock.start(); clock.advance(1, 2.0, 1)"])
def test_a_run_that_does_not_use_the_clock_as_it_must_is_a_crash_that_says_so(clone, use):
    """It never uses it, does not start it, does not stop it."""
    loop = f"""
def loop(clock, tokenizer, device, seed, gpu):
    {use}
    return train.build_model(train.SIZES[0][1], device, gpu), {{}}
train.train = loop"""
    run = clone.run(edit=loop)
    assert re.search("train.. must start, advance and stop the clock|start the clock before", run.err), run
    assert clone.statuses == ["crash"]


def test_a_wrapped_average_of_the_weights_is_scored_and_losses_may_be_numbers(clone):
    """What train() returns beside it changes no number of the harness."""
    edit = """
from torch.optim.swa_utils import AveragedModel
replace(train, 'train', lambda real, *args: (AveragedModel(real(*args)[0]), dict(val_bpb=0.1, mine=7)))
replace(harness.Clock, 'advance', lambda real, clock, tokens, loss, *more: real(clock, tokens, loss.item(), *more))"""
    run = clone.run("--tokens=2048", edit=edit)
    assert run.code == 0 and run.err == "" and float(run.summary["val_bpb"]) > 1 and run.summary["mine"] == "7", run


@pytest.mark.slow
def test_the_first_logged_run_gives_the_clone_its_dataset(clone):
    clone.run("--tokens=2048")
    assert not (clone.folder / ".dataset").exists(), "it was not logged"
    clone.run("--tokens=2048", edit=asks(log=True))
    assert prepare.read(clone.folder / ".dataset") == prepare.read(clone.cache / "current")


# Lost runs

LOOP = "loss, epoch, tokens = train_step(model, optimizer, scaler, loader)"


def line_of(text: str) -> int:
    (line,) = [i for i, line in enumerate((ROOT / "train.py").read_text().splitlines(), start=1) if text in line]
    return line


SCORE = "replace(summary, 'evaluate_bpb', lambda *_: {}) or loss"
FAULTS = {  # edit, last line on stderr (from its beginning: the only one), reason in the row
    "nan": ("loss * math.nan", "^train.py: NaN at step 5$", "NaN at step 5"),
    "host memory": ("torch.empty(2**60)", "memory", "out of memory"),
    "GPU lost": ("fail(torch.AcceleratorError('CUDA error'))", "CUDA error", f"AcceleratorError line {line_of(LOOP)}"),
    "cache gone": ("shutil.rmtree(prepare.cache_dir()) or loss", "^train.py: .*run.*prepare", ".*run.*prepare.*"),
    "score fails": (SCORE.format("fail(ValueError('no bytes'))"), "ValueError: no bytes", "ValueError"),
    "score is NaN": (SCORE.format("math.nan"), "^train.py: val_bpb is nan$", "val_bpb is nan"),
}


@pytest.mark.parametrize("name", mostly_slow(FAULTS, "nan", "score fails"))  # found by train.py, and by the harness
def test_a_lost_run_leaves_a_crash_row_and_its_reason_last_on_stderr(new_clone, prepared, tmp_path, name):
    fault, message, reason = FAULTS[name]
    clone = new_clone(shutil.copytree(prepared, tmp_path / "cache"))
    run = clone.run(edit=asks(folder=str(tmp_path)) + f"at_step(5, lambda loss: {fault})")
    lines = run.err.splitlines()
    assert run.code == 1 and re.search(message, lines[-1]), run
    assert len(lines) == 1 or (lines[0].startswith("Traceback") and message[0] != "^"), run
    assert "val_bpb:" not in run.out and not clone.left_over
    (row,) = clone.rows
    assert (row["status"], row["val_bpb"], row["memory_gb"], row["gpu"]) == ("crash", 0.0, 0.0, "cpu")
    assert re.fullmatch(reason, row["reason"]) and row["dataset"].startswith("corpus-")
    same = {key: row[key] for key in ("status", "commit", "description", "gpu", "dataset", "budget", "seed", "reason")}
    assert json.loads((tmp_path / "summary.json").read_text()) == same


MLP, CALL = "self.c_proj(leaky_relu_squared(self.c_fc(x)))", "x = x + self.mlp(h)"
LENGTH = "assert idx.size(1) <= len(self.cos)"
EDITS = {  # of train.py: old, new; the error and the lines, innermost first, that its row names
    "a name": (MLP, MLP.replace("c_fc", "c_fk"), "AttributeError", MLP, CALL),
    "sizes": (LENGTH, LENGTH.replace("<=", "<"), "AssertionError", LENGTH, "harness.warm_up("),
}


@pytest.mark.parametrize("name", mostly_slow(EDITS, "a name"))
def test_a_crash_row_names_the_edited_line_even_where_a_helper_raises(clone, name):
    old, new, error, line, caller = EDITS[name]
    clone.replace(old, new)
    clone.git("add", "train.py")  # which no commit holds yet
    run = clone.run()
    reason = f"{error} line {line_of(line)}, called from line {line_of(caller)}"
    assert run.code == 1 and clone.descriptions == [f"baseline (uncommitted: train.py) [{reason}]"]
    assert "val_bpb:" not in run.out and error in run.err.splitlines()[-1]


# Signals

SIGNALS = [signal.SIGINT, signal.SIGTERM]
PHASES = {
    "warm-up": ("harness, 'warm_up'", signal.SIGINT, "interrupted"),
    "training": ("train, 'train'", signal.SIGTERM, "killed"),
    "evaluation": ("summary, 'evaluate_bpb'", signal.SIGINT, "interrupted"),
}


@pytest.mark.parametrize("name", mostly_slow(PHASES, "training"))
def test_an_interrupt_in_any_phase_leaves_one_row_and_no_process(clone, name):
    """The run never leaves the phase, and is interrupted within half a second."""
    phase, number, reason = PHASES[name]
    run = clone.start(edit=f"forever({phase})")
    give_up = time.monotonic() + 300
    while "here\n" not in run.out:
        assert time.monotonic() < give_up, run
        time.sleep(0.01)
    time.sleep(random.Random(phase).uniform(0, 0.5))
    os.kill(run.process.pid, number)
    run.wait()
    assert run.code == 128 + number and clone.descriptions == [f"baseline [{reason}]"] and not clone.left_over, run


# `timeout` sends SIGTERM twice, impatient people Ctrl-C
WRITING = "replace(harness.log, 'append', lambda real, *args: (send(NUMBER), real(*args), send(NUMBER)))\n"
MOMENTS = {  # edit; description of the row; exit status
    "before the row": ("replace(summary, 'process_seconds', lambda real: send(15) or real())", "[killed]", 143),
    "while it is written": (WRITING, "", 0),
    "while that of an interrupt is": (
        f"{WRITING}replace(experiment, 'crash_reason', lambda real, error: send(NUMBER) or real(error))\n"
        "at_step(5, lambda loss: send(15) or loss)",
        *("[killed]", 143),
    ),
    "after the row": ("replace(experiment, 'sample', lambda *_, **__: send(NUMBER))", "", None),
}


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "number"), [*zip(MOMENTS, 2 * SIGNALS, strict=True)])
def test_a_signal_neither_loses_the_row_nor_doubles_it_and_after_it_just_ends_the_process(clone, moment, number):
    edit, reason, code = MOMENTS[moment]
    run = clone.run(edit=edit.replace("NUMBER", str(int(number))))
    assert clone.descriptions == [f"baseline {reason}".strip()], run
    assert run.code == (-number if code is None else code) and ("val_bpb" in run.summary) == (not reason)


@pytest.mark.slow
@pytest.mark.parametrize(("handler", "code", "reason"), [("SIG_DFL", 129, " [terminal closed]"), ("SIG_IGN", 0, "")])
def test_a_closed_terminal_ends_a_run_with_its_row_unless_nohup_shields_it(clone, handler, code, reason):
    run = clone.run(edit=f"signal.signal(signal.SIGHUP, signal.{handler})\nat_step(5, lambda loss: send(1) or loss)")
    assert run.code == code and clone.descriptions == [f"baseline{reason}"], run


# Files and readers that go away, a disk that is full


@pytest.mark.slow
def test_a_full_disk_or_a_kill_while_the_weights_are_written_leaves_those_of_before(clone):
    (clone.folder / "model.safetensors").write_bytes(b"those of before")
    run = clone.run("--save", edit="resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))")
    assert run.code == 0 and clone.statuses == ["keep"] and clone.left_over == {"model.safetensors"}, run
    assert run.err.count("\n") == 1 and "model.safetensors" in run.err
    half = "lambda real, tensors, path, *_: (open(path, 'wb').write(b'half'), send(signal.SIGKILL))"
    edit = f"import safetensors.torch\nreplace(safetensors.torch, 'save_file', {half})"
    run = clone.run("--save", edit=edit)
    assert run.code == -signal.SIGKILL and len(clone.left_over) == 2
    assert "val_bpb" in run.summary and len(clone.statuses) == 2, "both are safe before"
    assert (clone.folder / "model.safetensors").read_bytes() == b"those of before"
    assert clone.run("--save").code == 0 and clone.left_over == {"model.safetensors"}, "the half is gone"
    weights, source = ((clone.folder / name).stat().st_mode for name in ("model.safetensors", "results.tsv"))
    assert weights == source, "others may read them"


@pytest.mark.slow
def test_a_reader_that_goes_away_costs_no_run(clone):
    """`python train.py | head`."""
    edit = "import select\nreader = select.poll(); reader.register(1, 0)\n"  # its poll() waits until it is gone
    edit += "at_step(3, lambda loss: (print('here', flush=True), reader.poll(), loss)[-1])"
    ours, theirs = os.pipe()
    run = clone.start(edit=edit, out=theirs)
    os.close(theirs)
    with open(ours) as lines:
        assert "here\n" in lines
    run.wait()
    assert (run.code, run.err) == (0, "") and clone.statuses == ["keep"], run


# What cannot start

REFUSED = {  # arguments, the line
    "": r"run `python prepare\.py` first",
    "--gpu=T5": r"^train\.py: --gpu T5 is unknown: use one of T4.*cpu",
    "--sample=": r"^train\.py: no model\.safetensors yet: run python train\.py --save first",
    "--seconds=0": "the budget must be finite and above 0",
}


def test_what_cannot_start_is_one_line_with_its_remedy_and_no_row(clone, prepared, tmp_path):
    for args, line in REFUSED.items():
        clone.cache = prepared if args else tmp_path
        run = clone.run(*args.split())
        assert run.code == 1 and run.err.count("\n") == 1 and run.out == "" and re.search(line, run.err), run
    assert not (clone.folder / "results.tsv").exists() and not clone.left_over


# Saved weights


@pytest.fixture(scope="module")
def saved(new_clone) -> Clone:
    """Where a run has saved its weights."""
    clone = new_clone()
    assert clone.run("--save", "--tokens", "4096").code == 0
    return clone


@pytest.mark.slow
def test_a_sample_continues_its_text_with_the_saved_weights(saved):
    before = (saved.folder / "model.safetensors").stat().st_mtime_ns
    for text in ("größer 你好 <|reserved_0|>", ""):
        run = saved.run("--sample", text)
        assert (run.code, run.err) == (0, "") and run.out.startswith(text) and len(run.out) > len(text) + 20, run
    assert (saved.folder / "model.safetensors").stat().st_mtime_ns == before and not saved.rows
    saved.replace("SOFTCAP = 12.0 ", "SOFTCAP = 1.0 ")
    assert saved.run("--sample", "a").err == "train.py has changed since these weights were saved\n"


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


@pytest.fixture
def load(tokenizer):
    """A function that loads harness.WEIGHTS."""
    return lambda: harness.load_weights(train.build_model, torch.device("cpu"), harness.GPU(None, 0.0), tokenizer)


def test_weights_of_another_model_or_none_are_one_line_with_the_remedy(saved, load, tokenizer, tmp_path, monkeypatch):
    good = saved.folder / "model.safetensors"
    with safe_open(good, "pt") as file:
        config = json.loads(file.metadata()["config"])
    monkeypatch.setattr(harness, "WEIGHTS", good)
    assert load().config == train.Config(**config)
    monkeypatch.setattr(harness, "WEIGHTS", tmp_path / "model.safetensors")
    line, own = r"^model\.safetensors does not fit .*: run python train.py --save again$", tokenizer.fingerprint
    for more, fingerprint in (({"depth": "two"}, own), ({"shell": "sh"}, own), ({}, b"another's")):
        about = {"config": json.dumps(config | more), "tokenizer": fingerprint.hex()}
        save_file(load_file(good), harness.WEIGHTS, about)
        with pytest.raises(prepare.PrepareError, match=line):
            load()
    harness.WEIGHTS.write_bytes(b"\xff" * 1000)
    with pytest.raises(prepare.PrepareError, match=line):
        load()


def test_saved_weights_are_the_models_bit_for_bit_also_those_that_an_edit_ties_or_transposes(
    load, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(harness, "WEIGHTS", tmp_path / "model.safetensors")
    config = train.Config(2, 64, 32, 64, 16, 2, 128, 512, num_experts=2, vocab_size=300)
    torch.manual_seed(0)
    model = train.build_model(config, torch.device("cpu"), harness.GPU(None, 0.0))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    model.blocks[1].experts.bias.copy_(torch.tensor([-1.0001, 70_000.0]))  # neither is an fp16 number
    model.lm_head.weight = model.embed.weight
    mlp = model.blocks[0].mlp.c_proj.weight
    mlp.data = mlp.data.mT.contiguous().mT
    before = [p.clone() for p in model.parameters()]
    average = torch.optim.swa_utils.AveragedModel(model)
    average.config = model.config
    for wrapped in (average, torch.compile(model), model):
        harness.save_weights(wrapped, tokenizer)
        loaded = load()
        assert all(map(torch.equal, before, model.parameters())), "saving changes nothing"
        assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
    assert not loaded.training and {path.name for path in tmp_path.iterdir()} == {"model.safetensors"}
    tokens = torch.randint(300, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens), model(tokens))
