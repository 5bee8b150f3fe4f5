"""A Ray cluster as a pool. Its nodes need the dependencies, but no clone: they get functions by value."""

import argparse
import functools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import prepare
from night import checkout
from night.checkout import GRACE, LOOK, PATIENCE, Checkout, environment
from night.git import archive
from night.pool import Ended, News, Run, Started, our_files
from prepare import PrepareError

LOST = ("WorkerCrashedError", "NodeDiedError")  # Ray's errors when a run goes with its node or worker
ANSWER = 30  # seconds for a cluster to answer, including loading Ray from a slow disk
EVENTS = {"started": Started, "news": News, "ended": Ended}
PROBE = """
import os
os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from a task that asks for none
import harness, prepare
dataset = prepare.dataset_id(prepare.prepare(num_shards={shards}))
print(dataset, harness.gpu_name({imitates!r}).partition(" as ")[0], sep="\\t")
"""


def check_cluster(address: str) -> None:
    """Raises PrepareError unless a Ray cluster answers at the address: ray.init would try for minutes."""
    ask = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    remedy = "check --address or RAY_ADDRESS: HOST:PORT, or auto on a machine of the cluster"
    try:
        subprocess.run(ask, capture_output=True, check=True, timeout=ANSWER)
    except subprocess.SubprocessError:
        raise PrepareError(f"no Ray cluster answers at {address}: {remedy}") from None


class RayPool:
    """The nodes of a cluster that have the dataset and GPUs of one `model`, with a slot per GPU, times `per_gpu`."""

    def __init__(self, args: argparse.Namespace, dataset: str):
        os.environ.setdefault("RAY_task_oom_retries", "0")  # by default, Ray restarts what it killed for its memory
        import ray

        check_cluster(args.address)
        # Ray cancels runs by SIGINT. A process started with `&` in a script ignores it, and Ray's workers inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for module in (checkout, sys.modules[__name__]):
            ray.cloudpickle.register_pickle_by_value(module)
        ray.init(address=args.address, log_to_driver=False, logging_level="ERROR")
        self.ray, self.limit, self.streams = ray, args.limit, {}
        self.archive = functools.lru_cache(8)(lambda commit: ray.put(archive(commit)))
        device = "GPU" if "GPU" in ray.cluster_resources() else "CPU"
        self.files = ray.put(our_files(args.locked))
        nodes = [node for node in ray.nodes() if device in node["Resources"]]
        nodes, self.model = of_one_model(with_dataset(nodes, dataset, args.gpu, self.files))
        cores = min(node["Resources"].get("CPU", 1) / node["Resources"].get("GPU", 1) for node in nodes)
        self.share = {"num_cpus": cores, "num_gpus": int(device == "GPU")}  # for a run alone on its GPU
        self.gpus = int(sum(node["Resources"].get("GPU", 1) for node in nodes))
        self.slots = self.gpus * args.per_gpu
        self.task = ray.remote(
            num_returns="streaming",
            label_selector={"ray.io/node-id": f"in({','.join(node['NodeID'] for node in nodes)})"},
            max_retries=0,  # Ray would skip as many events of the second try as have been read of the first
        )(run_in_checkout)

    def submit(self, run: Run, command: list[str], record: dict, per_gpu: int) -> None:
        """per_gpu: how many runs a GPU should take: Ray fills one before it begins with the next."""
        share = {name: int(1e4 * n / per_gpu) / 1e4 for name, n in self.share.items()}  # Ray's unit
        packed, omp = self.archive(run.commit), os.environ.get("OMP_NUM_THREADS")
        stream = self.task.options(**share).remote(packed, self.files, command, record, self.limit, omp)
        self.streams[stream], self.latest = run, time.monotonic()

    def events(self) -> Iterator[Started | News | Ended]:
        for stream in self.ray.wait(list(self.streams), timeout=0.5)[0] if self.streams else ():
            run, self.latest = self.streams[stream], time.monotonic()
            event = next_event(stream, run)
            if isinstance(event, Ended):
                del self.streams[stream]
            yield event
        if self.streams and time.monotonic() - self.latest > self.limit + GRACE + 3 * PATIENCE:
            for stream, run in [*self.streams.items()]:  # runs that no node takes, say
                self.ray.cancel(stream, force=True)
                del self.streams[stream]
                yield Ended(run, "", [], "no answer")

    def close(self) -> None:
        for stream in self.streams:
            self.ray.cancel(stream)
        if streams := [stream.completed() for stream in self.streams]:
            self.ray.wait(streams, num_returns=len(streams), timeout=PATIENCE)
        self.ray.shutdown()


def next_event(stream, run: Run | None = None) -> Started | News | Ended:
    """What run_in_checkout yields next."""
    import ray

    try:
        kind, *values = ray.get(next(stream))
        return EVENTS[kind](run, *values)
    except ray.exceptions.RayError as error:
        reason = type(getattr(error, "cause", error)).__name__
        return Ended(run, "", [], reason, lost=reason in LOST)


def of_one_model(nodes: list[tuple[dict, str]]) -> tuple[list[dict], str]:
    """The nodes with the most frequent GPU model, and its name: scores compare on one only."""
    gpus = Counter()
    for node, model in nodes:
        gpus[model] += node["Resources"].get("GPU", 1)
    best = max(gpus, key=gpus.get)
    for node, model in nodes:
        if model != best:
            print(f"no run on {node['NodeManagerHostname']}: scores on {model} and {best} do not compare")
    return [node for node, model in nodes if model == best], best


def with_dataset(nodes: list[dict], dataset: str, imitates: str | None, files) -> list[tuple[dict, str]]:
    """The nodes that have the dataset, each with its GPU model; others prepare it, unless it is a user's folder.
    PrepareError if none has it."""
    import ray

    folder, shards = prepare.current_dataset(), None
    if folder.name.partition("@")[0] in (*prepare.HUB, "embedded"):  # else it was made from a user's folder
        shards = int((folder / "train_shards").read_text())
    command = ["-c", PROBE.format(shards=shards, imitates=imitates)]
    task = ray.remote(num_returns="streaming", num_cpus=0, max_retries=0)(run_in_checkout)
    on = [task.options(label_selector={"ray.io/node-id": node["NodeID"]}) for node in nodes]
    head, able = archive("HEAD"), []
    for node, answer in zip(nodes, [task.remote(head, files, command) for task in on], strict=True):
        while not isinstance(event := next_event(answer), Ended):
            pass
        found = event.tail[-1] if event.tail else event.reason
        has, _, model = found.partition("\t")
        if has == dataset:
            able.append((node, model))
        else:
            print(f"no run on {node['NodeManagerHostname']}, which does not have {dataset}: {found}")
    if not able:
        raise PrepareError(f"no node has {dataset}: prepare it there")
    return able


def run_in_checkout(
    archive: bytes, files: dict, command: list[str], record=None, limit: float = float("inf"), omp: str | None = None
) -> Iterator[tuple]:
    """Ray task: runs a Python command in a temporary checkout; yields events. omp: the user's OMP_NUM_THREADS."""
    import ray

    context = ray.get_runtime_context()
    assigned = context.get_assigned_resources().get("CPU", 1)
    (total,) = (node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    usable = len(os.sched_getaffinity(0))  # Ray's count may differ: a quota, or set by hand
    cores = max(1, int(min(usable, total) * assigned / total + 1e-3))
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray has set it
    env = environment(env | ({"OMP_NUM_THREADS": omp} if omp else {}), cores, usable)
    yield "started", " GPU ".join([os.uname().nodename, *map(str, ray.get_gpu_ids())])
    work = Checkout(archive, files, command, record or {}, env, limit)
    try:
        over = False
        while not over:
            time.sleep(LOOK)
            over = not work.at_work()
            for name, text in work.news(at_once=over):
                yield "news", name, text
        yield "ended", *work.result()
    finally:
        work.stop()
        while work.at_work():
            time.sleep(LOOK)
        work.scratch.cleanup()
