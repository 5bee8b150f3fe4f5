"""Gains that wait: which becomes the reference next, and which are merged with it and trained again."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import harness
from night.git import compiled, git, in_history, move_branch, new_commit, read_train, revert, train_blobs
from night.proposals import AGAIN, new_proposal, note
from night.rows import Kind, good, reference, scores, set_status


class Gain(NamedTuple):
    """Proposal n, which scored lower than its base by `size` bits per byte, with one seed: partly luck."""

    n: int
    commit: str
    base: str
    subject: str
    size: float


def next_step(reference: str, gains: Iterable[Gain], over: bool) -> list[Gain]:
    """The gains to go on with: the largest over the reference, which becomes the reference, else the largest, which is
    merged with it and trained again. The others wait meanwhile, or small gains would overtake a large one again and
    again. When the night is over, all are merged at once."""
    gains = sorted(gains, key=lambda gain: (gain.base == reference, gain.size), reverse=True)
    return gains if over and gains and gains[0].base != reference else gains[:1]


def merge(text: bytes, gains: list[Gain]) -> tuple[bytes, list[Gain]]:
    """The text with the changes of all gains that neither conflict with those before nor break it; and these gains."""
    merged = []
    for gain in gains:
        both = revert(text, read_train(gain.commit), read_train(gain.base))  # None: they conflict
        if both is not None and compiled(both):
            text, merged = both, [*merged, gain]
    return text, merged


class Gains:
    """The gains of a night that wait, and how they become its reference."""

    def __init__(self, kind: Kind, branch: str, propose: Callable, runs: Callable):
        """propose(n, base, text, subject): has a merge trained, unless it has been tried. runs(): those not ended."""
        self.kind, self.branch, self.propose, self.runs = kind, branch, propose, runs
        self.waiting: dict[int, Gain] = {}  # by number

    def settle(self, n: int, base: str, row: dict) -> None:
        """Notes what has come of a proposal; a gain waits."""
        waits = row["status"] == "keep" and not in_history([row])
        note(n, f"{'waits' if waits else row['status']}: {row['commit']}")
        if waits:
            size = self.score(base) - row["val_bpb"]
            self.waiting[n] = Gain(n, row["commit"], base, row["description"], size)

    def advance(self, over: bool) -> None:
        """Makes gains the reference, or has them trained again on top of it: see `next_step`."""
        while self.waiting and not any(AGAIN in run.description for run in self.runs()):
            kept = {row["commit"] for row in self.kind.rows() if row["status"] == "keep"}
            for gain in [gain for gain in self.waiting.values() if gain.commit not in kept]:  # by a person
                self.decide(gain, "discard")
            now = reference(self.kind)
            if not (gains := next_step(now, self.waiting.values(), over)):
                break
            first = gains[0]
            if first.base == now:
                self.keep(first)
                continue
            text, merged = merge(read_train(now), gains)
            if first in merged:
                n = new_proposal(self.branch)
                idea = first.subject.partition(AGAIN)[0][:100] + f" and {len(merged) - 1} more" * (len(merged) > 1)
                self.propose(n, now, text, f"{idea}{AGAIN}{now}")
                for gain in merged:
                    self.decide(gain, f"keep, and again on {now} as proposal {n}")
            elif self.score(first.commit) < self.score(now):
                self.keep(first)
            else:
                self.decide(first, f"keep, but it conflicts with {now}, which is better")

    def decide(self, gain: Gain, verdict: str) -> None:
        note(gain.n, f"{verdict}: {gain.commit}")
        self.waiting.pop(gain.n)

    def score(self, commit: str) -> float:
        """val_bpb with the seed of all experiments; 0.0 if there is none."""
        return scores(good(self.kind.rows(), commit)).get(harness.SEED, 0.0)

    def keep(self, gain: Gain) -> None:
        """Moves the night's branch to a gain, and train.py here, too, unless somebody has edited it."""
        commit, now = gain.commit, reference(self.kind)
        head = git("rev-parse", f"refs/heads/{self.branch}")
        set_status(commit, self.kind, "keep")  # its row may be older than that of the reference
        night = (row["commit"] for row in in_history(self.kind.rows()))  # if git could not write it before
        stays = "train.py has uncommitted changes"
        if any(not git("diff", "--name-only", revision, "--", "train.py") for revision in ("HEAD", commit, *night)):
            written = harness.run_git("checkout", "-q", commit, "--", "train.py", check=False).returncode == 0
            stays = "" if written else "git cannot write train.py"  # somebody's git holds the index's lock, say
        if stays:
            print(f"{stays}: the branch moves on, the file stays as it is")
        if (shared := git("merge-base", head, commit)) != head:  # somebody has committed, or an earlier gain was merged
            theirs, *ours = train_blobs([head, shared, now])
            if theirs not in ours:  # or they have renamed it
                print(f"the train.py of {head[:7]}, which no run has kept, stays in the history only")
            commit = new_commit(head, read_train(commit), f"keep {gain.subject}", commit)
        move_branch(self.branch, commit, head)
        self.decide(gain, "keep")
