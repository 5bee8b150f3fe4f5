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
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_corpus import ROOT, run_prepare, texts, tree, write_parquet

import prepare
from prepare import PrepareError, Tokenizer


def parquet(**columns: list) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


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


@pytest.mark.parametrize(
    ("file", "content", "args", "remedy"),
    [
        ("", None, ["--data", ""], "--data is empty"),
        ("", None, ["--data", "climbmax"], "spelling"),
        ("", None, ["--data", __file__], "give a folder"),
        ("", None, ["--data", "{}"], "convert what is there"),
        ("", None, ["--num-shards", "0"], "give 1 to 6541"),
        ("", None, ["--num-shards", "6542"], "give 1 to 6541"),
        ("a.parquet", parquet(content=["a", "b"]), ["--data", "{}/bad"], "rename the column"),
        ("a.parquet", parquet(text=[1, None]), ["--data", "{}/bad"], "no string column `text` (int64)"),
        ("a.parquet", parquet(text=[b"bytes"]), ["--data", "{}/bad"], "no string column `text` (binary)"),
        ("a.parquet", b"PAR1 is not enough", ["--data", "{}/bad"], "replace it"),
        ("a.parquet", b"PAR1" + bytes(500) + parquet(text=texts(0))[504:], ["--data", "{}/bad"], "replace it"),
        ("a.parquet", parquet(text=["one document", "and another"]), ["--data", "{}/bad"], "give more files"),
        ("a.txt", ("naïve\n" * 100).encode("latin-1"), ["--data", "{}/bad"], "a.txt is not UTF-8: convert it"),
    ],
)
def test_bad_input_is_one_line_and_leaves_the_cache_as_it_was(
    prepared, tmp_path, monkeypatch, capsys, file, content, args, remedy
):
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(prepared))
    before = tree(prepared)
    if file:
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / file).write_bytes(content)
    assert remedy in fails(capsys, monkeypatch, *(arg.format(tmp_path) for arg in args))
    assert tree(prepared) == before


@pytest.mark.parametrize("name", ["", "\udcff", "../elsewhere", "/etc", ".", "a/b", "a\0b", "x" * 10**6])
def test_a_cache_without_a_dataset_names_the_command_and_one_outside_of_it_is_none(tmp_path, monkeypatch, name):
    (tmp_path / "elsewhere").mkdir()
    cache = tmp_path / "cache"
    (cache / "a" / "b").mkdir(parents=True)
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(cache))
    (cache / "current").write_bytes(name.encode(errors="surrogateescape"))
    for call in (Tokenizer.from_directory, prepare.dataset_id, prepare.get_token_bytes, prepare.current_dataset):
        with pytest.raises(PrepareError, match=r"prepared in .*: run `python prepare\.py` first, or set AUTORESEARCH"):
            call()


@pytest.mark.parametrize("content", [None, b"0\n", b"99999999\n"])
def test_a_dataset_not_prepared_to_the_end_is_not_used(dataset, content):
    (dataset / "train_shards").unlink()
    if content is not None:
        (dataset / "train_shards").write_bytes(content)
    with pytest.raises(PrepareError, match=r"rerun the prepare\.py command"):
        next(prepare.make_dataloader(Tokenizer.from_directory(), 1, 8, "train"))


def test_shards_of_another_tokenizer_are_refused_and_made_again(dataset, corpus):
    *lines, first, second, end = (dataset / "tokenizer.txt").read_bytes().split(b"\n")
    (a, rank), (b, next_rank) = first.split(), second.split()
    (dataset / "tokenizer.txt").write_bytes(b"\n".join([*lines, b + b" " + rank, a + b" " + next_rank, end]))
    with pytest.raises(PrepareError, match="made by another tokenizer; delete it"):
        next(prepare.make_dataloader(Tokenizer.from_directory(), 1, 8, "train", "cpu"))
    prepare.prepare(str(corpus))
    next(prepare.make_dataloader(Tokenizer.from_directory(), 1, 8, "train", "cpu"))


def test_a_shard_of_another_length_than_it_says_or_of_another_version_is_refused(dataset):
    shard, fingerprint = dataset / "val_00000.bin", Tokenizer(dataset).fingerprint
    good = shard.read_bytes()
    cut = [good[:n] for n in (0, 1, 100, prepare.HEADER.size, len(good) // 2, len(good) - 2, len(good) - 1)]
    sizes = [good[:16] + n.to_bytes(8, "little") + good[24:] for n in (0, 2**31, 2**62, 2**63, 2**64 - 1)]
    for bad in (*cut, *sizes, b"token shards, v1" + good[16:], good + b"\0\0"):
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
    said = fails(capsys, monkeypatch, "--data", str(tmpfs / "more"))
    assert "Read-only" in said and "set AUTORESEARCH_CACHE to another folder" in said
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path))
    prepare.prepare(str(tmpfs / "more"))  # the text itself may be read-only


# Download


class Hub(ThreadingHTTPServer):
    """Serves {path: body} as the Hugging Face hub does, `rate` bytes a second. faults: how it ends the first requests
    of that method, by a status or by a function of the handler and the body."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], faults=(), method: str = "GET", rate: float = float("inf")):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults, self.method, self.rate = files, iter(faults), method, rate
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
    sleep, clock = staticmethod(time.sleep), staticmethod(time.perf_counter)  # whatever a test makes of `time`

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.server.requests.append((self.command, self.headers.get("Range")))
        body = self.server.files.get(self.path)
        fault = next(self.server.faults, None) if self.command == self.server.method else None
        if callable(fault):
            fault(self, body)
        elif fault or body is None:
            self.send_response(fault or 404)
            self.send_header("Retry-After", "7")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.respond(body)

    do_GET = do_HEAD

    def respond(self, body: bytes, ranges: bool = True, send: float = 1, stall: float = 0) -> None:
        """send: the part of the body that really goes out."""
        asked = self.headers.get("Range") if ranges else None
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if self.command == "GET":
            began, part = self.clock(), body[start : start + int(send * (len(body) - start))]
            for i in range(0, len(part), 2**15):
                self.wfile.write(part[i : i + 2**15])
                self.sleep(max(0.0, began + i / self.server.rate - self.clock()))
            self.wfile.flush()
            self.sleep(stall)


FAULTS = {"500": 500, "429": 429, "nothing": functools.partial(Handler.respond, send=0)}
FAULTS["corrupt"] = lambda handler, body: handler.respond(body[:-8] + b"no  PAR1", ranges=False)
# Where data moves, huggingface_hub goes on for ever: rightly, where each transfer brings us nearer to the end.
MOVING = {"truncate": functools.partial(Handler.respond, send=1 / 3)}
MOVING["stall"] = functools.partial(Handler.respond, send=1 / 3, stall=1)
METHODS = [*(("GET", fault) for fault in FAULTS), ("HEAD", "500"), ("HEAD", "429")]  # HEAD: before the transfer
FILE = "/datasets/some/data/resolve/main/a.parquet"
PARQUET = parquet(text=texts(0, count=1000))


@pytest.fixture
def hurried(monkeypatch) -> list[float]:
    """No pauses and small chunks; returns the waits asked for, huggingface_hub's own among them."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # read when huggingface_hub is imported
    from huggingface_hub import constants

    waits = []
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**14)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)  # as it stalls for a second
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def fetch(server: Hub, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        prepare.download(folder / "a.parquet", "some/data")


@pytest.mark.parametrize(("method", "fault"), [*METHODS, *(("GET", fault) for fault in MOVING)])
def test_a_fault_that_passes_is_got_over(hurried, tmp_path, method, fault):
    with Hub({FILE: PARQUET}, [(FAULTS | MOVING)[fault]] * 2, method) as server:
        fetch(server, tmp_path)
        assert len(server.ranges(method)) > 2
    assert (tmp_path / "a.parquet").read_bytes() == PARQUET


@pytest.mark.parametrize(("method", "fault"), METHODS)
def test_a_fault_that_stays_ends_in_one_line_after_a_bounded_time(hurried, tmp_path, method, fault):
    with Hub({FILE: PARQUET}, itertools.repeat(FAULTS[fault]), method) as server:
        with pytest.raises(PrepareError) as error:
            fetch(server, tmp_path)
        assert len(server.ranges(method)) >= 5
    assert "a.parquet of some/data: " in str(error.value) and "run again" in str(error.value)
    assert "\n" not in str(error.value) and not (tmp_path / "a.parquet").exists()
    assert sum(hurried) <= 10 * 60 and {1, 2, 4, 8} <= set(hurried)


def test_a_transfer_that_breaks_off_is_resumed_by_range_and_what_an_interrupted_one_left_is_removed(hurried, tmp_path):
    left = tmp_path / ".cache" / "huggingface" / "download" / "of another version.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(10**6))
    with Hub({FILE: PARQUET}, [MOVING["truncate"]]) as server:
        fetch(server, tmp_path)
        whole, rest = server.ranges()
    assert whole is None and 0 < int(rest.removeprefix("bytes=").removesuffix("-")) <= len(PARQUET) // 3
    assert not list(tmp_path.rglob("*.incomplete")) and (tmp_path / "a.parquet").read_bytes() == PARQUET


@pytest.mark.parametrize(("code", "advice"), [(401, True), (403, True), (404, False)])
def test_what_will_not_change_is_not_tried_again_and_advises_on_a_login_that_is_refused(
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


def test_nobody_at_the_other_end_is_noticed_within_seconds(tmp_path, monkeypatch, capsys):
    for endpoint in ("http://127.0.0.1:9", "not a url"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(prepare.Unreachable, match=rf"cannot reach {endpoint} \(.+\): go online"):
            prepare.download(tmp_path / "a.parquet", "some/data")
    assert "trying again" not in capsys.readouterr().out


# The whole of it


@pytest.fixture(scope="module")
def served() -> dict[str, bytes]:
    """climbmix in small, two train files and those for validation and test: as the hub serves it, by path."""
    folder = f"/datasets/{prepare.HUB['climbmix']}/resolve/main"
    return {f"{folder}/shard_{i:05d}.parquet": parquet(text=texts(i, count=2000)) for i in (0, 1, 6542, 6541)}


@pytest.fixture(scope="module")
def undisturbed(served, tmp_path_factory) -> Path:
    cache = tmp_path_factory.mktemp("undisturbed")
    with Hub(served) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTORESEARCH_CACHE", str(cache))
        patch.setenv("HF_ENDPOINT", server.url)
        prepare.prepare("climbmix", 2)
    return cache


def test_climbmix_comes_from_the_endpoint_and_stays_in_the_cache(undisturbed, served):
    assert tree(undisturbed / "climbmix" / "raw") == {name.rpartition("/")[2]: body for name, body in served.items()}
    name, _ = prepare.find_source("climbmix")
    assert {path.name for path in undisturbed.iterdir()} == {"climbmix", f"{name}x2", "current", "lock"}


MOMENTS = [("*.incomplete", 0.8), ("shard_00001.parquet", 0.4), ("tokenizer.txt", 0.6)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_killed_at_any_moment_and_run_again_the_cache_is_that_of_an_undisturbed_run(
    served, undisturbed, tmp_path, seed
):
    """SIGKILL at a random moment of download, tokenizer training or tokenizing, in turn; then an undisturbed run."""
    begins, lasts = MOMENTS[seed % 3]
    cache, moment = tmp_path / "cache", np.random.RandomState(seed).uniform(0, lasts)
    with Hub(served, rate=3e6) as server:
        environment = os.environ | {"AUTORESEARCH_CACHE": str(cache), "HF_ENDPOINT": server.url}
        command = [
            sys.executable,
            shutil.copy(ROOT / "prepare.py", tmp_path),
            "--data",
            "climbmix",
            "--num-shards",
            "2",
        ]
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
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert tree(cache) == tree(undisturbed), f"killed {moment:.2f} s after {begins}"


@pytest.mark.slow
def test_two_at_once_wait_for_each_other(served, undisturbed, tmp_path):
    with Hub(served, rate=3e6) as server, ThreadPoolExecutor() as pool:
        run = functools.partial(run_prepare, "--num-shards", 2, cache=tmp_path, HF_ENDPOINT=server.url)
        results = [future.result() for future in [pool.submit(run), pool.submit(run)]]
    assert [run.returncode for run in results] == [0, 0], results
    assert any("another prepare.py is working" in run.stdout for run in results)
    assert len(server.ranges()) == 4 and tree(tmp_path) == tree(undisturbed)
