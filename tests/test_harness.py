"""harness/: clock and log do what train.py and the night count on."""

import csv
import fcntl
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
def started(now):
    def started(**budget) -> Clock:
        clock = Clock(**budget)
        clock.start()
        return clock

    return started


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


def test_clock_counts_tokens_where_they_are_limited(now, started):
    clock = started(tokens=1000)
    now[0] += 1e6
    clock.advance(250, LOSS, 1)
    assert clock.progress() == 0.25 and clock.tokens_left() == 750 and clock.running()
    clock.advance(750, LOSS, 1)
    assert clock.progress() == 1.0 and clock.tokens_left() == 0 and not clock.running()


# After 100 steps in 299.9 s, the next would end at 302.9 s; 10 in 270: at 297; 10 in 276: at 303.6
@pytest.mark.parametrize(("steps", "elapsed"), [(0, 0), (100, 299.9), (10, 270), (10, 276), (1000, 300), (2, 298)])
def test_no_step_starts_that_would_probably_end_more_than_three_seconds_over_the_budget(now, started, steps, elapsed):
    clock = started()
    now[0] += elapsed
    clock.steps = steps
    assert clock.running() is ((steps, elapsed) in [(0, 0), (100, 299.9), (10, 270)])


def test_a_step_that_begins_after_the_budget_is_refused_and_so_is_an_empty_or_endless_budget(now, started):
    clock = started()
    for seconds in (299, 60):  # the second began in time
        now[0] += seconds
        clock.advance(1, LOSS, 1)
    with pytest.raises(RuntimeError, match="359 s into a budget of 300 s"):
        clock.advance(1, LOSS, 1)
    for budget in (dict(seconds=0), dict(seconds=-1), dict(seconds=math.nan), dict(seconds=math.inf), dict(tokens=0)):
        with pytest.raises(PrepareError, match="must be finite and above 0"):
            Clock(**budget)


@pytest.mark.parametrize(("loss", "reason"), [(math.nan, "NaN"), (1234.5, "loss 1234")])
@pytest.mark.parametrize("last", [True, False])
def test_a_lost_loss_ends_the_run_a_step_later_or_at_its_end(started, loss, reason, last):
    clock = started(tokens=10)
    clock.advance(1, torch.tensor(loss), 1)
    with pytest.raises(FloatingPointError, match=rf"^{reason}\S* at step 1$"):
        clock.stop() if last else clock.advance(1, LOSS, 1)


@pytest.mark.parametrize("budget", [997, 10007])  # with 10 tokens per step
def test_each_200th_of_the_budget_has_a_line_with_its_mean_loss(now, started, tmp_path, monkeypatch, capsys, budget):
    monkeypatch.setenv("AUTORESEARCH_RUN", json.dumps({"folder": str(tmp_path)}))
    steps = budget // 10 + 3  # some are beyond the budget
    clock, losses = started(tokens=budget), torch.rand(steps) * 4
    for step in range(1, steps + 1):
        now[0] += 0.5
        clock.advance(10, losses[step - 1], step, *([0.1 / step] if step % 2 else []))
    part = [min(200, 2000 * step // budget) for step in range(steps + 1)]
    ends = [step for step in range(1, steps + 1) if step == 1 or part[step] > part[step - 1]]
    header, *lines = (tmp_path / "curve.tsv").read_text().splitlines()
    assert header == "step\tseconds\ttokens\tloss\tlr" and len(lines) == len(ends) <= 201
    clock.stop()
    clock.stop()
    ends.append(steps)
    _, *lines = (tmp_path / "curve.tsv").read_text().splitlines()
    printed = re.findall(r"^step 0*(\d+) .* loss (\S+) \| 20 tok/s \| epoch (\d+) ", capsys.readouterr().out, re.M)
    for begin, end, line, numbers in zip([0, *ends], ends, lines, printed, strict=False):
        loss, lr = f"{losses[begin:end].double().mean():.4f}", f"{0.1 / end:.6g}" if end % 2 else ""
        assert line == f"{end}\t{end / 2:.2f}\t{10 * end}\t{loss}\t{lr}" and numbers == (str(end), loss, str(end))
    assert len(lines) == len(printed) == len(ends)


@pytest.mark.parametrize("folder", ["gone", "full"])
def test_a_folder_that_takes_no_record_costs_only_that(now, started, tmp_path, monkeypatch, folder):
    monkeypatch.setenv("AUTORESEARCH_RUN", json.dumps({"folder": str(tmp_path / folder)}))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "curve.tsv").symlink_to("/dev/full")
    clock = started(tokens=10)
    now[0] += 1
    clock.advance(10, LOSS, 1, 0.1)
    assert clock.stop() == 1


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
    def log(val_bpb=1.0, description="try", path=tmp_path / "results.tsv", gpu="T4", dataset="d", **fields) -> str:
        fields = {"memory_gb": 2.5, "tokens_M": 39.34, "commit": "abcdef0", "description": description} | fields
        return harness.log_result(val_bpb=val_bpb, gpu=gpu, dataset=dataset, path=path, **fields)

    log.path = tmp_path / "results.tsv"
    return log


def described(log) -> list[str]:
    return [row["description"] for row in harness.read_results(log.path)]


HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\tgpu\tdataset\tbudget\tseed\ttokens_M\ttest_bpb\treason\tby\n"
ROW = "abcdef0\t1.200000\t2.5\tkeep\tbefore\tT4\td\t300 s\t42\t9.0\t\t\trun\n"
NOW = "abcdef0\t1.100000\t2.5\tkeep\tnow\tT4\td\t300 s\t42\t39.3\t\t\trun\n"
EIGHT = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\tgpu\tdataset\ttokens_M\n"
FIVE = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"


def test_keep_is_the_lowest_yet_on_the_same_gpu_and_dataset_with_the_same_budget_and_seed(log):
    assert log(1.5) == "keep"
    assert log(1.5) == "discard"  # a tie is no gain
    assert log(1.4) == "keep"
    assert log(0.0, "try [2]", reason="norms [nan, 1.0]") == "crash"
    assert log(1.3999999) == "discard"  # the same as written
    assert log(1.9, gpu="H100") == "keep"
    assert log(1.8, dataset="embedded-1") == "keep"
    assert log(1.7, budget="60 s") == "keep"
    assert log(1.0, report=True) == "report" and log(1.399, report=True, reason="killed") == "report"
    assert log(1.41, seed=1) == "discard", "no score with that seed yet: the lowest counts"
    assert log(1.405, seed=1) == "keep", "it is lower than with that seed before"
    assert log(1.3, to_beat=1.2) == "discard" and log(1.35, to_beat=9.0) == "keep"
    assert log(1.2, commit="abcdef0+") == "keep" and log(1.21, commit="abcdef0+") == "discard"
    assert log(1.39) == "discard" and log(1.25) == "keep", "a clean row need not beat that of uncommitted files"
    log.path.write_text(log.path.read_text().replace("keep", "discard"))  # which does not make it worse
    assert log(1.26) == "discard" and log(1.24) == "keep"
    header, *rows = log.path.read_text().splitlines(keepends=True)
    assert header == HEADER
    assert rows[0] == "abcdef0\t1.500000\t2.5\tdiscard\ttry\tT4\td\t300 s\t42\t39.3\t\t\trun\n"
    assert rows[3] == "abcdef0\t0.000000\t0.0\tcrash\ttry [2]\tT4\td\t300 s\t42\t0.0\t\tnorms [nan, 1.0]\trun\n"
    by = [row["by"] for row in harness.read_results(log.path)]
    assert by == ["run"] * 8 + ["night"] * 2 + ["run"] * 2 + ["night"] * 2 + ["run"] * 6


ODD = ['tab\there "quoted', '"', "line\nbreak\r\n", "nul\0 \x1b[31mred", "é 你好 🙂", "\u2028\x85\ud800", "", "#1"]


@pytest.mark.parametrize("subject", [*ODD, "LR 1 -> 2, seed 42", "y, test 1.234567", "z (train.py differs)"])
def test_any_subject_makes_one_row_that_common_parsers_read_and_each_value_is_read_as_it_was_written(log, subject):
    values = dict(description=subject, gpu=f"H200, without FA3 as T4{subject}", budget="5e-06 M tokens", seed=-1)
    values |= dict(commit="abcdef0+", test_bpb=1.234567)
    log(1.5, **values)
    log(0.0, **values | dict(reason="exit status 1, seed 7 [x]"))
    text = log.path.read_bytes().decode()
    assert len(text.splitlines()) == 3 and text.endswith("\n")
    theirs = list(csv.DictReader(text.splitlines(), delimiter="\t"))  # quotes as pandas treats them
    assert list(theirs[0])[:5] == FIVE.split(), "those that the notebook of karpathy/autoresearch takes"
    assert [row["val_bpb"] for row in theirs] == ["1.500000", "0.000000"]
    assert all(None not in row and None not in row.values() for row in theirs)
    scored, crashed = harness.read_results(log.path)
    values |= {key: harness.clean(values[key]) for key in ("description", "gpu")}
    assert scored.items() >= (values | dict(reason="")).items()
    assert crashed.items() >= (values | dict(test_bpb=None, reason="exit status 1, seed 7 [x]")).items()
    assert subject in ODD[:-2] or scored["description"] == subject


def test_a_budget_has_one_name():
    assert harness.budget_name() == harness.budget_name(300) == "300 s" and harness.budget_name(0.5) == "0.5 s"
    assert [harness.budget_name(None, n) for n in (62_400_000, 5)] == ["62.4 M tokens", "5e-06 M tokens"]
    assert harness.budget_name(None, 1_234_567_891) != harness.budget_name(None, 1_234_567_892)


def test_a_log_that_a_spreadsheet_has_saved_is_the_same_log(log):
    """Excel's text: a byte order mark, its line ends, quotes around fields with commas, decimal commas."""
    log(1.2, "LR 0.04 -> 0.03, wider", gpu="NVIDIA H200, without FA3", tokens_M=9.0)
    before = harness.read_results(log.path)
    text = re.sub(r"([^\t\n]*, [^\t\n]*)", r'"\1"', log.path.read_text())
    text = text.replace("1.200000", "1,2").replace("2.5", "2,5").replace("9.0", "9").replace("\n", "\r\n")
    log.path.write_bytes(text.encode("utf-8-sig"))
    assert harness.read_results(log.path) == before
    assert log(1.25, gpu="NVIDIA H200, without FA3") == "discard"


def test_without_git_the_row_is_written_all_the_same_and_says_why_it_has_no_commit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    for path in (str(tmp_path), os.environ["PATH"]):  # no git at all; git, but no repository
        monkeypatch.setenv("PATH", path)
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        harness.log_result(val_bpb=1.0, memory_gb=1.0, gpu="T4", dataset="d")
    assert [(row["commit"], row["description"]) for row in harness.read_results()] == [("0000000", "")] * 2
    missing, none = capsys.readouterr().err.splitlines()
    assert "no commit in this row: [Errno 2]" in missing and "no commit in this row: fatal: not a git rep" in none


# Log, of older columns

OLD_ROWS = {  # in eight columns: what it is
    "a\t1.200000\t2.5\tkeep\twide (train.py differs), seed 7, test 1.234567\tH200 as T4, 38.6 M tokens\td\t38.6": dict(
        commit="a+", description="wide (train.py differs)", seed=7, test_bpb=1.234567, gpu="H200 as T4",
        budget="38.6 M tokens", tokens_M=38.6, status="keep", reason="",
    ),
    "b\t0.000000\t0.0\tcrash\tidea [2], seed 0 [NaN (1) at step 5]\tH200, without FA3, 60 s\td\t0.0": dict(
        commit="b", description="idea [2]", seed=0, test_bpb=None, gpu="H200, without FA3", budget="60 s",
        status="crash", reason="NaN (1) at step 5",
    ),
    "c\t1.100000\t2.5\tdiscard\tidea [2], test 2\tcpu, 60 s, report\td\t1.0": dict(
        commit="c", description="idea [2], test 2", seed=42, test_bpb=None, gpu="cpu", budget="60 s", status="report",
    ),
    "f\t1.100000\t2.5\tdiscard\tidea [3]\tcpu\td\t1.0": dict(
        commit="f", description="idea [3]", seed=42, gpu="cpu", budget="300 s", status="discard", reason="",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("start", "end"), [("", "\n"), ("\ufeff", "\r\n")])
@pytest.mark.parametrize("half", ["", "e\t1.2", "\udcff\udcfe\0"])
@pytest.mark.parametrize("header", [FIVE, EIGHT])
def test_a_log_of_older_columns_is_read_and_moved_over_once_with_a_copy(log, capsys, header, half, start, end):
    lines = [header[:-1], *("\t".join(row.split("\t")[: header.count("\t") + 1]) for row in OLD_ROWS), ""]
    old = (start + end.join(lines) + half).encode("utf-8", "surrogateescape")
    log.path.write_bytes(old)
    before = harness.read_results(log.path)
    assert log.path.read_bytes() == old, "reading changes nothing"
    for row, expected in zip(before, OLD_ROWS.values(), strict=True):
        wanted = expected if header == EIGHT else dict(commit=row["commit"], gpu="", budget="300 s", seed=42)
        assert {key: row[key] for key in wanted} == wanted and row["by"] == ""
    assert log(1.0, "now") == "keep" and log(1.05, "now") == "discard"
    assert harness.read_results(log.path)[:-2] == before
    text = log.path.read_bytes().decode("utf-8", "surrogateescape")
    assert text.startswith(HEADER) and text.endswith("\trun\n") and half in text
    (copy,) = log.path.parent.glob("results.tsv.*")
    assert copy.read_bytes() == old and capsys.readouterr().err.count(copy.name) == 1


# Log, under faults


@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize(
    "content",
    [
        *("", HEADER[:-1], HEADER + ROW, (HEADER + ROW)[:-1], (HEADER + ROW).replace("\n", "\r\n")),
        *(HEADER + ROW + garbage for garbage in ("half a row\t1.0", "\udcff\udcfe\0\0", "\n\n\n", "x" * 10**6)),
        HEADER + ROW + ROW[:40],  # torn, with as many fields as an older log has
        HEADER + ROW + ROW.replace("1.200000", "nan"),
    ],
    ids=lambda content: repr(content[-20:]),
)
def test_the_row_comes_in_a_line_of_its_own_after_whatever_there_is(log, content, start):
    content = start + content if content else ""
    log.path.write_bytes(content.encode(errors="surrogateescape"))
    assert log(1.1, "now") == "keep"
    text = log.path.read_bytes().decode(errors="surrogateescape")
    assert text.startswith(content or HEADER) and text.endswith("\n" + NOW)
    assert described(log) == ["before"] * (ROW[:-1] in content) + ["now"]


def test_half_a_row_is_never_written(log):
    """The file may grow by 20 bytes only."""
    log.path.write_text(HEADER + ROW * 20)
    size, fields = log.path.stat().st_size, "val_bpb=1, memory_gb=1, gpu='T4', dataset='d', commit='c', description='d'"
    command = [sys.executable, "-B", "-c", f"import harness; harness.log_result({fields}, path={str(log.path)!r})"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, size + 20))  # noqa: E731
    run = subprocess.run(command, cwd=ROOT, preexec_fn=limit, capture_output=True, text=True)
    assert run.returncode == 0 and "cannot take this row" in run.stderr, run.stderr
    assert log.path.read_text() == HEADER + ROW * 20


def test_a_lock_that_is_never_given_back_does_not_hang_the_log_and_it_says_so(log, monkeypatch, capsys):
    log.path.write_text(HEADER)
    clock = itertools.count(0, 4)
    monkeypatch.setattr(prepare, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    with open(log.path) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        log()
    assert len(harness.read_results(log.path)) == 1
    assert "writing without the lock" in capsys.readouterr().err and next(clock) > 60


def test_exported_git_variables_do_not_lead_to_another_repository(tmp_path, monkeypatch):
    """A git alias, a hook or an export sets them: our calls read and write the clone all the same."""
    other, here = tmp_path / "other", tmp_path / "here"
    for folder, subject in ((other, "theirs"), (here, "ours")):
        folder.mkdir()
        for command in ("init -q", f"commit -q --allow-empty -m {subject}"):
            subprocess.run(["git", *command.split()], cwd=folder, env=harness.clean_environment(), check=True)
    monkeypatch.setattr(harness, "RESULTS", here / "results.tsv")
    local = harness.run_git("rev-parse", "--local-env-vars").stdout.decode().split()  # git's own list, of any version
    local = {*local, "GIT_NAMESPACE", "GIT_QUARANTINE_PATH"} - {"GIT_CONFIG_COUNT", "GIT_CONFIG_PARAMETERS"}
    for name in local:
        monkeypatch.setenv(name, str(other / ".git"))
    assert harness.git_head()[1] == "ours"
    harness.run_git("update-ref", "refs/heads/new", "HEAD")  # what GIT_QUARANTINE_PATH forbids, in a hook
    assert not local & harness.clean_environment().keys()


def test_a_log_is_edited_in_place(log):
    """In a container it may be mounted: another file cannot take its place."""
    log(1.2, "é" * 50), log(1.3)
    inode = log.path.stat().st_ino
    with harness.edit_log(log.path) as rows:
        rows[0]["status"] = "discard"
        del rows[1]
    assert log.path.read_text().count("\n") == 2 and harness.read_results(log.path)[0]["status"] == "discard"
    assert log.path.stat().st_ino == inode and [*log.path.parent.iterdir()] == [log.path]


# The journal


@pytest.fixture
def git(log):
    """A repository whose results.tsv is tracked, with its header; returns what runs git there."""

    def run(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=log.path.parent, check=True, capture_output=True, text=True).stdout

    log.path.write_text(HEADER)
    run("init", "-q", "-b", "main"), run("add", "."), run("commit", "-q", "-m", "start")
    return run


def test_a_row_is_on_disk_when_the_run_is_told_its_status(log, git, synced):
    """In the log and in its journal, whether it was appended or all was written anew."""
    journal = harness.journal.journal_of(log.path)
    log(1.3)
    log(1.2)
    assert dict(synced) == {path: path.read_bytes() for path in (log.path, journal)}
    with harness.edit_log(log.path) as rows:
        del rows[0]
    assert dict(synced)[journal] == journal.read_bytes() and log.path.read_bytes() in dict(synced).values()


@pytest.mark.parametrize("script", ["reset -q --hard", "stash -q", "checkout -q -f --detach HEAD"])
def test_rows_that_git_takes_from_the_log_are_put_back_in_their_order_and_it_says_so(log, git, capsys, script):
    log(1.3, "a"), log(1.2, "b"), log(1.25, "c")
    with harness.edit_log(log.path) as rows:
        rows[0] |= dict(status="discard", by="night")
        rows.append(rows.pop(1))
    text = log.path.read_text()
    git(*script.split())
    assert log.path.read_text() == HEADER and not capsys.readouterr().err
    assert described(log) == ["a", "c", "b"] and log.path.read_text() == text
    found = re.search("results.tsv has lost 3 rows, put back from (.*): ", capsys.readouterr().err)
    assert open(found[1]).read().startswith(HEADER), "a log by itself"
    git(*script.split())
    log(1.1, "d")  # who writes puts them back, too
    assert log.path.read_text().startswith(text) and described(log) == ["a", "c", "b", "d"]
    assert capsys.readouterr().err.count("has lost") == 1


def test_only_what_is_lost_is_put_back_with_a_persons_word_and_equal_rows_are_counted(log, git):
    for name in ("a", "a", "b"):
        log(1.3, name, commit=7 * name)
    git("commit", "-qam", "rows")
    log(1.2, "c")
    with harness.edit_log(log.path) as rows:
        rows[2] |= dict(status="keep", by="person")
    git("reset", "-q", "--hard")
    assert described(log) == ["a", "a", "b", "c"]
    words = [(row["status"], row["by"]) for row in harness.read_results(log.path)]
    assert words == [("keep", "run"), ("discard", "run"), ("keep", "person"), ("keep", "run")]
    log.path.write_text(log.path.read_text().replace("\ta\t", "\tedited by hand\t", 1))
    assert described(log) == ["edited by hand", "a", "b", "c"], "of the same run"
    lines = log.path.read_text().splitlines(keepends=True)
    log.path.write_text("".join(lines[:2] + lines[3:]))
    assert described(log).count("c") == 1 and len(described(log)) == 4


def test_a_log_that_was_moved_away_begins_anew_also_if_it_comes_back(log, git, capsys):
    log(1.3, "a")
    old = log.path.rename(log.path.with_name("results.tsv.before"))
    assert described(log) == []
    log(1.4, "b")
    assert described(log) == ["b"] and "results.tsv is gone: a new one begins" in capsys.readouterr().err
    git("checkout", "-q", ".")
    assert described(log) == ["b"], "and nothing of the night before"
    old.rename(log.path)
    assert described(log) == ["a"], "another log is not mixed with it"
    log(1.2, "c")
    git("checkout", "-q", ".")
    assert described(log) == ["a", "c"]


def test_each_worktree_has_a_journal_of_its_own_and_a_folder_within_a_repository_too(log, git, tmp_path):
    log(1.3, "a")
    git("worktree", "add", "-q", "other")
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path / "other", tmp_path / "sub"):
        path = folder / "results.tsv"
        path.write_text(HEADER)
        assert harness.read_results(path) == []
        log(1.2, "b", path)
        path.write_text(HEADER)
        assert [row["description"] for row in harness.read_results(path)] == ["b"]
    assert described(log) == ["a"]


def test_a_row_that_the_file_cannot_take_waits_in_the_journal_and_is_put_back(log, git, capsys):
    log(1.3, "a")
    text = log.path.read_text()
    log.path.write_text("my notes\n")
    assert log(1.2, "b") == "keep" and log(1.25, "c") == "discard"
    assert log.path.read_text() == "my notes\n" and "it waits in " in capsys.readouterr().err
    assert described(log) == ["a", "b", "c"], "for whoever reads"
    log.path.write_text(text)
    assert described(log) == ["a", "b", "c"] and log.path.read_text().count("\n") == 4


@pytest.mark.parametrize("fault", ["a folder", "half a line"])
def test_a_journal_that_cannot_be_written_or_read_costs_no_row(log, git, capsys, fault):
    log(1.4, "start"), log(1.3, "a")
    (journal,) = (log.path.parent / ".git").glob("*.journal")
    if fault == "half a line":
        journal.write_bytes(journal.read_bytes()[:-20] + b"\xff")
    else:
        journal.unlink()
        journal.mkdir()
    log(1.2, "b")
    assert described(log) == ["start", "a", "b"]
    if fault == "half a line":
        git("reset", "-q", "--hard")
        assert described(log) == ["start", "a", "b"]
    else:
        log.path.write_text("my notes\n")
        log(1.1)
        assert ", it is nowhere else:\n" in capsys.readouterr().err


def write_files(folder, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".py").write_text(text)


def test_a_run_of_files_that_are_not_committed_names_them_and_has_a_commit_of_its_own(log, git, monkeypatch):
    """Whichever of those that decide its number. A subject may contain anything."""
    monkeypatch.setattr(harness, "RESULTS", log.path)
    folder, subject = log.path.parent, "idea, seed 7 [x]"
    names = ("train", "prepare", "kernels", "harness__clock")
    write_files(folder, **dict.fromkeys(names, "1\n"), tool="1\n")
    git("add", "."), git("commit", "-qm", subject)
    commit = git("rev-parse", "HEAD")[:7]
    write_files(folder, tool="2\n")
    assert harness.git_head() == (commit, subject)
    for name in names:
        write_files(folder, **{name: "2\n"})
        assert harness.git_head() == (f"{commit}+", f"{subject} (uncommitted: {name.replace('__', '/')}.py)")
        write_files(folder, **{name: "1\n"})
    (folder / "harness" / "notes.txt").write_text("no code\n")
    (folder / "harness" / "._clock.py").write_text("# an editor's\n")
    git("config", "core.autocrlf", "true")
    (folder / "train.py").write_text("1\r\n")
    assert harness.git_head() == (commit, subject)
    write_files(folder, harness__new="# git has not seen it\n")
    (folder / ".git" / "info" / "exclude").write_text("new.py\n")
    assert harness.git_head() == (f"{commit}+", f"{subject} (uncommitted: harness/new.py)")


def test_modules_that_train_py_imports_and_a_copy_that_runs_are_told_from_the_commit(log, git, monkeypatch):
    """Other scripts, and folders in which a logger of that name leaves its files, are not."""
    monkeypatch.setattr(harness, "RESULTS", log.path)
    folder, description = log.path.parent, lambda: harness.git_head()[1]
    write_files(folder, train="import math, wandb\nfrom models.gpt import GPT  # a model\nimport harness\n")
    git("add", "."), git("commit", "-qm", "split")
    (folder / "wandb").mkdir()
    (folder / "wandb" / "log.txt").write_text("import plots\n")
    write_files(folder, plots="# no part of a run\n")
    assert description() == "split"
    write_files(folder, models__gpt="def build():\n    from constants import WIDTH\n")
    write_files(folder, constants="from models.gpt import build\nWIDTH = 1\n")
    assert description() == "split (uncommitted: constants.py, models/gpt.py)"
    git("add", "."), git("commit", "-qm", "split")
    write_files(folder, constants="WIDTH = 2\n", train_v2="")
    assert description() == "split (uncommitted: constants.py)"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(folder / "train_v2.py"), raising=False)
    notes = "(uncommitted: constants.py, train_v2.py) (ran train_v2.py) (changed while it started)"
    assert description() == f"split {notes}"
    git("add", "."), git("commit", "-qm", "copied")
    os.utime(folder / "train_v2.py", (0, 0))
    assert harness.git_head() == (git("rev-parse", "HEAD")[:7] + "+", "copied (ran train_v2.py)")
