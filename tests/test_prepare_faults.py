"""prepare.py under faults: each ends in a clear line and a usable state, injected for real."""

import functools
import hashlib
import io
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_corpus import ROOT, main_of_prepare, run_prepare, texts, tree, write_parquet

import prepare
from prepare import PrepareError, Tokenizer


def parquet(**columns: list) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def test_a_new_file_is_on_disk_before_it_replaces_another(tmp_path, synced, monkeypatch):
    """Whenever the power fails."""
    path, replace = tmp_path / "file", os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (synced.append("replaced"), replace(*paths)))
    path.write_bytes(b"old")
    with prepare.new_file(path) as file:
        file.write(b"new")
    assert synced == [(tmp_path / "file.tmp", b"new"), "replaced"]
    assert path.read_bytes() == b"new" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("file", "content", "args", "remedy"),
    [
        ("", b"", ["--data", ""], "--data is empty"),
        ("", b"", ["--data", __file__], "check the spelling, or give a folder"),
        ("", b"", ["--data", "{}"], "convert what is there"),
        ("", b"", ["--num-shards", "0"], "give 1 to 6541"),
        ("a.parquet", parquet(content=["a", "b"]), ["--data", "{}/bad"], "rename the column"),
        ("a.parquet", parquet(text=[1, None]), ["--data", "{}/bad"], "no string column `text` (int64)"),
        ("a.parquet", b"PAR1" + bytes(500) + parquet(text=texts(0))[504:], ["--data", "{}/bad"], "replace it"),
        ("a.parquet", parquet(text=["one document", "and another"]), ["--data", "{}/bad"], "give more files"),
        ("a.txt", ("naïve\n" * 100).encode("latin-1"), ["--data", "{}/bad"], "a.txt is not UTF-8: convert it"),
    ],
)
def test_bad_input_leaves_one_line_and_the_cache_as_it_was(
    prepared, tmp_path, monkeypatch, capsys, file, content, args, remedy
):
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(prepared))
    before = tree(prepared)
    if file:
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / file).write_bytes(content)
    said = main_of_prepare(capsys, monkeypatch, *(arg.format(tmp_path) for arg in args))
    assert said.startswith("failed: ") and remedy in said
    assert tree(prepared) == before


@pytest.mark.parametrize("name", ["", "\udcff", "../elsewhere", "/etc", ".", "a/b", "a\0b", "x" * 10**6])
def test_a_cache_without_a_dataset_names_the_command_and_one_outside_of_it_is_none(tmp_path, monkeypatch, name):
    (tmp_path / "elsewhere").mkdir()
    cache = tmp_path / "cache"
    (cache / "a" / "b").mkdir(parents=True)
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(cache))
    (cache / "current").write_bytes(name.encode(errors="surrogateescape"))
    with pytest.raises(PrepareError, match=r"prepared in .*: run `python prepare\.py` first, or set AUTORESEARCH"):
        prepare.current_dataset()


def swap_last_tokens(data: bytes) -> bytes:
    *lines, (a, rank), (b, next_rank) = (line.split() for line in data.splitlines())
    return b"".join(b"%s %s\n" % (token, number) for token, number in [*lines, (b, rank), (a, next_rank)])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("val_00000.bin", lambda good: good[:100]),  # half a header
        ("val_00000.bin", lambda good: good[:-2]),
        ("val_00000.bin", lambda good: good[:-1]),
        ("val_00000.bin", lambda good: good[:16] + (2**62).to_bytes(8, "little") + good[24:]),  # its length
        ("val_00000.bin", lambda good: b"token shards, v1" + good[16:]),
        ("val_00000.bin", lambda good: b""),
        ("train_shards", lambda good: b""),
        ("train_shards", lambda good: b"99999999\n"),
        ("tokenizer.txt", lambda good: good[:-5]),
        ("tokenizer.txt", swap_last_tokens),
    ],
)
def test_what_is_damaged_or_of_another_tokenizer_is_refused_and_made_again(dataset, prepared, corpus, file, damage):
    (dataset / file).write_bytes(damage((dataset / file).read_bytes()))
    with pytest.raises(PrepareError, match=r"rerun the prepare\.py command"):
        prepare.dataset_id()
    prepare.prepare(str(corpus))
    assert tree(dataset.parent) == tree(prepared) or damage is swap_last_tokens
    next(prepare.make_dataloader(Tokenizer.from_directory(), 1, 8, "train", "cpu"))


def test_verify_finds_a_damaged_body(dataset, monkeypatch, capsys):
    assert main_of_prepare(capsys, monkeypatch, "--verify").startswith("ready: corpus-")
    data = bytearray((dataset / "train_00001.bin").read_bytes())
    data[1000] ^= 1
    (dataset / "train_00001.bin").write_bytes(data)
    said = main_of_prepare(capsys, monkeypatch, "--verify")
    assert "train_00001.bin: damaged, or made by another tokenizer; delete it" in said


def test_a_full_disk_is_one_line_and_leaves_no_half_file(tmpfs, tmp_path, monkeypatch, capsys):
    write_parquet(tmp_path / "data" / "a.parquet", texts(0, count=4000))
    write_parquet(tmp_path / "data" / "b.parquet", texts(1))
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmpfs))
    said = main_of_prepare(capsys, monkeypatch, "--data", str(tmp_path / "data"))
    assert "No space left" in said and "set AUTORESEARCH_CACHE" in said
    left = {name.rpartition("/")[2] for name in tree(tmpfs)}
    assert left == {"lock", "tokenizer.txt", "test_00000.bin", "val_00000.bin"}


def test_a_read_only_cache_serves_what_it_holds_and_refuses_more(tmpfs, prepared, corpus, monkeypatch, capsys):
    cache = shutil.copytree(prepared, tmpfs / "cache")
    write_parquet(tmpfs / "more" / "a.parquet", texts(5))
    (cache / "current").write_text("another dataset\n")
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(cache))
    assert prepare.prepare(str(corpus)).name.startswith("corpus@"), "though it is not the current one"
    said = main_of_prepare(capsys, monkeypatch, "--data", str(tmpfs / "more"))
    assert "Read-only" in said and "set AUTORESEARCH_CACHE to another folder" in said


# Download


class Hub(ThreadingHTTPServer):
    """Serves {path: body} as the Hugging Face hub does. faults: how it ends the first requests of that method, by a
    status or by the options of Handler.respond."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], faults=(), method: str = "GET"):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults, self.method = files, iter(faults), method
        self.requests: list[tuple[str, str | None]] = []  # (method, Range)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *request) -> None:
        """Clients hang up, or are killed."""

    def ranges(self, method: str = "GET") -> list[str | None]:
        return [asked for command, asked in self.requests if command == method]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.server.requests.append((self.command, self.headers.get("Range")))
        body = self.server.files.get(self.path)
        fault = next(self.server.faults, {}) if self.command == self.server.method else {}
        if isinstance(fault, dict) and body is not None:
            return self.respond(body, **fault)
        self.send_response(fault or 404)
        self.send_header("Retry-After", "7")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def respond(self, body: bytes, corrupt: bool = False, part: float = 1) -> None:
        """part: of the body, that really goes out."""
        asked = self.headers.get("Range", "bytes=0-")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) * (not corrupt)
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if self.command == "GET":
            body = body[:-8] + b"no  PAR1" if corrupt else body
            self.wfile.write(body[start : start + int(part * (len(body) - start))])


FAULTS = [("GET", 500), ("GET", 429), ("GET", dict(part=0)), ("GET", dict(corrupt=True)), ("HEAD", 500), ("HEAD", 429)]
FILE = "/datasets/some/data/resolve/main/a.parquet"
PARQUET = parquet(text=texts(0, count=1000))


@pytest.fixture
def hurried(monkeypatch) -> list[float]:
    """No pauses and small chunks; returns the waits asked for, huggingface_hub's own among them."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # read when huggingface_hub is imported
    from huggingface_hub import constants

    waits = []
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**14)
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def fetch(server: Hub, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        prepare.download(folder / "a.parquet", "some/data")


@pytest.mark.parametrize(("method", "fault"), FAULTS)
def test_a_fault_that_passes_is_got_over(hurried, tmp_path, method, fault):
    with Hub({FILE: PARQUET}, [fault] * 2, method) as server:
        fetch(server, tmp_path)
        assert len(server.ranges(method)) > 2
    assert (tmp_path / "a.parquet").read_bytes() == PARQUET


@pytest.mark.parametrize(("method", "fault"), FAULTS)
def test_a_fault_that_stays_ends_in_one_line_after_a_bounded_time(hurried, tmp_path, method, fault):
    with Hub({FILE: PARQUET}, itertools.repeat(fault), method) as server:
        with pytest.raises(PrepareError, match=r"some/data: .*run again") as error:
            fetch(server, tmp_path)
        assert len(server.ranges(method)) >= 5
    assert "\n" not in str(error.value) and not (tmp_path / "a.parquet").exists()
    assert sum(hurried) <= 10 * 60 and {1, 2, 4, 8} <= set(hurried)


def test_a_transfer_that_breaks_off_is_resumed_by_range_and_what_an_interrupted_one_left_is_removed(hurried, tmp_path):
    left = tmp_path / ".cache" / "huggingface" / "download" / "of another version.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(10**6))
    with Hub({FILE: PARQUET}, [dict(part=1 / 3)]) as server:
        fetch(server, tmp_path)
        whole, rest = server.ranges()
    assert whole is None and 0 < int(rest.removeprefix("bytes=").removesuffix("-")) <= len(PARQUET) // 3
    assert not list(tmp_path.rglob("*.incomplete")) and (tmp_path / "a.parquet").read_bytes() == PARQUET


@pytest.mark.parametrize(("code", "advice"), [(401, True), (403, True), (404, False)])
def test_what_will_not_change_is_not_tried_again_and_a_refused_login_is_named(
    hurried, tmp_path, monkeypatch, code, advice
):
    """An HF_TOKEN that has expired makes the hub refuse what it gives to everybody."""
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with Hub({}, itertools.repeat(code), "HEAD") as server:
        with pytest.raises(PrepareError, match=rf"{code}.*run again, set HF_ENDPOINT") as error:
            fetch(server, tmp_path)
        assert len(server.requests) <= 3 and not hurried  # one of them asks whether the hub answers
    assert ("renew or unset HF_TOKEN" in str(error.value)) == advice and "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_a_full_disk_while_downloading_is_not_tried_again(hurried, tmpfs):
    with Hub({FILE: PARQUET + bytes(2**21)}) as server:
        with pytest.raises(OSError, match="No space left"):
            fetch(server, tmpfs)
        assert len(server.ranges()) == 1


def test_nobody_at_the_other_end_is_noticed_at_once(tmp_path, monkeypatch, hurried):
    for endpoint in ("http://127.0.0.1:9", "not a url"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(prepare.Unreachable, match=rf"cannot reach {endpoint} \(.+\): go online"):
            prepare.download(tmp_path / "a.parquet", "some/data")
    assert not hurried


# The whole of it


@pytest.fixture(scope="module")
def hub():
    """climbmix in small: two train files and those for validation and test."""
    folder = f"/datasets/{prepare.HUB['climbmix']}/resolve/main"
    numbers = (0, 1, 6542, 6541)
    with Hub({f"{folder}/shard_{i:05d}.parquet": parquet(text=texts(i, count=2000)) for i in numbers}) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(hub, tmp_path_factory) -> Path:
    cache = tmp_path_factory.mktemp("undisturbed")
    run = run_prepare("--num-shards", 2, cache=cache, HF_ENDPOINT=hub.url)
    assert run.returncode == 0, run.stderr
    return cache


def test_climbmix_comes_from_the_endpoint_and_stays_in_the_cache(undisturbed, hub):
    assert tree(undisturbed / "climbmix" / "raw") == {Path(path).name: body for path, body in hub.files.items()}
    name, _ = prepare.find_source("climbmix")
    assert {path.name for path in undisturbed.iterdir()} == {"climbmix", f"{name}x2", "current", "lock"}


@pytest.mark.parametrize("begins", ["lock", pytest.param("*/tokenizer.txt", marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_run_again_the_cache_is_that_of_an_undisturbed_run(hub, undisturbed, tmp_path, begins):
    """SIGKILL while it downloads or while it tokenizes; then an undisturbed run."""
    cache = tmp_path / "cache"
    environment = os.environ | {"AUTORESEARCH_CACHE": str(cache), "HF_ENDPOINT": hub.url}
    command = [sys.executable, shutil.copy(ROOT / "prepare.py", tmp_path), "--data", "climbmix", "--num-shards", "2"]
    victim = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while victim.poll() is None and not list(cache.glob(begins)):
        time.sleep(0.005)
    time.sleep(np.random.RandomState(7).uniform(0, 0.6))
    victim.kill()
    victim.wait()
    for path in cache.rglob("*.parquet"):
        next(prepare.documents(path))  # never a half file under a final name
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert tree(cache) == tree(undisturbed)


@pytest.mark.slow
def test_two_at_once_wait_for_each_other(hub, undisturbed, tmp_path):
    before = len(hub.ranges())
    with ThreadPoolExecutor() as pool:
        run = functools.partial(run_prepare, "--num-shards", 2, cache=tmp_path, HF_ENDPOINT=hub.url)
        results = [future.result() for future in [pool.submit(run), pool.submit(run)]]
    assert [run.returncode for run in results] == [0, 0], results
    assert any("another prepare.py is working" in run.stdout for run in results)
    assert len(hub.ranges()) - before == 4 and tree(tmp_path) == tree(undisturbed)
