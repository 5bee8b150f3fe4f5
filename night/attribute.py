"""Which of the kept changes are real? The last kept train.py is trained with and without each, with new seeds."""

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness import Description
from night.commits import commit_train, group, read_train, without
from night.rows import Kind, git, good
from night.wave import run_of, train_all
from prepare import PrepareError

FIRST_SEEDS, MOST_SEEDS = 2, 6  # per change
IDLE = 0.7  # standard errors: a change with a smaller effect gets no more seeds (modelled: 60 runs for 16 changes)
LEVEL = 0.05  # of all verdicts together, by Holm's correction
MARGIN = 0.001  # bits per byte: the pruned file may be so much worse, at 95%


@dataclass
class Change:
    """A kept change, with those later ones that sit on its lines, and the file without it."""

    numbers: set[int]
    name: str
    lines: int  # that the file has more with it
    commit: str  # of the file without it
    effects: dict[str, list[float]] = field(default_factory=dict)  # by split: what its removal costs, a number per seed
    verdict: str = "open"


def attribute(kept: list[dict], args: argparse.Namespace, kind: Kind) -> str:
    """Trains what it needs, in several waves; returns the table, and what pruning has given.

    kept: rows of the kept commits, the first of which is the baseline.
    """
    kept = [row for i, row in enumerate(kept) if row["commit"] not in [other["commit"] for other in kept[:i]]]
    files = [read_train(row["commit"]) for row in kept]
    branch = git("rev-parse", "--abbrev-ref", "HEAD").decode().strip()
    full, changes = kept[-1]["commit"], []
    for i in range(1, len(files)):
        numbers = group(files, i)
        text, names = without(files, numbers), [Description.parse(kept[j]).subject for j in sorted(numbers)]
        if text is None or text == files[-1] or numbers in [change.numbers for change in changes]:
            continue
        name = " with: ".join(names)
        commit = commit_train(full, text, f"without: {name}", f"{branch}-without/{i}")
        changes.append(Change(numbers, name, files[-1].count(b"\n") - text.count(b"\n"), commit))
    if not changes:
        raise PrepareError("none of the kept changes can be taken out of the last kept train.py")

    def measure(chosen: list[Change], seeds: int) -> None:
        rows = train([full, *(change.commit for change in chosen)], range(101, 101 + seeds), args, kind)
        for change in chosen:
            change.effects = {split: pairs(rows, change.commit, full, split) for split in ("val", "test")}

    decide(changes, measure)
    lines = [*table(changes), "", *prune(files, kept, changes, branch, args, kind)]
    return "\n".join(lines)


def decide(changes: list[Change], measure: Callable[[list[Change], int], None]) -> None:
    """Gives each a verdict: measure(changes, seeds) sets their effects with so many seeds, more for those left open."""
    for seeds in range(FIRST_SEEDS, MOST_SEEDS + 1):
        if chosen := [change for change in changes if change.verdict == "open"]:
            measure(chosen, seeds)
            judge(changes, last=seeds == MOST_SEEDS)


def train(commits: list[str], seeds: Sequence[int], args: argparse.Namespace, kind: Kind) -> list[dict]:
    """Their rows with these seeds; those that are there already are not repeated."""
    subjects = {commit: git("log", "-1", "--format=%s", commit).decode(errors="replace").strip() for commit in commits}
    runs = [run_of(commit, subjects[commit], seed) for seed in seeds for commit in commits]
    return list(train_all(runs, args, kind).values())


def pairs(rows: list[dict], commit: str, full: str, split: str) -> list[float]:
    """val_bpb, or that of test, of a commit minus that of the full file, with the same seeds."""
    scores = []
    for name in (commit, full):
        parts = [(Description.parse(row), row["val_bpb"]) for row in good(rows, name)]
        scores.append({part.seed: bpb if split == "val" else part.test_bpb for part, bpb in parts})
    return [bpb - scores[1][seed] for seed, bpb in scores[0].items() if None not in (bpb, scores[1].get(seed))]


def spread(changes: list[Change], split: str = "val") -> tuple[float, int]:
    """Standard deviation of a pair's difference, pooled over all changes, and its degrees of freedom."""
    groups = [change.effects[split] for change in changes if len(change.effects.get(split, ())) > 1]
    freedom = sum(len(values) - 1 for values in groups)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in groups)
    return (math.sqrt(squares / freedom), freedom) if freedom else (math.nan, 0)


def judge(changes: list[Change], last: bool) -> None:
    """Sets verdicts: `real` or `harmful` by a t test on val that holds for all changes and all looks together, `needed`
    if the file crashes without it, `no evidence` if the effect is below IDLE or no seed is left."""
    from scipy import stats

    sd, freedom = spread(changes)
    looks = MOST_SEEDS - FIRST_SEEDS + 1
    ranked = []
    for change in changes:
        values = change.effects["val"]
        if values and freedom:
            error = sd / math.sqrt(len(values)) or 1e-12
            score = statistics.mean(values) / error
            ranked.append((2 * stats.t.sf(abs(score), freedom) * looks, score, change))
        elif change.verdict == "open":
            change.verdict = "needed"
    ranked.sort(key=lambda entry: entry[0])
    holds = True
    for i, (p, score, change) in enumerate(ranked):
        holds = holds and p * (len(ranked) - i) < LEVEL
        if change.verdict == "open" and holds:
            change.verdict = "real" if score > 0 else "harmful"
        elif change.verdict == "open" and (last or abs(score) < IDLE):
            change.verdict = "no evidence"


def table(changes: list[Change]) -> list[str]:
    """Of all changes, in the order in which they were kept."""
    lines = ["| change | lines | removal costs val | removal costs test | standard error | seeds | verdict |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    sd, _ = spread(changes)
    for change in changes:
        val, test = (change.effects.get(split, []) for split in ("val", "test"))
        means = " | ".join(f"{statistics.mean(values):+.4f}" if values else "" for values in (val, test))
        error = f"{sd / math.sqrt(len(val)):.4f}" if val else ""
        lines.append(f"| {change.name} | {change.lines:+d} | {means} | {error} | {len(val)} | {change.verdict} |")
    return lines


def prune(files, kept, changes: list[Change], branch: str, args: argparse.Namespace, kind: Kind) -> list[str]:
    """Trains the file without what is harmful, or adds lines and shows nothing; makes it a branch if it is no worse."""
    from scipy import stats

    count = Counter(change.verdict for change in changes)
    text = f"Of {len(changes)} kept changes {count['real']} are real, {count['no evidence']} show nothing, "
    text += f"{count['harmful']} do harm"
    needed = set().union(*(change.numbers for change in changes if change.verdict in ("real", "needed")))
    dropped: set[int] = set()
    for change in reversed(changes):
        idle = change.verdict == "harmful" or (change.verdict == "no evidence" and change.lines > 0)
        if idle and not change.numbers & needed and without(files, dropped | change.numbers) is not None:
            dropped |= change.numbers
    if not dropped:
        return [f"{text}. There is nothing to prune."]
    pruned, full = without(files, dropped), kept[-1]["commit"]
    ref = f"{branch}-pruned"
    commit = commit_train(full, pruned, f"without {len(dropped)} changes that show nothing or do harm", ref)
    rows = train([full, commit], range(101, 101 + MOST_SEEDS), args, kind)
    values = pairs(rows, commit, full, "val")
    if len(values) < 2:
        return [f"{text}. The file without {len(dropped)} of them crashed: see the rows of {commit}."]
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    worst = mean + stats.t.ppf(0.95, len(values) - 1) * error
    size = files[-1].count(b"\n") - pruned.count(b"\n")
    result = f"{mean:+.4f} +- {error:.4f} bits per byte, at most {worst:+.4f} at 95%"
    if worst > MARGIN:
        return [f"{text}. Without {len(dropped)} of them the file is worse or may be ({result}): nothing is pruned."]
    return [f"{text}; without {len(dropped)} of them the file is {size} lines shorter and scores the same: {result}.",
            f"It is the branch {ref}."]  # fmt: skip
