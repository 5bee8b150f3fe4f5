"""
Text to token shards, and what reads them: the loader and the metric. Nobody edits this file during research.
It grew out of karpathy/autoresearch's prepare.py, whose train.py runs on it unchanged.

    python prepare.py                      # climbmix, as many shards as five minutes consume on this GPU
    python prepare.py --data tinystories   # short stories, kinder to small models
    python prepare.py --data DIR           # a folder of .parquet (column `text`) or of .txt

The cache (--cache, else $AUTORESEARCH_CACHE, else ~/.cache/autoresearch-t4) holds one folder per dataset and `current`,
the name of the one prepared last. Files are made under a temporary name and then renamed: an interrupted run leaves
whole ones, and the next run goes on from there. Nothing in the cache is ever executed or unpickled.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import hashlib
import itertools
import math
import os
import re
import resource
import shutil
import struct
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import tiktoken

# torch, pyarrow, huggingface_hub and rustbpe are imported where they are used: a second `prepare.py` takes 0.2 s

MAX_SEQ_LEN = 2048  # context length
TIME_BUDGET = 300  # seconds of training
VOCAB_SIZE = 8192
EVAL_TOKENS = 2**22  # targets scored, or all where the validation split holds fewer

# GPT-4's pattern, but numbers in twos: a small vocabulary has no room for all threes
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]  # the first is BOS

# The tokenizer sees the first train shard only, so that it does not depend on --num-shards, and of that at most so many
# characters in all and of a document. Measured on held-out English: 4 / 8 / 16 / 66 / 155 M characters give 3.881 /
# 3.905 / 3.917 / 3.924 / 3.926 bytes a token and take 0.4 / 0.6 / 1.1 / 4.2 / 9.0 s on two cores.
TOKENIZER_CHARS, TOKENIZER_DOC_CHARS = 64_000_000, 10_000


class PrepareError(Exception):
    """An error for people: one line that names the remedy."""


# --------------------------------------------------------------------------------------------------------------- metric
def evaluate_bpb(model, tokenizer: Tokenizer, batch_size: int, seq_len: int = MAX_SEQ_LEN, split: str = "val") -> float:
    """Bits per byte of the first EVAL_TOKENS targets of a split: sum of nats over sum of raw bytes, BOS in neither.

    Each target is scored exactly once whatever batch_size and seq_len are: targets that fill up the last batch are -1.
    Calls model(x, y, reduction="none"), x and y int64 (batch_size, seq_len), for (batch_size * seq_len,) nats.
    """
    import torch

    device = next(model.parameters()).device
    stream = TokenStream(tokenizer, split)
    n = min(EVAL_TOKENS, len(stream) - 1)
    if n < EVAL_TOKENS:
        print(f"the {split} split holds {n:,} targets, fewer than {EVAL_TOKENS:,}: all are scored")
    batches = -(-n // (batch_size * seq_len))
    text = torch.from_numpy(stream.read(0, n + 1).astype(np.int64)).to(device)
    x = torch.zeros(batches * batch_size * seq_len, dtype=torch.int64, device=device)
    y = torch.full_like(x, -1)
    x[:n], y[:n] = text[:-1], text[1:]
    nbytes = torch.tensor([*tokenizer.token_bytes(), 0], device=device)[y]  # -1 finds the 0 at the end
    nats = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():
        for xb, yb, counts in zip(*(t.view(batches, batch_size, seq_len) for t in (x, y, nbytes > 0)), strict=True):
            loss = model(xb, yb, reduction="none").view(-1)  # (B*T,)
            nats += torch.where(counts.view(-1), loss, 0.0).sum(dtype=torch.float64)
    return (nats / (math.log(2) * nbytes.sum())).item()  # the host waits for the device here only


# --------------------------------------------------------------------------------------------------------------- loader
class TokenStream:
    """The token shards of a split as one sequence."""

    def __init__(self, tokenizer: Tokenizer, split: str, verify: bool = False):
        assert split in ("train", "val", "test"), f"split is train, val or test, not {split}"
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each shard stays an open file
        shards = [open_shard(path, tokenizer.fingerprint, verify) for path in shard_paths(tokenizer.directory, split)]
        self.tokens, self.checksums = zip(*shards, strict=True)
        self.ends = np.cumsum([len(tokens) for tokens in self.tokens])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, n: int) -> np.ndarray:
        """(n,) uint16 from `start` on, across the borders of shards."""
        i = int(np.searchsorted(self.ends, start, side="right"))
        piece = self.tokens[i][start - int(self.ends[i]) :][:n]  # from its end
        return piece if len(piece) == n else np.concatenate([piece, self.read(start + len(piece), n - len(piece))])


def windows(total: int, T: int, shuffle: bool) -> Iterator[tuple[int, int]]:
    """Endless (start, epoch) of windows of T inputs and one more target.

    The order of training depends on T alone, not on the machine nor on train.py's --seed: two runs differ by what was
    changed in between, not by the text they happened to see. It is the same in each epoch: text comes again when, and
    only when, all other text has come. NumPy has frozen the streams of RandomState, not those of default_rng.
    """
    random = np.random.RandomState(1)
    offset = random.randint(min(T, total - T)) if shuffle else 0
    count = (total - 1 - offset) // T
    order = random.permutation(count) if shuffle else range(count)
    for epoch in itertools.count(1):
        for i in order:
            yield offset + int(i) * T, epoch


def make_dataloader(tokenizer: Tokenizer, B: int, T: int, split: str, device=None) -> Iterator:
    """Endless (x, y, epoch), int64 (B, T) on `device` (None: cuda, or else cpu); y is x one token later. Train windows
    come shuffled, those of val in order."""
    import torch

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    stream = TokenStream(tokenizer, split)
    if len(stream) <= T:
        raise PrepareError(f"T={T} is too long for a {split} split of {len(stream)} tokens: prepare more text")
    order = windows(len(stream), T, shuffle=split == "train")
    while True:
        # Pinned memory is copied while the GPU computes, and PyTorch reuses it once the copy is done
        batch = torch.empty(2, B, T, dtype=torch.int64, pin_memory=device.type == "cuda")
        for x, y in zip(*batch.numpy(), strict=True):
            start, epoch = next(order)
            tokens = stream.read(start, T + 1)
            x[:], y[:] = tokens[:-1], tokens[1:]
        yield *batch.to(device, non_blocking=True), epoch


# ---------------------------------------------------------------------------------------------------------------- cache
def cache_dir() -> Path:
    return Path(os.environ.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch-t4").expanduser()


def current_dataset() -> Path:
    """The folder of the dataset prepared last."""
    with suppress(OSError, UnicodeDecodeError):
        name = (cache_dir() / "current").read_text("utf-8").strip()
        if re.fullmatch(r"\w[\w.@-]*", name) and (cache_dir() / name).is_dir():
            return cache_dir() / name
    raise PrepareError(f"no data prepared in {cache_dir()}: run `python prepare.py` first")


@contextmanager
def new_file(path: Path) -> Iterator:
    """A binary file that appears under its name when the block ends well: whole, and on disk."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # an interrupted run's, or a stranger's link to elsewhere
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def lock(file, patience: float, message: str = "") -> bool:
    """Locks an open file; True, too, where the file system has no locks (Colab's Drive). False once patience ends."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if message:
                print(message, flush=True)
            message = ""
            time.sleep(0.05)
        except OSError:
            return True
    return False


# ------------------------------------------------------------------------------------------------------------ tokenizer
class Tokenizer:
    """Byte-level BPE. On disk in tiktoken's text format, one line `base64(token) rank` per token."""

    def __init__(self, ranks: dict[bytes, int], fingerprint: bytes = b"", directory: Path | None = None):
        specials = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.encoding = tiktoken.Encoding("bpe", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
        self.ranks, self.bos_token_id = ranks, specials[SPECIAL_TOKENS[0]]
        self.fingerprint = fingerprint  # shards made by another tokenizer are refused
        self.directory = directory  # where its shards are, even if another dataset becomes current during a run

    @classmethod
    def from_directory(cls, directory: str | Path | None = None) -> Tokenizer:
        """Reads tokenizer.txt from `directory` (None: that of the dataset prepared last)."""
        path = Path(directory or current_dataset()) / "tokenizer.txt"
        try:
            data = path.read_bytes()
            ranks = {base64.b64decode(line.partition(b" ")[0]): i for i, line in enumerate(data.splitlines())}
            every_byte = {bytes([byte]) for byte in range(256)}
            if cls.dump(ranks) != data or b"" in ranks or not every_byte <= ranks.keys() or len(ranks) > 65000:
                raise ValueError("not distinct tokens, each on the line of its rank, every byte among them")
        except (OSError, ValueError) as error:
            raise PrepareError(f"no usable tokenizer in {path} ({error}): run prepare.py as before") from None
        fingerprint = hashlib.sha256(data + repr((SPLIT_PATTERN, SPECIAL_TOKENS)).encode()).digest()
        return cls(ranks, fingerprint, path.parent)

    @staticmethod
    def dump(ranks: dict[bytes, int]) -> bytes:
        return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())

    @staticmethod
    def train(texts: Iterable[str], path: Path) -> None:
        import rustbpe

        def capped() -> Iterator[str]:
            chars = 0
            for text in texts:
                yield text[:TOKENIZER_DOC_CHARS]
                chars += min(len(text), TOKENIZER_DOC_CHARS)
                if chars >= TOKENIZER_CHARS:
                    return

        start = time.perf_counter()
        bpe = rustbpe.Tokenizer()
        bpe.train_from_iterator(capped(), VOCAB_SIZE - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
        ranks = {bytes(token): rank for token, rank in sorted(bpe.get_mergeable_ranks(), key=lambda pair: pair[1])}
        with new_file(path) as file:
            file.write(Tokenizer.dump(ranks))
        print(f"tokenizer: trained in {time.perf_counter() - start:.1f} s", flush=True)

    def get_vocab_size(self) -> int:
        return self.encoding.n_vocab

    def get_bos_token_id(self) -> int:
        return self.bos_token_id

    def encode(self, text: str | list[str], prepend: int | str | None = None) -> list:
        """Token ids of a text, or of each text in a list, after `prepend` (id or name of a special token), whose name
        is ordinary text when it occurs in one."""
        if isinstance(prepend, str):
            prepend = self.encoding.encode_single_token(prepend)
        head = [] if prepend is None else [prepend]
        if isinstance(text, str):
            return head + self.encoding.encode_ordinary(text)
        return [head + ids for ids in self.encoding.encode_ordinary_batch(text, num_threads=os.cpu_count() or 1)]

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)

    def token_bytes(self) -> list[int]:
        """Raw bytes of each token, 0 for special ones. (decode() would turn part of a character into 3 bytes.)"""
        return [len(token) for token in self.ranks] + [0] * len(SPECIAL_TOKENS)


def get_token_bytes(device="cpu"):
    """(vocab,) int32: raw bytes of each token of the current dataset's tokenizer, 0 for special ones."""
    import torch

    return torch.tensor(Tokenizer.from_directory().token_bytes(), dtype=torch.int32, device=device)


# --------------------------------------------------------------------------------------------------------- token shards
# A header of 128 bytes, then the tokens as uint16, all little-endian

MAGIC = b"token shards, v2"  # of the first version there are datasets without a test split
HEADER = struct.Struct("<16sQ32s32s40x")  # magic, number of tokens, tokenizer's fingerprint, tokens' SHA-256


def open_shard(path: Path, fingerprint: bytes, verify: bool = False) -> tuple[np.ndarray, bytes]:
    """Its tokens, (n,) uint16, memory-mapped, and their SHA-256."""
    try:
        data = np.memmap(path, "<u2", "r")
        magic, n, tokenizer, checksum = HEADER.unpack_from(data)
        tokens = data[HEADER.size // 2 :]
        if (magic, tokenizer) != (MAGIC, fingerprint):
            raise ValueError("not a token shard, or made by another tokenizer")
        if not 0 < n == len(tokens):
            raise ValueError(f"{data.nbytes} bytes do not hold {n} tokens")
        if verify and hashlib.sha256(tokens).digest() != checksum:
            raise ValueError("damaged tokens")
    except (OSError, ValueError, struct.error) as error:
        raise PrepareError(f"{path}: {error}; delete it and train_shards there, and run prepare.py as before") from None
    return tokens, checksum


def shard_paths(directory: Path, split: str) -> list[Path]:
    count = b""
    with suppress(OSError):
        count = (directory / "train_shards").read_bytes()
    if not re.fullmatch(rb"[1-9]\d{0,4}\n", count):
        raise PrepareError(f"{directory} is not prepared to the end: run prepare.py as before")
    return [directory / f"{split}_{i:05d}.bin" for i in range(int(count) if split == "train" else 1)]


def dataset_id(directory: Path | None = None) -> str:
    """Name and fingerprint of all tokens of train and val, such as `climbmix-1a2b3c4d`. Results compare only on one."""
    tokenizer = Tokenizer.from_directory(directory)
    checksums = TokenStream(tokenizer, "train").checksums + TokenStream(tokenizer, "val").checksums
    return f"{tokenizer.directory.name.partition('@')[0]}-{hashlib.sha256(b''.join(checksums)).hexdigest()[:8]}"


# ------------------------------------------------------------------------------------------------------ sources of text
HUB = {"climbmix": "karpathy/climbmix-400b-shuffle", "tinystories": "karpathy/tinystories-gpt4-clean"}
MAX_SHARDS, TEST_FILE, VAL_FILE = 6541, "shard_06541.parquet", "shard_06542.parquet"  # climbmix ends with test and val

Part = tuple[Path, int, int | None]  # documents [start, stop) of a file, or of the standard library's folder
Splits = tuple[list[Part], list[Part], list[Part]]  # train (one shard per part), val, test


def hub_splits(data: str, num_shards: int | None) -> Splits:
    if num_shards is None:  # what five minutes consume: on a Hopper, on a T4, without a GPU
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
        num_shards = 10 if capability >= (8, 0) else 2 if capability > (0, 0) else 1
        if num_shards == 1:
            print("no GPU here, so one shard; for a GPU elsewhere give --num-shards 2 (T4, V100) or 10 (a newer one)")
    raw = cache_dir() / data / "raw"
    if data == "climbmix":
        train = [(raw / f"shard_{i:05d}.parquet", 0, None) for i in range(num_shards)]
        return train, [(raw / VAL_FILE, 0, None)], [(raw / TEST_FILE, 0, None)]
    # split as its dataset card suggests: 10,000 stories for test, 10,000 for validation, then train
    file, size = raw / "tinystories_gpt4_clean.parquet", 250_000
    train = [(file, start, start + size) for start in range(20_000, 20_000 + num_shards * size, size)]
    return train, [(file, 10_000, 20_000)], [(file, 0, 10_000)]


def local_files(data: str) -> tuple[str, list[Path]]:
    """The name of the dataset and its files; the last one validates."""
    if data == "embedded":  # this Python's standard library, treated as a single file
        return "embedded@{}.{}.{}".format(*sys.version_info), [Path(sysconfig.get_path("stdlib"))]
    if not Path(data).is_dir():
        raise PrepareError(f"--data {data} is no folder, and none of {', '.join(HUB)}, embedded: check the spelling")
    files = sorted(Path(data).glob("*.parquet")) or sorted(Path(data).glob("*.txt"))
    if not files:
        raise PrepareError(f"no .parquet or .txt in {data}: give --data another folder, or {' or '.join(HUB)}")
    files.sort(key=lambda file: file.name == VAL_FILE)
    identity = repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    label = re.sub(r"[^\w.-]+", "-", Path(data).resolve().name, flags=re.ASCII).lstrip(".-") or "folder"
    return f"{label}@{hashlib.sha256(identity.encode()).hexdigest()[:8]}", files


def file_splits(files: list[Path], test_files: list[Path], num_shards: int | None) -> Splits:
    """Validates on the last file, or the last 5% of a single one. Tests on test_files, or the 5% before validation."""
    borders = [0, *itertools.accumulate(sum(1 for _ in documents(file)) for file in files)]
    twentieth = max(1, borders[-1] // 20)
    val = borders[-2] if len(files) > 1 else borders[-1] - twentieth  # the first document of the split
    test = val if test_files else val - twentieth
    if test < 1:
        raise PrepareError(f"{files[0].parent} has too few documents for train, validation and test: give it more text")

    def take(start: int, stop: int) -> list[Part]:
        spans = zip(files, borders, borders[1:], strict=False)
        cuts = [(file, max(start, first) - first, min(stop, last) - first) for file, first, last in spans]
        return [cut for cut in cuts if cut[1] < cut[2]]

    tests = [(file, 0, None) for file in test_files] or take(test, val)
    return take(0, test)[:num_shards], take(val, borders[-1]), tests


def documents(path: Path) -> Iterator[str | None]:
    """All texts of a file in order; in a parquet file some may be empty."""
    if path.suffix == ".parquet":
        yield from parquet_column(path)
    elif path.is_dir():  # Python modules, ordered by the hash of their names so that each split gets all kinds
        skip = {"site-packages", "dist-packages", "test", "tests"}  # some distributions leave the tests out
        names = [name for file in path.rglob("*.py") if not skip & set((name := file.relative_to(path)).parts)]
        names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
        yield from filter(None, ((path / name).read_text("utf-8", errors="replace") for name in names))
    else:  # a document ends at <|endoftext|>, or at the last newline within 64 Ki characters: a book is many
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise PrepareError(f"{path} is not UTF-8 at byte {error.start}: convert it, with iconv say") from None
        for book in text.split("<|endoftext|>"):
            yield from re.findall(r"(?s:.{1,65535})(?:\n|\Z)|(?s:.{1,65536})", book.strip("\n"))


def parquet_column(path: Path) -> Iterator[str | None]:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if str(kind := file.schema_arrow.field("text").type) not in ("string", "large_string"):
                raise TypeError(f"its column `text` has the type {kind}")
            for batch in file.iter_batches(256, columns=["text"]):
                yield from batch.column(0).to_pylist()
    except Exception as error:
        problem = f"{path} is damaged, or no parquet file with a column `text` of strings ({one_line(error)})"
        raise PrepareError(f"{problem}: delete or replace it, or rename its text column") from None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# ------------------------------------------------------------------------------------------------------------- download
ATTEMPTS = 5  # with waits of 1, 2, 4 and 8 s in between


class Unreachable(PrepareError):
    """The hub does not answer at all."""


def download_ahead(repo: str, paths: list[Path]) -> dict[Path, Future]:
    """Starts a thread that downloads what is missing of `paths`, in order; each future ends with its download. Raises
    Unreachable if the hub does not answer within seconds, not even with an error."""
    for name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"):  # plain HTTP, no requests but for the files
        os.environ.setdefault(name, "1")
    from huggingface_hub.utils import get_session

    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    hub = {"repo_id": repo, "repo_type": "dataset", "endpoint": endpoint}
    arriving = {path: Future() for path in paths if not path.exists()}
    try:
        if arriving:  # asked in a thread, as looking up a name has no timeout
            ThreadPoolExecutor(1).submit(get_session().head, endpoint, timeout=5).result(timeout=8)
    except Exception as error:
        remedy = "go online, set HF_ENDPOINT to a mirror, or give --data DIR"
        raise Unreachable(f"cannot reach {endpoint} ({one_line(error)}): {remedy}") from None

    def work() -> None:
        for path, future in arriving.items():
            try:
                future.set_result(download(path, hub))
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # daemon: Ctrl-C does not wait for it
    return arriving


def download(path: Path, hub: dict[str, str]) -> None:
    """hf_hub_download resumes broken transfers and honours Retry-After; other failures are retried here."""
    from huggingface_hub import hf_hub_download

    for attempt in range(ATTEMPTS):
        try:
            hf_hub_download(filename=path.name, local_dir=path.parent, **hub)
            next(parquet_column(path), None)  # is it one?
            return
        except Exception as error:  # from requests, httpx or huggingface_hub, depending on its version
            if getattr(error, "errno", None):  # from the disk
                raise
            cause = error.__cause__ or error
            status = getattr(getattr(cause, "response", None), "status_code", 0)
            if type(error) in (OSError, PrepareError) or status == 416:  # wrong size or content: not to be resumed
                path.unlink(missing_ok=True)
                shutil.rmtree(path.parent / ".cache", ignore_errors=True)
        if attempt == ATTEMPTS - 1 or (400 <= status < 500 and status not in (408, 416, 429)):
            remedy = "run again, set HF_ENDPOINT to a mirror, or give --data DIR"
            raise PrepareError(f"{path.name} of {hub['repo_id']}: {one_line(cause)}; {remedy}")
        print(f"{path.name}: {one_line(cause)}; again in {2**attempt} s", flush=True)
        time.sleep(2**attempt)


# ------------------------------------------------------------------------------------------------------------ preparing
def prepare(data: str | None = None, num_shards: int | None = None) -> Path:
    """Makes `data` (None: climbmix, or without network the embedded corpus) the current dataset; returns its folder."""
    if num_shards is not None and not 1 <= num_shards <= MAX_SHARDS:
        raise PrepareError(f"--num-shards {num_shards} is not possible: give 1 to {MAX_SHARDS}")
    if data is None:
        try:
            return prepare("climbmix", num_shards)
        except Unreachable as error:
            print(error)
            print("NO NETWORK: falling back to the embedded corpus, the source text of this Python's standard library.")
            print("Its val_bpb compares with no other. For real text go online, set HF_ENDPOINT, or give --data DIR.")
            return prepare("embedded", num_shards)
    name, files = (data, []) if data in HUB else local_files(data)
    test_files = [file for file in files if file.name == TEST_FILE and len(files) > 1]
    files = [file for file in files if file not in test_files]
    if files and num_shards:
        num_shards = min(num_shards, max(1, len(files) - 1))
    directory, ready = cache_dir() / name, False
    with suppress(PrepareError):
        tokenizer = Tokenizer.from_directory(directory)
        TokenStream(tokenizer, "val"), TokenStream(tokenizer, "test")
        ready = num_shards in (None, len(TokenStream(tokenizer, "train").tokens))
        if ready and current_dataset() == directory:
            return directory
    cache_dir().mkdir(parents=True, exist_ok=True)
    with open(cache_dir() / "lock", "ab") as file:
        lock(file, math.inf, f"another prepare.py is at work in {cache_dir()}: waiting for it")
        if not ready:
            splits = file_splits(files, test_files, num_shards) if files else hub_splits(data, num_shards)
            build(directory, *splits, HUB.get(data))
        with new_file(cache_dir() / "current") as current:
            current.write(f"{name}\n".encode())
    return directory


def build(directory: Path, train: list[Part], val: list[Part], test: list[Part], repo: str | None = None) -> None:
    """Makes what is missing, test first. While one file is tokenized the next ones are downloaded."""
    shards = {"test_00000.bin": test, "val_00000.bin": val}
    shards |= {f"train_{i:05d}.bin": [part] for i, part in enumerate(train)}
    tokenizer, first = None, train[:1]
    with suppress(PrepareError):
        tokenizer, first = Tokenizer.from_directory(directory), []
        for name in list(shards):
            with suppress(PrepareError):
                open_shard(directory / name, tokenizer.fingerprint)
                del shards[name]
    paths = [path for path, *_ in itertools.chain(first, *shards.values())]
    arriving = download_ahead(repo, paths) if repo else {}

    def texts(parts: list[Part]) -> Iterator[str]:
        for path, start, stop in parts:
            if path in arriving:
                arriving[path].result()
            yield from filter(None, itertools.islice(documents(path), start, stop))

    directory.mkdir(exist_ok=True)
    if first:
        Tokenizer.train(texts(first), directory / "tokenizer.txt")
        tokenizer = Tokenizer.from_directory(directory)
    for name, parts in shards.items():
        limit = math.inf if name.startswith("train") else EVAL_TOKENS + 1
        tokenize(texts(parts), directory / name, tokenizer, limit)
    with new_file(directory / "train_shards") as file:
        file.write(b"%d\n" % len(train))
    shutil.rmtree(directory / "raw" / ".cache", ignore_errors=True)  # huggingface_hub's metadata and leftovers


def tokenize(texts: Iterable[str], path: Path, tokenizer: Tokenizer, limit: float) -> None:
    """Makes a token shard. In threads, as tiktoken releases the GIL: 14 MB/s per core, where processes gave 17."""
    bos, workers = np.array([tokenizer.get_bos_token_id()], "<u2"), os.cpu_count() or 1

    def batches() -> Iterator[list[str]]:
        batch, size = [], 0
        for text in texts:
            batch.append(text)
            size += len(text)
            if size >= 2**18:
                yield batch
                batch, size = [], 0
        yield batch

    def encode(batch: list[str]) -> np.ndarray:
        ids = [bos[:0]]
        for text in batch:
            pieces = [text[i : i + 2**18] for i in range(0, len(text), 2**18)]  # the regex overflows on 10^6 spaces
            ids += [bos, *(tokenizer.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces)]
        return np.concatenate(ids).astype("<u2")

    start, n, checksum, waiting = time.perf_counter(), 0, hashlib.sha256(), batches()
    with new_file(path) as file, ThreadPoolExecutor(workers) as pool:
        file.seek(HEADER.size)
        # only a few batches ahead, as a dataset may not fit into memory
        while n < limit and (ahead := list(itertools.islice(waiting, 4 * workers))):
            for tokens in pool.map(encode, ahead):
                if n < limit:
                    file.write(tokens)
                    checksum.update(tokens)
                    n += len(tokens)
        if n == 0:
            raise PrepareError(f"no text for {path.name}: ask for fewer --num-shards, give more, or remove empty files")
        file.seek(0)
        file.write(HEADER.pack(MAGIC, n, tokenizer.fingerprint, checksum.digest()))
    print(f"{path.stem}: {n / 1e6:.1f} M tokens in {time.perf_counter() - start:.1f} s", flush=True)


# ----------------------------------------------------------------------------------------------------------------- main
def main() -> None:
    parser = argparse.ArgumentParser(description="Prepares the data that train.py trains on.")
    parser.add_argument("--data", help="climbmix (default), tinystories, embedded, or a folder of .parquet or .txt")
    parser.add_argument("--num-shards", type=int, help="train shards (default: what five minutes consume on this GPU)")
    parser.add_argument("--cache", help="for all data (default: $AUTORESEARCH_CACHE, or ~/.cache/autoresearch-t4)")
    parser.add_argument("--verify", action="store_true", help="check every token of --data, or of the current dataset")
    args = parser.parse_args()
    if args.cache:
        if Path(args.cache).resolve() != cache_dir().resolve():
            print(f"train.py finds this cache after: export AUTORESEARCH_CACHE={Path(args.cache).resolve()}")
        os.environ["AUTORESEARCH_CACHE"] = args.cache
    try:
        directory = current_dataset() if args.verify and not args.data else prepare(args.data, args.num_shards)
        tokenizer, splits = Tokenizer.from_directory(directory), ("train", "val", "test")
        sizes = [f"{len(TokenStream(tokenizer, split, args.verify)) / 1e6:.1f} M {split}" for split in splits]
        print(f"ready: {dataset_id(directory)}, {', '.join(sizes)} tokens, in {directory}")
    except PrepareError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{one_line(error)}: if the disk is full, free some space or give another folder with --cache")
    except KeyboardInterrupt:
        sys.exit("interrupted: run again to go on")


if __name__ == "__main__":
    main()
