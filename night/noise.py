"""How much of a difference between runs is luck."""

import math
import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

import harness
from night.git import commit_train, read_train
from night.knobs import nudged
from night.rows import NUDGED, grouped, place, scores

ATTRIBUTION_SEEDS = 1001  # from here on
NUDGES = (1.001, 0.999, 1.0005)  # factors for constants: too little to matter, enough for other luck
KNOWN = 3  # degrees of freedom from which a standard deviation between versions counts


def noise_versions(base: str, branch: str) -> list[tuple[str, str]]:
    """Commits, with subjects, of what ought to score as `base` does: by how much it does not, changes can be judged."""
    text = read_train(base)
    found = [(nudged(text, factor), f"{NUDGED}{factor}") for factor in NUDGES]
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


class Noise(NamedTuple):
    """The standard deviation of val_bpb between commits with the same seed, or over seeds if that has fewer than KNOWN
    degrees of freedom; 0.0: unknown."""

    sd: float
    whose: str

    @classmethod
    def of(cls, rows: list[dict], found: Sequence = ()) -> "Noise":
        """found: the ideas behind the rows. Those that change nothing that matters tell about noise, too."""
        sd, freedom = seed_noise(rows[0], same_seed=True)
        squares = sd**2 * freedom
        lucky = [idea for idea in found if idea.is_noise and len(idea.changes) == 1]
        for same in grouped(lucky, lambda idea: idea.edited).values():
            values = [0.0, *(idea.change for idea in same)]  # they share the run of the file that they edit
            squares += len(values) * np.var(values)
            freedom += len(same)
        if freedom < KNOWN:
            return cls(seed_noise(rows[0])[0], "of a seed")
        return cls(math.sqrt(squares / freedom), "between versions with one seed")

    def band(self, pairs: int = 1) -> float:
        """Two standard errors of the mean difference of so many pairs of runs."""
        return 2 * self.sd * math.sqrt(2 / pairs)
