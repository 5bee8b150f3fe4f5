"""Which GPU a run has or imitates, whether its kernels run there, and what an experiment needs to know about it."""

from __future__ import annotations

import os
import re
import shutil
from typing import NamedTuple

from harness.flash import flash_for, install, installed
from prepare import PrepareError


class GPU(NamedTuple):
    """What an experiment needs to know about a GPU."""

    capability: tuple[int, int] | None  # CUDA compute capability, None without a GPU: decides the numerics
    peak_flops: float  # dense 16-bit FLOP/s from the datasheet: decides the model size
    memory: int = 0  # bytes in total, free or not: limits the n-gram tables
    flash: str = ""  # the FlashAttention made for it, "fa3" or "fa4", where that is installed


# --gpu NAME: compute capability, multiprocessors, clock in MHz, share of the chip's rate, GiB of memory by the driver
GPUS = {
    "T4": ((7, 5), 40, 1590, 1, 14.6), "V100": ((7, 0), 80, 1530, 1, 15.8),
    "L4": ((8, 9), 58, 2040, 1, 22.0), "RTX3060": ((8, 6), 28, 1777, 1 / 2, 11.8),
    "RTX3090": ((8, 6), 82, 1695, 1 / 2, 23.7), "RTX4090": ((8, 9), 128, 2520, 1 / 2, 23.6),
    "A100": ((8, 0), 108, 1410, 1, 39.5), "H100": ((9, 0), 132, 1980, 1, 79.1),
    "H200": ((9, 0), 132, 1980, 1, 139.8), "B200": ((10, 0), 148, 1965, 1, 178.4),
}  # fmt: skip
# Dense FLOP per clock and multiprocessor with fp32 accumulation. Hopper and B200 datasheets assume less than the
# maximum clock: their FLOP/s / (multiprocessors * maximum clock). B300 as B200; 8.7 is Orin, 11.0 Thor, 12.1 GB10.
FLOPS = {
    (7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 1024, (8, 7): 2048, (8, 9): 1024, (9, 0): 3786, (10, 0): 7737,
    (10, 3): 7737, (11, 0): 8192, (12, 0): 1024, (12, 1): 1024,
}  # fmt: skip
SLOWED = {"GeForce": 1 / 2, "L40": 1 / 2, "H20": 0.253}  # share of the chip's rate, by name
MHZ = 1500  # of a GPU that does not report its clock


def peak_flops(capability: tuple[int, int], multiprocessors: int, mhz: float, share: float = 1) -> float:
    return FLOPS[known_capability(capability)] * multiprocessors * (mhz or MHZ) * 1e6 * share


def known_capability(capability: tuple[int, int]) -> tuple[int, int]:
    """The newest capability in FLOPS that is not newer than this one."""
    return max((known for known in FLOPS if known <= capability), default=min(FLOPS))


def named_gpu(name: str) -> GPU:
    """A GPU from the table GPUS, or "cpu". Raises PrepareError for other names."""
    if name == "cpu":
        return GPU(None, 0.0)
    if name not in GPUS:
        raise PrepareError(f"--gpu {name} is unknown: use one of {', '.join(GPUS)}, cpu")
    *compute, gib = GPUS[name]
    return GPU(compute[0], peak_flops(*compute), int(gib * 2**30))


def this_gpu() -> GPU:
    """The current CUDA device, else no GPU."""
    import torch

    if not torch.cuda.is_available():
        return named_gpu("cpu")
    p = torch.cuda.get_device_properties()
    capability = p.major, p.minor
    share = next((share for name, share in SLOWED.items() if name in p.name.replace("-", " ").split()), 1)
    peak = peak_flops(capability, p.multi_processor_count, p.clock_rate / 1000, share)
    flash = flash_for(capability)
    return GPU(capability, peak, p.total_memory, flash if installed(flash) else "")


def imitate(name: str | None = None) -> GPU:
    """The GPU that a run imitates (default: this one), with numerics that both support."""
    if name == "cpu":  # CUDA is not asked, which would take memory of a GPU
        return named_gpu(name)
    here = this_gpu()
    gpu = named_gpu(name) if name else here
    if here.capability is None:
        return gpu._replace(capability=None)
    capability = min(here.capability, gpu.capability)
    return gpu._replace(capability=capability, flash=here.flash if flash_for(capability) else "")


def gpu_name(name: str | None = None) -> str:
    """The gpu column: this GPU's name, and what makes its scores incomparable. name: a GPU that it imitates. A Hopper
    without FlashAttention-3, as a B200 without 4, is slower, so it counts as another GPU, unless it imitates one that
    never uses it."""
    import torch

    gpu, imitated = imitate(name), f" as {name}" if name else ""
    if this_gpu().capability is None:
        return f"cpu{imitated}"
    flash = flash_for(gpu.capability)
    slower = f", without {flash.upper()}" if flash and not gpu.flash else ""
    return torch.cuda.get_device_name() + slower + imitated


def pick_gpu(name: str | None = None) -> tuple:
    """The torch device of a run, and imitate(name). Prints what is unusual about the GPU; PrepareError if unusable."""
    import torch

    if torch.version.hip and torch.cuda.is_available() and name != "cpu":
        raise PrepareError("kernels.py needs an NVIDIA GPU: on an AMD GPU, use --gpu cpu")
    gpu = imitate(name)
    if not gpu.capability:
        return torch.device("cpu"), gpu
    check_kernels()
    p = torch.cuda.get_device_properties()
    capability, mhz = (p.major, p.minor), p.clock_rate / 1000
    if name is None and not (capability in FLOPS and mhz):
        here = "{} (compute capability {}.{}, {:.0f} MHz)".format(p.name, *capability, mhz)
        guess = "compute capability {}.{}, {:.0f} MHz".format(*known_capability(capability), mhz or MHZ)
        print(f"Unknown GPU {here}, taken for {guess}, {gpu.peak_flops / 1e12:.0f} TFLOP/s: --gpu NAME overrides")
    free, total = torch.cuda.mem_get_info()
    if free < total / 2:
        print(f"Others use {(total - free) / 2**30:.1f} of this GPU's {total / 2**30:.1f} GiB: memory may run out")
    if (flash := flash_for(gpu.capability)) and not gpu.flash:
        print(f"Running without FlashAttention-{flash[-1]}, which is faster: {install(flash)}")
    return torch.device("cuda"), gpu


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
