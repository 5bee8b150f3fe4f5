"""A Ray cluster as a pool. Its nodes need the dependencies, but no clone."""

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator

from night import checkout
from night.checkout import LOOK, PATIENCE, Checkout, environment
from night.git import archive
from night.pool import Ended, Run, one_model, our_files
from prepare import PrepareError

ANSWER = 30  # seconds for a cluster to answer, including loading Ray from a slow disk
PROBE = """
import os
os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from a task that asks for none
import harness, prepare
print(prepare.dataset_id(), harness.gpu_name({imitates!r}).partition(" as ")[0], sep="\\t")
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
    """A cluster: a slot per GPU, times `per_gpu`. All nodes must have the dataset and GPUs of one `model`."""

    def __init__(self, args: Namespace, dataset: str):
        os.environ.setdefault("RAY_task_oom_retries", "0")  # by default, Ray restarts what it killed for its memory
        import ray

        check_cluster(args.address)
        # Ray cancels runs by SIGINT, which workers ignore if a script has started this process with `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for module in (checkout, sys.modules[__name__]):  # which nodes may not have
            ray.cloudpickle.register_pickle_by_value(module)
        ray.init(address=args.address, log_to_driver=False, logging_level="ERROR")
        self.ray, self.limit, self.files, self.tasks = ray, args.limit, ray.put(our_files(args.locked)), {}
        device = "GPU" if "GPU" in ray.cluster_resources() else "CPU"
        nodes = [node for node in ray.nodes() if node["Alive"] and device in node["Resources"]]
        nodes, names = zip(*probe(nodes, dataset, args.gpu, self.files), strict=True)
        self.model = one_model(names)
        gpus = [node["Resources"].get("GPU", 1) for node in nodes]
        cores = min(node["Resources"].get("CPU", 1) / n for node, n in zip(nodes, gpus, strict=True))
        self.slots = int(sum(gpus)) * args.per_gpu
        whole = {"num_cpus": cores, "num_gpus": int(device == "GPU")}  # a run alone on its GPU
        share = {name: int(1e4 * n / args.per_gpu) / 1e4 for name, n in whole.items()}  # in Ray's unit
        self.task = ray.remote(max_retries=1, **share)(run_in_checkout)

    def submit(self, run: Run, packed: bytes, command: list[str], record: dict) -> None:
        self.tasks[self.task.remote(packed, self.files, command, record, self.limit)] = run

    def ended(self) -> Iterator[Ended]:
        for task in self.ray.wait(list(self.tasks), timeout=0.5)[0] if self.tasks else ():
            yield Ended(self.tasks.pop(task), *result(task))

    def close(self) -> None:
        for task in self.tasks:
            self.ray.cancel(task)
        if self.tasks:
            self.ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=PATIENCE)
        self.ray.shutdown()


def result(task) -> tuple:
    """What run_in_checkout returns, with Ray's error as the reason if it does not."""
    import ray

    try:
        return ray.get(task)
    except ray.exceptions.RayError as error:
        return "", [], type(getattr(error, "cause", error)).__name__, {}


def probe(nodes: list[dict], dataset: str, imitates: str | None, files) -> list[tuple[dict, str]]:
    """The nodes that are alive, with their GPU models. PrepareError if one does not have the dataset."""
    import ray

    task, head = ray.remote(num_cpus=0, max_retries=0)(run_in_checkout), archive("HEAD")
    on = [task.options(label_selector={"ray.io/node-id": node["NodeID"]}) for node in nodes]
    found, asked = [], [task.remote(head, files, ["-c", PROBE.format(imitates=imitates)]) for task in on]
    for node, answer in zip(nodes, asked, strict=True):
        _, tail, reason, _ = result(answer)
        has, _, model = (tail[-1] if tail else reason).partition("\t")
        if has == dataset:
            found.append((node, model))
        elif has != "TaskUnschedulableError":
            raise PrepareError(f"{node['NodeManagerHostname']} does not have {dataset}: {has}")
    if not found:
        raise PrepareError("no node of the cluster can train")
    return found


def run_in_checkout(packed: bytes, files: dict, command: list[str], record=None, limit=float("inf")) -> tuple:
    """Ray task: runs a Python command in a temporary checkout. Returns Checkout.result()."""
    import ray

    cores = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))
    work = Checkout(packed, files, command, record or {}, environment(cores), limit)
    try:
        while work.at_work():
            time.sleep(LOOK)
        return work.result()
    finally:
        work.stop()
        while work.at_work():
            time.sleep(LOOK)
        work.scratch.cleanup()
