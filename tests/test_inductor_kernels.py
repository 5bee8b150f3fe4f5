"""Inductor writes kernels for GPUs that this machine lacks, and ptxas accepts them: tests/bench/inductor_kernels.py."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")
BENCH = Path(__file__).parent / "bench/inductor_kernels.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not version("torch").startswith("2.13."), reason="pretends by internals of PyTorch 2.13")
def test_every_kernel_of_a_t4s_training_step_fits_and_none_spills():
    child = subprocess.run([sys.executable, BENCH, "T4"], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    *_, row = child.stdout.splitlines()  # misfits would come after it
    _, gpu, _, sm, kernels, registers, spilled, shared, limit, _ = map(str.strip, row.split("|"))
    assert (gpu, sm, spilled) == ("T4", "75", "0")
    assert int(kernels) > 30 and 0 < int(registers) <= 255 and int(shared) <= int(limit)
