"""
Many experiments: one run under supervision, waves of runs on every GPU of a machine or a Ray cluster, and the morning
after: a report and a picture.

    python night.py run [--seed N] [--gpu ...]   # one experiment here; it leaves a row, however it ends
    python night.py wave REV ... [--seeds 1,2]   # each git revision's train.py on a GPU of its own, all at once
    python night.py report                       # how much of the night's gain was luck?
    python night.py plot                         # draws results.tsv as progress.png

`wave` and `report` need Ray (pip install -e '.[night]'), `plot` needs Matplotlib ('.[plot]'), `run` needs neither.
"""

import argparse
import ctypes
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
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
def run(args: argparse.Namespace) -> int:
    """Runs train.py until it ends or its time is up; returns its exit status.

    If it leaves no row, it gets a crash row, unless its budget was set by hand.
    This process may be killed at any time: a child in a session of its own guards train.py and leaves nothing of it.
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
    prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: processes that train.py leaves behind become children of this one
    prctl(1, signal.SIGTERM)  # when the process in front is killed
    head, dataset = prepare.git_head(), prepare.dataset_id()
    before = len(rows_of(head[0]))
    os.environ["AUTORESEARCH_HEAD"] = "\t".join(head)  # of every row from here on, train.py's too
    stderr, reasons = deque(maxlen=100), []  # last lines of the script; why it was ended, if it was
    score = ["-c", f"import night; night.score({args.gpu!r})"]
    command = [sys.executable, *(score if args.score else ["train.py", *train_options(args, args.seed)])]
    options = dict(cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    script = subprocess.Popen(command, **options, preexec_fn=lambda: prctl(1, signal.SIGKILL))  # dies with this process

    def stop(number: int, _=None) -> None:
        prepare.handle_signals(signal.SIG_IGN)
        late = f"no evaluation within {args.limit / 60:g} min"
        reasons.append({signal.SIGINT: "interrupted", signal.SIGTERM: "killed", signal.SIGALRM: late}[number])
        script.send_signal(signal.SIGKILL if number == signal.SIGALRM else number)
        signal.setitimer(signal.ITIMER_REAL, GRACE)

    def read_stderr() -> None:
        for line in script.stderr:
            stderr.append(line.decode(errors="replace"))
            with suppress(OSError):  # a full disk: go on reading, or the script would wait for this pipe
                os.write(2, line)

    prepare.handle_signals(stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, args.limit)
    if os.getppid() != front:
        stop(signal.SIGTERM)
    reader = threading.Thread(target=read_stderr)
    reader.start()
    code = script.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    while pids := Path("/proc/thread-self/children").read_text().split():
        for pid in map(int, pids):  # whose children are ours next
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    reader.join()
    logged = not args.budget or IN_A_WAVE in os.environ
    if logged and len(rows_of(head[0])) <= before:
        reason = [*reasons, why(code, "".join(stderr))][0]
        row = dict(gpu=prepare.gpu_name() + args.budget, dataset=dataset, reason=reason)
        prepare.log_result(val_bpb=0.0, memory_gb=0.0, **row)
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


def name_of(row: dict) -> tuple[str, str]:
    """Commit and description of the row's run: without the reason of a crash, and the test score of a report."""
    description = row["description"]
    if row["status"] == "crash":
        description = description.rpartition("[")[0].rstrip()
    return row["commit"], description.partition(TEST)[0] if row["gpu"].endswith(REPORT) else description


def rows_of(commit: str) -> list[dict]:
    return [row for row in prepare.read_results() if row["commit"] == commit]


def rows_on(gpu: str, dataset: str) -> list[dict]:
    """The rows on a dataset, and on a gpu that matches a pattern."""
    return [row for row in prepare.read_results() if row["dataset"] == dataset and re.fullmatch(gpu, row["gpu"])]


def wave(args: argparse.Namespace) -> None:
    """Trains every revision with every seed that has no row yet; prints a table."""
    runs = {}
    log = git("log", "--no-walk=unsorted", "--no-show-signature", "--format=%H %s", *args.revisions, "--")
    for line in log.decode(errors="replace").rstrip("\n").split("\n"):
        commit, _, subject = line.partition(" ")
        for seed in args.seeds or [None]:
            runs[commit[:7], prepare.clean(subject if seed is None else f"{subject}, seed {seed}")] = seed
    gpu, pattern = start_ray(args)
    rows = train_all(runs, args, gpu, pattern)
    kept = [row for row in rows_on(pattern, prepare.dataset_id()) if row["status"] == "keep" and row not in rows]
    best = {row["gpu"]: row for row in sorted(kept, key=lambda row: -row["val_bpb"])}
    if len({row["gpu"] for row in rows}) > 1:
        print("UNLIKE GPUS: a row compares with those of its own GPU only")
    print("\nval_bpb      vs best  tokens_M  status   commit   description, GPU; best: of those kept before this wave")
    for row in sorted([*rows, *best.values()], key=lambda row: (row["gpu"], row["val_bpb"] or math.inf)):
        compared = row["gpu"] in best and row["val_bpb"]
        gain = f"{row['val_bpb'] - best[row['gpu']]['val_bpb']:+.6f}" if compared else ""
        line = "{val_bpb:.6f}  {gain:9}  {tokens_M:8.1f}  {status:7}  {commit}  {description}, {gpu}"
        print(line.format(gain=gain, **row))


def start_ray(args: argparse.Namespace) -> tuple[str, str]:
    """Joins the cluster at args.address, or else starts Ray on this machine, until this process ends.

    Returns what the gpu column says of this machine's first GPU, and a pattern of what it may say in a wave.
    """
    args.alone = open(prepare.RESULTS.with_name("results.tsv.wave"), "ab")  # locked until this process ends
    if not prepare.lock(args.alone, patience=1):
        raise PrepareError("another wave or report of this clone is at work: wait for it, or end it first")
    if "AUTORESEARCH_CACHE" in os.environ:
        os.environ["AUTORESEARCH_CACHE"] = str(prepare.cache_dir().resolve())  # a run has a working folder of its own
    # Read when Ray is imported. A run that a cluster's Ray kills for its memory would be retried forever.
    os.environ.update(({"RAY_task_oom_retries": "0"} if args.address else LOCAL) | os.environ)
    try:
        import ray
    except ImportError:
        raise PrepareError("this needs Ray: pip install -e '.[night]'") from None
    ask = "import torch.cuda as c\nfor i in range(c.device_count()): print(c.get_device_name(i))"
    asked = subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True)  # while Ray starts
    local = {} if args.address else dict(include_dashboard=False, object_store_memory=10**8)
    ray.init(args.address or "local", log_to_driver=False, logging_level="ERROR", **local)
    here = asked.communicate()[0].splitlines() or ["cpu"]
    names = r"((?! as )[^,])+" if args.address else "|".join(map(re.escape, here))
    return here[0] + args.budget, f"({names}){re.escape(args.budget)}"


def train_all(runs: dict, args: argparse.Namespace, gpu: str, pattern: str, suffix="") -> list[dict]:
    """Has Ray train those that have no row where gpu matches the pattern, and logs their rows as they end.

    runs: seeds by commit and description. gpu: for the row of a run that leaves none. suffix: of the gpu in the rows.
    Returns the last row of each. If interrupted, it ends all runs and this process.
    """
    import ray

    dataset = prepare.dataset_id()
    rows = [] if args.again else rows_on(pattern, dataset)
    done = [name_of(row) for row in rows if not args.score or TEST in row["description"] or row["status"] == "crash"]
    todo = [run for run in runs if run not in done]
    print(f"{len(todo)} runs, {len(runs) - len(todo)} more have a row already (--again repeats them)")
    kind = "GPU" if "GPU" in ray.cluster_resources() else "CPU"
    nodes = [node for node in ray.nodes() if kind in node["Resources"]]
    if args.address:
        nodes = with_dataset(nodes, dataset)
    cores = min(node["Resources"].get("CPU", 1) / node["Resources"].get("GPU", 1) for node in nodes)
    task = ray.remote(
        num_returns="streaming",
        num_cpus=int(1e4 * cores / args.per_gpu) / 1e4,  # Ray counts in 1e-4
        num_gpus=int(1e4 / args.per_gpu) / 1e4 if kind == "GPU" else 0,
        label_selector={"ray.io/node-id": f"in({','.join(node['NodeID'] for node in nodes)})"},
        max_retries=1,  # the run of a lost node goes to another node once
    )(experiment)
    files = ray.put({"night.py": Path(__file__).read_bytes()})
    archives = {commit: ray.put(git("archive", commit)) for commit, _ in todo}
    pending = {}
    for run in todo:
        command = ["night.py", "run", f"--limit={args.limit}", *train_options(args, runs[run])]
        commands = [command, [*command, "--score"]] if args.score else [command]
        pending[task.remote(archives[run[0]], files, commands)] = run

    def log(run: tuple[str, str], rows: bytes, tail: list[str], reason: str = "no row") -> None:
        row = dict(val_bpb=0.0, memory_gb=0.0, status="crash", description=f"[{reason}]", gpu=gpu, dataset=dataset)
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(rows)
            left = [row, *prepare.read_results(file.name)]
        row = max(reversed(left), key=lambda row: row["status"] != "crash")  # a score that fails leaves val_bpb
        crashed, end = row.pop("status") == "crash", row["description"]
        row["reason"] = end.rpartition("[")[2].rstrip("]") if crashed else ""
        row |= dict(commit=run[0], description=run[1] + "".join(end.partition(TEST)[1:]), gpu=row["gpu"] + suffix)
        line = f"{prepare.log_result(**row):8} {row['val_bpb']:.6f}  {' '.join(run)}  {row['reason']}"
        tqdm.write("\n    ".join([line, *tail] if crashed else [line]))

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
                    tqdm.write(f"start    {' '.join(pending[stream])} on {event}")
                else:
                    log(pending.pop(stream), *event)
                    bar.update()
    if pending:
        print("interrupted: the same command goes on")
        for stream in pending:
            ray.cancel(stream)
        ray.wait([stream.completed() for stream in pending], num_returns=len(pending), timeout=3 * GRACE)
        sys.exit(130)
    last = {name_of(row): row for row in rows_on(pattern, dataset)}
    return [last[run] for run in runs if run in last]


def with_dataset(nodes: list[dict], dataset: str) -> list[dict]:
    """Those of a cluster's nodes that have the dataset or, if it has a source, have prepared it now."""
    import ray

    folder = prepare.current_dataset()
    source = folder.name.partition("@")[0]
    known = folder.name in (*prepare.HUB, prepare.local_files("embedded")[0])  # else it is a folder of one's own
    call = f"prepare.prepare({source!r}, {(folder / 'train_shards').read_text().strip()})" if known else ""
    command = ["-c", f"import prepare; print(prepare.dataset_id({call}))"]
    given = git("archive", "HEAD"), {"prepare.py": Path(prepare.__file__).read_bytes()}, [command]
    task, good = ray.remote(num_returns="streaming", num_cpus=0)(experiment), []
    answers = [task.options(label_selector={"ray.io/node-id": node["NodeID"]}).remote(*given) for node in nodes]
    for node, answer in zip(nodes, answers, strict=True):
        try:
            _, (_, log) = map(ray.get, answer)
            found = log[-1] if log else "nothing"
        except ray.exceptions.RayError as error:
            found = type(error).__name__
        if found == dataset:
            good.append(node)
        else:
            print(f"no run for {node['NodeManagerHostname']}, it does not have {dataset}: {found}")
    if not good:
        raise PrepareError(f"no node has {dataset}")
    return good


def experiment(archive: bytes, files: dict[str, bytes], commands: list[list[str]]) -> Iterator:
    """Ray task: one run in a temporary checkout; the node needs the dependencies, but no clone.

    Yields where it runs, then its rows and the end of its log. files: instead of those in the archive.
    commands: of Python, up to the first that fails. Only the second one, a score, needs the weights of the first.
    """
    import ray

    cores = max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
    env = os.environ | {IN_A_WAVE: "1" if commands[1:] else "no weights"}
    env["AUTORESEARCH_HEAD"] = "0000000\t"  # this checkout has no history for git to look at
    env["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(32, cores))  # Inductor's limit
    if env.get("OMP_NUM_THREADS") == str(cores) == str(len(os.sched_getaffinity(0))):
        del env["OMP_NUM_THREADS"]  # Ray has set it, but a run that has all cores chooses as it does without Ray
    yield " GPU ".join([os.uname().nodename, *map(str, ray.get_gpu_ids())])
    with tempfile.TemporaryDirectory(prefix="night-") as folder, open(f"{folder}/run.log", "w") as log:
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        Path(folder, "results.tsv").write_bytes(b"")  # the archive's rows are not this run's
        for command in commands:
            child = subprocess.Popen([sys.executable, *command], cwd=folder, env=env, stdout=log, stderr=log)
            try:
                child.wait(1e9)  # a wait without a timeout could not be canceled
            finally:
                child.terminate()
                child.wait()
            if child.returncode:
                break
        tail = Path(log.name).read_text(errors="replace").splitlines()[-12:]
        yield Path(folder, "results.tsv").read_bytes(), tail


def git(*args: str) -> bytes:
    return subprocess.check_output(["git", *args], cwd=ROOT)


# -------------------------------------------------------------------------------------------------- the morning after
T_95 = 4.30, 2.78, 2.45, 2.31, 2.23, 2.18, 2.14, 2.12, 2.10  # Student's t for two means of 2, 3, ... 10 runs each


def experiments() -> list[dict]:
    """The rows of results.tsv, without those of reports and without a crash whose run has a later row."""
    rows = [row for row in prepare.read_results() if not row["gpu"].endswith(REPORT)]
    last = {(*name_of(row), row["gpu"], row["dataset"]): i for i, row in enumerate(rows)}
    return [row for i, row in enumerate(rows) if row["status"] != "crash" or i in last.values()]


def report(args: argparse.Namespace) -> None:
    """Trains the first and the last kept revision with new seeds, scores val and test, and says what was luck."""
    seeds = range(101, 101 + (args.seeds or [3])[0])  # that no experiment has used
    if len(seeds) < 2:
        raise PrepareError("--seeds takes 2 or more: one run has no standard error")
    dataset, (_, pattern) = prepare.dataset_id(), start_ray(args)
    rows = [row for row in experiments() if row["dataset"] == dataset and re.fullmatch(pattern, row["gpu"])]
    if not rows:
        raise PrepareError(f"no experiment on {dataset} with this GPU and budget: there is nothing to report")
    gpu = statistics.mode(row["gpu"] for row in rows)
    rows = [row for row in rows if row["gpu"] == gpu]
    kept = [row for row in rows if row["status"] == "keep"]
    status = [row["status"] for row in rows]
    title = f"{gpu}, {dataset}: {len(rows)} experiments, {len(kept)} kept, {status.count('crash')} crashed."
    print(title)
    if not kept or kept[0]["commit"] == kept[-1]["commit"]:
        text = "Fewer than two revisions were kept: there is no gain to report."
    else:
        args.score = True
        runs = {(row["commit"], f"report: seed {seed}"): seed for seed in seeds for row in (kept[0], kept[-1])}
        text = gains(kept[0], kept[-1], train_all(runs, args, gpu, re.escape(gpu + REPORT), REPORT))
    print(f"\n{text}")
    prepare.RESULTS.with_name("report.md").write_text(f"{title}\n\n{text}\n\n![](progress.png)\n", "utf-8")
    plot()


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
    left = f"of the {logged:.4f} gained as logged: {' and '.join(left)}"
    verdict = f"What stands {left}. The rest, {max(0.0, logged - gain):.4f}, was luck."
    if not stands:
        verdict = f"The night found nothing that stands. What is left {left}, no more than chance gives."
    return "\n".join([*lines, "", verdict])


def score(gpu: str | None) -> None:
    """Scores the test split with the weights that train.py has saved here, and logs its row again with that score."""
    import train

    device, numerics = prepare.pick_gpu(gpu)
    model = prepare.load_weights(train.build_model, device, numerics.capability)
    shape = model.config.device_batch_size, model.config.seq_len
    bpb = prepare.evaluate_bpb(model, prepare.Tokenizer.from_directory(), *shape, split="test")
    row = prepare.read_results()[-1]
    del row["status"]
    prepare.log_result(**row | {"description": f"{row['description']}{TEST}{bpb:.6f}"})


def plot(_=None) -> None:
    """Draws progress.png: for each gpu and dataset a chart of all experiments and a table of the kept ones."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PrepareError("the picture needs Matplotlib: pip install -e '.[plot]'") from None
    rows = experiments()
    places = dict.fromkeys((row["gpu"], row["dataset"]) for row in rows if row["val_bpb"])
    if not places:
        raise PrepareError(f"{prepare.RESULTS} holds no val_bpb yet: run `python train.py` first")
    figure, lines = Figure(layout="constrained"), 0
    for place, ax in zip(places, figure.subplots(len(places), squeeze=False)[:, 0], strict=True):
        lines += draw(ax, *place, [row for row in rows if (row["gpu"], row["dataset"]) == place])
    figure.set_size_inches(9, 4.3 * len(places) + 0.16 * lines)
    figure.savefig(prepare.RESULTS.with_name("progress.png"), dpi=180)


def draw(ax, gpu: str, dataset: str, rows: list[dict]) -> int:
    """One chart, crashes on its lower edge and far outliers on its upper one; returns the lines of the table below."""
    x, y = np.arange(1, len(rows) + 1), np.array([row["val_bpb"] for row in rows])
    status = np.array([row["status"] for row in rows])
    scores = y[status != "crash"]
    first, best = scores[0], scores.min()
    worst = max(first, min(scores.max(), best + 2.5 * np.median(scores - best)))
    margin = max(0.1 * (worst - best), 0.003 * best)
    y = np.where(status == "crash", best - margin, np.minimum(y, worst + margin))
    for kind, color, marker in (("discard", "#8c959f", "."), ("keep", "#1a7f37", "o"), ("crash", "#cf222e", "x")):
        chosen = status == kind
        ax.scatter(x[chosen], y[chosen], s=25, c=color, marker=marker, label=f"{chosen.sum()} {kind}", clip_on=False)
    lowest = np.minimum.accumulate(np.where(status == "keep", y, np.inf))
    ax.step(x, lowest, where="post", color="#1a7f37", alpha=0.5)
    if noise := seed_noise(gpu, dataset):
        band = lowest[-1] - 2 * noise, lowest[-1] + 2 * noise
        ax.axhspan(*band, color="#1a7f37", alpha=0.12, label="best +- 2 s.d. of a seed")
    ax.set(ylim=(best - margin, worst + margin), xlabel="experiment", ylabel="val_bpb")
    ax.ticklabel_format(useOffset=False)
    change = f"{first:.4f} to {best:.4f}" if best < first else f"{best:.4f}"
    ax.set_title(f"{gpu}, {dataset}\nval_bpb {change}", loc="left", size=10, parse_math=False)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8, columnspacing=1)

    table, before = ["  no.  val_bpb     gain  kept"], None
    for number, row in enumerate(rows, start=1):
        if row["status"] == "keep":
            gain = f"{before - row['val_bpb']:.4f}" if before else ""
            line = f"{number:5}  {row['val_bpb']:7.4f}  {gain:>7}  {row['description']}"
            table += textwrap.wrap(line, 108, subsequent_indent=25 * " ")
            before = row["val_bpb"]
    below = dict(xycoords="axes fraction", xytext=(0, -40), textcoords="offset points", va="top")
    ax.annotate("\n".join(table), (0, 0), **below, family="monospace", size=8.5, parse_math=False)
    return len(table)


def seed_noise(gpu: str, dataset: str) -> float:
    """Standard deviation of val_bpb from seed to seed, by the runs of a report; 0 without a report."""
    rows = [row for row in rows_on(re.escape(gpu + REPORT), dataset) if row["status"] != "crash"]
    groups = [[row["val_bpb"] for row in rows if row["commit"] == commit] for commit in {row["commit"] for row in rows}]
    variances = [statistics.variance(group) for group in groups if len(group) > 1]
    return math.sqrt(statistics.mean(variances)) if variances else 0.0


# ---------------------------------------------------------------------------------------------------------------- main
def train_options(args: argparse.Namespace, seed: int | None) -> list[str]:
    given = {"seconds": args.seconds, "tokens": args.tokens, "gpu": args.gpu, "seed": seed}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def main() -> int | None:
    sys.stdout.reconfigure(line_buffering=True)  # a log shows the rows as they come
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("command", choices=("run", "wave", "report", "plot"))
    parser.add_argument("revisions", nargs="*", metavar="REV", help="git revisions of a wave (HEAD)")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--seconds", type=float, help="of training, instead of five minutes")
    budget.add_argument("--tokens", type=int, help="to train on, instead of five minutes")
    parser.add_argument("--gpu", metavar="NAME", help="take another GPU's numerics and size")
    parser.add_argument("--seed", type=int, help="seed of a run")
    numbers = dict(type=lambda text: [int(number) for number in text.split(",")], metavar="N")
    parser.add_argument("--seeds", **numbers, help="of a wave, such as 1,2,3; of a report, how many (3)")
    parser.add_argument("--per-gpu", type=int, default=1, metavar="K", help="K runs at once on a GPU; needs --tokens")
    parser.add_argument("--again", action="store_true", help="repeat runs that have a row already")
    parser.add_argument("--limit", type=float, help=f"kill a run after so many seconds ({LIMIT} times K)")
    cluster = dict(default=os.environ.get("RAY_ADDRESS"), help="of Ray ($RAY_ADDRESS, else this machine alone)")
    parser.add_argument("--address", **cluster)
    parser.add_argument("--score", action="store_true", help=argparse.SUPPRESS)  # of a report: score the test split
    args = parser.parse_intermixed_args()
    if args.revisions and args.command != "wave":
        parser.error(f"{args.command} takes no {args.revisions[0]}")
    if args.seeds if args.command == "run" else args.seed is not None:
        parser.error("--seed is for a run, --seeds for a wave or a report")
    if args.per_gpu < 1 or (args.per_gpu > 1 and not args.tokens):
        parser.error("--per-gpu needs --tokens, and a number above 0: runs that share a GPU slow each other down")
    args.limit = args.limit or LIMIT * args.per_gpu + max(0, (args.seconds or 0) - prepare.TIME_BUDGET)
    args.budget = prepare.budget_name(args.seconds, args.tokens, args.gpu)
    return {"run": run, "wave": wave, "report": report, "plot": plot}[args.command](args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PrepareError, FileNotFoundError, subprocess.CalledProcessError) as error:  # no file: no git
        sys.exit(f"night.py: {error}")
    except KeyboardInterrupt:
        sys.exit("night.py: interrupted")
