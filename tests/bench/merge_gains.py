"""
How should a loop with many slots merge gains that edited an older reference? Simulated nights with known truth.

    OMP_NUM_THREADS=1 python tests/bench/merge_gains.py    # the table in docs/loop.md, always the same

Ideas and noise are those of keep_rules.py. A run takes 0.9 to 1.1 units of time. For each slot, an agent has a proposal
ready, which edits the reference of the time when the slot's last run began. First number of a pair: each gain over an
older reference is merged with the present one and trained again at once. Second number: gains.next_step decides.
Nothing conflicts or crashes.
"""

import heapq
import sys
from pathlib import Path

import numpy as np
from keep_rules import Case, draw

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from night.gains import Gain, next_step

NIGHTS = 200


class Night:
    """A file is a set of ideas. A run: (its file, the one it has to beat, whether it trains a gain again)."""

    def __init__(self, slots: int, runs: int, sd: float, at_once: bool, seed: int):
        rng = np.random.default_rng(seed)
        self.ideas = draw(Case(), runs, rng)
        self.now, self.left, self.gains = frozenset(), runs, []
        self.scores = {self.now: rng.normal(0, sd)}
        self.queue, self.training, self.again, self.late = [], [], 0, 0
        ready, time = [self.now] * slots, 0.0
        while self.queue or self.training or self.left:
            while len(self.training) < slots and (self.queue or self.left):
                if self.queue:
                    run = self.queue.pop(0)
                else:
                    base = ready.pop(0)
                    ready.append(self.now)
                    run = base | {runs - self.left}, base, False
                self.late += not self.left
                self.left -= self.left > 0
                heapq.heappush(self.training, (time + rng.uniform(0.9, 1.1), rng.random(), run))
            time, _, (file, base, _) = heapq.heappop(self.training)
            self.scores[file] = rng.normal(-self.truth(file), sd)
            gain = Gain(0, file, base, "", self.scores[base] - self.scores[file])
            if gain.size > 0:
                self.gains.append(gain)
            if not at_once:
                self.advance()
            elif self.gains and self.gains[-1].base == self.now:
                self.now = self.gains.pop().commit
            elif self.gains:
                self.train_again([self.gains.pop()])

    def truth(self, file: frozenset) -> float:
        return sum(self.ideas[i] for i in file)

    def advance(self) -> None:
        merging = any(again for *_, again in (*self.queue, *(run for *_, run in self.training)))
        if self.training and not self.left:
            return
        while not merging and (step := next_step(self.now, self.gains, not self.left)):
            self.gains = [gain for gain in self.gains if gain not in step]
            if step[0].base == self.now:
                self.now = step[0].commit
            else:
                merging = self.train_again(step)

    def train_again(self, gains: list[Gain]) -> bool:
        file = self.now.union(*(gain.commit - gain.base for gain in gains))
        if new := file not in self.scores:
            self.queue.append((file, self.now, True))
            self.again += 1
        return new


def simulate(*case) -> tuple[float, int, int]:
    """True gain, runs that trained a gain again, runs that began after the end."""
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
