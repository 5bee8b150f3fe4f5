"""Asks for this machine's GPUs."""

import subprocess
import sys

from night.git import ROOT
from prepare import PrepareError

ANSWER = 300  # seconds for the GPUs to answer, including loading PyTorch from a slow disk
GPU_NAMES = """
import sys, torch, harness
for i in range(torch.cuda.device_count()):
    torch.cuda.set_device(i)
    print(harness.gpu_name(sys.argv[1]).partition(" as ")[0])
"""


def gpu_names(imitates: str | None) -> list[str]:
    """The name of each GPU in the gpu column of a run that imitates another one; none without a GPU."""
    return ask_gpus(GPU_NAMES, imitates or "")


def ask_gpus(code: str, *args: str) -> list[str]:
    """The lines that Python code prints about this machine's GPUs; in another process, so that this one takes no GPU
    memory. Raises PrepareError if it fails, or takes longer than ANSWER."""
    asked = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        output, _ = asked.communicate(timeout=ANSWER)
    except subprocess.TimeoutExpired:
        asked.kill()  # and no wait for its end: what a driver blocks cannot be killed
        raise PrepareError(f"this machine's GPUs do not answer within {ANSWER} s: does nvidia-smi?") from None
    if asked.returncode:
        raise PrepareError(f"asking for this machine's GPUs failed with exit status {asked.returncode}, see above")
    return output.splitlines()
