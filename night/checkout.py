"""A run in a temporary checkout. Ray sends this file to nodes that have no clone: it imports nothing of ours."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

SCRATCH = "t4-night-"  # prefix of temporary folders
LOG_END = 2**15  # bytes of a run's output that are kept, to show its last lines
LOOK = 0.05  # seconds between two checks whether it has ended
GRACE = 120  # seconds beyond its limit for a supervised run, to start and to end
PATIENCE = 30  # seconds for all of it to end once it is killed, including its guard's patience with train.py
# for GNU's OpenMP and for Intel's: a thread that waits would take a core from another run
PASSIVE = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


def environment(cores: int) -> dict[str, str]:
    """That of a run on so many cores. On all of them, PyTorch chooses the number of threads."""
    cores = max(1, cores)
    env = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(min(32, cores))}  # Inductor's limit
    return PASSIVE | {"OMP_NUM_THREADS": str(cores)} | env if cores < len(os.sched_getaffinity(0)) else env


class Checkout:
    """A Python command in a checkout of its own."""

    def __init__(self, archive: bytes, files: dict, command: list[str], record: dict, env: dict, limit: float):
        """archive: a tar; files: replace those in it; record: see harness.night_record; limit: in seconds, which the
        command keeps itself."""
        self.scratch = tempfile.TemporaryDirectory(prefix=SCRATCH, dir="/tmp", ignore_cleanup_errors=True)
        self.folder, self.output = Path(self.scratch.name), bytearray()
        self.until, self.killed = time.monotonic() + limit + GRACE, False
        subprocess.run(["tar", "-x", "--exclude=results.tsv", "-C", self.folder], input=archive, check=True)
        for name, content in files.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(content)
        (self.folder / "results.tsv").write_bytes(b"")  # instead of the archive's, which may be a link
        env = env | {"AUTORESEARCH_RUN": json.dumps(record | {"parent": os.getpid()})}
        options = dict(cwd=self.folder, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        self.process = subprocess.Popen([sys.executable, *command], **options, stdout=-1, stderr=-2)
        self.reader = threading.Thread(target=self.read_output, daemon=True)
        self.reader.start()

    def read_output(self) -> None:
        while text := self.process.stdout.read1():
            self.output.extend(text)
            del self.output[:-LOG_END]

    def stop(self) -> None:
        """Lets `at_work` end it."""
        self.until = 0.0

    def at_work(self) -> bool:
        """Whether the command, or what it started, still runs. After its limit, or `stop`, it is killed, upon which its
        guard ends the rest. What survives this, as it waits for a dead disk, is left alone."""
        if self.process.poll() is not None and not self.reader.is_alive():
            return False
        if time.monotonic() > self.until:
            if self.killed:
                return False
            self.process.kill()
            self.killed, self.until = True, time.monotonic() + PATIENCE
        return True

    def result(self) -> tuple[str, list[str], str, dict[str, bytes]]:
        """Its rows, the last lines of its output, what to log if there is no row, and its own record's files."""
        rows, files = "", {}
        with suppress(OSError):  # train.py may do anything to it
            rows = (self.folder / "results.tsv").read_text("utf-8", errors="replace")
        for path in self.folder.glob("runs/*/*.*"):
            with suppress(OSError):
                files[path.name] = path.read_bytes()
        reason = "does not end" if self.process.poll() is None else "no row"
        return rows, self.output.decode(errors="replace").splitlines()[-12:], reason, files
