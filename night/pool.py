"""Where runs are trained: `Local` is this machine; night/ray_pool.py is a cluster.

A pool trains up to `slots` runs at once: `submit` starts one, `ended` yields those that end within half a second,
`close` ends all. They end with this process in any case.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import harness
import prepare
from night.checkout import LOOK, Checkout, environment
from night.git import ROOT
from prepare import PrepareError

ANSWER = 300  # seconds for the GPUs to answer, including loading PyTorch from a slow disk
GPU_NAMES = """
import sys, torch, harness
for i in range(torch.cuda.device_count()):
    torch.cuda.set_device(i)
    print("gpu", harness.gpu_name(sys.argv[1]).partition(" as ")[0], sep="\\t")  # others may print, too
"""


class Run(NamedTuple):
    """base: the commit to beat, if there is one."""

    commit: str
    description: str
    seed: int = harness.SEED
    base: str = ""

    @property
    def name(self) -> tuple[str, int]:
        return self.commit, self.seed

    def __str__(self) -> str:
        return f"{self.commit} {self.description}" + f", seed {self.seed}" * (self.seed != harness.SEED)


class Ended(NamedTuple):
    run: Run
    rows: str  # what it wrote to results.tsv
    tail: list[str]  # last lines of its output
    reason: str  # what to log if there is no row
    record: dict[str, bytes]  # the files of its record, if it had no access to the clone's


def our_files(locked: bool) -> dict[str, bytes]:
    """What replaces a commit's files: this clone's night/ and dataset and, if locked, what scores a run."""
    names = ["night/*.py", *["harness/*.py", "prepare.py"] * locked]
    files = {str(path.relative_to(ROOT)): path.read_bytes() for name in names for path in ROOT.glob(name)}
    return files | {".dataset": prepare.current_dataset().name.encode()}


def gpu_names(imitates: str | None) -> list[str]:
    """This machine's GPUs, as in the gpu column of a run that imitates another one. Raises PrepareError."""
    command = [sys.executable, "-c", GPU_NAMES, imitates or ""]  # this process takes no GPU memory
    try:
        asked = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=ANSWER)
    except subprocess.TimeoutExpired:
        raise PrepareError(f"this machine's GPUs do not answer within {ANSWER} s: does nvidia-smi?") from None
    if asked.returncode:
        raise PrepareError(f"asking for this machine's GPUs failed with exit status {asked.returncode}, see above")
    return [line.removeprefix("gpu\t") for line in asked.stdout.splitlines() if line.startswith("gpu\t")]


def one_model(names: list[str]) -> str:
    """The name that all these GPUs have. Raises PrepareError if there are several."""
    if len({*names}) > 1:
        raise PrepareError(f"scores compare on GPUs of one model only, not on {', '.join(sorted({*names}))}")
    return names[0]


class Local:
    """This machine: a slot per GPU, times `per_gpu`; without a GPU, the CPU is one."""

    def __init__(self, gpus: list[str], per_gpu: int, limit: float, locked: bool = False):
        """gpus: their names in CUDA_VISIBLE_DEVICES. limit: seconds after which a run ends itself."""
        self.free, self.limit = (gpus or [""]) * per_gpu, limit
        self.slots, self.files = len(self.free), our_files(locked)
        self.active, self.failed = {}, []

    def submit(self, run: Run, packed: bytes, command: list[str], record: dict) -> None:
        """Starts a Python command in a checkout of `packed`, a commit's tar, on the GPU with the fewest runs."""
        gpu = max(self.free, key=self.free.count)
        env = environment(len(os.sched_getaffinity(0)) // self.slots) | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        try:
            self.active[run] = gpu, Checkout(packed, self.files, command, record, env, self.limit)
            self.free.remove(gpu)
        except (OSError, subprocess.SubprocessError) as error:  # disk full
            self.failed.append(Ended(run, "", [], type(error).__name__, {}))

    def ended(self) -> Iterator[Ended]:
        until = time.monotonic() + 0.5
        while not (over := [run for run, (_, work) in self.active.items() if not work.at_work()]):
            if self.failed or not self.active or time.monotonic() > until:
                break
            time.sleep(LOOK)
        while self.failed:
            yield self.failed.pop()
        for run in over:
            gpu, work = self.active.pop(run)
            self.free.append(gpu)
            yield Ended(run, *work.result())
            work.scratch.cleanup()

    def close(self) -> None:
        for _, work in self.active.values():
            work.stop()
        while self.active:
            list(self.ended())
