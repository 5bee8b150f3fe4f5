"""Waves on a Ray cluster, whose nodes are processes on this machine."""

import os
import re
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_corpus import ROOT, told
from test_wave import SIX, Clone

import prepare
from night import ray_pool
from night.pool import Ended, Run
from night.ray_pool import RayPool

pytestmark = pytest.mark.ray
pytest.importorskip("ray", reason="it is in the extra [night]")


@pytest.fixture
def clone(prepared, tmp_path):
    clone = Clone(tmp_path / "clone", prepared)
    yield clone
    clone.kill_the_rest()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Cluster:
    """A head and nodes of one core each, all on this machine. Ray is told how many GPUs a node has."""

    def __init__(self, clone: Clone, monkeypatch):
        from ray.cluster_utils import Cluster

        for name, value in clone.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = {}

    def add(self, num_gpus: int = 0, **env: str) -> None:
        node = self.cluster.add_node(num_cpus=1, num_gpus=num_gpus, env_vars=env)
        self.nodes[node.all_processes["raylet"][0].process.pid] = node

    def lose_node_of(self, pid: int) -> None:
        """As when the power goes: without a goodbye."""
        while pid not in self.nodes:
            pid = parent(pid)
        self.cluster.remove_node(self.nodes.pop(pid), allow_graceful=False)


@pytest.fixture
def cluster(clone, monkeypatch):
    cluster = Cluster(clone, monkeypatch)
    try:
        yield cluster
    finally:
        cluster.cluster.shutdown()


def test_a_run_whose_worker_is_killed_starts_again_with_a_record_of_its_own(clone, cluster, tmp_path):
    pids = tmp_path / "pids"
    body = f"first = not os.path.exists({str(pids)!r}); open({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')"
    talk = "[(print('number', i, flush=True), time.sleep(1)) for i in range(99 * first)]"
    clone.commit(base="val_bpb = 1.3", idea=f"{body}; {talk}; val_bpb = 1.2")
    clone.run("git checkout -q base")
    cluster.add()
    address = f"--address={cluster.cluster.address}"
    wave, runs = clone.wave("idea", "--tokens=1500000", address), clone.folder / "runs"
    commit = clone.run("git rev-parse --short=7 idea").strip()
    first, second = runs / f"{commit}-42-1.5M", runs / f"{commit}-42-1.5M_2"
    clone.wait(wave, lambda: "number 7" in prepare.read(first / "log.txt"))
    os.kill(parent(parent(parent(int(pids.read_text())))), signal.SIGKILL)  # train.py, guard, night, Ray's worker
    output = clone.finish(wave)
    assert clone.scores() == {"base": "keep", "idea": "keep"} and f"lost     {commit} idea: starting it again" in output
    assert "WorkerCrashed" in prepare.read(first / "summary.json")
    assert "training" in (text := prepare.read(second / "log.txt")) and "number" not in text


def test_a_lost_node_gives_its_runs_to_others_once_and_a_node_with_other_data_gets_none(clone, cluster, tmp_path):
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

    cluster.add(AUTORESEARCH_CACHE=str(tmp_path / "empty"))
    cluster.add()
    cluster.add()
    wave = clone.wave("long", "short", f"--address={cluster.cluster.address}")
    cluster.lose_node_of(began(1))
    os.kill(parent(parent(parent(began(2)))), signal.SIGKILL)  # train.py, guard, night, Ray's worker
    output = clone.finish(wave)
    assert clone.scores() == {"base": "keep", "long [WorkerCrashedError]": "crash", "short": "keep"}
    assert len(re.findall("^no run on .* does not have corpus-.*PrepareError", output, re.M)) == 1

    clone.finish(clone.wave("good", "--seeds=1,2", "--seconds=9", f"--address={cluster.cluster.address}"))
    rows = {told(row): (row["gpu"], row["budget"], row["val_bpb"]) for row in clone.rows()[3:]}
    expected = {"short, seed 1": 1.2, "short, seed 2": 1.2, "good, seed 1": 1.31, "good, seed 2": 1.32}
    assert rows == {name: ("cpu", "9 s", val_bpb) for name, val_bpb in expected.items()}
    wave = clone.wave("long", "--again", f"--address={cluster.cluster.address}")
    began(3)
    wave.kill()
    assert clone.all_gone(runs=True)


def test_few_runs_are_spread_over_the_gpus(clone, cluster, tmp_path):
    """Though eight could share one, and Ray fills one before it begins with the next."""
    (begun := tmp_path / "begun").mkdir()
    body = f"open(f'{begun}/{{args.seed}}', 'w')\n    while len(os.listdir({str(begun)!r})) < 3: time.sleep(0.05)"
    clone.commit(good=f"{body}\n    val_bpb = 1.3")
    cluster.add(num_gpus=2)
    several = ["--seeds=1,2,3", "--per-gpu=8", "--tokens=5", f"--address={cluster.cluster.address}"]
    output = clone.finish(clone.wave("good", *several))
    assert sorted(re.findall("^start .* GPU (.)$", output, re.M)) == ["0", "0", "1"]
    assert len(clone.rows()) == 3


def test_a_node_without_the_dataset_prepares_it_if_it_has_a_source(clone, cluster, tmp_path):
    """The embedded corpus here, of which only a few modules are left: the same on the node as on this machine."""
    (tmp_path / "stdlib").mkdir()
    for module in ("argparse", "ast", "bdb", "calendar", "cmd", "enum", "codecs", "copy", "csv", "dis"):
        (tmp_path / "stdlib" / f"{module}.py").write_bytes((Path(os.__file__).parent / f"{module}.py").read_bytes())
    few = f"import sysconfig\nsysconfig.get_path = lambda *_: {str(tmp_path / 'stdlib')!r}\n"
    text = (ROOT / "prepare.py").read_text("utf-8").replace("import sysconfig\n", few)
    (clone.folder / "prepare.py").write_text(text, "utf-8")
    clone.commit(good=SIX["good"])
    clone.env["AUTORESEARCH_CACHE"] = str(tmp_path / "here")
    clone.run("python prepare.py --data embedded")
    cluster.add(AUTORESEARCH_CACHE=str(tmp_path / "node"))
    clone.finish(clone.wave("good", f"--address={cluster.cluster.address}"))
    (row,) = clone.rows()
    assert row["status"] == "keep" and row["dataset"].startswith("embedded-")
    assert (tmp_path / "node" / "current").read_text() == (tmp_path / "here" / "current").read_text()


def test_nodes_of_the_most_frequent_gpu_model_take_the_runs(capsys):
    models = dict(a=("H100", 4.0), b=("T4", 1.0), c=("T4", 2.0))
    nodes = [(dict(NodeManagerHostname=name, Resources={"GPU": n}), model) for name, (model, n) in models.items()]
    assert ray_pool.of_one_model(nodes) == ([nodes[0][0]], "H100")
    assert capsys.readouterr().out.endswith("no run on c: scores on T4 and H100 do not compare\n")


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


def test_runs_that_a_cluster_does_not_answer_for_end_with_their_time(monkeypatch):
    """One that has begun, and one that no node takes."""
    now, ended = [0.0], [[], []]
    monkeypatch.setattr(ray_pool.time, "monotonic", lambda: now[0])
    pool, runs = object.__new__(RayPool), [Run(name, name, 42) for name in ("hangs", "waits")]
    pool.limit, pool.latest, pool.streams = 600, 0.0, dict(zip("ab", runs, strict=True))
    pool.ray = SimpleNamespace(wait=lambda streams, timeout: ended, cancel=lambda *_, **__: None)
    monkeypatch.setattr(ray_pool, "next_event", lambda stream, run: ray_pool.Started(run, "here"))
    now[0], ended[0] = 700.0, ["a"]
    assert [type(event).__name__ for event in pool.events()] == ["Started"]
    now[0], ended[0] = 1500.0, []
    assert not [*pool.events()]
    now[0] = 1600.0
    assert [*pool.events()] == [Ended(run, "", [], "no answer") for run in runs] and not pool.streams
