"""The pool of this machine: small commands in checkouts, on GPUs that are not there."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from small_corpus import ROOT

from night import checkout, pool
from night.pool import Ended, Local, News, Run, Started

EMPTY = subprocess.run(["tar", "-cT", "/dev/null"], capture_output=True, check=True).stdout


@pytest.fixture
def local(monkeypatch):
    """Makes a pool of two GPUs, which take two runs each."""
    monkeypatch.setattr(pool, "archive", lambda commit: EMPTY)
    monkeypatch.setattr(pool, "our_files", lambda locked: {})
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    local = Local(["3", "GPU-7"], 2, 60)
    yield local
    local.close()


def submit(local: Local, *programs: str, first: int = 0) -> list[Run]:
    runs = [Run(f"c{i}", "", 42) for i in range(first, first + len(programs))]
    for run, program in zip(runs, programs, strict=True):
        local.submit(run, ["-c", program], {}, 2)
    return runs


def until(local: Local, kind: type, count: int) -> list:
    """All events up to so many of a kind."""
    found, end = [], time.perf_counter() + 200
    while sum(isinstance(event, kind) for event in found) < count:
        assert time.perf_counter() < end, found
        found += local.events()
    return found


def test_runs_are_spread_over_gpus_which_they_see_alone_and_the_next_one_begins_when_one_has_ended(local):
    sees = "import os; print(*map(os.environ.get, ('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS')))"
    waits = f"{sees}; import time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    submit(local, *[waits] * 5)
    assert (local.gpus, local.slots) == (2, 4)
    begun = [event.where.partition(" GPU ")[2] for event in until(local, Started, 4)]
    assert Counter(begun[:2]) == Counter(begun[2:]) == {"3": 1, "GPU-7": 1} and not [*local.events()]
    gpu, work = local.active[Run("c1", "", 42)]
    (work.folder / "go").touch()
    *_, ended, started = until(local, Started, 1)
    assert isinstance(ended, Ended) and ended.run.commit == "c1" and ended.tail == [f"{gpu} 2"]
    assert started.where.endswith(f" GPU {gpu}") and started.run.commit == "c4"
    places = {name: [work for place, work in local.active.values() if place == name] for name in ("3", "GPU-7")}
    for work in (places["GPU-7"][0], *places["3"]):
        (work.folder / "go").touch()
        until(local, Ended, 1)
    submit(local, sees, first=9)
    assert until(local, Started, 1)[-1].where.endswith(" GPU 3"), "the emptier one"


def test_runs_that_share_the_cores_wait_without_spinning_unless_told_otherwise(local, monkeypatch):
    """A run that has all of them keeps PyTorch's choice."""
    for name in checkout.PASSIVE:
        monkeypatch.delenv(name, raising=False)

    def told(local: Local, per_gpu: int) -> list[str | None]:
        env = local.environment("", per_gpu)
        names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "TORCHINDUCTOR_COMPILE_THREADS")
        return [env.get(name) for name in names]

    assert told(local, 2) == ["2", "passive", "0", "2"]
    assert told(Local([], 2, 60), 1) == [None, None, None, "8"]
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert told(local, 1) == ["4", "active", "0", "4"]
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda _: range(256))
    assert told(Local([], 1, 60), 1)[-1] == "32"


@pytest.mark.parametrize("pause", [0, 60])
def test_what_a_run_writes_comes_as_it_is_written_and_at_the_end_its_rows_and_last_lines(local, monkeypatch, pause):
    monkeypatch.setattr(checkout, "NEWS", pause)
    lines = "import os, time\nos.makedirs('runs/a'); file = open('runs/a/log.txt', 'w')\n"
    lines += "for i in range(3):\n    print(i, file=file, flush=True)\n"
    lines += "    while not os.path.exists('go'): time.sleep(0.01)\n"
    lines += "open('results.tsv', 'a').write('a row')\nfor i in range(99): print('x' * 10**5)\n"
    lines += "os.remove('go'); print('end', sorted(os.listdir()))"
    (run,) = submit(local, lines)
    begun = until(local, Started if pause else News, 1)
    (local.active[run][1].folder / "go").touch()
    *events, end = begun + until(local, Ended, 1)
    news = [event for event in events if isinstance(event, News)]
    assert b"".join(event.text for event in news) == b"0\n1\n2\n"
    assert len(news) <= 2 if pause else len(news) > 1
    assert {(event.run, event.name) for event in news} == {(run, "log.txt")}
    assert end.rows == "a row" and len("".join(end.tail)) <= checkout.LOG_END
    assert end.tail[-1] == "end ['results.tsv', 'runs']" and not local.active


def test_a_run_may_delete_all_that_it_finds(local):
    submit(local, "import os, shutil; print('bye', flush=True); shutil.rmtree(os.getcwd())")
    *_, end = until(local, Ended, 1)
    assert (end.rows, end.tail, end.reason) == ("", ["bye"], "no row")


def test_a_run_that_is_stopped_ends_though_it_ignores_sigterm_and_its_folder_is_gone(local, monkeypatch):
    monkeypatch.setattr(checkout, "PATIENCE", 0.2)
    ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    (run,) = submit(local, ignores)
    until(local, Started, 1)
    _, work = local.active[run]
    while not work.output:
        time.sleep(0.01)
    work.stop()
    until(local, Ended, 1)
    assert work.process.returncode == -signal.SIGKILL and not work.folder.exists()


def test_a_run_that_nobody_can_end_gives_its_slot_back_after_its_time(local, monkeypatch):
    """As it waits for a dead disk: SIGKILL is without effect."""
    now = itertools.count(0, 50)
    monkeypatch.setattr(checkout.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(subprocess.Popen, "send_signal", lambda process, number: sent.append(number))
    sent = []
    submit(local, "import time; time.sleep(60)")
    *_, end = until(local, Ended, 1)
    assert sent == [signal.SIGTERM, signal.SIGKILL] and (end.rows, end.reason) == ("", "does not end")
    assert len(local.free) == local.slots


def test_a_full_disk_costs_a_run_and_git_that_fails_none(local, monkeypatch):
    (run,) = submit(local, "1")
    monkeypatch.setattr(local, "archive", lambda commit: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        [*local.events()]
    monkeypatch.setattr(local, "archive", lambda commit: b"no tar")
    assert [*local.events()] == [Ended(run, "", [], "CalledProcessError")] and len(local.free) == local.slots


def test_a_run_whose_pool_has_ended_before_it_began_ends_at_once(tmp_path):
    env = os.environ | {"AUTORESEARCH_RUN": '{"parent": 1}'}
    ended = subprocess.run([sys.executable, "-m", "night", "run"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 1 and not ended.stdout + ended.stderr
