"""A picture of the night: results.tsv as progress.png."""

from argparse import Namespace

import numpy as np

import harness
from night.git import in_history
from night.noise import Noise
from night.rows import baseline, experiments, grouped, one_seed, place
from prepare import PrepareError

GREEN = "#2da44e"  # legible on white and on black


def plot(args: Namespace | None = None) -> None:
    """Draws a chart of all experiments for each GPU, budget and dataset."""
    groups = [rows for rows in grouped(experiments(), place).values() if any(row["val_bpb"] for row in rows)]
    if not groups:
        raise PrepareError(f"{harness.RESULTS} has no val_bpb yet: run `python train.py` first")
    figure, axes = new_figure(len(groups))
    for (ax,), rows in zip(axes, groups, strict=True):
        draw(ax, rows)
    figure.savefig(path := harness.RESULTS.with_name("progress.png"), dpi=180)
    print(path)


def new_figure(charts: int = 1) -> tuple:
    """A figure, and its axes (charts, 1)."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", figsize=(9, 4.5 * charts))
    return figure, figure.subplots(charts, squeeze=False)


def draw(ax, rows: list[dict]) -> None:
    """Draws a chart, crashes on its lower edge and outliers on its upper one. Its line and title are those of the most
    frequent seed and of what was kept on HEAD's branch."""
    x, y = np.arange(1, len(rows) + 1), np.array([row["val_bpb"] for row in rows])
    status, main = np.array([row["status"] for row in rows]), one_seed(rows)
    merged = [row for row in main if row["status"] == "keep"]
    merged = in_history(merged) or merged  # of ideas on side branches, none is what the next one edits
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
        noise = Noise.of(rows[0])
        if noise.sd:
            band = lowest[-1] - 2 * noise.sd, lowest[-1] + 2 * noise.sd
            ax.axhspan(*band, color=GREEN, alpha=0.12, label=f"best +- 2 s.d. {noise.whose}")
    ax.set(ylim=(low - margin, top + margin), xlim=(0.5, len(x) + 0.5), xlabel="experiment", ylabel="val_bpb")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.ticklabel_format(useOffset=False)
    change = f"{first:.4f} to {best:.4f}" if best < first else f"{best:.4f}"
    ax.set_title(f"{', '.join(place(rows[0]))}\nval_bpb {change}", loc="left", size=10, parse_math=False)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8, columnspacing=1)
