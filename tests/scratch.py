"""A clone that night works on in this process, and a pool whose runs end at once: nights without their processes."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import harness
from night import git as night_git
from night import proposals
from night import run as night_run
from night.git import read_train
from night.pool import Ended, Run
from night.rows import Kind
from night.wave import Trainer


class StubPool:
    """A run begins at one look and ends at the next, with what its train.py calls `result` with: val_bpb, and the score
    on test. That file can ask for `seed` and `options`, the words of its command.

    user: what somebody does meanwhile, a step per look. trained: runs that have ended.
    """

    limit = 600.0

    def __init__(self, kind: Kind, folder: Path, slots: int = 2):
        self.kind, self.log, self.slots, self.user = kind, folder / "row.tsv", slots, iter(())
        self.queue, self.active, self.trained = [], [], []

    def submit(self, run: Run, packed: bytes, command: list[str], record: dict) -> None:
        self.queue.append((run, record, command))
        assert len(self.queue) + len(self.active) <= self.slots

    def ended(self) -> Iterator[Ended]:
        next(self.user, None)
        while self.active:
            run, row = self.active.pop(0)
            self.trained.append(run)
            yield Ended(run, row, [], "no row", {})
        while self.queue:
            run, *how = self.queue.pop(0)
            self.active.append((run, self.train(run, *how)))

    def train(self, run: Run, record: dict, options: list[str]) -> str:
        """Its row."""
        found = dict(val_bpb=0.0, reason="no row")

        def result(val_bpb: float, test_bpb: float | None = None) -> None:
            found.update(val_bpb=val_bpb, test_bpb=test_bpb if record["score_test"] else None, reason="")

        try:
            exec(read_train(run.commit), {"result": result, "seed": run.seed, "options": options})
        except Exception as error:
            found = dict(val_bpb=0.0, reason=type(error).__name__)
        self.log.unlink(missing_ok=True)
        row = self.kind._asdict() | dict(seed=run.seed, memory_gb=1.0, tokens_M=1.5, commit="", description="")
        harness.log_result(**found, **row | dict(report=False), path=self.log)
        return self.log.read_text()

    def close(self) -> None:
        self.queue.clear()
        self.active.clear()


class Scratch:
    """A clone on branch `night`, whose first commit has these files; the second one changes nothing.

    interrupt: what a signal does, once a wave has begun.
    """

    def __init__(self, folder: Path, monkeypatch, files: dict[str, str], budget: str = "300 s"):
        self.folder, self.kind = folder, Kind("cpu", budget, "d")
        monkeypatch.setattr(night_git, "ROOT", folder)
        monkeypatch.setattr(harness, "RESULTS", folder / "results.tsv")
        monkeypatch.setattr(harness, "handle_signals", lambda handler: setattr(self, "interrupt", handler))
        monkeypatch.setattr(night_run, "RUNS", folder / "runs")
        monkeypatch.setattr(proposals, "PROPOSALS", folder / "runs" / "proposals")
        for name, text in {".gitignore": "*.tsv*\nruns\n*.md\n*.png\n", **files}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        self.shell("git init -q -b night; git add -f .; git commit -q -m start; git commit -q --allow-empty -m base")
        self.pool = StubPool(self.kind, folder.parent)

    def shell(self, script: str) -> str:
        env = harness.clean_environment()
        return subprocess.check_output(["sh", "-ec", script], cwd=self.folder, env=env, text=True).strip()

    def commit(self, **texts: str) -> None:
        """A revision of train.py and a tag for each."""
        for name, text in texts.items():
            (self.folder / "train.py").write_text(text)
            self.shell(f"git commit -qam {name}; git tag {name}")

    def head(self) -> str:
        return self.shell("git rev-parse --short=7 HEAD")

    def trainer(self, args, kind: Kind | None = None) -> Trainer:
        return Trainer(args, self.pool, kind or self.kind)

    def rows(self) -> list[dict]:
        return harness.read_results()
