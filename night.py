"""
Many experiments: one run under supervision, a wave of runs on every GPU of a machine or a Ray cluster, the picture.

    python night.py run [options of train.py]    # one experiment here; it leaves a row, however it ends
    python night.py wave REV ... [--seeds 1,2]   # each git revision's train.py on a GPU of its own, all at once
    python night.py plot                         # draws results.tsv as progress.png

`wave` takes Ray (pip install -e '.[night]'), `plot` takes Matplotlib ('.[plot]'), `run` takes neither.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

import prepare
from prepare import PrepareError

ROOT = Path(__file__).resolve().parent
LIMIT = 600  # seconds for a run, start and evaluation included
GRACE = 10  # seconds for a run to end by itself after a signal
REFUSED = 75  # exit status of a wave's run on a node without its dataset


def on_signals(handler: Callable) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------- one run, supervised


def run(options: list[str], limit: float, task: list[str] | None = None) -> int:
    """Runs train.py in this folder until it ends or its time is up; returns its exit status.

    This process may be killed at any time: a child in a session of its own guards train.py and leaves nothing of it.
    task: a wave's run, which ends with its Ray worker: dataset, its source and shards, what follows the GPU in the row.
    """
    prctl = ctypes.CDLL(None).prctl
    dataset, source, shards, budget = task or ("", "", "", "")
    prctl(1, signal.SIGKILL if task else 0)  # PR_SET_PDEATHSIG
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block SIGINT
    if task and not has(dataset, source, shards):
        return REFUSED
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside NumPy's threads, which are idle
    front = os.getpid()
    if child := os.fork():
        on_signals(lambda number, _: os.kill(child, number))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    os.setsid()
    prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: processes that train.py leaves behind become children of this one
    (commit, description), before = prepare.git_head(), len(prepare.read_results())
    command = [sys.executable, "train.py", *options]
    ending = dict(start_new_session=True, preexec_fn=lambda: prctl(1, signal.SIGKILL))
    train = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, **ending)
    deadline, reason = time.monotonic() + limit, ""

    def forward(number: int, _) -> None:
        nonlocal deadline, reason
        on_signals(signal.SIG_IGN)
        train.send_signal(number)
        deadline, reason = time.monotonic() + GRACE, "interrupted"

    on_signals(forward)
    while train.poll() is None and time.monotonic() < deadline and os.getppid() == front:
        time.sleep(0.1)
    if train.poll() is None and not reason:
        reason = f"no evaluation within {limit / 60:g} min" if os.getppid() == front else "killed"
    train.kill()
    code = train.wait()
    while pids := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for pid in map(int, pids):  # whose children are ours next
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    by_hand = any(option.startswith("--") and not option.startswith("--seed") for option in options)
    if (task or not by_hand) and all(row["commit"] != commit for row in prepare.read_results()[before:]):
        row = dict(val_bpb=0.0, memory_gb=0.0, gpu=prepare.gpu_name() + budget, commit=commit, description=description)
        with suppress(PrepareError):  # no data: train.py has said so
            prepare.log_result(**row, dataset=prepare.dataset_id(), reason=reason or why(code))
    return code if code >= 0 else 128 - code


def has(dataset: str, source: str, shards: str) -> bool:
    """Whether this machine has the dataset, which is prepared if it has a source."""
    with suppress(PrepareError):
        if source:
            prepare.prepare(source, int(shards))
        return prepare.dataset_id() == dataset
    return False


def why(code: int) -> str:
    """The reason of an end that train.py could not log."""
    try:
        compile((ROOT / "train.py").read_bytes(), "train.py", "exec")
    except (SyntaxError, ValueError) as error:
        return f"{type(error).__name__} line {getattr(error, 'lineno', 1)}"
    return {0: "no row", -signal.SIGKILL: "killed"}.get(code, f"exit status {code}")


# ---------------------------------------------------------------------------------------------------------------- wave

# Ray on this machine alone: on loopback ("cluster" is what it takes for other machines), closed to other users, and
# neither reporting home nor killing what takes memory nor starting a process for each core in advance.
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
LOCAL |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_prestart_worker_first_driver": "0"}


@dataclass(eq=False)
class Run:
    commit: str
    description: str
    seed: int | None
    lost: bool = False  # once
    bar: tqdm = field(default_factory=lambda: tqdm(disable=True))

    def __str__(self) -> str:
        return f"{self.commit[:7]} {self.description}"

    def owns(self, row: dict) -> bool:
        name = f"{row['commit']} {row['description']}"
        return name == str(self) or (row["status"] == "crash" and name.startswith(f"{self} ["))


def wave(args: argparse.Namespace) -> int:
    """Trains every revision with every seed that has no row yet; prints a table. Returns 130 if interrupted."""
    if args.per_gpu > 1 and not args.tokens:
        raise PrepareError("--per-gpu takes --tokens N: runs that share a GPU slow each other down")
    args.address = args.address or os.environ.get("RAY_ADDRESS")
    dataset, budget = prepare.dataset_id(), prepare.budget_name(args.seconds, args.tokens, args.gpu)
    ask = "import torch.cuda as c\nfor i in range(c.device_count()): print(c.get_device_name(i))"  # leaves no context
    here = subprocess.run([sys.executable, "-c", ask], stdout=-1, text=True).stdout.splitlines() or ["cpu"]
    names = r"((?! as )[^,])+" if args.address else "|".join(map(re.escape, here))  # of a cluster any GPU will do
    gpu = re.compile(f"({names}){re.escape(budget)}")

    def rows() -> list[dict]:
        return [row for row in prepare.read_results() if row["dataset"] == dataset and gpu.fullmatch(row["gpu"])]

    runs, log = [], git("log", "--no-walk=unsorted", "--format=%H %s", *args.revisions, "--")
    for commit, _, subject in (line.partition(" ") for line in log.decode(errors="replace").splitlines()):
        for seed in args.seeds or [None]:
            runs.append(Run(commit, prepare.clean(subject if seed is None else f"{subject}, seed {seed}"), seed))
    todo = [run for run in runs if args.again or not any(map(run.owns, rows()))]
    print(f"{len(todo)} runs, {len(runs) - len(todo)} more have a row already (--again repeats them)")
    complete = not todo or drive(todo, args, dataset, here[0], budget)
    print("" if complete else "interrupted: the same command goes on")

    table = {(str(run), row["gpu"]): row for row in rows() for run in runs if run.owns(row)}  # the last of each
    kept = [row for row in rows() if row["status"] == "keep" and not any(run.owns(row) for run in runs)]
    best = {row["gpu"]: row for row in sorted(kept, key=lambda row: -row["val_bpb"])}
    if len({row["gpu"] for row in table.values()}) > 1:
        print("UNLIKE GPUS: a row compares with those of its own GPU only")
    print("val_bpb      vs best  tokens_M  status   commit   description, GPU; best: of those kept before this wave")
    rated = sorted([*table.values(), *best.values()], key=lambda row: row["val_bpb"] or math.inf)
    for row in sorted(rated, key=lambda row: row["gpu"]):
        gain = row["val_bpb"] - best[row["gpu"]]["val_bpb"] if row["gpu"] in best and row["val_bpb"] else math.nan
        line = "{val_bpb:.6f}  {gain:+9.6f}  {tokens_M:8.1f}  {status:7}  {commit}  {description}, {gpu}"
        print(line.format(gain=gain, **row).replace("+nan", "    "))
    return 0 if complete else 130


def drive(runs: list[Run], args: argparse.Namespace, dataset: str, gpu: str, budget: str) -> bool:
    """Has Ray train them, and logs their rows as they end. False: it was interrupted."""
    if not args.address:
        os.environ.update(LOCAL | os.environ)  # read when Ray is imported
    try:
        import ray
    except ImportError:
        raise PrepareError("a wave needs Ray: pip install -e '.[night]'") from None
    local = {} if args.address else dict(include_dashboard=False, object_store_memory=10**8)
    ray.init(args.address or "local", log_to_driver=False, logging_level="ERROR", **local)
    kind = "GPU" if "GPU" in ray.cluster_resources() else "CPU"
    nodes = [node["Resources"] for node in ray.nodes() if kind in node["Resources"]]
    cores = min(node.get("CPU", 1) / node.get("GPU", 1) for node in nodes) / args.per_gpu
    share = {"num_cpus": int(cores) or int(1e4 * cores) / 1e4}  # Ray counts in 1e-4
    share |= {"num_gpus": int(1e4 / args.per_gpu) / 1e4} if kind == "GPU" else {}
    task = ray.remote(num_returns="streaming", max_retries=0, **share)(experiment)
    source = prepare.current_dataset().name.removesuffix("@{}.{}.{}".format(*sys.version_info))
    shards = (prepare.current_dataset() / "train_shards").read_text().strip()
    data = [dataset, "" if "@" in source else source, shards, budget]  # a folder has no source elsewhere
    results = prepare.RESULTS.read_bytes() if prepare.RESULTS.exists() else b""
    files = ray.put({"night.py": Path(__file__).read_bytes(), "results.tsv": results})
    archives, pending, refused, stopped = {}, {}, set(), []
    limit = args.limit or LIMIT * args.per_gpu + max(0, (args.seconds or 0) - prepare.TIME_BUDGET)

    def submit(run: Run) -> None:
        if run.commit not in archives:
            archives[run.commit] = ray.put(git("archive", "--format=zip", run.commit))
        given = dict(limit=limit, seconds=args.seconds, tokens=args.tokens, gpu=args.gpu, seed=run.seed)
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        elsewhere = {"label_selector": {"ray.io/node-id": f"!in({','.join(refused)})"}} if refused else {}
        pending[task.options(**elsewhere).remote(archives[run.commit], files, [*options, "--task", *data])] = run

    def log(run: Run, content: bytes = b"", tail: Iterable[str] = (), reason: str = "no row") -> None:
        """The last row of its checkout; a crash if there is none."""
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(content)
            rows = prepare.read_results(file.name)
        row = rows[-1] if rows else dict(val_bpb=0.0, memory_gb=0.0, gpu=gpu + budget, dataset=dataset)
        if row.pop("status", "crash") == "crash":
            row["reason"] = row.get("description", reason).rpartition("[")[2].rstrip("]")
        row |= {"commit": run.commit, "description": run.description}
        lines = [f"{prepare.log_result(**row):8} {row['val_bpb']:.6f}  {run}  {row.get('reason', '')}"]
        tqdm.write("\n    ".join([*lines, *tail] if "reason" in row else lines))

    def take(stream) -> None:
        """What a run has to say next."""
        run = pending[stream]
        try:
            event, *values = ray.get(next(stream))
        except StopIteration:
            del pending[stream]
            return
        except ray.exceptions.RayError as error:
            event, values = "lost", [type(error.cause).__name__ if hasattr(error, "cause") else "node lost"]
        run.bar.close()
        if event == "start":
            run.bar = tqdm(desc=f"{run} on {values[0]}", bar_format="{elapsed}  {desc}", leave=False, disable=None)
            tqdm.write(f"start    {run} on {values[0]}")
        elif event == "end":
            log(run, *values)
        elif event == "lost" and run.lost and not stopped:
            log(run, reason=values[0])
        elif not stopped:
            run.lost = event == "lost"
            refused.update(values if event == "refused" else ())
            tqdm.write(f"{event:8} {run}: " + ("once more" if run.lost else f"its node does not have {dataset}"))
            if {node["NodeID"] for node in ray.nodes() if kind in node["Resources"]} <= refused:
                raise PrepareError(f"no node has {dataset}")
            submit(run)

    on_signals(lambda *_: stopped.append(True))
    try:
        for run in runs:
            submit(run)
        while pending and not stopped:
            for stream in ray.wait(list(pending), timeout=1)[0]:
                take(stream)
            for run in runs:
                run.bar.refresh()
        return not pending
    finally:
        stopped.append(True)
        for stream in pending:
            ray.cancel(stream)
        ray.wait([stream.completed() for stream in pending], num_returns=len(pending), timeout=3 * GRACE)
        for stream in list(pending):
            while stream in pending and ray.wait([stream], timeout=0)[0]:
                take(stream)  # a row that has come meanwhile counts
        ray.shutdown()


def experiment(archive: bytes, files: dict[str, bytes], options: list[str]) -> Iterator:
    """Ray task: one run in a temporary checkout; the node needs the dependencies, but no clone.

    Yields ("start", place), then ("end", its rows, end of its log) or ("refused", node), which has other data.
    """
    import ray

    context, env = ray.get_runtime_context(), os.environ | {"AUTORESEARCH_SCREENING": "1"}
    cores = str(max(1, int(context.get_assigned_resources()["CPU"])))
    if int(cores) < len(os.sched_getaffinity(0)):
        env["TORCHINDUCTOR_COMPILE_THREADS"] = cores  # like OMP_NUM_THREADS, which Ray sets
    elif env.get("OMP_NUM_THREADS") == cores:
        del env["OMP_NUM_THREADS"]  # a run that has all cores chooses as it does without Ray
    yield "start", " GPU ".join([socket.gethostname(), *map(str, ray.get_gpu_ids())])
    with tempfile.TemporaryDirectory(prefix="night-") as folder, open(f"{folder}/run.log", "w") as log:
        zipfile.ZipFile(io.BytesIO(archive)).extractall(folder)
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        command = [sys.executable, "night.py", "run", *options]
        child = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            while child.poll() is None:
                time.sleep(0.1)
        finally:  # cancelled, too
            child.terminate()
            child.wait()
        if child.returncode == REFUSED:
            yield "refused", context.get_node_id()
        else:
            tail = Path(log.name).read_text(errors="replace").splitlines()[-12:]
            yield "end", Path(folder, "results.tsv").read_bytes().removeprefix(files["results.tsv"]), tail


def git(*args: str) -> bytes:
    done = subprocess.run(["git", *args], cwd=ROOT, stdout=subprocess.PIPE)
    if done.returncode:
        raise PrepareError("git has failed")  # and said why
    return done.stdout


# ------------------------------------------------------------------------------------------------------------- picture


def plot(path: Path) -> None:
    """Draws results.tsv: a chart of all experiments for each gpu and dataset, and below it a table of the kept ones."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PrepareError("the picture needs Matplotlib: pip install -e '.[plot]'") from None
    panels: dict[str, dict] = {}
    for i, row in enumerate(prepare.read_results()):
        crashed = row["status"] == "crash"
        run = row["commit"], re.sub(r" ?\[[^][]*\]$", "", row["description"]) if crashed else row["description"]
        panel = panels.setdefault(f"{row['gpu']}, {row['dataset']}", {})
        panel.pop(run, None)  # an earlier crash of the same run
        panel[run if crashed else i] = row
    panels = {name: rows for name, rows in panels.items() if any(row["val_bpb"] for row in rows.values())}
    if not panels:
        raise PrepareError(f"{prepare.RESULTS} holds no val_bpb yet: run `python train.py` first")
    tables = [kept_table(panel.values()) for panel in panels.values()]
    heights = [inches for table in tables for inches in (3.7, 0.16 * table.count("\n") + 0.4)]
    figure = Figure((9, sum(heights)), layout="constrained", facecolor="white")
    axes = figure.subplots(len(heights), height_ratios=heights)
    for name, table, chart, below in zip(panels, tables, axes[::2], axes[1::2], strict=True):
        draw(chart, name, list(panels[name].values()))
        below.text(0, 1, table, family="monospace", size=8.5, va="top", transform=below.transAxes, parse_math=False)
        below.axis("off")
    with prepare.new_file(path) as file:
        figure.savefig(file, format="png", dpi=180)


def kept_table(rows: Iterable[dict]) -> str:
    lines, before = ["  no.  val_bpb     gain  kept"], math.nan
    for number, row in enumerate(rows, start=1):
        if row["status"] == "keep":
            gain = f"{before - row['val_bpb']:.4f}".replace("nan", "")
            line = f"{number:5}  {row['val_bpb']:7.4f}  {gain:>7}  {row['description']}"
            lines += textwrap.wrap(line, 109, subsequent_indent=25 * " ")
            before = row["val_bpb"]
    return "\n".join(lines)


def draw(ax, name: str, rows: list[dict]) -> None:
    """One chart. What is far worse than most lies on its upper edge, a crash in a strip at the bottom."""
    x, y = np.arange(1, len(rows) + 1), np.array([row["val_bpb"] for row in rows])
    kept, crashed = (np.array([row["status"] == status for row in rows]) for status in ("keep", "crash"))
    first, best = y[~crashed][0], y[~crashed].min()
    worst = max(first, min(y.max(), best + 2.5 * np.median(y[~crashed] - best)))
    margin = max(0.1 * (worst - best), 0.003 * best)
    bottom, top, beyond = best - margin, worst + margin, y > worst
    strip = 0.1 * (top - bottom) * crashed.any()
    y = np.select([crashed, beyond], [bottom - strip / 2, worst + margin / 2], y)
    for label, chosen, style in (
        ("kept", kept, dict(color="#1a7f37", s=28, zorder=3)),
        ("discarded", ~kept & ~crashed & ~beyond, dict(color="#8c959f", s=12)),
        ("off the scale", ~kept & beyond, dict(color="#8c959f", s=16, marker="^")),
        ("crashed", crashed, dict(color="#cf222e", s=16, marker="x", linewidths=1)),
    ):
        if chosen.any():
            ax.scatter(x[chosen], y[chosen], label=f"{chosen.sum()} {label}", **style)
    ax.step(x, np.minimum.accumulate(np.where(kept, y, np.inf)), where="post", color="#1a7f37", alpha=0.5)
    left, right, numbered = 0.5 - 0.01 * len(rows), 0.5 + 1.01 * len(rows), (math.inf, math.inf)
    for i in np.flatnonzero(kept)[::-1]:  # the table's numbers, where they cover no other
        if x[i] < numbered[0] - 0.03 * (right - left) or y[i] > numbered[1] + 0.05 * (top - bottom):
            ax.annotate(x[i], (x[i], y[i]), (-3, -4), textcoords="offset points", ha="right", va="top", size=8)
            numbered = x[i], y[i]
    ax.set(xlim=(left, right), ylim=(bottom, top), xlabel="experiment", ylabel="val_bpb")
    ax.ticklabel_format(useOffset=False)
    ax.set_xticks([tick for tick in ax.get_xticks() if 1 <= tick <= len(rows) and tick == int(tick)])
    ax.set_yticks([tick for tick in ax.get_yticks() if bottom <= tick <= top])
    ax.axhspan(bottom - strip, bottom, color="#cf222e", alpha=0.06, linewidth=0)
    ax.set_ylim(bottom - strip, top)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.2)
    change = f"{first:.4f} to {best:.4f} ({best - first:+.4f})" if best < first else f"{best:.4f}"
    ax.set_title(f"{name}\nval_bpb {change}", loc="left", size=10, parse_math=False)
    spacing = dict(borderpad=0, borderaxespad=0.3, handletextpad=0, columnspacing=1)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=9, **spacing)


# ---------------------------------------------------------------------------------------------------------------- main


def main() -> int | None:
    parser = argparse.ArgumentParser(description="Many experiments: a run under supervision, waves, the picture.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="train.py in this folder, with its options", allow_abbrev=False)
    one.add_argument("--limit", type=float, default=LIMIT, help="kill it after so many seconds (%(default)s)")
    one.add_argument("--task", nargs=4, help=argparse.SUPPRESS)
    many = commands.add_parser("wave", help="git revisions, each on a GPU of its own")
    many.add_argument("revisions", nargs="+", metavar="REV")
    many.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], help="such as 1,2,3")
    budget = many.add_mutually_exclusive_group()
    budget.add_argument("--seconds", type=float, help="of training, instead of five minutes")
    budget.add_argument("--tokens", type=int, help="to train on, instead of five minutes")
    many.add_argument("--gpu", metavar="NAME", help="take another GPU's numerics and size")
    many.add_argument("--per-gpu", type=int, default=1, metavar="K", help="K runs at once on a GPU; takes --tokens")
    many.add_argument("--again", action="store_true", help="repeat what has a row")
    many.add_argument("--limit", type=float, help=f"kill a run after so many seconds ({LIMIT}, times K)")
    many.add_argument("--address", help="of a Ray cluster (default: $RAY_ADDRESS, else this machine alone)")
    commands.add_parser("plot", help="draw results.tsv as progress.png")
    args, rest = parser.parse_known_args()
    if args.command == "run":
        return run(rest, args.limit, args.task)
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    return wave(args) if args.command == "wave" else plot(prepare.RESULTS.with_name("progress.png"))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PrepareError as error:
        sys.exit(f"night.py: {error}")
