"""Which GPU a run has or imitates, and what it needs to know about it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import NamedTuple

from prepare import PrepareError, one_line


class GPU(NamedTuple):
    """What an experiment needs to know about a GPU."""

    capability: tuple[int, int] | None  # CUDA compute capability, None without a GPU: decides the numerics
    peak_flops: float  # dense 16-bit FLOP/s from the datasheet: decides the model size
    memory: int = 0  # total bytes, not those that are free: limits the n-gram tables
    has_fa3: bool = False  # whether FlashAttention-3 runs here


# --gpu NAME: compute capability, multiprocessors, clock in MHz, GeForce or not, GiB of memory as the driver reports it
GPUS = {
    "T4": ((7, 5), 40, 1590, False, 14.6), "V100": ((7, 0), 80, 1530, False, 15.8),
    "L4": ((8, 9), 58, 2040, False, 22.0), "RTX3060": ((8, 6), 28, 1777, True, 11.8),
    "RTX3090": ((8, 6), 82, 1695, True, 23.7), "RTX4090": ((8, 9), 128, 2520, True, 23.6),
    "A100": ((8, 0), 108, 1410, False, 39.5), "H100": ((9, 0), 132, 1980, False, 79.1),
    "H200": ((9, 0), 132, 1980, False, 139.8), "B200": ((10, 0), 148, 1965, False, 178.4),
}  # fmt: skip
# Dense FLOP per clock and multiprocessor with fp32 accumulation; 1024 for all others. Hopper and B200 datasheets assume
# less than the maximum clock: their FLOP/s / (multiprocessors * maximum clock).
FLOPS = {(8, 0): 2048, (9, 0): 3786, (10, 0): 7737}


def peak_flops(capability: tuple[int, int], multiprocessors: int, mhz: float, geforce: bool) -> float:
    return FLOPS.get(capability, 1024) * multiprocessors * mhz * 1e6 / (1 + geforce)  # GeForce: half rate


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
    peak = peak_flops(capability, p.multi_processor_count, p.clock_rate / 1000, "GeForce" in p.name)
    return GPU(capability, peak, p.total_memory, capability == (9, 0) and fa3_installed())


def imitate(name: str | None = None) -> GPU:
    """The GPU that a run imitates (default: this one), with the numerics that both support."""
    here = this_gpu()
    gpu = named_gpu(name) if name else here
    if None in (here.capability, gpu.capability):
        return gpu._replace(capability=None)
    capability = min(here.capability, gpu.capability)
    return gpu._replace(capability=capability, has_fa3=here.has_fa3 and capability == (9, 0))


def pick_gpu(name: str | None = None) -> tuple:
    """The torch device, and imitate(name)."""
    import torch

    if torch.version.hip and torch.cuda.is_available() and name != "cpu":
        raise PrepareError("kernels.py needs an NVIDIA GPU: on an AMD GPU, use --gpu cpu")
    gpu = imitate(name)
    if gpu.capability == (9, 0) and not gpu.has_fa3:
        print(f"Running without FlashAttention-3, which is faster: {install_fa3()}")
    return torch.device("cuda" if gpu.capability else "cpu"), gpu


def gpu_name(setting: str = "") -> str:
    """For the gpu column, before a budget_name(). A Hopper without FlashAttention-3 is slower, so it counts as another
    GPU, unless it imitates one that never uses that."""
    import torch

    if this_gpu().capability is None:
        return "cpu"
    other = re.match(r" as (\w+)", setting)
    gpu = imitate(other and other[1])
    return torch.cuda.get_device_name() + ", without FA3" * (gpu.capability == (9, 0) and not gpu.has_fa3)


def fa3_installed() -> bool:
    return importlib.util.find_spec("flash_attn_interface") is not None


def install_fa3() -> str:
    """The command that installs FlashAttention-3."""
    import torch

    index = f"https://download.pytorch.org/whl/cu{torch.version.cuda.replace('.', '')}"
    return f"pip install flash-attn-3 --index-url {index}"


def load_fa3() -> Callable:
    """flash_attn_func from FlashAttention-3's official module. Raises PrepareError if the import fails."""
    try:
        from flash_attn_interface import flash_attn_func
    except Exception as error:
        fix = f"reinstall it ({install_fa3()}) or remove it (pip uninstall flash-attn-3)"
        raise PrepareError(f"flash_attn_interface cannot be imported ({one_line(error)}): {fix}") from error
    return flash_attn_func
