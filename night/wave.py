"""Waves: each git revision's train.py on a GPU of its own, all at once, on this machine or on a Ray cluster."""

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

import harness
import prepare
from night.rows import TEST, name_of, rows_on
from night.run import GRACE, IN_A_WAVE, ROOT, train_options
from prepare import PrepareError

# Ray on this machine alone: on loopback ("cluster" is what it takes for other machines), closed to other users, and
# neither reporting home nor killing what takes memory nor starting a process for each core in advance; and its workers
# as nice as others, not at 15, where a busy machine starves them.
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
LOCAL |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}


def wave(args: argparse.Namespace) -> None:
    """Trains every revision with every seed that has no row yet; prints a table."""
    runs = {}
    log = git("log", "--no-walk=unsorted", "--no-show-signature", "--format=%H %s", *args.revisions, "--")
    for line in log.decode(errors="replace").rstrip("\n").split("\n"):
        commit, _, subject = line.partition(" ")
        for seed in args.seeds or [None]:
            runs[commit[:7], harness.clean(subject if seed is None else f"{subject}, seed {seed}")] = seed
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
    args.alone = open(harness.RESULTS.with_name("results.tsv.wave"), "ab")  # locked until this process ends
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
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the nodes of a cluster have no clone
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
    files = ray.put({f"night/{path.name}": path.read_bytes() for path in Path(__file__).parent.glob("*.py")})
    archives = {commit: ray.put(git("archive", commit)) for commit, _ in todo}
    pending = {}
    for run in todo:
        command = ["-m", "night", "run", f"--limit={args.limit}", *train_options(args, runs[run])]
        commands = [command, [*command, "--score"]] if args.score else [command]
        pending[task.remote(archives[run[0]], files, commands)] = run

    def log(run: tuple[str, str], rows: bytes, tail: list[str], reason: str = "no row") -> None:
        row = dict(val_bpb=0.0, memory_gb=0.0, status="crash", description=f"[{reason}]", gpu=gpu, dataset=dataset)
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(rows)
            left = [row, *harness.read_results(file.name)]
        row = max(reversed(left), key=lambda row: row["status"] != "crash")  # a score that fails leaves val_bpb
        crashed, end = row.pop("status") == "crash", row["description"]
        row["reason"] = end.rpartition("[")[2].rstrip("]") if crashed else ""
        row |= dict(commit=run[0], description=run[1] + "".join(end.partition(TEST)[1:]), gpu=row["gpu"] + suffix)
        line = f"{harness.log_result(**row):8} {row['val_bpb']:.6f}  {' '.join(run)}  {row['reason']}"
        tqdm.write("\n    ".join([line, *tail] if crashed else [line]))

    stopped = []
    harness.handle_signals(lambda *_: stopped.append(True))
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
    known = source in (*prepare.HUB, "embedded")  # else it is a folder of one's own
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
            Path(folder, name).parent.mkdir(exist_ok=True)
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
