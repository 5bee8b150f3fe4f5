"""
Many experiments: one run under supervision, waves of runs on every GPU of a machine or a Ray cluster, and the morning
after: a report and a picture.

    python night.py run [options of train.py]    # one experiment here; it leaves a row, however it ends
    python night.py wave REV ... [--seeds 1,2]   # each git revision's train.py on a GPU of its own, all at once
    python night.py report                       # how much of the night's gain was luck?
    python night.py plot                         # draws results.tsv as progress.png

`wave` and `report` need Ray (pip install -e '.[night]'), `plot` needs Matplotlib ('.[plot]'), `run` needs neither.
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
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings
import zipfile
from collections import Counter, deque
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
REPORT = ", report"  # ends the gpu of a report's rows, so that they compare among themselves only
TEST = ", test "  # in their description, before the score on the test split


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
    files = dict(stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    dies_with_this = dict(start_new_session=True, preexec_fn=lambda: prctl(1, signal.SIGKILL))
    script = subprocess.Popen([sys.executable, *command], cwd=ROOT, **files, **dies_with_this)

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
# neither reporting home nor killing what takes memory nor starting a process for each core in advance; and its workers
# as nice as others, not at 15, where a busy machine starves them.
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
LOCAL |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}


@dataclass
class Run:
    commit: str
    description: str
    seed: int | None

    def __str__(self) -> str:
        return f"{self.commit[:7]} {self.description}"

    def owns(self, row: dict) -> bool:
        name = f"{row['commit']} {row['description']}"
        return name == str(self) or name.startswith(f"{self} [" if row["status"] == "crash" else f"{self}{TEST}")


def rows_on(gpu: str, dataset: str) -> list[dict]:
    """The rows on a dataset, and on a gpu that matches a pattern."""
    return [row for row in prepare.read_results() if row["dataset"] == dataset and re.fullmatch(gpu, row["gpu"])]


def wave(args: argparse.Namespace) -> int:
    """Trains every revision with every seed that has no row yet; prints a table. Returns 130 if interrupted."""
    budget, runs = prepare.budget_name(args.seconds, args.tokens, args.gpu), []
    log = git("log", "--no-walk=unsorted", "--format=%H %s", *args.revisions, "--").decode(errors="replace")
    for commit, _, subject in (line.partition(" ") for line in log.splitlines()):
        for seed in args.seeds or [None]:
            runs.append(Run(commit, prepare.clean(subject if seed is None else f"{subject}, seed {seed}"), seed))
    with started_ray(args) as (gpu, names):
        complete, rows = train_all(runs, args, f"({names}){re.escape(budget)}", gpu + budget)
    table = {(str(run), row["gpu"]): row for row in rows for run in runs if run.owns(row)}  # the last row of each
    kept = [row for row in rows if row["status"] == "keep" and not any(run.owns(row) for run in runs)]
    best = {row["gpu"]: row for row in sorted(kept, key=lambda row: -row["val_bpb"])}
    if len({row["gpu"] for row in table.values()}) > 1:
        print("UNLIKE GPUS: a row compares with those of its own GPU only")
    print("\nval_bpb      vs best  tokens_M  status   commit   description, GPU; best: of those kept before this wave")
    for row in sorted([*table.values(), *best.values()], key=lambda row: (row["gpu"], row["val_bpb"] or math.inf)):
        gain = row["val_bpb"] - best[row["gpu"]]["val_bpb"] if row["gpu"] in best and row["val_bpb"] else math.nan
        line = "{val_bpb:.6f}  {gain:+9.6f}  {tokens_M:8.1f}  {status:7}  {commit}  {description}, {gpu}"
        print(line.format(gain=gain, **row).replace("+nan", "    "))
    return 0 if complete else 130


@contextmanager
def started_ray(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Joins the cluster at args.address, or else starts Ray on this machine.

    Gives the name of this machine's GPU, and a pattern of the names that rows of a wave may have.
    """
    args.address = args.address or os.environ.get("RAY_ADDRESS")
    # Read when Ray is imported. A run that a cluster's Ray kills for its memory would be retried forever.
    os.environ.update({"RAY_task_oom_retries": "0"} | ({} if args.address else LOCAL) | os.environ)
    try:
        import ray
    except ImportError:
        raise PrepareError("this needs Ray: pip install -e '.[night]'") from None
    ask = "import torch.cuda as c\nfor i in range(c.device_count()): print(c.get_device_name(i))"
    asked = subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True)  # while Ray starts
    local = {} if args.address else dict(include_dashboard=False, object_store_memory=10**8)
    ray.init(args.address or "local", log_to_driver=False, logging_level="ERROR", **local)
    try:
        here = asked.communicate()[0].splitlines() or ["cpu"]
        yield here[0], r"((?! as )[^,])+" if args.address else "|".join(map(re.escape, here))
    finally:
        ray.shutdown()


def train_all(
    runs: list[Run], args: argparse.Namespace, pattern: str, gpu: str, report: bool = False, test: bool = False
) -> tuple[bool, list[dict]]:
    """Has Ray train those that have no row where gpu matches the pattern, and logs their rows as they end.

    Returns whether it came to the end, and all rows there are. gpu: for the row of a run that leaves none itself.
    report: REPORT follows the gpu in the rows. test: the test split is scored, too.
    """
    import ray

    if args.per_gpu > 1 and not args.tokens:
        raise PrepareError("--per-gpu takes --tokens N: runs that share a GPU slow each other down")
    dataset = prepare.dataset_id()
    todo = [run for run in runs if args.again or not any(map(run.owns, rows_on(pattern, dataset)))]
    print(f"{len(todo)} runs, {len(runs) - len(todo)} more have a row already (--again repeats them)", flush=True)
    kind = "GPU" if "GPU" in ray.cluster_resources() else "CPU"
    nodes, share = [node for node in ray.nodes() if kind in node["Resources"]], {}
    if args.address:
        nodes = with_dataset(nodes, dataset)
        share["label_selector"] = {"ray.io/node-id": f"in({','.join(node['NodeID'] for node in nodes)})"}
    cores = min(node["Resources"].get("CPU", 1) / node["Resources"].get("GPU", 1) for node in nodes) / args.per_gpu
    share["num_cpus"] = int(cores) or int(1e4 * cores) / 1e4  # Ray counts in 1e-4
    if kind == "GPU":
        share["num_gpus"] = int(1e4 / args.per_gpu) / 1e4
    # Ray gives the run of a lost node to another node once
    task = ray.remote(num_returns="streaming", max_retries=1, **share)(experiment)
    rows = b"" if report or not prepare.RESULTS.exists() else prepare.RESULTS.read_bytes()
    files = ray.put({"night.py": Path(__file__).read_bytes(), "results.tsv": rows})
    archives = {commit: ray.put(git("archive", "--format=zip", commit)) for commit in {run.commit for run in todo}}
    limit, pending = args.limit or LIMIT * args.per_gpu + max(0, (args.seconds or 0) - prepare.TIME_BUDGET), {}
    for run in todo:
        options = [f"--limit={limit}", *train_options(args, run.seed)]
        commands = [options, [*options, f"--score={run.description}"]] if test else [options]
        pending[task.remote(archives[run.commit], files, commands)] = run

    def log(run: Run, content: bytes, tail: list[str], reason: str = "no row") -> None:
        """The last row of its checkout; a crash if there is none."""
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(content)
            rows = prepare.read_results(file.name)
        row = rows[-1] if rows else dict(val_bpb=0.0, memory_gb=0.0, gpu=gpu, dataset=dataset, description=f"[{reason}")
        if row.pop("status", "crash") == "crash":
            row["reason"] = row["description"].rpartition("[")[2].rstrip("]")
        if TEST not in row["description"] or not report:
            row["description"] = run.description
        row |= {"commit": run.commit, "gpu": row["gpu"] + REPORT * report}
        name = f"{run.commit[:7]} {row['description']}  {row.get('reason', '')}"
        lines = [f"{prepare.log_result(**row):8} {row['val_bpb']:.6f}  {name}"]
        tqdm.write("\n    ".join([*lines, *tail] if "reason" in row else lines))

    stopped = []
    prepare.handle_signals(lambda *_: stopped.append(True))
    with tqdm(total=len(todo), unit="run", disable=None) as bar:
        while pending and not stopped:
            for stream in ray.wait(list(pending), timeout=0.5)[0]:
                try:
                    event = ray.get(next(stream))
                except ray.exceptions.RayError as error:
                    event = b"", [], type(getattr(error, "cause", error)).__name__
                if isinstance(event, str):
                    tqdm.write(f"start    {pending[stream]} on {event}")
                else:
                    log(pending.pop(stream), *event)
                    bar.update()
    if pending:
        print("interrupted: the same command goes on")
    for stream in pending:
        ray.cancel(stream)
    ray.wait([stream.completed() for stream in pending], num_returns=len(pending), timeout=3 * GRACE)
    return not pending, rows_on(pattern, dataset)


def with_dataset(nodes: list[dict], dataset: str) -> list[dict]:
    """Those of a cluster's nodes that have the dataset or, if it has a source, have prepared it now."""
    import ray

    folder = prepare.current_dataset()
    source = folder.name.removesuffix("@{}.{}.{}".format(*sys.version_info))  # a folder of one's own still has an @
    prepared = "" if "@" in source else f"prepare.prepare({source!r}, {(folder / 'train_shards').read_text().strip()})"
    task, good = ray.remote(num_cpus=0)(dataset_of_node), []
    given = Path(prepare.__file__).read_bytes(), f"import prepare\nprint(prepare.dataset_id({prepared}))"
    answers = [task.options(label_selector={"ray.io/node-id": node["NodeID"]}).remote(*given) for node in nodes]
    for node, answer in zip(nodes, answers, strict=True):
        try:
            found = ray.get(answer)
        except ray.exceptions.RayError as error:
            found = type(error).__name__
        if found == dataset:
            good.append(node)
        else:
            print(f"no run for {node['NodeManagerHostname']}, it does not have {dataset}: {found}", flush=True)
    if not good:
        raise PrepareError(f"no node has {dataset}")
    return good


def dataset_of_node(prepare_py: bytes, code: str) -> str:
    """Ray task: the last line that the code prints in a folder with this prepare.py."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "prepare.py").write_bytes(prepare_py)
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, stdout=-1, stderr=-2, text=True)
    return done.stdout.strip().rpartition("\n")[2]


def experiment(archive: bytes, files: dict[str, bytes], commands: list[list[str]]) -> Iterator:
    """Ray task: one run in a temporary checkout; the node needs the dependencies, but no clone.

    Yields where it runs, then its rows and the end of its log. commands: of `night.py run`, up to the first that fails.
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
        for options in commands:
            command = [sys.executable, "night.py", "run", *options]
            child = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
            try:
                child.wait(1e9)  # a wait without a timeout could not be canceled
            finally:
                child.terminate()
                child.wait()
            if child.returncode:
                break
        tail = Path(log.name).read_text(errors="replace").splitlines()[-12:]
        yield Path(folder, "results.tsv").read_bytes().removeprefix(files["results.tsv"]), tail


def git(*args: str) -> bytes:
    done = subprocess.run(["git", *args], cwd=ROOT, stdout=subprocess.PIPE)
    if done.returncode:
        raise PrepareError("git has failed")  # and said why
    return done.stdout


# -------------------------------------------------------------------------------------------------- the morning after

BUDGET = r"(?: as (\w+))?(?:, ([\d.e+]+) (M tokens|s))?"  # what prepare.budget_name puts after a GPU's name
T_95 = 4.30, 2.78, 2.45, 2.31, 2.23, 2.18, 2.14, 2.12, 2.10  # Student's t for two means of 2, 3, ... 10 runs each


def experiments() -> list[dict]:
    """The rows of results.tsv, without those of reports and without a crash whose run has a later row."""
    rows = {}
    for i, row in enumerate(prepare.read_results()):
        crashed = row["status"] == "crash"
        description = re.sub(r" ?\[[^][]*\]$", "", row["description"]) if crashed else row["description"]
        run = row["commit"], description, row["gpu"], row["dataset"]
        rows.pop(run, None)
        rows[run if crashed else i] = row
    return [row for row in rows.values() if not row["gpu"].endswith(REPORT)]


def report(args: argparse.Namespace) -> int:
    """Trains the first and the last kept revision with new seeds, scores val and test, and says what was luck."""
    seeds = range(101, 101 + (args.seeds or [3])[0])  # that no experiment has used
    dataset, budget = prepare.dataset_id(), prepare.budget_name(args.seconds, args.tokens, args.gpu)
    if len(seeds) < 2:
        raise PrepareError("--seeds takes 2 or more: one run has no standard error")
    with started_ray(args) as (_, names):
        rows = [row for row in experiments() if row["dataset"] == dataset]
        fits = f"({names}){re.escape(budget) or BUDGET}"
        labels = Counter(row["gpu"] for row in rows if re.fullmatch(fits, row["gpu"]))
        if not labels:
            raise PrepareError(f"no experiment on {dataset} with this GPU and budget: there is nothing to report")
        label = labels.most_common(1)[0][0]
        if not budget:
            args.gpu, number, unit = re.search(f"{BUDGET}$", label).groups()
            args.seconds = float(number) if unit == "s" else None
            args.tokens = round(1e6 * float(number)) if unit == "M tokens" else None
        rows = [row for row in rows if row["gpu"] == label]
        kept = [row for row in rows if row["status"] == "keep"]
        crashes = sum(row["status"] == "crash" for row in rows)
        title = f"{label}, {dataset}: {len(rows)} experiments, {len(kept)} kept, {crashes} crashed."
        print(title)
        if not kept or kept[0]["commit"] == kept[-1]["commit"]:
            print("Fewer than two revisions were kept: there is no gain to report.")
            return 0
        test = True
        try:
            prepare.TokenStream(prepare.Tokenizer.from_directory(), "test")
        except PrepareError as error:
            test = False
            print(f"The report is on val alone: {error}")
        runs = [Run(row["commit"], f"report: seed {seed}", seed) for seed in seeds for row in (kept[0], kept[-1])]
        complete, rows = train_all(runs, args, re.escape(label + REPORT), label, report=True, test=test)
    if not complete:
        return 130
    last = {str(run): row for row in rows for run in runs if run.owns(row)}  # of each run
    text = gains(kept[0], kept[-1], list(last.values()))
    print(f"\n{text}")
    prepare.RESULTS.with_name("report.md").write_text(f"{title}\n\n{text}\n\n![](progress.png)\n", "utf-8")
    return plot()


def gains(first: dict, last: dict, rows: list[dict]) -> str:
    """What the last kept row gains over the first, as logged and in the rows of a report; and what of that was luck."""
    logged, left = first["val_bpb"] - last["val_bpb"], []
    lines = ["| bits per byte | first kept | last kept | gain | standard error |", "| --- | --- | --- | --- | --- |"]
    lines.append(f"| val, as logged | {first['val_bpb']:.4f} | {last['val_bpb']:.4f} | {logged:.4f} | |")
    for split, place in (("val", "on new seeds"), ("test", "on text that no experiment has seen")):
        scores: dict[str, list[float]] = {first["commit"]: [], last["commit"]: []}
        for row in rows:
            score = row["val_bpb"] if split == "val" else float(row["description"].partition(TEST)[2] or 0)
            scores[row["commit"]] += [score] if score else []  # a crash has none
        n = min(map(len, scores.values()))
        if n >= 2:
            before, after = map(statistics.mean, scores.values())
            gain, error = before - after, math.sqrt(sum(statistics.variance(s) / len(s) for s in scores.values()))
            lines.append(f"| {split}, mean of {n} seeds | {before:.4f} | {after:.4f} | {gain:.4f} | {error:.4f} |")
            left.append(f"{gain:.4f} +- {error:.4f} {place}")
            stands = gain > T_95[min(n, 10) - 2] * error
    if not left:
        raise PrepareError("fewer than two runs of a revision have ended well: see their rows; --again repeats them")
    of_this = f"of the {logged:.4f} gained as logged: {' and '.join(left)}"
    luck = f"The rest, {logged - gain:.4f}, was luck." if logged > gain else "None of it was luck."
    verdict = f"What stands {of_this}. {luck}"
    if not stands:
        verdict = f"The night found nothing that stands. What is left {of_this}, no more than chance gives."
    return "\n".join([*lines, "", verdict])


def score(description: str, gpu: str | None) -> None:
    """Scores the test split with the weights that train.py has saved here, and logs its row again with that score."""
    import train

    device, numerics = prepare.pick_gpu(gpu)
    model = prepare.load_weights(train.build_model, device, numerics.capability)
    shape = model.config.device_batch_size, model.config.seq_len
    bpb = prepare.evaluate_bpb(model, prepare.Tokenizer.from_directory(), *shape, split="test")
    row = prepare.read_results()[-1]
    del row["status"]
    prepare.log_result(**row | {"description": f"{description}{TEST}{bpb:.6f}"})


def plot() -> None:
    """Draws progress.png: for each gpu and dataset a chart of all experiments and a table of the kept ones."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PrepareError("the picture needs Matplotlib: pip install -e '.[plot]'") from None
    panels: dict[tuple[str, str], list[dict]] = {}
    for row in experiments():
        panels.setdefault((row["gpu"], row["dataset"]), []).append(row)
    panels = {where: rows for where, rows in panels.items() if any(row["val_bpb"] for row in rows)}
    if not panels:
        raise PrepareError(f"{prepare.RESULTS} holds no val_bpb yet: run `python train.py` first")
    tables = [kept_table(rows) for rows in panels.values()]
    height = sum(4.3 + 0.16 * table.count("\n") for table in tables)
    figure = Figure((9, height), layout="constrained", facecolor="white")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for ax, (where, rows), table in zip(axes, panels.items(), tables, strict=True):
        draw(ax, *where, rows)
        below = dict(xytext=(0, -40), textcoords="offset points", va="top", parse_math=False)
        ax.annotate(table, (0, 0), xycoords="axes fraction", family="monospace", size=8.5, **below)
    with prepare.new_file(prepare.RESULTS.with_name("progress.png")) as file:
        figure.savefig(file, format="png", dpi=180)


def kept_table(rows: list[dict]) -> str:
    lines, before = ["  no.  val_bpb     gain  kept"], math.nan
    for number, row in enumerate(rows, start=1):
        if row["status"] == "keep":
            gain = f"{before - row['val_bpb']:.4f}".replace("nan", "")
            line = f"{number:5}  {row['val_bpb']:7.4f}  {gain:>7}  {row['description']}"
            lines += textwrap.wrap(line, 108, subsequent_indent=25 * " ")
            before = row["val_bpb"]
    return "\n".join(lines)


def draw(ax, gpu: str, dataset: str, rows: list[dict]) -> None:
    """One chart. Crashes lie on the lower edge, and results far worse than most on the upper edge."""
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
    if noise := seed_noise(gpu, dataset):
        band = dict(color="#1a7f37", alpha=0.12, linewidth=0, label="best +- 2 s.d. of a seed")
        ax.axhspan(y[kept].min() - 2 * noise, y[kept].min() + 2 * noise, **band)
    ax.set(ylim=(bottom, top), xlabel="experiment", ylabel="val_bpb")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.ticklabel_format(useOffset=False)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.2)
    change = f"{first:.4f} to {best:.4f} ({best - first:+.4f})" if best < first else f"{best:.4f}"
    ax.set_title(f"{gpu}, {dataset}\nval_bpb {change}", loc="left", size=10, parse_math=False)
    spacing = dict(handletextpad=0.2, columnspacing=1, borderaxespad=0.2)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=9, **spacing)


def seed_noise(gpu: str, dataset: str) -> float:
    """Standard deviation of val_bpb from seed to seed, pooled over the revisions of a report; 0 without a report."""
    scores: dict[str, list[float]] = {}
    for row in rows_on(re.escape(gpu + REPORT), dataset):
        if row["status"] != "crash":
            scores.setdefault(row["commit"], []).append(row["val_bpb"])
    squares = sum(len(group) * statistics.pvariance(group) for group in scores.values())
    return math.sqrt(squares / max(1, sum(len(group) - 1 for group in scores.values())))


# ---------------------------------------------------------------------------------------------------------------- main


def train_options(args: argparse.Namespace, seed: int | None) -> list[str]:
    given = {"seconds": args.seconds, "tokens": args.tokens, "gpu": args.gpu, "seed": seed}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def main() -> int | None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("command", choices=("run", "wave", "report", "plot"))
    parser.add_argument("revisions", nargs="*", metavar="REV", help="git revisions of a wave (HEAD)")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--seconds", type=float, help="of training, instead of five minutes")
    budget.add_argument("--tokens", type=int, help="to train on, instead of five minutes")
    parser.add_argument("--gpu", metavar="NAME", help="take another GPU's numerics and size")
    parser.add_argument("--seed", type=int, help="of a run")
    numbers = dict(type=lambda text: [int(number) for number in text.split(",")], metavar="N")
    parser.add_argument("--seeds", **numbers, help="of a wave, such as 1,2,3; of a report, how many (3)")
    parser.add_argument("--per-gpu", type=int, default=1, metavar="K", help="K runs at once on a GPU; takes --tokens")
    parser.add_argument("--again", action="store_true", help="repeat what has a row")
    parser.add_argument("--limit", type=float, help=f"kill a run after so many seconds ({LIMIT} times K)")
    parser.add_argument("--address", help="of a Ray cluster (default: $RAY_ADDRESS, else this machine alone)")
    parser.add_argument("--score", help=argparse.SUPPRESS)  # a report's run of this description: score the test split
    args = parser.parse_intermixed_args()
    if args.revisions and args.command != "wave":
        parser.error(f"{args.command} takes no {args.revisions[0]}")
    if args.seeds if args.command == "run" else args.seed is not None:
        parser.error("--seed is for a run, --seeds for a wave or a report")
    if args.command == "run":
        budget = prepare.budget_name(args.seconds, args.tokens, args.gpu)
        score = ["-c", f"import night; night.score({args.score!r}, {args.gpu!r})"]
        command = score if args.score else ["train.py", *train_options(args, args.seed)]
        return run(command, args.limit or LIMIT, budget, logged=not budget or IN_A_WAVE in os.environ)
    return {"wave": wave, "report": report, "plot": lambda _: plot()}[args.command](args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PrepareError as error:
        sys.exit(f"night.py: {error}")
