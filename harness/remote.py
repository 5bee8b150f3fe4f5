"""
A score that train.py's process cannot change: another one asks it for logits, computes the score and takes the time.

night's supervisor reads the held-out text before train.py starts, and gives out inputs only. It reads what it gets as
JSON and raw bytes, and never unpickles. Logits come row by row through memory that both share, on the GPU or in a file,
and are copied before use.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from harness.gpu import imitate
from harness.gpu_memory import gpu_memory
from harness.record import night_record
from harness.referee import Predictor, Unscorable, bits_per_byte, eval_shape, predict
from prepare import Tokenizer, TokenStream, eval_batches, evaluating

TOLERANCE = 10  # seconds beyond the budget, for the last step and the first prediction
MESSAGE = 2**16  # bytes, at most


# ---- In train.py's process
@functools.cache
def channel() -> Connection | None:
    """The connection to the process that scores this run; None if the run is not locked."""
    return Connection(night_record()["referee"]) if "referee" in night_record() else None


def tell(**message) -> None:
    with suppress(OSError):  # the referee has ended
        if channel():
            channel().send_bytes(json.dumps(message).encode())


def answer(model, vocab: int, split: str) -> float:
    """Predicts what the referee asks for until it sends the score. Raises Unscorable if it refuses."""
    import torch

    B, T = eval_shape(model.config)
    device, dtype = next(model.parameters()).device, str(getattr(model, "dtype", None))
    tell(split=split, batch_size=B, seq_len=T, dtype=dtype, memory=torch.cuda.max_memory_allocated())
    shared = None
    if handle := ask():
        shared, _ = gpu_memory((T, vocab), handle)
        tell(opened=shared is not None)
    with evaluating(model):
        while not isinstance(question := ask(), float):
            if shared is None:
                file = mmap.mmap(night_record()["logits"], 4 * T * vocab)
                shared = torch.frombuffer(file, dtype=torch.float32).view(T, vocab)
            for row in predict(model, torch.from_numpy(question).to(device), vocab):
                shared.copy_(row)
                if shared.is_cuda:
                    torch.cuda.synchronize()
                channel().send_bytes(b"")
                ask()  # the referee has a copy
    return question


def ask():
    """What the referee says next. Raises Unscorable if it refuses."""
    if isinstance(said := channel().recv(), Exception):
        raise said
    return said


# ---- In the supervisor's
class Referee(Predictor):
    """A thread that scores a run and ends with it. `row`: values for the run's row."""

    def __init__(self, splits: list[str], gpu: str | None, seconds: float):
        """gpu: the one that the run imitates, if any; seconds: its budget."""
        import torch

        torch.ones(1).exp()  # see harness.run
        tokenizer, self.gpu, self.seconds = Tokenizer.from_directory(), gpu, seconds
        self.vocab, self.text = tokenizer.get_vocab_size(), {}
        for split in splits:  # read before the run starts: each target, with its input and its size
            TokenStream(tokenizer, split, verify=True)
            self.text[split] = [t.flatten() for t in eval_batches(tokenizer, split, 1, 1, "cpu")]
        ours, self.theirs = socket.socketpair()
        self.channel, self.logits = Connection(ours.detach()), os.memfd_create("logits")
        self.record = dict(referee=self.theirs.fileno(), logits=self.logits)
        self.row, self.scores, self.times, self.tokens, self.shared = {}, {}, "not scored", 0.0, None
        self.created, self.began, self.answered = time.monotonic(), None, None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        try:
            while len(self.scores) < len(self.text):
                self.handle(self.receive())
            self.row = dict(tokens_M=self.tokens / 1e6, memory_gb=self.memory / 2**30, **self.scores)
        except (EOFError, OSError):  # the run has ended
            pass
        except Exception as error:
            known = isinstance(error, (Unscorable, FloatingPointError))
            self.row = dict(val_bpb=0.0, memory_gb=0.0, reason=str(error) if known else f"no score: {error!r}")
            with suppress(OSError):
                self.channel.send(Unscorable(self.row["reason"]))
        self.channel.close()

    def end(self, patience: float) -> None:
        """Call once the run and all processes that it started have ended."""
        self.theirs.close()
        self.thread.join(patience)

    def receive(self) -> dict:
        """The next message; {}: a row of logits is ready. Raises Unscorable with the reason if the run has failed."""
        message = json.loads(self.channel.recv_bytes(MESSAGE) or b"{}")
        if "reason" in message:
            raise Unscorable(str(message["reason"])[:200])
        if not all(0 <= message.get(key, 0) < 1e15 for key in ("tokens", "memory")):
            raise Unscorable(f"{message} has no number of tokens or bytes")
        return message

    def handle(self, message: dict) -> None:
        if "tokens" in message:  # 0 when the first step begins, then the total after the last
            self.tokens, self.began = message["tokens"], self.began or time.monotonic()
        if "split" in message:
            self.memory = message["memory"]
            self.score(*(message[key] for key in ("split", "batch_size", "seq_len", "dtype")))

    def score(self, split: str, B: int, T: int, dtype: str) -> None:
        import torch
        from torch.nn.functional import pad

        if f"{split}_bpb" in self.scores or min(B, T) < 1 or B * T > 2**23:
            raise Unscorable(f"cannot score {split} in batches of {B} x {T}")
        device = torch.device("cuda" if imitate(self.gpu).capability else "cpu")
        text = zip(self.text[split], (0, -1, 0), strict=True)  # padded as by eval_batches
        batches = [pad(t, (0, -len(t) % (B * T)), value=v).view(-1, B, T).to(device) for t, v in text]
        self.dtype = {str(d): d for d in (torch.float32, torch.bfloat16, torch.float16)}.get(dtype)
        self.shared, handle = gpu_memory((T, self.vocab)) if device.type == "cuda" else (None, None)
        self.channel.send(handle)
        if handle and not self.receive().get("opened"):
            self.shared = None
        place = dict(device="cpu", pin_memory=device.type == "cuda") if self.shared is None else dict(device=device)
        self.copy = torch.empty(T, self.vocab, **place)
        os.ftruncate(self.logits, self.copy.nbytes)
        bpb = bits_per_byte(self, split, *batches)
        if not math.isfinite(bpb):
            raise FloatingPointError(f"{split}_bpb is {bpb}")
        began = self.began or self.created
        training = self.answered - began  # until the first prediction: all before may be training
        self.times = f"{began - self.created:.1f} s to the first step, {training:.1f} s of training"
        if training > self.seconds + TOLERANCE:
            raise Unscorable(f"trained for {training:.0f} s, not {self.seconds:.0f}")
        self.scores[f"{split}_bpb"] = bpb
        self.channel.send(bpb)

    def rows(self, x):
        import torch

        self.channel.send(x.cpu().numpy())
        for _ in x:
            self.receive()
            self.answered = self.answered or time.monotonic()
            if self.shared is not None:
                self.copy.copy_(self.shared)
                torch.cuda.synchronize()
            elif os.preadv(self.logits, [self.copy.numpy()], 0) < self.copy.nbytes:
                raise Unscorable("the logits are gone")
            self.channel.send(None)
            yield self.copy.to(x.device)
