"""harness/: clock and log do what train.py and the night count on."""

import csv
import io
import itertools
import json
import math
import os
import re
import resource
import subprocess
import sys
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
    monkeypatch.setattr(harness.clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.fixture
def record(tmp_path, monkeypatch):
    """The folder that night gives a run."""
    monkeypatch.setenv("AUTORESEARCH_RUN", json.dumps({"folder": str(tmp_path)}))
    return tmp_path


LOSS = torch.tensor(2.0)


def test_clock_runs_from_start_to_stop_and_knows_its_pace_after_a_twentieth(now):
    clock = Clock()
    assert clock.elapsed() == clock.progress() == 0
    clock.start()
    now[0] += 14
    clock.advance(1096, LOSS, 1)
    assert clock.tokens_left() == math.inf
    now[0] += 61
    clock.advance(3000, LOSS, 1)
    assert clock.elapsed() == 75 and clock.progress() == 0.25 and (clock.tokens, clock.steps) == (4096, 2)
    assert clock.tokens_left() == 3 * 4096
    now[0] += 227
    assert clock.stop() == 302 and clock.progress() == 1.0
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


def test_clock_runs_where_stderr_is_closed(now, monkeypatch):
    for name in ("stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, None)  # as Python does after `2>&-`
    clock = Clock(tokens=10)
    clock.start()
    assert clock.running()
    now[0] += 1
    clock.advance(10, LOSS, 1)
    assert not clock.running() and clock.stop() == 1


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
    for steps in (1, 2):
        clock = Clock(tokens=10)
        clock.start()
        clock.advance(1, torch.tensor(loss), 1)
        with pytest.raises(FloatingPointError, match=rf"^{reason}\S* at step 1$"):
            clock.advance(1, LOSS, 1) if steps == 2 else clock.stop()
        clock.release()


@pytest.mark.parametrize("budget", [997, 1999, 10007])  # with 10 tokens per step
def test_each_200th_of_the_budget_has_a_line_with_the_mean_loss_since_the_line_before(now, record, capsys, budget):
    steps = budget // 10 + 3  # some are beyond the budget
    clock, losses = Clock(tokens=budget), torch.rand(steps) * 4
    clock.start()
    for step in range(1, steps + 1):
        now[0] += 0.5
        clock.advance(10, losses[step - 1], step, *([0.1 / step] if step % 2 else []))
    part = [min(200, 2000 * step // budget) for step in range(steps + 1)]
    ends = [step for step in range(1, steps + 1) if step == 1 or part[step] > part[step - 1]]
    header, *lines = (record / "curve.tsv").read_text().splitlines()
    assert header == "step\tseconds\ttokens\tloss\tlr" and len(lines) == len(ends) <= 201
    clock.stop()
    clock.stop()
    ends.append(steps)
    _, *lines = (record / "curve.tsv").read_text().splitlines()
    printed = re.findall(r"^step 0*(\d+) .* loss (\S+) \| 20 tok/s \| epoch (\d+) ", capsys.readouterr().out, re.M)
    for begin, end, line, numbers in zip([0, *ends], ends, lines, printed, strict=False):
        loss, lr = f"{losses[begin:end].double().mean():.4f}", f"{0.1 / end:.6g}" if end % 2 else ""
        assert line == f"{end}\t{end / 2:.2f}\t{10 * end}\t{loss}\t{lr}" and numbers == (str(end), loss, str(end))
    assert len(lines) == len(printed) == len(ends)


@pytest.mark.parametrize("folder", ["gone", "results.tsv/folder", "full"])
def test_a_folder_that_takes_no_record_costs_only_that(now, record, monkeypatch, folder):
    (record / "results.tsv").touch()
    monkeypatch.setenv("AUTORESEARCH_RUN", json.dumps({"folder": str(record / folder)}))
    if folder == "full":
        (record / "full").mkdir()
        (record / "full" / "curve.tsv").symlink_to("/dev/full")
    clock = Clock(tokens=10)
    clock.start()
    now[0] += 1
    clock.advance(10, LOSS, 1, 0.1)
    assert clock.stop() == 1


@pytest.mark.parametrize(
    "budget", [{"seconds": 0}, {"seconds": -1}, {"seconds": math.nan}, {"seconds": math.inf}, {"tokens": 0}]
)
def test_an_empty_or_endless_budget_is_refused(budget):
    with pytest.raises(PrepareError, match="must be finite and above 0"):
        Clock(**budget)


# What a crash row says

SHAPES = """import torch
def linear(x, weight):
    return torch.nn.functional.linear(x, weight)
def mlp(x, weight):
    return linear(x[..., 1:], weight)
compiled = torch.compile(mlp, backend="eager", fullgraph=True)
"""


def test_a_wrong_shape_in_a_compiled_function_is_reported_with_the_line_of_the_call(tmp_path):
    names: dict = {}
    exec(compile(SHAPES, tmp_path / "train.py", "exec"), names)
    (tmp_path / "train.py").write_text(SHAPES)
    with pytest.raises(RuntimeError) as error:
        names["compiled"](torch.ones(2, 4), torch.ones(4, 4))
    assert harness.crash_reason(error.value) == f"{type(error.value).__name__} line 3, called from line 5"


# Log


@pytest.fixture
def log(tmp_path):
    def log(val_bpb=1.0, path=tmp_path / "results.tsv", gpu="T4", dataset="d", **fields) -> str:
        fields = {"memory_gb": 2.5, "tokens_M": 39.34, "commit": "abcdef0123", "description": "try"} | fields
        return harness.log_result(val_bpb=val_bpb, gpu=gpu, dataset=dataset, path=path, **fields)

    log.path = tmp_path / "results.tsv"
    return log


HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\tgpu\tdataset\ttokens_M\n"
ROW = "abcdef0\t1.200000\t2.5\tkeep\tbefore\tT4\td\t9.0\n"


def test_keep_is_the_lowest_yet_on_the_same_gpu_and_dataset(log):
    assert log(1.5) == "keep"
    assert log(1.5) == "discard"  # a tie is no gain
    assert log(1.6) == "discard"
    assert log(1.4) == "keep"
    assert log(0.0, description="try [2]", reason="norms [nan, 1.0]") == "crash"
    assert log(1.3999999) == "discard"  # the same as written
    assert log(1.9, gpu="H100") == "keep"
    assert log(1.8, dataset="embedded-1") == "keep"
    log.path.write_text(log.path.read_text().replace("keep", "discard"))  # which does not make it worse
    assert log(1.45) == "discard" and log(1.39) == "keep"
    header, *rows = log.path.read_text().splitlines(keepends=True)
    assert header == HEADER
    assert rows[0] == "abcdef0\t1.500000\t2.5\tdiscard\ttry\tT4\td\t39.3\n"
    assert rows[4] == "abcdef0\t0.000000\t0.0\tcrash\ttry [2] [norms (nan, 1.0)]\tT4\td\t0.0\n"
    assert len(harness.read_results(log.path)) == 10


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


def test_without_git_the_row_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    for path in (str(tmp_path), os.environ["PATH"]):  # no git at all; git, but no repository
        monkeypatch.setenv("PATH", path)
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        harness.log_result(val_bpb=1.0, memory_gb=1.0, gpu="T4", dataset="d")
    assert [(row["commit"], row["description"]) for row in harness.read_results()] == [("0000000", "")] * 2


def test_rows_logged_at_once_are_all_there_and_one_is_best(log):
    code = (
        "import sys, harness\nfor i in range(25): harness.log_result(val_bpb=1 + (i * 7 + int(sys.argv[2])) % 26 / 100"
    )
    code += ", memory_gb=1, gpu='g', dataset='d', commit='c', description='x' * 500, path=sys.argv[1])"
    command = [sys.executable, "-c", code, str(log.path)]
    writers = [subprocess.Popen([*command, str(i)], cwd=ROOT) for i in range(4)]
    assert [writer.wait(600) for writer in writers] == [0] * 4
    assert len(log.path.read_text().splitlines()) == 101
    rows, best = harness.read_results(log.path), math.inf
    assert len(rows) == 100
    for row in rows:  # each status follows from the rows above it: reading and appending are one step
        assert row["status"] == ("keep" if row["val_bpb"] < best else "discard")
        best = min(best, row["val_bpb"])


# Log, under faults


@pytest.mark.parametrize(
    "content",
    [
        *("", HEADER, HEADER[:-1], HEADER + ROW, (HEADER + ROW)[:-1], (HEADER + ROW).replace("\n", "\r\n")),
        *(HEADER + ROW + garbage for garbage in ("half a row\t1.0", "\udcff\udcfe\0\0", "\n\n\n", "x" * 10**6)),
    ],
    ids=lambda content: repr(content[-20:]),
)
def test_the_row_comes_in_a_line_of_its_own_after_whatever_there_is(log, content):
    log.path.write_bytes(content.encode(errors="surrogateescape"))
    assert log(1.1, description="now") == "keep"
    text = log.path.read_bytes().decode(errors="surrogateescape")
    assert text.startswith(content or HEADER) and text.endswith("\nabcdef0\t1.100000\t2.5\tkeep\tnow\tT4\td\t39.3\n")
    assert [row["description"] for row in harness.read_results(log.path)] == ["before"] * (ROW[:-1] in content) + [
        "now"
    ]


@pytest.mark.parametrize(
    "content", [HEADER[: HEADER.index("\tgpu")] + "\n", ROW, "something else\n", "\n" + HEADER, "a folder", "gone"]
)
def test_a_file_that_refuses_the_row_is_left_alone_and_the_row_goes_to_stderr(log, capsys, content):
    path = log.path.parent / "gone" / "results.tsv" if content == "gone" else log.path
    if content == "a folder":
        path.mkdir()
    elif content != "gone":
        path.write_text(content)
    assert log(1.15, path=path) == "keep"
    assert path.is_dir() == (content == "a folder") and (not path.is_file() or path.read_text() == content)
    error = capsys.readouterr().err
    assert re.search(r"cannot take this row .*\nabcdef0\t1.150000\t2.5\tkeep\ttry\tT4\td\t39.3$", error, re.MULTILINE)


def test_a_row_on_another_dataset_is_written_though_nobody_reads_what_is_printed(log, monkeypatch):
    log(1.5)
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(os.fdopen(writer, "wb", 0), write_through=True))
    with pytest.raises(BrokenPipeError):
        print("here")
    assert log(1.9, dataset="embedded-1") == "keep" and len(harness.read_results(log.path)) == 2


def test_half_a_row_is_never_written(log):
    """The file may grow by 20 bytes only."""
    log.path.write_text(HEADER + ROW * 20)
    size, fields = log.path.stat().st_size, "val_bpb=1, memory_gb=1, gpu='T4', dataset='d', commit='c', description='d'"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, size + 20))

    command = [sys.executable, "-B", "-c", f"import harness; harness.log_result({fields}, path={str(log.path)!r})"]
    run = subprocess.run(command, cwd=ROOT, preexec_fn=limit, capture_output=True, text=True)
    assert run.returncode == 0 and "cannot take this row" in run.stderr, run.stderr
    assert log.path.read_text() == HEADER + ROW * 20


def test_a_lock_that_is_never_given_back_does_not_hang_the_log_and_it_says_so(log, monkeypatch, capsys):
    import fcntl

    log.path.write_text(HEADER)
    clock = itertools.count(0, 4)
    monkeypatch.setattr(prepare, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    with open(log.path) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert log() == "keep"
    assert len(harness.read_results(log.path)) == 1
    assert "writing this row without the lock" in capsys.readouterr().err and next(clock) > 60


def test_exported_git_variables_do_not_lead_to_another_repository(tmp_path, monkeypatch):
    """A git alias, a hook or an export sets them: our calls read and write the clone all the same."""
    other, here = tmp_path / "other", tmp_path / "here"
    for folder, subject in ((other, "theirs"), (here, "ours")):
        folder.mkdir()
        for command in ("init -q", f"-c user.name=a -c user.email=a@b commit -q --allow-empty -m {subject}"):
            subprocess.run(["git", *command.split()], cwd=folder, env=harness.clean_environment(), check=True)
    monkeypatch.setattr(harness, "RESULTS", here / "results.tsv")
    for name, value in dict(GIT_DIR=".git", GIT_INDEX_FILE=".git/index", GIT_WORK_TREE="").items():
        monkeypatch.setenv(name, str(other / value))
    assert harness.git_head()[1] == "ours"
    assert harness.run_git("log", "-1", "--format=%s").stdout == b"ours\n"
    assert not {"GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"} & harness.clean_environment().keys()
