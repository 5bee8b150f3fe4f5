"""The memory of a night: what has been tried, as short text for a person or an agent."""

import argparse
import math
import os
import re
import sys
from contextlib import suppress

from harness import budget_name, crashed, read_results
from night import records
from night.git import commit_of, in_history
from night.ideas import Idea, expect, ideas, oddities, usual_tokens
from night.noise import Noise, with_error
from night.rows import baseline, count_kept, experiments, grouped, place
from prepare import PrepareError

TRIALS = 5  # a tuner makes many: list the best ones


def show(args: argparse.Namespace) -> None:
    """Prints the night so far, or everything about the runs of args.revision."""
    if args.revision:
        return print(about_commit(commit_of(args.revision)))
    text = about_night(last_place(args))
    if sys.stdout.isatty() and not args.md:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text.replace("<", r"\<")))  # or it would take <eos> for HTML
    else:
        print(text)


def last_place(args: argparse.Namespace) -> list[dict]:
    """The experiments with that budget (five minutes; or, if there are none, any) on the last one's GPU and dataset."""
    rows = experiments()
    found = [row for row in rows if (row["budget"], row["gpu"].partition(" as ")[2]) == (args.budget, args.gpu or "")]
    if not found and not args.gpu and args.budget == budget_name():
        found = rows
    if not found:
        raise PrepareError(f"results.tsv has no row of {args.budget}: train something first")
    return [row for row in rows if place(row) == place(found[-1])]


def about_night(rows: list[dict]) -> str:
    """Markdown about rows of one kind: the reference, ideas by family, and crashes."""
    found = ideas(rows)
    noise = Noise.of(rows, found)
    expect(found, noise)
    kept = in_history([row for row in rows if row["status"] == "keep"]) or [baseline(rows)]
    reference = next(idea for idea in found if kept[-1] in idea.rows)
    crashes = sum(map(crashed, rows))
    lines = [f"# {', '.join(place(rows[0]))}"]
    lines.append(f"{len(rows)} experiments with {len(found)} commits; {count_kept(rows)}, {crashes} crashed.")
    score = f"{reference.score:.4f}" if reference.scores else "crashed"
    score += f" (mean of {len(reference.scores)} seeds)" * (len(reference.scores) > 1)
    lines.append(f"Reference: {reference.commit}, {reference.subject}, {score}.")
    if noise.rest:
        known, rest = [], f"between commits with the same seed is {noise.rest:.4f}, which counts for changes"
        if noise.seed:
            known.append(f"The standard deviation of a seed is {noise.seed:.4f}, by {noise.repeats} repeated runs.")
        if noise.rest != noise.seed:
            known.append(f"{'That' if known else 'The standard deviation'} {rest}.")
        else:
            known.append("Changes with the same seed scatter less; other commits with these seeds tell by how much.")
        lines.append(f"{' '.join(known)} `~` marks changes within noise: with one seed, below {noise.band():.4f}.")
    lines.append(
        "A signed number is an edit's change of val_bpb, an unsigned one is the score itself. `*` means kept. "
        "`likely`: what such a change is on average, by all of the night's, as the best of many is partly luck.\n"
    )
    usual = usual_tokens(rows)
    crashes = [idea for idea in found if idea.status == "crash" and not idea.tuner]
    families = grouped([idea for idea in found if idea not in crashes], lambda idea: idea.family)
    knobs = sorted(name for name, group in families.items() if all(name in idea.values for idea in group))
    lines += [knob(name, families.pop(name), noise) for name in knobs]
    for name, group in sorted(families.items()):
        title = name or "The first reference" + ", and what is not committed or not in this clone" * (len(group) > 1)
        if group[0].tuner:
            title += f": the best of {len(group)} trials"
            group = sorted(group, key=lambda idea: idea.score or math.inf)[:TRIALS]
        lines += [f"\n## {title}", *entries(group, usual, noise)]
    if crashes:
        lines += ["\n## Crashed", *entries(crashes, usual, noise)]
    return "\n".join(lines)


def knob(name: str, group: list[Idea], noise: Noise) -> str:
    """All that was tried of one constant: `- MATRIX_LR: 0.03 -> 0.024 +0.0011, 0.03 -> 0.038 +0.0013`."""
    tried = grouped(group, lambda idea: " -> ".join(idea.values[name])).items()
    return f"- {name}: " + ", ".join(" ".join([text, *(gain(idea, noise) for idea in same)]) for text, same in tried)


def gain(idea: Idea, noise: Noise) -> str:
    """`-0.0036*`, `-0.0009~* (likely -0.0002)`, `+0.0004~` or, with several seeds, `-0.0036 +-0.0004*`."""
    mark = "*" * (idea.status == "keep")
    if mark and idea.changes and abs(idea.likely - idea.change) > 5e-5:
        mark += f" (likely {idea.likely:+.4f})"
    if not idea.changes:
        return f"{idea.score:.4f}{mark}"
    near = "~" * (abs(idea.change) < noise.band(len(idea.changes), idea.same_seed))
    return with_error(idea.changes, "+.4f", ".4f") + near + mark


def entries(group: list[Idea], usual: float, noise: Noise) -> list[str]:
    """One line per idea, without the beginning that its subject shares with the one before."""
    lines, before = [], ""
    for idea in group:
        shared = re.match(r".{30,}[;,] |", os.path.commonprefix([before, idea.subject]))[0]  # noqa: RUF071
        text = f"... {idea.subject[len(shared) :]}" if shared else idea.subject
        before = idea.subject
        size = " (+{} -{})".format(*idea.lines) if idea.diff else ""
        notes = [f"[{idea.reason}]"] * (idea.status == "crash") + oddities(idea, usual)
        score = f"{gain(idea, noise)} " * (idea.status != "crash")
        lines.append(f"- {score}{idea.commit} {text}{size}{'; '.join(['', *notes])}")
    return lines


def by_length(row: dict) -> list[str]:
    """A line with what each quarter of the documents by length gained (negative) or lost against the run of the parent,
    else of the reference, with the same seed; [] if the records do not say."""

    def quarters(row: dict) -> list[float]:
        folder = records.record_of(row)
        return [float(bpb) for bpb in records.summary(folder).get("bpb_by_length", "").split()] if folder else []

    alike = [other for other in read_results() if (place(other), other["seed"]) == (place(row), row["seed"])]
    others = [other for other in alike if other["commit"] != row["commit"]]
    bases = in_history([other for other in others if other["status"] == "keep"])[-1:]
    with suppress(PrepareError):  # the first commit, or one that this clone does not have
        parent = commit_of(f"{row['commit']}^")
        bases += [other for other in others if other["commit"] == parent]
    for base in reversed(bases):
        if (own := quarters(row)) and (before := quarters(base)):
            changes = [f"{bpb - old:+.4f}" for bpb, old in zip(own, before, strict=True)]
            return [f"- bpb_by_length minus {base['commit']}'s: {' '.join(changes)}"]
    return []


def about_commit(commit: str) -> str:
    """A commit's rows, each with the summary of its last run and, after a crash, the end of its log."""
    lines = []
    for row in [row for row in read_results() if row["commit"] == commit]:
        score = f"[{row['reason'] or 'crash'}]" if crashed(row) else f"{row['val_bpb']:.6f} {row['status']}"
        lines.append(f"# {commit} {row['description']}")
        test = "" if row["test_bpb"] is None else f", test {row['test_bpb']:.6f}"
        lines.append(f"{score}{test}, seed {row['seed']}, {', '.join(place(row))}, {row['tokens_M']} M tokens")
        if folder := records.record_of(row):
            lines += [f"- {key}: {value}" for key, value in records.summary(folder).items() if key not in row]
            lines += by_length(row)
            log = folder / "log.txt"
            if crashed(row) and log.exists():
                lines += ["```", *log.read_text("utf-8", errors="replace").splitlines()[-20:], "```"]
            lines.append(f"- record: {folder.relative_to(records.RUNS.parent)}")
    if not lines:
        raise PrepareError(f"results.tsv has no row of {commit}")
    return "\n".join(lines)
