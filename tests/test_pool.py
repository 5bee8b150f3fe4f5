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
from night.pool import Ended, Local, Run

EMPTY = subprocess.run(["tar", "-cT", "/dev/null"], capture_output=True, check=True).stdout


numbers = itertools.count()  # of the runs' names: two of one name would be one run


@pytest.fixture
def local(monkeypatch):
    """A pool of two GPUs, which take two runs each."""
    monkeypatch.setattr(pool, "our_files", lambda locked: {})
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    local = Local(["3", "GPU-7"], 2, 60)
    yield local
    local.close()


def submit(local: Local, *programs: str) -> list[Run]:
    runs = [Run(f"c{next(numbers)}", "") for _ in programs]
    for run, program in zip(runs, programs, strict=True):
        local.submit(run, EMPTY, ["-c", program], {})
    return runs


def end(local: Local) -> Ended:
    """The next run that ends."""
    deadline = time.perf_counter() + 200
    while not (found := [*local.ended()]):
        assert time.perf_counter() < deadline
    (ended,) = found
    return ended


def test_runs_are_spread_over_gpus_which_they_see_alone(local):
    sees = "import os; print(*map(os.environ.get, ('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS')))"
    waits = f"{sees}; import time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    submit(local, *[waits] * 4)
    assert local.slots == 4 and not [*local.ended()] and not local.free
    gpus = [gpu for gpu, _ in local.active.values()]
    assert Counter(gpus[:2]) == Counter(gpus[2:]) == {"3": 1, "GPU-7": 1}
    places = {name: [work.folder for place, work in local.active.values() if place == name] for name in gpus}
    for gpu in ("GPU-7", "3", "3"):
        (places[gpu].pop() / "go").touch()
        assert end(local).tail == [f"{gpu} 2"]
    (run,) = submit(local, sees)
    assert local.active[run][0] == "3", "the emptier one"


def test_runs_that_share_the_cores_wait_without_spinning_unless_told_otherwise(local, monkeypatch):
    """A run that has all of them keeps PyTorch's choice."""
    for name in checkout.PASSIVE:
        monkeypatch.delenv(name, raising=False)

    def told(cores: int) -> list[str | None]:
        env = checkout.environment(cores)
        names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "TORCHINDUCTOR_COMPILE_THREADS")
        return [env.get(name) for name in names]

    assert told(2) == ["2", "passive", "0", "2"] and told(0)[0] == "1"
    assert told(8) == [None, None, None, "8"]
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert told(4) == ["4", "active", "0", "4"]
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda _: range(256))
    assert told(256)[-1] == "32"


def test_of_a_run_that_ends_its_rows_last_lines_and_its_own_record_are_left_unless_it_deletes_them(local):
    lines = "import os\nos.makedirs('runs/a'); print('curve', end='', file=open('runs/a/log.txt', 'w'))\n"
    lines += "open('results.tsv', 'a').write('a row')\nfor i in range(99): print('x' * 10**5)\n"
    submit(local, lines + "print('end', sorted(os.listdir()))")
    ended = end(local)
    assert (ended.rows, ended.record) == ("a row", {"log.txt": b"curve"})
    assert len("".join(ended.tail)) <= checkout.LOG_END
    assert ended.tail[-1] == "end ['results.tsv', 'runs']" and not local.active
    submit(local, "import os, shutil; print('bye', flush=True); shutil.rmtree(os.getcwd())")
    ended = end(local)
    assert (ended.rows, ended.tail, ended.reason) == ("", ["bye"], "no row")


def test_a_run_that_is_stopped_ends_though_it_ignores_sigterm_and_its_folder_is_gone(local):
    ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    (run,) = submit(local, ignores)
    _, work = local.active[run]
    while not work.output:
        time.sleep(0.01)
    work.stop()
    end(local)
    assert work.process.returncode == -signal.SIGKILL and not work.folder.exists()


def test_a_run_that_nobody_can_end_gives_its_slot_back_after_its_time(local, monkeypatch):
    """As it waits for a dead disk: SIGKILL is without effect."""
    now = itertools.count(0, 50)
    monkeypatch.setattr(checkout.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: killed.append(process))
    killed = []
    submit(local, "import time; time.sleep(60)")
    ended = end(local)
    assert len(killed) == 1 and (ended.rows, ended.reason) == ("", "does not end")
    assert len(local.free) == local.slots


def test_a_full_disk_costs_one_run(local):
    run = Run("c", "", 42)
    local.submit(run, b"no tar", ["-c", "1"], {})
    assert end(local) == Ended(run, "", [], "CalledProcessError", {}) and len(local.free) == local.slots


def test_a_run_whose_pool_has_ended_before_it_began_ends_at_once(tmp_path):
    env = os.environ | {"AUTORESEARCH_RUN": '{"parent": 1}'}
    ended = subprocess.run([sys.executable, "-m", "night", "run"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 1 and not ended.stdout + ended.stderr
