"""Pictures of a night: results.tsv as progress.png, loss curves as curves.png."""

import argparse
import subprocess
import textwrap
from contextlib import suppress

import numpy as np

import harness
from night.git import commit_of, in_history
from night.ideas import ideas
from night.noise import Noise
from night.records import curve, record_of
from night.rows import baseline, experiments, grouped, one_seed, place
from prepare import PrepareError

GREEN = "#2da44e"  # legible on white and on black


def plot(args: argparse.Namespace | None = None) -> None:
    """Draws progress.png: per gpu and dataset, a chart of all experiments. With args.revisions, draws only their loss
    curves."""
    if args and args.revisions:
        return plot_curves(args.revisions)
    groups = [rows for rows in grouped(experiments(), place).values() if any(row["val_bpb"] for row in rows)]
    if not groups:
        raise PrepareError(f"{harness.RESULTS} has no val_bpb yet: run `python train.py` first")
    figure, axes = new_figure(len(groups))
    for (ax,), rows in zip(axes, groups, strict=True):
        draw(ax, rows)
    save(figure, "progress.png")


def new_figure(rows: int = 1, columns: int = 1) -> tuple:
    """A figure, and its axes (rows, columns)."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", figsize=(9, 4.5 * rows))
    return figure, figure.subplots(rows, columns, sharey="row", squeeze=False)


def save(figure, name: str) -> None:
    """name: of a file beside the log."""
    figure.savefig(path := harness.RESULTS.parent / name, dpi=180)
    print(path)


def draw(ax, rows: list[dict]) -> None:
    """Draws a chart, crashes on its lower edge and outliers on its upper one. Its line and title are those of the most
    frequent seed and of what was kept on HEAD's branch."""
    x, y = np.arange(1, len(rows) + 1), np.array([row["val_bpb"] for row in rows])
    status, main, found = np.array([row["status"] for row in rows]), one_seed(rows), []
    merged = [row for row in main if row["status"] == "keep"]
    with suppress(OSError, subprocess.CalledProcessError):  # no git
        merged = in_history(merged) or merged  # of ideas on side branches, none is what the next one edits
        found = ideas(rows)
    kept, scores, first = np.array([row in merged for row in rows]), y[status != "crash"], baseline(main)["val_bpb"]
    best = y[kept].min() if kept.any() else first
    low = scores.min()
    top = max(first, min(scores.max(), low + 2.5 * (np.median(scores) - low)))  # outliers lie on the upper edge
    margin = max(0.1 * (top - low), 0.003 * low)
    y = np.where(status == "crash", low - margin, np.minimum(y, top + margin))
    for kind, color, marker in (("discard", "#8c959f", "."), ("keep", GREEN, "o"), ("crash", "#cf222e", "x")):
        chosen = status == kind
        ax.scatter(x[chosen], y[chosen], s=25, c=color, marker=marker, label=f"{chosen.sum()} {kind}", clip_on=False)
    if kept.any():
        lowest = np.minimum.accumulate(np.where(kept, y, np.inf))
        ax.step(x, lowest, where="post", color=GREEN, alpha=0.5)
        noise = Noise.of(rows, found)
        if noise.sd:
            band = lowest[-1] - 2 * noise.sd, lowest[-1] + 2 * noise.sd
            ax.axhspan(*band, color=GREEN, alpha=0.12, label=f"best +- 2 s.d. {noise.whose}")
    ax.set(ylim=(low - margin, top + margin), xlim=(0.5, len(x) + 0.5), xlabel="experiment", ylabel="val_bpb")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.ticklabel_format(useOffset=False)
    change = f"{first:.4f} to {best:.4f}" if best < first else f"{best:.4f}"
    ax.set_title(f"{', '.join(place(rows[0]))}\nval_bpb {change}", loc="left", size=10, parse_math=False)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8, columnspacing=1)


def plot_curves(revisions: list[str]) -> None:
    """Draws curves.png: the training loss of the last run of each of these commits' rows, over time and over tokens."""
    figure, ((left, right),) = new_figure(columns=2)
    commits = [commit_of(revision) for revision in revisions]
    rows = {record_of(row): row for row in harness.read_results() if row["commit"] in commits}  # the last of each
    for folder, row in rows.items():
        if folder and (points := curve(folder)):
            _, seconds, tokens, loss, _ = np.array(points).T
            keep = 1 - 1 / max(1, 0.02 * len(loss))  # bias-corrected exponential moving average
            weights = keep ** np.arange(len(loss))
            mean = np.convolve(loss, weights)[: len(loss)] / weights.cumsum()
            bpb = f"{row['val_bpb']:.4f}" if row["val_bpb"] else row["status"]
            label = textwrap.shorten(f"{bpb}  {row['commit']} {row['description']}", 80)
            left.plot(seconds, mean, lw=1, label=label)
            right.plot(tokens / 1e6, mean, lw=1)
    if not left.lines:
        why = "it crashed early, was cleaned up, or was not run by `python -m night`"
        raise PrepareError(f"no row of {' '.join(commits)} has a loss curve in runs/: {why}")
    losses = [line.get_ydata() for line in left.lines]
    bottom, top = min(loss.min() for loss in losses), max(loss[len(loss) // 10] for loss in losses)
    left.set(xlabel="seconds", ylabel="loss, nats per token", ylim=(bottom - 0.05, top + 0.05))
    right.set(xlabel="M tokens")
    legend = figure.legend(loc="outside lower left", frameon=False, fontsize=8, title="val_bpb", alignment="left")
    for text in legend.get_texts():
        text.set_parse_math(False)  # a subject may have a dollar sign
    save(figure, "curves.png")
