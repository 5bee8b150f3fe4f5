"""Inductor writes kernels for GPUs that this machine lacks, and ptxas accepts them: tests/bench/inductor_kernels.py."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not version("torch").startswith("2.13."), reason="pretending rests on PyTorch's internals, here on those of 2.13"
)
ROOT = Path(__file__).parent.parent

NORM = """
import torch, inductor_kernels as bench

def step(compile):
    x = torch.ones(4096, 768, dtype=torch.float16, requires_grad=True)
    compile(lambda x: torch.nn.functional.rms_norm(x, (768,)).square())(x).sum().backward()

bench.pretend("T4")
text = bench.capture(step)
assert "multi_processor_count=40, cc=75" in text, text
for sm in (75, 120):
    print(bench.report("norm", text, sm))
bench.SHARED[75] = -1
print(bench.report("norm", text, 75))
"""


def python(*args) -> list[str]:
    """Lines that a process of its own prints: it pretends until it ends."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests/bench")}
    child = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout.splitlines()


def test_a_norm_and_its_backward_fit_two_chips_and_a_misfit_is_named():
    *rows, again, forward, backward = python("-c", NORM)
    assert forward.startswith("triton_") and backward.startswith("triton_")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (*rows, again)]
    assert [row[:3] for row in rows] == [["norm", sm, "2"] for sm in ("75", "120", "75")]
    for *_, registers, spilled, shared, limit in rows[:2]:
        assert 0 < int(registers) <= 255
        assert spilled == "0"
        assert int(shared) <= int(limit)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_kernel_of_a_t4s_training_step_fits_and_none_spills():
    row = python(ROOT / "tests/bench/inductor_kernels.py", "T4")[-1]  # misfits would come after it
    assert row.startswith("| T4 |")
    assert int(row.split("|")[4]) > 30
