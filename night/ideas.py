"""What a night has tried: each commit that has rows, and what its edit of train.py was worth."""

import math
import statistics

from harness import crashed
from night.git import train_blobs
from night.intervals import shrink
from night.noise import NUDGED, Noise
from night.records import run_seconds
from night.rows import grouped, scores

SLOWER = 1.15  # mention training times that are longer by more than this factor


class Idea:
    """A commit and its rows of one kind. Scores and changes are in bits per byte; a negative change is a gain."""

    def __init__(self, commit: str, rows: list[dict]):
        self.commit, self.rows = commit, rows
        self.subject, self.reason = rows[0]["description"], rows[-1]["reason"]  # reason: of a crash
        self.scores = scores(rows)
        self.score = statistics.mean(self.scores.values()) if self.scores else 0.0  # 0.0: all runs crashed
        self.status = min((row["status"] for row in rows), key=("keep", "discard", "crash").index)
        self.is_noise = self.subject.startswith(NUDGED)  # it changes nothing that matters
        self.edited = ""  # blob hash of the train.py that it edits
        self.changes: list[float] = []  # of val_bpb against the train.py it edited: one per seed that both have
        self.likely = math.nan  # what `change` is on average, as the best of many is partly luck; see `expect`
        self.slowdown = 1.0  # times as long per token as usual

    @property
    def change(self) -> float | None:
        return statistics.mean(self.changes) if self.changes else None

    @property
    def family(self) -> str:
        if self.is_noise:
            return "Noise: constants moved by too little to matter"
        return "Crashed" if self.status == "crash" else "Ideas"


def ideas(rows: list[dict]) -> list[Idea]:
    """The ideas behind rows of one kind, in the order of their first rows."""
    found = [Idea(*group) for group in grouped(rows, lambda row: row["commit"]).items()]
    out = train_blobs([name for idea in found for name in (idea.commit, f"{idea.commit}^")])
    pairs = zip(found, out[::2], out[1::2], strict=False)  # of the train.py in each commit and in its first parent
    blobs = {idea.commit: (own, parent) for idea, own, parent in pairs if not own.endswith("missing")}
    by_train = grouped(found, lambda idea: blobs.get(idea.commit, ("",))[0])
    for i, idea in enumerate(found):
        own, parent = blobs.get(idea.commit, (idea.commit, None))
        if own == parent:
            continue
        idea.edited = parent or ""
        # If the train.py that it edited has no row: compare with the last one kept before
        edited = by_train.get(parent) or [other for other in found[:i] if other.status == "keep"][-1:]
        before = grouped([pair for other in edited for pair in other.scores.items()], lambda pair: pair[0])
        usual = {seed: statistics.mean(bpb for _, bpb in pairs) for seed, pairs in before.items()}  # if it ran again
        idea.changes = [bpb - usual[seed] for seed, bpb in idea.scores.items() if seed in usual]
    time_tokens(found)
    return found


def time_tokens(found: list[Idea]) -> None:
    """Compares an idea's fastest run, as runs that share a GPU take longer, with the median of all runs."""
    paces = []
    for idea in found:
        rows = [row for row in idea.rows if not crashed(row) and row["tokens_M"]]
        paces.append([seconds / row["tokens_M"] for row in rows for seconds in run_seconds([row])])
    usual = statistics.median([pace for some in paces for pace in some] or [1.0])
    for idea, some in zip(found, paces, strict=True):
        idea.slowdown = min(some, default=usual) / usual


def expect(found: list[Idea], noise: Noise) -> None:
    """Sets `likely` of ideas that have a change whose noise is known."""
    changed = [idea for idea in found if idea.changes]
    if changed and noise.sd:
        errors = [noise.band(len(idea.changes)) / 2 for idea in changed]
        for idea, likely in zip(changed, shrink([idea.change for idea in changed], errors), strict=True):
            idea.likely = float(likely)
