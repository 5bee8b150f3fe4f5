"""What a night has tried: each commit with rows, what it changed in train.py, and what that was worth."""

import math
import re
import statistics
import subprocess
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from harness import SEED, Description
from night import records
from night.rows import ROOT


@dataclass
class Idea:
    """A commit and its rows of one kind. Losses and differences are in bits per byte; below 0 is a gain."""

    commit: str
    subject: str
    rows: list[dict]
    places: Counter = field(default_factory=Counter)  # constants, classes and functions: changed lines
    values: dict[str, tuple[str, str]] = field(default_factory=dict)  # constants: old and new value
    lines: tuple[int, int] = (0, 0)  # added, removed
    diff: str = ""
    change: float | None = None  # of val_bpb, to the train.py that it has edited
    pairs: int = 1  # of runs with the same seed that it is the mean of
    error: float | None = None  # its standard error, if they are several

    @property
    def scores(self) -> dict:
        """val_bpb by seed."""
        done = [(Description.parse(row).seed, row["val_bpb"]) for row in self.rows if row["status"] != "crash"]
        return {SEED if seed is None else seed: bpb for seed, bpb in done}

    @property
    def score(self) -> float:
        """The mean of its scores; 0.0 if all runs crashed."""
        return statistics.mean(self.scores.values()) if self.scores else 0.0

    @property
    def status(self) -> str:
        found = {row["status"] for row in self.rows}
        return next(status for status in ("keep", "discard", "crash") if status in found)

    @property
    def family(self) -> str:
        """The constants it has changed and nothing else, or else where most of its lines are."""
        if self.values and self.values.keys() == self.places.keys():
            return ", ".join(sorted(self.values))
        return self.places.most_common(1)[0][0] if self.places else ""

    @property
    def reason(self) -> str:
        """Of a crash."""
        return Description.parse(self.rows[-1]).reason


def ideas(rows: list[dict]) -> list[Idea]:
    """Those of rows of one kind, in the order of their first rows."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["commit"]].append(row)
    found = [Idea(commit, Description.parse(group[0]).subject, group) for commit, group in groups.items()]
    blobs = train_blobs([idea.commit for idea in found])
    read_diffs([idea for idea in found if idea.commit in blobs])
    before: list[Idea] = []
    for idea in found:
        own, parent = blobs.get(idea.commit, (idea.commit, None))
        edited = [other for other in found if parent and blobs.get(other.commit, (None,))[0] == parent]
        if own == parent or not idea.scores:
            edited = []
        elif not edited:  # of a train.py without a row: the kept one before it
            edited = [other for other in before if other.status == "keep"][-1:]
        compare(idea, {seed: bpb for other in edited for seed, bpb in other.scores.items()})
        before.append(idea)
    return found


def compare(idea: Idea, other: dict) -> None:
    """Sets its change: with the same seeds if there are some, else of the means."""
    if pairs := [bpb - other[seed] for seed, bpb in idea.scores.items() if seed in other]:
        idea.change, idea.pairs = statistics.mean(pairs), len(pairs)
        idea.error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    elif other and idea.scores:
        idea.change = statistics.mean(idea.scores.values()) - statistics.mean(other.values())


def train_blobs(commits: list[str]) -> dict[str, tuple[str, str]]:
    """git's names of train.py in each commit and in its first parent, of those commits that this clone has."""
    names = "".join(f"{commit}:train.py\n{commit}^:train.py\n" for commit in commits)
    options = dict(input=names, cwd=ROOT, text=True, capture_output=True)
    out = subprocess.run(["git", "cat-file", "--batch-check=%(objectname)"], **options).stdout.splitlines()
    pairs = zip(commits, out[::2], out[1::2], strict=False)
    return {commit: (own, parent) for commit, own, parent in pairs if not own.endswith("missing")}


def read_diffs(found: list[Idea]) -> None:
    """Sets what each has changed in train.py, compared with its first parent."""
    options = "--no-walk=unsorted --no-show-signature --format=%x00%h --abbrev=7 --first-parent -m -U0 -p".split()
    commits = [idea.commit for idea in found]
    if not commits:
        return
    out = subprocess.check_output(["git", "log", *options, *commits, "--", "train.py"], cwd=ROOT)
    patches = dict(part.partition("\n")[::2] for part in out.decode(errors="replace").split("\0")[1:])
    for idea in found:
        read_diff(idea, patches.get(idea.commit, ""))


def read_diff(idea: Idea, patch: str) -> None:
    place, old, new = "", {}, {}
    _, at, rest = patch.partition("\n@@")
    idea.diff = (at + rest).strip()
    for line in idea.diff.splitlines():
        if line.startswith("@@"):
            place = re.sub(r"^(class|def) |[:(= ].*", "", line.split("@@", 2)[2].strip())
        elif line[0] in "+-" and line[1:].strip():
            if name := re.match(r"[+-](?:class|def) (\w+)", line):
                place = name[1]
            if constant := re.match(r"[+-]([A-Z][A-Z0-9_]*)\s*=\s*(.*?)\s*(?:#.*)?$", line):
                (new if line[0] == "+" else old)[constant[1]] = constant[2]
            idea.places[constant[1] if constant else place or "top"] += 1
            idea.lines = (idea.lines[0] + (line[0] == "+"), idea.lines[1] + (line[0] == "-"))
    idea.values = {name: (old[name], new[name]) for name in old.keys() & new.keys() if old[name] != new[name]}


def noise(sd: float, pairs: int = 1) -> float:
    """Two standard errors of a difference of so many pairs of runs, by the standard deviation of a seed."""
    return 2 * sd * math.sqrt(2 / pairs)


def oddities(idea: Idea, rows: list[dict]) -> list[str]:
    """What makes its runs unlike others of their kind."""
    found, usual = [], statistics.median([row["tokens_M"] for row in rows if row["status"] != "crash"] or [0])
    tokens = [row["tokens_M"] for row in idea.rows if row["status"] != "crash"]
    if tokens and min(tokens) < 0.9 * usual:
        found.append(f"only {min(tokens) / usual:.0%} of the usual tokens")
    for folder in [folder for row in idea.rows for folder in records.folders(row)[:1]]:
        if where := records.jump(records.curve(folder)):
            found.append(f"its loss jumps at {where:.0%}")
    return found
