"""The pictures of a night: results.tsv as progress.png, and the curves of runs as curves.png."""

import argparse
import textwrap

import numpy as np

import harness
from night.records import curve, folders
from night.rows import arms, experiments, git, seed_noise
from prepare import PrepareError


def plot(args: argparse.Namespace | None = None) -> None:
    """Draws progress.png: for each gpu and dataset a chart of all experiments and tables of the kept ones and of near
    misses. With args.revisions instead draws their curves."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PrepareError("the picture needs Matplotlib: pip install -e '.[plot]'") from None
    if args and args.revisions:
        return plot_curves(Figure(layout="constrained", figsize=(9, 5)), args.revisions)
    rows = experiments()
    places = dict.fromkeys((row["gpu"], row["dataset"]) for row in rows if row["val_bpb"])
    if not places:
        raise PrepareError(f"{harness.RESULTS} holds no val_bpb yet: run `python train.py` first")
    figure, lines = Figure(layout="constrained"), 0
    for place, ax in zip(places, figure.subplots(len(places), squeeze=False)[:, 0], strict=True):
        lines += draw(ax, *place, [row for row in rows if (row["gpu"], row["dataset"]) == place])
    figure.set_size_inches(9, 4.3 * len(places) + 0.16 * lines)
    figure.savefig(path := harness.RESULTS.with_name("progress.png"), dpi=180)
    print(path)
    groups = {place: arms([row for row in rows if (row["gpu"], row["dataset"]) == place]) for place in places}
    if groups := {place: group for place, group in groups.items() if len(group) > 1}:
        plot_arms(Figure(layout="constrained", figsize=(9, 4.3 * len(groups))), groups)


def plot_arms(figure, groups: dict[tuple[str, str], dict[str, list[dict]]]) -> None:
    """Draws arms.png: for each gpu and dataset the best val_bpb so far of each arm against the number of its runs."""
    for ax, (place, found) in zip(figure.subplots(len(groups), squeeze=False)[:, 0], groups.items(), strict=True):
        for arm, rows in found.items():
            lowest = np.minimum.accumulate([row["val_bpb"] or np.inf for row in rows])
            ax.step(np.arange(1, len(rows) + 1), lowest, where="post", marker=".", label=f"{arm}, {lowest[-1]:.4f}")
        ax.set(xlabel="runs of the arm", ylabel="best val_bpb so far")
        ax.set_title(", ".join(place), loc="left", size=10, parse_math=False)
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path := harness.RESULTS.with_name("arms.png"), dpi=180)
    print(path)


def draw(ax, gpu: str, dataset: str, rows: list[dict]) -> int:
    """One chart, crashes on its lower edge and far outliers on its upper one; returns the lines of the table below."""
    x, y = np.arange(1, len(rows) + 1), np.array([row["val_bpb"] for row in rows])
    status = np.array([row["status"] for row in rows])
    scores = y[status != "crash"]
    first, best = scores[0], scores.min()
    worst = max(first, min(scores.max(), best + 2.5 * np.median(scores - best)))
    margin = max(0.1 * (worst - best), 0.003 * best)
    y = np.where(status == "crash", best - margin, np.minimum(y, worst + margin))
    for kind, color, marker in (("discard", "#8c959f", "."), ("keep", "#1a7f37", "o"), ("crash", "#cf222e", "x")):
        chosen = status == kind
        ax.scatter(x[chosen], y[chosen], s=25, c=color, marker=marker, label=f"{chosen.sum()} {kind}", clip_on=False)
    if (status == "keep").any():
        lowest = np.minimum.accumulate(np.where(status == "keep", y, np.inf))
        ax.step(x, lowest, where="post", color="#1a7f37", alpha=0.5)
        if noise := seed_noise(gpu, dataset)[0]:
            band = lowest[-1] - 2 * noise, lowest[-1] + 2 * noise
            ax.axhspan(*band, color="#1a7f37", alpha=0.12, label="best +- 2 s.d. of a seed")
    ax.set(ylim=(best - margin, worst + margin), xlim=(0.5, len(x) + 0.5), xlabel="experiment", ylabel="val_bpb")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.ticklabel_format(useOffset=False)
    change = f"{first:.4f} to {best:.4f}" if best < first else f"{best:.4f}"
    ax.set_title(f"{gpu}, {dataset}\nval_bpb {change}", loc="left", size=10, parse_math=False)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8, columnspacing=1)

    kept, missed, before = ["  no.  val_bpb     gain  kept"], [], None
    for number, row in enumerate(rows, start=1):
        gain = before - row["val_bpb"] if before else None
        shown = f"{gain:.4f}" if before else ""
        line = f"{number:5}  {row['val_bpb']:7.4f}  {shown:>7}  {row['description']}"
        if row["status"] == "keep":
            kept += textwrap.wrap(line, 108, subsequent_indent=25 * " ")
            before = row["val_bpb"]
        elif row["status"] == "discard" and before:
            missed.append((gain, line))
    table = kept + ["", "  no.  val_bpb     gain  near misses"] * bool(missed)
    for _, line in sorted(missed, reverse=True)[:10]:
        table += textwrap.wrap(line, 108, subsequent_indent=25 * " ")
    below = dict(xycoords="axes fraction", xytext=(0, -40), textcoords="offset points", va="top")
    ax.annotate("\n".join(table), (0, 0), **below, family="monospace", size=8.5, parse_math=False)
    return len(table)


def plot_curves(figure, revisions: list[str]) -> None:
    """Draws curves.png: the loss of every run of these commits, over seconds and over tokens."""
    commits = [line[:7] for line in git("rev-parse", *[f"{name}^{{commit}}" for name in revisions]).decode().split()]
    axes = figure.subplots(1, 2, sharey=True)
    for row in [row for row in harness.read_results() if row["commit"] in commits]:
        points = [point for folder in folders(row)[:1] for point in curve(folder)]
        if points:
            loss = smooth([point.loss for point in points])
            bpb = f"{row['val_bpb']:.4f}" if row["val_bpb"] else row["status"]
            label = textwrap.shorten(f"{bpb}  {row['commit']} {row['description']}", 80)
            axes[0].plot([point.seconds for point in points], loss, lw=1, label=label)
            axes[1].plot([point.tokens / 1e6 for point in points], loss, lw=1)
    if not axes[0].lines:
        raise PrepareError(f"no record in runs/ of {' '.join(commits)}: only `python -m night` writes them")
    bottom = min(line.get_ydata().min() for line in axes[0].lines)
    tops = [line.get_ydata()[len(line.get_ydata()) // 10] for line in axes[0].lines]
    axes[0].set(xlabel="seconds", ylabel="loss, nats per token", ylim=(bottom - 0.05, max(tops) + 0.05))
    axes[1].set(xlabel="M tokens")
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, title="val_bpb", alignment="left")
    figure.savefig(path := harness.RESULTS.with_name("curves.png"), dpi=180)
    print(path)


def smooth(values: list[float], share: float = 0.02) -> np.ndarray:
    """Exponential moving average over about so much of a run, without the bias of its start."""
    keep, mean, weight, out = 1 - 1 / max(1, share * len(values)), 0.0, 0.0, []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + 1 - keep
        out.append(mean / weight)
    return np.array(out)
