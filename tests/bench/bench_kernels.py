"""The fused cross-entropy on one CUDA GPU, beside its peers: time, memory and error.

    python tests/bench/bench_kernels.py    # about two minutes on an H200

Liger (`liger-kernel`) and Apple's CCE (`cut-cross-entropy`) run if they are installed. Medians of triton's do_bench,
which empties L2 before each run. Errors are against float64, relative in the Euclidean norm.
"""

import functools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kernels

SOFTCAP = 15.0
SHAPES = [  # N, D, V
    (65536, 512, 8192, torch.bfloat16),
    (262144, 512, 8192, torch.bfloat16),
    (8192, 4096, 128256, torch.bfloat16),
    (32768, 384, 8192, torch.float16),  # a step on a T4
    (131072, 768, 8192, torch.bfloat16),
]
MIB = 2**20


def eager(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (x @ weight.to(x.dtype).T).float()
    return F.cross_entropy(SOFTCAP * torch.tanh(logits / SOFTCAP), targets)


def ours(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return kernels.fused_linear_cross_entropy(x, weight, targets, softcap=SOFTCAP)


def ours_z(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Its time counts; its gradients differ from the others'."""
    loss, lse = kernels.fused_linear_cross_entropy(x, weight, targets, softcap=SOFTCAP, return_lse=True)
    return loss + 1e-4 * lse.square().mean()


def compiled(**options):
    if options and not hasattr(torch._inductor.config, "auto_chunker"):
        raise ImportError("no auto-chunker in this torch")
    return torch.compile(eager, dynamic=False, fullgraph=True, options=options)


def liger(name: str):
    import liger_kernel.transformers

    loss = getattr(liger_kernel.transformers, name)(softcap=SOFTCAP)
    if name == "LigerCrossEntropyLoss":
        return lambda x, weight, targets: loss(x @ weight.to(x.dtype).T, targets)
    return lambda x, weight, targets: loss(weight.to(x.dtype), x, targets)


def apple():
    from cut_cross_entropy import linear_cross_entropy

    return lambda x, weight, targets: linear_cross_entropy(x, weight.to(x.dtype), targets, softcap=SOFTCAP)


def torchs_own():
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError("needs torch 2.13")
    return lambda x, weight, targets: F.linear_cross_entropy(x, weight.to(x.dtype), targets)


CONTENDERS = {
    "eager, fp32 logits": lambda: eager,
    "torch.compile": compiled,
    "torch.compile, auto-chunker": lambda: compiled(**{"auto_chunker.enable": True}),
    "Liger, fused linear": lambda: liger("LigerFusedLinearCrossEntropyLoss"),
    "Liger, on logits": lambda: liger("LigerCrossEntropyLoss"),
    "Apple CCE": apple,
    "torch's own, no softcap": torchs_own,  # so its gradients differ
    "ours": lambda: ours,
    "ours, with a z-loss": lambda: ours_z,
}


def example(n: int, d: int, v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(n, d, device="cuda").to(dtype).requires_grad_()
    weight = (2 / d**0.5 * torch.randn(v, d, device="cuda")).requires_grad_()
    return x, weight, torch.randint(v, (n,), device="cuda")


def exact_gradients(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.detach().to(x.dtype).double().requires_grad_()
    dx = []
    for rows, y in zip(x.detach().split(1024), targets.split(1024), strict=True):
        rows = rows.double().requires_grad_()
        z = SOFTCAP * torch.tanh(rows @ weight.T / SOFTCAP)
        (F.cross_entropy(z, y, reduction="sum") / len(x)).backward()
        dx.append(rows.grad.float())
    return torch.cat(dx), weight.grad.float()


def peak_mib(step) -> float:
    """Peak memory of a call, including what it leaves behind."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def time_ms(step, clear=()) -> float:
    return do_bench(step, warmup=50, rep=300, grad_to_none=clear, return_mode="median")


@torch.no_grad()
def gemms(x: Tensor, weight: Tensor) -> tuple[float, float]:
    """Milliseconds of the three GEMMs at full size, and of the first alone."""
    w = weight.to(x.dtype)
    z, dx, dw = x @ w.T, torch.empty_like(x), torch.empty_like(w)
    logits = lambda: torch.mm(x, w.T, out=z)  # noqa: E731
    return time_ms(lambda: (logits(), torch.mm(z, w, out=dx), torch.mm(z.T, x, out=dw))), time_ms(logits)


def contend(build, x: Tensor, weight: Tensor, targets: Tensor, expected: tuple, floor: float) -> str:
    torch._dynamo.reset()
    x.grad = weight.grad = None
    try:
        loss = build()
        step = lambda: loss(x, weight, targets).backward()  # noqa: E731
        step()  # compiles, and cuBLAS gets its workspace
        x.grad = weight.grad = None
        torch.cuda.empty_cache()
        extra = peak_mib(step)
        gradients = (x.grad.nbytes + weight.grad.nbytes) / MIB
        errors = "".join(f"{(t.grad - e).norm() / e.norm():10.1e}" for t, e in zip((x, weight), expected, strict=True))
        ms = time_ms(step, (x, weight))
        return f"{ms:9.3f}{ms / floor:8.2f}{extra:10.0f}{extra - gradients:9.0f}{errors}"
    except ImportError as e:
        return f"  not here: {e}"
    except Exception as e:  # such as out of memory: the others still get their rows
        return f"  {type(e).__name__}: {str(e).splitlines()[0][:80]}"


def bench_linear(x: Tensor, weight: Tensor, targets: Tensor) -> None:
    floor, first = gemms(x, weight)
    expected = exact_gradients(x, weight, targets)
    print(f"\nN {len(x)}, D {x.shape[1]}, V {len(weight)}, {x.dtype}, softcap {SOFTCAP:g}")
    print(f"{'':28}{'ms':>9}{'/ floor':>8}{'peak MiB':>10}{'- grads':>9}{'dx error':>10}{'dW error':>10}")
    print(f"{'floor: the three GEMMs':28}{floor:9.3f}")
    for name, build in CONTENDERS.items():
        print(f"{name:28}{contend(build, x, weight, targets, expected, floor)}")
    half = weight.detach().to(x.dtype).requires_grad_()
    name = f"ours, weight in {str(x.dtype).removeprefix('torch.')}"
    print(f"{name:28}{contend(lambda: ours, x, half, targets, expected, floor)}")
    x.grad = weight.grad = None
    print(f"{'logits GEMM + row kernel: ours, logits in fp32':46}{fp32_logits(x, weight, targets)}")
    with torch.no_grad():
        ms, extra = time_ms(lambda: ours(x, weight, targets)), peak_mib(lambda: ours(x, weight, targets))
    print(f"{'forward only: its GEMM':28}{first:9.3f}")
    print(f"{'forward only: ours':28}{ms:9.3f}{ms / first:8.2f}{extra:10.0f}")


@torch.no_grad()
def fp32_logits(x: Tensor, weight: Tensor, targets: Tensor) -> str:
    """Milliseconds of the first GEMM and the row kernel for all rows: logits in x's dtype, as is, then in fp32."""
    rows, v = kernels._chunk_rows(len(x), len(weight), x.itemsize, x.device), len(weight)
    w, losses, one = weight.to(x.dtype), x.new_empty(rows, dtype=torch.float32), torch.ones((), device=x.device)
    half, full = x.new_empty(rows, v), x.new_empty(rows, v, dtype=torch.float32)
    chunks = [slice(i, i + rows) for i in range(0, len(x) - rows + 1, rows)]

    def ours(part):
        torch.mm(x[part], w.T, out=half)
        kernels._rows_triton(half, targets[part], losses, one.expand(rows), SOFTCAP, -1, half)

    def exact(part):
        torch.mm(x[part], w.T, torch.float32, out=full)
        kernels._rows_triton(full, targets[part], losses, one.expand(rows), SOFTCAP, -1, half)

    return "".join(f"{time_ms(lambda way=way: [way(part) for part in chunks]):9.3f}" for way in (ours, exact))


def bench_logits(n: int = 65536, v: int = 8192) -> None:
    logits = torch.randn(n, v, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets, copy = torch.randint(v, (n,), device="cuda"), torch.empty_like(logits, requires_grad=False)
    copy_ms = time_ms(lambda: copy.copy_(logits.detach()))
    print(f"\n{n} x {v} bf16 logits, forward + backward, against a copy of them (read once, written once)")
    print(f"{'copy':28}{copy_ms:9.3f} ms, {2 * logits.nbytes / copy_ms / 1e9:.2f} TB/s")
    ways = {
        "eager": F.cross_entropy,
        "torch.compile": torch.compile(F.cross_entropy),
        "ours": kernels.fused_cross_entropy,
        "ours, in place": functools.partial(kernels.fused_cross_entropy, inplace=True),
    }
    for name, loss in ways.items():
        step = lambda loss=loss: torch.autograd.grad(loss(logits, targets), logits)  # noqa: E731
        ms, extra = time_ms(step), peak_mib(step)
        print(f"{name:28}{ms:9.3f} ms, {copy_ms / ms:.0%} of the copy's bandwidth, {extra:.0f} MiB extra")


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape in SHAPES:
        try:
            bench_linear(*example(*shape))
        except torch.OutOfMemoryError:
            print(f"{shape}: out of memory")
        torch.cuda.empty_cache()
    bench_logits()


if __name__ == "__main__":
    main()
