"""Gains that wait: which becomes the reference next, and which are merged with it and trained again."""

import subprocess
from collections.abc import Callable
from typing import NamedTuple

import harness
from night.git import compiled, git, in_history, move_branch, new_commit, read_train, revert, train_blobs
from night.proposals import AGAIN, new_proposal, note, program
from night.rows import Kind, good, reference, scores
from night.statuses import set_status

LAST = 10  # merges that are trained after the hours


class Gain(NamedTuple):
    """Proposal n, which scored lower than its base by `size` bits per byte, with one seed: partly luck."""

    n: int
    commit: str
    base: str
    subject: str
    bpb: float
    size: float
    group: str = ""  # those of one group are merged together, at the end of the night; see `split`


class Take(NamedTuple):
    gain: Gain  # becomes the reference


class Merge(NamedTuple):
    gains: list[Gain]  # are merged with the reference, and the result is trained


def next_step(reference: str, gains: list[Gain], merging: bool, pending: bool, over: bool) -> Take | Merge | None:
    """What to do with the gains that wait; None: nothing yet.

    merging: a merge is being trained; pending: so is anything; over: no more proposals will come.
    The largest gain comes first. One over an older reference is merged with the new one and trained again. Meanwhile
    the others wait, or small gains would overtake a large one again and again. After the night, all are merged at once.
    """
    gains = by_size(gains)
    if merging or not gains:
        return None
    if on_top := [gain for gain in gains if gain.base == reference]:
        return Take(on_top[0])
    if not over:
        return Merge(gains[:1])
    group = min(gain.group for gain in gains)
    return None if pending else Merge([gain for gain in gains if gain.group == group])


def split(gains: list[Gain]) -> list[Gain]:
    """What to try after these gains, merged, were no gain: the largest alone, then each half of the others."""
    first, *others = by_size(gains)
    if not others:
        return []
    middle = (len(others) + 1) // 2
    parts = [[first], others[:middle], others[middle:]]
    return [gain._replace(group=f"{gain.group}{i}") for i, part in enumerate(parts) for gain in part]


def by_size(gains: list[Gain]) -> list[Gain]:
    return sorted(gains, key=lambda gain: gain.size, reverse=True)


def merge(text: bytes, gains: list[Gain], read) -> tuple[bytes, list[Gain]]:
    """The text with the changes of all gains that neither conflict with what it has by then nor break it; and these
    gains. read(commit): its train.py."""
    merged = []
    for gain in gains:
        both = revert(text, read(gain.commit), read(gain.base))  # None: they conflict
        if both is not None and compiled(both):
            text, merged = both, [*merged, gain]
    return text, merged


class Again(NamedTuple):
    """Proposal n: gains that are trained again, merged with a reference."""

    n: int
    reference: str
    gains: list[Gain]


class Gains:
    """The gains of a night that wait, and how they become its reference."""

    def __init__(self, kind: Kind, branch: str, propose: Callable, runs: Callable):
        """propose(n, base, text, subject): has a merge trained, returns whether it is. runs(): those not ended."""
        self.kind, self.branch, self.propose, self.runs = kind, branch, propose, runs
        self.gains: dict[int, Gain] = {}  # by number
        self.again: Again | None = None
        self.last = 0  # merges that were trained after the hours

    def __bool__(self) -> bool:
        """Whether any is left to decide in this night."""
        return bool(self.gains) and self.last < LAST

    def settle(self, n: int, base: str, row: dict) -> None:
        waits = row["status"] == "keep" and not in_history([row])
        note(n, f"{'waits' if waits else row['status']}: {row['commit']}")
        if waits:
            size = self.score(base) - row["val_bpb"]
            self.gains[n] = Gain(n, row["commit"], base, row["description"], row["val_bpb"], size)
        if self.again and self.again.n == n:
            self.settle_again(row["status"] == "keep")

    def settle_again(self, gained: bool) -> None:
        """Gains that were trained again are decided; unless that was no gain: then parts of them wait again."""
        n, now, gains = self.again
        left = [] if gained else split(gains)
        self.gains |= {gain.n: gain for gain in left}
        if not left:
            self.decided(f"keep, and again on {now} as proposal {n}" + ", which is no gain" * (not gained), *gains)
        self.again = None

    def advance(self, pending: bool, over: bool) -> None:
        """Makes gains the reference, or trains them again on top of it: see `next_step`."""
        while self.gains and not self.merging():
            kept = {row["commit"] for row in self.kind.rows() if row["status"] == "keep"}
            self.decided("discard", *[gain for gain in self.gains.values() if gain.commit not in kept])  # by a person
            now = reference(self.kind)
            step = next_step(now, [*self.gains.values()], False, pending, over)
            if isinstance(step, Take):
                self.move(step.gain)
                self.decided("keep", step.gain)
            elif step and not (over and self.last >= LAST):
                self.merge(now, step.gains)
                self.last += over
            else:
                break

    def merge(self, now: str, gains: list[Gain]) -> None:
        first, before = gains[0], read_train(now)
        text, merged = merge(before, gains, read_train)
        if first not in merged and first.bpb < self.score(now):
            self.move(first)
            self.decided("keep", first)
        elif first not in merged:
            self.decided(f"keep, but it conflicts with {now}, which is better", first)
        elif program(text) == program(before):
            self.decided(f"keep, and part of {now}", *merged)
        else:
            idea = first.subject.partition(AGAIN)[0][:100] + f" and {len(merged) - 1} more" * (len(merged) > 1)
            n = new_proposal(self.branch)
            trains = self.propose(n, now, text, f"{idea}{AGAIN}{now}")
            self.again = Again(n, now, merged)
            if not trains:  # it has been tried
                self.settle_again(False)

    def merging(self) -> bool:
        return bool(self.again) or any(AGAIN in run.description for run in self.runs())

    def decided(self, verdict: str, *gains: Gain) -> None:
        for gain in gains:
            note(gain.n, f"{verdict}: {gain.commit}")
            self.gains.pop(gain.n, None)

    def score(self, commit: str) -> float:
        """val_bpb with the seed of all experiments; 0.0 if there is none."""
        return scores(good(self.kind.rows(), commit)).get(harness.SEED, 0.0)

    def move(self, gain: Gain) -> None:
        """Moves the night's branch to a kept commit, and train.py here, too, unless somebody has edited it."""
        commit, now = gain.commit, reference(self.kind)
        head = git("rev-parse", f"refs/heads/{self.branch}")
        set_status(commit, self.kind, "keep")  # its row may be older than that of the reference
        night = (row["commit"] for row in in_history(self.kind.rows()))  # if git could not write it before
        if any(not git("diff", "--name-only", revision, "--", "train.py") for revision in ("HEAD", commit, *night)):
            try:
                git("checkout", "-q", commit, "--", "train.py")
            except subprocess.CalledProcessError:  # somebody's git holds the index's lock, say
                print("git cannot write train.py: the branch moves on, the file stays as it is")
        else:
            print("train.py has uncommitted changes: the branch moves on, the file stays as it is")
        if (shared := git("merge-base", head, commit)) != head:  # somebody has committed: merge, with our train.py
            theirs, *ours = train_blobs([head, shared, now])
            if theirs not in ours:  # or they have renamed it
                print(f"the train.py of {head[:7]}, which no run has kept, stays in the history only")
            commit = new_commit(head, read_train(commit), f"keep {gain.subject}", commit)
        move_branch(self.branch, commit, head)
