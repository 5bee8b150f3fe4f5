"""The morning after: how much of the night's gain was luck?"""

import argparse
import math
import re
import statistics

import harness
import prepare
from night.plot import plot
from night.rows import REPORT, TEST, experiments
from night.wave import start_ray, train_all
from prepare import PrepareError

T_95 = 4.30, 2.78, 2.45, 2.31, 2.23, 2.18, 2.14, 2.12, 2.10  # Student's t for two means of 2, 3, ... 10 runs each


def report(args: argparse.Namespace) -> None:
    """Trains the first and the last kept revision with new seeds, scores val and test, and says what was luck."""
    seeds = range(101, 101 + (args.seeds or [3])[0])  # that no experiment has used
    if len(seeds) < 2:
        raise PrepareError("--seeds takes 2 or more: one run has no standard error")
    dataset, (_, pattern) = prepare.dataset_id(), start_ray(args)
    rows = [row for row in experiments() if row["dataset"] == dataset and re.fullmatch(pattern, row["gpu"])]
    if not rows:
        raise PrepareError(f"no experiment on {dataset} with this GPU and budget: there is nothing to report")
    gpu = statistics.mode(row["gpu"] for row in rows)
    rows = [row for row in rows if row["gpu"] == gpu]
    kept = [row for row in rows if row["status"] == "keep"]
    status = [row["status"] for row in rows]
    title = f"{gpu}, {dataset}: {len(rows)} experiments, {len(kept)} kept, {status.count('crash')} crashed."
    print(title)
    if not kept or kept[0]["commit"] == kept[-1]["commit"]:
        text = "Fewer than two revisions were kept: there is no gain to report."
    else:
        args.score = True
        runs = {(row["commit"], f"report: seed {seed}"): seed for seed in seeds for row in (kept[0], kept[-1])}
        text = gains(kept[0], kept[-1], train_all(runs, args, gpu, re.escape(gpu + REPORT), REPORT))
    print(f"\n{text}")
    harness.RESULTS.with_name("report.md").write_text(f"{title}\n\n{text}\n\n![](progress.png)\n", "utf-8")
    plot()


def gains(first: dict, last: dict, rows: list[dict]) -> str:
    """What the last kept row gains over the first, as logged and in the rows of a report; and what of that was luck."""
    logged, left = first["val_bpb"] - last["val_bpb"], []
    lines = ["| bits per byte | first kept | last kept | gain | standard error |", "| --- | --- | --- | --- | --- |"]
    lines.append(f"| val, as logged | {first['val_bpb']:.4f} | {last['val_bpb']:.4f} | {logged:.4f} | |")
    for split, place in (("val", "on new seeds"), ("test", "on text that no experiment has seen")):
        scores: dict[str, list[float]] = {first["commit"]: [], last["commit"]: []}
        for row in rows:
            score = row["val_bpb"] if split == "val" else float(row["description"].partition(TEST)[2] or 0)
            scores[row["commit"]] += [score] if score else []  # a crash has none
        n = min(map(len, scores.values()))
        if n >= 2:
            before, after = map(statistics.mean, scores.values())
            gain, error = before - after, math.sqrt(sum(statistics.variance(s) / len(s) for s in scores.values()))
            lines.append(f"| {split}, mean of {n} seeds | {before:.4f} | {after:.4f} | {gain:.4f} | {error:.4f} |")
            left.append(f"{gain:.4f} +- {error:.4f} {place}")
            stands = gain > T_95[min(n, 10) - 2] * error
    if not left:
        raise PrepareError("fewer than two runs of a revision have ended well: see their rows; --again repeats them")
    left = f"of the {logged:.4f} gained as logged: {' and '.join(left)}"
    verdict = f"What stands {left}. The rest, {max(0.0, logged - gain):.4f}, was luck."
    if not stands:
        verdict = f"The night found nothing that stands. What is left {left}, no more than chance gives."
    return "\n".join([*lines, "", verdict])
