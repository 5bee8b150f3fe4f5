"""Which of the kept changes are real? Trains the last kept train.py without half of them at a time, with new seeds.

Each run tells something about every change: 32 runs measure each of 12 effects with a standard error of 0.35 standard
deviations of a run. Leaving out one at a time would take 200 runs. docs/keep_rules.md has the simulation.
"""

import math
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from night.git import branch, commit_train, create_ref, git, group, read_train, without
from night.noise import ATTRIBUTION_SEEDS, MISS, SHARE, interval
from night.pool import Run
from night.rows import good, kept, scores
from night.wave import Trainer
from prepare import PrepareError

LEVEL = 0.1  # false discovery rate of the changes called real, by Benjamini and Hochberg's procedure
PAIRS = 8  # seeds with which a pruned file is compared with the full one


@dataclass
class Change:
    """A kept change. val, test: what its removal costs, in bits per byte, averaged over others being in or out."""

    name: str
    val: float = math.nan
    test: float = math.nan
    error: float = math.nan  # standard error of val
    verdict: str = "no evidence"


def design(count: int) -> tuple:
    """Which changes each run leaves out, bool (runs, count), and the number of its seed.

    Two runs share a seed: one leaves out what the other keeps. So seeds, and interactions of two changes, drop out of
    their difference. At least four degrees of freedom are left.
    """
    from scipy.linalg import hadamard

    pairs = 2 ** math.ceil(math.log2(count + 4))
    half = hadamard(pairs)[:, 1 : 1 + count] < 0
    return np.concatenate([half, ~half]), np.arange(2 * pairs) % pairs


def try_changes(changes: list[Change], measure: Callable) -> None:
    """Sets effects and verdict of each change. `needed`: every run without it crashed; the others are tried again.

    measure(left_out, seeds): trains a run per row of left_out (runs, changes), with seeds (runs,), counted from 0;
    returns what was really left out, with which seeds, and (runs, 2) val_bpb and test_bpb, NaN for crashes.
    """
    while tested := [i for i, change in enumerate(changes) if change.verdict != "needed"]:
        half, seeds = design(len(tested))
        plan = np.zeros((len(half), len(changes)), bool)
        plan[:, tested] = half
        left_out, seeds, scores = measure(plan, seeds)
        fine = ~np.isnan(scores[:, 0])
        if not fine.any():
            raise PrepareError(f"0 of {len(fine)} runs succeeded: see their rows")
        needed = [i for i in tested if left_out[:, i].any() and not (fine & left_out[:, i]).any()]
        for i in needed:
            changes[i].verdict = "needed"
        if not needed:
            return estimate([changes[i] for i in tested], left_out[fine][:, tested], seeds[fine], scores[fine])


def estimate(changes: list[Change], left_out: np.ndarray, seeds: np.ndarray, scores: np.ndarray) -> None:
    """Least squares, with a term for each seed. `real` and `harmful`: by one-sided t tests on val; a real change must
    help on test, too. No verdict on effects that the runs, after crashes, cannot tell apart."""
    from scipy import stats

    terms = np.column_stack([left_out, seeds[:, None] == np.unique(seeds)]).astype(float)
    inverse = np.linalg.pinv(terms)
    effects, known = inverse @ scores, np.diag(inverse @ terms)  # known: 1 if the runs determine the effect
    freedom, judged = len(terms) - round(known.sum()), np.flatnonzero(np.isclose(known[: len(changes)], 1))
    if freedom < 1 or not len(judged):
        raise PrepareError(f"too few runs succeeded for {len(changes)} changes: see their rows")
    errors = np.sqrt(((scores - terms @ effects)[:, 0] ** 2).sum() / freedom * (inverse**2).sum(1))
    chances = [stats.t.sf(sign * effects[judged, 0] / errors[judged], freedom) for sign in (1, -1)]
    real, harmful = (stats.false_discovery_control(p) < LEVEL for p in chances)
    for i, helps, harms in zip(judged, real, harmful, strict=True):
        change, (val, test) = changes[i], effects[i]
        change.val, change.test, change.error = val, test, errors[i]
        if harms or (helps and test > 0):
            change.verdict = "harmful" if harms else "real"


def attribute(line: list[dict], trainer: Trainer, gain: float) -> str:
    """Trains all it needs, in two waves; returns a Markdown table and the result of pruning.

    line: see `lineage`. gain: of its last commit over the first, with new seeds.
    """
    files = [read_train(row["commit"]) for row in line]
    full = line[-1]["commit"], line[-1]["description"]
    parts = units(files)
    changes = [Change("; ".join(line[i]["description"] for i in sorted(unit))) for unit in parts]

    def version(dropped: set[int]) -> tuple[str, str]:
        """Commit and subject of the last file without these changes."""
        if not dropped:
            return full
        subject = f"{full[0]} without changes {', '.join(map(str, sorted(dropped)))}"
        return commit_train(full[0], without(files, dropped), subject, "without/"), subject

    def measure(plan: np.ndarray, seeds: np.ndarray) -> tuple:
        dropped = [possible(files, [parts[i] for i in np.flatnonzero(row)]) for row in plan]
        done = np.array([[unit <= one for unit in parts] for one in dropped])
        once = np.unique(np.column_stack([done, seeds]), axis=0, return_index=True)[1]  # some may be the same run
        runs = [Run(*version(dropped[i]), ATTRIBUTION_SEEDS + int(seeds[i])) for i in once]
        return done[once], seeds[once], score_runs(trainer, runs)

    try_changes(changes, measure)
    lines = ["| change | mean cost of removal, val | standard error | test | verdict |", "| --- " * 5 + "|"]
    for change in changes:
        numbers = f"{change.val:+.4f} | {change.error:.4f} | {change.test:+.4f}".replace("+nan", "").replace("nan", "")
        name = change.name.replace("|", r"\|")
        lines.append(f"| {name} | {numbers} | {change.verdict} |")
    text = f"Up to {LEVEL:.0%} of the `real` are not. Costs are means over files with and without the other changes."
    idle = [unit for unit, change in zip(parts, changes, strict=True) if change.verdict in ("harmful", "no evidence")]
    if dropped := possible(files, idle):
        pruned = version(dropped)
        runs = [Run(*each, 2001 + i) for i in range(PAIRS) for each in (full, pruned)]
        found, fine = prune(score_runs(trainer, runs)[:, 0].reshape(PAIRS, 2), gain)
        text += f" The pruned file lacks {len(dropped)} commits' changes. {found}"
        if fine:
            name = f"{branch() or 'HEAD'}-pruned-{pruned[0]}"
            with suppress(subprocess.CalledProcessError):  # somebody has already gone on with it
                create_ref(f"refs/heads/{name}", pruned[0])
            text += f" It is branch {name}."
    return "\n".join([*lines, "", text])


def lineage(rows: list[dict]) -> list[dict]:
    """The first rows of the commits that were kept on the way to the reference, by first parents: a change is what one
    adds to the one before. Of ideas that were merged, one is such a commit, and the merge has the others."""
    if not rows:
        return []
    first = {row["commit"]: row for row in reversed(rows)}
    line = git("rev-list", "--first-parent", "--reverse", kept(rows)[-1]["commit"]).split()
    return [first[commit[:7]] for commit in line if commit[:7] in first]


def score_runs(trainer: Trainer, runs: list[Run]) -> np.ndarray:
    """val_bpb and test_bpb, (runs, 2); NaN where a run crashed."""
    rows = trainer.train(runs)
    found = [[scores(good(rows, run.commit), split).get(run.seed) for split in ("val", "test")] for run in runs]
    return np.array(found, float)


def units(files: list[bytes]) -> list[set[int]]:
    """The changes, numbered from 1, in sets of those that can only be left out together."""
    found: list[set[int]] = []
    for i in range(1, len(files)):
        unit = group(files, i).union(*(other for other in found if other & group(files, i)))
        found = [other for other in found if not other & unit] + [unit]
    return sorted(found, key=min)


def possible(files: list[bytes], wanted: list[set[int]]) -> set[int]:
    """The changes of those units that can be left out at once."""
    dropped: set[int] = set()
    for unit in wanted:
        if without(files, dropped | unit) is not None:
            dropped |= unit
    return dropped


def prune(scores: np.ndarray, gain: float) -> tuple[str, bool]:
    """What to say of a pruned file, and whether it surely keeps all but SHARE of the gain.

    scores: (pairs, 2) val_bpb of the full and of the pruned file with the same seeds, NaN for crashes."""
    allowed, crashed = SHARE * max(gain, 0), np.isnan(scores)
    costs = (scores[:, 1] - scores[:, 0])[~crashed.any(1)]
    if crashed[:, 1].sum() > crashed[:, 0].sum() or len(costs) < 2:
        return "It crashes: nothing is pruned.", False
    bound = interval(costs, 2 * MISS)[3]
    text = f"With {len(costs)} seeds it costs {costs.mean():+.4f}, at most {bound:+.4f} ({1 - MISS:.0%} confidence). "
    text += f"It may cost {allowed:.4f}, {SHARE:.0%} of the gain"
    return (f"{text}.", True) if bound < allowed else (f"{text}: nothing is pruned.", False)
