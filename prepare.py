"""
Everything that must not move between experiments: data, tokenizer, token shards, loader, metric, clock and log.
train.py imports from here; nobody edits this file during research. It grew out of karpathy/autoresearch's prepare.py.

    python prepare.py                      # climbmix, as many shards as five minutes consume on this GPU
    python prepare.py --data tinystories   # short stories, kinder to small models
    python prepare.py --data DIR           # a folder of .parquet (column `text`) or of .txt

The cache (--cache, else $AUTORESEARCH_CACHE, else ~/.cache/autoresearch-t4) holds a folder a dataset and `current`, the
name of the one prepared last. In a folder: `tokenizer.txt`, token shards `train_00000.bin` ..., `val_00000.bin`, and,
written last, `train_shards`, their number. Files are made under a temporary name and then renamed: an interrupted run
leaves whole ones, and the next run goes on from there. Nothing in the cache is ever executed or unpickled.
"""

from __future__ import annotations

import argparse
import atexit
import base64
import errno
import fcntl
import hashlib
import itertools
import math
import os
import queue
import re
import struct
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

# torch, pyarrow, requests and rustbpe are imported where they are used, so that a second `prepare.py` takes 0.2 s

MAX_SEQ_LEN = 2048  # context length
TIME_BUDGET = 300  # seconds of training
VOCAB_SIZE = 8192
EVAL_TOKENS = 2**22  # targets scored, or all where the validation split holds fewer

# GPT-4's pattern, but numbers in twos: a small vocabulary has no room for all threes
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]
BOS_TOKEN = SPECIAL_TOKENS[0]

# The tokenizer sees the first train shard only, so that it does not depend on --num-shards, and of that at most so many
# characters in all and of a document. Measured on held-out English: 4 / 8 / 16 / 66 / 155 M characters give 3.881 /
# 3.905 / 3.917 / 3.924 / 3.926 bytes a token and take 0.4 / 0.6 / 1.1 / 4.2 / 9.0 s on two cores.
TOKENIZER_CHARS, TOKENIZER_DOC_CHARS = 64_000_000, 10_000

HUB = {"climbmix": "climbmix-400b-shuffle", "tinystories": "tinystories-gpt4-clean"}  # datasets of karpathy
VAL_FILE = "shard_06542.parquet"  # climbmix's last shard, everybody's validation split
TINYSTORIES_CUTS = (10_000, 20_000, 250_000)  # first story of validation, of training; stories in a shard of ours

RESULTS = Path(__file__).resolve().parent / "results.tsv"


class PrepareError(SystemExit):
    """An error for people: one line that names the remedy. Uncaught, it ends the process with that line alone."""


# --------------------------------------------------------------------------------------------------------------- metric


def evaluate_bpb(
    model, tokenizer: Tokenizer, batch_size: int, seq_len: int = MAX_SEQ_LEN, tokens: int = EVAL_TOKENS
) -> float:
    """Bits per byte of the first `tokens` validation targets: sum of nats over sum of raw bytes, BOS in neither.

    Each target is scored exactly once whatever batch_size and seq_len are: targets that fill up the last batch are -1.
    """
    import torch

    device = next(model.parameters()).device
    stream = TokenStream(tokenizer, "val")
    n = min(tokens, len(stream) - 1)
    if n < tokens:
        print(f"the validation split holds {n:,} targets, fewer than {tokens:,}: all are scored")
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


# ---------------------------------------------------------------------------------------------------------------- clock


class Clock:
    """Wall time from the first training step to the end of the last, loading included. It drives every schedule."""

    def __init__(self, seconds: float = TIME_BUDGET, tokens: int | None = None):
        if not seconds > 0 or (tokens is not None and tokens <= 0):
            raise PrepareError(f"a budget of {seconds} s, {tokens} tokens is over before it starts: give more than 0")
        self.seconds, self.limit, self.tokens = seconds, tokens, 0
        self.started = self.stopped = None

    def start(self) -> None:
        self.started = time.perf_counter()

    def advance(self, tokens: int) -> None:
        """After each step."""
        self.tokens += tokens

    def elapsed(self) -> float:
        return 0.0 if self.started is None else (self.stopped or time.perf_counter()) - self.started

    def progress(self) -> float:
        """In [0, 1]: of the tokens where they are limited, else of the seconds."""
        return min(1.0, self.tokens / self.limit if self.limit else self.elapsed() / self.seconds)

    def stop(self) -> float:
        """Training seconds, for good."""
        self.stopped = self.stopped or time.perf_counter()
        return self.elapsed()

    @property
    def official(self) -> bool:
        """Had the whole budget and kept to it: train.py logs such runs only."""
        full = self.seconds == TIME_BUDGET and self.limit is None and self.stopped is not None
        return full and self.elapsed() <= 1.01 * TIME_BUDGET


# --------------------------------------------------------------------------------------------------------------- loader


class TokenStream:
    """The token shards of a split as one sequence."""

    def __init__(self, tokenizer: Tokenizer, split: str):
        assert split in ("train", "val"), f"split is train or val, not {split}"
        shards = open_shards(tokenizer.directory, split, tokenizer.fingerprint)
        self.tokens = [shard.tokens for shard in shards]
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
    """Endless (x, y, epoch), int64 (B, T) on `device` (None: cuda, or else cpu); y is x one token later.

    Train windows come shuffled, those of val in order. A batch is valid until the next but one is asked for.
    """
    import torch

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    stream = TokenStream(tokenizer, split)
    if len(stream) <= T:
        raise PrepareError(f"T={T} is too long for a {split} split of {len(stream)} tokens: prepare more text")
    order = windows(len(stream), T, shuffle=split == "train")

    def fill(batch) -> int:
        """Writes the next batch to (2, B, T) int64, x and y; returns its epoch."""
        for x, y in zip(*batch.numpy(), strict=True):
            start, epoch = next(order)
            tokens = stream.read(start, T + 1)
            x[:], y[:] = tokens[:-1], tokens[1:]
        return epoch

    def plain() -> Iterator:
        while True:
            batch = torch.empty(2, B, T, dtype=torch.int64)
            epoch = fill(batch)
            yield *batch, epoch

    return prefetched(fill, (2, B, T), device) if device.type == "cuda" else plain()


def prefetched(fill: Callable, shape: tuple[int, int, int], device) -> Iterator:
    """A thread fills pinned buffers and copies them to the GPU on a stream of its own, a batch ahead.

    Of three slots the caller may still read two while the third is filled. Events order the streams, so that the host
    waits for none: a copy waits for the kernels that read the slot before, the caller's kernels wait for the copy.
    """
    import torch

    class Slot:
        def __init__(self):
            self.host = torch.empty(shape, dtype=torch.int64, pin_memory=True)
            self.batch = torch.empty(shape, dtype=torch.int64, device=device)
            self.copied, self.released = torch.cuda.Event(), torch.cuda.Event()

    free, ready, used = queue.SimpleQueue(), queue.SimpleQueue(), deque()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # whoever used the slots' memory before is done with it
    for _ in range(3):
        free.put(Slot())

    def work() -> None:
        try:
            while slot := free.get():
                slot.copied.synchronize()  # its pinned buffer has been read
                epoch = fill(slot.host)
                with torch.cuda.stream(stream):
                    stream.wait_event(slot.released)
                    slot.batch.copy_(slot.host, non_blocking=True)
                    slot.copied.record(stream)
                ready.put((slot, epoch, None))
        except BaseException as error:  # or the caller would wait for ever
            ready.put((None, 0, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def stop() -> None:
        free.put(None)
        thread.join()

    atexit.register(stop)  # a thread that is inside of CUDA when the interpreter ends would abort the process
    try:
        while True:
            slot, epoch, error = ready.get()
            if error:
                raise error
            torch.cuda.current_stream(device).wait_event(slot.copied)
            used.append(slot)
            yield *slot.batch, epoch
            if len(used) == 2:
                slot = used.popleft()
                slot.released.record(torch.cuda.current_stream(device))
                free.put(slot)
    finally:
        atexit.unregister(stop)
        if not sys.is_finalizing():  # or it has stopped already, and CUDA may be gone
            stop()
            stream.synchronize()  # no copy may land in memory that was given back


# ------------------------------------------------------------------------------------------------------------------ log

COLUMNS = ["commit", "val_bpb", "memory_gb", "status", "description", "gpu", "dataset", "tokens_M"]


def read_results(path: str | Path | None = None) -> list[dict]:
    """The rows of results.tsv, numbers as floats. Whatever is not a row is skipped."""
    rows, data = [], b""
    with suppress(OSError):
        data = Path(path or RESULTS).read_bytes()
    for line in data.decode(errors="replace").split("\n"):
        fields = line.removesuffix("\r").split("\t")
        with suppress(ValueError):
            row = dict(zip(COLUMNS, [*fields, "0.0"] if len(fields) == 7 else fields, strict=True))
            row |= {key: float(row[key]) for key in ("val_bpb", "memory_gb", "tokens_M")}
            if row["status"] in ("keep", "discard", "crash") and math.isfinite(row["val_bpb"] + row["memory_gb"]):
                rows.append(row)
    return rows


def log_result(
    *,
    val_bpb: float,
    memory_gb: float,
    gpu: str,
    dataset: str,
    tokens_M: float = 0.0,
    reason: str = "",
    commit: str | None = None,
    description: str | None = None,
    path: str | Path | None = None,
) -> str:
    """Appends one row to results.tsv and returns its status: `keep` for the lowest val_bpb yet on that gpu and dataset,
    else `discard`; or `crash`. A row that the file refuses goes to stderr and to `results.tsv.rescued` beside it."""
    path = Path(path or RESULTS)
    rescued = path.with_name(path.name + ".rescued")
    if commit is None or description is None:
        head = git_head()
        commit, description = commit or head[0], head[1] if description is None else description
    description = f"{description} [{reason}]" if reason else description
    commit, description, gpu, dataset = map(clean, (commit[:7], description, gpu, dataset))

    def row() -> tuple[str, str]:
        tail = [description, gpu, dataset, f"{tokens_M:.1f}"]
        if reason or not math.isfinite(val_bpb):
            return "crash", "\t".join([commit, "0.000000", "0.0", "crash", *tail])
        rows = [r for r in read_results(path) + read_results(rescued) if r["status"] != "crash"]
        best = min((r["val_bpb"] for r in rows if (r["gpu"], r["dataset"]) == (gpu, dataset)), default=math.inf)
        status = "keep" if round(val_bpb, 6) < best else "discard"
        return status, "\t".join([commit, f"{val_bpb:.6f}", f"{memory_gb:.1f}", status, *tail])

    try:
        return append_row(path, row)
    except (OSError, ValueError) as error:
        status, line = row()
        print(f"{path} refuses this row ({error}); see also {rescued.name}\n{line}", file=sys.stderr, flush=True)
        with suppress(OSError, ValueError):
            append_row(rescued, row)
        return status


def append_row(path: Path, row: Callable[[], tuple[str, str]]) -> str:
    """Appends the line of `row()`, a pair of status and line that is asked for under the lock: all of it or nothing."""
    header = "\t".join(COLUMNS)
    while True:
        with open(path, "a+b", buffering=0) as file:
            lock(file, patience=10)
            file.seek(0)
            text = file.read()
            if text and text.split(b"\n")[0].removesuffix(b"\r") != header.encode():
                raise ValueError(f"its first line is not `{' '.join(COLUMNS)}`, tabs between: put that there")
            status, line = row()
            before = "" if text.endswith(b"\n") else "\n" if text else f"{header}\n"
            data = f"{before}{line}\n".encode()
            if file.write(data) != len(data):
                file.truncate(len(text))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return status
        # the file was replaced (by git, say) while we held it: the row belongs into the new one


def clean(field: str) -> str:
    """One field of printable text. A double quote would open a quoted field for pandas."""
    return "".join(c if c.isprintable() else " " for c in str(field)).replace('"', "'").strip()


def git_head() -> tuple[str, str]:
    """Short hash and subject of HEAD in the repository that holds this file."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "log", "-1", "--format=%H%x09%s"]
        out = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, timeout=10, check=True).stdout
        commit, _, subject = out.decode(errors="replace").rstrip("\n").partition("\t")
        return commit[:7], subject
    return "0000000", ""


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def budget_name(seconds: float | None = None, tokens: int | None = None, gpu: str | None = None) -> str:
    """What follows the GPU's name in the gpu column: nothing, or what was set by hand."""
    taken = f" as {gpu}" if gpu else ""
    return taken + (f", {seconds:g} s" if seconds else f", {tokens / 1e6:g} M tokens" if tokens else "")


# =====================================================================================================================
# The making of data starts here. An experiment needs none of it.
# =====================================================================================================================


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
    try:
        temporary.unlink(missing_ok=True)  # an interrupted run's, or a stranger's link to elsewhere
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def lock(file, patience: float, message: str = "") -> None:
    """Locks an open file, or goes on without when patience ends or the file system has no locks (Colab's Drive)."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if message:
                print(message, flush=True)
            message = ""
            time.sleep(0.05)
        except OSError:
            return


# ------------------------------------------------------------------------------------------------------------ tokenizer


class Tokenizer:
    """Byte-level BPE. On disk in tiktoken's text format, a line `base64(token) rank` each."""

    def __init__(self, ranks: dict[bytes, int], fingerprint: bytes = b"", directory: Path | None = None):
        specials = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.encoding = tiktoken.Encoding(
            "autoresearch", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        self.bos_token_id = specials[BOS_TOKEN]
        self.fingerprint = fingerprint  # shards made by another tokenizer are refused
        self.directory = directory  # where its shards are, even if another dataset becomes current during a run

    @classmethod
    def from_directory(cls, directory: str | Path | None = None) -> Tokenizer:
        """None: the dataset prepared last."""
        path = (Path(directory) if directory else current_dataset()) / "tokenizer.txt"
        try:
            if path.stat().st_size > 2**24:
                raise ValueError("too large")
            data = path.read_bytes()
            ranks = {base64.b64decode(line.partition(b" ")[0]): i for i, line in enumerate(data.splitlines())}
            every_byte = {bytes([byte]) for byte in range(256)}
            if cls.dump(ranks) != data or b"" in ranks or not every_byte <= ranks.keys() or len(ranks) > 65000:
                raise ValueError("not distinct tokens, each on the line of its rank, every byte among them")
        except (OSError, ValueError) as error:
            raise PrepareError(f"no usable tokenizer in {path} ({error}): run prepare.py again") from None
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
        """Ids of a text or of each of a list, after `prepend` (id or name). Special tokens' names in it are text."""
        if isinstance(prepend, str):
            prepend = self.encoding.encode_single_token(prepend)
        head = [] if prepend is None else [prepend]
        if isinstance(text, str):
            return head + self.encoding.encode_ordinary(text)
        return [head + ids for ids in self.encoding.encode_ordinary_batch(text, num_threads=os.cpu_count() or 1)]

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)

    def token_bytes(self) -> list[int]:
        """Raw bytes of each token, 0 for special ones. decode() would make 3 bytes of a piece of a character."""
        ordinary = range(self.get_vocab_size() - len(SPECIAL_TOKENS))
        return [len(self.encoding.decode_single_token_bytes(i)) for i in ordinary] + [0] * len(SPECIAL_TOKENS)


def get_token_bytes(device="cpu"):
    """(vocab,) int32: raw bytes of each token of the current dataset's tokenizer, 0 for special ones."""
    import torch

    return torch.tensor(Tokenizer.from_directory().token_bytes(), dtype=torch.int32, device=device)


# --------------------------------------------------------------------------------------------------------- token shards
# Header, tokens (uint16), index (uint64: where each document begins), all little-endian. The header ends with a SHA-256
# of its other fields and the index, which is checked at every open; --verify checks the one of the tokens.

# magic, version, bytes a token, tokens, documents, fingerprint of the tokenizer, SHA-256 of the tokens
HEADER = struct.Struct("<8sIIQQ32s32s")
BODY = HEADER.size + 32
MAGIC, VERSION = b"tokshard", 1


@dataclass(frozen=True)
class TokenShard:
    tokens: np.ndarray  # (tokens,) uint16, memory-mapped
    documents: np.ndarray  # (documents,) uint64: where each begins, with BOS
    checksum: bytes  # of the tokens


def write_shard(path: Path, encoded: Iterable[tuple[np.ndarray, list[int]]], fingerprint: bytes, limit: float) -> int:
    """From pairs (tokens, length of each document); stops once there are `limit` tokens. Returns their number."""
    checksum, n, starts = hashlib.sha256(), 0, []
    with new_file(path) as file:
        file.seek(BODY)
        for tokens, lengths in encoded:
            data = tokens.astype("<u2").tobytes()
            file.write(data)
            checksum.update(data)
            starts.append(n + np.cumsum([0, *lengths[:-1]]))
            n += len(tokens)
            if n >= limit:
                break
        if n == 0:
            raise PrepareError(f"no text left for {path.name}: ask for fewer --num-shards or give more text")
        index = np.concatenate(starts).astype("<u8")
        file.write(index.tobytes())
        header = HEADER.pack(MAGIC, VERSION, 2, n, len(index), fingerprint, checksum.digest())
        file.seek(0)
        file.write(header + hashlib.sha256(header + index.tobytes()).digest())
    return n


def open_shard(path: Path, fingerprint: bytes, verify: bool = False) -> TokenShard:
    try:
        with open(path, "rb") as file:
            size, header, seal = os.fstat(file.fileno()).st_size, file.read(HEADER.size), file.read(32)
            if len(seal) < 32 or not header.startswith(MAGIC):
                raise ValueError("not a token shard")
            _, version, width, n, documents, tokenizer, checksum = HEADER.unpack(header)
            if (version, width) != (VERSION, 2):
                raise ValueError(f"version {version} with {width} bytes a token is unknown here")
            if n == 0 or size != BODY + 2 * n + 8 * documents:  # nothing is allocated for what a header merely claims
                raise ValueError(f"{size} bytes do not hold {n} tokens and {documents} documents")
            file.seek(BODY + 2 * n)
            index = file.read(8 * documents)
            if hashlib.sha256(header + index).digest() != seal:
                raise ValueError("damaged header or index")
            if tokenizer != fingerprint:
                raise ValueError("made by another tokenizer")
            tokens = np.memmap(file, "<u2", "r", BODY, (n,))
            if verify and hashlib.sha256(tokens).digest() != checksum:
                raise ValueError("damaged tokens")
    except (OSError, ValueError) as error:
        raise PrepareError(f"{path}: {error}; delete it and run prepare.py again") from None
    return TokenShard(tokens, np.frombuffer(index, "<u8"), checksum)


def open_shards(directory: Path, split: str, fingerprint: bytes, verify: bool = False) -> list[TokenShard]:
    count = b""
    with suppress(OSError):
        count = (directory / "train_shards").read_bytes()
    if not re.fullmatch(rb"[1-9]\d{0,3}\n", count):
        raise PrepareError(f"{directory} is not prepared to the end: run prepare.py again")
    numbers = range(int(count) if split == "train" else 1)
    return [open_shard(directory / f"{split}_{i:05d}.bin", fingerprint, verify) for i in numbers]


def dataset_id(directory: Path | None = None) -> str:
    """Like `climbmix-1a2b3c4d`: name and fingerprint of all tokens. Results on different data never compare."""
    tokenizer = Tokenizer.from_directory(directory)
    shards = [s for split in ("train", "val") for s in open_shards(tokenizer.directory, split, tokenizer.fingerprint)]
    fingerprint = hashlib.sha256(b"".join(shard.checksum for shard in shards)).hexdigest()[:8]
    return f"{tokenizer.directory.name.partition('@')[0]}-{fingerprint}"


# ------------------------------------------------------------------------------------------------------ sources of text


@dataclass(frozen=True)
class Part:
    """Documents [start, stop) of a file, or of the standard library's folder: they become one token shard."""

    path: Path
    start: int = 0
    stop: int | None = None
    url: str = ""  # where the file comes from


def hub_parts(data: str, num_shards: int) -> tuple[list[Part], Part]:
    """Train parts, validation part. climbmix: a file each. tinystories: one file, cut where its other users cut it."""
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")

    def part(file: str, start: int = 0, stop: int | None = None) -> Part:
        url = f"{endpoint}/datasets/karpathy/{HUB[data]}/resolve/main/{file}"
        return Part(cache_dir() / data / "raw" / file, start, stop, url)

    if data == "climbmix":
        return [part(f"shard_{i:05d}.parquet") for i in range(num_shards)], part(VAL_FILE)
    val, train, size = TINYSTORIES_CUTS
    starts = range(train, train + num_shards * size, size)
    file = "tinystories_gpt4_clean.parquet"
    return [part(file, start, start + size) for start in starts], part(file, val, train)


def folder_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.parquet")) or sorted(folder.glob("*.txt"))
    if not files:
        raise PrepareError(f"no .parquet or .txt in {folder}: give --data another folder, or {' or '.join(HUB)}")
    return sorted(files, key=lambda file: file.name == VAL_FILE)  # the last one validates


def folder_parts(folder: Path, num_shards: int) -> tuple[list[Part], Part]:
    """The last file validates, or the last 5% of the only one."""
    *train, val = folder_files(folder)
    for file in [*train, val]:
        if file.suffix == ".parquet":
            open_parquet(file)
    if train:
        return [Part(file) for file in train[:num_shards]], Part(val)
    total = sum(1 for _ in documents(Part(val)))
    if total < 2:
        raise PrepareError(f"{val} holds {total} documents: give at least 2, one of them is for validation")
    cut = total - max(1, total // 20)
    return [Part(val, 0, cut)], Part(val, cut)


def embedded_parts() -> tuple[list[Part], Part]:
    """The running Python's own standard library, so that everything runs with no network: a module is a document."""
    root = Path(sysconfig.get_path("stdlib"))
    cut = len(stdlib_modules(root)) * 19 // 20
    return [Part(root, 0, cut)], Part(root, cut)


def stdlib_modules(root: Path) -> list[Path]:
    """In the order of their names' hashes, so that the last 5% are of all kinds."""
    skip = {"site-packages", "dist-packages", "test", "tests"}  # tests: some distributions leave them out
    modules = [path.relative_to(root) for path in root.rglob("*.py")]
    modules = [module for module in modules if not skip & set(module.parts)]
    return [root / module for module in sorted(modules, key=lambda m: hashlib.sha256(m.as_posix().encode()).digest())]


def open_parquet(path: Path):
    """A pyarrow ParquetFile with a column `text` of strings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        types = {field.name: str(field.type) for field in file.schema_arrow}
    except (OSError, ValueError, pa.ArrowException) as error:
        raise PrepareError(f"{path} is not a parquet file: delete or replace it ({one_line(error)})") from None
    if types.get("text") not in ("string", "large_string"):
        raise PrepareError(f"{path} has no column `text` of strings: rename its text column (it has {types})")
    return file


def documents(part: Part) -> Iterator[str]:
    """The part's texts, the empty ones left out."""
    if part.path.is_dir():
        modules = stdlib_modules(part.path)[part.start : part.stop]
        return filter(None, (module.read_text("utf-8", errors="replace") for module in modules))
    return text_documents(part) if part.path.suffix == ".txt" else parquet_documents(part)


def parquet_documents(part: Part) -> Iterator[str]:
    import pyarrow as pa

    file, end = open_parquet(part.path), 0
    stop = file.metadata.num_rows if part.stop is None else part.stop
    try:
        for group in range(file.num_row_groups):
            begin, end = end, end + file.metadata.row_group(group).num_rows
            if end <= part.start or begin >= stop:
                continue
            for batch in file.iter_batches(256, row_groups=[group], columns=["text"]):
                texts = batch.column(0).to_pylist()
                yield from filter(None, texts[max(0, part.start - begin) : max(0, stop - begin)])
                begin += len(texts)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise PrepareError(f"{part.path} is damaged: delete or replace it, run again ({one_line(error)})") from None


def text_documents(part: Part) -> Iterator[str]:
    """A document ends at <|endoftext|>, or at the last line end within 64 Ki characters: a book is many."""
    texts = part.path.read_text("utf-8", errors="replace").split("<|endoftext|>")
    pieces = (re.findall(r"(?s:.{1,65535})(?:\n|\Z)|(?s:.{1,65536})", text.strip("\n")) for text in texts)
    return itertools.islice(itertools.chain.from_iterable(pieces), part.start, part.stop)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# ------------------------------------------------------------------------------------------------------------- download

READ_TIMEOUT = 20  # seconds of silence that make a stall
ATTEMPTS, BACKOFF, MAX_WAIT = 6, 1.0, 60  # waits of 1, 2, 4, 8, 16 s, or what the server asks for up to a minute


def download(url: str, path: Path) -> None:
    """A parquet file over HTTP. What an interrupted transfer left, in this run or an earlier one, is resumed."""
    import requests

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    if partial.is_symlink():  # a stranger's, to elsewhere
        partial.unlink()

    def attempt() -> None:
        have = partial.stat().st_size if partial.exists() else 0
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(url, headers=headers, stream=True, timeout=(5, READ_TIMEOUT)) as response:
            status, length = response.status_code, response.headers.get("Content-Length", "")
            if status == 416:  # we hold more than there is
                partial.unlink()
            if status in (408, 416, 429) or status >= 500:
                raise requests.HTTPError(f"status {status}", response=response)
            if status not in (200, 206):
                raise PrepareError(f"{url}: status {status}; check HF_ENDPOINT, or give --data DIR")
            if status == 200:  # from the beginning: asked for, or the server has no ranges
                have = 0
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise requests.HTTPError("a range that was not asked for")
            total = have + int(length) if length.isdigit() else None
            bar = tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=path.name, disable=None)
            with open(partial, "ab") as file, bar:
                file.truncate(have)
                for chunk in response.iter_content(2**16):
                    file.write(chunk)
                    bar.update(len(chunk))
                file.flush()
                os.fsync(file.fileno())
                if total not in (None, os.fstat(file.fileno()).st_size):
                    raise requests.ConnectionError(f"not the {total} bytes that were announced")
        try:
            open_parquet(partial)
        except PrepareError as error:
            partial.unlink()
            raise requests.HTTPError(str(error)) from None
        os.replace(partial, path)

    failures, best = 0, 0
    while True:
        try:
            return attempt()
        except requests.RequestException as error:
            reached = partial.stat().st_size if partial.exists() else 0
            if reached >= best + 2**20:  # a bad line that moves is not a dead one
                failures, best = 0, reached
            failures += 1
            if failures == ATTEMPTS:
                remedy = "run again to go on, set HF_ENDPOINT to a mirror, or give --data DIR"
                raise PrepareError(f"{url}: {one_line(error)}; {remedy}") from None
            asked = "" if error.response is None else error.response.headers.get("Retry-After", "")
            seconds = min(MAX_WAIT, int(asked) if asked.isdigit() else BACKOFF * 2 ** (failures - 1))
            print(f"{path.name}: {one_line(error)}; again in {seconds:.0f} s", flush=True)
            time.sleep(seconds)


def reachable(url: str) -> bool:
    """Within seconds: looking a name up has no timeout of its own, hence the thread."""
    import requests

    answers = []

    def ask() -> None:
        with suppress(requests.RequestException):
            answers.append(requests.head(url, timeout=(3, 5)))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(8)
    return bool(answers)


# ------------------------------------------------------------------------------------------------------------ preparing


def prepare(data: str | None = None, num_shards: int | None = None) -> Path:
    """Makes `data` (None: climbmix, or the embedded corpus) the current dataset; returns its folder."""
    if num_shards is not None and not 1 <= num_shards <= 6542:
        raise PrepareError(f"--num-shards {num_shards} is not possible: give 1 to 6542")
    if data is None:
        data = "climbmix"
        if not is_ready(cache_dir() / data, num_shards) and not reachable(hub_parts(data, 1)[1].url):
            print("NO NETWORK: falling back to the embedded corpus, the source text of this Python's standard library.")
            print("Its val_bpb compares with no other. For real text go online, set HF_ENDPOINT, or give --data DIR.")
            data = "embedded"

    if data in HUB:
        name = data
    elif data == "embedded":
        name, num_shards = "embedded@{}.{}.{}".format(*sys.version_info), 1
    elif Path(data).is_dir():
        files = folder_files(Path(data))
        num_shards = min(num_shards or len(files), max(1, len(files) - 1))
        identity = repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])
        label = re.sub(r"[^\w.-]+", "-", Path(data).resolve().name, flags=re.ASCII).lstrip(".-") or "folder"
        name = f"{label}@{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    else:
        raise PrepareError(f"--data {data} is no folder, and none of {', '.join(HUB)}, embedded: check the spelling")

    directory = cache_dir() / name
    ready = is_ready(directory, num_shards)
    with suppress(PrepareError):
        if ready and current_dataset() == directory:
            return directory
    parts = None
    if not ready and data in HUB:
        parts = hub_parts(data, num_shards or default_shards())
        missing = [part.url for part in [*parts[0], parts[1]] if not part.path.exists()]
        if missing and not reachable(missing[0]):
            raise PrepareError(f"cannot reach {missing[0]}: go online, set HF_ENDPOINT to a mirror, or give --data DIR")
    elif not ready:
        parts = embedded_parts() if data == "embedded" else folder_parts(Path(data), num_shards)
    cache_dir().mkdir(parents=True, exist_ok=True)
    with open(cache_dir() / "lock", "ab") as file:
        lock(file, math.inf, f"another prepare.py is at work in {cache_dir()}: waiting for it")
        if parts:
            build(directory, *parts)
        with new_file(cache_dir() / "current") as current:
            current.write(f"{name}\n".encode())
    return directory


def is_ready(directory: Path, num_shards: int | None) -> bool:
    """Prepared to the end, and with that many train shards (None: any number)."""
    try:
        fingerprint = Tokenizer.from_directory(directory).fingerprint
        open_shards(directory, "val", fingerprint)
        return num_shards in (None, len(open_shards(directory, "train", fingerprint)))
    except PrepareError:
        return False


def default_shards() -> int:
    """What five minutes consume on a Hopper, on a T4, and without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return 1
    return 10 if torch.cuda.get_device_capability() >= (8, 0) else 2


def build(directory: Path, train: list[Part], val: Part) -> None:
    """Whatever is there and whole is kept."""
    directory.mkdir(exist_ok=True)
    for part in [*train, val]:
        if part.url and not part.path.exists():
            download(part.url, part.path)
    try:
        tokenizer = Tokenizer.from_directory(directory)
    except PrepareError:
        Tokenizer.train(documents(train[0]), directory / "tokenizer.txt")
        tokenizer = Tokenizer.from_directory(directory)
    shards = [(f"train_{i:05d}.bin", part, math.inf) for i, part in enumerate(train)]
    for name, part, limit in [*shards, ("val_00000.bin", val, EVAL_TOKENS + 1)]:
        try:
            open_shard(directory / name, tokenizer.fingerprint)
        except PrepareError:
            tokenize(part, directory / name, tokenizer, limit)
    with new_file(directory / "train_shards") as file:
        file.write(b"%d\n" % len(train))


def tokenize(part: Part, path: Path, tokenizer: Tokenizer, limit: float) -> None:
    """In threads: tiktoken lets go of the interpreter lock. On two cores 14 MB/s each; processes gave 17."""
    bos = np.array([tokenizer.get_bos_token_id()])
    bar = tqdm(unit="B", unit_scale=True, desc=path.stem, disable=None)

    def batches() -> Iterator[list[str]]:
        batch, size = [], 0
        for text in documents(part):
            batch.append(text)
            size += len(text)
            if size >= 2**18:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def encode(batch: list[str]) -> tuple[np.ndarray, list[int]]:
        encoded = []
        for text in batch:
            pieces = [text[i : i + 2**18] for i in range(0, len(text), 2**18)]  # the regex overflows on 10^6 spaces
            ids = [tokenizer.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces]
            encoded.append(np.concatenate([bos, *ids]))
        bar.update(sum(len(text.encode()) for text in batch))
        return np.concatenate(encoded), [len(ids) for ids in encoded]

    start = time.perf_counter()
    with bar:
        n = write_shard(path, parallel_map(encode, batches()), tokenizer.fingerprint, limit)
    print(f"{path.stem}: {n / 1e6:.1f} M tokens in {time.perf_counter() - start:.1f} s", flush=True)


def parallel_map(function: Callable, items: Iterable) -> Iterator:
    """In order, and only a few items ahead, so that a dataset need not fit into memory."""
    workers, pending = os.cpu_count() or 1, deque()
    with ThreadPoolExecutor(workers) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# ----------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepares the data that train.py trains on.")
    parser.add_argument("--data", help="climbmix (default), tinystories, embedded, or a folder of .parquet or .txt")
    parser.add_argument("--num-shards", type=int, help="train shards (default: what five minutes consume on this GPU)")
    parser.add_argument("--cache", help="where to (default: $AUTORESEARCH_CACHE, or ~/.cache/autoresearch-t4)")
    parser.add_argument("--verify", action="store_true", help="check every token of --data, or of the current dataset")
    args = parser.parse_args()
    if args.cache:
        if Path(args.cache).resolve() != cache_dir().resolve():
            print(f"train.py finds this cache after: export AUTORESEARCH_CACHE={Path(args.cache).resolve()}")
        os.environ["AUTORESEARCH_CACHE"] = args.cache
    try:
        directory = current_dataset() if args.verify and not args.data else prepare(args.data, args.num_shards)
    except OSError as error:
        raise PrepareError(f"{one_line(error)}: free some space there, or give another folder with --cache") from None
    except KeyboardInterrupt:
        raise PrepareError("interrupted: run again to go on") from None
    fingerprint = Tokenizer.from_directory(directory).fingerprint
    train, val = (
        sum(len(shard.tokens) for shard in open_shards(directory, split, fingerprint, args.verify)) / 1e6
        for split in ("train", "val")
    )
    print(f"ready: {dataset_id(directory)}, {train:.1f} M train tokens, {val:.1f} M for validation, in {directory}")


if __name__ == "__main__":
    main()
