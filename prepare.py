"""
Turns text into token shards, and reads them: the data loader and the metric. Not edited during research.
Based on karpathy/autoresearch's prepare.py, whose train.py runs with this file if our kernels.py is not beside it.

    python prepare.py                      # climbmix, as many shards as five minutes on this GPU consume
    python prepare.py --data tinystories   # short stories, easier for small models
    python prepare.py --data DIR           # .parquet (column `text`) and .txt files in a folder and its subfolders;
                                           # with shard_06542.parquet: a copy of climbmix, without subfolders and .txt

The cache ($AUTORESEARCH_CACHE, else ~/.cache/autoresearch-t4) has a folder per dataset; its file `current` names the
one prepared last. The file `.dataset`, next to this one, names the dataset of this clone.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import io
import itertools
import math
import os
import re
import shutil
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import tiktoken

# torch, pyarrow, huggingface_hub and rustbpe take seconds to import: imported where they are used

MAX_SEQ_LEN = 2048  # context length
TIME_BUDGET = 300  # seconds of training
VOCAB_SIZE = 8192
EVAL_TOKENS = 2**22  # targets scored; all of them if the split has fewer

# GPT-4's pattern, but with at most two digits per token: a small vocabulary has no room for all groups of three
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]  # the first is BOS

# The tokenizer's text, in all and per document. 16, 66, 155 M give 3.917, 3.924, 3.926 bytes per token (measured)
TOKENIZER_CHARS, TOKENIZER_DOC_CHARS = 64_000_000, 10_000

DATASET = Path(__file__).resolve().with_name(".dataset")  # holds the name of this clone's dataset


class PrepareError(Exception):
    """What is wrong, and what to do, in one line."""


# ---- Metric
def evaluate_bpb(model, tokenizer: Tokenizer, batch_size: int, seq_len: int = MAX_SEQ_LEN, split: str = "val") -> float:
    """Bits per byte of a split, from the nats (batch_size * seq_len,) that model(x, y, reduction="none") returns. For
    karpathy/autoresearch's train.py; harness/referee.py scores ours, by logits."""
    import torch

    x, y, nbytes = eval_batches(tokenizer, split, batch_size, seq_len, next(model.parameters()).device)
    nats = 0.0
    with evaluating(model):
        for xb, yb, scored in zip(x, y, nbytes > 0, strict=True):
            loss = model(xb, yb, reduction="none").view(yb.shape)
            nats += torch.where(scored, loss, 0.0).sum(dtype=torch.float64)
    return (nats / (math.log(2) * nbytes.sum())).item()  # the only wait for the device


@contextmanager
def evaluating(model) -> Iterator[None]:
    """Eval mode without gradients; afterwards, each module has its old mode."""
    import torch

    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def eval_batches(tokenizer: Tokenizer, split: str, batch_size: int, seq_len: int, device) -> tuple:
    """The first EVAL_TOKENS targets of a split, each once: inputs, targets (-1 pads the last batch) and the targets'
    raw bytes (0: not scored), (batches, batch_size, seq_len) each."""
    import torch

    stream = TokenStream(tokenizer, split)
    n = min(EVAL_TOKENS, len(stream) - 1)
    if n < EVAL_TOKENS:
        print(f"the {split} split has only {n:,} targets, not {EVAL_TOKENS:,}: scoring all of them")
    text = torch.from_numpy(stream.read(0, n + 1).astype(np.int64)).to(device)
    padding = 0, -n % (batch_size * seq_len)
    x = torch.nn.functional.pad(text[:-1], padding).view(-1, batch_size, seq_len)
    y = torch.nn.functional.pad(text[1:], padding, value=-1).view(x.shape)
    return x, y, torch.tensor([*tokenizer.token_bytes, 0], device=device)[y]  # a target of -1 gets the 0 at the end


# ---- Loader
class TokenStream:
    """The token shards of a split, as one sequence."""

    def __init__(self, tokenizer: Tokenizer, split: str, verify: bool = False):
        folder, count = tokenizer.directory, read(tokenizer.directory / "train_shards")
        if not re.fullmatch("[1-9][0-9]{0,4}", count):
            raise PrepareError(f"{folder} is incomplete: rerun the prepare.py command")
        paths = [folder / SHARD(split, i) for i in range(int(count) if split == "train" else 1)]
        shards = (open_shard(path, tokenizer.fingerprint, verify) for path in paths)
        sizes, self.checksums = zip(*((len(tokens), checksum) for tokens, checksum in shards), strict=True)
        self.ends = np.cumsum(sizes)
        # at most 100 at a time: a mapped shard counts as an open file
        self.shard = lru_cache(100)(lambda i: open_shard(paths[i], tokenizer.fingerprint)[0])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, n: int) -> np.ndarray:
        """n tokens from position `start`, across shards: (n,) uint16."""
        i = np.searchsorted(self.ends, start, side="right")
        piece = self.shard(i)[start - self.ends[i] :][:n]  # negative index: counted from the shard's end
        return piece if len(piece) == n else np.concatenate([piece, self.read(start + len(piece), n - len(piece))])


def windows(total: int, T: int, shuffle: bool) -> Iterator[tuple[int, int]]:
    """Endless (start, epoch) of windows of T + 1 tokens that overlap by one; same order for every seed and epoch."""
    random = np.random.RandomState(1)  # its stream is the same in all NumPy versions
    offset = random.randint(min(T, total - T)) if shuffle else 0
    count = (total - 1 - offset) // T
    order = random.permutation(count) if shuffle else range(count)
    for epoch in itertools.count(1):
        for i in order:
            yield offset + i * T, epoch


def make_dataloader(tokenizer: Tokenizer, B: int, T: int, split: str, device=None) -> Iterator:
    """Endless (x, y, epoch): int64 (B, T) on `device` (None: cuda, else cpu), y one token later. Shuffles train."""
    import torch

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    stream = TokenStream(tokenizer, split)
    if len(stream) <= T:
        raise PrepareError(f"T={T} is too long for a {split} split of {len(stream)} tokens: prepare more text")
    order = windows(len(stream), T, shuffle=split == "train")
    while True:
        # pinned, so the copy overlaps with compute; PyTorch reuses the buffer once the copy is done
        batch = torch.empty(2, B, T, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        for x, y in zip(*batch.numpy(), strict=True):
            start, epoch = next(order)
            tokens = stream.read(start, T + 1)
            x[:], y[:] = tokens[:-1], tokens[1:]
        yield *batch.to(device, non_blocking=True), epoch


# ---- Cache
def cache_dir() -> Path:
    try:
        return Path(os.environ.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch-t4").expanduser()
    except RuntimeError:  # a container's uid without an entry in /etc/passwd
        raise PrepareError("no home directory: set AUTORESEARCH_CACHE to a folder") from None


def current_dataset() -> Path:
    """The folder of this clone's dataset, else of the one prepared last."""
    name, place = read(DATASET) or read(cache_dir() / "current"), cache_dir()
    if re.fullmatch(r"\w[\w.@-]{0,200}", name) and (place / name).is_dir():
        return place / name
    missing = f"{name!r:.99} is not prepared" if name else "no data prepared"
    raise PrepareError(f"{missing} in {place}: run `python prepare.py` first, or set AUTORESEARCH_CACHE")


def adopt_dataset(directory: Path) -> None:
    """Makes `directory` this clone's dataset unless it has one, whatever other clones prepare."""
    if not read(DATASET):  # an interrupted run may have left it empty
        with suppress(OSError):
            DATASET.write_text(directory.name)


def read(path: Path) -> str:
    """The text of a small file, stripped; "" if it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8-sig").strip()
    return ""


@contextmanager
def new_file(path: Path) -> Iterator:
    """Writes a binary file, which appears, or replaces another, once all of it is on disk."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left by an interrupted run, or somebody's link
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def lock(file, patience: float) -> bool:
    """Locks an open file. False after `patience` seconds; True if the file system has no locks (Google Drive)."""
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
PIECE = re.compile("(?s).{1,262144}")  # what is encoded at once: tiktoken panics on 10^6 spaces


class Tokenizer:
    """Byte-level BPE in tiktoken's file format: one line `base64(token) rank` per token."""

    def __init__(self, directory: Path):
        path = directory / "tokenizer.txt"
        try:
            data = path.read_bytes()
            ranks = {base64.b64decode(line.partition(b" ")[0]): i for i, line in enumerate(data.splitlines())}
            sizes = [len(token) for token in ranks]
            if self.dump(ranks) != data or 0 in sizes or sizes.count(1) < 256 or len(sizes) > 65000:
                raise ValueError("damaged")
        except (OSError, ValueError) as error:
            raise PrepareError(f"no usable tokenizer in {path} ({error}): rerun the prepare.py command") from None
        specials = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.encoding = tiktoken.Encoding("bpe", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
        self.directory, self.token_bytes = directory, sizes + [0] * len(specials)
        self.fingerprint = sha256(data + repr((SPLIT_PATTERN, SPECIAL_TOKENS)).encode()).digest()

    @classmethod
    def from_directory(cls, directory: str | Path | None = None) -> Tokenizer:
        """The tokenizer of a dataset's folder (None: current_dataset())."""
        return cls(Path(directory or current_dataset()))

    @staticmethod
    def dump(ranks: dict[bytes, int]) -> bytes:
        return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())

    @classmethod
    def train(cls, texts: Iterable[str], directory: Path) -> Tokenizer:
        import rustbpe

        if VOCAB_SIZE not in range(260, 65001):  # all bytes and special tokens; uint16
            raise PrepareError(f"VOCAB_SIZE = {VOCAB_SIZE!r} is out of range: set it to 260 to 65000")
        bpe = rustbpe.Tokenizer()
        texts = next(batches((text[:TOKENIZER_DOC_CHARS] for text in texts), TOKENIZER_CHARS), [])
        bpe.train_from_iterator(texts, VOCAB_SIZE - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
        ranks = {bytes(token): rank for token, rank in bpe.get_mergeable_ranks()}
        with new_file(directory / "tokenizer.txt") as file:
            file.write(cls.dump(ranks))
        print(f"tokenizer: {len(ranks)} tokens", flush=True)
        return cls(directory)

    def get_vocab_size(self) -> int:
        return self.encoding.n_vocab

    def get_bos_token_id(self) -> int:
        return self.encoding.encode_single_token(SPECIAL_TOKENS[0])

    def encode(self, text: str | list[str], prepend: int | str | None = None) -> list:
        """Token ids of a text, or a list of ids per text. prepend: id or name of a special token to put first."""
        if isinstance(prepend, str):
            prepend = self.encoding.encode_single_token(prepend)
        if not isinstance(text, str):
            with ThreadPoolExecutor(8) as pool:
                return list(pool.map(lambda one: self.encode(one, prepend), text))
        ids = [] if prepend is None else [prepend]
        return ids + [i for piece in PIECE.findall(text) for i in self.encoding.encode_ordinary(piece)]

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)


def get_token_bytes(device="cpu"):
    """Raw bytes per token of the current dataset's tokenizer, 0 for special tokens: int32 (vocab,)."""
    import torch

    return torch.tensor(Tokenizer.from_directory().token_bytes, dtype=torch.int32, device=device)


# ---- Token shards
# A 128-byte header, then the tokens as uint16, all little-endian
MAGIC = b"token shards, v2"
SPLITS, SHARD = ("train", "val", "test"), "{}_{:05d}.bin".format  # SHARD(split, number)
HEADER = struct.Struct("<16sQ32s32s40x")  # magic, number of tokens, tokenizer's fingerprint, SHA-256 of the tokens


def open_shard(path: Path, fingerprint: bytes, verify: bool = False) -> tuple[np.ndarray, bytes]:
    """The tokens of a shard, memory-mapped uint16 (n,), and their SHA-256, recomputed only if `verify`."""
    try:
        data = np.memmap(path, "<u2", "r")
        *header, checksum = HEADER.unpack_from(data)
        tokens = data[HEADER.size // 2 :]
        if header != [MAGIC, len(tokens), fingerprint] or (verify and sha256(tokens).digest() != checksum):
            raise ValueError("damaged, or made by another tokenizer")
    except (OSError, ValueError, struct.error) as error:
        raise PrepareError(f"{path}: {error}; delete it, rerun the prepare.py command") from None
    return tokens, checksum


def dataset_id(directory: Path | None = None) -> str:
    """Name and hash of all train and val tokens: `climbmix-1a2b3c4d`. Scores compare only if their ids are equal."""
    tokenizer = Tokenizer.from_directory(directory)
    train, val = (TokenStream(tokenizer, split) for split in ("train", "val"))
    checksums = train.checksums + val.checksums
    if (scored := min(EVAL_TOKENS, len(val) - 1)) != min(2**22, len(val) - 1):  # the constant was edited
        checksums += (b"%d targets" % scored,)
    return f"{tokenizer.directory.name.partition('@')[0]}-{sha256(b''.join(checksums)).hexdigest()[:8]}"


# ---- Sources of text
HUB = {"climbmix": "karpathy/climbmix-400b-shuffle", "tinystories": "karpathy/tinystories-gpt4-clean"}
SOURCES = (*HUB, "embedded")
MAX_SHARDS, TEST_FILE, VAL_FILE = 6541, "shard_06541.parquet", "shard_06542.parquet"  # climbmix's last two
SHARD_CHARS = 2**26  # characters per train shard of the user's own folder
# A .txt is tokenized in passages that end at the last newline within 2^13 characters, else after them
PASSAGE = re.compile(r"(?s:.{1,8191})(?:\n|\Z)|(?s:.{1,8192})")
Texts = Iterator[Iterable[str]]  # what tokenizer, test shard, val shard and each train shard are made from


def find_source(data: str) -> tuple[str, Callable]:
    """Returns `label@hash` (a hash of text and constants) and a function from num_shards (None: all) to Texts."""
    if data in SOURCES:
        contents = HUB.get(data, sys.version_info)
        label, texts = data, lambda n: part_texts(source_parts(data, n), HUB.get(data))
    else:
        label, contents, texts = find_folder(Path(data).resolve())
    sizes = [VOCAB_SIZE, EVAL_TOKENS, TOKENIZER_CHARS, TOKENIZER_DOC_CHARS, SHARD_CHARS]
    shape = repr([MAGIC, SPLIT_PATTERN, SPECIAL_TOKENS, sizes, contents])
    return f"{label}@{sha256(shape.encode()).hexdigest()[:8]}", texts


def find_folder(folder: Path) -> tuple[str, list, Callable]:
    """The same for a user's folder: label, what goes into the hash, function from num_shards to Texts."""
    if not folder.is_dir():
        raise PrepareError(f"--data {folder}: check the spelling, or give a folder or one of {', '.join(SOURCES)}")
    files = [p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()]  # links to folders are not followed
    if (cache := cache_dir().resolve()).is_relative_to(folder):  # what was made from this text is not part of it
        files = [p for p in files if not p.is_relative_to(cache)]
    names = sorted(p.relative_to(folder).as_posix() for p in files)
    names = [name for name in names if "/." not in f"/{name}"]  # without hidden files
    chosen = [name for name in names if name.lower().endswith((".parquet", ".txt")) and (folder / name).is_file()]
    if not chosen:
        raise PrepareError(f"no .parquet or .txt files in {folder}: convert what is there")
    parquet = {name for name in chosen if "/" not in name and name.lower().endswith(".parquet")}
    if climbmix_like := {VAL_FILE} < parquet - {TEST_FILE}:
        chosen = sorted(parquet, key=lambda name: (name == VAL_FILE, name == TEST_FILE, name))
    if skipped := sorted({*names} - {*chosen}):
        print(f"in {folder}, not read ({len(skipped)}): {', '.join(skipped):.1000}")
    paths = [folder / name for name in chosen]
    label = re.sub(r"[^\w.-]+", "-", folder.name, flags=re.ASCII).lstrip(".-")[:99] or "folder"
    if label in SOURCES:
        label += "-folder"
    hashes = {p: sha256(np.memmap(p, mode="r") if p.stat().st_size else b"").digest() for p in paths}
    if climbmix_like:
        return label, [(path.name, hashes[path]) for path in paths], lambda n: part_texts(shard_parts(paths, n))
    paths.sort(key=hashes.get)  # so that names do not matter
    return label, ["by document or span", *sorted(hashes.values())], lambda n: own_texts(paths, n)


def source_parts(data: str, num_shards: int | None) -> list[tuple]:
    """(path, start, stop) for test, val and each train shard: it gets documents [start, stop) of that path."""
    raw = cache_dir() / data / "raw"
    if data == "climbmix":
        return [(raw / f"shard_{i:05d}.parquet", 0, None) for i in (6541, 6542, *range(num_shards))]
    if data == "tinystories":  # 10,000 stories each for test and validation, as its card suggests
        cuts = [0, 10_000, *range(20_000, 20_001 + num_shards * 250_000, 250_000)]
        return [(raw / "tinystories_gpt4_clean.parquet", *cut) for cut in itertools.pairwise(cuts)]
    stdlib = Path(sysconfig.get_path("stdlib"))  # val is the last 5%, test the 5% before
    count = sum(1 for _ in documents(stdlib))
    val = count - max(1, count // 20)
    test = 2 * val - count
    return [(stdlib, test, val), (stdlib, val, None), (stdlib, 0, test)]


def shard_parts(paths: list[Path], num_shards: int | None) -> list[tuple]:
    """The same for a copy of climbmix: val is the last file. Without TEST_FILE, test is the end of the one before: 5%
    of all documents, or all that it has."""
    *train, test, val = [(path, 0, None) for path in paths]
    if paths[-2].name != TEST_FILE:
        counts = [sum(1 for _ in documents(path)) for path in paths]
        start = max(0, counts[-2] - max(1, sum(counts) // 20))
        if start or not train:
            train.append((paths[-2], 0, start))
        test = paths[-2], start, None
    return [test, val, *train[:num_shards]]


def part_texts(parts: list[tuple], repo: str | None = None) -> Texts:
    """The texts of such parts. The tokenizer sees only the first train shard."""

    def texts(path, start, stop):
        if not path.exists():
            download(path, repo)
        yield from filter(None, itertools.islice(documents(path), start, stop))

    return itertools.starmap(texts, [parts[2], *parts])


def own_texts(paths: list[Path], num_shards: int | None) -> Texts:
    """Splits documents by the hash of their text: the lowest 5% are val, the next 5% test, the rest train. A long .txt
    is cut into spans of a twentieth of all text: a page between two of train's would be too easy."""
    longest = max(2**13, sum(len(text) for path in paths for text in documents(path) if text) // 20)

    def hashed():
        for path in paths:
            for text in filter(None, documents(path)):
                cut = path.suffix.lower() == ".txt"
                for span in batches(PASSAGE.findall(text), longest) if cut else [[text]]:
                    yield sha256("".join(span).encode()).digest()[:8], span

    def in_order(chosen):
        pairs = sorted((digest, span) for digest, span in hashed() if chosen[0] <= digest <= chosen[-1])
        return (text for _, span in pairs for text in span)

    sizes = {digest: sum(map(len, span)) for digest, span in hashed()}
    order, twentieth = sorted(sizes), max(1, len(sizes) // 20)
    if len(order) < 3:
        raise PrepareError(f"{len(order)} different documents are too few for three splits: give more files or rows")
    val, test, train = order[:twentieth], order[twentieth : 2 * twentieth], order[2 * twentieth :]
    yield in_order(train[: 1 + len(train) * TOKENIZER_CHARS // sum(sizes.values())])
    yield in_order(test)
    yield in_order(val)
    texts = (text for digest, span in hashed() if digest >= train[0] for text in span)
    yield from itertools.islice(batches(texts, SHARD_CHARS), num_shards)


def batches(texts: Iterable[str], chars: int) -> Iterator[list[str]]:
    """Groups texts into lists of at least `chars` characters; the last one may have fewer."""
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
    """The texts of a file, or of a folder's Python modules. From parquet, some may be empty or None."""
    if path.suffix.lower() == ".parquet":
        yield from parquet_column(path)
    elif path.is_dir():  # Python modules, sorted by the hash of their names
        skip = {"site-packages", "dist-packages", "test", "tests"}  # some distributions leave the tests out
        names = (file.relative_to(path) for file in path.rglob("*.py"))
        for name in sorted(names, key=lambda name: sha256(name.as_posix().encode()).digest()):
            if skip.isdisjoint(name.parts) and (text := (path / name).read_text("utf-8-sig", "replace")):
                yield text
    else:
        try:  # one by one: one emoji makes a str take 4 bytes per letter
            for text in path.read_bytes().replace(b"\r\n", b"\n").split(b"<|endoftext|>"):
                yield text.decode().strip("\ufeff\n")
        except UnicodeDecodeError:
            raise PrepareError(f"{path} is not UTF-8: convert it to UTF-8") from None


def parquet_column(path: Path) -> Iterator[str | None]:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(256, columns=["text"]):
                for text in batch.column(0).to_pylist():  # Arrow has several types that hold strings
                    if not isinstance(text, str | None):
                        raise TypeError(batch.column(0).type)
                    yield text and text.lstrip("\ufeff")
    except Exception as error:
        problem = f"{path} is damaged or has no string column `text` ({one_line(error)})"
        raise PrepareError(f"{problem}: replace it, or rename the column") from None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# ---- Download
ELSEWHERE = "set HF_ENDPOINT to a mirror, or give --data DIR"


class Unreachable(PrepareError):
    """The hub does not answer."""


@cache
def check_hub(endpoint: str) -> None:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=5)
    except Exception as error:
        raise Unreachable(f"cannot reach {endpoint} ({one_line(error)}): go online, {ELSEWHERE}") from None


def download(path: Path, repo: str) -> None:
    """Retries what hf_hub_download does not: it resumes a broken transfer and obeys Retry-After."""
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # plain HTTP
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import hf_hub_download

    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    check_hub(endpoint)
    for wait in (1, 2, 4, 8, None):  # seconds
        shutil.rmtree(path.parent / ".cache", ignore_errors=True)  # left by interrupted runs and attempts
        try:
            hf_hub_download(repo, path.name, repo_type="dataset", local_dir=path.parent, endpoint=endpoint)
            next(documents(path), None)  # raises if it is not a parquet file
            return
        except Exception as error:  # from requests, httpx or huggingface_hub
            if getattr(error, "errno", None):  # from the disk
                raise
            path.unlink(missing_ok=True)  # not parquet
            cause = error.__cause__ or error
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        problem = f"{path.name} of {repo}: {one_line(cause)}"
        if not wait or (400 <= status < 500 and status not in (408, 416, 429)):
            login = "renew or unset HF_TOKEN (or `hf auth logout`), " if status in (401, 403) else ""
            raise PrepareError(f"{problem}; {login}run again, {ELSEWHERE}")
        print(f"{problem}; trying again in {wait} s", flush=True)
        time.sleep(wait)


# ---- Preparing
def prepare(data: str | None = None, num_shards: int | None = None) -> Path:
    """Makes `data` this clone's dataset (None: the one it has, else climbmix) and returns its folder. Without a network
    and an argument, takes the dataset that is ready, else `embedded`."""
    if num_shards is not None and not 1 <= num_shards <= MAX_SHARDS:
        raise PrepareError(f"--num-shards {num_shards} is out of range: give 1 to {MAX_SHARDS}")
    if data == "":
        raise PrepareError("--data is empty: name a dataset or a folder")
    own = read(DATASET)
    wanted = data or own.partition("@")[0] or "climbmix"
    if not data and wanted not in SOURCES:  # made from a folder, whose path is not recorded
        if num_shards or not is_ready(cache_dir() / own):
            raise PrepareError(f"this clone's dataset, {own}, is from a folder: run again with --data and that folder")
        return current_dataset()
    if not data and wanted == "embedded":  # perhaps only as there was no network
        print("This clone trains on Python's standard library: for other text, give --data climbmix")
    try:
        directory = make(wanted, num_shards)
    except Unreachable as error:
        if data or num_shards:
            raise
        with suppress(PrepareError):
            if is_ready(directory := current_dataset()):
                print(f"{error}\nNO NETWORK: using {directory.name}, which is ready in {cache_dir()}")
                return directory
        if own:
            raise
        print(f"{error}\nNO NETWORK: using Python's standard library. Compare its val_bpb with no other.")
        return make("embedded", None)
    if own != directory.name:
        DATASET.write_text(directory.name)
    return directory


def make(data: str, num_shards: int | None) -> Path:
    """Prepares a dataset unless it is ready, and makes it `current`. Each number of shards is a separate dataset."""
    name, texts = find_source(data)
    count = None if data == "embedded" else num_shards or default_shards(data, name)
    directory = cache_dir() / (f"{name}x{count}" if count else name)
    if not is_ready(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory.with_name("lock"), "ab") as file:
            if not lock(file, patience=0):
                print(f"another prepare.py is working in {directory.parent}: waiting for it", flush=True)
                lock(file, math.inf)
            if not is_ready(directory):  # what we waited for may have made it
                build(directory, texts(count))
    if read(current := directory.with_name("current")) != directory.name:
        with suppress(OSError), new_file(current) as file:  # the cache may be read-only
            file.write(directory.name.encode() + b"\n")
    return directory


def default_shards(data: str, name: str) -> int | None:
    """As many as the dataset has; from the hub, at least as many as five minutes consume. None: all."""
    own, _, shards = (read(DATASET) or read(cache_dir() / "current")).rpartition("x")
    have = int(shards or 0) if own == name else 0
    if data in HUB and have < 10:
        import torch

        if torch.cuda.is_available():
            return max(have, 10 if torch.cuda.get_device_capability() >= (8, 0) else 2)
        if not have:
            print("no GPU here, so one shard; for another GPU give --num-shards 2 (T4, V100) or 10 (newer)")
            return 1
    return have or None


def is_ready(directory: Path) -> bool:
    with suppress(PrepareError):
        tokenizer = Tokenizer(directory)
        return all(TokenStream(tokenizer, split) for split in SPLITS)
    return False


def build(directory: Path, sources: Texts) -> None:
    """Makes what is missing or damaged."""
    texts = next(sources)
    try:
        tokenizer = Tokenizer(directory)
    except PrepareError:
        tokenizer = Tokenizer.train(texts, directory)
    names = itertools.chain([SHARD("test", 0), SHARD("val", 0)], (SHARD("train", i) for i in itertools.count()))
    for name, texts in zip(names, sources, strict=False):
        try:
            open_shard(directory / name, tokenizer.fingerprint, verify=True)
        except PrepareError:
            tokenize(texts, directory / name, tokenizer)
    with new_file(directory / "train_shards") as file:
        file.write(b"%d\n" % len([*directory.glob("train_*.bin")]))


def tokenize(texts: Iterable[str], path: Path, tokenizer: Tokenizer) -> None:
    """Writes a token shard. Threads suffice, as tiktoken releases the GIL: 14 MB/s per core; processes gave 17."""
    limit = math.inf if path.name.startswith("train") else EVAL_TOKENS + 1
    bos, workers = np.array([tokenizer.get_bos_token_id()], "<u2"), os.cpu_count() or 1
    numbers = partial(tokenizer.encoding.encode_to_numpy, disallowed_special=())

    def encode(batch):
        ids = [part for text in batch for part in (bos, *map(numbers, PIECE.findall(text)))]
        return np.concatenate(ids).astype("<u2")

    n, checksum, waiting = 0, sha256(), batches(texts, 2**18)
    some = iter(lambda: list(itertools.islice(waiting, 4 * workers)), [])  # a dataset may not fit into memory
    with new_file(path) as file, ThreadPoolExecutor(workers) as pool:
        file.seek(HEADER.size)
        for tokens in itertools.chain.from_iterable(pool.map(encode, part) for part in some):
            file.write(tokens)
            checksum.update(tokens)
            n += len(tokens)
            if n >= limit:
                break
        if n == 0:
            raise PrepareError(f"no text left for {path.name}: give a smaller --num-shards, or more text")
        file.seek(0)
        file.write(HEADER.pack(MAGIC, n, tokenizer.fingerprint, checksum.digest()))
    print(f"{path.stem}: {n / 1e6:.1f} M tokens", flush=True)


# ---- Main
class Output(io.FileIO):
    """A full disk, or a reader that has gone, ends nothing: what cannot be written is lost."""

    def write(self, data: bytes) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)


def patient_output() -> None:
    """Lets stdout and stderr lose what they cannot write, such as emoji. Not a notebook's."""
    for name in ("stdout", "stderr"):
        if (old := getattr(sys, name)) and old is getattr(sys, f"__{name}__"):  # None under `>&-`
            raw = io.BufferedWriter(Output(old.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, old.encoding, errors="replace", line_buffering=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the data that train.py trains on.")
    parser.add_argument("--data", help="climbmix (default), tinystories, embedded, or a folder of .parquet or .txt")
    parser.add_argument("--num-shards", type=int, help="train shards (default: as it is, or enough for five minutes)")
    parser.add_argument("--verify", action="store_true", help="check every token of --data, or of the current dataset")
    args = parser.parse_args()
    patient_output()
    try:
        directory = current_dataset() if args.verify and not args.data else prepare(args.data, args.num_shards)
        tokenizer = Tokenizer(directory)
        sizes = [f"{len(TokenStream(tokenizer, split, args.verify)):,} {split}" for split in SPLITS]
        print(f"ready: {dataset_id(directory)}, {', '.join(sizes)} tokens, in {directory}")
    except PrepareError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{one_line(error)}: fix that, or set AUTORESEARCH_CACHE to another folder")
    except KeyboardInterrupt:
        sys.exit("interrupted: run the same command again to continue")


if __name__ == "__main__":
    main()
