"""
Does what the report says hold? Simulated nights whose truth is known.

    export OMP_NUM_THREADS=1  # threads only slow it down
    python tests/bench/intervals.py          # the tables of docs/attribution.md, from 2,000 nights; about four minutes
    python tests/bench/intervals.py 200      # from 200

Noise: scores are the truth, plus what a seed does to all versions alike (sd 0.001), plus what differs between versions
with the same seed (`rest`). A night's kept changes are those of tests/bench/keep_rules.py, or given.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import keep_rules
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from night.attribute import PAIRS, Change, prune, try_changes
from night.noise import SHARE, interval, miss_of_look, shrink

SEED_SD = 0.001  # over seeds of one version


# ------------------------------------------------------------------------------------------ intervals of the gain
def intervals_miss(looks: list[int], misses: list[float], nights: int) -> tuple[list[float], float]:
    """Shares of nights in which the interval misses the truth: at each look (a number of seeds), and at any."""
    gains = np.random.default_rng(1).normal(0.003, 0.002, (nights, max(looks)))
    ends = [interval(gains[:, :seeds], miss)[2:] for seeds, miss in zip(looks, misses, strict=True)]
    missed = np.array([(low > 0.003) | (high < 0.003) for low, high in ends])  # (looks, nights)
    return missed.mean(1).tolist(), missed.any(0).mean()


# ------------------------------------------------------------------------------------------- pruning
def kept_changes(rng: np.random.Generator) -> np.ndarray:
    """What each kept change of a night of 100 experiments truly gains. Half are luck or harm."""
    found = keep_rules.night(keep_rules.Case(sd=SEED_SD), keep_rules.Rule(), rng)
    return found.ideas[found.which]


CASES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "kept as the lowest": kept_changes,
    "6 gain 0.003, 6 nothing": lambda rng: np.repeat([0.003, 0], [6, 6]),
    "3 gain 0.003, 4 gain 0.0003": lambda rng: np.repeat([0.003, 0.0003], [3, 4]),  # 12% of the gain
    "2 gain 0.0021, 6 gain 0.00025": lambda rng: np.repeat([0.0021, 0.00025], [2, 6]),  # 26% of the gain
}


def morning(truth: np.ndarray, rest: float, rng: np.random.Generator) -> list[int]:
    """The changes that are pruned."""

    def measure(plan: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scores = (plan @ truth)[:, None] + rng.normal(0, rest, (len(plan), 2))
        return plan, seeds, scores + rng.normal(0, SEED_SD, (128, 2))[seeds]

    changes = [Change(str(i)) for i in range(len(truth))]
    try_changes(changes, measure)
    idle = [i for i, change in enumerate(changes) if change.verdict in ("harmful", "no evidence")]
    gain = truth.sum() + rng.normal(0, rest * (2 / 3) ** 0.5)  # three seeds of the first and the last file
    if idle and prune(rng.normal([0, truth[idle].sum()], rest, (PAIRS, 2)), gain)[1]:
        return idle
    return []


def pruning(truth_of: Callable, rest: float, nights: int) -> np.ndarray:
    """Shares of nights in which the file is pruned, and in which it loses more than SHARE of the night's gain."""
    shares = []
    for seed in range(nights):
        rng = np.random.default_rng(seed)
        truth = truth_of(rng)
        if len(truth):
            dropped = morning(truth, rest, rng)
            shares.append([bool(dropped), bool(dropped) and truth[dropped].sum() > SHARE * max(0, truth.sum())])
    return np.mean(shares, 0)


# ------------------------------------------------------------------------------------------- false verdicts
def falsely_real(gain: int, idle: int, by_seed: float, nights: int) -> tuple[float, float]:
    """Of changes called real, the mean share that is not, and the share of nights with one. `gain` changes gain 0.002,
    `idle` ones nothing. by_seed: sd of what each gains between seeds."""
    truth, shares = np.repeat([0.002, 0], [gain, idle]), []
    for number in range(nights):
        rng = np.random.default_rng(number)
        effects = truth + rng.normal(0, by_seed, (128, len(truth)))  # for each seed

        def measure(plan, seeds, effects=effects, rng=rng):
            scores = (plan * effects[seeds]).sum(1, keepdims=True) + rng.normal(0, 0.0003, (len(plan), 2))
            return plan, seeds, scores + rng.normal(0, SEED_SD, (128, 2))[seeds]

        changes = [Change(str(i)) for i in range(len(truth))]
        try_changes(changes, measure)
        real = [change.verdict == "real" for change in changes]
        shares.append(sum(real[gain:]) / max(1, sum(real)))
    return float(np.mean(shares)), float(np.mean(np.array(shares) > 0))


# --------------------------------------------------------------------------------------------------- the winner's curse
def overstated(ideas: int, sd: float, nights: int) -> np.ndarray:
    """By how much gains seem larger than they are, of ideas that scored lower than the reference: as measured and as
    shrunk; and their true mean. sd: of a measured difference."""
    found = []
    for seed in range(nights):
        rng = np.random.default_rng(seed)
        truth = keep_rules.draw(keep_rules.Case(), ideas, rng)
        gains = truth + rng.normal(0, sd, ideas)
        found += [*np.transpose([gains - truth, shrink(gains, sd) - truth, truth])[gains > 0]]
    return np.mean(found, 0)


def main() -> None:
    nights = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print("| looks at so many seeds | each interval misses | any of them |\n| --- | --- | --- |")
    for looks in ([3], [12], [3, 6, 12], [*range(3, 21)]):
        for name, misses in (
            ("", [miss_of_look(1 + i) for i in range(len(looks))]),
            (", always 95%", [0.05] * len(looks)),
        ):
            each, any_ = intervals_miss(looks, misses, 10 * nights)
            shown = ", ".join(f"{miss:.1%}" for miss in each[:4]) + ", ..." * (len(each) > 4)
            print(f"| {', '.join(map(str, looks[:4]))}{', ...' * (len(looks) > 4)}{name} | {shown} | {any_:.1%} |")
    print("\n| kept changes | rest | pruned | loses more than allowed |\n| --- | --- | --- | --- |")
    for name, truth_of in CASES.items():
        for rest in (0.0003, 0.001):
            pruned, loses = pruning(truth_of, rest, nights)
            print(f"| {name} | {rest} | {pruned:.1%} | {loses:.1%} |", flush=True)
    print("\n| changes that gain, that do not | by seed | false among `real` | nights with one |")
    print("| --- | --- | --- | --- |")
    for gain, idle in ((1, 1), (3, 3), (0, 2), (0, 6)):
        for by_seed in (0.0, 0.0003):
            share, any_ = falsely_real(gain, idle, by_seed, nights)
            print(f"| {gain}, {idle} | {by_seed} | {share:.1%} | {any_:.1%} |", flush=True)
    print("\n| ideas | sd of a difference | mean true gain of those that score lower | as measured | as shrunk |")
    print("| --- | --- | --- | --- | --- |")
    for ideas in (8, 30, 100):
        for sd in (0.0004, 0.001, 0.002):
            raw, shrunk, truth = overstated(ideas, sd, nights)
            print(f"| {ideas} | {sd} | {truth:+.5f} | {truth + raw:+.5f} | {truth + shrunk:+.5f} |")


if __name__ == "__main__":
    main()
