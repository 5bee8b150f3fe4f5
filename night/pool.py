"""Where runs are trained: `Local` is this machine, without Ray; night/ray_pool.py is a cluster.

A pool has `gpus` and `slots` (how many), and queues what is submitted. `events` yields what happens within half a
second. `close` ends all runs; they end with this process in any case.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import harness
import prepare
from night.checkout import LOOK, Checkout, environment
from night.git import ROOT, archive
from prepare import PrepareError

ANSWER = 300  # seconds for the GPUs to answer, including loading PyTorch from a slow disk
GPU_NAMES = """
import sys, torch, harness
for i in range(torch.cuda.device_count()):
    torch.cuda.set_device(i)
    print("gpu", harness.gpu_name(sys.argv[1]).partition(" as ")[0], sep="\\t")  # others may print, too
"""


class Run(NamedTuple):
    """One run. Commit and seed identify it in results.tsv."""

    commit: str
    description: str
    seed: int

    @property
    def name(self) -> tuple[str, int]:
        return self.commit, self.seed

    def __str__(self) -> str:
        return f"{self.commit} {label(self._asdict())}"


def label(run: dict) -> str:
    """Description and seed, unless it is the usual one. run: may be a row."""
    return run["description"] + f", seed {run['seed']}" * (run["seed"] != harness.SEED)


class Started(NamedTuple):
    run: Run
    where: str  # host and GPU


class News(NamedTuple):
    """New bytes of a file of the run's record."""

    run: Run
    name: str
    text: bytes


class Ended(NamedTuple):
    run: Run
    rows: str  # what it wrote to results.tsv
    tail: list[str]  # last lines of its output
    reason: str  # what to log if there is no row
    lost: bool = False  # with its worker or node


def our_files(locked: bool) -> dict[str, bytes]:
    """What replaces a commit's files: today's night/, this clone's dataset and, if locked, what scores a run."""
    names = ["night/*.py", *["harness/*.py", "prepare.py"] * locked]
    files = {str(path.relative_to(ROOT)): path.read_bytes() for name in names for path in ROOT.glob(name)}
    return files | {".dataset": prepare.current_dataset().name.encode()}


def gpu_names(imitates: str | None) -> list[str]:
    """This machine's GPUs, as in the gpu column of a run that imitates another one. Raises PrepareError.

    Another process asks for them, so that this one takes no GPU memory."""
    command = [sys.executable, "-c", GPU_NAMES, imitates or ""]
    try:
        asked = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=ANSWER)
    except subprocess.TimeoutExpired:
        raise PrepareError(f"this machine's GPUs do not answer within {ANSWER} s: does nvidia-smi?") from None
    if asked.returncode:
        raise PrepareError(f"asking for this machine's GPUs failed with exit status {asked.returncode}, see above")
    return [line.removeprefix("gpu\t") for line in asked.stdout.splitlines() if line.startswith("gpu\t")]


class Local:
    """This machine: a slot per GPU, times `per_gpu`; without a GPU, the CPU is one."""

    def __init__(self, gpus: list[str], per_gpu: int, limit: float, locked: bool = False):
        """gpus: their names in CUDA_VISIBLE_DEVICES. limit: seconds after which a run ends itself."""
        self.free, self.limit = (gpus or [""]) * per_gpu, limit
        self.gpus, self.slots = len(gpus) or 1, len(self.free)
        self.archive, self.files = functools.lru_cache(8)(archive), our_files(locked)
        self.queue, self.active = [], {}

    def submit(self, run: Run, command: list[str], record: dict, per_gpu: int) -> None:
        """Queues a Python command on the run's commit. per_gpu: how many runs share a GPU and its part of the cores."""
        self.queue.append((run, command, record, per_gpu))

    def events(self) -> Iterator[Started | News | Ended]:
        until = time.monotonic() + 0.5
        while self.queue or self.active:
            found = [*self.start(), *self.look()]
            yield from found
            if found or time.monotonic() > until:
                break
            time.sleep(LOOK)

    def start(self) -> Iterator[Started | Ended]:
        while self.queue and self.free:
            run, command, record, per_gpu = self.queue[0]
            packed = self.archive(run.commit)  # before it leaves the queue: git may fail for a while
            self.queue.pop(0)
            gpu = max(self.free, key=self.free.count)  # the one with the fewest runs
            env = self.environment(gpu, per_gpu)
            try:
                checkout = Checkout(packed, self.files, command, record, env, self.limit)
            except (OSError, subprocess.SubprocessError) as error:  # disk full
                yield Ended(run, "", [], type(error).__name__)
                continue
            self.free.remove(gpu)
            self.active[run] = gpu, checkout
            yield Started(run, os.uname().nodename + f" GPU {gpu}" * bool(gpu))

    def environment(self, gpu: str, per_gpu: int) -> dict[str, str]:
        usable = len(os.sched_getaffinity(0))
        env = environment(os.environ, max(1, usable // (self.gpus * per_gpu)), usable)
        return env | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})

    def look(self) -> Iterator[News | Ended]:
        for run, (gpu, checkout) in [*self.active.items()]:
            over = not checkout.at_work()
            for name, text in checkout.news(at_once=over):
                yield News(run, name, text)
            if over:
                del self.active[run]
                self.free.append(gpu)
                yield Ended(run, *checkout.result())
                checkout.scratch.cleanup()

    def close(self) -> None:
        self.queue.clear()
        for _, checkout in self.active.values():
            checkout.stop()
        while self.active:
            list(self.look())
            time.sleep(LOOK)
