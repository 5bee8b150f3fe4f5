"""The loop: asks agents for one idea after another, trains what they propose, and keeps what is better."""

import argparse
import difflib
import itertools
import math
import re
import shutil
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
from night.proposals import AGAIN
from night.report import report
from night.rows import experiments, good, grouped, reference, set_status
from night.wave import Trainer, start_pool
from prepare import PrepareError

CRASHED = 10  # crashes in a row that end the loop
PAUSE, LONGEST = 30, 1800  # seconds after an agent in vain, and after many: limits of providers last for hours
SHOWN = 5  # refused proposals that the prompt shows


def loop(args: argparse.Namespace) -> None:
    """Asks agents and trains what they propose until the night is over; prints a summary."""
    for command in [*filter(None, [args.sandbox]), *args.agent]:
        agents.check_command(command)
    if not branch():
        raise PrepareError("HEAD is on no branch: git checkout -b autoresearch/TAG first")
    git("var", "GIT_COMMITTER_IDENT")  # fails if it is not set; git then says how to
    trainer = Trainer(args, *start_pool(args))
    night, kind = Loop(args, trainer), trainer.kind
    base = reference(kind)
    print_doubts([base])
    begins = {row["commit"] for row in in_history(kind.rows()) if row["status"] == "keep"} <= {base}
    noise = noise_versions(base, night.branch) if begins else []  # measured while agents think
    try:
        while begins and not proposals.accepted(night.branch) and night.may_ask():
            night.ask()
        if trainer.train([Run(*version) for version in [*revisions([base]), *noise]], base)[0]["status"] == "crash":
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
        several = len(args.agent) > 1
        self.turns = itertools.cycle([(f"agent {i}: " * several, agent) for i, agent in enumerate(args.agent, start=1)])
        self.agents: list[agents.Agent] = []
        self.rows: list[dict] = []  # of runs that have ended, until they are settled
        self.gains = Gains(self.kind, self.branch, self.propose, self.runs)
        self.proposed: dict[str, tuple[int, str]] = {}  # number and base of what trains, by commit
        self.resumed = False
        self.trained = self.crashed = 0  # runs of this night; crashes in a row
        self.in_vain = 0  # agents in a row whose proposal is not trained
        self.start = self.next_ask = monotonic()

    def work(self) -> None:
        """Turn by turn; what fails in one, such as a git call while somebody's git holds a lock, is tried again."""
        self.start = monotonic()  # the hours count from here, without the reference's runs
        said = ""
        while True:
            try:
                if not self.turn():
                    return
            except (subprocess.CalledProcessError, OSError, PrepareError) as error:
                reason = harness.clean((harness.git_problem(error) or type(error).__name__).split("\n")[0])
                if reason != said:
                    print(f"trouble  {reason}: trying again until the hours are over")
                    said = reason
                if self.hours_left() < 0 and not self.trainer.pending:
                    print("what waits is left for the next loop")
                    return
                sleep(1)

    def turn(self) -> bool:
        """Returns whether there is more to do. After an error it can be repeated: nothing is done twice, or lost."""
        for _, row in self.trainer.ended():
            self.trained += 1
            if self.crashed < CRASHED:  # else the loop is about to end
                self.crashed = self.crashed + 1 if row["status"] == "crash" else 0
            self.rows.append(row)
        if branch() != self.branch:
            raise PrepareError(f"the night is on {self.branch}, which is not checked out")
        if not self.resumed:
            self.resume()
        while self.rows:
            self.gains.settle(*self.proposed[self.rows[0]["commit"]], self.rows[0])
            self.rows.pop(0)
        if self.over():
            self.end_agents()
            todo = self.trainer.todo  # what an agent has proposed is left to the next loop
            todo[:] = [item for item in todo if AGAIN in item[0].description]
        for agent in [agent for agent in self.agents if agent.process.poll() is not None]:
            self.judge(agent)
        self.gains.advance(bool(self.trainer.pending), bool(self.over()))
        self.trainer.fill()
        while self.may_ask():
            self.ask()
        if not self.trainer.pending:
            sleep(0.2)
        return bool(self.trainer.pending or self.gains.gains or not self.over())

    def runs(self) -> list[Run]:
        """All that train or wait for a slot."""
        return [*self.trainer.pending, *(run for run, _ in self.trainer.todo)]

    def resume(self) -> None:
        """Trains and settles what an earlier loop left unfinished."""
        known = grouped(self.kind.rows(), lambda row: row["commit"])
        self.trained, self.trainer.todo = 0, []
        for commit, (n, base, subject) in proposals.accepted(self.branch).items():
            rows = known.get(commit, [])
            self.trained += bool(rows)
            if proposals.verdict(n).startswith(("keep", "discard", "crash")):
                continue
            if rows:
                self.gains.settle(n, base, rows[-1])
            elif in_history([dict(commit=base, status="")]):  # else of an earlier branch of this name
                self.accept(n, commit, base, subject)
        self.resumed = True

    def hours_left(self) -> float:
        return self.args.hours - (monotonic() - self.start) / 3600

    def over(self) -> str:
        """The reason to ask no more agents, or ""."""
        args = self.args
        if self.hours_left() <= 0:
            return "the hours are over"
        if args.runs and self.trained >= args.runs:
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
        refused = [f"- {text}" for text in proposals.verdicts().values() if text.startswith("refused")][-SHOWN:]
        text = agents.prompt(self.args, self.kind, rows, self.hours_left(), now, refused)
        self.agents.append(agents.start(self.args, *next(self.turns), base, self.branch, text, monotonic()))

    def judge(self, agent: agents.Agent) -> None:
        """Submits an ended agent's proposal, or says why not and pauses. Of agents that fail together, as by their
        provider's limit, one counts."""
        trains = False
        if reason := agent.failure(self.args.agent_limit):
            proposals.note(agent.n, f"failed: {reason}")
            print(f"failed   proposal {agent.n}: {reason} ({proposals.folder(agent.n)}/agent.log)")
        else:
            others = [name for name in agent.changed() if name != "train.py"]
            changes = f"it changes {', '.join(others[:3])}" if others else ""
            code = agent.process.returncode  # an error of its own may have cut it off
            idea = (agent.idea() or "fewer lines") + f" (exit status {code})" * bool(code)
            trains = self.propose(agent.n, agent.base, agent.train(), idea, changes)
        self.agents.remove(agent)
        shutil.rmtree(agent.work.parent, ignore_errors=True)
        if trains:
            self.in_vain, self.next_ask = 0, monotonic()
        elif agent.asked >= self.next_ask:
            self.in_vain += 1
            self.next_ask = monotonic() + min(PAUSE * (2**self.in_vain - 1), LONGEST)

    def propose(self, n: int, base: str, text: bytes, idea: str, reason: str = "") -> bool:
        """Commits a train.py and submits it for training, unless there is a reason to refuse it; returns if it did."""
        before = read_train(base)
        with suppress(OSError):  # somebody has removed the folder: what is in it is for people
            old, new = (version.decode(errors="replace").splitlines() for version in (before, text))
            lines = difflib.unified_diff(old, new, lineterm="")
            (proposals.folder(n) / "train.diff").write_text("".join(f"{line}\n" for line in lines), "utf-8")
        rows = self.kind.rows()
        known = {row["commit"] for row in rows} | {run.commit for run in self.runs()}
        if reason := reason or proposals.fault(before, text, known, proposals.live_row(rows)):
            proposals.note(n, f"refused: {reason}")
            print(f"refused  proposal {n}, {idea}: {reason}")
        else:
            self.accept(n, commit_train(base, text, idea, f"{proposals.REFS(self.branch)}{n}"), base, idea)
        return not reason

    def accept(self, n: int, commit: str, base: str, subject: str) -> None:
        proposals.note(n, f"trains as {commit}")
        self.proposed[commit] = n, base
        todo = self.trainer.todo
        todo.insert(0 if AGAIN in subject else len(todo), (Run(commit, subject), base))

    def end_agents(self) -> None:
        for agent in self.agents:
            agent.process.terminate()
        for agent in self.agents:
            agent.process.wait()
            shutil.rmtree(agent.work.parent, ignore_errors=True)
        self.agents.clear()

    def summary(self) -> str:
        words = Counter(re.split(r"\W", text)[0] for text in proposals.verdicts().values() if text != proposals.ENDED)
        found = ", ".join(f"{number} {word}" for word, number in words.items() if word)
        text = f"\n{self.over() or 'ended early'}: proposals so far: {found or 'none'}.\n"
        with suppress(subprocess.CalledProcessError):
            text += f"The reference is now {reference(self.kind)}. "
        return f"{text}How much is luck? python -m night report"
