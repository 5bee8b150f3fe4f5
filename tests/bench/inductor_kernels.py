"""Do the Triton kernels that Inductor makes of train.py's training step fit GPUs that this machine lacks?

    python tests/bench/inductor_kernels.py [T4 A100 ...]   # each GPU with the size that it gets
    python tests/bench/inductor_kernels.py DIR 75 80       # kernels that a real run left in TORCHINDUCTOR_CACHE_DIR=DIR

Inductor believes that it has the GPU named, and chooses warps and blocks for that; then ptxas compiles each kernel.
Prints the number of kernels, and the most registers, spilled bytes and bytes of shared memory of any; then the kernels
that spill or do not fit. GEMMs, attention and kernels.py are not Inductor's. The step is traced on CPU tensors without
data and moved to the GPU when Inductor gets it: autograd in a PyTorch without CUDA refuses tensors on a GPU.
"""

import contextlib
import copy
import ctypes
import functools
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}  # no workers, no old code
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_gpu
import torch
import triton
from test_offline_compile import SHARED, resources
from torch._decomp.decompositions import _fused_rms_norm, _fused_rms_norm_backward
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import GraphLowering, compile_fx, compile_fx_inner, make_boxed_func
from torch._subclasses import fake_tensor
from triton.backends.compiler import GPUTarget

import harness
import train

harness.GPUS["RTXPRO6000"] = (12, 0), 188, 2597, 1, 95
THREADS = {70: 2048, 75: 1024, 80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}  # per multiprocessor


def pretend(gpu: str) -> int:
    """Makes Inductor and Triton believe in this GPU, for the rest of the process. Returns its sm."""
    (major, minor), multiprocessors, *_ = harness.GPUS[gpu]
    sm = 10 * major + minor
    properties = SimpleNamespace(
        name=gpu, major=major, minor=minor, multi_processor_count=multiprocessors, warp_size=32,
        max_threads_per_multi_processor=THREADS[sm], max_threads_per_block=1024, regs_per_multiprocessor=65536,
    )  # fmt: skip
    for name, answer in dict(
        is_available=True, device_count=1, current_device=0, _exchange_device=0, _maybe_exchange_device=0,
        get_device_properties=properties, get_device_capability=(major, minor), get_device_name=gpu,
        get_rng_state=torch.get_rng_state(), set_rng_state=None, is_current_stream_capturing=False,
    ).items():  # fmt: skip
        setattr(torch.cuda, name, functools.partial(lambda answer, *_: answer, answer))
    CudaInterface.get_device_properties = staticmethod(torch.cuda.get_device_properties)
    torch.version.cuda = torch.version.cuda or "13.0"
    target = functools.partial(GPUTarget, "cuda", sm, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=target, get_current_device=lambda: 0))
    torch.accelerator.is_available = lambda: False  # Dynamo would ask the driver for a stream
    fake_tensor.FakeTensorMode.avoid_device_init = True  # there is nothing to initialize
    fake_tensor.init_gpu_context = lambda device: None
    # CUDA's device guard (entry 1 of DeviceType) becomes that of meta tensors (14), which does nothing
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[14]
    return sm


def capture(step: Callable) -> str:
    """After pretend(): what Inductor writes for all that step(compile) compiles and runs, on CPU tensors."""
    texts, cuda = [], torch.device("cuda", 0)

    class Written(BaseException): ...  # ends Inductor's work

    def stop(text: str) -> None:
        texts.append(text)
        raise Written

    def generate(graph, inputs, **options):
        moved = copy.deepcopy(graph)
        for node in (n for n in moved.graph.nodes if "device" in n.kwargs):
            node.update_kwarg("device", cuda)
        with inputs[0].fake_mode:
            inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=cuda) for x in inputs]
        with contextlib.suppress(Written):
            compile_fx_inner(moved, inputs, **options)
        return make_boxed_func(graph)

    harness.start_compiler()
    GraphLowering.save_output_code = staticmethod(stop)
    backend = functools.partial(compile_fx, inner_compile=generate)
    with fake_tensor.FakeTensorMode():
        step(functools.partial(torch.compile, backend=backend, fullgraph=True, dynamic=False))
    return "\n".join(texts)


class RMSNorm(torch.autograd.Function):
    """F.rms_norm as on CUDA: one op forward, one backward. On a CPU it is several."""

    @staticmethod
    def forward(ctx, x, shape):
        y, scale = _fused_rms_norm(x, shape, None, None)
        ctx.save_for_backward(x, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return _fused_rms_norm_backward(grad, x, x.shape[-1:], scale, None, [True, False])[0], None


def attend(q, k, v, mask, is_causal):
    """SDPA's first choice: cuDNN, which has no fp16 before sm_80."""
    kind = "efficient" if q.dtype == torch.float16 else "cudnn"
    return getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")(q, k, v, None, True, 0.0, is_causal)[0]


def training_step(gpu: harness.GPU, size: train.Config, compile: Callable) -> None:
    """Everything that train.py compiles."""
    train.F.rms_norm, train.F.scaled_dot_product_attention = RMSNorm.apply, attend
    harness.load_fa3, train.row_adam_ = lambda: bench_gpu.flash, lambda *_: None
    train.compiled = functools.cache(compile)
    model = train.build_model(size, torch.device("cpu"), gpu)
    model.compile_trunk()
    optimizer = train.make_optimizer(model)
    optimizer.device = torch.device("cuda")  # so that it compiles its functions
    tokens = torch.zeros(size.device_batch_size, size.seq_len, dtype=torch.long)
    model(tokens, tokens).backward()
    optimizer.step()


def load(source: str):
    """The CachingAutotuner that Inductor's source makes."""
    module = PyCodeCache.load(source.replace("triton_helpers.set_driver_to_gpu()", ""))
    return next(value for value in vars(module).values() if hasattr(value, "triton_meta"))


def usage(kernel, choice, sm: int) -> tuple[int, int, int]:
    """Registers, spilled bytes and shared memory. Raises what ptxas raises."""
    meta = kernel._create_compile_meta(choice) | {"cc": sm}
    source = triton.compiler.ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = {key: meta[key] for key in ("num_warps", "num_stages")}
    return tuple(resources(triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)).values())


def report(label: str, text: str, sm: int) -> str:
    """A row of the table, of distinct kernels in all configurations that Inductor may choose; then the misfits."""
    found = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", text, re.S)
    kernels, rows, misfits = {source: name for name, source in found}, [], []
    for source, name in kernels.items():
        for choice in (kernel := load(source)).configs:
            try:
                rows.append(usage(kernel, choice, sm))
                if rows[-1][2] > 1024 * SHARED[sm] or rows[-1][1]:
                    misfits.append(f"{name}, {choice}: {rows[-1]}")
            except Exception as error:
                misfits.append(f"{name}, {choice}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
    most = " | ".join(str(max(column)) for column in zip(*rows, strict=True))
    return "\n".join([f"| {label} | {sm} | {len(kernels)} | {most} | {1024 * SHARED[sm]} |", *misfits])


def row(name: str) -> str:
    sm, gpu = pretend(name), harness.named_gpu(name)
    gpu, train.say_once = gpu._replace(flash="fa3" if sm == 90 else ""), lambda *_: None
    size, dtype = train.pick_size(gpu), str(train.pick_numerics(gpu)[0]).removeprefix("torch.")
    label = f"{name} | {size.depth} x {size.n_embd}{', experts' if size.num_experts else ''}, {dtype}"
    return report(label, capture(functools.partial(training_step, gpu, size)), sm)


def main() -> None:
    first, *chips = sys.argv[1:] or [""]
    print(f"torch {torch.__version__}, triton {triton.__version__}\n")
    print(f"| GPU | size | sm | kernels | registers | spilled | shared | limit |\n{'| --- ' * 8}|", flush=True)
    if first and Path(first).is_dir():
        pretend("H100")
        text = "\n".join(file.read_text() for file in sorted(Path(first).rglob("*.py")))
        for sm in map(int, chips or SHARED):
            print(report(f"{first} | ", text, sm), flush=True)
        return
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # a process can pretend once
        for line in pool.imap(row, sys.argv[1:] or [gpu for gpu in harness.GPUS if gpu != "H200"]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
