"""The report on the morning after: how much of the night's gain was luck?"""

import argparse
import math
import statistics

import harness
from harness import Description
from night.attribute import attribute
from night.ideas import SLOWER, times_as_long
from night.plot import plot
from night.records import run_seconds
from night.rows import Label, arms, count_kept, elsewhere, experiments, good, in_history, scores, seed_of
from night.wave import Trainer, run_of, start_pool
from prepare import PrepareError


def report(args: argparse.Namespace) -> None:
    """Trains the first and the last kept revision with new seeds, scores val and test, and says what was luck."""
    seeds = range(101, 101 + args.seeds)  # unlikely to have been used by experiments
    if len(seeds) < 2:
        raise PrepareError(f"--seeds must be at least 2, not {args.seeds}: one run has no standard error")
    pool, kind = start_pool(args)
    rows = [row for row in experiments() if kind.holds(row)]
    if not rows:
        raise PrepareError(f"no experiment on {kind}{elsewhere(experiments(), kind) or ': there is nothing to report'}")
    gpu = statistics.mode(row["gpu"] for row in rows)
    rows = [row for row in rows if row["gpu"] == gpu]
    kept = in_history([row for row in rows if row["status"] == "keep"])
    crashed = sum(row["status"] == "crash" for row in rows)
    title = f"{gpu}, {kind.dataset}: {len(rows)} experiments, {count_kept(rows)}, {crashed} crashed."
    pictures = "![](progress.png)"
    if len(found := arms(rows)) > 1:
        title += "".join(f"\n{best_of(*one)}" for one in found.items())
        pictures += "\n\n![](arms.png)"
    print(title)
    parts = [title]

    def write(text: str) -> None:
        """Appends to the report, so that a part is safe before the next one is begun."""
        print(f"\n{text}")
        parts.append(text)
        harness.RESULTS.with_name("report.md").write_text("\n\n".join([*parts, pictures]) + "\n", "utf-8")

    if not kept or kept[0]["commit"] == kept[-1]["commit"]:
        write("Fewer than two revisions were kept on this branch: there is no gain to report.")
    else:
        trainer = Trainer(args, pool, kind._replace(gpus=[Label.parse(gpu).gpu], report=True, anywhere=False))
        ends = [(row["commit"], Description.parse(row).subject) for row in (kept[0], kept[-1])]
        runs = [run_of(*end, seed) for seed in seeds for end in ends]
        write(gains(kept[0], kept[-1], rows, trainer.train(runs)))
        if args.attribute:
            write(f"## Which of the kept changes are real?\n\n{attribute(kept, trainer)}")
    plot()


def best_of(arm: str, rows: list[dict]) -> str:
    best = min(rows, key=lambda row: row["val_bpb"] or math.inf)  # a crash has 0
    name = "{val_bpb:.4f}, {commit}, {description}".format(**best) if best["val_bpb"] else "none, all crashed"
    return f"- Best of {len(rows)} by {arm}: {name}."


def gains(first: dict, last: dict, night: list[dict], rows: list[dict]) -> str:
    """Markdown: the gain of the last kept commit over the first, as logged in the night and by the report's rows, and
    what was luck."""
    names = [f"{row['commit']}, {Description.parse(row).subject}" for row in (first, last)]
    lines = [
        "First kept: {}. Last kept: {}.".format(*names),
        "",
        "| bits per byte | first kept | last kept | gain | standard error |",
        "| --- | --- | --- | --- | --- |",
    ]

    def pairs(rows: list[dict], split: str = "val") -> list[tuple[float, float]]:
        """Scores of both commits with the same seed."""
        before, after = (scores(good(rows, row["commit"]), split) for row in (first, last))
        return [(before[seed], after[seed]) for seed in before if seed in after]

    logged = 0.0  # if no seed trained both
    if both := pairs(night):
        before, after = map(statistics.mean, zip(*both, strict=True))
        logged = before - after
        lines.append(f"| val, as logged | {before:.4f} | {after:.4f} | {logged:.4f} | |")
    found = {}
    for split in ("val", "test"):
        if len(both := pairs(rows, split)) >= 2:
            gain, error, *_ = found[split] = difference(both)
            before, after = map(statistics.mean, zip(*both, strict=True))
            name = f"{split}, mean of {len(both)} new seeds"
            lines.append(f"| {name} | {before:.4f} | {after:.4f} | {gain:.4f} | {error:.4f} |")
    if not found:
        raise PrepareError("fewer than two seeds succeeded with both revisions: see their rows; --again repeats them")
    *_, (split, (_, _, low, high)) = found.items()
    unseen = ", which no experiment has seen," * (split == "test")
    unsure = "it may be chance. More seeds narrow it (--seeds)." if high > 0 else "it is a loss."
    verdict = "it holds up." if low > 0 else unsure
    lines += ["", f"On {split}{unseen} the gain's 95% confidence interval is {low:.4f} to {high:.4f}: {verdict}"]
    gain, error, *_ = found["val"]
    if (luck := min(logged, logged - gain)) > error:
        lines.append(f"Of the gain as logged, {luck:.4f} was luck.")
    lines.append("The errors only cover seeds: another text would change the gains, too.")
    for row in (first, last):
        runs = good(rows, row["commit"])
        if lost := {seed_of(run) for run in rows if run["commit"] == row["commit"]} - scores(runs).keys():
            lines.append(f"{row['commit']} crashed with {len(lost)} of the seeds: the numbers are those of the others.")
        tokens = statistics.mean(run["tokens_M"] for run in runs)
        if tokens < 0.98 * row["tokens_M"]:
            seen = f"{tokens:.1f} M tokens here, {row['tokens_M']:.1f} M as logged"
            lines.append(f"{row['commit']} saw {seen}: a busy machine?")
    before, after = (run_seconds(good(rows, row["commit"])) for row in (first, last))
    if (times := times_as_long(after, before)) > SLOWER:
        lines.append(f"It takes {times:.2f} times as long for its tokens: in a fixed time it would see fewer.")
    return "\n".join(lines)


def difference(pairs: list[tuple[float, float]]) -> tuple[float, float, float, float]:
    """The mean difference of pairs, its standard error, and the ends of its 95% confidence interval, by Student's t."""
    from scipy import stats

    gains = [before - after for before, after in pairs]
    gain, error = statistics.mean(gains), stats.sem(gains)
    margin = stats.t.ppf(0.975, len(gains) - 1) * error
    return gain, error, gain - margin, gain + margin
