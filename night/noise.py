"""How much of a difference between runs is luck."""

import math
import statistics
from collections.abc import Collection

import numpy as np

import harness
from night.rows import grouped, place, scores

ATTRIBUTION_SEEDS = 1001  # from here on
KNOWN = 4  # degrees of freedom from which a standard deviation between versions counts


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

    Pooled over all commits with several seeds on the row's GPU, budget and dataset, reports included, but without runs
    of an attribution, which estimates the noise itself. same_seed: after removing the mean of each seed over commits.
    """
    rows = [other for other in harness.read_results() if place(other) == place(row)]
    runs = []
    for (commit, report), group in grouped(rows, lambda row: (row["commit"], row["status"] == "report")).items():
        found = [] if commit.endswith("+") else scores(group).items()  # one per seed: the same run may be repeated
        found = [(seed, bpb) for seed, bpb in found if not report or seed < ATTRIBUTION_SEEDS]
        runs += [(f"{commit}{report}", f"{seed}{report}", bpb) for seed, bpb in found if len(found) > 1]
    if not runs:
        return 0.0, 0
    commits, seeds, bpb = map(np.array, zip(*runs, strict=True))
    means = commits[:, None] == np.unique(commits)
    if same_seed:
        means = np.hstack([means, seeds[:, None] == np.unique(seeds)])
    fit, _, rank, _ = np.linalg.lstsq(means.astype(float), bpb, rcond=None)
    freedom = len(runs) - int(rank)
    return (math.sqrt(((bpb - means @ fit) ** 2).sum() / freedom), freedom) if freedom else (0.0, 0)


def version_noise(row: dict) -> tuple[float, str]:
    """The standard deviation of a run that counts where versions are compared with one seed, and whose it is. A seed's
    is larger, as it has what the seed does to all versions alike; it serves until the other is known."""
    rest, freedom = seed_noise(row, same_seed=True)
    return (rest, "between versions with one seed") if freedom >= KNOWN else (seed_noise(row)[0], "of a seed")
