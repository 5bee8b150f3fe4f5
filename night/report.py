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
from night.rows import Label, arms, experiments, good, in_history, num_kept, scores
from night.wave import Trainer, run_of, start_ray
from prepare import PrepareError

UNSURE = "may be chance: its 95% confidence interval reaches below 0. More seeds narrow it (--seeds)."


def report(args: argparse.Namespace) -> None:
    """Trains the first and the last kept revision with new seeds, scores val and test, and says what was luck."""
    seeds = range(101, 101 + args.seeds)  # unlikely to have been used by experiments
    if len(seeds) < 2:
        raise PrepareError(f"--seeds must be at least 2, not {args.seeds}: one run has no standard error")
    kind = start_ray(args)
    rows = [row for row in experiments() if kind.holds(row)]
    if not rows:
        raise PrepareError(f"no experiment on {kind.dataset} with this GPU and budget: there is nothing to report")
    gpu = statistics.mode(row["gpu"] for row in rows)
    rows = [row for row in rows if row["gpu"] == gpu]
    kept = [row for row in rows if row["status"] == "keep"]
    crashed = sum(row["status"] == "crash" for row in rows)
    title = f"{gpu}, {kind.dataset}: {len(rows)} experiments, {num_kept(rows)} commits kept, {crashed} crashed."
    pictures = "![](progress.png)"
    if len(found := arms(rows)) > 1:
        title += "".join(f"\n{best_of(*one)}" for one in found.items())
        pictures += "\n\n![](arms.png)"
    print(title)
    kept, parts = in_history(kept), [title]

    def write(text: str) -> None:
        """Appends to the report, so that a part is safe before the next one is begun."""
        print(f"\n{text}")
        parts.append(text)
        harness.RESULTS.with_name("report.md").write_text("\n\n".join([*parts, pictures]) + "\n", "utf-8")

    if not kept or kept[0]["commit"] == kept[-1]["commit"]:
        write("Fewer than two revisions were kept on this branch: there is no gain to report.")
    else:
        trainer = Trainer(args, kind._replace(gpus=[Label.parse(gpu).gpu], report=True, anywhere=False))
        ends = [(row["commit"], Description.parse(row).subject) for row in (kept[0], kept[-1])]
        runs = [run_of(*end, seed) for seed in seeds for end in ends]
        write(gains(kept[0], kept[-1], trainer.train(runs)))
        if args.attribute:
            write(f"## Which of the kept changes are real?\n\n{attribute(kept, trainer)}")
    plot()


def best_of(arm: str, rows: list[dict]) -> str:
    best = min(rows, key=lambda row: row["val_bpb"] or math.inf)  # a crash has 0
    name = "{val_bpb:.4f}, {commit}, {description}".format(**best) if best["val_bpb"] else "none, all crashed"
    return f"- Best of {len(rows)} by {arm}: {name}."


def gains(first: dict, last: dict, rows: list[dict]) -> str:
    """Markdown: the gain of the last kept row over the first, as logged and by the report's rows, and what was luck."""
    logged = first["val_bpb"] - last["val_bpb"]
    ends = ("{commit}, {description}.".format(**row) for row in (first, last))
    lines = [
        "First kept: {} Last kept: {}".format(*ends),
        "",
        "| bits per byte | first kept | last kept | gain | standard error |",
        "| --- | --- | --- | --- | --- |",
        f"| val, as logged | {first['val_bpb']:.4f} | {last['val_bpb']:.4f} | {logged:.4f} | |",
    ]
    found = {}
    for split in ("val", "test"):
        before, after = (scores(good(rows, row["commit"]), split) for row in (first, last))
        if min(len(before), len(after)) >= 2:
            gain, error, stands = found[split] = difference(before, after)
            seeds = len(before) if len(before) == len(after) else f"{len(before)} and {len(after)}"
            means = " | ".join(f"{statistics.mean(group.values()):.4f}" for group in (before, after))
            lines.append(f"| {split}, mean of {seeds} seeds | {means} | {gain:.4f} | {error:.4f} |")
    if not found:
        raise PrepareError("fewer than two runs of a revision succeeded: see their rows; --again repeats them")
    gain, error, _ = found["val"]
    luck = min(logged, logged - gain)
    lines += ["", f"The night's gain {'holds up.' if stands else UNSURE}"]
    lines.append(f"On new seeds the gain is {gain:.4f} +- {error:.4f}; as logged it was {logged:.4f}.")
    if luck > error:
        lines.append(f"The rest, {luck:.4f}, was luck.")
    if "test" in found:
        lines.append("On text that no experiment has seen it is {:.4f} +- {:.4f}.".format(*found["test"]))
    lines.append("The errors only cover seeds: another text would change the gains, too.")
    for row in (first, last):
        tokens = statistics.mean(run["tokens_M"] for run in good(rows, row["commit"]))
        if tokens < 0.98 * row["tokens_M"]:
            seen = f"{tokens:.1f} M tokens here, {row['tokens_M']:.1f} M as logged"
            lines.append(f"{row['commit']} saw {seen}: a busy machine?")
    before, after = (run_seconds(good(rows, row["commit"])) for row in (first, last))
    if (times := times_as_long(after, before)) > SLOWER:
        lines.append(f"It takes {times:.2f} times as long for its tokens: in a fixed time it would see fewer.")
    return "\n".join(lines)


def difference(before: dict[int, float], after: dict[int, float]) -> tuple[float, float, bool]:
    """The difference of the means, its standard error, and whether the 95% confidence interval is above 0.

    By a paired t test if the seeds are the same; otherwise, since a run crashed, by Welch's test.
    """
    from scipy import stats

    if before.keys() == after.keys():
        test = stats.ttest_rel([before[seed] for seed in after], list(after.values()))
    else:
        test = stats.ttest_ind(list(before.values()), list(after.values()), equal_var=False)
    low, high = test.confidence_interval(0.95)
    return (low + high) / 2, (high - low) / 2 / stats.t.ppf(0.975, test.df), low > 0
