"""A score that train.py's process cannot change: another asks it for logits, computes the score and takes the time.

night's supervisor reads the held-out text before train.py starts, and gives out inputs only. It reads what it gets as
JSON and raw bytes, and never unpickles. Logits come row by row through memory that both share, and are copied first.
"""

from __future__ import annotations

import fcntl
import functools
import json
import mmap
import os
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

from harness.gpu import imitate
from harness.record import night_record
from harness.referee import Predictor, Unscorable, eval_shape
from prepare import Tokenizer, TokenStream, eval_batches, evaluating

TOLERANCE = 10  # seconds beyond the budget, for the last step and the first batch of predictions
LARGEST = 2**23  # tokens of a batch


@functools.cache
def shared_row(file: int, T: int, vocab: int):
    """The logits (T, V) of a row, in memory that both processes share: pinned, as a GPU then copies at full speed."""
    import torch

    row = torch.frombuffer(mmap.mmap(file, 4 * T * vocab), dtype=torch.float32).view(T, vocab)
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # then it copies more slowly
            torch.cuda.cudart().cudaHostRegister(row.data_ptr(), row.nbytes, 0)
            torch.ones(1, device="cuda")  # raises the error, if there was one, which the next kernel would raise
    return row


# ---- In train.py's process
@functools.cache
def channel() -> Connection | None:
    """The connection to the process that scores this run; None if the run is not locked."""
    return Connection(night_record()["referee"]) if "referee" in night_record() else None


def tell(**message) -> None:
    """tell(): the logits of a row are ready."""
    with suppress(OSError):  # the referee has ended
        if channel():
            channel().send_bytes(json.dumps(message).encode())


def answer(model, vocab: int, split: str) -> float:
    """Predicts what the referee asks for until it sends the score. Raises Unscorable if it refuses."""
    import torch

    (B, T), predictor = eval_shape(model.config), Predictor(model, vocab)
    tell(split=split, batch_size=B, seq_len=T, eps=predictor.eps, memory=torch.cuda.max_memory_allocated())
    with evaluating(model):
        while not isinstance(said := channel().recv(), (float, Unscorable)):
            for row in predictor.rows(torch.from_numpy(said).to(predictor.device)):
                shared_row(night_record()["logits"], T, vocab).copy_(row)
                tell()
                channel().recv()  # the referee has a copy
    if isinstance(said, Unscorable):
        raise said
    return said


# ---- In the supervisor's
class Referee(Predictor):
    """A thread that scores a run and ends with it. gpu: the one that the run imitates, if any; seconds: its budget;
    row: values for its row."""

    def __init__(self, splits: list[str], gpu: str | None, seconds: float):
        import torch

        torch.ones(1).exp()  # see harness.run
        tokenizer, self.gpu, self.seconds = Tokenizer.from_directory(), gpu, seconds
        self.vocab, self.text = tokenizer.get_vocab_size(), {}
        for split in splits:  # read before the run starts: each target, with its input and its size, and padding
            TokenStream(tokenizer, split, verify=True)
            self.text[split] = [t.flatten() for t in eval_batches(tokenizer, split, 1, LARGEST, "cpu")]
        (self.channel, self.theirs), self.logits = Pipe(), os.memfd_create("logits", os.MFD_ALLOW_SEALING)
        self.record = dict(referee=self.theirs.fileno(), logits=self.logits)
        self.row, self.times, self.tokens = {}, "not scored", 0
        self.created, self.began, self.answered = time.monotonic(), None, None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        row = {}
        try:
            while self.text:
                if "split" in (message := self.receive()):
                    row |= self.score(**message)
            self.row = row
        except (EOFError, OSError):  # the run has ended
            pass
        except Exception as error:
            reason = str(error) if isinstance(error, Unscorable) else f"no score: {error!r}"
            self.row = dict(val_bpb=0.0, memory_gb=0.0, reason=reason)
            with suppress(OSError):
                self.channel.send(Unscorable(reason))
        self.channel.close()

    def receive(self) -> dict:
        """The next message. Raises Unscorable with the reason if the run has failed."""
        message = json.loads(self.channel.recv_bytes(2**16))
        if "reason" in message:
            raise Unscorable(str(message["reason"])[:200])
        if "tokens" in message:  # 0 when the first step begins, then the total after the last
            self.tokens, self.began = message["tokens"], self.began or time.monotonic()
        return message

    def score(self, split: str, batch_size: int, seq_len: int, eps: float, memory: int) -> dict:
        size, text = batch_size * seq_len, self.text.pop(split, None)
        if not text or min(batch_size, seq_len) < 1 or size > LARGEST:
            raise Unscorable(f"cannot score {split} in batches of {batch_size} x {seq_len}")
        device = "cuda" if imitate(self.gpu).capability else "cpu"
        count = -(-int((text[1] >= 0).sum()) // size)
        batches = [t[: count * size].view(count, batch_size, seq_len).to(device) for t in text]
        os.ftruncate(self.logits, 4 * seq_len * self.vocab)
        fcntl.fcntl(self.logits, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # reading what it cuts off would kill us
        self.eps, self.shared = eps, shared_row(self.logits, seq_len, self.vocab)
        bpb = self.bits_per_byte(*batches)
        began = self.began or self.created
        training = self.answered - began  # until the first batch is predicted: all before may be training
        self.times = f"{began - self.created:.1f} s to the first step, {training:.1f} s of training"
        if training > self.seconds + TOLERANCE:
            raise Unscorable(f"trained for {training:.0f} s, not {self.seconds:.0f}")
        row = {f"{split}_bpb": bpb, "tokens_M": self.tokens / 1e6, "memory_gb": memory / 2**30}
        for name, value in row.items():
            if not 0 <= value < 1e9:
                raise Unscorable(f"{name} is {value}")
        self.channel.send(bpb)
        return row

    def rows(self, x):
        self.channel.send(x.cpu().numpy())
        row = self.shared.new_empty(self.shared.shape, device=x.device)
        for _ in x:
            self.receive()
            row.copy_(self.shared)
            self.channel.send(None)
            yield row
        self.answered = self.answered or time.monotonic()
