"""Every Triton kernel of kernels.py compiles for GPUs that this machine lacks: ptxas accepts it, without spills, and no
tensor cores are needed.

    python tests/test_offline_compile.py --table       # the most that any variant takes, chip by kernel
    python tests/test_offline_compile.py 75 80         # each variant for these chips, a JSON line each
"""

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


def compile_variant(name: str, types: list, constants: dict, warps: int, capability: int, dtype: str) -> dict:
    """What the assembler reports about one variant. TRITON_INTERPRET must be unset: else there is no IR."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import kernels

    kernel = getattr(kernels, name)
    given = dict(zip((arg for arg in kernel.arg_names if arg not in constants), types, strict=True))
    constants = {arg: constants.get(arg) for arg in kernel.arg_names if given.get(arg) is None}
    signature = {arg: "constexpr" if arg in constants else given[arg].replace("x", dtype) for arg in kernel.arg_names}
    aligned = [i for i, (arg, kind) in enumerate(signature.items()) if kind[0] == "*" or arg in ALIGNED]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps})  # raises what ptxas raises
    return resources(compiled) | {
        "dot": "tt.dot" in compiled.asm["ttir"] or "mma" in compiled.asm["ptx"],
        "mufu": len(re.findall(r"\b(?:ex2|rsqrt|rcp|div|lg2|tanh)\.", compiled.asm["ptx"])),
    }


def compile_for(capabilities: list[int]) -> Iterator[dict]:
    for name, types, constants, warps in VARIANTS:
        for capability in capabilities:
            dtype = "bf16" if capability >= 80 else "fp16"
            own = {"TANH_UNIT": dtype == "bf16"} if name == "_cross_entropy_kernel" else {}
            variant = dict(kernel=name, types=" ".join(map(str, types)), sm=capability, dtype=dtype) | constants
            yield variant | compile_variant(name, types, constants | own, warps, capability, dtype)


def main() -> None:
    table, capabilities = "--table" in sys.argv, [int(arg) for arg in sys.argv[1:] if arg.isdigit()]
    rows = []
    for row in compile_for(capabilities or list(SHARED)):
        rows.append(row)
        if not table:
            print(json.dumps(row), flush=True)
    if table:
        names = list(dict.fromkeys(row["kernel"] for row in rows))
        print("| sm | " + " | ".join(name.strip("_") for name in names) + " |\n" + "| --- " * (len(names) + 1) + "|")
        for sm in dict.fromkeys(row["sm"] for row in rows):
            own = {name: [row for row in rows if (row["kernel"], row["sm"]) == (name, sm)] for name in names}
            most = [[max(row[key] for row in own[name]) for key in KEYS] for name in names]
            print(f"| {sm} | " + " | ".join("{}, {}, {}".format(*values) for values in most) + " |")


@pytest.fixture(scope="module", params=[(75,), pytest.param(tuple(SHARED), marks=pytest.mark.slow)], ids=["T4", "all"])
def rows(request) -> list[dict]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, *map(str, request.param)]
    child = subprocess.run(command, env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    rows = [json.loads(line) for line in child.stdout.splitlines()]
    assert {row["sm"] for row in rows} == set(request.param)
    return rows


def test_every_kernel_fits_into_each_chip_without_spills_and_tensor_cores(rows):
    source = (ROOT / "kernels.py").read_text()
    assert {row["kernel"] for row in rows} == set(re.findall(r"^@(?:triton\.)?jit\ndef (\w+_kernel)\(", source, re.M))
    # up to 64 bytes spill, by some versions of Triton, of vocabularies that do not fit into registers
    assert max(row["shared"] for row in rows) > 0
    for row in rows:
        assert row["spilled"] <= 64 * (row.get("V", 0) > 16384), row
        assert row["shared"] <= 1024 * SHARED[row["sm"]] and not row["dot"], row


@pytest.mark.parametrize("rows", [pytest.param(tuple(SHARED), marks=pytest.mark.slow)], indirect=True, ids=["all"])
def test_an_element_costs_two_transcendentals_with_softcap_and_one_without(rows):
    """What limits the row kernel besides memory: 8192 columns on 256 threads. The scalars of each row add a few."""
    for softcap in (True, False):
        for lse in (True, False):
            types = " ".join(map(str, arguments(True, lse, softcap)))
            (mufu,) = (r["mufu"] for r in rows if r.get("V") == 8192 and r["types"] == types and r["sm"] == 90)
            assert 1 + softcap <= mufu * 256 / 8192 < 1.5 + softcap


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
