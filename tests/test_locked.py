"""Locked runs: whatever train.py's process does to itself, its row says what its model predicts, or why not."""

import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_corpus import copy_files, mostly_slow
from test_referee import FALSE, HONEST, B, T, models, reference

import harness
import prepare
from harness import remote
from harness.experiment import crash_reason
from night import run as night_run
from night.__main__ import parse
from night.fence import fence
from night.pool import our_files

try:
    fence([Path(__file__)])
    LANDLOCK = ""
except OSError as error:
    LANDLOCK = str(error)

# Predicts every token alike, and trains for six steps
TRAIN = """\
import os, sys, threading, time
from types import SimpleNamespace
import torch
import harness, prepare
from harness import remote
from pathlib import Path

class LM(torch.nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(vocab))
        self.config = SimpleNamespace(device_batch_size=6, seq_len=48)

    def forward(self, idx):
        return self.w.expand(*idx.shape, -1)

def train(clock, tokenizer, device, seed, gpu):
    model = LM(tokenizer.get_vocab_size()).to(device)
    clock.start()
    while clock.running():
        step(model)
        clock.advance(50, torch.ones((), device=device), 1)
    clock.stop()
    return model, {}

def step(model):
    time.sleep(0.01)

harness.experiment.sample = None  # takes a second
EDIT
if __name__ == "__main__":
    harness.run(train, None)
"""
FALSE_ROW = "dict(val_bpb=0.1, memory_gb=1.0, gpu='cpu', dataset='d', budget='0.0003 M tokens')"
SUMMARY = "print('---', 'val_bpb:          0.100000', 'status:           keep', sep='\\n', flush=True)"
SCORED = ""  # as what it predicts
TRAINED_LONGER = "trained for [1-9] s, not 0"
AT_THE_END = "stop = harness.Clock.stop\nharness.Clock.stop = lambda self: (stop(self), {})"  # of training

# By the reason of their row: edits, by name
LIES = {
    SCORED: {
        "replaces_what_scores_it_and_says_who_it_is": (
            "harness.summary.evaluate_bpb = prepare.evaluate_bpb = lambda *_, **__: 0.1\n"
            "harness.referee.Predictor.bits_per_byte = remote.Referee.score = remote.Referee.receive = lambda *_: 0.1\n"
            "answer = remote.answer\nremote.answer = lambda *args: (answer(*args), 0.1)[1]\n"
            "harness.experiment.git_head = lambda: ('fffffff', 'mine')\n"
            "harness.experiment.gpu_name = harness.experiment.dataset_id = lambda *_: 'mine'"
        ),
        "writes_a_row": f"harness.log_result(**{FALSE_ROW})",
        "writes_a_row_later": (
            f"if not os.fork():\n    os.setsid(); time.sleep(1)\n    harness.log_result(**{FALSE_ROW}); time.sleep(99)"
        ),
        "writes_a_row_when_it_is_scored": (
            "answer = remote.answer\n"
            f"remote.answer = lambda *args: (answer(*args), harness.log_result(**{FALSE_ROW}), os._exit(0))"
        ),
        "is_scored_twice": (
            "real = train\ndef train(*args):\n    model, _ = real(*args)\n    for _ in '12':\n"
            "        remote.answer(model, prepare.Tokenizer.from_directory().get_vocab_size(), 'val')\n"
            "    return model, {}"
        ),
    },
    "no row": {
        "never_asks": f"harness.run = lambda *_: {SUMMARY}",
        "writes_a_row_and_ends": f"harness.log_result(**{FALSE_ROW})\nos._exit(0)",
    },
    "no score: UnicodeDecodeError|no score: JSONDecodeError": {
        "sends_a_pickle": (
            "import pickle\nclass Evil:\n    def __reduce__(self):\n        return os._exit, (0,)\n"
            "remote.channel().send_bytes(pickle.dumps(Evil()))"
        ),
    },
    "cannot score": {
        "asks_for_no_batches": "remote.tell(split='val', batch_size=-6, seq_len=-48, eps=0, memory=0)",
        "asks_for_huge_batches": "remote.tell(split='val', batch_size=9**9, seq_len=1, eps=0, memory=0)",
    },
    "tokens_M is": {"counts_to_infinity": AT_THE_END.format("remote.tell(tokens=float('inf'))")},
    "memory_gb is nan": {"needs_no_memory": "torch.cuda.max_memory_allocated = lambda: float('nan')"},
    "PermissionError line": {  # and the referee, which reads it, goes on
        "cuts_the_file_of_logits": (
            "tell = remote.tell\n"
            "remote.tell = lambda **m: (m or os.ftruncate(harness.night_record()['logits'], 9), tell(**m))"
        ),
    },
    TRAINED_LONGER: {
        "stops_the_clock": (
            "times = iter(i / 1500 for i in range(9**9))\n"
            "harness.clock.time = SimpleNamespace(perf_counter=times.__next__)"
        ),
        "starts_the_clock_twice": (
            "stop = harness.Clock.stop\n"
            "harness.Clock.stop = lambda self: (time.sleep(1.5), remote.tell(tokens=0), stop(self))"
        ),
        "trains_after_its_first_answer": (
            "tell, rows = remote.tell, []\n"
            "remote.tell = lambda **m: (m or rows.append(0) or len(rows) == 2 and time.sleep(1.5), tell(**m))"
        ),
        "never_starts_the_clock": "harness.clock.tell = lambda **_: None\ntime.sleep(1.5)",
    },
}
FENCED = {  # what Landlock forbids
    "reads_val": "next(prepare.cache_dir().glob('*/val_*')).read_bytes()",
    "reads_test": "next(prepare.cache_dir().glob('*/test_*')).read_bytes()",
    "looks_into_the_referee": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "ends_the_supervisor": "os.kill(os.getppid(), 9)",
    "downloads_it": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
}
HONEST_EDITS = {
    "does_much_else": (
        "print('warning\\n' * 99_999, file=sys.stderr)\ntorch.set_num_threads(2)\n"
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
        "import subprocess\nsubprocess.run([sys.executable, '-c', 'print(1)'], check=True)"
    ),
    "fails_when_it_is_scored": "harness.experiment.sample = lambda *_, **__: os._exit(3)",
}
FAILURES = {  # by the reason that they have without the lock, too
    r"sees the future: position \d+ changes with token \d+$": {
        "a_leak": "LM.forward = lambda self, idx: torch.nn.functional.one_hot(idx.roll(-1, 1), len(self.w)).float()",
    },
    r"KeyError line \d+, called from line \d+$": {"an_error": "def step(_): raise KeyError('a')"},
    r"AttributeError line \d+$": {"a_typo": "harness.ron"},
    "killed$": {"killed": "def step(_): os.kill(os.getpid(), 9)"},
}
RUNS = {name: (edit, reason) for reason, edits in (LIES | FAILURES).items() for name, edit in edits.items()}
RUNS |= {name: (edit, SCORED) for name, edit in HONEST_EDITS.items()}


def fork(main, out: int) -> int:
    """The process id of a program that runs main() in a fork of this process, which has PyTorch loaded."""
    if pid := os.fork():
        return pid
    os.dup2(out, 1), os.dup2(out, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else print(error.code, file=sys.stderr) or 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


class Forked:
    """As much of Popen as night's guard needs."""

    def __init__(self, command: list[str], env: dict, pass_fds, preexec_fn, **_):
        def main() -> None:
            os.setsid()
            preexec_fn()
            for number in {*range(3, 256)} - {*pass_fds}:
                with suppress(OSError):
                    os.close(number)
            os.environ.clear(), os.environ.update(env)
            sys.argv = command[1:]
            runpy.run_path("train.py", run_name="__main__")

        read, write = os.pipe()
        self.stdout, self.pid = open(read, "rb"), fork(main, write)
        os.close(write)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Clone:
    def __init__(self, folder: Path, cache: Path):
        self.folder, self.cache, self.log = folder, cache, folder / "results.tsv"
        folder.mkdir()

    def run(self, edit: str, *args: str) -> tuple[dict, str]:
        """Its only row, and what it has printed."""
        self.log.write_text("\t".join(harness.COLUMNS) + "\n")
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        (self.folder / "train.py").write_text(TRAIN.replace("EDIT", edit))
        with open(self.folder / "out", "w") as out:
            os.waitpid(fork(lambda: self.supervise(args), out.fileno()), 0)
        (row,) = harness.log.parse_log(self.log.read_text())[0]
        (record,) = self.folder.glob("runs/*")
        return row, prepare.read(record / "log.txt")

    def supervise(self, args: list[str]) -> None:
        os.chdir(self.folder)
        record = dict(log=True, commit="abc1234", description="idea")
        os.environ.update(AUTORESEARCH_CACHE=str(self.cache), AUTORESEARCH_RUN=json.dumps(record))
        prepare.EVAL_TOKENS, remote.TOLERANCE, prepare.DATASET = 1000, 1.0, self.folder / ".dataset"
        harness.RESULTS, night_run.RUNS, night_run.ROOT = self.log, self.folder / "runs", self.folder
        night_run.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": Forked})
        sys.exit(night_run.run(parse(["run", "--locked", "--limit=60", *args])))


@pytest.fixture(autouse=True)
def referee():
    """Each fork of this process has its own, and none of OpenMP's threads, for which it would wait."""
    remote.channel.cache_clear(), remote.shared_row.cache_clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def clone(prepared, tmp_path_factory) -> Clone:
    return Clone(tmp_path_factory.mktemp("locked") / "clone", prepared)


def true_bpb(tokenizer, limit: int = 1000) -> float:
    """Of a model that predicts every token alike."""
    stream = prepare.TokenStream(tokenizer, "val")
    sizes = [tokenizer.token_bytes[token] for token in stream.read(1, min(limit, len(stream) - 1))]
    return math.log2(tokenizer.get_vocab_size()) * sum(size > 0 for size in sizes) / sum(sizes)


QUICK = "writes_a_row stops_the_clock sends_a_pickle never_asks is_scored_twice a_leak an_error".split()
QUICK += ["replaces_what_scores_it_and_says_who_it_is", *HONEST_EDITS]


@pytest.mark.parametrize("name", mostly_slow(RUNS, *QUICK))
def test_a_run_is_scored_as_what_it_predicts_or_its_row_says_why_not(clone, tokenizer, device, name):
    """A lie, an honest run however unusual, or a failure, whose reason is the one that it has without the lock."""
    edit, reason = RUNS[name]
    row, log = clone.run(edit, "--seconds=0.3" if reason == TRAINED_LONGER else "--tokens=300")
    assert re.match(reason or "$", row["reason"]), (row, log)
    assert row["val_bpb"] == (0.0 if reason else pytest.approx(true_bpb(tokenizer), abs=1e-6))
    assert (row["status"] == "crash") == bool(reason)
    assert (row["commit"], row["description"]) == ("abc1234", "idea")
    assert (row["gpu"] == "cpu") == (device.type == "cpu")
    assert name not in HONEST_EDITS or re.search(r"locked: \d+\.\d s to the first step, \d+\.\d s of training", log)


@pytest.mark.parametrize("name", mostly_slow(FENCED, "reads_val", "looks_into_the_referee"))
@pytest.mark.skipif(bool(LANDLOCK), reason=LANDLOCK)
def test_what_the_fence_forbids_is_an_error_with_its_line(clone, name):
    row, log = clone.run(FENCED[name], "--tokens=300")
    assert re.match("(Permission|OS)Error line", row["reason"]), log
    assert "val and test are out of its reach" in log


def test_a_run_that_cannot_be_scored_is_a_crash_before_it_begins(clone, monkeypatch):
    def damaged(*args):
        raise prepare.PrepareError("val_00000.bin: damaged")

    monkeypatch.setattr(remote, "Referee", damaged)
    assert clone.run("", "--tokens=300")[0]["reason"] == "val_00000.bin: damaged"


def test_without_landlock_the_log_says_so_and_the_run_is_scored(clone, tokenizer, monkeypatch):
    def missing(hidden):
        raise OSError(38, "no Landlock: Function not implemented")

    monkeypatch.setattr(night_run, "fence", missing)
    row, log = clone.run("", "--tokens=300")
    assert row["val_bpb"] == pytest.approx(true_bpb(tokenizer), abs=1e-6)
    assert log.splitlines()[-1].endswith("; not fenced: [Errno 38] no Landlock: Function not implemented")


def played(cls, tokenizer, splits=("val",), asked=None) -> dict:
    """What the row of a model says that another process has trained. asked: splits that it wants to be scored."""
    referee = remote.Referee(list(splits), "cpu", math.inf)
    if not (pid := os.fork()):
        os.environ["AUTORESEARCH_RUN"] = json.dumps(referee.record)
        try:
            remote.tell(tokens=0)
            model = cls(tokenizer.get_vocab_size())
            model.config = SimpleNamespace(device_batch_size=B, seq_len=T)
            remote.tell(tokens=9_000_000)
            for split in asked or splits:
                harness.score(model, tokenizer, split)
        except BaseException as error:
            remote.tell(reason=crash_reason(error))
        os._exit(0)
    referee.thread.start()
    os.waitpid(pid, 0)
    referee.theirs.close()
    referee.thread.join(30)
    return referee.row


@pytest.mark.parametrize("name", ["attention", "bf16", "writes_on_its_input", "hides_nan"])
def test_an_honest_model_is_scored_as_what_it_predicts(tokenizer, monkeypatch, name):
    monkeypatch.setattr(prepare, "EVAL_TOKENS", 4000)
    expected = reference(HONEST[name](tokenizer.get_vocab_size()), tokenizer, limit=4000)
    bpb = pytest.approx(expected, rel=1e-3 if name == "bf16" else 1e-5)
    assert played(HONEST[name], tokenizer) == dict(val_bpb=bpb, tokens_M=9.0, memory_gb=0.0)


def test_targets_are_in_no_frame_of_the_process_that_predicts(tokenizer, monkeypatch):
    monkeypatch.setattr(prepare, "EVAL_TOKENS", 4000)
    row = played(FALSE["targets_of_the_caller"][0], tokenizer)

    def likes_repetition(self, logits, idx):  # what it does where it finds none
        return logits.scatter_add(2, idx[..., None], torch.full((*idx.shape, 1), 9.0))

    cls = models("change", likes_repetition)["likes_repetition"]
    assert row["val_bpb"] == pytest.approx(reference(cls(tokenizer.get_vocab_size()), tokenizer, limit=4000), rel=1e-5)


def test_the_test_split_is_scored_too_if_night_asks_and_each_split_once(tokenizer):
    """The better of two scores would be chosen by the held-out text."""
    row = played(HONEST["lm"], tokenizer, ["val", "test"])
    for split in ("val", "test"):
        expected = reference(HONEST["lm"](tokenizer.get_vocab_size()), tokenizer, split)
        assert row[f"{split}_bpb"] == pytest.approx(expected, rel=1e-5)
    assert played(HONEST["lm"], tokenizer, ["val", "test"], ["val", "val"])["reason"].startswith("cannot score val")


def test_the_text_is_read_before_the_run_and_must_have_its_checksum(tokenizer, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(tokenizer.directory, tmp_path / "data"))
    monkeypatch.setattr(prepare, "current_dataset", lambda: folder)
    referee = remote.Referee(["val"], "cpu", 1)
    before = [t.clone() for t in referee.text["val"]]
    with open(folder / "val_00000.bin", "r+b") as file:
        file.seek(128)
        file.write(bytes(9999))
    assert all(map(torch.equal, before, referee.text["val"]))
    with pytest.raises(prepare.PrepareError, match="damaged"):
        remote.Referee(["val"], "cpu", 1)


def ready(referee, T: int, vocab: int) -> torch.Tensor:
    """The row of logits of a referee that has been told that there is one."""
    os.ftruncate(referee.logits, 4 * T * vocab)
    referee.shared = remote.shared_row(referee.logits, T, vocab)
    referee.theirs.send_bytes(b"{}")
    return referee.shared


def test_logits_are_looked_at_in_a_copy(tokenizer):
    """Or another thread could exchange them between the sum and the gathering."""
    referee = remote.Referee([], None, 1)
    shared = ready(referee, 3, 4).fill_(1)
    row = next(referee.rows(torch.zeros(1, 3, dtype=torch.int64)))
    shared.fill_(9)
    assert torch.equal(row, torch.ones(3, 4))


@pytest.mark.gpu
def test_memory_that_is_shared_is_pinned_and_logits_are_looked_at_in_the_memory_of_the_gpu(tokenizer, device):
    x = torch.zeros(1, 300, dtype=torch.int64, device=device)
    referee = remote.Referee([], None, 1)
    shared = ready(referee, 300, 70).fill_(1)
    row = next(referee.rows(x))
    shared.fill_(9)
    assert shared.is_pinned() and row.is_cuda and (row == 1).all()


@pytest.mark.skipif(bool(LANDLOCK), reason=LANDLOCK)
def test_a_fenced_process_reads_all_but_the_hidden_files(tmp_path):
    """By whatever name, and its own processes as well."""
    for name in ("a/val", "a/train", "b/other"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("a/val")
    os.symlink("a", tmp_path / "c")
    script = "cat a/train b/other c/train; cat a/val link c/val ../*/a/val; ln a/val b/val; mv a/val b; cat b/val; echo"
    begin = fence([tmp_path / "a" / "val"])
    out = subprocess.run(["sh", "-c", script], cwd=tmp_path, preexec_fn=begin, text=True, capture_output=True)
    assert out.stdout == "a/trainb/othera/train\n"
    assert (tmp_path / "a" / "val").read_text() == "a/val"


def test_a_locked_checkout_has_this_clones_harness(tokenizer):
    files = our_files(locked=True)
    assert {"harness/remote.py", "harness/referee.py", "prepare.py", "night/run.py"} < files.keys()
    assert "prepare.py" not in our_files(locked=False) and "train.py" not in files


@pytest.mark.slow
def test_a_commit_that_changes_the_harness_and_lies_is_scored_by_the_clones_own(prepared, tokenizer, tmp_path):
    """By the command itself, with its own processes."""
    copy_files(tmp_path)
    lie = TRAIN.replace("EDIT", f"harness.summary.evaluate_bpb = lambda *_: 0.1\nharness.log_result(**{FALSE_ROW})")
    for name, text in {
        ".gitignore": "runs\n__pycache__\n.dataset\nresults.tsv\nlie.py\n",
        "results.tsv": "\t".join(harness.COLUMNS) + "\n",
        "train.py": TRAIN.replace("EDIT", ""),
        "lie.py": lie,
    }.items():
        (tmp_path / name).write_text(text)
    script = f"""\
git init -q -b main; git add .; git commit -q -m start
echo 'evaluate_bpb = lambda *_: 0.1' >> harness/referee.py; cp lie.py train.py; git commit -qam idea; git tag idea
git reset -q --hard HEAD~; {sys.executable} -m night wave --tokens 300 --locked idea"""
    out = subprocess.run(["sh", "-ec", script], cwd=tmp_path, text=True, capture_output=True, timeout=200)
    rows = harness.read_results(tmp_path / "results.tsv")
    assert [row["description"] for row in rows] == ["start", "idea"], out
    assert [row["val_bpb"] for row in rows] == [pytest.approx(true_bpb(tokenizer, 10**9), abs=1e-6)] * 2, out
    logs = [path.read_text() for path in tmp_path.glob("runs/*/log.txt")]
    assert ["locked: " in log for log in logs] == [True] * 2
