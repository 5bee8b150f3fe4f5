"""The budget of a run, and its losses: what it prints, and what curve.tsv keeps."""

from __future__ import annotations

import gc
import math
import statistics
import time

from harness.record import write_record
from harness.remote import tell
from prepare import TIME_BUDGET, PrepareError


class Clock:
    """The budget of a run, in tokens or in seconds of wall time from the first training step to the end of the last.

    Call start(), then advance() after each optimizer step while running(), then stop(). progress() drives the
    schedules. A run counts if its last step began within the budget.
    """

    OVERRUN = 3  # seconds past the budget: no step starts that would probably end later

    def __init__(self, seconds: float = TIME_BUDGET, tokens: int | None = None):
        if not 0 < seconds < math.inf or (tokens is not None and tokens <= 0):
            raise PrepareError(f"the budget must be finite and above 0, not {seconds if tokens is None else tokens}")
        self.seconds, self.limit = seconds, tokens
        self.steps = self.tokens = 0
        self.started = self.stopped = None
        self._step_began = 0.0  # when the current step began, in seconds after start()
        self._unread = None  # the loss of the last step, and what its line says
        self._losses = []  # those since the last printed line
        self._line = -1  # last progress tick printed (of 200)

    def start(self) -> None:
        gc.collect()
        write_record("curve.tsv", "step\tseconds\ttokens\tloss\tlr\n")
        tell(tokens=0)
        self.started = time.perf_counter()

    def elapsed(self) -> float:
        """Training time so far, in seconds."""
        return 0.0 if self.started is None else (self.stopped or time.perf_counter()) - self.started

    def progress(self) -> float:
        """Fraction of the budget spent, in [0, 1]."""
        return min(1.0, self.tokens / self.limit if self.limit else self.elapsed() / self.seconds)

    def tokens_left(self) -> float:
        """Estimated from the pace so far; inf during the first 5%."""
        progress = self.progress()
        return self.tokens * (1 / progress - 1) if progress > 0.05 else math.inf

    def running(self) -> bool:
        if self.limit:
            return self.tokens < self.limit
        elapsed = self.elapsed()
        expected_end = elapsed * (1 + 1 / max(1, self.steps))  # if one more step starts now
        return elapsed < self.seconds and expected_end < self.seconds + self.OVERRUN

    def advance(self, tokens: int, loss, epoch: int, lr: float | None = None) -> None:
        """Call after each step. loss: scalar tensor, best on the device, or a number, for which the host has waited;
        epoch: of the training text; lr: for curve.tsv. Raises FloatingPointError, a step late, unless loss < 100."""
        import torch

        assert self.started is not None, "train() must start the clock before its first step"
        if self.limit is None and self._step_began >= self.seconds:
            raise RuntimeError(f"a step began {self._step_began:.0f} s into a budget of {self.seconds:.0f} s")
        self.tokens += tokens
        self.steps += 1
        now = self._step_began = self.elapsed()
        loss = torch.as_tensor(loss).detach()
        host = loss.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if loss.is_cuda else None  # host holds the loss after this
        self._read_loss()
        self._unread = host, copied, self.progress(), self.steps, now, self.tokens, epoch, lr

    def stop(self) -> float:
        """Waits for the last step, checks its loss and returns the training time in seconds."""
        import torch

        if self.stopped is None:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.stopped = time.perf_counter()
            tell(tokens=self.tokens)
            self._read_loss(last=True)
        return self.elapsed()

    def _read_loss(self, last: bool = False) -> None:
        """Reads the loss of the step before: the host never waits for the step that it has just launched. Prints a line
        per 1/200 of the budget, with the mean loss since the last one, and adds it to curve.tsv."""
        if self._unread is None:
            return
        host, copied, progress, step, now, tokens, epoch, lr = self._unread
        if copied is not None:
            copied.synchronize()
        loss = host.item()
        if not loss < 100:  # NaN included
            raise FloatingPointError(f"{'NaN' if math.isnan(loss) else f'loss {loss:.4g}'} at step {step}")
        self._losses.append(loss)
        if last or int(200 * progress) > self._line:
            mean, rate = statistics.fmean(self._losses), "" if lr is None else f"{lr:.6g}"
            line = f"step {step:05d} ({100 * progress:.1f}%) | loss {mean:.4f} | {tokens / now:,.0f} tok/s"
            print(f"{line} | epoch {epoch} | {now:.0f} s", flush=True)
            write_record("curve.tsv", f"{step}\t{now:.2f}\t{tokens}\t{mean:.4f}\t{rate}\n", "a")
            self._losses, self._line = [], int(200 * progress)
