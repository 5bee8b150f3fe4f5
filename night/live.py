"""What a wave or a loop shows while it trains: one line per run, from the records of its runs."""

import sys
import time
from contextlib import suppress
from pathlib import Path

from night.records import curve


class Board:
    """One line per active run: updated in place on a terminal, elsewhere printed every minute."""

    def __init__(self, total: int = 0):
        """total: number of runs; 0 if unknown."""
        self.total, self.live = total, None
        self.start = self.shown = time.monotonic()

    def __enter__(self):
        if sys.stdout.isatty():
            with suppress(ImportError):  # without rich, print lines
                from rich.live import Live

                self.live = Live(auto_refresh=False).__enter__()
        return self

    def __exit__(self, *error):
        if self.live:
            self.live.__exit__(*error)

    def update(self, records: list[Path], pending: int = 0) -> None:
        """records: of the active runs; pending: number of runs that have not ended."""
        now, done = time.monotonic(), self.total - pending
        if now - self.shown < (0.5 if self.live else 60):
            return
        self.shown = now
        lines = [line(folder) for folder in records if folder.exists()]
        if self.total:
            left = f", {(now - self.start) / done * pending / 60:.0f} min left" if done and pending else ""
            lines.append(f"{done} of {self.total} runs have ended{left}")
        text = "\n".join(lines)
        self.live.update(text, refresh=True) if self.live else print(text)


def line(folder: Path) -> str:
    """A run's name, step, loss, speed and seconds so far."""
    points = [point for point in curve(folder) if point.seconds > 0 and point.tokens > 0]
    if not points:
        return f"{folder.name:32} starts, {time.time() - folder.stat().st_ctime:.0f} s so far"
    last = points[-1]
    pace = f"{last.tokens / last.seconds:,.0f} tok/s, {last.seconds:.0f} s so far"
    return f"{folder.name:32} step {last.step:.0f}, loss {last.loss:.4f}, {pace}"
