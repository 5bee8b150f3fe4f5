"""Without a CUDA device Triton's interpreter runs the kernels, so the same tests run everywhere. And a small corpus."""

import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_corpus import write_corpus

import prepare

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated: before kernels.py is imported

if torch.__version__.startswith("2.9."):  # warns of two settings that are right in all versions
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    os.environ["PYTHONWARNINGS"] = "ignore:Please use the new API settings:UserWarning"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def clone(tmp_path_factory) -> Iterator[None]:
    """This process's `.dataset` lies elsewhere: the one in the repository belongs to whoever works there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "DATASET", tmp_path_factory.mktemp("clone") / ".dataset")
        yield


@pytest.fixture(autouse=True)
def fresh_clone(clone) -> None:
    prepare.DATASET.unlink(missing_ok=True)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def flash_on_cpu():
    """PyTorch's FlashAttention-2 has no CPU kernels: plain ones, in the layouts of CUDA's."""

    def probabilities(q, k, window):
        """Of the keys (B, H, T, T): causal, `window` earlier ones at most."""
        distance = torch.arange(q.size(1))[:, None] - torch.arange(k.size(1))
        unseen = (distance < 0) | (distance > window)
        scores = torch.einsum("bthd,bshd->bhts", q, k).float() * q.size(-1) ** -0.5
        return scores.masked_fill(unseen, -math.inf).softmax(-1)

    def forward(q, k, v, _, __, max_q, max_k, dropout, causal, debug, *, window_size_left, window_size_right, **other):
        assert (max_q, max_k, dropout, causal, debug, window_size_right) == (q.size(1), q.size(1), 0, True, False, 0)
        y = torch.einsum("bhts,bshd->bthd", probabilities(q, k, window_size_left).to(v.dtype), v)
        lse, state = q.new_empty(q.size(0), q.size(2), q.size(1), dtype=torch.float32), torch.empty(2).to(torch.uint64)
        return torch.empty_like(q).copy_(y), lse, state, state[0].clone(), torch.empty(0)

    def backward(grad, q, k, v, *_, window_size_left, **other):
        p = probabilities(q, k, window_size_left)
        dp = torch.einsum("bthd,bshd->bhts", grad, v).float()
        ds = (p * (dp - (dp * p).sum(-1, keepdim=True)) * q.size(-1) ** -0.5).to(q.dtype)
        grads = [torch.einsum("bhts,bshd->bthd", ds, k), torch.einsum("bhts,bthd->bshd", ds, q)]
        grads.append(torch.einsum("bhts,bthd->bshd", p.to(grad.dtype), grad))
        return tuple(torch.empty_like(t).copy_(g) for t, g in zip((q, k, v), grads, strict=True))

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield


@pytest.fixture(scope="module")
def one_thread():
    """Tensors this small gain nothing from more, and threads wait for busy neighbours."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of parquet files in climbmix's layout."""
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="session")
def prepared(corpus, tmp_path_factory) -> Path:
    """A cache that holds it."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTORESEARCH_CACHE", str(cache))
        prepare.prepare(str(corpus))
    return cache


@pytest.fixture
def tokenizer(prepared, monkeypatch) -> prepare.Tokenizer:
    """Its tokenizer; the cache is the current one."""
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(prepared))
    return prepare.Tokenizer.from_directory()


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of one MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("may not mount")
    yield mount
    subprocess.run(["umount", mount], check=True)
