"""
Everything that must not move between experiments: data, tokenizer, token shards, loader, metric, clock and log.
train.py imports from here; nobody edits this file during research. It grew out of karpathy/autoresearch's prepare.py.

    python prepare.py                      # climbmix, as many shards as five minutes consume on this GPU
    python prepare.py --data tinystories   # short stories, kinder to small models
    python prepare.py --data DIR           # a folder of .parquet (column `text`) or of .txt
    python prepare.py --plot               # draws progress.png from results.tsv

The cache (--cache, else $AUTORESEARCH_CACHE, else ~/.cache/autoresearch-t4) holds a folder a dataset and `current`, the
name of the one prepared last. In a folder: `tokenizer.txt`, token shards `train_00000.bin` ..., `val_00000.bin`,
`test_00000.bin`, and, written last, `train_shards`, the number of the first. Files are made under a temporary name and
then renamed: an interrupted run leaves whole ones, and the next run goes on from there. Nothing in the cache is ever
executed or unpickled.
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
import shutil
import struct
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]
BOS_TOKEN = SPECIAL_TOKENS[0]

# The tokenizer sees the first train shard only, so that it does not depend on --num-shards, and of that at most so many
# characters in all and of a document. Measured on held-out English: 4 / 8 / 16 / 66 / 155 M characters give 3.881 /
# 3.905 / 3.917 / 3.924 / 3.926 bytes a token and take 0.4 / 0.6 / 1.1 / 4.2 / 9.0 s on two cores.
TOKENIZER_CHARS, TOKENIZER_DOC_CHARS = 64_000_000, 10_000

RESULTS = Path(__file__).resolve().parent / "results.tsv"


class PrepareError(Exception):
    """An error for people: one line that names the remedy."""


# --------------------------------------------------------------------------------------------------------------- metric


def evaluate_bpb(
    model,
    tokenizer: Tokenizer,
    batch_size: int,
    seq_len: int = MAX_SEQ_LEN,
    tokens: int = EVAL_TOKENS,
    split: str = "val",
) -> float:
    """Bits per byte of the first `tokens` targets of a split: sum of nats over sum of raw bytes, BOS in neither.

    Each target is scored exactly once whatever batch_size and seq_len are: targets that fill up the last batch are -1.
    """
    import torch

    device = next(model.parameters()).device
    stream = TokenStream(tokenizer, split)
    n = min(tokens, len(stream) - 1)
    if n < tokens:
        print(f"the {split} split holds {n:,} targets, fewer than {tokens:,}: all are scored")
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
        assert split in ("train", "val", "test"), f"split is train, val or test, not {split}"
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

COLUMNS = ["commit", "val_bpb", "memory_gb", "status", "description", "gpu", "dataset"]


def read_results(path: str | Path | None = None) -> list[dict]:
    """The rows of results.tsv, numbers as floats. Whatever is not a row is skipped."""
    rows, data = [], b""
    with suppress(OSError):
        data = Path(path or RESULTS).read_bytes()
    for line in data.decode(errors="replace").split("\n"):
        fields = line.removesuffix("\r").split("\t")
        with suppress(ValueError):
            row = dict(zip(COLUMNS, fields, strict=True))
            row |= {key: float(row[key]) for key in ("val_bpb", "memory_gb")}
            if row["status"] in ("keep", "discard", "crash") and math.isfinite(row["val_bpb"] + row["memory_gb"]):
                rows.append(row)
    return rows


def log_result(
    *,
    val_bpb: float,
    memory_gb: float,
    gpu: str,
    dataset: str,
    crashed: bool = False,
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
    commit, description, gpu, dataset = map(clean, (commit[:7], description, gpu, dataset))

    def row() -> tuple[str, str]:
        if crashed or not math.isfinite(val_bpb):
            return "crash", "\t".join([commit, "0.000000", "0.0", "crash", description, gpu, dataset])
        rows = [r for r in read_results(path) + read_results(rescued) if r["status"] != "crash"]
        best = min((r["val_bpb"] for r in rows if (r["gpu"], r["dataset"]) == (gpu, dataset)), default=math.inf)
        status = "keep" if round(val_bpb, 6) < best else "discard"
        return status, "\t".join([commit, f"{val_bpb:.6f}", f"{memory_gb:.1f}", status, description, gpu, dataset])

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


def log_crash() -> None:
    """A crash row for HEAD where its run left none: a SyntaxError in train.py, a kill, a clock that ran over."""
    rows = read_results() + read_results(RESULTS.with_name(RESULTS.name + ".rescued"))
    if git_head()[0][:7] not in {row["commit"] for row in rows}:
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        log_result(val_bpb=0.0, memory_gb=0.0, gpu=gpu, dataset=dataset_id(), crashed=True)


def plot(path: Path) -> None:
    """Draws results.tsv: a panel a gpu and dataset, with every experiment, and a table of the kept ones beside it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PrepareError("--plot needs matplotlib: pip install -e '.[plot]'") from None
    panels: dict[tuple[str, str], list[dict]] = {}
    for row in read_results():
        panels.setdefault((row["gpu"], row["dataset"]), []).append(row)
    panels = {name: rows for name, rows in panels.items() if {row["status"] for row in rows} != {"crash"}}
    if not panels:
        raise PrepareError(f"{RESULTS} holds no val_bpb yet: run `python train.py` first")
    heights = [max(4.5, 1 + 0.19 * sum(row["status"] == "keep" for row in rows)) for rows in panels.values()]
    figure = Figure((15, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 2, squeeze=False, width_ratios=(5, 3), height_ratios=heights)
    for (ax, table), (name, rows) in zip(axes, panels.items(), strict=True):
        draw(ax, table, ", ".join(name), rows)
    with new_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def draw(ax, table, name: str, rows: list[dict]) -> None:
    """One panel. Its y axis ends a little above the first val_bpb: what is worse by far lies on the upper edge."""
    x, y = np.arange(1, len(rows) + 1), np.array([row["val_bpb"] for row in rows])
    kept, crashed = (np.array([row["status"] == status for row in rows]) for status in ("keep", "crash"))
    first, best = y[~crashed][0], y[~crashed].min()
    margin = 0.1 * (first - best) or 0.01 * first
    bottom, top = best - margin, first + margin
    shown, beyond = np.where(crashed, bottom, np.minimum(y, top)), ~kept & (y > top)
    marks = {
        "kept": (kept, dict(color="tab:green", zorder=3)),
        "discarded": (~kept & ~crashed & ~beyond, dict(color="darkgray", s=16)),
        "off the scale": (beyond, dict(color="darkgray", marker="^", s=16)),
        "crashed": (crashed, dict(color="tab:red", marker="x", s=16)),
    }
    for label, (chosen, style) in marks.items():
        if chosen.any():
            ax.scatter(x[chosen], shown[chosen], label=f"{chosen.sum()} {label}", clip_on=False, **style)
    ax.step(x, np.minimum.accumulate(np.where(kept, y, np.inf)), where="post", color="tab:green", alpha=0.6)
    room = 0.025 * len(rows)  # for a number
    ax.set(xlim=(1 - room, len(rows) + room), ylim=(bottom, top), xlabel="experiment", ylabel="val_bpb")
    ax.set_title(f"{name}: {first:.4f} to {best:.4f}", loc="left", parse_math=False)
    ax.legend(loc="upper right", handletextpad=0)
    ax.grid(alpha=0.25)

    lines, before, numbered = [" kept  val_bpb     gain"], math.nan, (-math.inf, math.inf)
    for i in np.flatnonzero(kept):
        gain = "" if math.isnan(before) else f"{before - y[i]:.4f}"
        lines.append(f"{x[i]:5}  {y[i]:7.4f}  {gain:>7}  {rows[i]['description'][:46]}")
        if x[i] > numbered[0] + room or shown[i] < numbered[1] - 0.03 * (top - bottom):  # covers no other number
            ax.annotate(x[i], (x[i], shown[i]), (-4, -3), textcoords="offset points", ha="right", va="top", size=8)
            numbered = x[i], shown[i]
        before = y[i]
    text = "\n".join(lines)
    table.text(0, 1, text, family="monospace", size=9, va="top", transform=table.transAxes, parse_math=False)
    table.axis("off")


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
    """Byte-level BPE. On disk in tiktoken's text format, one line `base64(token) rank` per token."""

    def __init__(self, ranks: dict[bytes, int], fingerprint: bytes = b"", directory: Path | None = None):
        specials = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.encoding = tiktoken.Encoding("bpe", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
        self.bos_token_id = specials[BOS_TOKEN]
        self.fingerprint = fingerprint  # shards made by another tokenizer are refused
        self.directory = directory  # where its shards are, even if another dataset becomes current during a run

    @classmethod
    def from_directory(cls, directory: str | Path | None = None) -> Tokenizer:
        """Reads tokenizer.txt from `directory` (None: that of the dataset prepared last)."""
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
        """Token ids of a text, or of each text in a list, after `prepend` (id or name of a special token).

        The names of special tokens are ordinary text when they occur in it.
        """
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
        ordinary = range(self.get_vocab_size() - len(SPECIAL_TOKENS))
        return [len(self.encoding.decode_single_token_bytes(i)) for i in ordinary] + [0] * len(SPECIAL_TOKENS)


def get_token_bytes(device="cpu"):
    """(vocab,) int32: raw bytes of each token of the current dataset's tokenizer, 0 for special ones."""
    import torch

    return torch.tensor(Tokenizer.from_directory().token_bytes(), dtype=torch.int32, device=device)


# --------------------------------------------------------------------------------------------------------- token shards
# A header of 128 bytes, then the tokens as uint16, all little-endian. Earlier versions of this program wrote an index
# of the documents after the tokens; it is ignored.

MAGIC = b"tokshard\1\0\0\0"  # with version 1
HEADER = struct.Struct("<12s4xQ8x32s32s32x")  # magic, number of tokens, tokenizer's fingerprint, tokens' SHA-256


@dataclass(frozen=True)
class TokenShard:
    tokens: np.ndarray  # (tokens,) uint16, memory-mapped
    checksum: bytes  # of the tokens


def open_shard(path: Path, fingerprint: bytes, verify: bool = False) -> TokenShard:
    try:
        with open(path, "rb") as file:
            size, header = os.fstat(file.fileno()).st_size, file.read(HEADER.size)
            if len(header) < HEADER.size or not header.startswith(MAGIC):
                raise ValueError("not a token shard of version 1")
            _, n, tokenizer, checksum = HEADER.unpack(header)
            if not 0 < n <= (size - HEADER.size) // 2:
                raise ValueError(f"{size} bytes do not hold {n} tokens")
            if tokenizer != fingerprint:
                raise ValueError("made by another tokenizer")
            tokens = np.memmap(file, "<u2", "r", HEADER.size, (n,))
            if verify and hashlib.sha256(tokens).digest() != checksum:
                raise ValueError("damaged tokens")
    except (OSError, ValueError) as error:
        raise PrepareError(f"{path}: {error}; delete it and run prepare.py again") from None
    return TokenShard(tokens, checksum)


def open_shards(directory: Path, split: str, fingerprint: bytes, verify: bool = False) -> list[TokenShard]:
    count = b""
    with suppress(OSError):
        count = (directory / "train_shards").read_bytes()
    if not re.fullmatch(rb"[1-9]\d{0,3}\n", count):
        raise PrepareError(f"{directory} is not prepared to the end: run prepare.py again")
    paths = [directory / f"{split}_{i:05d}.bin" for i in range(int(count) if split == "train" else 1)]
    if split == "test" and not paths[0].exists():
        raise PrepareError(no_test_split(directory))
    return [open_shard(path, fingerprint, verify) for path in paths]


def no_test_split(directory: Path) -> str:
    effect = "" if directory.name in HUB else f" (moves 5% of train to test, unless you add a {TEST_FILE})"
    return f"no test split in {directory} yet: delete {directory / 'train_shards'} and run prepare.py again{effect}"


def dataset_id(directory: Path | None = None) -> str:
    """Name and fingerprint of all tokens of train and val, such as `climbmix-1a2b3c4d`. Results compare only on one."""
    tokenizer = Tokenizer.from_directory(directory)
    shards = [s for split in ("train", "val") for s in open_shards(tokenizer.directory, split, tokenizer.fingerprint)]
    fingerprint = hashlib.sha256(b"".join(shard.checksum for shard in shards)).hexdigest()[:8]
    return f"{tokenizer.directory.name.partition('@')[0]}-{fingerprint}"


# ------------------------------------------------------------------------------------------------------ sources of text

HUB = {"climbmix": "karpathy/climbmix-400b-shuffle", "tinystories": "karpathy/tinystories-gpt4-clean"}
MAX_SHARDS, TEST_FILE, VAL_FILE = 6541, "shard_06541.parquet", "shard_06542.parquet"  # climbmix ends with test and val


@dataclass(frozen=True)
class Part:
    """Documents [start, stop) of a file, or of the standard library's folder."""

    path: Path
    start: int = 0
    stop: int | None = None
    hub: dict[str, str] | None = None  # for huggingface_hub, if the file has to be downloaded


Splits = tuple[list[Part], list[Part], list[Part]]  # train (one shard per part), val, test


def hub_splits(data: str, num_shards: int | None) -> Splits:
    if num_shards is None:  # what five minutes consume: on a Hopper, on a T4, without a GPU
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
        num_shards = 10 if capability >= (8, 0) else 2 if capability > (0, 0) else 1
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")

    def part(file: str, start: int = 0, stop: int | None = None) -> Part:
        hub = {"repo_id": HUB[data], "repo_type": "dataset", "filename": file, "endpoint": endpoint}
        return Part(cache_dir() / data / "raw" / file, start, stop, hub)

    if data == "climbmix":
        return [part(f"shard_{i:05d}.parquet") for i in range(num_shards)], [part(VAL_FILE)], [part(TEST_FILE)]
    # split as its dataset card suggests: 10,000 stories for test, 10,000 for validation, then train
    file, size = "tinystories_gpt4_clean.parquet", 250_000
    train = [part(file, start, start + size) for start in range(20_000, 20_000 + num_shards * size, size)]
    return train, [part(file, 10_000, 20_000)], [part(file, 0, 10_000)]


def file_splits(files: list[Path], test_files: list[Path], num_shards: int) -> Splits:
    """Validates on the last file, or the last 5% of a single one. Tests on test_files, or the 5% before validation."""
    parts = []
    for file in files:
        parquet = file.suffix == ".parquet"
        count = open_parquet(file).metadata.num_rows if parquet else sum(1 for _ in documents(Part(file)))
        parts.append(Part(file, 0, count))
    total = sum(part.stop for part in parts)
    twentieth = max(1, total // 20)
    val = total - (parts[-1].stop if len(parts) > 1 else twentieth)  # the first document of the split
    test = val - (0 if test_files else twentieth)
    if test < 1:
        raise PrepareError(f"{files[0].parent} has too few documents for train, validation and test: give it more text")

    def take(start: int, stop: int) -> list[Part]:
        taken = []
        for part in parts:
            first, last = max(0, start), min(part.stop, stop)
            if first < last:
                taken.append(replace(part, start=first, stop=last))
            start, stop = start - part.stop, stop - part.stop
        return taken

    return take(0, test)[:num_shards], take(val, total), take(test, val) or [Part(file) for file in test_files]


def documents(part: Part) -> Iterator[str]:
    """The part's texts in order, without the empty ones."""
    root = part.path
    if root.suffix == ".parquet":
        return filter(None, parquet_column(part))
    if root.is_dir():  # Python modules, ordered by the hash of their names so that each split gets all kinds
        skip = {"site-packages", "dist-packages", "test", "tests"}  # some distributions leave the tests out
        names = [name for path in root.rglob("*.py") if not skip & set((name := path.relative_to(root)).parts)]
        names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
        texts = ((root / name).read_text("utf-8", errors="replace") for name in names)
    else:  # a document ends at <|endoftext|>, or at the last newline within 64 Ki characters: a book is many
        books = root.read_text("utf-8", errors="replace").split("<|endoftext|>")
        pieces = (re.findall(r"(?s:.{1,65535})(?:\n|\Z)|(?s:.{1,65536})", book.strip("\n")) for book in books)
        texts = itertools.chain.from_iterable(pieces)
    return itertools.islice(filter(None, texts), part.start, part.stop)


def parquet_column(part: Part) -> Iterator[str | None]:
    file, row = open_parquet(part.path), 0
    stop = file.metadata.num_rows if part.stop is None else part.stop
    try:
        for batch in file.iter_batches(256, columns=["text"]):
            yield from batch.column(0)[max(0, part.start - row) : max(0, stop - row)].to_pylist()
            row += len(batch)
            if row >= stop:
                return
    except Exception as error:
        raise PrepareError(f"{part.path} is damaged: delete or replace it, run again ({one_line(error)})") from None


def open_parquet(path: Path):
    """A pyarrow.parquet.ParquetFile with a string column `text`."""
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        if str(kind := file.schema_arrow.field("text").type) not in ("string", "large_string"):
            raise TypeError(f"its column `text` has the type {kind}")
        return file
    except Exception as error:
        problem = f"{path} is not a parquet file with a column `text` of strings ({one_line(error)})"
        raise PrepareError(f"{problem}: delete or replace it, or rename its text column") from None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# ------------------------------------------------------------------------------------------------------------- download

ATTEMPTS = 5  # with waits of 1, 2, 4 and 8 s in between


class Unreachable(PrepareError):
    """The hub does not answer at all."""


def download_ahead(parts: list[Part]) -> dict[Path, Future]:
    """Starts a thread that downloads the missing files in the order of `parts`; each future ends with its download."""
    for name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"):  # plain HTTP, no requests but for the files
        os.environ.setdefault(name, "1")
    missing = {part.path: part for part in parts if part.hub and not part.path.exists()}
    arriving = {path: Future() for path in missing}

    def work() -> None:
        for path, part in missing.items():
            try:
                arriving[path].set_result(download(part))
            except BaseException as error:
                arriving[path].set_exception(error)

    if missing:
        check_reachable(next(iter(missing.values())))
        threading.Thread(target=work, daemon=True).start()  # daemon: Ctrl-C does not wait for it
    return arriving


def check_reachable(part: Part) -> None:
    """Raises Unreachable if the hub does not answer within seconds, not even with an error.

    In a thread, as looking up a name has no timeout, and some versions of huggingface_hub retry for half a minute.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url, answer = hf_hub_url(**part.hub), queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put(get_hf_file_metadata(url, timeout=5))
        except Exception as error:
            answer.put(getattr(error, "response", None))

    threading.Thread(target=ask, daemon=True).start()
    with suppress(queue.Empty):
        if answer.get(timeout=8) is not None:
            return
    raise Unreachable(f"cannot reach {url}: go online, set HF_ENDPOINT to a mirror, or give --data DIR")


def download(part: Part) -> None:
    """hf_hub_download resumes broken transfers and honours Retry-After; other failures are retried here."""
    from huggingface_hub import hf_hub_download

    for attempt in range(ATTEMPTS):
        try:
            hf_hub_download(**part.hub, local_dir=part.path.parent)
            open_parquet(part.path)
            return
        except Exception as error:  # from requests, httpx or huggingface_hub, depending on its version
            if getattr(error, "errno", None):  # from the disk
                raise
            cause = error.__cause__ or error
            status = getattr(getattr(cause, "response", None), "status_code", 0)
            if type(error) in (OSError, PrepareError) or status == 416:  # wrong size or content: not to be resumed
                part.path.unlink(missing_ok=True)
                shutil.rmtree(part.path.parent / ".cache", ignore_errors=True)
        if attempt == ATTEMPTS - 1 or (400 <= status < 500 and status not in (408, 416, 429)):
            remedy = "run again, set HF_ENDPOINT to a mirror, or give --data DIR"
            raise PrepareError(f"{part.path.name} of {part.hub['repo_id']}: {one_line(cause)}; {remedy}")
        print(f"{part.path.name}: {one_line(cause)}; again in {2**attempt} s", flush=True)
        time.sleep(2**attempt)


# ------------------------------------------------------------------------------------------------------------ preparing
def prepare(data: str | None = None, num_shards: int | None = None) -> Path:
    """Makes `data` (None: climbmix, or without network the embedded corpus) the current dataset; returns its folder."""
    if num_shards is not None and not 1 <= num_shards <= MAX_SHARDS:
        raise PrepareError(f"--num-shards {num_shards} is not possible: give 1 to {MAX_SHARDS}")
    if data is None:
        try:
            return prepare("climbmix", num_shards)
        except Unreachable:
            print("NO NETWORK: falling back to the embedded corpus, the source text of this Python's standard library.")
            print("Its val_bpb compares with no other. For real text go online, set HF_ENDPOINT, or give --data DIR.")
            data = "embedded"

    files, test_files = [], []
    if data in HUB:
        name = data
    elif data == "embedded":  # this Python's standard library, treated as a single file
        files, name = [Path(sysconfig.get_path("stdlib"))], "embedded@{}.{}.{}".format(*sys.version_info)
    elif Path(data).is_dir():
        files = sorted(Path(data).glob("*.parquet")) or sorted(Path(data).glob("*.txt"))
        files.sort(key=lambda file: file.name == VAL_FILE)  # the last one validates
        identity = repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])
        label = re.sub(r"[^\w.-]+", "-", Path(data).resolve().name, flags=re.ASCII).lstrip(".-") or "folder"
        name = f"{label}@{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
        test_files = [file for file in files if file.name == TEST_FILE and len(files) > 1]
        files = [file for file in files if file not in test_files]
        if not files:
            raise PrepareError(f"no .parquet or .txt in {data}: give --data another folder, or {' or '.join(HUB)}")
    else:
        raise PrepareError(f"--data {data} is no folder, and none of {', '.join(HUB)}, embedded: check the spelling")
    if files:
        num_shards = min(num_shards or len(files), max(1, len(files) - 1))

    directory = cache_dir() / name
    ready = is_ready(directory, num_shards)
    if test_files:  # used to be for training
        ready = ready or is_ready(directory, num_shards + 1)
    with suppress(PrepareError):
        if ready and current_dataset() == directory:
            return directory
    cache_dir().mkdir(parents=True, exist_ok=True)
    with open(cache_dir() / "lock", "ab") as file:
        lock(file, math.inf, f"another prepare.py is at work in {cache_dir()}: waiting for it")
        if not ready:
            splits = file_splits(files, test_files, num_shards) if files else hub_splits(data, num_shards)
            build(directory, *splits)
        with new_file(cache_dir() / "current") as current:
            current.write(f"{name}\n".encode())
    return directory


def is_ready(directory: Path, num_shards: int | None) -> bool:
    """Whether train and val are complete, with that many train shards (None: any number)."""
    try:
        fingerprint = Tokenizer.from_directory(directory).fingerprint
        open_shards(directory, "val", fingerprint)
        return num_shards in (None, len(open_shards(directory, "train", fingerprint)))
    except PrepareError:
        return False


def build(directory: Path, train: list[Part], val: list[Part], test: list[Part]) -> None:
    """Makes what is missing, test first. While one file is tokenized the next ones are downloaded."""
    if not test[0].hub and not (directory / "test_00000.bin").exists():
        for shard in directory.glob("train_*.bin"):  # made before there was a test split, they may contain it
            shard.unlink()
    shards = {"test_00000.bin": test, "val_00000.bin": val}
    shards |= {f"train_{i:05d}.bin": [part] for i, part in enumerate(train)}
    tokenizer = None
    with suppress(PrepareError):
        tokenizer = Tokenizer.from_directory(directory)
    for name in list(shards) if tokenizer else []:
        with suppress(PrepareError):
            open_shard(directory / name, tokenizer.fingerprint)
            del shards[name]
    first = train[:1] if not tokenizer else []
    arriving = download_ahead(first + [part for parts in shards.values() for part in parts])

    def texts(parts: list[Part]) -> Iterator[str]:
        for part in parts:
            if part.path in arriving:
                arriving[part.path].result()
            yield from documents(part)

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
    bos, workers = np.array([tokenizer.get_bos_token_id()]), os.cpu_count() or 1

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

    def encoded() -> Iterator[np.ndarray]:  # only a few batches ahead, as a dataset may not fit into memory
        with ThreadPoolExecutor(workers) as pool:
            pending = deque()
            for batch in batches():
                pending.append(pool.submit(encode, batch))
                if len(pending) > 4 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    start, n, checksum = time.perf_counter(), 0, hashlib.sha256()
    with new_file(path) as file:
        file.seek(HEADER.size)
        for tokens in encoded():
            file.write(tokens)
            checksum.update(tokens)
            n += len(tokens)
            if n >= limit:
                break
        if n == 0:
            raise PrepareError(f"no text left for {path.name}: ask for fewer --num-shards or give more text")
        file.seek(0)
        file.write(HEADER.pack(MAGIC, n, tokenizer.fingerprint, checksum.digest()))
    print(f"{path.stem}: {n / 1e6:.1f} M tokens in {time.perf_counter() - start:.1f} s", flush=True)


# ----------------------------------------------------------------------------------------------------------------- main
def main() -> None:
    parser = argparse.ArgumentParser(description="Prepares the data that train.py trains on.")
    parser.add_argument("--data", help="climbmix (default), tinystories, embedded, or a folder of .parquet or .txt")
    parser.add_argument("--num-shards", type=int, help="train shards (default: what five minutes consume on this GPU)")
    parser.add_argument("--cache", help="where to (default: $AUTORESEARCH_CACHE, or ~/.cache/autoresearch-t4)")
    parser.add_argument("--verify", action="store_true", help="check every token of --data, or of the current dataset")
    parser.add_argument("--plot", action="store_true", help="draw progress.png from results.tsv, and stop")
    parser.add_argument(
        "--log-crash", action="store_true", help="log HEAD's run as a crash if it left no row, and stop"
    )
    args = parser.parse_args()
    if args.cache:
        if Path(args.cache).resolve() != cache_dir().resolve():
            print(f"train.py finds this cache after: export AUTORESEARCH_CACHE={Path(args.cache).resolve()}")
        os.environ["AUTORESEARCH_CACHE"] = args.cache
    try:
        if args.plot:
            return plot(RESULTS.with_name("progress.png"))
        if args.log_crash:
            return log_crash()
        directory = current_dataset() if args.verify and not args.data else prepare(args.data, args.num_shards)
        fingerprint = Tokenizer.from_directory(directory).fingerprint
        sizes = []
        for split in ("train", "val", "test"):
            if split == "test" and not (directory / "test_00000.bin").exists():
                print(no_test_split(directory))
                break
            shards = open_shards(directory, split, fingerprint, args.verify)
            sizes.append(f"{sum(len(shard.tokens) for shard in shards) / 1e6:.1f} M {split}")
        print(f"ready: {dataset_id(directory)}, {', '.join(sizes)} tokens, in {directory}")
    except PrepareError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{one_line(error)}: free some space there, or give another folder with --cache")
    except KeyboardInterrupt:
        sys.exit("interrupted: run again to go on")


if __name__ == "__main__":
    main()
