"""The night as one web page, night.html: chart, ideas, curves and report. It needs no server and no network."""

import argparse
import html
import json
import textwrap
from pathlib import Path

import harness
import prepare
from night import records
from night.ideas import Idea, Noise, ideas, oddities
from night.plot import worst
from night.rows import place, usual_seed
from night.show import gain, last_place

DIFF_LINES, HOVER_LINES = 400, 12  # lines of a diff in the table, and in a tooltip


def page(args: argparse.Namespace) -> None:
    """Writes night.html about the GPU and dataset of the last run with that budget, or else of the last run."""
    from plotly.offline import get_plotlyjs

    rows = last_place(args.setting)
    found = ideas(rows)
    noise = Noise.of(rows, found)
    data = {
        "title": f"{', '.join(place(rows[0]))}: {len(rows)} experiments",
        "figure": chart(found, noise).to_plotly_json(),
        "ideas": [entry(number, idea, rows, noise) for number, idea in enumerate(found, start=1)],
        "report": prepare.read(harness.RESULTS.with_name("report.md")),
    }
    text = Path(__file__).with_name("page.html").read_text("utf-8")
    text = text.replace("DATA", json.dumps(data).replace("<", "\\u003c"), 1).replace("PLOTLY", get_plotlyjs(), 1)
    path = harness.RESULTS.with_name("night.html")
    path.write_text(text, "utf-8")
    print(path)


def status(idea: Idea) -> str:
    """Its status, but `near miss` for a discarded idea that beat the file it edited."""
    return "near miss" if idea.status == "discard" and (idea.change or 0.0) < 0 else idea.status


def entry(number: int, idea: Idea, rows: list[dict], noise: Noise) -> dict:
    """A row of the table. change is for sorting, gain for display."""
    runs = [points for row in idea.rows if (points := records.curve_of(row))]
    return {
        "no": number, "commit": idea.commit, "subject": idea.subject, "family": idea.family, "status": status(idea),
        "bpb": idea.score or None, "score": f"{idea.score:.4f}" if idea.score else "", "change": idea.change,
        "gain": gain(idea, noise) if idea.changes else "", "seeds": len(idea.scores), "size": sum(idea.lines),
        "lines": "+{} -{}".format(*idea.lines) if idea.diff else "",
        "curves": [{key: [getattr(point, key) for point in points] for key in ("seconds", "loss")} for points in runs],
        "diff": "\n".join(idea.diff.splitlines()[:DIFF_LINES]),
        "notes": [idea.reason] * bool(idea.reason) + oddities(idea, rows),
    }  # fmt: skip


def chart(found: list[Idea], noise: Noise):
    """Plotly figure: val_bpb of each idea with the most frequent seed, else the mean of its seeds; crashes at the lower
    edge."""
    import plotly.graph_objects as go

    usual = usual_seed([row for idea in found for row in idea.rows])
    bpb = {idea: idea.scores.get(usual, idea.score) for idea in found}
    scores = [bpb[idea] for idea in found if idea.scores] or [0.0]
    low = min(scores)
    top = worst(min(max(scores), low + 2.5e-3), scores)
    margin = 0.05 * (top - low or low)
    figure, numbers = go.Figure(), range(1, len(found) + 1)
    for name, color in {"discard": "#8c959f", "near miss": "#bf8700", "keep": "#1a7f37", "crash": "#cf222e"}.items():
        chosen = {number: idea for number, idea in enumerate(found, start=1) if status(idea) == name}
        figure.add_scatter(
            x=[*chosen], y=[min(top, bpb[idea] or low - margin) for idea in chosen.values()], mode="markers",
            marker=dict(color=color, size=9 if name == "keep" else 6, symbol="x" if name == "crash" else "circle"),
            customdata=[*chosen], hovertext=[hover(idea, noise) for idea in chosen.values()], hoverinfo="text",
            name=f"{len(chosen)} {name}",
        )  # fmt: skip
    best = [min((bpb[other] for other in found[:n] if other.status == "keep"), default=None) for n in numbers]
    line = dict(shape="hv", color="#1a7f37")
    figure.add_scatter(x=[*numbers], y=best, mode="lines", line=line, hoverinfo="skip", name="best")
    figure.update_layout(
        template="none", height=420, margin=dict(t=10, r=10), legend=dict(orientation="h", y=-0.2),
        xaxis_title_text="idea", yaxis_title_text="val_bpb", yaxis_range=[low - 1.5 * margin, top + margin],
    )  # fmt: skip
    return figure


def hover(idea: Idea, noise: Noise) -> str:
    """A point's tooltip, in HTML."""
    lines = [f"{idea.commit}  {gain(idea, noise)}", *textwrap.wrap(idea.subject, 90)]
    lines += [line[:100] for line in idea.diff.splitlines()[:HOVER_LINES]]
    return "<br>".join(html.escape(line) for line in lines)
