"""harness.py: clock and log do what train.py and the night count on."""

import csv
import gc
import itertools
import math
import os
import re
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_corpus import ROOT

import harness
import prepare
from harness import Clock
from prepare import PrepareError

# Clock


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time, settable."""
    now = [1000.0]
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


LOSS = torch.tensor(2.0)


def test_clock_runs_from_start_to_stop(now):
    clock = Clock()
    assert clock.elapsed() == clock.progress() == 0
    clock.start()
    assert not gc.isenabled(), "a collection would stall a step"
    now[0] += 75
    clock.advance(4096, LOSS, 1)
    assert clock.elapsed() == 75 and clock.progress() == 0.25 and (clock.tokens, clock.steps) == (4096, 1)
    assert clock.tokens_left() == 3 * 4096
    now[0] += 227
    assert clock.stop() == 302 and clock.progress() == 1.0 and gc.isenabled()
    now[0] += 100
    assert clock.stop() == clock.elapsed() == 302


def test_clock_counts_tokens_where_they_are_limited(now):
    clock = Clock(tokens=1000)
    clock.start()
    now[0] += 1e6
    clock.advance(250, LOSS, 1)
    assert clock.progress() == 0.25 and clock.tokens_left() == 750 and clock.running()
    clock.advance(750, LOSS, 1)
    assert clock.progress() == 1.0 and clock.tokens_left() == 0 and not clock.running()


def test_the_pace_is_not_known_in_the_first_twentieth_of_the_budget(now):
    clock = Clock()
    clock.start()
    now[0] += 14
    clock.advance(100, LOSS, 1)
    assert clock.tokens_left() == math.inf
    now[0] += 16
    assert clock.tokens_left() == pytest.approx(900)


@pytest.mark.parametrize(
    ("steps", "elapsed", "running"),
    [
        (0, 0, True),
        (100, 299.9, True),  # the next would end at 302.9
        (10, 270, True),  # at 297
        (10, 276, False),  # at 303.6
        (1000, 300, False),
        (2, 298, False),
    ],
)
def test_no_step_starts_that_would_probably_end_more_than_three_seconds_over_the_budget(now, steps, elapsed, running):
    clock = Clock()
    clock.start()
    now[0] += elapsed
    clock.steps = steps
    assert clock.running() is running


def test_a_step_that_begins_after_the_budget_is_refused(now):
    clock = Clock()
    clock.start()
    now[0] += 299
    clock.advance(1, LOSS, 1)
    now[0] += 60
    clock.advance(1, LOSS, 1)  # it began in time
    with pytest.raises(RuntimeError, match="359 s into a budget of 300 s"):
        clock.advance(1, LOSS, 1)


@pytest.mark.parametrize(("loss", "reason"), [(math.nan, "NaN"), (math.inf, "loss inf"), (1234.5, "loss 1234")])
def test_a_lost_loss_ends_the_run_a_step_later_or_at_its_end(now, loss, reason):
    bad = torch.tensor(loss)
    for steps in (1, 2):
        clock = Clock(tokens=10)
        clock.start()
        clock.advance(1, bad, 1)
        with pytest.raises(FloatingPointError, match=rf"^{reason}\S* at step 1$"):
            clock.advance(1, LOSS, 1) if steps == 2 else clock.stop()
        clock.release()


def test_the_printed_loss_is_the_mean_of_the_first_ten_and_then_moves_by_a_tenth():
    losses = harness.LossReader()
    for step in range(11):
        losses.add(torch.tensor(float(step)))  # which reads the one before
    assert (losses.count, losses.mean) == (10, pytest.approx(4.5))
    losses.read()
    losses.read()  # once each
    assert (losses.count, losses.mean) == (11, pytest.approx(4.5 + 0.1 * (10 - 4.5)))


@pytest.mark.parametrize("budget", [{"seconds": 0}, {"seconds": -1}, {"seconds": math.nan}, {"tokens": 0}])
def test_an_empty_budget_is_refused(budget):
    with pytest.raises(PrepareError, match="more than 0"):
        Clock(**budget)


# What a crash row says

SHAPES = """import torch
def linear(x, weight):
    return torch.nn.functional.linear(x, weight)
def mlp(x, weight):
    return linear(x[..., 1:], weight)
compiled = torch.compile(mlp, backend="eager", fullgraph=True)
"""


@pytest.mark.parametrize("function", ["mlp", "compiled"])
def test_a_wrong_shape_is_reported_with_the_line_of_the_call_compiled_or_not(tmp_path, function):
    names: dict = {}
    exec(compile(SHAPES, tmp_path / "train.py", "exec"), names)
    (tmp_path / "train.py").write_text(SHAPES)
    with pytest.raises(RuntimeError) as error:
        names[function](torch.ones(2, 4), torch.ones(4, 4))
    assert harness.crash_reason(error.value) == f"{type(error.value).__name__} line 3, called from line 5"


# Log


@pytest.fixture
def log(tmp_path):
    def log(val_bpb=1.0, path=tmp_path / "results.tsv", gpu="T4", dataset="climbmix-1", **fields) -> str:
        fields = {"memory_gb": 2.5, "tokens_M": 39.34, "commit": "abcdef0123", "description": "try"} | fields
        return harness.log_result(val_bpb=val_bpb, gpu=gpu, dataset=dataset, path=path, **fields)

    log.path = tmp_path / "results.tsv"
    return log


def test_keep_is_the_lowest_yet_on_the_same_gpu_and_dataset(log):
    assert log(1.5) == "keep"
    assert log(1.5) == "discard"  # a tie is no gain
    assert log(1.6) == "discard"
    assert log(1.4) == "keep"
    assert log(0.0, reason="out of memory") == "crash"
    assert log(math.nan) == "crash"
    assert log(1.3999999) == "discard"  # the same as written
    assert log(1.9, gpu="H100") == "keep"
    assert log(1.8, dataset="embedded-1") == "keep"
    assert log(1.39) == "keep"
    header, *rows = log.path.read_text().splitlines()
    assert header == "commit\tval_bpb\tmemory_gb\tstatus\tdescription\tgpu\tdataset\ttokens_M"
    assert rows[0] == "abcdef0\t1.500000\t2.5\tkeep\ttry\tT4\tclimbmix-1\t39.3"
    assert rows[4] == "abcdef0\t0.000000\t0.0\tcrash\ttry [out of memory]\tT4\tclimbmix-1\t0.0"
    assert rows[5] == "abcdef0\t0.000000\t0.0\tcrash\ttry [val_bpb nan]\tT4\tclimbmix-1\t0.0"
    assert [row["status"] for row in harness.read_results(log.path)].count("keep") == 5


def test_the_best_result_is_of_that_gpu_and_dataset_and_no_crash(log):
    assert harness.best_result("T4", "climbmix-1", log.path) is None
    log(1.5, description="first")
    log(1.3, gpu="H100")
    log(0.0, reason="killed")
    log(1.4, description="second")
    assert harness.best_result("T4", "climbmix-1", log.path)["description"] == "second"


def test_a_kept_row_that_was_edited_to_discard_still_is_a_figure_to_beat(log):
    log(1.2)
    log.path.write_text(log.path.read_text().replace("keep", "discard"))
    assert log(1.3) == "discard" and log(1.1) == "keep"


@pytest.mark.parametrize(
    "subject",
    ['tab\there "quoted', '"', "line\nbreak\r\n", "nul\0 \x1b[31mred", "é 你好 🙂", "\u2028\x85\ud800", "", "#1"],
)
def test_any_subject_makes_one_row_that_common_parsers_read(log, subject):
    log(1.5, description=subject, gpu=subject)
    log(1.4)
    text = log.path.read_bytes().decode()
    assert len(text.splitlines()) == 3 and text.endswith("\n")
    rows = list(csv.DictReader(text.splitlines(), delimiter="\t"))  # quotes as pandas treats them
    assert [row["val_bpb"] for row in rows] == ["1.500000", "1.400000"]
    assert all(None not in row and None not in row.values() for row in rows)
    assert len(harness.read_results(log.path)) == 2


def test_commit_and_description_come_from_git(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", 'wider "MLP"\tagain'], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    harness.log_result(val_bpb=1.0, memory_gb=1.0, gpu="T4", dataset="d")
    (row,) = harness.read_results()
    assert row["commit"] == head[:7] and row["description"] == "wider 'MLP' again"


def test_without_git_the_row_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    for path in (str(tmp_path), os.environ["PATH"]):  # no git at all; git, but no repository
        monkeypatch.setenv("PATH", path)
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        harness.log_result(val_bpb=1.0, memory_gb=1.0, gpu="T4", dataset="d")
    assert [(row["commit"], row["description"]) for row in harness.read_results()] == [("0000000", "")] * 2


def test_status_is_decided_by_one_at_a_time(tmp_path):
    deciding = []

    def row() -> tuple[str, str]:
        deciding.append(1)
        time.sleep(0.01)
        alone = len(deciding) == 1
        deciding.pop()
        return "keep", str(alone)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: harness.append_row(tmp_path / "results.tsv", row), range(12)))
    assert (tmp_path / "results.tsv").read_text().splitlines()[1:] == ["True"] * 12


def test_rows_logged_at_once_are_all_there_and_one_is_best(tmp_path):
    code = (
        "import sys, harness\nfor i in range(25): harness.log_result(val_bpb=1 + (i * 7 + int(sys.argv[2])) % 26 / 100"
    )
    code += ", memory_gb=1, gpu='g', dataset='d', commit='c', description='x' * 500, path=sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path / "results.tsv")]
    writers = [subprocess.Popen([*command, str(i)], cwd=ROOT) for i in range(4)]
    assert [writer.wait(600) for writer in writers] == [0] * 4
    assert len((tmp_path / "results.tsv").read_text().splitlines()) == 101
    rows, best = harness.read_results(tmp_path / "results.tsv"), math.inf
    assert len(rows) == 100
    for row in rows:  # each status follows from the rows above it: reading and appending are one step
        assert row["status"] == ("keep" if row["val_bpb"] < best else "discard")
        best = min(best, row["val_bpb"])


# Log, under faults

HEADER = "\t".join(harness.COLUMNS) + "\n"
ROW = "abcdef0\t1.200000\t2.5\tkeep\tbefore\tT4\td\t9.0\n"


def log_to(path: Path, val_bpb: float = 1.0) -> str:
    return harness.log_result(
        val_bpb=val_bpb, memory_gb=1.0, gpu="T4", dataset="d", commit="1234567", description="now", path=path
    )


@pytest.mark.parametrize(
    "content", [None, "", HEADER, HEADER[:-1], HEADER + ROW, (HEADER + ROW)[:-1], (HEADER + ROW).replace("\n", "\r\n")]
)
def test_the_row_comes_after_whatever_rows_there_are(tmp_path, content):
    path = tmp_path / "results.tsv"
    if content is not None:
        path.write_text(content, newline="")
    assert log_to(path) == "keep"
    lines = path.read_text().splitlines()
    assert lines[0] + "\n" == HEADER and lines[-1].startswith("1234567\t1.000000\t1.0\tkeep\tnow")
    assert len(lines) == len((content or HEADER).splitlines()) + 1


@pytest.mark.parametrize("garbage", [b"half a row\t1.0", b"\xff\xfe\0\0", b"\n\n\n", ("x" * 10**6).encode()])
def test_garbage_at_the_end_does_not_swallow_the_row(tmp_path, garbage):
    path = tmp_path / "results.tsv"
    path.write_bytes((HEADER + ROW).encode() + garbage)
    assert log_to(path, 1.3) == "discard"
    assert [row["description"] for row in harness.read_results(path)] == ["before", "now"]
    assert path.read_bytes().startswith((HEADER + ROW).encode() + garbage)


@pytest.mark.parametrize(
    "content", ["commit\tval_bpb\tmemory_gb\tstatus\tdescription\n", ROW, "something else\n", "\n" + HEADER]
)
def test_a_file_with_another_or_no_header_is_left_alone_and_the_row_goes_to_stderr(tmp_path, capsys, content):
    path = tmp_path / "results.tsv"
    path.write_text(content)
    log_to(path, 1.15)
    assert path.read_text() == content and [file.name for file in tmp_path.iterdir()] == ["results.tsv"]
    assert re.search(r"^1234567\t1.150000\t1.0\t\w+\tnow\tT4\td\t0.0$", capsys.readouterr().err, re.MULTILINE)


def test_a_file_that_cannot_be_opened_has_its_row_on_stderr(tmp_path, capsys):
    (tmp_path / "results.tsv").mkdir()
    assert log_to(tmp_path / "results.tsv") == "keep"
    assert "refuses this row" in (err := capsys.readouterr().err) and "1234567\t1.000000\t1.0\tkeep" in err


def test_a_folder_that_is_gone_leaves_the_row_on_stderr(tmp_path, capsys):
    assert log_to(tmp_path / "gone" / "results.tsv") == "keep"
    assert "1234567\t1.000000\t1.0\tkeep\tnow\tT4\td" in capsys.readouterr().err
    assert not (tmp_path / "gone").exists()


def test_a_read_only_file_has_its_row_on_stderr(tmpfs, capsys):
    (tmpfs / "results.tsv").write_text(HEADER + ROW)
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    assert log_to(tmpfs / "results.tsv", 1.3) == "discard"
    assert "1.300000\t1.0\tdiscard\tnow" in capsys.readouterr().err


def test_half_a_row_is_never_written(tmp_path):
    """The file may grow by 20 bytes only."""
    path = tmp_path / "results.tsv"
    path.write_text(HEADER + ROW * 20)
    size, fields = path.stat().st_size, "val_bpb=1, memory_gb=1, gpu='T4', dataset='d', commit='c', description='now'"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, size + 20))

    command = [sys.executable, "-B", "-c", f"import harness; harness.log_result({fields}, path={str(path)!r})"]
    run = subprocess.run(command, cwd=ROOT, preexec_fn=limit, capture_output=True, text=True)
    assert run.returncode == 0 and "refuses this row" in run.stderr, run.stderr
    assert path.read_text() == HEADER + ROW * 20


def test_a_lock_that_is_never_given_back_does_not_hang_the_log_and_it_says_so(tmp_path, monkeypatch, capsys):
    import fcntl

    path = tmp_path / "results.tsv"
    path.write_text(HEADER)
    clock = itertools.count(0, 4)
    monkeypatch.setattr(prepare, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    with open(path) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert log_to(path) == "keep"
    assert len(harness.read_results(path)) == 1
    assert "goes in without the lock" in capsys.readouterr().err and next(clock) > 60
