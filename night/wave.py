"""Waves: each git revision's train.py on a GPU of its own, all at once, on this machine or on a Ray cluster."""

import argparse
import atexit
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import harness
import prepare
from harness import Description, Label
from night.clean import scratch_folder
from night.commits import doubts
from night.live import Board, wave_lock
from night.records import folder_name, new_folder
from night.rows import ROOT, Kind, archive, decide, good, grouped, name_of, reference, revisions, scores, with_error
from night.run import PATIENCE, train_options
from prepare import PrepareError

# Ray on this machine alone: on loopback ("cluster" is what it takes for other machines), closed to other users, and
# neither reporting home nor killing what takes memory nor starting a process for each core in advance; and its workers
# as nice as others, not at 15, where a busy machine starves them.
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
LOCAL |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}

NEWS = 3  # seconds between two looks at the record of a run

# A process of its own asks for them, so that this one takes no memory of a GPU
GPU_NAMES = """
import torch, harness
for i in range(torch.cuda.device_count()): torch.cuda.set_device(i); print(harness.gpu_name())
"""


class Run(NamedTuple):
    """One run of a wave. Commit and description are its name in results.tsv."""

    commit: str
    description: str
    seed: int | None


def wave(args: argparse.Namespace) -> None:
    """Trains every revision, and the reference beside them, with every seed that has no row yet; prints a table."""
    ideas, trainer = revisions(args.revisions), Trainer(args, start_ray(args))
    (base,) = revisions([reference(trainer.kind)])
    for doubt in doubts([commit for commit, _ in ideas]):
        print(doubt)
    runs = [run_of(*revision, seed) for revision in [base, *ideas] for seed in args.seeds or [None]]
    print(f"\n{table(trainer.train(runs, base), base[0])}")


def run_of(commit: str, subject: str, seed: int | None = None) -> Run:
    return Run(commit, harness.clean(Description(subject, seed)), seed)


def table(rows: list[dict], base: str) -> str:
    """A line for each revision and GPU: means over its seeds, standard errors where there are several, and the mean
    difference to the reference with the same seeds on the same GPU."""
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
        head = f"UNLIKE GPUS: a row compares with those of its own GPU only\n{head}"
    return "\n".join([head, *(line for *_, line in sorted(lines))])


def start_ray(args: argparse.Namespace) -> Kind:
    """Joins the cluster at args.address, or else starts Ray on this machine, until this process ends.

    Returns the kind of rows that runs get here. The first of its gpus is for the row of a run that leaves none.
    """
    args.alone = open(wave_lock(), "ab")  # locked until this process ends
    if not prepare.lock(args.alone, patience=1):
        raise PrepareError("another wave, tune, loop or report of this clone is at work: wait for it, or end it first")
    header = "\t".join(harness.COLUMNS)
    if prepare.read(harness.RESULTS).split("\n")[0].rstrip() not in ("", header):
        raise PrepareError(f"{harness.RESULTS} would refuse rows: its first line has to be `{header}`")
    if "AUTORESEARCH_CACHE" in os.environ:
        os.environ["AUTORESEARCH_CACHE"] = str(prepare.cache_dir().resolve())  # a run has a working folder of its own
    # Read when Ray is imported. A run that a cluster's Ray kills for its memory would be retried forever.
    os.environ.update(({"RAY_task_oom_retries": "0"} if args.address else LOCAL) | os.environ)
    args.folder, options = None, dict(address=args.address, log_to_driver=False, logging_level="ERROR")
    if not args.address:
        args.folder = scratch_folder()
        atexit.register(shutil.rmtree, args.folder, ignore_errors=True)  # after Ray's own end, as it comes before it
        options |= dict(address="local", _temp_dir=args.folder, include_dashboard=False, object_store_memory=10**8)
        options["num_cpus"] = len(os.sched_getaffinity(0))
    import ray

    # Ray cancels a run with SIGINT, which is ignored here, and so in its workers, if a script's `&` started this wave
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asked = subprocess.Popen([sys.executable, "-c", GPU_NAMES], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the nodes of a cluster have no clone
    ray.init(**options)
    gpus = list(dict.fromkeys(asked.communicate()[0].splitlines())) or ["cpu"]
    return Kind(gpus, args.setting, prepare.dataset_id(), anywhere=bool(args.address))


def settled(row: dict, kind: Kind, base: str) -> bool:
    """Whether the row's run need not be repeated: a crash is a result, but not for the reference."""
    if row["status"] == "crash":
        return row["commit"] != base
    return not kind.report or Description.parse(row).test_bpb is not None


class Trainer:
    """Has Ray train: `submit` hands it a run, `ended` yields the rows of those that have ended, `train` does both.

    slots: how many it trains at once; it queues others.
    """

    def __init__(self, args: argparse.Namespace, kind: Kind):
        import ray

        self.ray, self.args, self.kind = ray, args, kind
        self.pending, self.records, self.stopped = {}, {}, []
        self.archive = functools.lru_cache(8)(lambda commit: ray.put(archive(commit)))
        device = "GPU" if "GPU" in ray.cluster_resources() else "CPU"
        nodes = [node for node in ray.nodes() if device in node["Resources"]]
        files = {f"night/{path.name}": path.read_bytes() for path in Path(__file__).parent.glob("*.py")}
        self.files = ray.put(files | {".dataset": prepare.current_dataset().name.encode()})
        if args.address:
            nodes = with_dataset(nodes, kind.dataset, self.files)
        cores = min(node["Resources"].get("CPU", 1) / node["Resources"].get("GPU", 1) for node in nodes)
        self.slots = int(sum(node["Resources"].get("GPU", 1) for node in nodes)) * args.per_gpu
        self.task = ray.remote(
            num_returns="streaming",
            num_cpus=int(1e4 * cores / args.per_gpu) / 1e4,  # Ray counts in 1e-4
            num_gpus=int(1e4 / args.per_gpu) / 1e4 if device == "GPU" else 0,
            label_selector={"ray.io/node-id": f"in({','.join(node['NodeID'] for node in nodes)})"},
            max_retries=1,  # the run of a lost node goes to another node once
        )(run_in_checkout)

    def at_work(self, total: int = 0) -> Board:
        """A context that shows what is at work, of so many runs in all; in it `ended` notices signals."""
        harness.handle_signals(lambda *_: self.stopped.append(True))
        self.board = Board(total)
        return self.board

    def runs(self) -> list[Run]:
        return [run for run, _ in self.pending.values()]

    def train(self, runs: list[Run], base=("", "")) -> list[dict]:
        """Trains those that have no row of this kind; returns the last row of each.

        base: commit and subject of the reference. If interrupted, this ends all runs and this process.
        """
        rows = [row for row in self.kind.rows() if settled(row, self.kind, base[0])]
        done = set() if self.args.again else {name_of(row) for row in rows}
        runs = list(dict.fromkeys(runs))
        todo = [run for run in runs if run[:2] not in done]
        print(f"{len(todo)} runs, {len(runs) - len(todo)} more have a row already (--again repeats them)")
        with self.at_work(len(todo)):
            for run in todo:
                self.submit(run, base)
            while self.pending:
                for run, row in self.ended():
                    if run.commit == base[0]:
                        ended = set(runs) - {run, *self.runs()}
                        decide({other[:2] for other in ended if other.seed == run.seed}, row, self.kind)
        last = {name_of(row): row for row in self.kind.rows()}
        return [last[run[:2]] for run in runs if run[:2] in last]

    def submit(self, run: Run, base: tuple[str, str]) -> None:
        """base: commit and subject of the revision that it has to beat."""
        args = self.args
        command = ["-m", "night", "run", f"--limit={args.limit}", *train_options(args, run.seed)]
        record = dict(commit=run.commit, description=run.description, log=True, score_test=self.kind.report)
        stream = self.task.remote(self.archive(run.commit), self.files, command, record, args.folder)
        self.pending[stream] = run, base

    def ended(self) -> Iterator[tuple[Run, dict]]:
        """Logs the rows of runs that have ended by now, or within half a second.

        After a signal, ends all runs and then this process with status 130.
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
                self.records.pop(run, None)
                row, text = log_row(run, self.kind, base, *event)
                print(text)
                yield run, row
        self.board.update([*self.records.values()], len(self.pending))
        if self.stopped:
            print("interrupted: the same command goes on")
            for stream in self.pending:
                self.ray.cancel(stream)
            for folder in filter(Path.exists, self.records.values()):
                (folder / "summary.json").write_text('{"reason": "interrupted"}')  # so that it counts as ended
            if streams := [stream.completed() for stream in self.pending]:
                self.ray.wait(streams, num_returns=len(streams), timeout=3 * PATIENCE)
            sys.exit(130)


def next_event(stream) -> str | dict | tuple:
    """What run_in_checkout yields. If Ray has lost the run, a tuple with the reason at its end."""
    import ray

    try:
        return ray.get(next(stream))
    except ray.exceptions.RayError as error:
        return "", [], type(getattr(error, "cause", error)).__name__


def log_row(
    run: Run, kind: Kind, base: tuple[str, str], rows: str, tail: list[str], reason: str = "no row"
) -> tuple[dict, str]:
    """Logs the row that a run has left in its checkout, or a crash for that reason; returns it, and a text about it.

    An idea that ends before the reference is a `discard` until `decide`.
    """
    lost = dict(val_bpb=0.0, memory_gb=0.0, tokens_M=0.0, status="crash", description=f"[{reason}]")
    lost |= dict(gpu=kind.gpus[0] + kind.setting, dataset=kind.dataset)
    *_, row = [lost, *filter(None, map(harness.parse_row, rows.split("\n")))]
    _, _, test_bpb, reason = Description.parse(row)
    gpu = str(Label.parse(row["gpu"])._replace(report=kind.report))
    same = [row for row in good(kind.rows(), base[0]) if name_of(row) == run_of(*base, run.seed)[:2]]
    others = [row["val_bpb"] for row in same if row["gpu"] == gpu]  # of the reference with that seed
    to_beat = None if kind.report else math.inf if run.commit == base[0] else [0.0, *others][-1]
    own = {key: row[key] for key in ("val_bpb", "memory_gb", "tokens_M", "dataset")}
    own |= dict(commit=run.commit, description=run.description, gpu=gpu)
    status = harness.log_result(**own, to_beat=to_beat, test_bpb=test_bpb, reason=reason)
    line = f"{status:8} {row['val_bpb']:.6f}  {' '.join(run[:2])}  {reason}"
    return own | {"status": status}, "\n    ".join([line, *tail] if reason else [line])


def with_dataset(nodes: list[dict], dataset: str, files) -> list[dict]:
    """Those of a cluster's nodes that have the dataset or, if it has a source, have prepared it now."""
    import ray

    folder, shards = prepare.current_dataset(), None
    if folder.name.partition("@")[0] in (*prepare.HUB, "embedded"):  # else it is a folder of one's own
        shards = int((folder / "train_shards").read_text())
    command = ["-c", f"import prepare; print(prepare.dataset_id(prepare.prepare(num_shards={shards})))"]
    task, files_of_head = ray.remote(num_returns="streaming", num_cpus=0)(run_in_checkout), archive("HEAD")
    able, on = [], [task.options(label_selector={"ray.io/node-id": node["NodeID"]}) for node in nodes]
    for node, answer in zip(nodes, [task.remote(files_of_head, files, command) for task in on], strict=True):
        while not isinstance(event := next_event(answer), tuple):  # it has begun
            pass
        _, log, *reason = event
        *_, found = ["nothing", *log, *reason]
        if found == dataset:
            able.append(node)
        else:
            print(f"no run for {node['NodeManagerHostname']}, it does not have {dataset}: {found}")
    if not able:
        raise PrepareError(f"no node has {dataset}")
    return able


def run_in_checkout(archive: bytes, files: dict, command: list[str], record=None, folder=None) -> Iterator:
    """Ray task: a command of Python in a temporary checkout; the node needs the dependencies, but no clone.

    Yields where it runs (a string), while it runs the new bytes of each file of its record (dicts), and at last its
    rows and the end of its log (a tuple). files: instead of those in the archive. record: see harness.night_record.
    folder: for the checkout.
    """
    import ray

    context = ray.get_runtime_context()
    assigned = context.get_assigned_resources().get("CPU", 1)
    (total,) = (node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    usable = len(os.sched_getaffinity(0))  # Ray's count may be another, by a quota or by hand
    cores = max(1, int(min(usable, total) * assigned / total + 1e-3))
    threads = str(min(32, cores))  # Inductor's limit
    env = os.environ | {"AUTORESEARCH_RUN": json.dumps(record or {}), "TORCHINDUCTOR_COMPILE_THREADS": threads}
    if env.get("OMP_NUM_THREADS") == str(max(1, int(assigned))):  # Ray has set it
        del env["OMP_NUM_THREADS"]  # a run that has all cores chooses as it does without Ray
        if cores < usable:
            env["OMP_NUM_THREADS"] = str(cores)
    yield " GPU ".join([os.uname().nodename, *map(str, ray.get_gpu_ids())])
    own = tempfile.TemporaryDirectory(prefix=f"night-{os.getpid()}-", dir=folder)  # `clean` knows it by this process
    with own as folder, open(f"{folder}/run.log", "w") as log:
        subprocess.run(["tar", "-x", "--exclude=results.tsv", "-C", folder], input=archive, check=True)
        for name, content in files.items():
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).write_bytes(content)
        Path(folder, "results.tsv").write_bytes(b"")  # not the archive's: other rows, or a link to them
        child = subprocess.Popen([sys.executable, *command], cwd=folder, env=env, stdout=log, stderr=log)
        sent, code = defaultdict(int), None  # bytes of each file of the record
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
        tail = Path(log.name).read_text(errors="replace").splitlines()[-12:]
        yield Path(folder, "results.tsv").read_text("utf-8", errors="replace"), tail
