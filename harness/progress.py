"""Progress lines for loops that take long, such as scoring on a CPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

FIRST, AGAIN = 10, 30  # seconds until the first line, and between lines


def with_progress(items: Iterable, count: int, what: str) -> Iterator:
    """Yields the `count` items; if that takes long, prints lines such as `scoring val: 40%`."""
    due = time.monotonic() + FIRST
    for i, item in enumerate(items):
        if time.monotonic() >= due:
            print(f"{what}: {i / count:.0%}", flush=True)
            due = time.monotonic() + AGAIN
        yield item
