"""The loop: asks agents for one idea after another, trains what they propose, and keeps what is better."""

import argparse
import difflib
import itertools
import math
import subprocess
from collections import Counter
from contextlib import suppress
from time import monotonic, sleep

import harness
from night import agent as agents
from night import proposals
from night.gains import Gains
from night.git import branch, commit_train, git, in_history, print_doubts, read_train, revisions
from night.noise import noise_versions
from night.pool import Run
from night.proposals import AGAIN, note
from night.report import report
from night.rows import experiments, good, reference, set_status
from night.wave import Trainer, start_pool
from prepare import PrepareError

CRASHED = 10  # crashes in a row that end the loop
PAUSE, LONGEST = 30, 1800  # seconds after an agent in vain, and after many: limits of providers last for hours
SHOWN = 5  # refused proposals that the prompt shows


def loop(args: argparse.Namespace) -> None:
    """Asks agents and trains what they propose until the night is over; prints a summary."""
    for command in args.agent:
        agents.check_command(command)
    if not branch():
        raise PrepareError("HEAD is on no branch: git checkout -b autoresearch/TAG first")
    git("var", "GIT_COMMITTER_IDENT")  # fails if it is not set; git then says how to
    trainer = Trainer(args, *start_pool(args))
    night, kind = Loop(args, trainer), trainer.kind
    base = reference(kind)
    print_doubts([base])
    begins = {row["commit"] for row in in_history(kind.rows()) if row["status"] == "keep"} <= {base}
    noise = noise_versions(base, night.branch) if begins else []
    try:
        while begins and not proposals.accepted(night.branch) and night.may_ask():
            night.ask()  # agents think while this trains
        first, *_ = trainer.train([Run(*version, base=base) for version in [*revisions([base]), *noise]])
        if first["status"] == "crash":
            raise PrepareError(f"the reference crashes: python -m night show {base} says why")
        for commit, _ in noise:
            set_status(commit, kind, "discard")  # one that scored lower was lucky
        night.work()
    finally:
        night.end_agents()
        print(night.summary())
    if args.report:
        report(args, trainer.pool, kind)


class Loop:
    """A night on HEAD's branch. All state that must survive a restart is in git, results.tsv and PROPOSALS."""

    def __init__(self, args: argparse.Namespace, trainer: Trainer):
        self.args, self.trainer, self.kind, self.branch = args, trainer, trainer.kind, branch()
        self.max_agents = args.agents or trainer.slots
        names = [f"agent {i}: " if len(args.agent) > 1 else "" for i, _ in enumerate(args.agent, 1)]
        self.turns = itertools.cycle(zip(names, args.agent, strict=True))
        self.agents: list[agents.Agent] = []
        self.gains = Gains(self.kind, self.branch, self.propose, self.runs)
        ends = "keep", "discard", "crash"
        self.settled = {n for n, verdict in proposals.verdicts().items() if verdict.startswith(ends)}
        self.trained = self.crashed = 0  # proposals that have a row; crashes in a row
        self.in_vain = 0  # agents in a row whose proposal is not trained
        self.start = self.next_ask = monotonic()

    def work(self) -> None:
        """Turn by turn; what fails in one, such as a git call while somebody's git holds a lock, is tried again."""
        self.start = monotonic()  # the hours count from here, without the reference's runs
        said, more = "", True
        while more:
            try:
                more = self.turn()
            except (subprocess.CalledProcessError, OSError, PrepareError) as error:
                reason = harness.clean((harness.git_problem(error) or type(error).__name__).split("\n")[0])
                if reason != said:
                    print(f"trouble  {reason}: trying again until the hours are over")
                    said = reason
                if more := self.hours_left() >= 0 or self.trainer.pending:
                    sleep(1)
                else:
                    print("what waits is left for the next loop")

    def turn(self) -> bool:
        """Returns whether there is more to do. After an error it can be repeated: nothing is done twice, or lost."""
        for _, row in self.trainer.ended():
            if self.crashed < CRASHED:  # else the loop is about to end
                lost = row["status"] == "crash" or not self.kind.holds(row)  # on another GPU or dataset
                self.crashed = self.crashed + 1 if lost else 0
        if branch() != self.branch:
            raise PrepareError(f"the night is on {self.branch}, which is not checked out")
        self.settle()
        over, todo, pending = bool(self.over()), self.trainer.todo, self.trainer.pending
        if over:
            self.end_agents()
            todo[:] = [run for run in todo if AGAIN in run.description]  # the next loop trains what agents proposed
        for agent in [agent for agent in self.agents if agent.process.poll() is not None]:
            self.collect(agent)
        if not (over and pending):  # after the night, the gains of all runs are merged at once
            self.gains.advance(over)
        self.trainer.fill()
        while self.may_ask():
            self.ask()
        if not pending:
            sleep(0.2)
        return bool(pending or self.gains.waiting or not self.over())

    def runs(self) -> list[Run]:
        """All that train or wait for a slot."""
        return [*self.trainer.pending, *self.trainer.todo]

    def settle(self) -> None:
        """Settles proposals whose run has ended, and trains what an earlier loop has left."""
        accepted, known = proposals.accepted(self.branch), {row["commit"]: row for row in self.kind.rows()}
        self.trained, at_work = len(accepted.keys() & known.keys()), {run.commit for run in self.runs()}
        for commit, (n, base, subject) in accepted.items():
            if n in self.settled:
                continue
            if commit in known:
                self.gains.settle(n, base, known[commit])
                self.settled.add(n)
            elif commit not in at_work and in_history([dict(commit=base, status="")]):  # not of an earlier branch
                self.accept(n, commit, base, subject)

    def hours_left(self) -> float:
        return self.args.hours - (monotonic() - self.start) / 3600

    def over(self) -> str:
        """The reason to ask no more agents, or ""."""
        if self.hours_left() <= 0:
            return "the hours are over"
        if self.args.runs and self.trained >= self.args.runs:
            return f"{self.trained} runs"
        return f"{CRASHED} runs in a row crashed" if self.crashed >= CRASHED else ""

    def may_ask(self) -> bool:
        """Whether to ask now. Agents think while GPUs train, but at most one proposal per agent may wait for a GPU."""
        if len(self.agents) >= self.max_agents or monotonic() < self.next_ask or self.over():
            return False
        most = min(self.trainer.slots + self.max_agents, (self.args.runs or math.inf) - self.trained)
        return len(self.agents) + len(self.runs()) < most

    def ask(self) -> None:
        base, rows = reference(self.kind), [row for row in experiments() if self.kind.holds(row)]
        if any(row["val_bpb"] for row in rows) and not good(rows, base):
            raise PrepareError(f"{base} has no result (a rebase? results.tsv moved away?): start this loop again")
        now = [run.description for run in self.runs()] + [idea for agent in self.agents if (idea := agent.idea())]
        refused = [text for text in proposals.verdicts().values() if text.startswith("refused")][-SHOWN:]
        text = agents.prompt(self.args, self.kind, rows, self.hours_left(), now, refused)
        self.agents.append(agents.start(self.args, *next(self.turns), base, self.branch, text, monotonic()))

    def collect(self, agent: agents.Agent) -> None:
        """Submits an ended agent's proposal, or says why not and pauses. Of agents that fail together, as by their
        provider's limit, one counts."""
        n, trains = agent.n, False
        if reason := agent.failure(self.args.agent_limit):
            note(n, f"failed: {reason}")
            print(f"failed   proposal {n}: {reason} ({proposals.folder(n)}/agent.log)")
        else:
            others = [name for name in agent.changed() if name != "train.py"]
            reason = f"it changes {', '.join(others[:3])}" if others else ""
            code = agent.process.returncode  # an error of its own may have cut it off
            idea = (agent.idea() or "fewer lines") + f" (exit status {code})" * bool(code)
            trains = self.propose(n, agent.base, agent.train(), idea, reason)
        self.agents.remove(agent)
        agent.scratch.cleanup()
        if trains:
            self.in_vain, self.next_ask = 0, monotonic()
        elif agent.asked >= self.next_ask:
            self.in_vain += 1
            self.next_ask = monotonic() + min(PAUSE * (2**self.in_vain - 1), LONGEST)

    def propose(self, n: int, base: str, text: bytes, idea: str, reason: str = "") -> bool:
        """Commits a train.py and has it trained, unless there is a reason to refuse it; returns whether it did."""
        before, rows = read_train(base), self.kind.rows()
        with suppress(OSError):  # somebody has removed the folder: what is in it is for people
            old, new = (version.decode(errors="replace").splitlines() for version in (before, text))
            diff = "\n".join(difflib.unified_diff(old, new, lineterm=""))
            (proposals.folder(n) / "train.diff").write_text(f"{diff}\n", "utf-8")
        known = {row["commit"] for row in rows} | {run.commit for run in self.runs()}
        if reason := reason or proposals.fault(before, text, known, proposals.live_row(rows)):
            note(n, f"refused: {reason}")
            print(f"refused  proposal {n}, {idea}: {reason}")
        else:
            self.accept(n, commit_train(base, text, idea, f"{self.branch}-loop/{n}"), base, idea)
        return not reason

    def accept(self, n: int, commit: str, base: str, subject: str) -> None:
        with suppress(OSError):  # disk full: the commit is what counts
            note(n, f"trains as {commit}")
        todo = self.trainer.todo
        todo.insert(0 if AGAIN in subject else len(todo), Run(commit, subject, base=base))

    def end_agents(self) -> None:
        for agent in self.agents:
            agent.process.terminate()
        while self.agents:
            agent = self.agents.pop()
            agent.process.wait()
            agent.scratch.cleanup()

    def summary(self) -> str:
        texts = [text for text in proposals.verdicts().values() if text not in ("", proposals.ENDED)]
        words = Counter(text.split()[0].rstrip(":,") for text in texts)
        found = ", ".join(f"{number} {word}" for word, number in words.items())
        text = f"\n{self.over() or 'ended early'}: proposals so far: {found or 'none'}.\n"
        with suppress(subprocess.CalledProcessError):
            text += f"The reference is now {reference(self.kind)}. "
        return f"{text}How much is luck? python -m night report"
