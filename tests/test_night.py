"""An agent's night: program.md's own commands, played in a scratch git repository with a stub for train.py."""

import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_corpus import ROOT, WORDS

import prepare

PROGRAM = (ROOT / "program.md").read_text("utf-8")
HEADER = "\t".join(prepare.COLUMNS) + "\n"

# What train.py does around its training, in 0.3 s. BODY is what an experiment does in there.
STUB = """\
import os, signal, sys, threading, time
from prepare import log_result

def interrupted(*_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupted)
if "KILL_AFTER" in os.environ:
    threading.Timer(float(os.environ["KILL_AFTER"]), os.kill, (os.getpid(), signal.SIGKILL)).start()
where = dict(gpu="a stub", dataset="stories-0a1b2c3d")
print("training", flush=True)
try:
    BODY
    status = log_result(val_bpb=val_bpb, memory_gb=2.0, **where)
    print(f"---\\nval_bpb:          {val_bpb:.6f}\\npeak_vram_mb:     2048.0\\nstatus:           {status}")
except BaseException:
    log_result(val_bpb=0.0, memory_gb=0.0, crashed=True, **where)
    raise
"""


def command(step: str) -> str:
    """The shell command under a step of program.md."""
    return re.search(rf"{re.escape(step)}.*?```bash\n(.*?)```", PROGRAM, re.S)[1]


class Night:
    """A clone with one commit, its data prepared, at the end of program.md's set-up."""

    def __init__(self, folder: Path, cache: Path):
        self.folder, self.log = folder, folder / "run.log"
        python = folder.with_name("bin") / "python"  # `python` is the one that runs the tests
        for path, text in {
            folder / "prepare.py": (ROOT / "prepare.py").read_text("utf-8"),
            folder / "results.tsv": HEADER,
            folder / ".gitignore": (ROOT / ".gitignore").read_text("utf-8"),
            folder / "train.py": STUB.replace("BODY", "val_bpb = 1.3"),
            python: f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        }.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        python.chmod(0o755)
        who = {
            f"GIT_{role}_{key}": "night@example.org" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")
        }
        self.env = (
            os.environ | who | {"PATH": f"{python.parent}:{os.environ['PATH']}", "AUTORESEARCH_CACHE": str(cache)}
        )
        self.run("git init -q -b main && git add . && git commit -q -m start")
        self.run(command("## Set-up"))

    def start(self, script: str, **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.env | env,
            text=True,
            stdout=-1,
            stderr=-2,
            start_new_session=True,
        )

    def run(self, script: str, **env: str) -> str:
        return self.start(script, **env).communicate(timeout=60)[0]

    def experiment(self, description: str, body: str, **env: str) -> str:
        """Once through the loop; returns the status."""
        self.edit(description, body)
        self.run(command("**2. Run.**"), **env)
        return self.decide()

    def edit(self, description: str, body: str) -> None:
        (self.folder / "train.py").write_text(STUB.replace("BODY", body), "utf-8")
        self.run(command("**1. Change and commit.**").replace("what changed", description))

    def decide(self) -> str:
        status = self.run(command("**3. Read the row**")).split("\t")[3]
        if status != "keep":
            self.run(command("**4. Keep or go back.**"))
        return status

    def rows(self) -> list[dict]:
        """All of them well formed, or it fails."""
        header, *lines = (self.folder / "results.tsv").read_text("utf-8").split("\n")[:-1]
        rows = prepare.read_results(self.folder / "results.tsv")
        assert header + "\n" == HEADER and len(rows) == len(lines)
        return rows

    def assert_nothing_else_changed(self) -> None:
        """The branch holds train.py of the last kept row, every commit that has a row, and no row."""
        assert self.run("git status --porcelain") == ""
        assert self.run("git diff --name-only main") in ("", "train.py\n")
        assert self.run("git show HEAD:results.tsv main:results.tsv") == 2 * HEADER
        *_, kept = (row["commit"] for row in self.rows() if row["status"] == "keep")
        assert self.run(f"git diff {kept} -- train.py") == ""
        subjects = dict(line.split(" ", 1) for line in self.run("git log --format='%h %s' --abbrev=7").splitlines())
        assert [subjects[row["commit"]] for row in self.rows()] == [row["description"] for row in self.rows()]


@pytest.fixture
def night(prepared, tmp_path) -> Night:
    return Night(tmp_path / "clone", prepared)


def test_three_keeps_two_discards_a_crash_a_syntax_error_and_an_interrupt(night):
    night.run(command("**2. Run.**"))
    assert night.decide() == "keep"
    assert night.experiment("wider", "val_bpb = 1.2") == "keep"
    assert night.experiment("deeper", "val_bpb = 1.25") == "discard"
    assert night.experiment("no norm", "raise ValueError('shapes')") == "crash"
    assert night.experiment("a typo", "val_bpb = = 1.1") == "crash"
    night.edit("slower", "time.sleep(60)")
    night.log.unlink()
    loop = night.start(command("**2. Run.**"))
    while not night.log.exists() or "training" not in night.log.read_text():
        time.sleep(0.01)
    os.killpg(loop.pid, signal.SIGINT)  # Ctrl-C; a shell may end by it before --log-crash
    loop.wait(10)
    assert "KeyboardInterrupt" in night.log.read_text()
    assert night.decide() == "crash"
    assert night.experiment("head_dim 64", "val_bpb = 1.1") == "keep"
    assert night.experiment("head_dim 32", "val_bpb = 1.10") == "discard"  # a tie is no gain
    names = "baseline, wider, deeper, no norm, a typo, slower, head_dim 64, head_dim 32".split(", ")
    assert [row["description"] for row in night.rows()] == names
    night.assert_nothing_else_changed()


def test_a_hang_that_ignores_sigterm_is_ended_and_logged(night):
    night.edit("hang", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    night.run(command("**2. Run.**").replace("-k 30 600", "-k 0.5 1"))
    assert [row["status"] for row in night.rows()] == ["crash"]


def test_a_logged_run_gets_no_crash_row_even_if_its_row_had_to_be_rescued(night):
    (night.folder / "results.tsv").write_text("another header\n")
    night.run(command("**2. Run.**"))
    assert (night.folder / "results.tsv").read_text() == "another header\n"
    rescued = prepare.read_results(night.folder / "results.tsv.rescued")
    assert [row["status"] for row in rescued] == ["keep"]


def test_rows_survive_what_a_careless_agent_does_to_the_clone(night):
    night.run(command("**2. Run.**"))
    before = night.rows()
    night.run(
        "git commit -qam all; git add -A; git stash; git checkout -q -- .; git checkout -q main; git reset --hard"
    )
    assert night.rows() == before and len(before) == 1
    assert night.run("git log --all --format= --name-only -- results.tsv | sort -u") == "results.tsv\n"  # of `start`


def test_overruling_a_status_moves_what_the_next_discard_goes_back_to(night):
    night.run(command("**2. Run.**"))
    night.edit("half the lines", "val_bpb = 1.3")
    night.run(command("**2. Run.**"))
    night.run(re.search(r"`(sed -i .*?)`", PROGRAM)[1])
    assert night.decide() == "keep"
    assert night.experiment("worse", "val_bpb = 1.4") == "discard"
    night.assert_nothing_else_changed()


def test_two_runs_at_once_in_one_clone_lose_no_row(night):
    loops = [night.start(command("**2. Run.**").replace("run.log", f"run.log.{i}")) for i in range(4)]
    for loop in loops:
        loop.wait(60)
    assert sorted(row["status"] for row in night.rows()) == ["discard"] * 3 + ["keep"]


@pytest.mark.parametrize(("runs", "kills"), [(6, 2), pytest.param(200, 20, marks=pytest.mark.slow)])
def test_runs_killed_at_random_moments_leave_a_row_each(night, runs, kills):
    rng = random.Random(runs)
    killed = set(rng.sample(range(1, runs), kills))
    for i in range(runs):
        kill = {"KILL_AFTER": str(rng.uniform(0, 0.1))} if i in killed else {}  # while it trains, logs or prints
        night.experiment(f"idea {i}", f"val_bpb = {rng.gauss(1.2, 0.1):.4f}; time.sleep(0.05)", **kill)
    rows = night.rows()
    assert [row["description"] for row in rows] == [f"idea {i}" for i in range(runs)]
    crashed = {i for i, row in enumerate(rows) if row["status"] == "crash"}
    assert crashed and crashed <= killed  # the others had logged before
    night.assert_nothing_else_changed()


def test_noise_rows_are_named_by_their_seed(night):
    for seed in "12":
        night.run(command("## Noise").replace("seed=1", f"seed={seed}"))
    assert [row["description"] for row in night.rows()] == ["baseline, seed 1", "baseline, seed 2"]


def test_summary_of_a_real_run_is_read_by_autoresearchs_grep(prepared, tmp_path):
    for name in ("prepare.py", "kernels.py", "train.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    train = [sys.executable, "train.py", "--seconds", "1", "--platform", "cpu"]
    with open(tmp_path / "run.log", "w") as log:
        env = os.environ | {"AUTORESEARCH_CACHE": str(prepared)}
        subprocess.run(train, cwd=tmp_path, env=env, stdout=log, stderr=log, check=True, timeout=120)
    grep = command("**3. Read the row**").splitlines()[1]
    lines = subprocess.run(["bash", "-c", grep], cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["val_bpb:", "peak_vram_mb:"]
    assert 0 < float(lines[0].split()[1]) < 20
    assert not (tmp_path / "results.tsv").exists()  # a short run is never logged


def test_commands_in_the_documents_exist():
    """Each flag of train.py and prepare.py."""
    for document in ("README.md", "program.md", "colab.ipynb"):
        for script, arguments in re.findall(r"(\w+)\.py([^`|;&>\n]*)", (ROOT / document).read_text("utf-8")):
            if (ROOT / f"{script}.py").exists():
                known = re.findall(r'add_argument\(\s*"(--[\w-]+)"', (ROOT / f"{script}.py").read_text("utf-8"))
                assert set(re.findall(r"--[a-z-]+", arguments)) <= set(known), (document, script, arguments)


# ---- the picture, and autoresearch's notebook ----


def simulated(path: Path, runs: int = 120) -> None:
    rng, best = random.Random(0), math.inf
    lines = [HEADER]
    for i in range(runs):
        gpu = "Tesla T4" if i % 3 else "NVIDIA H200"
        val_bpb = 1.3 - 0.1 * (1 - math.exp(-i / 40)) + abs(rng.gauss(0, 0.01)) + (i in (5, 6))  # two far outliers
        description = f"{rng.choice(WORDS)} $x$ {i}".replace("\n", " ")
        if i % 10 == 9:
            lines.append(f"{i:07x}\t0.000000\t0.0\tcrash\t{description}\t{gpu}\td-1\n")
        else:
            status, best = "keep" if val_bpb < best else "discard", min(best, val_bpb)
            lines.append(f"{i:07x}\t{val_bpb:.6f}\t3.0\t{status}\t{description}\t{gpu}\td-1\n")
    path.write_text("".join(lines), "utf-8")


def test_picture_has_a_panel_a_gpu_with_every_experiment_and_names_the_kept_ones(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    monkeypatch.setattr(prepare, "RESULTS", tmp_path / "results.tsv")
    simulated(prepare.RESULTS)
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    prepare.plot(tmp_path / "progress.png")
    rows = prepare.read_results(prepare.RESULTS)
    by_gpu = [[row for row in rows if row["gpu"] == gpu] for gpu in ("NVIDIA H200", "Tesla T4")]
    axes = figures[0].axes
    for ax, table, panel in zip(axes[::2], axes[1::2], by_gpu, strict=True):
        points = [tuple(point) for marks in ax.collections for point in marks.get_offsets()]
        assert sorted(x for x, _ in points) == list(range(1, len(panel) + 1))  # each once, none squeezed out
        bottom, top = ax.get_ylim()
        assert all(bottom <= y <= top for _, y in points)
        scores = [row["val_bpb"] for row in panel if row["status"] != "crash"]
        assert bottom < min(scores) and scores[0] < top and top - bottom < 1.5 * (scores[0] - min(scores))
        text = table.texts[0].get_text()
        assert all(row["description"] in text for row in panel if row["status"] == "keep")
        best = [y for y in ax.lines[0].get_ydata() if math.isfinite(y)]
        assert best == sorted(best, reverse=True)


@pytest.mark.parametrize("rows", ["", "a\t0.000000\t0.0\tcrash\tx\tcpu\td\n"])
def test_a_picture_of_nothing_is_an_error_that_names_the_remedy(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(prepare, "RESULTS", tmp_path / "results.tsv")
    prepare.RESULTS.write_text(HEADER + rows)
    with pytest.raises(prepare.PrepareError, match=r"run `python train\.py`"):
        prepare.plot(tmp_path / "progress.png")


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("scores", [(1.2,), (1.2, 1.3), (1.2, 1.1)])
def test_the_first_rows_make_a_picture_already(tmp_path, monkeypatch, scores):
    monkeypatch.setattr(prepare, "RESULTS", tmp_path / "results.tsv")
    for score in scores:
        prepare.log_result(val_bpb=score, memory_gb=1.0, gpu="g", dataset="d", commit="1", description="你好 $x")
    prepare.plot(tmp_path / "progress.png")
    assert (tmp_path / "progress.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(prepare.PrepareError, match=r"pip install -e '\.\[plot\]'"):
        prepare.plot(tmp_path / "progress.png")


def test_results_are_read_as_autoresearchs_analysis_notebook_reads_them(tmp_path):
    """Its calls on the table, on a file with crashes and quotes in it."""
    pandas = pytest.importorskip("pandas", reason="pandas is autoresearch's dependency, not ours")
    simulated(tmp_path / "results.tsv")
    commit = dict(commit="abcdef1", description='a "quote", tab\t, 你好', path=tmp_path / "results.tsv")
    prepare.log_result(val_bpb=1.0, memory_gb=2.0, gpu="Tesla T4", dataset="d-1", **commit)
    table = pandas.read_csv(tmp_path / "results.tsv", sep="\t")
    assert list(table.columns)[:5] == ["commit", "val_bpb", "memory_gb", "status", "description"] and len(table) == 121
    bpb = pandas.to_numeric(table["val_bpb"], errors="coerce")
    assert bpb.notna().all() and pandas.to_numeric(table["memory_gb"], errors="coerce").notna().all()
    status = table["status"].str.strip().str.upper()
    assert set(status) == {"KEEP", "DISCARD", "CRASH"}
    assert (bpb[status != "CRASH"] > 0).all()
    kept = table[status == "KEEP"]
    assert kept.loc[kept["val_bpb"].idxmin()]["description"] == "a 'quote', tab , 你好"
