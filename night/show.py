"""The memory of a night: what was tried, and what it was worth, as short text for a person or an agent."""

import math
import statistics
import subprocess
from argparse import Namespace
from contextlib import suppress

from harness import crashed, read_results
from night.git import commit_of, in_history, train_blobs
from night.noise import NUDGED, Noise, shrink, with_error
from night.rows import baseline, experiments, grouped, kept, place, scores
from night.run import record_of, summary
from prepare import PrepareError

LEGEND = """\
A signed number is an edit's change of val_bpb, an unsigned one is the score itself. `*` means kept. `likely`: a guess \
at its mean from all of the night's, as the best of many is partly luck.
"""


class Idea:
    """A commit and its rows of one kind. A negative change is a gain."""

    def __init__(self, commit: str, rows: list[dict]):
        self.commit, self.rows, self.subject, self.scores = commit, rows, rows[0]["description"], scores(rows)
        self.score = statistics.mean(self.scores.values() or [0.0])  # 0.0: all runs crashed
        self.status = min((row["status"] for row in rows), key=("keep", "discard", "crash").index)
        self.changes: list[float] = []  # of val_bpb against the train.py it edited: one per seed that both have
        self.likely = math.nan  # see `shrink`

    @property
    def change(self) -> float | None:
        return statistics.mean(self.changes) if self.changes else None

    @property
    def title(self) -> str:
        if self.subject.startswith(NUDGED):
            return "Noise: constants moved by too little to matter"
        return "Crashed" if self.status == "crash" else "Ideas"


def ideas(rows: list[dict], noise: Noise) -> list[Idea]:
    """The ideas behind rows of one kind, in the order of their first rows."""
    found = [Idea(*group) for group in grouped(rows, lambda row: row["commit"]).items()]
    blobs = train_blobs([f"{idea.commit}{parent}" for idea in found for parent in ("", "^")])
    trains = [*zip(found, blobs[::2], blobs[1::2], strict=False)]  # train.py in each commit and in its first parent
    by_train = grouped(trains, lambda train: train[1])
    for i, (idea, own, parent) in enumerate(trains):
        if own == parent:
            continue
        # If the train.py that it edited has no row: compare with the last one kept before
        edited = [other for other, *_ in by_train.get(parent, [])]
        edited = edited or [other for other in found[:i] if other.status == "keep"][-1:]
        for seed, bpb in idea.scores.items():
            if usual := [other.scores[seed] for other in edited if seed in other.scores]:  # several if it ran again
                idea.changes.append(bpb - statistics.mean(usual))
    changed = [idea for idea in found if idea.changes]
    if changed and noise.sd:
        errors = [noise.band(len(idea.changes)) / 2 for idea in changed]
        for idea, likely in zip(changed, shrink([idea.change for idea in changed], errors), strict=True):
            idea.likely = likely
    return found


def show(args: Namespace) -> None:
    """Prints the night so far, or everything about the runs of args.revision."""
    print(about_commit(args.revision) if args.revision else about_night(last_place(args)))


def last_place(args: Namespace) -> list[dict]:
    """The experiments with that budget and --gpu on the last one's GPU and dataset."""
    rows = experiments()
    found = [row for row in rows if (row["budget"], row["gpu"].partition(" as ")[2]) == (args.budget, args.gpu or "")]
    if not found:
        raise PrepareError(f"results.tsv has no row of {args.budget}: give the night's --tokens, --seconds and --gpu")
    return [row for row in rows if place(row) == place(found[-1])]


def about_night(rows: list[dict]) -> str:
    """Markdown about rows of one kind: the reference, ideas, crashes."""
    noise = Noise.of(rows[0])
    found = ideas(rows, noise)
    last = (kept(in_history(rows)) or [baseline(rows)])[-1]
    reference = next(idea for idea in found if last in idea.rows)
    gains = sum(idea.status == "keep" for idea in found)
    score = f"{reference.score:.4f}" if reference.scores else "crashed"
    score += f" (mean of {len(reference.scores)} seeds)" * (len(reference.scores) > 1)
    lines = [
        f"# {', '.join(place(rows[0]))}",
        f"{len(rows)} experiments with {len(found)} commits; {gains} kept, {sum(map(crashed, rows))} crashed.",
        f"Reference: {reference.commit}, {reference.subject}, {score}.",
    ]
    if noise.sd:
        deviation = f"The standard deviation {noise.whose} is {noise.sd:.4f}"
        lines.append(f"{deviation}: `~` marks changes below two standard errors, with one seed {noise.band():.4f}.")
    lines.append(LEGEND)
    for title, group in grouped(found, lambda idea: idea.title).items():
        lines += [f"\n## {title}", *(entry(idea, noise) for idea in group)]
    return "\n".join(lines)


def entry(idea: Idea, noise: Noise) -> str:
    """`- -0.0036* a1b2c3d matrix LR 0.04 -> 0.03`. Changes also look like `-0.0009~* (likely -0.0002)`, `+0.0004~` or,
    with several seeds, `-0.0036 +-0.0004*`."""
    if idea.status == "crash":
        return f"- {idea.commit} {idea.subject} [{idea.rows[-1]['reason']}]"
    text, mark = f"{idea.score:.4f}", "*" * (idea.status == "keep")
    if idea.changes:
        near = "~" * (abs(idea.change) < noise.band(len(idea.changes)))
        text = with_error(idea.changes, "+.4f", ".4f") + near
        if mark and abs(idea.likely - idea.change) > 5e-5:
            mark += f" (likely {idea.likely:+.4f})"
    return f"- {text}{mark} {idea.commit} {idea.subject}"


def about_commit(commit: str) -> str:
    """A commit's rows, each with the summary of its last run and, after a crash, the end of its log."""
    with suppress(subprocess.CalledProcessError):  # this clone may not have it
        commit = commit_of(commit)
    lines = []
    for row in [row for row in read_results() if row["commit"] == commit]:
        score = f"[{row['reason'] or 'crash'}]" if crashed(row) else f"{row['val_bpb']:.6f} {row['status']}"
        test = "" if row["test_bpb"] is None else f", test {row['test_bpb']:.6f}"
        lines.append(f"# {commit} {row['description']}")
        lines.append(f"{score}{test}, seed {row['seed']}, {', '.join(place(row))}, {row['tokens_M']} M tokens")
        if folder := record_of(row):
            lines += [f"- {key}: {value}" for key, value in summary(folder).items() if key not in row]
            log = folder / "log.txt"
            if crashed(row) and log.exists():
                lines += ["```", *log.read_text("utf-8", errors="replace").splitlines()[-20:], "```"]
            lines.append(f"- record: runs/{folder.name}")
    if not lines:
        raise PrepareError(f"results.tsv has no row of {commit}")
    return "\n".join(lines)
