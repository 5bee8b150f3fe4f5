"""One run of train.py under supervision: it leaves a row, however it ends."""

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections import deque
from contextlib import suppress
from pathlib import Path

import harness
import prepare
from night.rows import TEST, rows_of

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 600  # seconds for a run, start and evaluation included
GRACE = 10  # seconds for a run to end by itself after a signal
IN_A_WAVE = "AUTORESEARCH_SCREENING"  # environment variable: prepare.py then logs a run whatever its budget


def run(args: argparse.Namespace) -> int:
    """Runs train.py until it ends or its time is up; returns its exit status.

    If it leaves no row, it gets a crash row, unless its budget was set by hand.
    This process may be killed at any time: a child in a session of its own guards train.py and leaves nothing of it.
    """
    prctl = ctypes.CDLL(None).prctl
    if IN_A_WAVE in os.environ:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with Ray's worker
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block SIGINT
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside NumPy's threads, which are idle
    front = os.getpid()
    if guard := os.fork():
        harness.handle_signals(lambda number, _: os.kill(guard, number))
        return os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])

    os.setsid()
    prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: processes that train.py leaves behind become children of this one
    prctl(1, signal.SIGTERM)  # when the process in front is killed
    head, dataset = harness.git_head(), prepare.dataset_id()
    before = len(rows_of(head[0]))
    os.environ["AUTORESEARCH_HEAD"] = "\t".join(head)  # of every row from here on, train.py's too
    stderr, reasons = deque(maxlen=100), []  # last lines of the script; why it was ended, if it was
    score = ["-c", f"from night.run import score; score({args.gpu!r})"]
    command = [sys.executable, *(score if args.score else ["train.py", *train_options(args, args.seed)])]
    options = dict(cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    script = subprocess.Popen(command, **options, preexec_fn=lambda: prctl(1, signal.SIGKILL))  # dies with this process

    def stop(number: int, _=None) -> None:
        harness.handle_signals(signal.SIG_IGN)
        late = f"no evaluation within {args.limit / 60:g} min"
        reasons.append({signal.SIGINT: "interrupted", signal.SIGTERM: "killed", signal.SIGALRM: late}[number])
        script.send_signal(signal.SIGKILL if number == signal.SIGALRM else number)
        signal.setitimer(signal.ITIMER_REAL, GRACE)

    def read_stderr() -> None:
        for line in script.stderr:
            stderr.append(line.decode(errors="replace"))
            with suppress(OSError):  # a full disk: go on reading, or the script would wait for this pipe
                os.write(2, line)

    harness.handle_signals(stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, args.limit)
    if os.getppid() != front:
        stop(signal.SIGTERM)
    reader = threading.Thread(target=read_stderr)
    reader.start()
    code = script.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    while pids := Path("/proc/thread-self/children").read_text().split():
        for pid in map(int, pids):  # whose children are ours next
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    reader.join()
    logged = not args.budget or IN_A_WAVE in os.environ
    if logged and len(rows_of(head[0])) <= before:
        reason = [*reasons, why(code, "".join(stderr))][0]
        row = dict(gpu=harness.gpu_name() + args.budget, dataset=dataset, reason=reason)
        harness.log_result(val_bpb=0.0, memory_gb=0.0, **row)
    return code if code >= 0 else 128 - code


def why(code: int, stderr: str) -> str:
    """The reason of an end that train.py could not log: `NameError line 31` while it was imported, say."""
    lines = re.findall(r'^ *File ".*train\.py", line (\d+)', stderr, re.M)
    errors = re.findall(r"^(?:\w+\.)*(\w*Error)\b", stderr, re.M)
    if code == 1 and lines and errors:
        return f"{errors[-1]} line {lines[-1]}"
    return {0: "no row", -signal.SIGKILL: "killed"}.get(code, f"exit status {code}")


def train_options(args: argparse.Namespace, seed: int | None) -> list[str]:
    given = {"seconds": args.seconds, "tokens": args.tokens, "gpu": args.gpu, "seed": seed}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def score(gpu: str | None) -> None:
    """Scores the test split with the weights that train.py has saved here, and logs its row again with that score."""
    import train

    device, numerics = harness.pick_gpu(gpu)
    model = harness.load_weights(train.build_model, device, numerics.capability)
    shape = model.config.device_batch_size, model.config.seq_len
    bpb = prepare.evaluate_bpb(model, prepare.Tokenizer.from_directory(), *shape, split="test")
    row = harness.read_results()[-1]
    del row["status"]
    harness.log_result(**row | {"description": f"{row['description']}{TEST}{bpb:.6f}"})
