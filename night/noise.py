"""How much of a difference between runs is luck: noise from repeats, intervals, gains shrunk. Scores are normal."""

import math
import statistics
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

import harness
from harness import crashed
from night.git import commit_train, read_train
from night.knobs import nudged
from night.rows import place

ATTRIBUTION_SEEDS = 1001  # from here on
NUDGED = "noise: like "  # and a commit: begins the subject of a version of it that only measures the noise
NUDGES = (1.001, 0.999, 1.0005)  # factors for constants: see `nudged`
KNOWN = 3  # degrees of freedom from which a standard deviation between versions counts
SHARE = 0.1  # of a night's gain: what a pruned file may lose
MISS = 0.05  # chance that a statement is wrong: a pruned file that loses more, a gain outside its interval


def noise_versions(base: str, branch: str) -> list[tuple[str, str]]:
    """Commits and subjects of versions that should score as `base` does: how much they differ is noise."""
    text = read_train(base)
    found = [(nudged(text, factor), f"{NUDGED}{base}, constants x {factor}") for factor in NUDGES]
    return [(commit_train(base, other, name, f"{branch}-noise/"), name) for other, name in found if other != text]


def with_error(values: Collection[float], form: str, error_form: str) -> str:
    """The mean of values with its standard error, if there are several, as text."""
    if not values:
        return ""
    text = f"{statistics.mean(values):{form}}"
    if len(values) > 1:
        text += f" +-{statistics.stdev(values) / math.sqrt(len(values)):{error_form}}"
    return text


def seed_noise(row: dict, same_seed: bool = False) -> tuple[float, int]:
    """Standard deviation of val_bpb over seeds, and its degrees of freedom; (0.0, 0) if nothing was repeated.

    Pooled over all commits that ran again on the row's GPU, budget and dataset, reports included, attributions not.
    same_seed: without the mean of each seed over commits; a version of `noise_versions` is its base, run again.
    """
    runs = {}  # one per commit and seed: the same run may be repeated
    for other in harness.read_results():
        commit, seed, report = other["commit"], other["seed"], other["status"] == "report"
        lucky = other["description"].startswith(NUDGED)
        apart = commit.endswith("+") or (report and seed >= ATTRIBUTION_SEEDS) or (lucky and not same_seed)
        if place(other) == place(row) and not crashed(other) and not apart:
            version = other["description"].removeprefix(NUDGED)[:7] if lucky else commit
            runs[commit, seed, report] = f"{version}{report}", f"{seed}{report}", other["val_bpb"]
    often = Counter(version for version, *_ in runs.values())
    again = [run for run in runs.values() if often[run[0]] > 1]
    if not again:
        return 0.0, 0
    commits, seeds, bpb = map(np.array, zip(*again, strict=True))
    means = commits[:, None] == np.unique(commits)
    if same_seed:
        means = np.hstack([means, seeds[:, None] == np.unique(seeds)])
    fit, _, rank, _ = np.linalg.lstsq(means.astype(float), bpb, rcond=None)
    freedom = len(again) - int(rank)
    return (math.sqrt(((bpb - means @ fit) ** 2).sum() / freedom), freedom) if freedom else (0.0, 0)


class Noise(NamedTuple):
    """The standard deviation of val_bpb between commits with one seed, or over seeds if few commits share any; 0.0:
    unknown."""

    sd: float
    whose: str

    @classmethod
    def of(cls, row: dict) -> "Noise":
        """For rows of this row's kind."""
        sd, freedom = seed_noise(row, same_seed=True)
        if freedom < KNOWN:
            return cls(seed_noise(row)[0], "of a seed")
        return cls(sd, "between versions with one seed")

    def band(self, pairs: int = 1) -> float:
        """Two standard errors of the mean difference of so many pairs of runs."""
        return 2 * self.sd * math.sqrt(2 / pairs)


def miss_of_look(look: int) -> float:
    """The chance that the interval of the first, second, ... look at more seeds misses the true gain: 3%, 1%, 0.5%, ...

    All hold with a chance of 1 - MISS (Bonferroni) unless one look chooses the number of seeds of the next."""
    return 0.6 * MISS if look == 1 else 0.4 * MISS / 2 ** (look - 1)


def interval(differences: ArrayLike, miss: float = MISS) -> tuple:
    """The mean of paired differences (..., n), its standard error, and the ends of its interval, by Student's t."""
    from scipy import stats

    n = np.shape(differences)[-1]
    mean, error = np.mean(differences, -1), np.std(differences, -1, ddof=1) / np.sqrt(n)
    margin = stats.t.isf(miss / 2, n - 1) * error
    return mean, error, mean - margin, mean + margin


def shrink(gains: ArrayLike, sd: ArrayLike) -> np.ndarray:
    """What each of a night's gains is on average, given its measured value: the best of many is partly luck.

    An empirical Bayes mean: if each true gain is one of the measured ones or nothing, EM finds the likeliest shares of
    these, given two more that are nothing. sd: of each measurement."""
    true = np.append(gains, 0.0)
    likely = np.exp(-0.5 * ((np.reshape(gains, (-1, 1)) - true) / np.reshape(sd, (-1, 1))) ** 2)
    share = np.full(len(true), 1 / len(true))
    for _ in range(50):
        chance = likely * share / (likely @ share)[:, None]
        share = chance.sum(0) + 2 * (true == 0)
        share /= share.sum()
    return likely * share @ true / (likely @ share)
