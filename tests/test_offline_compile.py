"""Every Triton kernel of kernels.py compiles for GPUs that this machine lacks: ptxas accepts it, without spills, and no
tensor cores are needed.

    python tests/test_offline_compile.py --table       # the most that any variant takes, chip by kernel
    python tests/test_offline_compile.py 75 80         # each variant for these chips, a JSON line each
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent
# Shared memory that a block can have, in KiB (CUDA C++ Programming Guide, technical specifications)
SHARED = {70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
KEYS = ("registers", "spilled", "shared")  # bytes, but for the first
ALIGNED = {"logits_stride", "grads_stride"}  # integers known to be multiples of 16, as every pointer is

# kernel, types of its runtime arguments ("x": the dtype of the activations; None: not given), its constants, warps
TABLE = ["*x", "*fp32", "*i64", "*i64", "*x", "fp32", "fp32", "fp32", "*fp32", "*fp32", "i32"]


def arguments(grads: bool, lse: bool, softcap: bool) -> list[str | None]:
    """The row kernel's: a loss, with its lse or not, and gradients of the loss, or of loss and lse."""
    outputs = ["*x" if grads else None, "*fp32" if lse and not grads else None, "*fp32" if lse and grads else None]
    return ["*x", "*i64", "*fp32", "*fp32", *outputs, "i32", "i32", "i32", "fp32" if softcap else None, "i32"]


VARIANTS = [
    ("_cross_entropy_kernel", arguments(grads, lse, softcap), {"V": v, "BLOCK": block}, warps)
    for v, block, warps in [(1, 1, 1), (8192, 8192, 8), (16384, 16384, 16), (50257, 8192, 16), (128256, 16384, 16)]
    for softcap in (True, False)
    for grads in (True, False)
    for lse in (True, False)
    if grads or v == 8192
] + [
    ("_dequantize_kernel", ["*i32", "*fp32", "*fp32", "*x", "i32"], {"GROUP": 8, "BLOCK": 128}, 4),
    *(
        ("_row_adam_kernel", TABLE, {"C": c, "BLOCK": block}, 4)
        for c, block in ((128, 128), (384, 512), (512, 512), (768, 1024), (896, 1024))
    ),
]


def resources(compiled) -> dict[str, int]:
    """Registers, and bytes that spill and of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(sys.modules["triton"].__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    spilled = found["STACK"] + found["LOCAL"]
    return {"registers": found["REG"], "spilled": spilled, "shared": compiled.metadata.shared}


def compile_for(chips: list[int]) -> Iterator[dict]:
    """What the assembler reports about each variant. TRITON_INTERPRET must be unset: else there is no IR."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import kernels

    for sm, (name, types, constants, warps) in itertools.product(chips, VARIANTS):
        kernel, dtype = getattr(kernels, name), "bf16" if sm >= 80 else "fp16"
        fixed = constants | {"TANH_UNIT": dtype == "bf16"}
        given = dict(zip((arg for arg in kernel.arg_names if arg not in fixed), types, strict=True))
        fixed = {arg: fixed.get(arg) for arg in kernel.arg_names if given.get(arg) is None}
        signature = {arg: "constexpr" if arg in fixed else given[arg].replace("x", dtype) for arg in kernel.arg_names}
        aligned = [i for i, (arg, kind) in enumerate(signature.items()) if kind[0] == "*" or arg in ALIGNED]
        source = ASTSource(kernel, signature, fixed, {(i,): [["tt.divisibility", 16]] for i in aligned})
        target = GPUTarget("cuda", sm, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": warps})  # raises what ptxas raises
        dot = "tt.dot" in compiled.asm["ttir"] or "mma" in compiled.asm["ptx"]
        yield dict(kernel=name, types=types, sm=sm, dot=dot) | constants | resources(compiled)


def main() -> None:
    chips = [int(arg) for arg in sys.argv[1:] if arg.isdigit()] or list(SHARED)
    if "--table" not in sys.argv:
        for row in compile_for(chips):
            print(json.dumps(row), flush=True)
        return
    names = list(dict.fromkeys(name for name, *_ in VARIANTS))
    print("| sm | " + " | ".join(name.strip("_") for name in names) + " |\n" + "| --- " * (len(names) + 1) + "|")
    for sm in chips:
        most = {name: [0, 0, 0] for name in names}
        for row in compile_for([sm]):
            most[row["kernel"]] = [max(row[key], value) for key, value in zip(KEYS, most[row["kernel"]], strict=True)]
        print(f"| {sm} | " + " | ".join("{}, {}, {}".format(*values) for values in most.values()) + " |", flush=True)


@pytest.mark.parametrize("chips", [(75,), pytest.param(tuple(SHARED), marks=pytest.mark.slow)], ids=["T4", "all"])
def test_every_kernel_fits_into_each_chip_without_spills_and_tensor_cores(chips):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    child = subprocess.run([sys.executable, __file__, *map(str, chips)], env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    rows = [json.loads(line) for line in child.stdout.splitlines()]
    source = (ROOT / "kernels.py").read_text()
    assert {row["kernel"] for row in rows} == set(re.findall(r"^@(?:triton\.)?jit\ndef (\w+_kernel)\(", source, re.M))
    assert {row["sm"] for row in rows} == set(chips) and max(row["shared"] for row in rows) > 0
    for row in rows:
        # up to 64 bytes spill, by some versions of Triton, of vocabularies that do not fit into registers
        assert row["spilled"] <= 64 * (row.get("V", 0) > 16384), row
        assert row["shared"] <= 1024 * SHARED[row["sm"]] and not row["dot"], row


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
