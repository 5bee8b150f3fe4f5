"""Do the Triton kernels that Inductor made of a training step fit other GPUs?

    TORCHINDUCTOR_CACHE_DIR=DIR python train.py --seconds 5 --gpu T4   # on any GPU
    python tests/bench/inductor_kernels.py DIR 75 80                   # anywhere: for sm_75 and sm_80 (default: all)

ptxas compiles each kernel with the warps and blocks that Inductor chose for the GPU of that run. Prints for each chip
the number of kernels, the most registers, spilled bytes and bytes of shared memory of one, and which ones do not fit.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from test_offline_compile import SHARED
from triton.backends.compiler import GPUTarget

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.S)


def kernels(folder: Path) -> dict[str, str]:
    """Source of each distinct kernel, by name: those of several graphs may share a name."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        for name, source in KERNEL.findall(file.read_text()):
            if source not in found.values():
                found[f"{name}.{len(found)}"] = source
    return found


def load(source: str, folder: str):
    """The CachingAutotuner that Inductor's source makes."""
    path = Path(folder, f"k{abs(hash(source))}.py")
    path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return next(value for value in vars(module).values() if hasattr(value, "triton_meta"))


def usage(kernel, sm: int) -> tuple[int, int, int]:
    """Registers, spilled bytes and shared memory. Raises what ptxas raises."""
    meta = kernel._create_compile_meta(kernel.configs[0]) | {"cc": sm}
    source = triton.compiler.ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = {"num_warps": meta["num_warps"], "num_stages": meta["num_stages"]}
    binary = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"], binary.metadata.shared


def main() -> None:
    folder, chips = Path(sys.argv[1]), [int(arg) for arg in sys.argv[2:]] or list(SHARED)
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    triton.runtime.driver.set_active(target)
    sources = kernels(folder)
    print(f"torch {torch.__version__}, triton {triton.__version__}, {len(sources)} kernels")
    print("| sm | kernels | registers | spilled | shared | limit |\n| --- | --- | --- | --- | --- | --- |")
    misfits = []
    with tempfile.TemporaryDirectory() as temporary:
        loaded = {name: load(source, temporary) for name, source in sources.items()}
        for sm in chips:
            rows = []
            for name, kernel in loaded.items():
                try:
                    rows.append(usage(kernel, sm))
                except Exception as error:
                    misfits.append(f"sm_{sm} {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
                    continue
                if rows[-1][2] > 1024 * SHARED[sm] or rows[-1][1]:
                    misfits.append(f"sm_{sm} {name}: {rows[-1]}")
            most = " | ".join(str(max(column)) for column in zip(*rows, strict=True)) if rows else "- | - | -"
            print(f"| {sm} | {len(rows)} | {most} | {1024 * SHARED[sm]} |", flush=True)
    print("\n".join(misfits) or "all fit, none spills")


if __name__ == "__main__":
    main()
