"""Which of the kept changes are real? Trains the last kept train.py without half of them at a time, with new seeds.

Each run tells something about every change: 32 runs measure each of 16 effects to 0.35 standard deviations of
a run (its standard error). Leaving out one at a time would take 200 runs. docs/keep_rules.md has the simulation.
Half of a round's runs share one seed, half another, so what a seed does to all versions alike is not noise.
"""

import functools
import math
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from night.git import branch, commit_train, create_ref, git, group, read_train, revisions, without
from night.intervals import MISS, MOST, SHARE, pairs_needed, upper_bound
from night.noise import ATTRIBUTION_SEEDS, seed_noise
from night.proposals import program
from night.rows import good, scores
from night.wave import Trainer, run_of
from prepare import PrepareError

LEVEL = 0.1  # false discovery rate of the changes called real, by Benjamini and Hochberg's procedure
ROUNDS = 2  # the second one tests the changes that the first left open
SAME = "only comments"  # the verdict on a change that no run need test


@dataclass
class Change:
    """A kept change. Effects are what its removal costs, in bits per byte, averaged over others being in or out."""

    name: str
    lines: int  # that it adds, minus those it removes
    val: float = math.nan
    test: float = math.nan
    error: float = math.nan  # standard error of val
    verdict: str = "open"


def halves(count: int) -> np.ndarray:
    """Which changes each run leaves out, bool (runs, count): each in half of the runs, any two together in a quarter.

    runs is the smallest power of two that leaves at least four degrees of freedom. With up to runs / 2 changes, no
    effect is confounded with an interaction of two others (a design of resolution IV).
    """
    from scipy.linalg import hadamard

    runs = 2 ** math.ceil(math.log2(count + 5))
    columns = sorted(range(1, runs), key=lambda column: column.bit_count() % 2 == 0)  # the odd ones first
    return hadamard(runs)[:, columns[:count]] < 0


def try_changes(changes: list[Change], measure: Callable, sd: float, freedom: int) -> float:
    """Sets the effects and the verdict of each change; returns sd as known afterwards.

    measure(left_out, seeds): trains a run per row of left_out (runs, changes), with seeds (runs,), counted from 0;
    returns what was really left out, with which seeds, and (runs, 2) val_bpb and test_bpb, NaN for crashes.
    sd, freedom: the standard deviation between versions with the same seed as known so far, its degrees of freedom.
    """
    left_out, seeds, scores = np.empty((0, len(changes)), bool), np.empty(0, int), np.empty((0, 2))
    found = sd
    for again in range(ROUNDS):
        chosen = [i for i, change in enumerate(changes) if change.verdict == "open"]
        if not chosen:
            break
        half = halves(1 + len(chosen)) ^ bool(again)  # round 2 swaps the halves: both together have resolution IV
        plan = np.zeros((len(half), len(changes)), bool)
        plan[:, chosen] = half[:, 1:]
        trained = measure(plan, 2 * again + half[:, 0])  # the first column chooses one of two seeds
        left_out, seeds, scores = map(np.concatenate, zip((left_out, seeds, scores), trained, strict=True))
        found = estimate(changes, left_out, seeds, scores, sd, freedom)
    for change in changes:
        change.verdict = change.verdict.replace("open", "no evidence")
    return found


def estimate(
    changes: list[Change], left_out: np.ndarray, seeds: np.ndarray, scores: np.ndarray, sd: float, freedom: int
) -> float:
    """Least squares over all runs, with a term for each seed. `real` and `harmful`: by one-sided t tests on val; a real
    change must also help on test, which no experiment has seen. `needed`: every run without it crashed. `open`: seems
    to help val, or the runs cannot tell its effect from those of others, after crashes or if changes go together.
    Returns sd with the residuals included."""
    from scipy import stats

    fine = ~np.isnan(scores[:, 0])
    for i, change in enumerate(changes):
        if change.verdict != SAME and left_out[:, i].any() and not (fine & left_out[:, i]).any():
            change.verdict = "needed"
    tested = [i for i, change in enumerate(changes) if change.verdict not in ("needed", SAME)]
    design = np.column_stack([left_out[fine][:, tested], seeds[fine, None] == np.unique(seeds[fine])]).astype(float)
    inverse = np.linalg.pinv(design)
    effects, known = inverse @ scores[fine], np.diag(inverse @ design)  # known: 1 if the runs determine the effect
    squares = ((scores[fine] - design @ effects)[:, 0] ** 2).sum() + sd**2 * freedom
    freedom += len(design) - round(known.sum())
    if fine.any() and not tested:
        return sd
    if not freedom or not tested:
        found = f"{fine.sum()} of {len(fine)} runs succeeded"
        raise PrepareError(f"{found}, too few for {len(changes)} changes: see their rows")
    errors = np.sqrt(squares / freedom * (inverse**2).sum(1))
    judged = np.flatnonzero(np.isclose(known[: len(tested)], 1))
    chances = [stats.t.sf(sign * effects[judged, 0] / errors[judged], freedom) for sign in (1, -1)]
    real, harmful = (stats.false_discovery_control(p) < LEVEL for p in chances)
    for i, helps, harms in zip(judged, real, harmful, strict=True):
        change, (val, test) = changes[tested[i]], effects[i]
        change.val, change.test, change.error = val, test, errors[i]
        verdict = "harmful" if harms else "open" if val > 0 else "no evidence"
        change.verdict = "real" if helps and test > 0 else verdict
    return math.sqrt(squares / freedom)


def attribute(kept: list[dict], trainer: Trainer, gain: float) -> str:
    """Trains all it needs, in several waves; returns a Markdown table and the result of pruning.

    kept: rows of commits each of which contains the one before, the baseline first. gain: of the last over the first,
    with new seeds.
    """
    files, full = [read_train(row["commit"]) for row in kept], kept[-1]["commit"]
    changes = []
    for row, before, after in zip(kept[1:], files[:-1], files[1:], strict=True):
        verdict = SAME if program(before) == program(after) else "open"
        changes.append(Change(row["description"], after.count(b"\n") - before.count(b"\n"), verdict=verdict))
    train, begun = functools.partial(score_runs, trainer), set()

    def measure(plan: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        done, runs = np.zeros((len(plan), len(files)), bool), []
        for i, wanted in enumerate(plan):
            dropped = possible(files, (1 + np.flatnonzero(wanted)).tolist())
            done[i, [*dropped]] = True
            while (run := (*sorted(dropped), seeds[i])) in begun:  # as changes that go together make equal files
                seeds[i] += 2
            begun.add(run)
            runs.append((build(files, dropped, full), ATTRIBUTION_SEEDS + int(seeds[i])))
        return done[:, 1:], seeds, train(runs)

    sd = try_changes(changes, measure, *seed_noise(kept[-1], same_seed=True))
    lines = ["| change | lines | mean cost of removal, val | standard error | test | verdict |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for change in changes:
        numbers = f"{change.val:+.4f} | {change.error:.4f} | {change.test:+.4f}".replace("+nan", "").replace("nan", "")
        name = change.name.replace("|", r"\|")
        lines.append(f"| {name} | {change.lines:+d} | {numbers} | {change.verdict} |")

    count = Counter(change.verdict for change in changes)
    text = f"Judged: {', '.join(f'{n} {verdict}' for verdict, n in count.most_common())}. `real`: on val; up to "
    text += f"{LEVEL:.0%} of such verdicts are wrong. Costs are means over files with and without the other changes."
    idle = [i for i, change in enumerate(changes, start=1) if change.verdict in ("harmful", "no evidence")]
    if dropped := possible(files, idle, others=False):
        pruned = build(files, dropped, full)

        def compare(pairs: int) -> np.ndarray:
            runs = [(commit, 2001 + i) for i in range(pairs) for commit in (full, pruned)]
            return train(runs)[:, 0].reshape(pairs, 2)

        found, fine = prune(compare, gain, sd)
        text += f" The pruned file lacks {len(dropped)} of them. {found}"
        if fine:
            name = f"{branch() or 'HEAD'}-pruned-{pruned}"
            with suppress(subprocess.CalledProcessError):  # somebody has already gone on with it
                create_ref(f"refs/heads/{name}", pruned)
            shorter, longer = (len(read_train(commit).splitlines()) for commit in (pruned, full))
            text += f" Branch {name} has {shorter} lines, not {longer}."
    return "\n".join([*lines, "", text])


def lineage(kept: list[dict]) -> list[dict]:
    """The rows of the last kept commit and of those before it, each an ancestor of the next: a change is what one adds
    to the one before. The order of rows, in which runs ended, only counts between commits none of which contains the
    other; so if two ideas from the same commit were merged, this has the later one and the merge. What a person kept
    last is the last one, even if a kept commit contains it."""
    line, kept = kept[-1:], sorted(kept, key=lambda row: int(git("rev-list", "--count", row["commit"])))
    goes_on = line and line[0]["by"] != "person"

    def contains(commit: str, other: str) -> bool:
        return commit != other and git("merge-base", commit, other).startswith(other)

    for row in kept:
        if goes_on and contains(row["commit"], line[0]["commit"]):
            line = [row]
    for row in reversed(kept):
        if contains(line[0]["commit"], row["commit"]):
            line.insert(0, row)
    return line


def score_runs(trainer: Trainer, runs: list[tuple[str, int]]) -> np.ndarray:
    """val_bpb and test_bpb, (runs, 2), of commits with seeds; NaN where a run crashed."""
    subjects = dict(revisions([commit for commit, _ in runs]))
    rows = trainer.train([run_of(commit, subjects[commit], seed) for commit, seed in runs])
    found = [[scores(good(rows, commit), split).get(seed) for split in ("val", "test")] for commit, seed in runs]
    return np.array(found, float)


def possible(files: list[bytes], wanted: list[int], others: bool = True) -> set[int]:
    """The wanted changes, numbered from 1, that can be left out together, plus later ones that must go with them
    (if `others` may be left out, too)."""
    dropped: set[int] = set()
    for i in wanted:
        for more in ({i}, group(files, i)):
            if (others or more <= {*wanted}) and without(files, dropped | more) is not None:
                dropped |= more
                break
    return dropped


def build(files: list[bytes], dropped: set[int], full: str) -> str:
    """The commit of the last file without the dropped changes. full: that of the last file itself."""
    if not dropped:
        return full
    subject = f"{full} without changes {', '.join(map(str, sorted(dropped)))}"
    return commit_train(full, without(files, dropped), subject, "without/")


def prune(compare: Callable, gain: float, sd: float) -> tuple[str, bool]:
    """Whether the pruned file surely keeps all but SHARE of the gain, and what to say about it.

    compare(pairs): (pairs, 2) val_bpb of the full and of the pruned file, NaN for crashes. sd, between versions with
    the same seed, says how many seeds to compare. The bound then follows from the scatter of these pairs alone:
    residuals may be larger, as they have what the sum of effects does not explain."""
    allowed = SHARE * max(gain, 0)
    needed = pairs_needed(allowed, sd)
    pairs = min(needed, MOST)
    text = f"It may cost {allowed:.4f}, {SHARE:.0%} of the gain. {pairs} seeds of both files are compared"
    text += f"; to find that it costs nothing may take {needed}." if needed > pairs else "."
    print(f"\n{text}")
    scores = compare(pairs)
    crashed = np.isnan(scores)
    costs = (scores[:, 1] - scores[:, 0])[~crashed.any(1)]
    if crashed[:, 1].sum() > crashed[:, 0].sum() or len(costs) < 2:
        return f"{text} It crashes: nothing is pruned.", False
    bound = upper_bound(costs)
    text += f" It costs {costs.mean():+.4f}, at most {bound:+.4f} (with {1 - MISS:.0%} confidence)"
    return (f"{text}.", True) if bound < allowed else (f"{text}, which may be too much: nothing is pruned.", False)
