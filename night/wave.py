"""Waves: trains git revisions side by side, each on its own GPU of this machine or of a Ray cluster."""

import argparse
import atexit
import functools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import harness
import prepare
from harness import Description
from night.clean import OWNER, SCRATCH, scratch_folder
from night.commits import archive, doubts
from night.live import Board, wave_lock
from night.records import end_record, folder_name, new_folder
from night.rows import (
    ROOT,
    Kind,
    Label,
    decide,
    discard_by_mean,
    good,
    grouped,
    in_history,
    name_of,
    reference,
    revisions,
    scores,
    with_error,
)
from night.run import PATIENCE, train_options
from prepare import PrepareError

# Ray on this machine only: binds to loopback (the CLUSTER variable would open it to other machines), keeps other users
# out, sends no usage statistics, does not kill workers for their memory, does not start one per core in advance, and
# leaves them at niceness 0, since at Ray's 15 a busy machine starves them.
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
LOCAL |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}

LOST = ("WorkerCrashedError", "NodeDiedError")  # Ray's errors when a run goes with its node or worker
NEWS = 3  # seconds between two looks at a run's record
ANSWER = 30  # seconds for a Ray cluster to answer, of which a slow disk takes some to load Ray
LOG_END = 2**15  # bytes at the end of a run's output to take its last lines from

# Runs in a separate process, so that this one takes no GPU memory
GPU_NAMES = """
import sys, torch, harness
for i in range(torch.cuda.device_count()): torch.cuda.set_device(i); print(harness.gpu_name(sys.argv[1]))
"""


class Run(NamedTuple):
    """One run of a wave. Commit and description identify it in results.tsv."""

    commit: str
    description: str
    seed: int


def wave(args: argparse.Namespace) -> None:
    """Trains every revision and the reference with every seed that has no row yet; prints a table."""
    ideas = revisions(args.revisions)
    trainer = Trainer(args, start_ray(args))
    (base,) = revisions([reference(trainer.kind)])
    for doubt in doubts([commit for commit, _ in ideas]):
        print(doubt)
    runs = [run_of(*revision, seed) for revision in [base, *ideas] for seed in args.seeds]
    print(f"\n{table(trainer.train(runs, base), base[0])}")


def run_of(commit: str, subject: str, seed: int = harness.SEED) -> Run:
    return Run(commit, harness.clean(Description(subject, seed)), seed)


def table(rows: list[dict], base: str) -> str:
    """One line per revision and GPU: val_bpb and the difference from the reference with the same seeds on the same GPU.
    Both are means over seeds, with standard errors if there are several."""
    groups, lines = grouped(rows, lambda row: (row["gpu"], row["commit"])), []
    for (gpu, commit), group in groups.items():
        own, other = scores(group), scores(groups.get((gpu, base), []))
        change = with_error([own[seed] - other[seed] for seed in own if seed in other], "+.6f", ".5f")
        change = "reference" if commit == base else change
        bpb = with_error(own.values(), ".6f", ".5f") or "0.000000"
        status = "+".join(sorted({row["status"] for row in group}))
        tokens = max(row["tokens_M"] for row in group)
        text = group[-1]["description"]
        if len(group) > 1:
            text = f"{Description.parse(group[-1]).subject}, {len(own)} seeds"
        line = f"{bpb:18}  {change:19}  {tokens:8.1f}  {status:7}  {commit}  {text}, {gpu}"
        lines.append((gpu, not own, line))
    head = f"{'val_bpb':18}  {'vs reference':19}  tokens_M  status   commit   description, GPU"
    if len({gpu for gpu, _ in groups}) > 1:
        head = f"DIFFERENT GPUS: compare rows of the same GPU only\n{head}"
    return "\n".join([head, *(line for *_, line in sorted(lines))])


def start_ray(args: argparse.Namespace) -> Kind:
    """Joins the cluster at args.address, else starts Ray on this machine, until this process ends.

    Returns the kind of row that runs get here. Raises PrepareError if another wave is at work or the log cannot take
    rows.
    """
    args.alone = open(wave_lock(), "ab")  # locked until this process ends
    if not prepare.lock(args.alone, patience=1):
        raise PrepareError("another wave, tune, loop or report of this clone is running: wait for it, or end it first")
    if prepare.read(harness.RESULTS).split("\n")[0].rstrip() not in ("", harness.HEADER):
        raise PrepareError(f"{harness.RESULTS} cannot take rows: its first line must be `{harness.HEADER}`")
    if "AUTORESEARCH_CACHE" in os.environ:
        os.environ["AUTORESEARCH_CACHE"] = str(prepare.cache_dir().resolve())  # runs have other working folders
    if args.address:
        args.folder, options = None, dict(address=args.address)
        settings = {"RAY_task_oom_retries": "0"}  # by default, Ray retries what it kills for its memory forever
    else:
        args.folder, settings = scratch_folder(), LOCAL
        atexit.register(shutil.rmtree, args.folder, ignore_errors=True)  # last in, first out: after Ray's
        options = dict(address="local", _temp_dir=args.folder, include_dashboard=False, object_store_memory=10**8)
        options["num_cpus"] = len(os.sched_getaffinity(0))
    os.environ.update(settings | os.environ)  # Ray reads them at import
    import ray

    if args.address:
        check_cluster(args.address)
    # Ray cancels runs by SIGINT. A process started with `&` in a script ignores it, and Ray's workers inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ask = [sys.executable, "-c", GPU_NAMES, args.setting]
    asked = subprocess.Popen(ask, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the nodes of a cluster have no clone
    ray.init(**options, log_to_driver=False, logging_level="ERROR")
    gpus = list(dict.fromkeys(asked.communicate()[0].splitlines())) or ["cpu"]
    if asked.returncode:
        raise PrepareError(f"asking for this machine's GPUs failed with exit status {asked.returncode}, see above")
    return Kind(gpus, args.setting, prepare.dataset_id(), anywhere=bool(args.address))


def check_cluster(address: str) -> None:
    """Raises PrepareError unless a Ray cluster answers at the address: ray.init would try for minutes."""
    ask = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    remedy = "check --address or RAY_ADDRESS: HOST:PORT, or auto on a machine of the cluster"
    host, _, port = address.rpartition(":")
    try:
        if address != "auto":  # Ray's own check takes long if nobody listens
            socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
        subprocess.run(ask, capture_output=True, check=True, timeout=ANSWER)
    except (OSError, ValueError, OverflowError, subprocess.SubprocessError):
        raise PrepareError(f"no Ray cluster answers at {address}: {remedy}") from None


def same_gpus(kind: Kind) -> Kind:
    """The kind, unless this machine's GPUs differ, so that scores could not be compared: then raises PrepareError."""
    if len(kind.gpus) > 1:
        raise PrepareError(f"{' and '.join(kind.gpus)} differ: choose equal GPUs with CUDA_VISIBLE_DEVICES")
    return kind


def settled(row: dict, kind: Kind, base: str) -> bool:
    """Whether the row's run need not be repeated. A crash of the reference is repeated; a report needs test scores."""
    if row["status"] == "crash":
        return row["commit"] != base
    return not kind.report or Description.parse(row).test_bpb is not None


class Trainer:
    """Trains through Ray: `submit` queues a run, `ended` yields the rows of those that have ended, `train` does both.

    slots: the number of runs at once.
    """

    def __init__(self, args: argparse.Namespace, kind: Kind):
        import ray

        self.ray, self.args, self.kind = ray, args, kind
        self.pending = {}  # Ray stream: (run, (commit and subject of the revision to beat))
        self.records = {}  # run that has started: folder of its record
        self.lost = set()  # runs that were lost, and started again, once
        self.reasons = {}  # Ray stream of a run that `stop` has ended: why
        self.stopped = []  # not empty after a signal
        self.archive = functools.lru_cache(8)(lambda commit: ray.put(archive(commit)))
        device = "GPU" if "GPU" in ray.cluster_resources() else "CPU"
        nodes = [node for node in ray.nodes() if device in node["Resources"]]
        files = {f"night/{path.name}": path.read_bytes() for path in Path(__file__).parent.glob("*.py")}
        self.files = ray.put(files | {".dataset": prepare.current_dataset().name.encode()})
        if args.address:
            nodes = with_dataset(nodes, kind.dataset, self.files)
        cores = min(node["Resources"].get("CPU", 1) / node["Resources"].get("GPU", 1) for node in nodes)
        self.share = {"num_cpus": cores, "num_gpus": int(device == "GPU")}  # of a run that has a GPU to itself
        self.gpus = int(sum(node["Resources"].get("GPU", 1) for node in nodes))
        self.slots = self.gpus * args.per_gpu
        self.task = ray.remote(
            num_returns="streaming",
            label_selector={"ray.io/node-id": f"in({','.join(node['NodeID'] for node in nodes)})"},
            max_retries=0,  # Ray would skip as many events of the second try as have been read of the first
        )(run_in_checkout)

    def at_work(self, total: int = 0) -> Board:
        """A context that shows the active runs, out of `total` to end in it; within it `ended` handles signals."""
        harness.handle_signals(lambda *_: self.stopped.append(True))
        self.board = Board(total)
        return self.board

    def runs(self) -> list[Run]:
        return [run for run, _ in self.pending.values()]

    def to_end(self) -> int:
        """Number of runs that have not ended."""
        return len(self.pending)

    def train(self, runs: list[Run], base=("", "")) -> list[dict]:
        """Trains the runs that have no row of this kind; returns the last row of each run that has one.

        base: commit and subject of the reference. A signal ends all runs and this process.
        """
        rows = [row for row in self.kind.rows() if settled(row, self.kind, base[0])]
        done = set() if self.args.again else {name_of(row) for row in rows}
        runs = list(dict.fromkeys(runs))
        todo = [run for run in runs if run[:2] not in done]
        print(f"{len(todo)} runs, {len(runs) - len(todo)} more have a row already")
        ideas = {run.commit for run in runs} - {base[0]}
        for row in rows:
            if row["commit"] == base[0]:  # judge ideas of an interrupted wave that ended before it
                decide(ideas, row, self.kind)
        per_gpu = self.per_gpu(len(todo))
        with self.at_work(len(todo)):
            for run in todo:
                self.submit(run, base, per_gpu)
            while self.pending:
                for run, row in self.ended():
                    if run.commit == base[0]:
                        decide(ideas, row, self.kind)
        earlier = {row["commit"] for row in in_history(rows) if row["status"] == "keep"}
        judged = {run[:2] for run in runs if run.commit == base[0] or run.commit not in earlier}
        discard_by_mean(judged, base[0], self.kind)
        last = {name_of(row): row for row in self.kind.rows()}
        return [last[run[:2]] for run in runs if run[:2] in last]

    def per_gpu(self, runs: int) -> int:
        """How many of so many runs each GPU should take."""
        return min(self.args.per_gpu, math.ceil(runs / self.gpus))

    def submit(self, run: Run, base: tuple[str, str], per_gpu: int | None = None) -> None:
        """Queues a run. base: commit and subject of the revision that it has to beat. per_gpu: if few runs are queued,
        how many a GPU should take, since Ray fills one before it begins with the next."""
        args = self.args
        command = ["-m", "night", "run", f"--limit={args.limit}", *train_options(args, run.seed)]
        record = dict(commit=run.commit, description=run.description, log=True, score_test=self.kind.report)
        share = {name: int(1e4 * n / (per_gpu or args.per_gpu)) / 1e4 for name, n in self.share.items()}  # Ray's unit
        task = self.task.options(**share)
        stream = task.remote(self.archive(run.commit), self.files, command, record, args.folder)
        self.pending[stream] = run, base

    def stop(self, stream, reason: str) -> None:
        """Ends a run, which gets a crash row with this reason."""
        self.reasons[stream] = reason
        self.ray.cancel(stream)

    def ended(self) -> Iterator[tuple[Run, dict]]:
        """Logs and yields the rows of runs that end within half a second; also prints starts and copies records.

        After a signal, ends all runs, then this process with status 130.
        """
        for stream in self.ray.wait(list(self.pending), timeout=0.5)[0] if self.pending else ():
            event, (run, base) = next_event(stream), self.pending[stream]
            if isinstance(event, str):
                print(f"start    {' '.join(run[:2])} on {event}")
                with suppress(OSError):  # the run goes on without a record
                    self.records[run] = new_folder(folder_name(run.commit, run.seed, self.args.setting))
            elif isinstance(event, dict):
                for name, news in event.items():
                    with suppress(KeyError, OSError), (self.records[run] / name).open("ab") as file:
                        file.write(news)
            else:
                del self.pending[stream]
                folder = self.records.pop(run, None)
                if stream in self.reasons:
                    event = "", [], self.reasons.pop(stream)
                if len(event) == 3 and folder:  # it did not end by itself
                    end_record(folder, event[-1])
                if event[-1] in LOST and run not in self.lost:
                    print(f"lost     {' '.join(run[:2])}: starting it again")
                    self.lost.add(run)
                    self.submit(run, base)
                    continue
                row, text = log_row(run, self.kind, base, *event)
                print(text)
                yield run, row
        self.board.update([*self.records.values()], self.to_end())
        if self.stopped:
            print("interrupted: the same command continues")
            for stream in self.pending:
                self.ray.cancel(stream)
            for folder in self.records.values():
                end_record(folder, "interrupted")
            if streams := [stream.completed() for stream in self.pending]:
                self.ray.wait(streams, num_returns=len(streams), timeout=3 * PATIENCE)
            sys.exit(130)


def next_event(stream) -> str | dict | tuple:
    """What run_in_checkout yields next; if Ray lost the run, a final tuple that ends with the reason."""
    import ray

    try:
        return ray.get(next(stream))
    except ray.exceptions.RayError as error:
        return "", [], type(getattr(error, "cause", error)).__name__


def log_row(
    run: Run, kind: Kind, base: tuple[str, str], rows: str, tail: list[str], reason: str = "no row"
) -> tuple[dict, str]:
    """Logs the last row that a run left in its checkout, else a crash with that reason; returns it, and text to print.

    An idea that ends before the reference is a `discard` until `decide` judges it.
    """
    lost = dict(val_bpb=0.0, memory_gb=0.0, tokens_M=0.0, status="crash", description=f"[{reason}]")
    lost |= dict(gpu=kind.gpus[0] + kind.setting, dataset=kind.dataset)  # on a cluster, this machine's GPU
    *_, row = [lost, *filter(None, map(harness.parse_row, rows.split("\n")))]
    _, _, test_bpb, reason = Description.parse(row)
    gpu = str(Label.parse(row["gpu"])._replace(report=kind.report))
    if kind.report:
        to_beat = None
    elif run.commit == base[0]:
        to_beat = math.inf
    else:
        rivals = [row for row in good(kind.rows(), base[0]) if row["gpu"] == gpu]
        to_beat = scores(rivals).get(run.seed, 0.0)
    own = {key: row[key] for key in ("val_bpb", "memory_gb", "tokens_M", "dataset")}
    own |= dict(commit=run.commit, description=run.description, gpu=gpu)
    status = harness.log_result(**own, to_beat=to_beat, test_bpb=test_bpb, reason=reason)
    line = f"{status:8} {row['val_bpb']:.6f}  {' '.join(run[:2])}  {reason}"
    own["description"] = str(Description(run.description, test_bpb=test_bpb, reason=reason))  # as it is in the log
    return own | {"status": status}, "\n    ".join([line, *tail] if reason else [line])


def with_dataset(nodes: list[dict], dataset: str, files) -> list[dict]:
    """The cluster's nodes that have the dataset. Those without it prepare it first, unless it is a user's folder.
    Raises PrepareError if no node has it."""
    import ray

    folder, shards = prepare.current_dataset(), None
    if folder.name.partition("@")[0] in (*prepare.HUB, "embedded"):  # else it was made from a user's folder
        shards = int((folder / "train_shards").read_text())
    command = ["-c", f"import prepare; print(prepare.dataset_id(prepare.prepare(num_shards={shards})))"]
    task = ray.remote(num_returns="streaming", num_cpus=0, max_retries=0)(run_in_checkout)
    on = [task.options(label_selector={"ray.io/node-id": node["NodeID"]}) for node in nodes]
    head, able = archive("HEAD"), []
    for node, answer in zip(nodes, [task.remote(head, files, command) for task in on], strict=True):
        while not isinstance(event := next_event(answer), tuple):  # not the result yet
            pass
        _, log, *reason = event
        *_, found = ["nothing", *log, *reason]
        if found == dataset:
            able.append(node)
        else:
            print(f"no run on {node['NodeManagerHostname']}, which does not have {dataset}: {found}")
    if not able:
        raise PrepareError(f"no node has {dataset}: prepare it there")
    return able


def run_in_checkout(archive: bytes, files: dict, command: list[str], record=None, folder=None) -> Iterator:
    """Ray task: runs a Python command in a temporary checkout; the node needs the dependencies, but no clone.

    Yields where it runs (a string); then, as they come, new bytes of each file of its record (dicts); finally its rows
    and the last lines of its log (a tuple). files: replace those of the archive. record: see harness.night_record.
    folder: parent of the checkout.
    """
    import ray

    env = os.environ | {"AUTORESEARCH_RUN": json.dumps(record or {})}
    set_threads(env)
    yield " GPU ".join([os.uname().nodename, *map(str, ray.get_gpu_ids())])
    end = bytearray()  # of its output

    def read_output(pipe) -> None:
        while text := pipe.read1():
            end.extend(text)
            del end[:-LOG_END]

    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as folder:
        Path(folder, OWNER).write_text(str(os.getpid()))  # for `clean`
        subprocess.run(["tar", "-x", "--exclude=results.tsv", "-C", folder], input=archive, check=True)
        for name, content in files.items():
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).write_bytes(content)
        Path(folder, "results.tsv").write_bytes(b"")  # instead of the archive's, which may be a link
        child = subprocess.Popen([sys.executable, *command], cwd=folder, env=env, stdout=-1, stderr=-2)
        reader = threading.Thread(target=read_output, args=[child.stdout], daemon=True)
        reader.start()
        sent, code = defaultdict(int), None  # bytes sent of each file of the record
        try:
            while code is None:
                with suppress(subprocess.TimeoutExpired):
                    code = child.wait(NEWS)
                for path in Path(folder).glob("runs/*/*.*"):
                    with open(path, "rb") as file:
                        file.seek(sent[path])
                        if news := file.read():
                            sent[path] += len(news)
                            yield {path.name: news}
        finally:
            child.terminate()
            child.wait()
        reader.join(NEWS)  # not for ever, should something that it started still have the pipe
        tail = end.decode(errors="replace").splitlines()[-12:]
        yield Path(folder, "results.tsv").read_text("utf-8", errors="replace"), tail


def set_threads(env: dict[str, str]) -> None:
    """Gives a Ray task's child processes as many threads as the task's share of the node has cores."""
    import ray

    context = ray.get_runtime_context()
    assigned = context.get_assigned_resources().get("CPU", 1)
    (total,) = (node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    usable = len(os.sched_getaffinity(0))  # Ray's count may differ: a quota, or set by hand
    cores = max(1, int(min(usable, total) * assigned / total + 1e-3))
    env["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(32, cores))  # Inductor's limit
    if env.get("OMP_NUM_THREADS") == str(max(1, int(assigned))):  # Ray has set it
        del env["OMP_NUM_THREADS"]  # with all cores, a run uses its default, as without Ray
        if cores < usable:
            env["OMP_NUM_THREADS"] = str(cores)
