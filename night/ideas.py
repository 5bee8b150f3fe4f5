"""What a night has tried: each commit that has rows, what it changed in train.py, and what that was worth."""

import math
import re
import statistics
from collections import Counter

from harness import crashed
from night.git import git, train_blobs
from night.intervals import shrink
from night.noise import Noise
from night.records import run_seconds
from night.rows import NUDGED, grouped, scores

SLOWER = 1.15  # mention training times that are longer by more than this factor
CONSTANT = r"([A-Z][A-Z0-9_]*)\s*=\s*(.*?)\s*(?:#.*)?$"  # a line of train.py: name and value


class Idea:
    """A commit and its rows of one kind. Scores and changes are in bits per byte; a negative change is a gain."""

    def __init__(self, commit: str, rows: list[dict]):
        self.commit, self.rows = commit, rows
        self.subject, self.reason = rows[0]["description"], rows[-1]["reason"]  # reason: of a crash
        self.scores, self.seconds = scores(rows), run_seconds(rows)
        self.score = statistics.mean(self.scores.values()) if self.scores else 0.0  # 0.0: all runs crashed
        self.status = min((row["status"] for row in rows), key=("keep", "discard", "crash").index)
        self.is_noise = self.subject.startswith(NUDGED)  # it changes nothing that matters
        self.edited = ""  # blob hash of the train.py that it edits
        self.diff, self.lines = "", (0, 0)  # lines added, removed
        self.places: Counter[str] = Counter()  # changed lines per constant, class or function
        self.values: dict[str, tuple[str, str]] = {}  # constants: old and new value
        self.changes: list[float] = []  # of val_bpb against the train.py it edited: one per seed that both have
        self.likely = math.nan  # what `change` is on average, as the best of many is partly luck; see `expect`
        self.oddities: list[str] = []  # of its runs: fewer tokens than usual, more time

    @property
    def change(self) -> float | None:
        return statistics.mean(self.changes) if self.changes else None

    @property
    def tuner(self) -> str:
        """The sampler whose trial it is, or ""."""
        found = re.match(r"(?:agent \d+: )?tune (tpe|random): ", self.subject)
        return found[1] if found else ""

    @property
    def family(self) -> str:
        """The tuner; else the constants it changed, if nothing else; else the place with most changed lines."""
        if self.is_noise:
            return "Noise: constants moved by too little to matter"
        if self.tuner:
            return f"tuned by {self.tuner}"
        if self.values and self.values.keys() == self.places.keys():
            return ", ".join(sorted(self.values))
        return self.places.most_common(1)[0][0] if self.places else ""


def ideas(rows: list[dict]) -> list[Idea]:
    """The ideas behind rows of one kind, in the order of their first rows."""
    found = [Idea(*group) for group in grouped(rows, lambda row: row["commit"]).items()]
    out = train_blobs([name for idea in found for name in (idea.commit, f"{idea.commit}^")])
    pairs = zip(found, out[::2], out[1::2], strict=False)  # of the train.py in each commit and in its first parent
    blobs = {idea.commit: (own, parent) for idea, own, parent in pairs if not own.endswith("missing")}
    read_diffs([idea for idea in found if idea.commit in blobs])
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
    find_oddities(found)
    return found


def find_oddities(found: list[Idea]) -> None:
    """Compares tokens and training times of an idea's runs with the medians of all. Times differ where the budget is in
    tokens; there the fastest run counts, as runs that share a GPU take longer."""
    tokens = {idea.commit: [row["tokens_M"] for row in idea.rows if not crashed(row)] for idea in found}
    usual = statistics.median([n for numbers in tokens.values() for n in numbers] or [0])
    usual_seconds = statistics.median([second for idea in found for second in idea.seconds] or [0])
    for idea in found:
        if (fewest := min(tokens[idea.commit], default=usual)) < 0.9 * usual:
            idea.oddities.append(f"only {fewest / usual:.0%} of the usual tokens")
        if (fastest := min(idea.seconds, default=0)) > SLOWER * usual_seconds:
            idea.oddities.append(f"takes {fastest / usual_seconds:.2f} times as long as usual")


def read_diffs(found: list[Idea]) -> None:
    """Sets what each idea changed in train.py relative to its first parent."""
    if not found:
        return
    options = "--no-walk=unsorted --format=%x00%h --abbrev=7 --first-parent -m -U0 -p".split()
    log = git("log", "--no-color", *options, *(idea.commit for idea in found), "--", "train.py")
    patches = dict(part.partition("\n")[::2] for part in log.split("\0")[1:])
    for idea in found:
        _, at, rest = patches.get(idea.commit, "").partition("\n@@")
        idea.diff = (at + rest).strip()
        idea.lines, idea.places, idea.values = read_diff(idea.diff)


def read_diff(diff: str) -> tuple[tuple[int, int], Counter[str], dict[str, tuple[str, str]]]:
    """What it changes in train.py: see `lines`, `places` and `values` of an Idea. diff: without context lines."""
    place, old, new, places, lines = "", {}, {}, Counter(), Counter()
    for line in diff.split("\n"):
        if line.startswith("@@"):
            place = re.sub(r"^(class|def) |[:(= ].*", "", line.split("@@", 2)[2].strip())
        elif line[:1] in ("+", "-") and line[1:].strip():
            if name := re.match(r"[+-](?:class|def) (\w+)", line):
                place = name[1]
            if constant := re.match(r"[+-]" + CONSTANT, line):
                (new if line[0] == "+" else old)[constant[1]] = constant[2]
            places[constant[1] if constant else place or "top"] += 1
            lines[line[0]] += 1
    values = {name: (old[name], new[name]) for name in old if name in new and old[name] != new[name]}
    return (lines["+"], lines["-"]), places, values


def describe(diff: str) -> str:
    """An edit in a line: `SOFTCAP 12.0 -> 11.0, 3 lines of GPT`."""
    _, places, values = read_diff(diff[diff.find("@@") :])
    found = [f"{name} {old} -> {new}" for name, (old, new) in values.items()]
    return ", ".join(found + [f"{n} line{'s' * (n > 1)} of {name}" for name, n in places.items() if name not in values])


def expect(found: list[Idea], noise: Noise) -> None:
    """Sets `likely` of ideas that have a change whose noise is known."""
    changed = [idea for idea in found if idea.changes]
    if changed and noise.sd:
        errors = [noise.band(len(idea.changes)) / 2 for idea in changed]
        for idea, likely in zip(changed, shrink([idea.change for idea in changed], errors), strict=True):
            idea.likely = float(likely)
