"""Waves: stubs of train.py, trained by a real Ray on this machine, and on a cluster of simulated nodes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_corpus import ROOT
from test_night import Night

pytest.importorskip("ray", reason="it is in the extra [night]")

STUB = """\
import argparse, os, signal, subprocess, sys, time
from prepare import budget_name, dataset_id, log_result

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float)
parser.add_argument("--tokens", type=int)
parser.add_argument("--gpu")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
where = dict(gpu="cpu" + budget_name(args.seconds, args.tokens, args.gpu), dataset=dataset_id())
print("training", flush=True)
try:
    BODY
    print("status:", log_result(val_bpb=val_bpb, memory_gb=2.0, tokens_M=1.5, **where))
except BaseException as error:
    log_result(val_bpb=0.0, memory_gb=0.0, reason=type(error).__name__, **where)
    raise
"""
SIX = {
    "good": "val_bpb = 1.3 + args.seed / 100",
    "better": "val_bpb = 1.2",
    "worse": "val_bpb = 1.4",
    "crash": "raise MemoryError('77 GB')",
    "typo": "val_bpb = = 1.1",
    "hang": "subprocess.Popen(['sleep', '999'], start_new_session=True); time.sleep(999)",
}
STATUS = {"good": "keep", "better": "keep", "worse": "discard"}
REASON = {"crash": "[MemoryError]", "typo": "[SyntaxError line 13]", "hang": "[no evaluation within 0.1 min]"}
TWO_SLOTS = ["--per-gpu=2", "--tokens=1500000"]  # of a machine without a GPU, too


class Clone(Night):
    def commit(self, **bodies: str) -> None:
        """A revision and a tag for each."""
        for name, body in bodies.items():
            (self.folder / "train.py").write_text(STUB.replace("BODY", body), "utf-8")
            self.run(f"git commit -qam {name} && git tag {name}")

    def wave(self, *args: str, **env: str) -> subprocess.Popen:
        command = ["python", "night.py", "wave", *args]
        env = self.env | {"CUDA_VISIBLE_DEVICES": ""} | env
        return subprocess.Popen(command, cwd=self.folder, env=env, text=True, stdout=-1, stderr=-2, process_group=0)

    def finish(self, wave: subprocess.Popen, code: int = 0) -> str:
        """What it printed; its processes are gone when it is."""
        output = wave.communicate(timeout=300)[0]
        assert wave.returncode == code and not self.processes(), output
        return output

    def scores(self) -> dict[str, str]:
        """Description: status, each once."""
        rows = self.rows()
        assert len({row["description"] for row in rows}) == len(rows)
        return {row["description"]: row["status"] for row in rows}


@pytest.fixture
def clone(prepared, tmp_path) -> Clone:
    return Clone(tmp_path / "clone", prepared)


def listening(pids) -> set[str]:
    """The addresses, in hexadecimal, of the TCP sockets on which these processes listen."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            sockets |= {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {words[1].split(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in sockets}


def test_a_wave_of_six_leaves_a_row_each_also_if_it_is_interrupted_and_repeated(clone):
    """On two slots: three good runs, a crash, a SyntaxError and a hang. Ray listens on loopback only."""
    clone.commit(**SIX)
    command = [*SIX, *TWO_SLOTS, "--limit=6"]
    wave = clone.wave(*reversed(SIX), *command[6:])  # the hang first
    while len(clone.rows()) < 2:
        time.sleep(0.05)
        assert wave.poll() is None, wave.stdout.read()
    assert listening(clone.processes()) <= {"0100007F", "0000000000000000FFFF00000100007F"}
    os.killpg(wave.pid, signal.SIGINT)
    clone.finish(wave, code=130)
    before = clone.rows()
    assert 2 <= len(before) < 6

    output = clone.finish(clone.wave(*command))
    assert clone.rows()[: len(before)] == before
    names = {f"{name} {REASON[name]}" if name in REASON else name for name in SIX}
    assert clone.scores().keys() == names
    for row in clone.rows():
        assert (row["gpu"], row["tokens_M"]) == ("cpu, 1.5 M tokens", 0.0 if row["status"] == "crash" else 1.5)
    table = re.findall(r"^([01]\.\d{6}) .*[0-9a-f]{7}  (\w+)", output, re.M)
    assert table[:3] == [("1.200000", "better"), ("1.300000", "good"), ("1.400000", "worse")]
    assert {name for _, name in table[3:]} == REASON.keys()

    log = (clone.folder / "results.tsv").read_bytes()
    assert "6 have a row" in clone.finish(clone.wave(*command, PYTHONPATH="/nowhere"))  # needs no Ray
    assert (clone.folder / "results.tsv").read_bytes() == log
