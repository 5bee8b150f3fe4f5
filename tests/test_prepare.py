"""prepare.py: set-up, tokenizer, token shards, loader, metric, clock and log do what train.py counts on."""

import csv
import itertools
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_corpus import ROOT, run_prepare, texts, tree, write_parquet

import harness
import prepare
from harness import Clock
from prepare import EVAL_TOKENS, PrepareError, Tokenizer, evaluate_bpb, make_dataloader


def stream_of(tokenizer: Tokenizer, documents: list[str]) -> list[int]:
    return [i for ids in tokenizer.encode(documents, prepend=tokenizer.get_bos_token_id()) for i in ids]


# Set-up


def test_importing_touches_no_gpu_network_or_heavy_module():
    heavy = "sys.modules.keys() & {'torch', 'pyarrow', 'huggingface_hub', 'rustbpe'}"
    code = f"import socket, sys; del socket.socket; import prepare; assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=600)


def test_a_second_run_does_nothing_in_under_a_second(prepared, corpus):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    start = time.perf_counter()
    run = run_prepare("--data", corpus, cache=prepared)
    seconds = time.perf_counter() - start
    assert run.returncode == 0 and "ready: corpus-" in run.stdout, run
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before
    assert seconds < 1.0 or os.getloadavg()[0] > os.cpu_count(), f"{seconds:.2f} s"


@pytest.mark.parametrize("victim", ["train_00001.bin", "val_00000.bin"])
@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_or_damaged_shard_is_made_again_and_the_others_are_kept(
    prepared, corpus, tmp_path, monkeypatch, victim, lost
):
    cache = shutil.copytree(prepared, tmp_path / "cache")
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(cache))
    folder = prepare.current_dataset()
    (folder / victim).write_bytes((folder / victim).read_bytes()[:-1])
    if lost:
        (folder / victim).unlink()
    kept = {path.name: path.stat().st_ino for path in folder.glob("*.bin") if path.name != victim}
    prepare.prepare(str(corpus))
    assert {name: (folder / name).stat().st_ino for name in kept} == kept and len(kept) == 4
    assert tree(cache) == tree(prepared)


def test_tokenizer_does_not_depend_on_number_of_shards_or_threads(prepared, corpus, tmp_path):
    for threads, shards in (("1", 1), ("3", 2)):
        cache = tmp_path / threads
        run = run_prepare("--data", corpus, "--num-shards", shards, cache=cache, RAYON_NUM_THREADS=threads)
        assert run.returncode == 0, run.stderr
        (folder,) = (path for path in cache.iterdir() if path.is_dir())
        assert (folder / "tokenizer.txt").read_bytes() == (prepared / folder.name / "tokenizer.txt").read_bytes()
        assert len(list(folder.glob("train_*.bin"))) == shards


def test_more_shards_extend_and_fewer_are_used(prepared, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path))
    ids = [prepare.dataset_id(prepare.prepare(str(corpus), n)) for n in (1, 3, 1)]
    assert ids[0] == ids[2] != ids[1]
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(prepared))
    assert ids[1] == prepare.dataset_id()


def test_a_long_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    lines = "".join(f"line {i}\n" for i in range(30_000))
    (tmp_path / "book.txt").write_text(lines + "x" * 200_000 + "<|endoftext|><|endoftext|>the end")
    documents = list(prepare.documents(tmp_path / "book.txt"))
    assert "".join(documents) == lines + "x" * 200_000 + "the end"
    assert max(map(len, documents)) <= 2**16 and all(d.endswith("\n") for d in documents[:4]) and len(documents) < 12


def test_the_texts_of_a_parquet_file_come_in_order_with_the_empty_ones(tmp_path):
    documents = [f"document {i}" for i in range(1000)]
    documents[7], documents[300] = "", None
    write_parquet(tmp_path / "a.parquet", documents)
    assert list(prepare.documents(tmp_path / "a.parquet")) == documents


def test_without_network_the_default_falls_back_loudly_and_an_explicit_climbmix_fails(tmp_path):
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    explicit = run_prepare("--data", "climbmix", cache=tmp_path, **nowhere)
    assert explicit.returncode == 1 and explicit.stderr.count("\n") == 1, explicit.stderr
    assert "127.0.0.1:9" in explicit.stderr and "--data DIR" in explicit.stderr
    assert tree(tmp_path) == {"lock": b""}
    default = run_prepare(cache=tmp_path, **nowhere)
    assert default.returncode == 0, default.stderr
    assert "NO NETWORK" in default.stdout and "ready: embedded-" in default.stdout
    assert "cannot reach http://127.0.0.1:9 (" in default.stdout
    folder = tmp_path / (tmp_path / "current").read_text().strip()
    tokenizer = Tokenizer.from_directory(folder)
    assert tokenizer.get_vocab_size() == prepare.VOCAB_SIZE
    assert len(prepare.TokenStream(tokenizer, "val")) > 100_000


# Tokenizer and token shards


@given(texts=st.lists(st.text(max_size=300), max_size=20))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_token_bytes_sum_to_the_bytes_of_the_text(tokenizer, texts):
    table = tokenizer.token_bytes()
    for text in ["naïve 你好 🙂", *texts]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert sum(table[i] for i in ids) == len(text.encode())


def test_get_token_bytes_is_an_int32_tensor_with_zeros_for_special_tokens(tokenizer, device):
    table = prepare.get_token_bytes(device)
    assert table.dtype == torch.int32 and table.device.type == device.type
    assert table.shape == (tokenizer.get_vocab_size(),)
    assert (table == 0).nonzero().flatten().tolist() == [tokenizer.get_bos_token_id() + i for i in range(4)]
    assert prepare.get_token_bytes().device.type == "cpu"


def test_encode_takes_texts_and_lists_and_prepends_by_id_or_name(tokenizer):
    bos, documents = tokenizer.get_bos_token_id(), ["one", "", "naïve 🙂"]
    alone = [tokenizer.encode(document) for document in documents]
    assert tokenizer.encode(documents) == alone
    assert tokenizer.encode(documents, prepend=bos) == [[bos, *ids] for ids in alone]
    assert tokenizer.encode("one", prepend="<|reserved_0|>") == [bos, *alone[0]]


def test_names_of_special_tokens_in_a_text_are_text(tokenizer, tmp_path):
    text = "a <|reserved_0|> b"
    assert tokenizer.get_bos_token_id() not in tokenizer.encode(text)
    write_parquet(tmp_path / "a.parquet", [text])
    prepare.tokenize(prepare.documents(tmp_path / "a.parquet"), tmp_path / "a.bin", tokenizer, math.inf)
    tokens, _ = prepare.open_shard(tmp_path / "a.bin", tokenizer.fingerprint)
    assert list(tokens) == stream_of(tokenizer, [text])


def test_a_million_spaces_do_not_overflow_the_pattern(tokenizer, tmp_path):
    write_parquet(tmp_path / "a.parquet", [" " * 1_000_000])
    prepare.tokenize(prepare.documents(tmp_path / "a.parquet"), tmp_path / "a.bin", tokenizer, math.inf)
    tokens, _ = prepare.open_shard(tmp_path / "a.bin", tokenizer.fingerprint)
    assert tokenizer.decode(list(tokens[1:])) == " " * 1_000_000


def test_shards_hold_each_document_after_bos(tokenizer, corpus):
    for i, tokens in enumerate(prepare.TokenStream(tokenizer, "train", verify=True).tokens):
        assert tokens.dtype == np.uint16 and isinstance(tokens, np.memmap)
        assert list(tokens) == stream_of(tokenizer, texts(i))
    assert i == 2


def test_another_dataset_made_current_during_a_run_does_not_change_the_runs_data(tokenizer, prepared, tmp_path):
    write_parquet(tmp_path / "other" / "a.parquet", texts(99))
    current = (prepared / "current").read_bytes()
    before = next(make_dataloader(tokenizer, 2, 16, "val", "cpu"))[0]
    try:
        prepare.prepare(str(tmp_path / "other"))
        assert torch.equal(next(make_dataloader(tokenizer, 2, 16, "val", "cpu"))[0], before)
    finally:
        (prepared / "current").write_bytes(current)


# Loader


def test_validation_batches_are_the_stream_in_order(tokenizer, device):
    stream = prepare.TokenStream(tokenizer, "val")
    text = torch.from_numpy(stream.read(0, len(stream)).astype(np.int64))
    B, T = 3, 37
    loader = make_dataloader(tokenizer, B, T, "val", device)
    for step in range(5):
        x, y, epoch = next(loader)
        start = step * B * T
        assert x.shape == y.shape == (B, T) and x.dtype == y.dtype == torch.int64 and epoch == 1
        assert x.device.type == device.type
        assert torch.equal(x.cpu().flatten(), text[start : start + B * T])
        assert torch.equal(y.cpu().flatten(), text[start + 1 : start + 1 + B * T])


def test_reads_cross_the_borders_of_shards(tokenizer):
    stream = prepare.TokenStream(tokenizer, "train")
    whole = np.concatenate(stream.tokens)
    assert len(stream) == len(whole) and np.array_equal(stream.read(0, len(stream)), whole)
    for end in map(int, stream.ends[:-1]):
        for start, n in ((end - 5, 10), (end, 10), (end - 10, 10), (end - 1, 1), (5, len(whole) - 5)):
            assert np.array_equal(stream.read(start, n), whole[start : start + n])


@given(total=st.integers(2, 400), T=st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_each_epoch_visits_each_of_its_windows_once_and_no_token_is_out_of_reach(total, T):
    T = min(T, total - 1)
    epochs = {1: [], 2: [], 3: []}
    for start, epoch in prepare.windows(total, T, shuffle=True):
        if epoch > 3:
            break
        epochs[epoch].append(start)
    for starts in epochs.values():
        first, last = min(starts), max(starts)
        assert sorted(starts) == list(range(first, last + 1, T))
        assert 0 <= first < T and total - T <= last + T < total + T  # less than a window is left out at either end


def test_epochs_repeat_their_order_which_is_no_order_of_the_text():
    starts = [start for start, _ in islice(prepare.windows(100_000, 100, shuffle=True), 2 * 999)]
    assert starts[:999] == starts[999:]
    ascending = sum(a < b for a, b in pairwise(starts[:999]))
    assert 400 < ascending < 600


def test_training_sees_its_windows_shuffled_and_validation_in_order(tokenizer):
    for split, ordered in ("train", False), ("val", True):
        stream = prepare.TokenStream(tokenizer, split)
        text = stream.read(0, len(stream)).tolist()
        batches = islice(make_dataloader(tokenizer, 1, 64, split, "cpu"), 12)
        starts = [next(s for s in range(len(text)) if text[s : s + 64] == x[0].tolist()) for x, _, _ in batches]
        assert (starts == sorted(starts)) is ordered, (split, starts)


@pytest.mark.parametrize("total", [129, 128, 127, 65])
def test_no_window_needs_a_target_beyond_the_end(total):
    """128 tokens are one window of 64 and its 64 targets, not two: the last target would be token 128."""
    starts = list(itertools.takewhile(lambda window: window[1] == 1, prepare.windows(total, 64, shuffle=False)))
    assert len(starts) == (total - 1) // 64 and all(start + 64 < total for start, _ in starts)


def test_order_of_training_is_pinned_for_every_machine():
    """A change here makes every earlier result incomparable."""
    first = [start for start, _ in islice(prepare.windows(1_000_000, 512, shuffle=True), 6)]
    assert first == [927781, 806949, 986149, 705573, 740389, 456229]


def test_training_text_does_not_depend_on_batch_size(tokenizer):
    rows = {}
    for B in (1, 4):
        batches = islice(make_dataloader(tokenizer, B, 64, "train", "cpu"), 600 // B)
        rows[B] = torch.cat([torch.cat([x, y], dim=1) for x, y, _ in batches])
    assert torch.equal(rows[1], rows[4])


def test_epoch_counts_up_when_the_text_repeats(tokenizer):
    epochs = [epoch for _, _, epoch in islice(make_dataloader(tokenizer, 16, 256, "train", "cpu"), 60)]
    assert epochs[0] == 1 and epochs[-1] > 1 and epochs == sorted(epochs)


def test_a_loader_left_behind_does_not_keep_the_process(prepared):
    code = "from prepare import *; loader = make_dataloader(Tokenizer.from_directory(), 2, 16, 'train'); next(loader)"
    env = os.environ | {"AUTORESEARCH_CACHE": str(prepared)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, timeout=600)


@pytest.mark.gpu
def test_gpu_batches_equal_cpu_batches_while_the_gpu_lags_behind(tokenizer):
    """A batch is compared again after the next one was taken, behind kernels that keep the stream busy."""
    expected = [
        (x.cuda(), y.cuda(), epoch) for x, y, epoch in islice(make_dataloader(tokenizer, 8, 128, "train", "cpu"), 200)
    ]
    loader = make_dataloader(tokenizer, 8, 128, "train", "cuda")
    busy, wrong = torch.randn(4096, 4096, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    taken = []
    for want in expected:
        taken.append((next(loader), want))
        for _ in range(5):
            busy = (busy @ busy).clamp(-1, 1)
        for (x, y, epoch), (x_want, y_want, epoch_want) in taken[-2:]:
            wrong += (x != x_want).sum() + (y != y_want).sum()
            assert epoch == epoch_want
    assert wrong.item() == 0


# Metric


class Uniform(torch.nn.Module):
    """Every token equally likely; remembers what it was asked."""

    def __init__(self, vocab: int, device):
        super().__init__()
        self.vocab, self.one, self.asked = vocab, torch.nn.Parameter(torch.ones((), device=device)), []

    def forward(self, x, y, reduction):
        assert reduction == "none" and 0 <= x.min() and x.max() < self.vocab
        self.asked.append((x.clone(), y.clone()))
        return torch.where(y == -1, 0.0, math.log(self.vocab) * self.one).view(-1)


class Bigram(torch.nn.Module):
    """Nats of a target depend on its input token alone."""

    def __init__(self, vocab: int, device):
        super().__init__()
        torch.manual_seed(0)
        self.logits = torch.nn.Embedding(vocab, vocab, device=device)

    def forward(self, x, y, reduction):
        logits = self.logits(x).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, y.view(-1), ignore_index=-1, reduction=reduction)


def scored(tokenizer: Tokenizer, tokens: int) -> tuple[list[int], int]:
    """Targets that count (no BOS), and their bytes, one at a time from the text itself."""
    targets = stream_of(tokenizer, texts(6542))[1 : tokens + 1]
    targets = [t for t in targets if t != tokenizer.get_bos_token_id()]
    nbytes = sum(len(tokenizer.encoding.decode_single_token_bytes(t)) for t in targets)
    if tokens == EVAL_TOKENS:
        assert nbytes == sum(len(document.encode()) for document in texts(6542))
    return targets, nbytes


@pytest.mark.parametrize(("B", "T"), [(1, 64), (3, 100), (7, 333), (16, 2048)])
@pytest.mark.parametrize("tokens", [1000, EVAL_TOKENS])
def test_bpb_of_a_uniform_model_is_log2_vocab_times_targets_over_bytes(tokenizer, device, monkeypatch, B, T, tokens):
    monkeypatch.setattr(prepare, "EVAL_TOKENS", tokens)
    vocab = tokenizer.get_vocab_size()
    targets, nbytes = scored(tokenizer, tokens)
    assert (len(targets) % (B * T)) != 0  # there is a remainder
    bpb = evaluate_bpb(Uniform(vocab, device), tokenizer, B, T)
    assert bpb == pytest.approx(math.log2(vocab) * len(targets) / nbytes, rel=1e-6)


def test_bpb_is_the_same_for_every_batch_size_and_window(tokenizer, device):
    model = Bigram(tokenizer.get_vocab_size(), device)
    values = [evaluate_bpb(model, tokenizer, B, T) for B, T in ((1, 128), (3, 128), (16, 128), (2, 999))]
    assert values == pytest.approx([values[0]] * 4, rel=1e-9)


def test_every_target_is_asked_exactly_once_in_batches_of_one_shape(tokenizer, device, monkeypatch):
    model = Uniform(tokenizer.get_vocab_size(), device)
    monkeypatch.setattr(prepare, "EVAL_TOKENS", 1234)
    evaluate_bpb(model, tokenizer, 3, 50)
    assert {(x.shape, y.shape) for x, y in model.asked} == {((3, 50), (3, 50))}
    x, y = (torch.cat([batch[i].flatten() for batch in model.asked]) for i in range(2))
    stream = stream_of(tokenizer, texts(6542))
    assert x[:1234].tolist() == stream[:1234] and y[:1234].tolist() == stream[1:1235]
    assert (y[1234:] == -1).all() and len(model.asked) == math.ceil(1234 / 150)


def test_the_test_split_is_scored_like_val_when_asked_for(tokenizer, device):
    model = Uniform(tokenizer.get_vocab_size(), device)
    bpb = evaluate_bpb(model, tokenizer, 3, 50, split="test")
    stream = stream_of(tokenizer, texts(6541))
    asked = torch.cat([y.flatten() for _, y in model.asked])
    assert asked[: len(stream) - 1].tolist() == stream[1:] and (asked[len(stream) - 1 :] == -1).all()
    targets = len(stream) - len(texts(6541))  # no BOS
    nbytes = sum(len(document.encode()) for document in texts(6541))
    assert bpb == pytest.approx(math.log2(model.vocab) * targets / nbytes, rel=1e-6)


def test_a_short_validation_split_is_scored_whole_and_said_so(tokenizer, device, capsys, monkeypatch):
    model = Uniform(tokenizer.get_vocab_size(), device)
    evaluate_bpb(model, tokenizer, 4, 64)
    total = len(prepare.TokenStream(tokenizer, "val"))
    assert sum((y >= 0).sum().item() for _, y in model.asked) == total - 1
    assert f"{total - 1:,} targets" in capsys.readouterr().out
    monkeypatch.setattr(prepare, "EVAL_TOKENS", total - 1)
    evaluate_bpb(model, tokenizer, 4, 64)
    assert not capsys.readouterr().out


def test_a_nan_on_a_bos_target_does_not_count_but_one_elsewhere_does(tokenizer, device):
    class Nan(Uniform):
        def forward(self, x, y, reduction):
            return torch.where(y.view(-1) == self.where, torch.nan, super().forward(x, y, reduction))

    model = Nan(tokenizer.get_vocab_size(), device)
    model.where = tokenizer.get_bos_token_id()
    assert math.isfinite(evaluate_bpb(model, tokenizer, 4, 64))
    model.where = tokenizer.encode(texts(6542)[0])[0]
    assert math.isnan(evaluate_bpb(model, tokenizer, 4, 64))


def test_autoresearchs_own_train_py_finds_what_it_imports_and_calls(tokenizer, device, capsys):
    """Its lines at 228791f that touch prepare, and a model of its interface."""
    from prepare import MAX_SEQ_LEN, TIME_BUDGET, Tokenizer, evaluate_bpb, make_dataloader

    tokenizer = Tokenizer.from_directory()
    model = Uniform(tokenizer.get_vocab_size(), device)
    train_loader = make_dataloader(tokenizer, 2, MAX_SEQ_LEN, "train")
    x, y, epoch = next(train_loader)
    assert x.shape == y.shape == (2, 2048) and x.device.type == device.type and epoch == 1 and TIME_BUDGET == 300
    assert evaluate_bpb(model, tokenizer, 2) == pytest.approx(evaluate_bpb(model, tokenizer, 3, 64), rel=1e-9)


# Clock


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time, settable."""
    now = [1000.0]
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


LOSS = torch.tensor(2.0)


def test_clock_runs_from_start_to_stop(now):
    clock = Clock()
    assert clock.elapsed() == clock.progress() == 0
    clock.start()
    now[0] += 75
    clock.advance(4096, LOSS, 1)
    assert clock.elapsed() == 75 and clock.progress() == 0.25 and (clock.tokens, clock.steps) == (4096, 1)
    assert clock.tokens_left() == 3 * 4096
    now[0] += 227
    assert clock.stop() == 302 and clock.progress() == 1.0
    now[0] += 100
    assert clock.stop() == clock.elapsed() == 302


def test_clock_counts_tokens_where_they_are_limited(now):
    clock = Clock(tokens=1000)
    clock.start()
    now[0] += 1e6
    clock.advance(250, LOSS, 1)
    assert clock.progress() == 0.25 and clock.tokens_left() == 750 and clock.running()
    clock.advance(750, LOSS, 1)
    assert clock.progress() == 1.0 and clock.tokens_left() == 0 and not clock.running()


def test_the_pace_is_not_known_in_the_first_twentieth_of_the_budget(now):
    clock = Clock()
    clock.start()
    now[0] += 14
    clock.advance(100, LOSS, 1)
    assert clock.tokens_left() == math.inf
    now[0] += 16
    assert clock.tokens_left() == pytest.approx(900)


@pytest.mark.parametrize(
    ("steps", "elapsed", "running"),
    [
        (0, 0, True),
        (100, 299.9, True),  # the next would end at 302.9
        (10, 270, True),  # at 297
        (10, 278, False),  # at 305.8
        (1000, 300, False),
        (2, 298, False),
    ],
)
def test_no_step_begins_that_would_end_more_than_three_seconds_over_the_budget(now, steps, elapsed, running):
    clock = Clock()
    clock.start()
    now[0] += elapsed
    clock.steps = steps
    assert clock.running() is running


def test_a_step_that_begins_after_the_budget_is_refused(now):
    clock = Clock()
    clock.start()
    now[0] += 299
    clock.advance(1, LOSS, 1)
    now[0] += 60
    clock.advance(1, LOSS, 1)  # it began in time
    with pytest.raises(RuntimeError, match="359 s into a budget of 300 s"):
        clock.advance(1, LOSS, 1)


@pytest.mark.parametrize(("loss", "reason"), [(math.nan, "NaN"), (math.inf, "loss inf"), (1234.5, "loss 1234")])
def test_a_lost_loss_ends_the_run_a_step_later_or_at_its_end(now, loss, reason):
    bad = torch.tensor(loss)
    for steps in (1, 2):
        clock = Clock(tokens=10)
        clock.start()
        clock.advance(1, bad, 1)
        with pytest.raises(FloatingPointError, match=rf"^{reason}\S* at step 1$"):
            clock.advance(1, LOSS, 1) if steps == 2 else clock.stop()
        clock.release()


@pytest.mark.parametrize("budget", [{"seconds": 0}, {"seconds": -1}, {"seconds": math.nan}, {"tokens": 0}])
def test_an_empty_budget_is_refused(budget):
    with pytest.raises(PrepareError, match="more than 0"):
        Clock(**budget)


# Log


@pytest.fixture
def log(tmp_path):
    def log(val_bpb=1.0, path=tmp_path / "results.tsv", gpu="T4", dataset="climbmix-1", **fields) -> str:
        fields = {"memory_gb": 2.5, "tokens_M": 39.34, "commit": "abcdef0123", "description": "try"} | fields
        return harness.log_result(val_bpb=val_bpb, gpu=gpu, dataset=dataset, path=path, **fields)

    log.path = tmp_path / "results.tsv"
    return log


def test_keep_is_the_lowest_yet_on_the_same_gpu_and_dataset(log):
    assert log(1.5) == "keep"
    assert log(1.5) == "discard"  # a tie is no gain
    assert log(1.6) == "discard"
    assert log(1.4) == "keep"
    assert log(0.0, reason="out of memory") == "crash"
    assert log(math.nan) == "crash"
    assert log(1.3999999) == "discard"  # the same as written
    assert log(1.9, gpu="H100") == "keep"
    assert log(1.8, dataset="embedded-1") == "keep"
    assert log(1.39) == "keep"
    header, *rows = log.path.read_text().splitlines()
    assert header == "commit\tval_bpb\tmemory_gb\tstatus\tdescription\tgpu\tdataset\ttokens_M"
    assert rows[0] == "abcdef0\t1.500000\t2.5\tkeep\ttry\tT4\tclimbmix-1\t39.3"
    assert rows[4] == "abcdef0\t0.000000\t0.0\tcrash\ttry [out of memory]\tT4\tclimbmix-1\t0.0"
    assert rows[5] == "abcdef0\t0.000000\t0.0\tcrash\ttry [val_bpb nan]\tT4\tclimbmix-1\t0.0"
    assert [row["status"] for row in harness.read_results(log.path)].count("keep") == 5


def test_the_best_result_is_of_that_gpu_and_dataset_and_no_crash(log):
    assert harness.best_result("T4", "climbmix-1", log.path) is None
    log(1.5, description="first")
    log(1.3, gpu="H100")
    log(0.0, reason="killed")
    log(1.4, description="second")
    assert harness.best_result("T4", "climbmix-1", log.path)["description"] == "second"


def test_a_kept_row_that_was_edited_to_discard_still_is_a_figure_to_beat(log):
    log(1.2)
    log.path.write_text(log.path.read_text().replace("keep", "discard"))
    assert log(1.3) == "discard" and log(1.1) == "keep"


@pytest.mark.parametrize(
    "subject",
    ['tab\there "quoted', '"', "line\nbreak\r\n", "nul\0 \x1b[31mred", "é 你好 🙂", "\u2028\x85\ud800", "", "#1"],
)
def test_any_subject_makes_one_row_that_common_parsers_read(log, subject):
    log(1.5, description=subject, gpu=subject)
    log(1.4)
    text = log.path.read_bytes().decode()
    assert len(text.splitlines()) == 3 and text.endswith("\n")
    rows = list(csv.DictReader(text.splitlines(), delimiter="\t"))  # quotes as pandas treats them
    assert [row["val_bpb"] for row in rows] == ["1.500000", "1.400000"]
    assert all(None not in row and None not in row.values() for row in rows)
    assert len(harness.read_results(log.path)) == 2


def test_commit_and_description_come_from_git(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", 'wider "MLP"\tagain'], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    harness.log_result(val_bpb=1.0, memory_gb=1.0, gpu="T4", dataset="d")
    (row,) = harness.read_results()
    assert row["commit"] == head[:7] and row["description"] == "wider 'MLP' again"


def test_without_git_the_row_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.tsv")
    for path in (str(tmp_path), os.environ["PATH"]):  # no git at all; git, but no repository
        monkeypatch.setenv("PATH", path)
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        harness.log_result(val_bpb=1.0, memory_gb=1.0, gpu="T4", dataset="d")
    assert [(row["commit"], row["description"]) for row in harness.read_results()] == [("0000000", "")] * 2


def test_status_is_decided_by_one_at_a_time(tmp_path):
    deciding = []

    def row() -> tuple[str, str]:
        deciding.append(1)
        time.sleep(0.01)
        alone = len(deciding) == 1
        deciding.pop()
        return "keep", str(alone)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: harness.append_row(tmp_path / "results.tsv", row), range(12)))
    assert (tmp_path / "results.tsv").read_text().splitlines()[1:] == ["True"] * 12


def test_rows_logged_at_once_are_all_there_and_one_is_best(tmp_path):
    code = (
        "import sys, harness\nfor i in range(25): harness.log_result(val_bpb=1 + (i * 7 + int(sys.argv[2])) % 26 / 100"
    )
    code += ", memory_gb=1, gpu='g', dataset='d', commit='c', description='x' * 500, path=sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path / "results.tsv")]
    writers = [subprocess.Popen([*command, str(i)], cwd=ROOT) for i in range(4)]
    assert [writer.wait(600) for writer in writers] == [0] * 4
    assert len((tmp_path / "results.tsv").read_text().splitlines()) == 101
    rows, best = harness.read_results(tmp_path / "results.tsv"), math.inf
    assert len(rows) == 100
    for row in rows:  # each status follows from the rows above it: reading and appending are one step
        assert row["status"] == ("keep" if row["val_bpb"] < best else "discard")
        best = min(best, row["val_bpb"])
