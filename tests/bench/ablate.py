"""
What is each mechanism of train.py worth? Trains it without half of them at a time, as `night report --attribute` does
with the changes of a night, and prints the effects in docs/ablations.md.

    python tests/bench/ablate.py --gpu T4 --tokens 62400000 --per-gpu 6    # options as `night wave` takes them
    python tests/bench/ablate.py --tokens 26214400 --one-by-one            # leaves out one mechanism at a time instead

Where mechanisms interact strongly, only the second way tells what each is worth in the full file. It trains all
versions with the same two seeds, since a seed's luck is much the same for all. The runs' commits are branches
`ablation/*`, their rows go to results.tsv: call it in a clone of its own.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from edits import EDITS

import harness
import train
from night.__main__ import parse
from night.attribute import Change, estimate, score_runs, try_changes
from night.git import commit_of, commit_train, read_train
from night.noise import ATTRIBUTION_SEEDS
from night.wave import Trainer, start_pool

SEEDS = 2  # of each version, one by one
GPT = "self.config, self.dtype, self.attention = config, "
OF_EXPERTS = {  # for sizes that have some
    "experts": (GPT, f"config = replace(config, num_experts=0)\n        {GPT}"),
    "balance of the experts": ("BALANCE_RATE = 0.01", "BALANCE_RATE = 0.0 "),
    "slower experts": ("EXPERT_LR_SCALE = 0.5", "EXPERT_LR_SCALE = 1.0"),
}


def without(text: str, names: list[str]) -> str:
    """train.py without some mechanisms."""
    for name in names:
        old, new = (EDITS | OF_EXPERTS)[name]
        assert text.count(old) == 1, f"{name}: {text.count(old)} times in train.py: {old!r}"
        text = text.replace(old, new)
    return text


def effects(names: list[str], measure: Callable, one_by_one: bool) -> list[Change]:
    """What each mechanism is worth. measure: as decide's."""
    changes = [Change(name) for name in names]
    if one_by_one:
        plan = np.tile(np.eye(1 + len(names), dtype=bool)[:, 1:], (SEEDS, 1))  # first of each seed: the full file
        seeds = np.arange(SEEDS).repeat(1 + len(names))
        estimate(changes, *measure(plan, seeds))
    else:
        try_changes(changes, measure)
    return changes


def main() -> None:
    one_by_one = "--one-by-one" in sys.argv
    args = parse(["wave", *(word for word in sys.argv[1:] if word != "--one-by-one")])
    pool, kind = start_pool(args)
    trainer = Trainer(args, pool, kind._replace(report=True))  # so that runs score the test split, too
    gpu = harness.named_gpu(args.gpu) if args.gpu else harness.this_gpu()
    full, names = commit_of("HEAD"), [*EDITS, *(OF_EXPERTS if train.pick_size(gpu).num_experts else ())]
    text = read_train(full).decode()

    def measure(plan: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        runs = []
        for row, seed in zip(plan, seeds.tolist(), strict=True):
            left_out = [names[j] for j in np.flatnonzero(row)]
            version, subject = without(text, left_out).encode(), f"without {', '.join(left_out) or 'nothing'}"
            runs.append((commit_train(full, version, subject, "ablation/"), ATTRIBUTION_SEEDS + seed))
        return plan, seeds, score_runs(trainer, runs)

    changes = effects(names, measure, one_by_one)
    print("| without | costs val | test | standard error | verdict |\n| --- | --- | --- | --- | --- |")
    for change in sorted(changes, key=lambda change: -change.val):
        print(f"| {change.name} | {change.val:+.4f} | {change.test:+.4f} | {change.error:.4f} | {change.verdict} |")


if __name__ == "__main__":
    main()
