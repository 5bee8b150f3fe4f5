"""Waves on a Ray cluster, whose nodes are processes on this machine."""

import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_corpus import told
from test_wave import SIX, Clone

import prepare
from night import ray_pool

pytestmark = pytest.mark.ray
pytest.importorskip("ray", reason="it is in the extra [night]")


@pytest.fixture
def clone(prepared, tmp_path):
    clone = Clone(tmp_path / "clone", prepared)
    yield clone
    clone.kill_the_rest()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def cluster(clone, monkeypatch):
    """A head, and nodes of one core each, all on this machine."""
    from ray.cluster_utils import Cluster

    for name, value in (clone.env | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}).items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def test_a_lost_node_gives_its_runs_to_others_once(clone, cluster, tmp_path):
    pids = tmp_path / "pids"
    clone.commit(
        good=SIX["good"],
        short="val_bpb = 1.2",
        long=f"print(os.getpid(), file=open({str(pids)!r}, 'a')); time.sleep(999)",
        base="val_bpb = 1.5",
    )

    def began(times: int) -> int:
        """Waits until the long run has begun so many times; its pid."""
        clone.wait(wave, lambda: len(prepare.read(pids).split()) >= times)
        return int(prepare.read(pids).split()[-1])

    nodes = {}
    for _ in range(2):
        node = cluster.add_node(num_cpus=1)
        nodes[node.all_processes["raylet"][0].process.pid] = node
    wave = clone.wave("long", "short", f"--address={cluster.address}")
    pid = began(1)
    while pid not in nodes:
        pid = parent(pid)
    cluster.remove_node(nodes[pid], allow_graceful=False)  # as when the power goes
    os.kill(parent(parent(parent(began(2)))), signal.SIGKILL)  # train.py, guard, night, Ray's worker
    clone.finish(wave)
    assert clone.scores() == {"base": "keep", "long [WorkerCrashedError]": "crash", "short": "keep"}

    clone.finish(clone.wave("good", "--seeds=1,2", "--seconds=9", f"--address={cluster.address}"))
    rows = {told(row): (row["gpu"], row["budget"], row["val_bpb"]) for row in clone.rows()[3:]}
    expected = {"short, seed 1": 1.2, "short, seed 2": 1.2, "good, seed 1": 1.31, "good, seed 2": 1.32}
    assert rows == {name: ("cpu", "9 s", val_bpb) for name, val_bpb in expected.items()}
    for times, end in ((3, signal.SIGINT), (4, signal.SIGKILL)):
        wave = clone.wave("long", f"--address={cluster.address}")
        began(times)
        wave.send_signal(end)
        assert wave.wait(60) in (130, -signal.SIGKILL) and clone.all_gone(runs=True)


def test_all_nodes_must_have_the_dataset_and_gpus_of_one_model(monkeypatch):
    import ray

    task = SimpleNamespace(options=lambda **_: task, remote=lambda *_: None)
    monkeypatch.setattr(ray, "remote", lambda **_: lambda function: task)
    answers = iter([(["d\tT4"], ""), ([], "TaskUnschedulableError"), (["d\tH100"], ""), (["x\tT4"], "")])
    monkeypatch.setattr(ray_pool, "result", lambda task: ("", *next(answers), {}))
    nodes = [dict(NodeID=i, NodeManagerHostname=f"h{i}") for i in range(3)]
    assert ray_pool.probe(nodes, "d", None, {}) == [(nodes[0], "T4"), (nodes[2], "H100")], "one has just died"
    with pytest.raises(prepare.PrepareError, match="h0 does not have d: x"):
        ray_pool.probe(nodes[:1], "d", None, {})
    with pytest.raises(prepare.PrepareError, match="no node of the cluster can train"):
        ray_pool.probe([], "d", None, {})


@pytest.mark.parametrize("form", ["127.0.0.1:{port}", "localhost", "auto"])
def test_a_wrong_address_of_a_cluster_ends_in_a_line(monkeypatch, tmp_path, form):
    """Somebody listens at the port, but does not answer."""
    if form == "auto" and any(prepare.read(path).startswith("raylet") for path in Path("/proc").glob("[0-9]*/comm")):
        pytest.skip("a Ray cluster on this machine would answer")
    if "port" in form:
        monkeypatch.setattr(ray_pool, "ANSWER", 4)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where `auto` looks
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = form.format(port=silent.getsockname()[1])
        with pytest.raises(prepare.PrepareError, match=f"no Ray cluster answers at {address}: check --address"):
            ray_pool.check_cluster(address)
