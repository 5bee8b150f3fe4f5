"""prepare.py under faults: each ends in a clear line and a usable state, injected for real."""

import functools
import itertools
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import http_faults
import numpy as np
import pytest
from http_faults import FaultyServer
from small_corpus import ROOT, run_prepare, texts, tree, write_climbmix, write_parquet

import prepare
from prepare import PrepareError, Tokenizer


def fails(capsys, monkeypatch, *args: str) -> str:
    """Runs the command line; returns its last words, which must be one line."""
    monkeypatch.setattr(sys, "argv", ["prepare.py", *args])
    with pytest.raises(SystemExit) as exit:
        prepare.main()
    assert isinstance(exit.value.code, str) and "\n" not in exit.value.code and len(exit.value.code) > 20
    return exit.value.code


def test_a_new_file_is_on_disk_before_it_replaces_another(tmp_path, synced, monkeypatch):
    """Whenever the power fails."""
    path, replace = tmp_path / "file", os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (synced.append("replaced"), replace(*paths)))
    path.write_bytes(b"old")
    with prepare.new_file(path) as file:
        file.write(b"new")
    assert synced == [(tmp_path / "file.tmp", b"new"), "replaced"]
    assert path.read_bytes() == b"new" and [*tmp_path.iterdir()] == [path]


# Bad input


def bad_parquet(path: Path, content) -> None:
    write_parquet(path, *(content if isinstance(content, tuple) else [texts(0)]))
    if isinstance(content, bytes):
        path.write_bytes(content or b"PAR1" + bytes(500) + path.read_bytes()[504:])  # none: damaged pages


@pytest.mark.parametrize(
    ("make", "args", "remedy"),
    [
        (None, ["--data", ""], "--data is empty"),
        (None, ["--data", "climbmax"], "spelling"),
        (None, ["--data", __file__], "give a folder"),
        (None, ["--data", "{}"], "convert what is there"),
        (None, ["--num-shards", "0"], "give 1 to 6541"),
        (None, ["--num-shards", "6542"], "give 1 to 6541"),
        ((["a", "b"], "content"), ["--data", "{}/bad"], "rename the column"),
        (([1, 2],), ["--data", "{}/bad"], "rename the column"),
        (b"PAR1 is not enough", ["--data", "{}/bad"], "replace it"),
        (b"", ["--data", "{}/bad"], "replace it"),
        ((["one document", "and another"],), ["--data", "{}/bad"], "give more files"),
    ],
)
def test_bad_input_is_one_line_and_leaves_the_cache_as_it_was(
    prepared, tmp_path, monkeypatch, capsys, make, args, remedy
):
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(prepared))
    before = tree(prepared)
    if make is not None:
        bad_parquet(tmp_path / "bad" / "a.parquet", make)
    assert remedy in fails(capsys, monkeypatch, *(arg.format(tmp_path) for arg in args))
    assert tree(prepared) == before


def test_no_data_prepared_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path))
    for call in (Tokenizer.from_directory, prepare.dataset_id, prepare.get_token_bytes, prepare.current_dataset):
        with pytest.raises(PrepareError, match=r"run `python prepare\.py` first, or set AUTORESEARCH_CACHE"):
            call()


@pytest.mark.parametrize("content", [None, b"", b"0\n", b"-1\n", b"1e9\n", b"99999999\n"])
def test_a_dataset_not_prepared_to_the_end_is_not_used(dataset, content):
    (dataset / "train_shards").unlink()
    if content is not None:
        (dataset / "train_shards").write_bytes(content)
    with pytest.raises(PrepareError, match=r"rerun the prepare\.py command"):
        next(prepare.make_dataloader(Tokenizer.from_directory(), 1, 8, "train"))


def test_windows_longer_than_the_split_are_refused_before_the_first_batch(tokenizer):
    total = len(prepare.TokenStream(tokenizer, "val"))
    next(prepare.make_dataloader(tokenizer, 1, total - 1, "val", "cpu"))
    with pytest.raises(PrepareError, match="prepare more text"):
        next(prepare.make_dataloader(tokenizer, 1, total, "val", "cpu"))


def test_shards_of_another_tokenizer_are_refused_and_made_again(dataset, corpus):
    *lines, first, second, end = (dataset / "tokenizer.txt").read_bytes().split(b"\n")
    (a, rank), (b, next_rank) = first.split(), second.split()
    (dataset / "tokenizer.txt").write_bytes(b"\n".join([*lines, b + b" " + rank, a + b" " + next_rank, end]))
    with pytest.raises(PrepareError, match="made by another tokenizer; delete it"):
        next(prepare.make_dataloader(Tokenizer.from_directory(), 1, 8, "train", "cpu"))
    prepare.prepare(str(corpus))
    next(prepare.make_dataloader(Tokenizer.from_directory(), 1, 8, "train", "cpu"))


def test_a_cache_that_cannot_be_written_names_another_folder(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTORESEARCH_CACHE", "/proc/autoresearch")
    assert "set AUTORESEARCH_CACHE" in fails(capsys, monkeypatch, "--data", str(corpus))


def test_a_full_disk_is_one_line_and_leaves_no_half_file(tmpfs, tmp_path, monkeypatch, capsys):
    write_parquet(tmp_path / "data" / "a.parquet", texts(0, count=4000))
    write_parquet(tmp_path / "data" / "b.parquet", texts(1))
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmpfs))
    said = fails(capsys, monkeypatch, "--data", str(tmp_path / "data"))
    assert "No space left" in said and "set AUTORESEARCH_CACHE" in said
    left = {name.rpartition("/")[2] for name in tree(tmpfs)}
    assert left == {"lock", "tokenizer.txt", "test_00000.bin", "val_00000.bin"}


def test_a_read_only_cache_serves_what_it_holds_and_refuses_more(
    tmpfs, prepared, corpus, tmp_path, monkeypatch, capsys
):
    cache = shutil.copytree(prepared, tmpfs / "cache")
    write_parquet(tmpfs / "more" / "a.parquet", texts(5))
    (cache / "current").write_text("another dataset\n")
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(cache))
    assert prepare.prepare(str(corpus)).name.startswith("corpus@"), "though it is not the current one"
    assert "Read-only" in fails(capsys, monkeypatch, "--data", str(tmpfs / "more"))
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path))
    prepare.prepare(str(tmpfs / "more"))  # the text itself may be read-only


# Download


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("served") / "a.parquet"
    write_parquet(path, texts(0, count=1000))
    return path.read_bytes()


@pytest.fixture
def hurried(monkeypatch) -> list[float]:
    """No pauses and small chunks; returns the waits asked for, huggingface_hub's own among them."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # read when huggingface_hub is imported
    from huggingface_hub import constants

    waits = []
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**14)
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def fetch(server: FaultyServer, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        prepare.download(folder / "a.parquet", "some/data")


A_PARQUET = "/datasets/some/data/resolve/main/a.parquet"
FAULTS = {"500": http_faults.status(500), "429": http_faults.status(429, Retry_After="7")}
FAULTS |= {"nothing": http_faults.nothing, "corrupt": http_faults.corrupt}
# Where data moves, huggingface_hub goes on for ever: rightly, where each transfer brings us nearer to the end.
MOVING = {"truncate": http_faults.truncate, "stall": http_faults.stall}


METHODS = [*(("GET", fault) for fault in FAULTS), ("HEAD", "500"), ("HEAD", "429")]  # HEAD: before the transfer


def serve(parquet: bytes, method: str, faults) -> FaultyServer:
    return FaultyServer({A_PARQUET: parquet}, *([faults] if method == "GET" else [[], faults]))


def asked(server: FaultyServer, method: str) -> int:
    return sum(request[0] == method for request in server.requests)


@pytest.mark.parametrize(("method", "fault"), [*METHODS, *(("GET", fault) for fault in MOVING)])
def test_a_fault_that_passes_is_got_over(parquet, hurried, tmp_path, method, fault, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)  # as it stalls for a second
    with serve(parquet, method, [(FAULTS | MOVING)[fault]] * 2) as server:
        fetch(server, tmp_path)
        assert asked(server, method) > 2
    assert (tmp_path / "a.parquet").read_bytes() == parquet


@pytest.mark.parametrize(("method", "fault"), METHODS)
def test_a_fault_that_stays_ends_in_one_line_after_a_bounded_time(parquet, hurried, tmp_path, method, fault):
    with serve(parquet, method, itertools.repeat(FAULTS[fault])) as server:
        with pytest.raises(PrepareError) as error:
            fetch(server, tmp_path)
        assert asked(server, method) >= 5
    assert "a.parquet of some/data: " in str(error.value) and "run again" in str(error.value)
    assert "\n" not in str(error.value) and not (tmp_path / "a.parquet").exists()
    assert sum(hurried) <= 10 * 60 and {1, 2, 4, 8} <= set(hurried)


def test_a_transfer_that_breaks_off_is_resumed_by_range_and_what_an_interrupted_one_left_is_removed(
    parquet, hurried, tmp_path
):
    left = tmp_path / ".cache" / "huggingface" / "download" / "of another version.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(10**6))
    with FaultyServer({A_PARQUET: parquet}, [http_faults.truncate]) as server:
        fetch(server, tmp_path)
        whole, rest = server.ranges()
    assert whole is None and 0 < int(rest.removeprefix("bytes=").removesuffix("-")) <= len(parquet) // 3
    assert not list(tmp_path.rglob("*.incomplete")) and (tmp_path / "a.parquet").read_bytes() == parquet


@pytest.mark.parametrize(("code", "advice"), [(401, True), (403, True), (404, False)])
def test_what_will_not_change_is_not_tried_again_and_advises_on_a_login_that_is_refused(
    hurried, tmp_path, monkeypatch, code, advice
):
    """An HF_TOKEN that has expired makes the hub refuse what it gives to everybody."""
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with FaultyServer({}, [], itertools.repeat(http_faults.status(code))) as server:
        with pytest.raises(PrepareError, match=rf"{code}.*set HF_ENDPOINT") as error:
            fetch(server, tmp_path)
        assert len(server.requests) <= 3 and not hurried  # one of them asks whether the hub answers
    text = str(error.value)
    assert ("renew or unset HF_TOKEN" in text) == advice and "run again" in text and "\n" not in text


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_a_full_disk_while_downloading_is_not_tried_again(parquet, hurried, tmpfs):
    with FaultyServer({A_PARQUET: parquet + bytes(2**21)}) as server:
        with pytest.raises(OSError, match="No space left"):
            fetch(server, tmpfs)
        assert len(server.ranges()) == 1


def test_nobody_at_the_other_end_is_noticed_within_seconds(tmp_path, monkeypatch, capsys):
    start = time.perf_counter()
    for endpoint in ("http://127.0.0.1:9", "not a url"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(prepare.Unreachable, match=rf"cannot reach {endpoint} \(.+\): go online"):
            prepare.download(tmp_path / "a.parquet", "some/data")
    assert "trying again" not in capsys.readouterr().out
    assert time.perf_counter() - start < 60  # two times 8 at worst; a busy machine takes longer


# The whole of it


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> dict[str, bytes]:
    return write_climbmix(tmp_path_factory.mktemp("served"), count=2000)


@pytest.fixture(scope="module")
def undisturbed(served, tmp_path_factory) -> Path:
    cache = tmp_path_factory.mktemp("undisturbed")
    with FaultyServer(served) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTORESEARCH_CACHE", str(cache))
        patch.setenv("HF_ENDPOINT", server.url)
        prepare.prepare("climbmix", 2)
    return cache


def test_climbmix_comes_from_the_endpoint_and_stays_in_the_cache(undisturbed, served):
    raw = undisturbed / "climbmix" / "raw"
    assert tree(raw) == {name.rpartition("/")[2]: body for name, body in served.items()}
    name, _ = prepare.find_source("climbmix")
    assert {path.name for path in undisturbed.iterdir()} == {"climbmix", f"{name}x2", "current", "lock"}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 33))])
def test_killed_at_any_moment_and_run_again_the_cache_is_that_of_an_undisturbed_run(
    served, undisturbed, tmp_path, seed
):
    """SIGKILL at a random moment of download, tokenizer training or tokenizing, in turn; then an undisturbed run."""
    begins, lasts = [("*.incomplete", 0.8), ("shard_00001.parquet", 0.4), ("tokenizer.txt", 0.6)][seed % 3]
    cache, moment = tmp_path / "cache", np.random.RandomState(seed).uniform(0, lasts)
    (clone := tmp_path / "clone").mkdir()
    script = shutil.copy(ROOT / "prepare.py", clone)
    command = [sys.executable, script, "--data", "climbmix", "--num-shards", "2"]
    with FaultyServer(served, rate=3e6) as server:
        environment = os.environ | {"AUTORESEARCH_CACHE": str(cache), "HF_ENDPOINT": server.url}
        victim = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        found = []
        while victim.poll() is None and not found:
            with suppress(FileNotFoundError):  # a folder that goes while it is searched
                found = list(cache.rglob(begins))
            time.sleep(0.005)
        time.sleep(moment)
        victim.kill()
        victim.wait()
        for path in cache.rglob("*.parquet"):
            next(prepare.documents(path))  # never a half file under a final name
        run = run_prepare("--data", "climbmix", "--num-shards", 2, cache=cache, clone=clone, HF_ENDPOINT=server.url)
    assert run.returncode == 0, run.stderr
    assert tree(cache) == tree(undisturbed), f"killed {moment:.2f} s after {begins}"


@pytest.mark.slow
def test_two_at_once_wait_for_each_other(served, undisturbed, tmp_path):
    with FaultyServer(served, rate=3e6) as server, ThreadPoolExecutor() as pool:
        run = functools.partial(run_prepare, "--num-shards", 2, cache=tmp_path, HF_ENDPOINT=server.url)
        results = [future.result() for future in [pool.submit(run), pool.submit(run)]]
    assert [run.returncode for run in results] == [0, 0], results
    assert any("another prepare.py is working" in run.stdout for run in results)
    assert len(server.ranges()) == 4 and tree(tmp_path) == tree(undisturbed)


# Token shards and tokenizer


def test_a_shard_of_another_length_than_it_says_or_of_another_version_is_refused(dataset):
    shard, fingerprint = dataset / "val_00000.bin", Tokenizer(dataset).fingerprint
    good = shard.read_bytes()
    lengths = (0, 1, 100, prepare.HEADER.size, prepare.HEADER.size + 2, len(good) // 2, len(good) - 2, len(good) - 1)
    other, bodies = good[24:], [good[:n] for n in lengths]
    sizes = [good[:16] + n.to_bytes(8, "little") + other for n in (0, 2**31, 2**62, 2**63, 2**64 - 1)]
    for bad in (*bodies, *sizes, b"token shards, v1" + good[16:], good + b"\0\0"):
        shard.write_bytes(bad)
        with pytest.raises(PrepareError, match="delete it, rerun"):
            prepare.open_shard(shard, fingerprint)


def test_verify_finds_a_damaged_body(dataset, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--verify"])
    prepare.main()
    with (dataset / "train_00001.bin").open("r+b") as file:
        file.seek(1000)
        file.write(b"!!!")
    said = fails(capsys, monkeypatch, "--verify")
    assert "train_00001.bin: damaged, or made by another tokenizer; delete it" in said


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", ".", "..", "", "a/b", "a\0b", "\n", "x" * 10**6, "\udcff"])
def test_the_current_dataset_never_lies_outside_the_cache(tmp_path, monkeypatch, name):
    (tmp_path / "elsewhere").mkdir()
    cache = tmp_path / "cache"
    (cache / "a" / "b").mkdir(parents=True)
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(cache))
    (cache / "current").write_bytes(name.encode(errors="surrogateescape"))
    with pytest.raises(PrepareError, match=r"no data prepared|is not prepared"):
        prepare.current_dataset()
