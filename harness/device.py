"""The device that a run computes on: whether its kernels run there, and who else uses it."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from harness.flash import flash_for, install
from harness.gpu import FLOPS, MHZ, imitate, known_capability, this_gpu
from prepare import PrepareError


def pick_gpu(name: str | None = None) -> tuple:
    """The torch device, and imitate(name)."""
    import torch

    if torch.version.hip and torch.cuda.is_available() and name != "cpu":
        raise PrepareError("kernels.py needs an NVIDIA GPU: on an AMD GPU, use --gpu cpu")
    gpu = imitate(name)
    if gpu.capability:
        check_kernels()
        if name is None and (line := unknown_gpu(torch.cuda.get_device_properties())):
            print(line)
        free, total = torch.cuda.mem_get_info()
        if free < total / 2:
            print(f"Others use {(total - free) / 2**30:.1f} of this GPU's {total / 2**30:.1f} GiB: memory may run out")
    else:
        share_cpu()
    if (flash := flash_for(gpu.capability)) and not gpu.flash:
        print(f"Running without FlashAttention-{flash[-1]}, which is faster: {install(flash)}")
    return torch.device("cuda" if gpu.capability else "cpu"), gpu


def share_cpu() -> None:
    """Takes as many threads as cores are idle: OpenMP's threads spin while they wait for one that has no core."""
    import torch

    threads = torch.get_num_threads()
    if threads > 1 and "OMP_NUM_THREADS" not in os.environ and (free := max(1, round(idle_cores()))) < threads:
        torch.set_num_threads(free)
        print(f"Others use this CPU: {free} of {threads} threads (OMP_NUM_THREADS overrides)")


def idle_cores(seconds: float = 0.3) -> float:
    """How many of the cores that this process may use are idle, on average."""
    mine, start = {f"cpu{i}" for i in os.sched_getaffinity(0)}, time.perf_counter()

    def idle() -> int:
        fields = map(str.split, Path("/proc/stat").read_text().splitlines())
        return sum(int(field[4]) for field in fields if field[0] in mine)

    before = idle()
    time.sleep(seconds)
    return (idle() - before) / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - start)


def check_kernels() -> None:
    """Raises PrepareError unless this PyTorch has kernels for this GPU and Triton can compile its own."""
    import torch

    here = torch.cuda.get_device_capability()
    if here < (7, 0):
        raise PrepareError(f"compute capability {here} is below 7.0, which Triton needs: use --gpu cpu")
    built = re.findall(r"(sm|compute)_(\d+)", " ".join(torch.cuda.get_arch_list()))
    built = [(kind, divmod(int(number), 10)) for kind, number in built]
    if built and not any(a <= here and (kind == "compute" or a[0] == here[0]) for kind, a in built):
        # only wheels for CUDA 12.6 have Volta's
        get = "--index-url https://download.pytorch.org/whl/cu126" if here < (7, 5) else "(the newest)"
        fix = f"pip install --force-reinstall torch {get}, or use --gpu cpu"
        raise PrepareError(f"PyTorch {torch.__version__} has no kernels for compute capability {here}: {fix}")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise PrepareError("Triton needs a C compiler on a GPU: install gcc, or set CC")


def unknown_gpu(properties) -> str:
    """A line about what is assumed of a GPU that the tables do not know; "" if they know it."""
    capability, mhz = (properties.major, properties.minor), properties.clock_rate / 1000
    if capability in FLOPS and mhz:
        return ""
    guess = "compute capability {}.{}".format(*known_capability(capability)) + f", {mhz or MHZ:.0f} MHz"
    here = f"{properties.name} (compute capability {capability[0]}.{capability[1]}, {mhz:.0f} MHz)"
    return f"Unknown GPU {here}, taken for {guess}, {this_gpu().peak_flops / 1e12:.0f} TFLOP/s: --gpu NAME overrides"
