"""Runs train.py under supervision: however it ends, it leaves a row, and its record in runs/."""

import ctypes
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import harness
import prepare
from night.fence import fence, held_out
from night.git import ROOT
from night.rows import run_name

RUNS = ROOT / "runs"  # <commit>-<seed>-<budget>/: log.txt, curve.tsv and summary.json of the last such run
LIMIT = prepare.TIME_BUDGET + 300  # seconds for a run, start-up and evaluation included
PATIENCE = 10  # seconds for a run to end on its own after a signal
LOG_BYTES, LOG_END = 2**20, 2**15  # a record keeps the first MiB and the last 32 KiB of a longer log
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
prctl = ctypes.CDLL(None).prctl


class ExpectedRow:
    """The row of a run that is about to start, whichever process will write it."""

    def __init__(self, args: Namespace):
        """Notes commit, description and dataset, which may change during the run."""
        self.args, self.dataset, self.record = args, prepare.dataset_id(), harness.night_record()
        self.needed = self.record.get("log") or not train_options(args)  # no row for a budget set by hand
        commit, description = harness.git_head()
        self.folder = Path(self.record.get("folder", os.devnull))
        if not self.folder.is_dir():  # no pool has made one that this machine can see
            with suppress(OSError):  # disk full: go on without a record
                self.folder = new_record(commit, args.seed, args.gpu, args.budget)
        self.record |= dict(commit=commit, description=description, folder=str(self.folder))
        self.copy, self.rows_before = os.memfd_create("row"), len(self.own(harness.read_results()))

    def own(self, log: list[dict]) -> list[dict]:
        return [row for row in log if run_name(row) == (self.record["commit"], self.args.seed)]

    def hand_over(self) -> None:
        """Tells log_result, here and in child processes, what to write, and where to put a copy of the row."""
        row = f"/proc/{os.getpid()}/fd/{self.copy}"
        os.environ["AUTORESEARCH_RUN"] = json.dumps(self.record | {"row": row})

    def ensure_row(self, reason: str, found: dict | None = None) -> None:
        """If the log has no row of the run, adds the one it has handed over, else what the referee has found, else a
        crash."""
        self.hand_over()
        if row := harness.parse_row(os.pread(self.copy, 2**16, 0).decode(errors="replace")):
            harness.add_row(row)
            return
        if self.args.locked and self.needed:
            with suppress(OSError, ValueError), harness.edit_log() as log:
                for row in self.own(log)[self.rows_before :]:  # train.py has written them itself
                    log.remove(row)
        if self.needed and len(self.own(harness.read_results())) <= self.rows_before:
            result = found or dict(val_bpb=0.0, memory_gb=0.0, reason=reason)
            gpu, args = harness.gpu_name(self.args.gpu), self.args
            harness.log_result(**result, gpu=gpu, dataset=self.dataset, budget=args.budget, seed=args.seed)


def run(args: Namespace) -> int:
    """Runs train.py until it ends or its time is up; returns its exit status.

    Two processes see to its row, and either may be killed: this one only waits; its child guards train.py.
    """
    if parent := harness.night_record().get("parent"):  # in a pool: end with the process that has started this one
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            return 1
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block SIGINT
    warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads: NumPy's are idle
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned grandchildren become children of this process
    row, front = ExpectedRow(args), os.getpid()
    if not (child := os.fork()):
        return guard_train(args, row, front)
    harness.handle_signals(lambda number, _: os.kill(child, number))
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it can still be sent signals until it is reaped
    harness.handle_signals(signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end_children()
    if code < 0:
        row.ensure_row("killed")
    return code if code >= 0 else 128 - code


def guard_train(args: Namespace, row: ExpectedRow, front: int) -> int:
    os.setsid()
    row.hand_over()
    options = dict(cwd=ROOT, env=harness.clean_environment() | {"PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL)
    command = [sys.executable, "train.py", *train_options(args, args.seed)]
    log = row.folder / "log.txt"
    harness.handle_signals(signal.SIG_DFL)  # until `guard` handles them: this process's end is a crash, too
    try:
        referee = lock(args, row, options) if args.locked else None
    except Exception as error:
        row.ensure_row(prepare.one_line(error))
        return 1
    code, ended_by, end = guard(command, args.limit, front, log, echo=True, **options)
    late = f"no evaluation within {args.limit / 60:.3g} min"
    reasons = {signal.SIGINT: "interrupted", signal.SIGTERM: "killed", signal.SIGALRM: late}
    reason = reasons.get(ended_by) or why(code, end.decode(errors="replace"))
    if referee:
        referee.theirs.close()  # the last copy: all processes of the run have ended
        referee.thread.join(PATIENCE)
        print(line := f"locked: {referee.times}; {referee.fenced}", flush=True)
        with suppress(OSError), open(log, "a") as file:
            file.write(f"{line}\n")
    row.ensure_row(reason, referee and referee.row)
    return code if code >= 0 else 128 - code


def lock(args: Namespace, row: ExpectedRow, options: dict):
    """Starts the thread that scores the run; train.py's options get a connection to it, and no held-out text."""
    from harness.remote import Referee

    splits = ["val", "test"] if row.record.get("score_test") else ["val"]
    referee = Referee(splits, args.gpu, math.inf if args.tokens else args.seconds or prepare.TIME_BUDGET)
    options["env"]["AUTORESEARCH_RUN"] = json.dumps(row.record | referee.record | {"dataset": row.dataset})
    options["pass_fds"] = [*referee.record.values()]
    referee.fenced = "val and test are out of its reach"
    try:
        options["begin"] = fence(held_out())
    except OSError as error:
        referee.fenced = f"not fenced: {error}"
    referee.thread.start()
    return referee


def guard(
    command: list[str], limit: float, parent: int, log: str | Path, echo: bool = False, begin=lambda: None, **options
) -> tuple[int, int, bytes]:
    """Runs a command until it ends, its time is up, a signal comes or `parent` ends; then kills all that it started.

    Returns its exit status, the signal that came (SIGALRM: time was up; 0: none), and the last LOG_END bytes of output.
    log: file for the first LOG_BYTES of it and the end. echo: print it, too. begin: called in the command's process.
    """
    end, signals = b"", []
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # not inherited by fork
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    options |= dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)

    def first() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        begin()

    child = subprocess.Popen(command, **options, preexec_fn=first)

    def stop(number: int, _=None) -> None:
        harness.handle_signals(signal.SIG_IGN)
        signals.append(number)
        child.send_signal(signal.SIGKILL if number == signal.SIGALRM else number)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def read_output() -> None:
        nonlocal end
        size = 0
        while text := child.stdout.read1():
            if echo:
                with suppress(OSError):  # disk full: go on reading, or the child would block on this pipe
                    os.write(1, text)
            with suppress(OSError), open(log, "ab") as file:
                file.write(text[: max(0, LOG_BYTES - size)])
            end, size = (end + text)[-LOG_END:], size + len(text)
        with suppress(OSError), open(log, "ab") as file:
            file.write(b"\n[...]\n" + end if size > LOG_BYTES else b"")

    harness.handle_signals(stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    if os.getppid() != parent:
        stop(signal.SIGTERM)
    reader = threading.Thread(target=read_output, daemon=True)
    reader.start()
    code = child.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    end_children()
    reader.join(PATIENCE)
    return code, signals[0] if signals else 0, end


def end_children() -> None:
    """Kills all descendants of this process: orphans become its children."""
    while pids := Path("/proc/thread-self/children").read_text().split():
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            if not os.waitpid(pid, os.WNOHANG)[0]:
                time.sleep(0.001)


def why(code: int, output: str) -> str:
    """Why a run ended that could not log it itself: `NameError line 31` at import time."""
    lines = re.findall(r'^ *File ".*train\.py", line (\d+)', output, re.M)
    errors = re.findall(r"^(?:\w+\.)*(\w*Error)\b", output, re.M)
    if code == 1 and lines and errors:
        return f"{errors[-1]} line {lines[-1]}"
    return {0: "no row", -signal.SIGKILL: "killed"}.get(code, f"exit status {code}")


def train_options(args: Namespace, seed: int = harness.SEED) -> list[str]:
    given = dict(seconds=args.seconds, tokens=args.tokens, gpu=args.gpu, seed=None if seed == harness.SEED else seed)
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def record_folder(commit: str, seed: int, gpu: str | None, budget: str) -> Path:
    """`runs/74ab947-42-300s` or `runs/74ab947-1-T4-62.4M`. gpu: that of --gpu; budget: as in the log."""
    return RUNS / "-".join(filter(None, [commit, str(seed), gpu, budget.removesuffix(" tokens").replace(" ", "")]))


def new_record(commit: str, seed: int, gpu: str | None, budget: str) -> Path:
    """An empty folder for a run, in place of what an earlier one has left."""
    folder = record_folder(commit, seed, gpu, budget)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def record_of(row: dict) -> Path | None:
    """The record of the last run that a row may stand for."""
    folder = record_folder(row["commit"], row["seed"], row["gpu"].partition(" as ")[2], row["budget"])
    same = summary(folder).get("dataset", row["dataset"]) == row["dataset"]  # a killed run has no summary
    return folder if folder.exists() and same else None


def summary(folder: Path) -> dict:
    """The summary of a run; {} if it has none."""
    with suppress(ValueError):
        return json.loads(prepare.read(folder / "summary.json"))
    return {}
