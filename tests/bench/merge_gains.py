"""
How should a loop with many slots merge gains that edited an older reference? Simulated nights with known truth.

    OMP_NUM_THREADS=1 python tests/bench/merge_gains.py    # the table in docs/loop.md, always the same

Ideas and noise are those of keep_rules.py. A run takes 0.9 to 1.1 units of time. For each slot, an agent has a proposal
ready, which edits the reference of the time when the slot's last run began. First number of a pair: each gain over an
older reference is merged with the present one and trained again at once. Second number: Loop.advance decides. Nothing
conflicts or crashes.
"""

import heapq
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from keep_rules import Case, draw

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from night import loop as loops

NIGHTS = 200
BASELINE = frozenset()  # a file is a set of ideas
GIT = dict(reference=lambda night: night.now, read_train=frozenset, revert=lambda text, after, old: text | after - old)
GIT["compiles"] = lambda file: True


class Night:
    """A loop without git, agents and runs."""

    advance, decided, merging = loops.Loop.advance, loops.Loop.decided, loops.Loop.merging

    def __init__(self, slots: int, runs: int, sd: float, at_once: bool, seed: int):
        rng = np.random.default_rng(seed)
        self.ideas = draw(Case(), runs, rng)
        self.now, self.kind, self.left = BASELINE, self, runs
        self.gains, self.scores = [], {BASELINE: rng.normal(0, sd)}
        self.queue, self.training, self.again, self.late = [], [], 0, 0
        ready, time = [BASELINE] * slots, 0.0
        while self.runs() or self.left:
            while len(self.training) < slots and (self.queue or self.left):
                if self.queue:
                    file, base, text = self.queue.pop(0)
                else:
                    base, text = ready.pop(0), ""
                    ready.append(self.now)
                    file = base | {runs - self.left}
                self.late += not self.left
                self.left -= self.left > 0
                heapq.heappush(self.training, (time + rng.uniform(0.9, 1.1), rng.random(), file, base, text))
            time, _, file, base, _ = heapq.heappop(self.training)
            self.scores[file] = rng.normal(-self.truth(file), sd)
            if self.scores[file] < self.scores[base]:
                row = dict(commit=file, val_bpb=self.scores[file], description="idea", status="keep")
                self.gains.append(loops.Gain(0, base, row, self.scores[base] - self.scores[file]))
            if not at_once:
                self.advance()
            elif self.gains:
                gain, now = self.gains.pop(), self.now
                if base == now:
                    self.now = file
                else:
                    self.propose(0, now, loops.merge(now, [gain])[0], "")

    def truth(self, file: frozenset) -> float:
        return sum(self.ideas[i] for i in file)

    def runs(self) -> list:
        return [SimpleNamespace(description=text) for *_, text in (*self.queue, *self.training)]

    @property
    def pending(self) -> list:
        return self.training

    def rows(self) -> list[dict]:
        return [gain.row for gain in self.gains]

    def over(self) -> bool:
        return not self.left

    def score(self, file: frozenset) -> float:
        return self.scores[file]

    def move(self, row: dict) -> None:
        self.now = row["commit"]

    def propose(self, n: int, base: frozenset, file: frozenset, text: str) -> None:
        if file not in self.scores:  # else it is refused
            self.queue.append((file, base, text))
            self.again += 1

    def new_number(self) -> int:
        return 0

    def note(self, n: int, verdict: str) -> None:
        pass


def simulate(*case) -> tuple[float, int, int]:
    """True gain, runs that trained a gain again, runs that began after the end."""
    with mock.patch.multiple(loops, **GIT):
        night = Night(*case)
    return night.truth(night.now), night.again, night.late


def main() -> None:
    print("| slots, runs | sd | true gain | runs that trained a gain again | runs that began after the end |")
    print("| --- | --- | --- | --- | --- |")
    for slots, runs in ((1, 100), (2, 100), (4, 100), (8, 100), (14, 150), (8, 400)):
        for sd in (0.0003, 0.001):
            found = []
            for at_once in (True, False):
                found.append(np.mean([simulate(slots, runs, sd, at_once, seed) for seed in range(NIGHTS)], 0))
            cells = [
                f"{before:.{digits}f}, {now:.{digits}f}" for before, now, digits in zip(*found, (4, 0, 0), strict=True)
            ]
            print(f"| {slots}, {runs} | {sd} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
