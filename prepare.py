"""
Text to token shards, and what reads them: the loader and the metric. Nobody edits this file during research.
Grown out of karpathy/autoresearch's prepare.py, whose train.py runs on it unchanged.

    python prepare.py                      # climbmix, as many shards as five minutes consume on this GPU
    python prepare.py --data tinystories   # short stories, kinder to small models
    python prepare.py --data DIR           # .parquet (column `text`) and .txt in a folder and its subfolders

The cache ($AUTORESEARCH_CACHE, else ~/.cache/autoresearch-t4) holds a folder per dataset and `current`, the name of the
last one prepared; `.dataset` beside this file names this clone's.
"""

from __future__ import annotations

import argparse
import base64
import errno
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import tiktoken

# torch, pyarrow, huggingface_hub and rustbpe take seconds to import, so each is imported where it is used

MAX_SEQ_LEN = 2048  # context length
TIME_BUDGET = 300  # seconds of training
VOCAB_SIZE = 8192
EVAL_TOKENS = 2**22  # targets scored, or all if the validation split holds fewer

# GPT-4's pattern, but numbers in twos: a small vocabulary has no room for all threes
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]  # the first is BOS

# Characters the tokenizer learns from, in all and per document. On held-out English 16 / 66 / 155 M give
# 3.917 / 3.924 / 3.926 bytes per token and take 1.1 / 4.2 / 9.0 s on two cores.
TOKENIZER_CHARS, TOKENIZER_DOC_CHARS = 64_000_000, 10_000

DATASET = Path(__file__).resolve().with_name(".dataset")  # holds the name of this clone's dataset


class PrepareError(Exception):
    """One line for people, with the remedy."""


# ---- Metric
def evaluate_bpb(model, tokenizer: Tokenizer, batch_size: int, seq_len: int = MAX_SEQ_LEN, split: str = "val") -> float:
    """Bits per byte of the first EVAL_TOKENS targets of a split: sum of nats / sum of raw bytes, without BOS.

    Scores each target once whatever batch_size and seq_len are: the last batch is padded with targets of -1. Calls
    model(x, y, reduction="none"), int64 (batch_size, seq_len), for (batch_size * seq_len,) nats; in eval mode.
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
    nbytes = torch.tensor([*tokenizer.token_bytes, 0], device=device)[y]  # -1 finds the 0 at the end
    nats = torch.zeros((), dtype=torch.float64, device=device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    with torch.no_grad():
        for xb, yb, counts in zip(*(t.view(batches, batch_size, seq_len) for t in (x, y, nbytes > 0)), strict=True):
            loss = model(xb, yb, reduction="none").view(-1)  # (B*T,)
            nats += torch.where(counts.view(-1), loss, 0.0).sum(dtype=torch.float64)
    for module in training:
        module.training = True
    return (nats / (math.log(2) * nbytes.sum())).item()  # the only point where the host waits for the device


# ---- Loader
class TokenStream:
    """The token shards of a split as one sequence."""

    def __init__(self, tokenizer: Tokenizer, split: str, verify: bool = False):
        count = read(tokenizer.directory / "train_shards")
        if not re.fullmatch("[1-9][0-9]{0,4}", count):
            raise PrepareError(f"{tokenizer.directory} is not prepared to the end: run prepare.py as before")
        names = [SHARD(split, i) for i in range(int(count) if split == "train" else 1)]
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each shard stays an open file
        shards = [open_shard(tokenizer.directory / name, tokenizer.fingerprint, verify) for name in names]
        self.tokens, self.checksums = zip(*shards, strict=True)
        self.ends = np.cumsum([len(tokens) for tokens in self.tokens])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, n: int) -> np.ndarray:
        """(n,) uint16 from `start` on, across shards."""
        i = int(np.searchsorted(self.ends, start, side="right"))
        piece = self.tokens[i][start - int(self.ends[i]) :][:n]  # a negative index, from the shard's end
        return piece if len(piece) == n else np.concatenate([piece, self.read(start + len(piece), n - len(piece))])


def windows(total: int, T: int, shuffle: bool) -> Iterator[tuple[int, int]]:
    """Endless (start, epoch) of windows of T inputs and one more target, in one order for all seeds."""
    random = np.random.RandomState(1)  # a frozen stream, unlike default_rng's
    offset = random.randint(min(T, total - T)) if shuffle else 0
    count = (total - 1 - offset) // T
    order = random.permutation(count) if shuffle else range(count)
    for epoch in itertools.count(1):
        for i in order:
            yield offset + int(i) * T, epoch


def make_dataloader(tokenizer: Tokenizer, B: int, T: int, split: str, device=None) -> Iterator:
    """Endless (x, y, epoch), int64 (B, T) on `device` (None: cuda or else cpu); y is x one token later. Train windows
    are shuffled, those of val and test in order. Raises PrepareError if the split has no T + 1 tokens."""
    import torch

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    stream = TokenStream(tokenizer, split)
    if len(stream) <= T:
        raise PrepareError(f"T={T} is too long for a {split} split of {len(stream)} tokens: prepare more text")
    order = windows(len(stream), T, shuffle=split == "train")
    while True:
        # pinned: copied while the GPU computes, and reused by PyTorch once the copy is done
        batch = torch.empty(2, B, T, dtype=torch.int64, pin_memory=device.type == "cuda")
        for x, y in zip(*batch.numpy(), strict=True):
            start, epoch = next(order)
            tokens = stream.read(start, T + 1)
            x[:], y[:] = tokens[:-1], tokens[1:]
        yield *batch.to(device, non_blocking=True), epoch


# ---- Cache
def cache_dir() -> Path:
    return Path(os.environ.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch-t4").expanduser()


def current_dataset() -> Path:
    """Folder of this clone's dataset, else of the one prepared last. Raises PrepareError if there is none."""
    name = read(DATASET) or read(cache_dir() / "current")
    if re.fullmatch(r"\w[\w.@-]{0,200}", name) and (directory := cache_dir() / name).is_dir():
        return directory
    missing = f"{name!r:.99} is not prepared" if name else "no data prepared"
    remedy = "run `python prepare.py` first, or set AUTORESEARCH_CACHE to where it is"
    raise PrepareError(f"{missing} in {cache_dir()}: {remedy}")


def adopt_dataset(directory: Path) -> None:
    """Makes it this clone's dataset if the clone has none, so that other clones cannot change it."""
    with suppress(OSError), open(DATASET, "x") as file:
        file.write(directory.name)


def read(path: Path) -> str:
    """Text of a small file, "" if there is none."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8").strip()
    return ""


@contextmanager
def new_file(path: Path) -> Iterator:
    """A binary file that gets its name once it is whole and on disk."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left by an interrupted run, or a stranger's link
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def lock(file, patience: float) -> bool:
    """Locks an open file; False after `patience` seconds. True where the file system has no locks (Colab's Drive)."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        except OSError:
            return True


# ---- Tokenizer
class Tokenizer:
    """Byte-level BPE, stored as tiktoken does: one line `base64(token) rank` per token."""

    def __init__(self, directory: Path):
        path = directory / "tokenizer.txt"
        try:
            data = path.read_bytes()
            ranks = {base64.b64decode(line.partition(b" ")[0]): i for i, line in enumerate(data.splitlines())}
            sizes = [len(token) for token in ranks]
            if self.dump(ranks) != data or 0 in sizes or sizes.count(1) < 256 or len(sizes) > 65000:
                raise ValueError("damaged")
        except (OSError, ValueError) as error:
            raise PrepareError(f"no usable tokenizer in {path} ({error}): run prepare.py as before") from None
        specials = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.encoding = tiktoken.Encoding("bpe", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
        self.directory, self.token_bytes = directory, sizes + [0] * len(specials)  # 0 for special ones
        self.fingerprint = hashlib.sha256(data + repr((SPLIT_PATTERN, SPECIAL_TOKENS)).encode()).digest()

    @classmethod
    def from_directory(cls, directory: str | Path | None = None) -> Tokenizer:
        """Of the dataset in `directory` (None: current_dataset()). Raises PrepareError if it is not usable."""
        return cls(Path(directory or current_dataset()))

    @staticmethod
    def dump(ranks: dict[bytes, int]) -> bytes:
        return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())

    @staticmethod
    def train(texts: Iterable[str], path: Path) -> None:
        import rustbpe

        if not 260 <= VOCAB_SIZE <= 65000:  # all bytes and special tokens; uint16
            raise PrepareError(f"VOCAB_SIZE = {VOCAB_SIZE} is not possible: give 260 to 65000")
        bpe = rustbpe.Tokenizer()
        texts = next(batches((text[:TOKENIZER_DOC_CHARS] for text in texts), TOKENIZER_CHARS), [])
        bpe.train_from_iterator(texts, VOCAB_SIZE - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
        ranks = {bytes(token): rank for token, rank in bpe.get_mergeable_ranks()}
        with new_file(path) as file:
            file.write(Tokenizer.dump(ranks))
        print(f"tokenizer: {len(ranks)} tokens", flush=True)

    def get_vocab_size(self) -> int:
        return self.encoding.n_vocab

    def get_bos_token_id(self) -> int:
        return self.encoding.encode_single_token(SPECIAL_TOKENS[0])

    def encode(self, text: str | list[str], prepend: int | str | None = None) -> list:
        """Token ids of a text, or a list of them per text, after `prepend`, the id or name of a special token."""
        if isinstance(prepend, str):
            prepend = self.encoding.encode_single_token(prepend)
        head = [] if prepend is None else [prepend]
        if isinstance(text, str):
            return head + self.encoding.encode_ordinary(text)
        return [head + ids for ids in self.encoding.encode_ordinary_batch(text)]

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)


def get_token_bytes(device="cpu"):
    """(vocab,) int32: raw bytes per token of the current dataset, 0 for special ones."""
    import torch

    return torch.tensor(Tokenizer.from_directory().token_bytes, dtype=torch.int32, device=device)


# ---- Token shards
# A header of 128 bytes, then the tokens as uint16, all little-endian

MAGIC = b"token shards, v2"
SPLITS, SHARD = ("train", "val", "test"), "{}_{:05d}.bin".format  # SHARD(split, number)
HEADER = struct.Struct("<16sQ32s32s40x")  # magic, number of tokens, tokenizer's fingerprint, SHA-256 of the tokens


def open_shard(path: Path, fingerprint: bytes, verify: bool = False) -> tuple[np.ndarray, bytes]:
    """Its tokens, (n,) uint16, memory-mapped, and their SHA-256. Raises PrepareError if it is damaged."""
    try:
        data = np.memmap(path, "<u2", "r")
        *header, checksum = HEADER.unpack_from(data)
        tokens = data[HEADER.size // 2 :]
        if header != [MAGIC, len(tokens), fingerprint] or (verify and hashlib.sha256(tokens).digest() != checksum):
            raise ValueError("damaged, or made by another tokenizer")
    except (OSError, ValueError, struct.error) as error:
        raise PrepareError(f"{path}: {error}; delete it and train_shards there, and run prepare.py as before") from None
    return tokens, checksum


def dataset_id(directory: Path | None = None) -> str:
    """Such as `climbmix-1a2b3c4d`, with a hash of all tokens of train and val. Compare results only within one."""
    tokenizer = Tokenizer.from_directory(directory)
    checksums = TokenStream(tokenizer, "train").checksums + TokenStream(tokenizer, "val").checksums
    return f"{tokenizer.directory.name.partition('@')[0]}-{hashlib.sha256(b''.join(checksums)).hexdigest()[:8]}"


# ---- Sources of text
HUB = {"climbmix": "karpathy/climbmix-400b-shuffle", "tinystories": "karpathy/tinystories-gpt4-clean"}
SOURCES = (*HUB, "embedded")
MAX_SHARDS, TEST_FILE, VAL_FILE = 6541, "shard_06541.parquet", "shard_06542.parquet"  # climbmix ends with test and val
SHARD_CHARS = 2**26  # per train shard of a folder of one's own

Part = tuple[Path, int, int | None]  # documents [start, stop) of a file or of the standard library
Files = Iterable[tuple[str, Iterable[str]]]  # a dataset's files: names, and texts to make them of


def find_source(data: str) -> tuple[str, Callable]:
    """A dataset's name, which depends on text and constants, and its files by number of train shards (None: all)."""
    if data in SOURCES:
        contents = HUB.get(data, sys.version_info)
        label, files = data, lambda n: read_parts(source_parts(data, n), HUB.get(data, ""))
    else:
        label, contents, files = find_folder(Path(data).resolve())
    sizes = [VOCAB_SIZE, EVAL_TOKENS, TOKENIZER_CHARS, TOKENIZER_DOC_CHARS, SHARD_CHARS]
    shape = repr([MAGIC, SPLIT_PATTERN, SPECIAL_TOKENS, sizes, contents])
    return f"{label}@{hashlib.sha256(shape.encode()).hexdigest()[:8]}", files


def find_folder(folder: Path):
    if not folder.is_dir():
        raise PrepareError(f"--data {folder} is no folder, and none of {', '.join(SOURCES)}: check the spelling")
    visible = [path for path in sorted(folder.rglob("*")) if "/." not in f"/{path.relative_to(folder)}"]
    paths = [path for path in visible if path.suffix in (".parquet", ".txt") and path.is_file()]
    if not paths:
        raise PrepareError(f"no .parquet or .txt in {folder}: give --data another folder")
    label = re.sub(r"[^\w.-]+", "-", folder.name, flags=re.ASCII).lstrip(".-")[:99] or "folder"
    if label in SOURCES:
        label += "-folder"
    hashes = {p: hashlib.sha256(np.memmap(p, mode="r") if p.stat().st_size else b"").digest() for p in paths}
    parquet = [path for path in paths if path.parent == folder and path.suffix == ".parquet"]
    if {VAL_FILE} < {path.name for path in parquet} - {TEST_FILE}:
        parquet.sort(key=lambda path: (path.name == VAL_FILE, path.name == TEST_FILE))
        contents = [(path.name, hashes[path]) for path in parquet]
        return label, contents, lambda n: read_parts(climbmix_like_parts(parquet, n))
    paths.sort(key=hashes.get)  # names do not matter
    return label, sorted(hashes.values()), lambda n: own_files(paths, n)


def source_parts(data: str, num_shards: int | None) -> list[Part]:
    """Test, validation and each train shard."""
    raw = cache_dir() / data / "raw"
    if data == "climbmix":
        train = [f"shard_{i:05d}.parquet" for i in range(num_shards)]
        return [(raw / name, 0, None) for name in (TEST_FILE, VAL_FILE, *train)]
    if data == "tinystories":  # 10,000 stories each for test and validation, as its card suggests
        cuts = [0, 10_000, *range(20_000, 20_001 + num_shards * 250_000, 250_000)]
        return [(raw / "tinystories_gpt4_clean.parquet", *cut) for cut in itertools.pairwise(cuts)]
    stdlib = Path(sysconfig.get_path("stdlib"))  # the last 5% validate, the 5% before test
    count = sum(1 for _ in documents(stdlib))
    twentieth = max(1, count // 20)
    test, val = count - 2 * twentieth, count - twentieth
    return [(stdlib, test, val), (stdlib, val, None), (stdlib, 0, test)]


def climbmix_like_parts(files: list[Path], num_shards: int | None) -> list[Part]:
    """VAL_FILE validates; TEST_FILE tests, without one the last 5% of train."""
    *train, test, val = [(file, 0, None) for file in files]
    if test[0].name != TEST_FILE:
        counts = [sum(1 for _ in documents(file)) for file in files]
        start = max(0, counts[-2] - max(1, sum(counts) // 20))
        train, test = [*train, (test[0], 0, start)], (test[0], start, counts[-2])
    return [test, val, *train[:num_shards]]


def read_parts(parts: list[Part], repo: str = "") -> Files:
    """The tokenizer learns from the first train shard alone, so it does not depend on their number."""
    names = ["tokenizer.txt", SHARD("test", 0), SHARD("val", 0), *(SHARD("train", i) for i in range(len(parts) - 2))]
    parts, arriving = [parts[2], *parts], {}

    def texts(i):
        path, start, stop = parts[i]
        if not arriving:  # this file is the first one that is needed
            arriving.update(download_ahead(repo, [path for path, *_ in parts[i:]]))
        if path in arriving:
            arriving[path].result()
        yield from filter(None, itertools.islice(documents(path), start, stop))

    return [(name, texts(i)) for i, name in enumerate(names)]


def own_files(paths: list[Path], num_shards: int | None) -> Files:
    """By the hash of its text, a document is among the 5% for validation, the 5% for test, or the rest."""

    def hashed():
        for text in filter(None, itertools.chain.from_iterable(map(documents, paths))):
            yield hashlib.sha256(text.encode()).digest()[:8], text

    def in_order(chosen):
        yield from (text for _, text in sorted(pair for pair in hashed() if chosen[0] <= pair[0] <= chosen[-1]))

    sizes = {digest: len(text) for digest, text in hashed()}
    order, twentieth = sorted(sizes), max(1, len(sizes) // 20)
    if len(order) < 3:
        raise PrepareError(f"{len(order)} documents are too few for three splits: give more text")
    val, test, train = order[:twentieth], order[twentieth : 2 * twentieth], order[2 * twentieth :]
    yield "tokenizer.txt", in_order(train[: 1 + len(train) * TOKENIZER_CHARS // sum(sizes.values())])
    yield SHARD("test", 0), in_order(test)
    yield SHARD("val", 0), in_order(val)
    shards = batches((text for digest, text in hashed() if digest >= train[0]), SHARD_CHARS)
    for i, texts in enumerate(itertools.islice(shards, num_shards)):
        yield SHARD("train", i), texts


def batches(texts: Iterable[str], chars: int) -> Iterator[list[str]]:
    """Texts in lists, each of which ends as soon as it holds so many characters."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def documents(path: Path) -> Iterator[str | None]:
    """All texts of a file in order; in a parquet file some may be empty."""
    if path.suffix == ".parquet":
        yield from parquet_column(path)
    elif path.is_dir():  # Python modules, in the order of their names' hashes
        skip = {"site-packages", "dist-packages", "test", "tests"}  # some distributions leave the tests out
        names = [name for file in path.rglob("*.py") if not skip & set((name := file.relative_to(path)).parts)]
        names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
        yield from filter(None, ((path / name).read_text("utf-8", "replace") for name in names))
    else:  # a document ends at <|endoftext|>, or at the last newline within 8 Ki characters: a book is many
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise PrepareError(f"{path} is not UTF-8 at byte {error.start}: convert it") from None
        for book in text.split("<|endoftext|>"):
            yield from re.findall(r"(?s:.{1,8191})(?:\n|\Z)|(?s:.{1,8192})", book.strip("\n"))


def parquet_column(path: Path) -> Iterator[str | None]:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if str(kind := file.schema_arrow.field("text").type) not in ("string", "large_string"):
                raise TypeError(kind)
            for batch in file.iter_batches(256, columns=["text"]):
                yield from batch.column(0).to_pylist()
    except Exception as error:
        problem = f"{path} is damaged, or has no column `text` of strings ({one_line(error)})"
        raise PrepareError(f"{problem}: delete or replace it, or rename its text column") from None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# ---- Download
ATTEMPTS = 5  # with waits of 1, 2, 4 and 8 s
ELSEWHERE = "set HF_ENDPOINT to a mirror, or give --data DIR"


class Unreachable(PrepareError):
    """The hub does not answer at all."""


def download_ahead(repo: str, paths: list[Path]) -> dict[Path, Future]:
    """Downloads the missing paths in turn in a thread. Raises Unreachable if the hub gives no answer in 6 s."""
    futures = {path: Future() for path in paths if not path.exists()}
    if not futures:
        return {}
    for name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"):  # plain HTTP, and only for the files
        os.environ.setdefault(name, "1")
    from huggingface_hub.utils import get_session

    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    reached = Future()

    def work():
        for path, future in [(None, reached), *futures.items()]:
            try:
                future.set_result(download(path, repo, endpoint) if path else get_session().head(endpoint, timeout=5))
            except Exception as error:
                future.set_exception(error)
                if future is reached:
                    return

    # a daemon, so the process can end without it; looking up a name has no timeout
    threading.Thread(target=work, daemon=True).start()
    try:
        reached.result(timeout=6)
    except Exception as error:
        raise Unreachable(f"cannot reach {endpoint} ({one_line(error)}): go online, {ELSEWHERE}") from None
    return futures


def download(path: Path, repo: str, endpoint: str) -> None:
    """hf_hub_download resumes transfers and honours Retry-After; other failures are retried here."""
    from huggingface_hub import hf_hub_download

    for attempt in range(ATTEMPTS):
        try:
            hf_hub_download(repo, path.name, repo_type="dataset", local_dir=path.parent, endpoint=endpoint)
            next(parquet_column(path), None)  # is it one?
            return
        except Exception as error:  # of requests, httpx or huggingface_hub
            if getattr(error, "errno", None):  # from the disk
                raise
            cause = error.__cause__ or error
            status = getattr(getattr(cause, "response", None), "status_code", 0)
            if type(error) in (OSError, PrepareError) or status == 416:  # wrong size or content: not to be resumed
                path.unlink(missing_ok=True)
                shutil.rmtree(path.parent / ".cache", ignore_errors=True)
        if attempt == ATTEMPTS - 1 or (400 <= status < 500 and status not in (408, 416, 429)):
            raise PrepareError(f"{path.name} of {repo}: {one_line(cause)}; run again, {ELSEWHERE}")
        print(f"{path.name}: {one_line(cause)}; again in {2**attempt} s", flush=True)
        time.sleep(2**attempt)


# ---- Preparing
def prepare(data: str | None = None, num_shards: int | None = None) -> Path:
    """Makes `data` the dataset of this clone (None: the one it has, else climbmix) and returns its folder."""
    if num_shards is not None and not 1 <= num_shards <= MAX_SHARDS:
        raise PrepareError(f"--num-shards {num_shards} is not possible: give 1 to {MAX_SHARDS}")
    own = read(DATASET)
    wanted = data or own.partition("@")[0] or "climbmix"
    if not data and wanted not in SOURCES:  # a folder, whose path this clone does not know
        if num_shards or not is_ready(cache_dir() / own):
            raise PrepareError(f"this clone's dataset is {own}: give the --data that it was made of")
        return current_dataset()
    try:
        directory = make(wanted, num_shards)
    except Unreachable as error:
        if data or own:
            raise
        print(f"{error}\nNO NETWORK: this Python's standard library has to do. Its val_bpb compares with no other.")
        return make("embedded", None)
    if own != directory.name:
        DATASET.write_text(directory.name)
    return directory


def make(data: str, num_shards: int | None) -> Path:
    """Prepares a dataset and names it in `current`. Each number of shards is a dataset of its own."""
    name, files = find_source(data)
    count = None if data == "embedded" else num_shards or default_shards(data, name)
    directory, current = cache_dir() / (f"{name}x{count}" if count else name), cache_dir() / "current"
    if is_ready(directory) and read(current) == directory.name:
        return directory
    cache_dir().mkdir(parents=True, exist_ok=True)
    with open(cache_dir() / "lock", "ab") as file:
        if not lock(file, patience=0):
            print(f"another prepare.py is at work in {cache_dir()}: waiting for it", flush=True)
            lock(file, math.inf)
        if not is_ready(directory):
            build(directory, files(count), sorted(cache_dir().glob(f"{name}*")))
        with new_file(current) as file:
            file.write(directory.name.encode() + b"\n")
    return directory


def default_shards(data: str, name: str) -> int | None:
    """As many as before and, from the hub, at least what five minutes consume on this GPU. None: all."""
    have = 0
    with suppress(PrepareError):
        own, _, shards = current_dataset().name.rpartition("x")
        have = int(shards) if own == name else 0
    if data not in HUB or have >= 10:
        return have or None
    import torch

    if torch.cuda.is_available():
        return max(have, 10 if torch.cuda.get_device_capability() >= (8, 0) else 2)
    if not have:
        print("no GPU here, so one shard; for a GPU elsewhere give --num-shards 2 (T4, V100) or 10 (newer)")
    return have or 1


def is_ready(directory: Path) -> bool:
    with suppress(PrepareError):
        tokenizer = Tokenizer(directory)
        return all(TokenStream(tokenizer, split) for split in SPLITS)
    return False


def build(directory: Path, files: Files, siblings: list[Path]) -> None:
    """Makes or links what is missing. siblings: the same dataset with other numbers of shards."""
    directory.mkdir(exist_ok=True)
    train_shards = 0
    for name, texts in files:
        path = directory / name
        for sibling in siblings:
            with suppress(OSError):  # it is there already, or the file system has no links
                os.link(sibling / name, path)
        train_shards += name.startswith("train")
        with suppress(PrepareError):
            tokenizer = Tokenizer(directory)
            if name != "tokenizer.txt":
                open_shard(path, tokenizer.fingerprint, verify=True)
            continue
        if name == "tokenizer.txt":
            Tokenizer.train(texts, path)
        else:
            tokenize(texts, path, tokenizer, math.inf if name.startswith("train") else EVAL_TOKENS + 1)
    with new_file(directory / "train_shards") as file:
        file.write(b"%d\n" % train_shards)


def tokenize(texts: Iterable[str], path: Path, tokenizer: Tokenizer, limit: float) -> None:
    """Makes a token shard. In threads, as tiktoken releases the GIL: 14 MB/s per core, where processes gave 17."""
    bos, workers = np.array([tokenizer.get_bos_token_id()], "<u2"), os.cpu_count() or 1

    def encode(batch):
        ids = []
        for text in batch:
            pieces = [text[i : i + 2**18] for i in range(0, len(text), 2**18)]  # 10^6 spaces overflow the regex
            ids += [bos, *(tokenizer.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces)]
        return np.concatenate(ids).astype("<u2")

    n, checksum, waiting = 0, hashlib.sha256(), batches(texts, 2**18)
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
            raise PrepareError(f"no text for {path.name}: ask for fewer --num-shards, or give more text")
        file.seek(0)
        file.write(HEADER.pack(MAGIC, n, tokenizer.fingerprint, checksum.digest()))
    print(f"{path.stem}: {n / 1e6:.1f} M tokens", flush=True)


# ---- Main
def main() -> None:
    parser = argparse.ArgumentParser(description="Prepares the data that train.py trains on.")
    parser.add_argument("--data", help="climbmix (default), tinystories, embedded, or a folder of .parquet or .txt")
    parser.add_argument("--num-shards", type=int, help="train shards (default: what five minutes consume)")
    parser.add_argument("--verify", action="store_true", help="check every token of --data, or of the current dataset")
    args = parser.parse_args()
    try:
        directory = current_dataset() if args.verify and not args.data else prepare(args.data, args.num_shards)
        tokenizer = Tokenizer(directory)
        sizes = [f"{len(TokenStream(tokenizer, split, args.verify)) / 1e6:.1f} M {split}" for split in SPLITS]
        print(f"ready: {dataset_id(directory)}, {', '.join(sizes)} tokens, in {directory}")
    except PrepareError as error:
        sys.exit(str(error))
    except OSError as error:
        remedy = "free some space" if error.errno == errno.ENOSPC else "mend that"
        sys.exit(f"{one_line(error)}: {remedy}, or set AUTORESEARCH_CACHE to another folder")
    except KeyboardInterrupt:
        sys.exit("interrupted: run again to go on")


if __name__ == "__main__":
    main()
