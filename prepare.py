"""
Text to token shards, and what reads them: the loader and the metric. Nobody edits this file during research.
It grew out of karpathy/autoresearch's prepare.py, whose train.py runs on it unchanged.

    python prepare.py                      # climbmix, as many shards as five minutes consume on this GPU
    python prepare.py --data tinystories   # short stories, kinder to small models
    python prepare.py --data DIR           # .parquet (column `text`) and .txt in a folder and its subfolders

The cache (--cache, else $AUTORESEARCH_CACHE, else ~/.cache/autoresearch-t4) holds a folder per dataset and `current`,
the name of the last one prepared. `.dataset` beside this file names the one of this clone. Files are written under a
temporary name and renamed: an interrupted run leaves whole files, and the next one goes on. Nothing there is executed.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import tiktoken

# torch, pyarrow, huggingface_hub and rustbpe are imported where they are used, as they take seconds

MAX_SEQ_LEN = 2048  # context length
TIME_BUDGET = 300  # seconds of training
VOCAB_SIZE = 8192
EVAL_TOKENS = 2**22  # targets scored, or all where the validation split holds fewer

# GPT-4's pattern, but numbers in twos: a small vocabulary has no room for all threes
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]  # the first is BOS

# Characters that the tokenizer learns from, in all and of one document. Measured on held-out English: 4 / 8 / 16 / 66 /
# 155 M give 3.881 / 3.905 / 3.917 / 3.924 / 3.926 bytes a token and take 0.4 / 0.6 / 1.1 / 4.2 / 9.0 s on two cores.
TOKENIZER_CHARS, TOKENIZER_DOC_CHARS = 64_000_000, 10_000


DATASET = Path(__file__).resolve().with_name(".dataset")  # of this clone: a folder of the cache, and its --data


class PrepareError(Exception):
    """An error for people: one line that names the remedy."""


# --------------------------------------------------------------------------------------------------------------- metric
def evaluate_bpb(model, tokenizer: Tokenizer, batch_size: int, seq_len: int = MAX_SEQ_LEN, split: str = "val") -> float:
    """Bits per byte of the first EVAL_TOKENS targets of a split: sum of nats over sum of raw bytes, without BOS.

    Scores each target once whatever batch_size and seq_len are: the last batch is filled up with targets of -1. Calls
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
    nbytes = torch.tensor([*tokenizer.token_bytes(), 0], device=device)[y]  # -1 finds the 0 at the end
    nats = torch.zeros((), dtype=torch.float64, device=device)
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            for xb, yb, counts in zip(*(t.view(batches, batch_size, seq_len) for t in (x, y, nbytes > 0)), strict=True):
                loss = model(xb, yb, reduction="none").view(-1)  # (B*T,)
                nats += torch.where(counts.view(-1), loss, 0.0).sum(dtype=torch.float64)
    finally:
        for module in training:
            module.training = True
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
        """(n,) uint16 from `start` on, across shards."""
        i = int(np.searchsorted(self.ends, start, side="right"))
        piece = self.tokens[i][start - int(self.ends[i]) :][:n]  # from its end
        return piece if len(piece) == n else np.concatenate([piece, self.read(start + len(piece), n - len(piece))])


def windows(total: int, T: int, shuffle: bool) -> Iterator[tuple[int, int]]:
    """Endless (start, epoch) of windows of T inputs and one more target.

    The order of training depends on T alone, not on train.py's --seed: two runs differ by what was changed, not by the
    text that they saw. Epochs repeat it: no text comes again before all other text has come. RandomState's streams are
    frozen by NumPy, those of default_rng are not.
    """
    random = np.random.RandomState(1)
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


# ---------------------------------------------------------------------------------------------------------------- cache
def cache_dir() -> Path:
    return Path(os.environ.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch-t4").expanduser()


def current_dataset() -> Path:
    """Folder of the dataset that this clone's `.dataset` names, else of the one prepared last; PrepareError if none."""
    own = read(DATASET).partition("\n")[0]
    name = own or read(cache_dir() / "current")
    if re.fullmatch(r"\w[\w.@-]{0,200}", name) and (cache_dir() / name).is_dir():
        return cache_dir() / name
    if own:
        raise PrepareError(f"{DATASET} names {own!r:.99}, not in {cache_dir()}: run prepare.py with its --data again")
    raise PrepareError(f"no data prepared in {cache_dir()}: run `python prepare.py` first")


def adopt_dataset(directory: Path) -> None:
    """Makes it this clone's dataset if there is none yet: from then on other clones' prepare.py cannot change it."""
    with suppress(OSError), open(DATASET, "x") as file:
        file.write(directory.name)


def read(path: Path) -> str:
    """What a small file says, or nothing."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8").strip()
    return ""


@contextmanager
def new_file(path: Path) -> Iterator:
    """A binary file that gets its name when the block ends without an error: whole, and on disk."""
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
    """Locks an open file; False after `patience` seconds. True where the file system has no locks (Colab's Drive)."""
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
    """Byte-level BPE, stored as tiktoken does: one line `base64(token) rank` per token."""

    def __init__(self, ranks: dict[bytes, int], fingerprint: bytes = b"", directory: Path | None = None):
        specials = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.encoding = tiktoken.Encoding("bpe", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
        self.ranks, self.bos_token_id = ranks, specials[SPECIAL_TOKENS[0]]
        self.fingerprint = fingerprint  # shards of another tokenizer are refused
        self.directory = directory  # of its shards, whatever dataset becomes current during a run

    @classmethod
    def from_directory(cls, directory: str | Path | None = None) -> Tokenizer:
        """Of the dataset in `directory` (None: current_dataset()). Raises PrepareError if there is no good one."""
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
        """Token ids of a text, or of each in a list, after `prepend`: id or name of a special token. Inside a text such
        a name is ordinary text."""
        if isinstance(prepend, str):
            prepend = self.encoding.encode_single_token(prepend)
        head = [] if prepend is None else [prepend]
        if isinstance(text, str):
            return head + self.encoding.encode_ordinary(text)
        return [head + ids for ids in self.encoding.encode_ordinary_batch(text, num_threads=os.cpu_count() or 1)]

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)

    def token_bytes(self) -> list[int]:
        """Raw bytes of each token, 0 for special ones. decode() would make 3 bytes of a part of a character."""
        return [len(token) for token in self.ranks] + [0] * len(SPECIAL_TOKENS)


def get_token_bytes(device="cpu"):
    """(vocab,) int32: raw bytes of each token of the current dataset, 0 for special ones."""
    import torch

    return torch.tensor(Tokenizer.from_directory().token_bytes(), dtype=torch.int32, device=device)


# --------------------------------------------------------------------------------------------------------- token shards
# A header of 128 bytes, then the tokens as uint16, all little-endian

MAGIC = b"token shards, v2"
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
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise PrepareError(f"{path}: {error}; raise `ulimit -n`, or give fewer --num-shards") from None
        raise PrepareError(f"{path}: {error}; delete it and train_shards there, and run prepare.py as before") from None
    return tokens, checksum


def shard_paths(directory: Path, split: str) -> list[Path]:
    count = read(directory / "train_shards")
    if not re.fullmatch("[1-9][0-9]{0,4}", count):
        raise PrepareError(f"{directory} is not prepared to the end: run prepare.py as before")
    return [directory / f"{split}_{i:05d}.bin" for i in range(int(count) if split == "train" else 1)]


def dataset_id(directory: Path | None = None) -> str:
    """Such as `climbmix-1a2b3c4d`: name, and a hash of all tokens of train and val. Results compare only within one."""
    tokenizer = Tokenizer.from_directory(directory)
    checksums = TokenStream(tokenizer, "train").checksums + TokenStream(tokenizer, "val").checksums
    return f"{tokenizer.directory.name.partition('@')[0]}-{hashlib.sha256(b''.join(checksums)).hexdigest()[:8]}"


# ------------------------------------------------------------------------------------------------------ sources of text
HUB = {"climbmix": "karpathy/climbmix-400b-shuffle", "tinystories": "karpathy/tinystories-gpt4-clean"}
MAX_SHARDS, TEST_FILE, VAL_FILE = 6541, "shard_06541.parquet", "shard_06542.parquet"  # climbmix ends with test and val
SHARD_CHARS = 2**28  # per train shard of a folder of one's own
TOO_FEW = "{} has too few documents for train, validation and test: give it more text"

Part = tuple[Path, int, int | None]  # documents [start, stop) of a file, or of the standard library's folder
Files = Iterable[tuple[str, Iterable[str | None]]]  # file names of a dataset, and the texts they are made of


def find_source(data: str) -> tuple[str, Callable[[int | None, set[str]], Files]]:
    """The dataset's name, and a function of the number of train shards (None: all) and the files that are there."""
    if data in HUB:
        return dataset_name(data, HUB[data]), lambda n, done: read_parts(hub_parts(data, n), done, HUB[data])
    if data == "embedded":  # the source text of this Python's standard library
        stdlib = [Path(sysconfig.get_path("stdlib"))]
        return dataset_name(data, sys.version_info), lambda n, done: read_parts(file_parts(stdlib, n), done)
    folder = Path(data).resolve()
    if not folder.is_dir():
        raise PrepareError(f"--data {data} is no folder, and none of {', '.join(HUB)}, embedded: check the spelling")
    files = sorted(folder.glob("*.parquet"))
    if climbmix := {VAL_FILE} < {file.name for file in files} - {TEST_FILE}:  # named, and split, as climbmix is
        files.sort(key=lambda file: (file.name == VAL_FILE, file.name == TEST_FILE))
    else:
        files = [file for file in folder.rglob("*") if file.suffix in (".parquet", ".txt") and file.is_file()]
        files = [file for file in files if "/." not in f"/{file.relative_to(folder)}"]  # hidden
    if not files:
        raise PrepareError(f"no .parquet or .txt in {data}: give --data another folder, or {' or '.join(HUB)}")
    hashes = {
        file: hashlib.sha256(np.memmap(file, mode="r") if file.stat().st_size else b"").digest() for file in files
    }
    label = re.sub(r"[^\w.-]+", "-", folder.name, flags=re.ASCII).lstrip(".-") or "folder"
    if climbmix:
        name = dataset_name(label, [(file.name, hashes[file]) for file in files])
        return name, lambda n, done: read_parts(file_parts(files, n), done)
    files.sort(key=hashes.get)  # what they are called and when they were written does not matter
    return dataset_name(label, sorted(hashes.values())), lambda n, done: read_folder(files, n)


def dataset_name(label: str, contents) -> str:
    """Depends on the text and on every constant that shapes the tokens."""
    shape = [MAGIC, VOCAB_SIZE, EVAL_TOKENS, SPLIT_PATTERN, SPECIAL_TOKENS, TOKENIZER_CHARS, TOKENIZER_DOC_CHARS]
    return f"{label}@{hashlib.sha256(repr([*shape, SHARD_CHARS, contents]).encode()).hexdigest()[:8]}"


def hub_parts(data: str, num_shards: int) -> list[Part]:
    """Of test, validation and each train shard. tinystories as its dataset card suggests: 10,000 stories for test, as
    many for validation, then train."""
    raw = cache_dir() / data / "raw"
    if data == "climbmix":
        train = [f"shard_{i:05d}.parquet" for i in range(num_shards)]
        return [(raw / name, 0, None) for name in (TEST_FILE, VAL_FILE, *train)]
    cuts = [0, 10_000, *range(20_000, 20_001 + num_shards * 250_000, 250_000)]
    return [(raw / "tinystories_gpt4_clean.parquet", *cut) for cut in itertools.pairwise(cuts)]


def file_parts(files: list[Path], num_shards: int | None) -> list[Part]:
    """As hub_parts. Validates on the last file or, of a single one, on its last 5%; tests on TEST_FILE or the 5% before
    validation."""
    *train, test, val = [(file, 0, None) for file in files * 2][-max(2, len(files)) :]
    if test[0].name != TEST_FILE:
        counts = [sum(1 for _ in documents(file)) for file in files]
        twentieth = max(1, sum(counts) // 20)
        stop = counts[-2] if files[1:] else counts[0] - twentieth
        if stop <= twentieth:
            raise PrepareError(TOO_FEW.format(files[0].parent))
        test, rest = (test[0], stop - twentieth, stop), (test[0], 0, stop - twentieth)
        train, val = [*train, rest], val if files[1:] else (val[0], stop, None)
    return [test, val, *train[:num_shards]]


def read_parts(parts: list[Part], done: set[str], repo: str | None = None) -> Files:
    """The tokenizer learns from the first train shard, so that it does not depend on their number."""
    names = ["test_00000.bin", "val_00000.bin", *map("train_{:05d}.bin".format, range(len(parts) - 2))]
    files = {"tokenizer.txt": parts[2]} | dict(zip(names, parts, strict=True))
    arriving = download_ahead(repo, [path for name, (path, *_) in files.items() if name not in done]) if repo else {}

    def texts(path: Path, start: int, stop: int | None) -> Iterator[str | None]:
        if path in arriving:
            arriving[path].result()
        yield from itertools.islice(documents(path), start, stop)

    return [(name, texts(*part)) for name, part in files.items()]


def read_folder(files: list[Path], num_shards: int | None) -> Files:
    """Any other folder: the hash of a document's text decides whether it is among the 5% for val or the 5% for test."""

    def hashed(*splits: str) -> Iterator[tuple[str, int, str]]:
        for text in filter(None, itertools.chain.from_iterable(map(documents, files))):
            number = int.from_bytes(hashlib.sha256(b"%d" % salt + text.encode()).digest()[:8], "big")
            if (split := {0: "val", 1: "test"}.get(number % 20, "train")) in splits:
                yield split, number, text

    salt, chars = -1, Counter()
    while len(chars) < 3:  # other hashes while they leave one of the splits of a few documents empty
        salt, chars = salt + 1, Counter()
        if salt == 100:
            raise PrepareError(TOO_FEW.format(files[0].parent))
        for split, _, text in hashed("train", "val", "test"):
            chars[split] += len(text)

    def sample(split: str) -> list[str]:
        """Documents from all files, in the order of their hashes, of about TOKENIZER_CHARS characters in all."""
        limit = 2**64 * TOKENIZER_CHARS // chars[split]
        return [text for number, text in sorted(found[1:] for found in hashed(split) if found[1] < limit)]

    for name, split in ("tokenizer.txt", "train"), ("test_00000.bin", "test"), ("val_00000.bin", "val"):
        yield name, sample(split)

    def shard(found: tuple[str, int, str]) -> int:
        chars["train"] -= len(found[2])
        return chars["train"] // SHARD_CHARS

    shards = itertools.groupby(hashed("train"), shard)  # reads past a shard that is there already
    for i, (_, texts) in enumerate(itertools.islice(shards, num_shards)):
        yield f"train_{i:05d}.bin", (text for _, _, text in texts)


def documents(path: Path) -> Iterator[str | None]:
    """All texts of a file in order; in a parquet file some may be empty."""
    if path.suffix == ".parquet":
        yield from parquet_column(path)
    elif path.is_dir():  # Python modules, ordered by the hash of their names so that each split gets all kinds
        skip = {"site-packages", "dist-packages", "test", "tests"}  # some distributions leave the tests out
        names = [name for file in path.rglob("*.py") if not skip & set((name := file.relative_to(path)).parts)]
        names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
        yield from filter(None, ((path / name).read_text("utf-8", errors="replace") for name in names))
    else:  # a document ends at <|endoftext|>, or at the last newline within 8 Ki characters: a book is many
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise PrepareError(f"{path} is not UTF-8 at byte {error.start}: convert it, with iconv say") from None
        for book in text.split("<|endoftext|>"):
            yield from re.findall(r"(?s:.{1,8191})(?:\n|\Z)|(?s:.{1,8192})", book.strip("\n"))


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
    """Downloads what is missing of `paths`, one by one in a thread: a future for each. Raises Unreachable if the hub
    gives no answer, not even an error, in 6 s."""
    for name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"):  # plain HTTP, and only for the files
        os.environ.setdefault(name, "1")
    from huggingface_hub.utils import get_session

    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    hub = {"repo_id": repo, "repo_type": "dataset", "endpoint": endpoint}
    missing = list(dict.fromkeys(path for path in paths if not path.exists()))
    try:
        if missing:  # in a thread: looking up a name has no timeout
            in_background([partial(get_session().head, endpoint, timeout=5)])[0].result(timeout=6)
    except Exception as error:
        remedy = "go online, set HF_ENDPOINT to a mirror, or give --data DIR"
        raise Unreachable(f"cannot reach {endpoint} ({one_line(error)}): {remedy}") from None
    return dict(zip(missing, in_background([partial(download, path, hub) for path in missing]), strict=True))


def in_background(calls: list[Callable]) -> list[Future]:
    """Calls them in turn in a daemon thread, for which neither Ctrl-C nor the end of the process waits."""
    futures = [Future() for _ in calls]

    def work() -> None:
        for future, call in zip(futures, calls, strict=True):
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return futures


def download(path: Path, hub: dict[str, str]) -> None:
    """hf_hub_download resumes transfers and honours Retry-After; other failures are retried here."""
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
    """Makes `data` the dataset of this clone (None: the one it has, else climbmix) and returns its folder."""
    if num_shards is not None and not 1 <= num_shards <= MAX_SHARDS:
        raise PrepareError(f"--num-shards {num_shards} is not possible: give 1 to {MAX_SHARDS}")
    own, _, source = read(DATASET).partition("\n")
    label = own.partition("@")[0] or "climbmix"
    wanted = data or source or (label if label in (*HUB, "embedded") else "")
    if not wanted:  # a folder whose path this clone does not know
        if num_shards or not is_ready(current_dataset()):
            raise PrepareError(f"this clone's dataset is {own}: give the --data that it was made of")
        return current_dataset()
    try:
        directory = make(wanted, num_shards)
    except Unreachable as error:
        if data or own:
            raise
        print(error)
        print("NO NETWORK: for the time being, text is the source of this Python's standard library (--data embedded).")
        print("Its val_bpb compares with no other.")
        return make("embedded", None)
    source = wanted if wanted in (*HUB, "embedded") else Path(wanted).resolve()
    if read(DATASET) != (text := f"{directory.name}\n{source}"):
        DATASET.write_text(f"{text}\n")
    return directory


def make(data: str, num_shards: int | None) -> Path:
    """Makes what is missing of a dataset and names it in `current`. Each number of shards is a dataset of its own."""
    name, files = find_source(data)
    if data == "embedded":
        num_shards = None
    elif not num_shards:  # as many as there are; from the hub at least what five minutes consume
        with suppress(PrepareError):
            _, same, shards = current_dataset().name.rpartition(f"{name}x")
            num_shards = int(shards) if same else None
        if data in HUB and (num_shards := max(num_shards or 0, default_shards())) == 1:
            print("no GPU here, so one shard; for a GPU elsewhere give --num-shards 2 (T4, V100) or 10 (newer)")
    directory = cache_dir() / (f"{name}x{num_shards}" if num_shards else name)
    if (ready := is_ready(directory)) and read(cache_dir() / "current") == directory.name:
        return directory
    cache_dir().mkdir(parents=True, exist_ok=True)
    with open(cache_dir() / "lock", "ab") as file:
        lock(file, math.inf, f"another prepare.py is at work in {cache_dir()}: waiting for it")
        if not ready:
            build(directory, partial(files, num_shards), sorted(cache_dir().glob(f"{name}*")))
        with new_file(cache_dir() / "current") as current:
            current.write(directory.name.encode() + b"\n")
    if data in HUB:  # huggingface_hub's metadata and leftovers
        shutil.rmtree(cache_dir() / data / "raw" / ".cache", ignore_errors=True)
    return directory


def default_shards() -> int:
    """How many of climbmix's shards five minutes consume on a GPU from Ampere on, on an older one, without one."""
    import torch

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return 10 if capability >= (8, 0) else 2 if capability > (0, 0) else 1


def is_ready(directory: Path) -> bool:
    with suppress(PrepareError):
        tokenizer = Tokenizer.from_directory(directory)
        return all(TokenStream(tokenizer, split) for split in ("train", "val", "test"))
    return False


def build(directory: Path, files: Callable[[set[str]], Files], siblings: list[Path]) -> None:
    """Makes what is missing, test first. Takes what is there, also from datasets of other numbers of shards."""
    for sibling in siblings:
        directory.mkdir(exist_ok=True)
        for path in (sibling / "tokenizer.txt", *sibling.glob("*.bin")):
            with suppress(OSError):  # it is there already, or the file system has no links
                os.link(path, directory / path.name)
    done, made, tokenizer = set(), [], None
    with suppress(PrepareError):
        tokenizer = Tokenizer.from_directory(directory)
        done.add("tokenizer.txt")
        for path in directory.glob("*.bin"):
            with suppress(PrepareError):
                open_shard(path, tokenizer.fingerprint, verify=True)
                done.add(path.name)
    for name, texts in files(done):
        made.append(name)
        if name in done:
            continue
        directory.mkdir(exist_ok=True)
        if name == "tokenizer.txt":
            Tokenizer.train(filter(None, texts), directory / name)
            tokenizer = Tokenizer.from_directory(directory)
        else:
            limit = math.inf if name.startswith("train") else EVAL_TOKENS + 1
            tokenize(filter(None, texts), directory / name, tokenizer, limit)
    for name in done - set(made):
        (directory / name).unlink()
    with new_file(directory / "train_shards") as file:
        file.write(b"%d\n" % sum(name.startswith("train") for name in made))


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
        sizes = {split: len(TokenStream(tokenizer, split, args.verify)) for split in splits}
        if sizes["val"] <= EVAL_TOKENS:
            print(f"too little text: val has {sizes['val']:,} tokens, and should have {EVAL_TOKENS + 1:,}")
        text = ", ".join(f"{size / 1e6:.1f} M {split}" for split, size in sizes.items())
        print(f"ready: {dataset_id(directory)}, {text} tokens, in {directory}")
    except PrepareError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{one_line(error)}: if the disk is full, free some space or give another folder with --cache")
    except KeyboardInterrupt:
        sys.exit("interrupted: run again to go on")


if __name__ == "__main__":
    main()
