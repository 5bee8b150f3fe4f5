"""Without a CUDA device Triton's interpreter runs the kernels, so the same tests run everywhere. And a small corpus."""

import functools
import gc
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: its threads would wait for busy neighbours

import torch
from hypothesis import HealthCheck, settings
from small_corpus import write_corpus

import prepare

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU must not keep forks from using it
# Git without the user's settings, which may sign commits, and without the repository of a hook that runs pytest
for name in [name for name in os.environ if name.startswith("GIT_")]:
    del os.environ[name]
os.environ |= dict(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1")
for who in ("AUTHOR", "COMMITTER"):
    os.environ |= {f"GIT_{who}_NAME": "tests", f"GIT_{who}_EMAIL": "tests@example.org"}
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated: before kernels.py is imported
# The same examples everywhere, however long a slow machine takes for them
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("tests")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite on all cores, up to four; a file or a test in this process, which starts at once."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    return min(4, len(os.sched_getaffinity(0))) if whole else 0


def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """A file with fixtures of its own, or a cluster, stays in one process. (xdist 3.8's groups end with pytest 9.1.)"""
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def shares(file: str) -> bool:
        return re.search('scope="module"|mark.ray', (config.rootpath / file).read_text()) is not None

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if shares(file) else nodeid

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What has been imported is no garbage: each Clock.start() would look through all of it, for 0.3 s."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or nanobind, say, takes it for a leak


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
def exact_windows(monkeypatch):
    """FlashAttention-3 and -2 have no CPU kernels: plain attention behind their interfaces."""
    from reference_model import sliding_attention

    import harness
    import train

    def fa3(q, k, v, causal, window_size):
        assert causal and window_size[1] == 0
        return sliding_attention(q, k, v, window_size[0])

    def fa2(q, k, v, _, __, max_q, max_k, dropout, causal, debug, *, window_size_left, window_size_right):
        assert (max_q, max_k, dropout, causal, debug, window_size_right) == (q.size(1), q.size(1), 0, True, False, 0)
        return sliding_attention(q, k, v, window_size_left), *q.new_empty(4, 0)

    monkeypatch.setattr(harness, "load_fa3", lambda: fa3)
    monkeypatch.setattr(train, "attention", functools.cache(train.attention.__wrapped__))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", fa2, "AutogradCPU")
        yield


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
def dataset(prepared, tmp_path, monkeypatch) -> Path:
    """The prepared folder in a cache of the test's own, to be damaged."""
    shutil.copytree(prepared, tmp_path / "cache")
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path / "cache"))
    return prepare.current_dataset()


@pytest.fixture
def tokenizer(prepared, monkeypatch) -> prepare.Tokenizer:
    """Its tokenizer; the cache is the current one."""
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(prepared))
    return prepare.Tokenizer.from_directory()


@pytest.fixture
def synced(monkeypatch) -> list[tuple[Path, bytes | None]]:
    """What a loss of power now would leave: path and content, None of a folder, at each fsync from now on."""
    calls, fsync = [], os.fsync

    def record(number: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        calls.append((path, None if path.is_dir() else path.read_bytes()))
        fsync(number)

    monkeypatch.setattr(os, "fsync", record)
    return calls


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of one MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("may not mount")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)  # also while something in it is still open
