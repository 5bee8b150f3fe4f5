"""
Many experiments: one run under supervision, waves of runs on every GPU of a machine or a Ray cluster, the picture.

    python night.py run [options of train.py]    # one experiment here; it leaves a row, however it ends
    python night.py wave REV ... [--seeds 1,2]   # each git revision's train.py on a GPU of its own, all at once
    python night.py plot                         # draws results.tsv as progress.png

`wave` needs Ray (pip install -e '.[night]'), `plot` needs Matplotlib ('.[plot]'), `run` needs neither.
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
import threading
import time
import warnings
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import prepare
from prepare import PrepareError

ROOT = Path(__file__).resolve().parent
LIMIT = 600  # seconds for a run, start and evaluation included
GRACE = 10  # seconds for a run to end by itself after a signal
IN_A_WAVE = "AUTORESEARCH_SCREENING"  # environment variable: prepare.py then logs a run whatever its budget


# ------------------------------------------------------------------------------------------------- one run, supervised


def run(command: list[str], limit: float, budget: str, logged: bool) -> int:
    """Runs a Python script of this folder until it ends or its time is up; returns its exit status.

    If it leaves no row, it gets a crash row with `budget` after the GPU's name, unless it is not to be logged.
    This process may be killed at any time: a child in a session of its own guards the script and leaves nothing of it.
    """
    prctl = ctypes.CDLL(None).prctl
    if IN_A_WAVE in os.environ:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with Ray's worker
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block SIGINT
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside NumPy's threads, which are idle
    front = os.getpid()
    if guard := os.fork():
        prepare.handle_signals(lambda number, _: os.kill(guard, number))
        return os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])

    os.setsid()
    prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: processes that the script leaves behind become children of this one
    prctl(1, signal.SIGTERM)  # when the process in front is killed
    (commit, description), before = prepare.git_head(), len(prepare.read_results())
    tail, reasons = deque(maxlen=100), []  # the last lines of stderr; why the script was ended, if it was
    pipe = dict(cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    ending = dict(start_new_session=True, preexec_fn=lambda: prctl(1, signal.SIGKILL))
    script = subprocess.Popen([sys.executable, *command], **pipe, **ending)

    def stop(number: int, _=None) -> None:
        prepare.handle_signals(signal.SIG_IGN)
        late = f"no evaluation within {limit / 60:g} min"
        reasons.append({signal.SIGINT: "interrupted", signal.SIGTERM: "killed"}.get(number, late))
        script.send_signal(signal.SIGKILL if number == signal.SIGALRM else number)
        signal.setitimer(signal.ITIMER_REAL, GRACE)

    def read_stderr() -> None:
        for line in script.stderr:
            tail.append(line.decode(errors="replace"))
            with suppress(OSError):
                os.write(2, line)

    prepare.handle_signals(stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    if os.getppid() != front:
        stop(signal.SIGTERM)
    reader = threading.Thread(target=read_stderr)
    reader.start()
    code = script.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    while pids := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for pid in map(int, pids):  # whose children are ours next
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    reader.join()
    if logged and all(row["commit"] != commit for row in prepare.read_results()[before:]):
        reason = reasons[0] if reasons else why(code, "".join(tail))
        row = dict(val_bpb=0.0, memory_gb=0.0, gpu=prepare.gpu_name() + budget, commit=commit, description=description)
        with suppress(PrepareError):  # no data: train.py has said so
            prepare.log_result(**row, dataset=prepare.dataset_id(), reason=reason)
    return code if code >= 0 else 128 - code


def why(code: int, stderr: str) -> str:
    """The reason of an end that train.py could not log: `NameError line 31` while it was imported, say."""
    lines = re.findall(r'^ *File ".*train\.py", line (\d+)', stderr, re.M)
    errors = re.findall(r"^(?:\w+\.)*(\w*Error)\b", stderr, re.M)
    if code == 1 and lines and errors:
        return f"{errors[-1]} line {lines[-1]}"
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

    def __str__(self) -> str:
        return f"{self.commit[:7]} {self.description}"

    def owns(self, row: dict) -> bool:
        name = f"{row['commit']} {row['description']}"
        return name == str(self) or (row["status"] == "crash" and name.startswith(f"{self} ["))


def wave(args: argparse.Namespace) -> int:
    """Trains every revision with every seed that has no row yet; prints a table. Returns 130 if interrupted."""
    dataset, budget = prepare.dataset_id(), prepare.budget_name(args.seconds, args.tokens, args.gpu)
    runs, log = [], git("log", "--no-walk=unsorted", "--format=%H %s", *args.revisions, "--")
    for commit, _, subject in (line.partition(" ") for line in log.decode(errors="replace").splitlines()):
        for seed in args.seeds or [None]:
            runs.append(Run(commit, prepare.clean(subject if seed is None else f"{subject}, seed {seed}"), seed))
    with started_ray(args) as here:
        names = r"((?! as )[^,])+" if args.address else "|".join(map(re.escape, here))  # of a cluster any GPU will do
        gpu = re.compile(f"({names}){re.escape(budget)}")

        def rows() -> list[dict]:
            return [row for row in prepare.read_results() if row["dataset"] == dataset and gpu.fullmatch(row["gpu"])]

        todo = [run for run in runs if args.again or not any(map(run.owns, rows()))]
        print(f"{len(todo)} runs, {len(runs) - len(todo)} more have a row already (--again repeats them)", flush=True)
        complete = train_all(todo, args, dict(gpu=here[0] + budget, dataset=dataset))
        print("" if complete else "interrupted: the same command goes on")
        print_table(runs, rows())
    return 0 if complete else 130


def print_table(runs: list[Run], rows: list[dict]) -> None:
    """The last row of each run beside the best that was kept before, for each GPU by val_bpb."""
    table = {(str(run), row["gpu"]): row for row in rows for run in runs if run.owns(row)}
    kept = [row for row in rows if row["status"] == "keep" and not any(run.owns(row) for run in runs)]
    best = {row["gpu"]: row for row in sorted(kept, key=lambda row: -row["val_bpb"])}
    if len({row["gpu"] for row in table.values()}) > 1:
        print("UNLIKE GPUS: a row compares with those of its own GPU only")
    print("val_bpb      vs best  tokens_M  status   commit   description, GPU; best: of those kept before this wave")
    rated = sorted([*table.values(), *best.values()], key=lambda row: row["val_bpb"] or math.inf)
    for row in sorted(rated, key=lambda row: row["gpu"]):
        gain = row["val_bpb"] - best[row["gpu"]]["val_bpb"] if row["gpu"] in best and row["val_bpb"] else math.nan
        line = "{val_bpb:.6f}  {gain:+9.6f}  {tokens_M:8.1f}  {status:7}  {commit}  {description}, {gpu}"
        print(line.format(gain=gain, **row).replace("+nan", "    "))


@contextmanager
def started_ray(args: argparse.Namespace) -> Iterator[list[str]]:
    """Joins the cluster at args.address, or else starts Ray on this machine; gives the names of this machine's GPUs."""
    args.address = args.address or os.environ.get("RAY_ADDRESS")
    # Read when Ray is imported. A run that a cluster's Ray kills for its memory would be retried forever.
    os.environ.update({"RAY_task_oom_retries": "0"} | ({} if args.address else LOCAL) | os.environ)
    try:
        import ray
    except ImportError:
        raise PrepareError("a wave needs Ray: pip install -e '.[night]'") from None
    ask = "import torch.cuda as c\nfor i in range(c.device_count()): print(c.get_device_name(i))"
    asked = subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True)  # while Ray starts
    local = {} if args.address else dict(include_dashboard=False, object_store_memory=10**8)
    ray.init(args.address or "local", log_to_driver=False, logging_level="ERROR", **local)
    try:
        yield asked.communicate()[0].splitlines() or ["cpu"]
    finally:
        ray.shutdown()


def train_all(runs: list[Run], args: argparse.Namespace, where: dict[str, str]) -> bool:
    """Has Ray train them and logs their rows as they end. False if interrupted.

    where: gpu and dataset of the crash row of a run that leaves no row itself.
    """
    import ray

    if args.per_gpu > 1 and not args.tokens:
        raise PrepareError("--per-gpu takes --tokens N: runs that share a GPU slow each other down")
    kind = "GPU" if "GPU" in ray.cluster_resources() else "CPU"
    nodes = [node for node in ray.nodes() if kind in node["Resources"]]
    elsewhere = {}
    if args.address:
        nodes = with_dataset(nodes, where["dataset"])
        elsewhere["label_selector"] = {"ray.io/node-id": f"in({','.join(node['NodeID'] for node in nodes)})"}
    cores = min(node["Resources"].get("CPU", 1) / node["Resources"].get("GPU", 1) for node in nodes) / args.per_gpu
    share = {"num_cpus": int(cores) or int(1e4 * cores) / 1e4}  # Ray counts in 1e-4
    share |= {"num_gpus": int(1e4 / args.per_gpu) / 1e4} if kind == "GPU" else {}
    # Ray gives the run of a lost node to another node once
    task = ray.remote(num_returns="streaming", max_retries=1, **share, **elsewhere)(experiment)
    results = prepare.RESULTS.read_bytes() if prepare.RESULTS.exists() else b""
    files = ray.put({"night.py": Path(__file__).read_bytes(), "results.tsv": results})
    archives = {run.commit: None for run in runs}
    archives = {commit: ray.put(git("archive", "--format=zip", commit)) for commit in archives}
    limit = args.limit or LIMIT * args.per_gpu + max(0, (args.seconds or 0) - prepare.TIME_BUDGET)
    options, pending = [f"--limit={limit}", *budget_options(args)], {}
    for run in runs:
        seed = [] if run.seed is None else [f"--seed={run.seed}"]
        pending[task.remote(archives[run.commit], files, [*options, *seed])] = run

    def log(run: Run, content: bytes, tail: list[str], reason: str = "no row") -> None:
        """The last row of its checkout; a crash if there is none."""
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(content)
            rows = prepare.read_results(file.name)
        row = rows[-1] if rows else dict(val_bpb=0.0, memory_gb=0.0, **where)
        if row.pop("status", "crash") == "crash":
            row["reason"] = row.get("description", reason).rpartition("[")[2].rstrip("]")
        row |= {"commit": run.commit, "description": run.description}
        lines = [f"{prepare.log_result(**row):8} {row['val_bpb']:.6f}  {run}  {row.get('reason', '')}"]
        tqdm.write("\n    ".join([*lines, *tail] if "reason" in row else lines))

    stopped, canceled = [], math.inf
    prepare.handle_signals(lambda *_: stopped.append(True))
    with tqdm(total=len(runs), unit="run", disable=None) as bar:
        while pending and time.monotonic() < canceled + 3 * GRACE:
            if stopped and canceled == math.inf:
                canceled = time.monotonic()
                for stream in pending:
                    ray.cancel(stream)
            for stream in ray.wait(list(pending), timeout=0.5)[0]:
                try:
                    event = ray.get(next(stream))
                except ray.exceptions.RayError as error:
                    event = b"", [], type(error.cause).__name__ if hasattr(error, "cause") else "node lost"
                    if stopped:
                        del pending[stream]
                        continue
                if isinstance(event, str):
                    tqdm.write(f"start    {pending[stream]} on {event}")
                else:
                    log(pending.pop(stream), *event)
                    bar.update()
    return not stopped


def with_dataset(nodes: list[dict], dataset: str) -> list[dict]:
    """Those of a cluster's nodes that have the dataset or, if it has a source, have prepared it now."""
    import ray

    folder = prepare.current_dataset()
    source = folder.name.removesuffix("@{}.{}.{}".format(*sys.version_info))
    given = ["" if "@" in source else source, (folder / "train_shards").read_text().strip()]  # a folder has no source
    task, file = ray.remote(num_cpus=0)(dataset_of_node), Path(prepare.__file__).read_bytes()
    on = [{"ray.io/node-id": node["NodeID"]} for node in nodes]
    found = ray.get([task.options(label_selector=label).remote(file, *given) for label in on])
    for node, answer in zip(nodes, found, strict=True):
        if answer != dataset:
            print(f"no run for {node['NodeManagerHostname']}, it does not have {dataset}: {answer}", flush=True)
    if dataset not in found:
        raise PrepareError(f"no node has {dataset}")
    return [node for node, answer in zip(nodes, found, strict=True) if answer == dataset]


def dataset_of_node(prepare_py: bytes, source: str, shards: str) -> str:
    """Ray task: the id of this node's dataset, which is prepared if it has a source; or what is wrong with it."""
    prepared = f"prepare.prepare({source!r}, {shards})" if source else ""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "prepare.py").write_bytes(prepare_py)
        command = [sys.executable, "-c", f"import prepare\nprint(prepare.dataset_id({prepared}))"]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.strip().rpartition("\n")[2]


def experiment(archive: bytes, files: dict[str, bytes], options: list[str]) -> Iterator:
    """Ray task: one run in a temporary checkout; the node needs the dependencies, but no clone.

    Yields where it runs, then its rows and the end of its log.
    """
    import ray

    cores = max(1, int(ray.get_runtime_context().get_assigned_resources()["CPU"]))
    env = os.environ | {IN_A_WAVE: "1", "TORCHINDUCTOR_COMPILE_THREADS": str(min(32, cores))}  # 32: Inductor's limit
    if env.get("OMP_NUM_THREADS") == str(cores) == str(len(os.sched_getaffinity(0))):
        del env["OMP_NUM_THREADS"]  # Ray has set it, but a run that has all cores chooses as it does without Ray
    yield " GPU ".join([socket.gethostname(), *map(str, ray.get_gpu_ids())])
    with tempfile.TemporaryDirectory(prefix="night-") as folder, open(f"{folder}/run.log", "w") as log:
        zipfile.ZipFile(io.BytesIO(archive)).extractall(folder)
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        command = [sys.executable, "night.py", "run", *options]
        child = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            child.wait(1e9)  # a wait without a timeout could not be canceled
        finally:
            child.terminate()
            child.wait()
        tail = Path(log.name).read_text(errors="replace").splitlines()[-12:]
        yield Path(folder, "results.tsv").read_bytes().removeprefix(files["results.tsv"]), tail


def git(*args: str) -> bytes:
    done = subprocess.run(["git", *args], cwd=ROOT, stdout=subprocess.PIPE)
    if done.returncode:
        raise PrepareError("git has failed")  # and said why
    return done.stdout


# ------------------------------------------------------------------------------------------------------------- picture


def experiments() -> list[dict]:
    """The rows of results.tsv, without a crash whose run has a later row."""
    rows = {}
    for i, row in enumerate(prepare.read_results()):
        crashed = row["status"] == "crash"
        description = re.sub(r" ?\[[^][]*\]$", "", row["description"]) if crashed else row["description"]
        run = row["commit"], description, row["gpu"], row["dataset"]
        rows.pop(run, None)
        rows[run if crashed else i] = row
    return list(rows.values())


def plot(path: Path) -> None:
    """Draws results.tsv: for each gpu and dataset a chart of all experiments, and a table of the kept ones below."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PrepareError("the picture needs Matplotlib: pip install -e '.[plot]'") from None
    panels: dict[str, list[dict]] = {}
    for row in experiments():
        panels.setdefault(f"{row['gpu']}, {row['dataset']}", []).append(row)
    panels = {name: rows for name, rows in panels.items() if any(row["val_bpb"] for row in rows)}
    if not panels:
        raise PrepareError(f"{prepare.RESULTS} holds no val_bpb yet: run `python train.py` first")
    tables = list(map(kept_table, panels.values()))
    height = sum(4.2 + 0.16 * table.count("\n") for table in tables)
    figure = Figure((9, height), layout="constrained", facecolor="white")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for ax, (name, rows), table in zip(axes, panels.items(), tables, strict=True):
        draw(ax, name, rows)
        below = dict(xytext=(0, -40), textcoords="offset points", va="top", parse_math=False)
        ax.annotate(table, (0, 0), xycoords="axes fraction", family="monospace", size=8.5, **below)
    with prepare.new_file(path) as file:
        figure.savefig(file, format="png", dpi=180)


def kept_table(rows: list[dict]) -> str:
    lines, before = ["  no.  val_bpb     gain  kept"], math.nan
    for number, row in enumerate(rows, start=1):
        if row["status"] == "keep":
            gain = f"{before - row['val_bpb']:.4f}".replace("nan", "")
            description = textwrap.shorten(row["description"], 85, placeholder="...")
            lines.append(f"{number:5}  {row['val_bpb']:7.4f}  {gain:>7}  {description}")
            before = row["val_bpb"]
    return "\n".join(lines)


def draw(ax, name: str, rows: list[dict]) -> None:
    """One chart. Crashes lie on its lower edge, and results far worse than most on its upper edge."""
    x, y = np.arange(1, len(rows) + 1), np.array([row["val_bpb"] for row in rows])
    kept, crashed = (np.array([row["status"] == status for row in rows]) for status in ("keep", "crash"))
    first, best = y[~crashed][0], y[~crashed].min()
    worst = max(first, min(y.max(), best + 2.5 * np.median(y[~crashed] - best)))
    margin = max(0.1 * (worst - best), 0.003 * best)
    bottom, top = best - margin, worst + margin
    y = np.where(crashed, bottom, np.minimum(y, top))
    for label, chosen, style in (
        ("kept", kept, dict(color="#1a7f37", s=28, zorder=3)),
        ("discarded", ~kept & ~crashed, dict(color="#8c959f", s=12)),
        ("crashed", crashed, dict(color="#cf222e", s=16, marker="x", linewidths=1)),
    ):
        if chosen.any():
            ax.scatter(x[chosen], y[chosen], label=f"{chosen.sum()} {label}", clip_on=False, **style)
    ax.step(x, np.minimum.accumulate(np.where(kept, y, np.inf)), where="post", color="#1a7f37", alpha=0.5)
    ax.set(ylim=(bottom, top), xlabel="experiment", ylabel="val_bpb")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.ticklabel_format(useOffset=False)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.2)
    change = f"{first:.4f} to {best:.4f} ({best - first:+.4f})" if best < first else f"{best:.4f}"
    ax.set_title(f"{name}\nval_bpb {change}", loc="left", size=10, parse_math=False)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=9)


# ---------------------------------------------------------------------------------------------------------------- main


def budget_options(args: argparse.Namespace) -> list[str]:
    """As train.py takes them."""
    given = {name: getattr(args, name) for name in ("seconds", "tokens", "gpu")}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def main() -> int | None:
    budget = argparse.ArgumentParser(add_help=False)
    limits = budget.add_mutually_exclusive_group()
    limits.add_argument("--seconds", type=float, help="of training, instead of five minutes")
    limits.add_argument("--tokens", type=int, help="to train on, instead of five minutes")
    budget.add_argument("--gpu", metavar="NAME", help="take another GPU's numerics and size")
    parser = argparse.ArgumentParser(description="Many experiments: a run under supervision, waves, the picture.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", parents=[budget], help="train.py in this folder, with its options")
    one.add_argument("--limit", type=float, default=LIMIT, help="kill it after so many seconds (%(default)s)")
    many = commands.add_parser("wave", parents=[budget], help="git revisions, each on a GPU of its own")
    many.add_argument("revisions", nargs="+", metavar="REV")
    many.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], help="such as 1,2,3")
    many.add_argument("--per-gpu", type=int, default=1, metavar="K", help="K runs at once on a GPU; takes --tokens")
    many.add_argument("--again", action="store_true", help="repeat what has a row")
    many.add_argument("--limit", type=float, help=f"kill a run after so many seconds ({LIMIT}, times K)")
    many.add_argument("--address", help="of a Ray cluster (default: $RAY_ADDRESS, else this machine alone)")
    commands.add_parser("plot", help="draw results.tsv as progress.png")
    args, rest = parser.parse_known_args()
    if args.command == "run":
        by_hand = budget_options(args) or any(re.match("--(?!seed)", option) for option in rest)
        name = prepare.budget_name(args.seconds, args.tokens, args.gpu)
        return run(["train.py", *rest, *budget_options(args)], args.limit, name, not by_hand or IN_A_WAVE in os.environ)
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    return wave(args) if args.command == "wave" else plot(prepare.RESULTS.with_name("progress.png"))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PrepareError as error:
        sys.exit(f"night.py: {error}")
