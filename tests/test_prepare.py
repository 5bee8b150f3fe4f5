"""prepare.py: set-up, tokenizer, token shards, loader and metric do what train.py counts on."""

import math
import re
import shutil
import sysconfig
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpus import main_of_prepare, run_prepare, texts, tree, write_parquet

import prepare
from prepare import EVAL_TOKENS, Tokenizer, evaluate_bpb, make_dataloader

# Set-up


def test_a_run_makes_lost_and_damaged_shards_again_and_keeps_the_others(dataset, prepared, corpus):
    before = (dataset / "train_00001.bin").read_bytes()
    (dataset / "train_00001.bin").write_bytes(before[:-1] + b"!")
    (dataset / "val_00000.bin").unlink()
    inodes = {name: (dataset / name).stat().st_ino for name in ("train_00000.bin", "train_00002.bin", "tokenizer.txt")}
    prepare.prepare(str(corpus))
    assert {name: (dataset / name).stat().st_ino for name in inodes} == inodes
    assert tree(dataset.parent) == tree(prepared)


def test_a_terminal_that_lacks_a_character_of_a_path_gets_another_one(prepared, tmp_path, monkeypatch):
    (tmp_path / "🚀").symlink_to(prepared)
    monkeypatch.setenv("PYTHONIOENCODING", "gbk")
    run = run_prepare("--verify", cache=tmp_path / "🚀")
    assert run.returncode == 0 and re.search(r"ready: .* in .*/\?/", run.stdout), run


def test_the_tokenizer_takes_only_so_much_text_in_all_and_of_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "TOKENIZER_CHARS", 4000)
    monkeypatch.setattr(prepare, "TOKENIZER_DOC_CHARS", 1000)
    documents = iter(["abc " * 250 + "xyz " * 250] * 4 + ["uvw " * 250] * 4)
    tokens = set(Tokenizer.train(documents, tmp_path).encoding.token_byte_values())
    assert b" abc" in tokens and not {b"xy", b"yz", b"uv", b"vw"} & tokens and len(list(documents)) == 4


def test_documents_of_a_text_lose_marks_of_editors_and_a_long_one_is_cut_at_line_ends(tmp_path):
    """Windows' editors write a byte order mark at the start of a file; files put together have several."""
    lines = "".join(f"line {i}\n" for i in range(30_000)) + "x" * 200_000
    text = "\ufeffone\r\n\r\ntwo\r\n<|endoftext|>\n\ufeff\nthree<|endoftext|><|endoftext|>" + lines
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert list(prepare.documents(tmp_path / "a.txt")) == ["one\n\ntwo", "three", "", lines]
    passages = prepare.PASSAGE.findall(lines)
    assert "".join(passages) == lines
    assert max(map(len, passages)) <= 2**13 and all(p.endswith("\n") for p in passages[:30]) and len(passages) < 75


def test_a_large_text_is_read_in_little_more_memory_than_its_bytes(tmp_path):
    """One emoji would make it four bytes per character if all of it were one str."""
    lines = "a line of a book\n" * 6000 + "<|endoftext|>"
    (tmp_path / "books.txt").write_text(7 * lines + "🙂" + 193 * lines, "utf-8")
    size = (tmp_path / "books.txt").stat().st_size
    tracemalloc.start()
    assert sum(1 for _ in prepare.documents(tmp_path / "books.txt")) == 201
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 20e6 and peak < 2.2 * size, f"{peak / size:.1f} times its size"


@pytest.fixture
def offline(tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """Runs the command line without a network, with a standard library of a few modules."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "python").mkdir()
    for i, text in enumerate(texts(0)):
        (tmp_path / f"python/m{i}.py").write_text(text)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path / "python")}.get)
    return partial(main_of_prepare, capsys, monkeypatch)


def test_without_network_the_default_falls_back_loudly_and_an_explicit_climbmix_fails(offline, tmp_path):
    """The embedded corpus is for the time being: the same command gets climbmix later."""
    said = offline("--data", "climbmix")
    assert said.startswith("failed: cannot reach http://127.0.0.1:9 (") and "\n" not in said and "--data DIR" in said
    assert tree(tmp_path / "cache") == {"lock": b""}
    said = offline()
    assert "NO NETWORK" in said and "ready: embedded-" in said and "cannot reach http://127.0.0.1:9 (" in said
    assert not prepare.DATASET.exists()
    said = offline()  # what is prepared now is what the cache has
    assert f"NO NETWORK: using {prepare.current_dataset().name}, which is ready in" in said
    prepare.DATASET.write_text(prepare.current_dataset().name)  # it has trained on it
    assert "for other text, give --data climbmix" in offline() and "NO NETWORK" not in offline()
    prepare.DATASET.write_text("climbmix@12345678x1")  # it has a dataset: another one is no replacement
    assert offline().startswith("failed: ")


def test_without_network_a_new_clone_uses_the_dataset_that_the_cache_has_if_it_is_whole(prepared, offline, tmp_path):
    cache = shutil.copytree(prepared, tmp_path / "cache")
    name = (cache / "current").read_text().strip()
    said = offline()
    assert "ready: corpus-" in said and f"NO NETWORK: using {name}, which is ready in {cache}" in said
    assert not prepare.DATASET.exists()  # later it may be climbmix
    (cache / name / "val_00000.bin").unlink()
    assert "ready: embedded-" in offline()


# Tokenizer and token shards


def test_encode_takes_texts_and_lists_and_prepends_by_id_or_name(tokenizer, device):
    """And each token has its raw bytes, special ones none."""
    bos, documents = tokenizer.get_bos_token_id(), ["one", "", "naïve 你好 🙂"]
    alone = [tokenizer.encode(document) for document in documents]
    assert tokenizer.encode(documents) == alone and list(map(tokenizer.decode, alone)) == documents
    assert tokenizer.encode(documents, prepend=bos) == [[bos, *ids] for ids in alone]
    assert tokenizer.encode("one", prepend="<|reserved_0|>") == [bos, *alone[0]]
    table = prepare.get_token_bytes(device)
    assert (table.dtype, table.device.type, len(table)) == (torch.int32, device.type, tokenizer.get_vocab_size())
    assert [table[ids].sum() for ids in alone] == [len(document.encode()) for document in documents]
    assert (table == 0).nonzero().flatten().tolist() == [bos, bos + 1, bos + 2, bos + 3]


@pytest.mark.parametrize("text", [" " * 10**6, "word " * 10**5, "a <|reserved_0|> b"], ids=["spaces", "words", "name"])
def test_any_text_survives_its_shard_which_holds_the_ids_that_encode_gives(tokenizer, tmp_path, text):
    """A million spaces do not overflow the pattern, and what looks like a special token is text."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.encode([text, "x"], prepend=7)[0] == [7, *ids]
    write_parquet(tmp_path / "a.parquet", [text])
    prepare.tokenize(prepare.documents(tmp_path / "a.parquet"), tmp_path / "train.bin", tokenizer)
    bos, *tokens = prepare.open_shard(tmp_path / "train.bin", tokenizer.fingerprint)[0].tolist()
    assert tokens == ids and bos == tokenizer.get_bos_token_id() not in ids


# Loader


def test_validation_batches_are_the_stream_in_order(tokenizer, device):
    """And stay so while others are read."""
    stream = prepare.TokenStream(tokenizer, "val")
    text = torch.from_numpy(stream.read(0, len(stream)).astype(np.int64))
    B, T = 3, 37
    for step, (x, y, epoch) in enumerate([*islice(make_dataloader(tokenizer, B, T, "val", device), 5)]):
        assert x.shape == y.shape == (B, T) and x.dtype == y.dtype == torch.int64 and epoch == 1
        assert x.device.type == device.type
        expected = text[step * B * T : (step + 1) * B * T + 1]
        assert torch.equal(x.cpu().flatten(), expected[:-1]) and torch.equal(y.cpu().flatten(), expected[1:])


def test_reads_cross_the_borders_of_shards(tokenizer):
    stream = prepare.TokenStream(tokenizer, "train")
    whole = np.concatenate([stream.shard(i) for i in range(3)])
    assert len(stream) == len(whole) and np.array_equal(stream.read(0, len(stream)), whole)
    for end in map(int, stream.ends[:-1]):
        for start, n in ((end - 5, 10), (end, 10), (end - 10, 10), (end - 1, 1), (5, len(whole) - 5)):
            assert np.array_equal(stream.read(start, n), whole[start : start + n])


@given(total=st.integers(2, 400), T=st.integers(1, 60), shuffle=st.booleans())
@settings(max_examples=200)
def test_each_epoch_visits_each_of_its_windows_once_and_no_token_is_out_of_reach(total, T, shuffle):
    """Nor is a target needed beyond the end: 128 tokens are one window of 64 and its targets, not two."""
    T = min(T, total - 1)
    epochs = {1: [], 2: [], 3: []}
    for start, epoch in islice(prepare.windows(total, T, shuffle), 3 * (total // T + 1)):
        epochs.setdefault(epoch, []).append(start)
    first, last = min(epochs[1]), max(epochs[1])
    assert sorted(epochs[1]) == list(range(first, last + 1, T)) and (shuffle or epochs[1][0] == first == 0)
    assert 0 <= first < T and total - T <= last + T < total  # less than a window is left out at either end
    assert epochs[1] == epochs[2]


def test_training_text_is_shuffled_alike_on_every_machine_whatever_the_batch_size(tokenizer):
    """A change here makes every earlier result incomparable."""
    first = [start for start, _ in islice(prepare.windows(1_000_000, 512, shuffle=True), 6)]
    assert first == [927781, 806949, 986149, 705573, 740389, 456229]
    rows = {}
    for B in (1, 4):
        batches = islice(make_dataloader(tokenizer, B, 64, "train", "cpu"), 600 // B)
        rows[B] = torch.cat([torch.cat([x, y], dim=1) for x, y, _ in batches])
    text = prepare.TokenStream(tokenizer, "train").read(0, 640)
    assert torch.equal(rows[1], rows[4]) and rows[1][:10, :64].flatten().tolist() != text.tolist()


def test_windows_longer_than_the_split_are_refused_before_the_first_batch(tokenizer):
    total = len(prepare.TokenStream(tokenizer, "val"))
    next(make_dataloader(tokenizer, 1, total - 1, "val", "cpu"))
    with pytest.raises(prepare.PrepareError, match="prepare more text"):
        next(make_dataloader(tokenizer, 1, total, "val", "cpu"))


def test_a_batch_for_a_gpu_is_pinned_and_copied_without_a_wait(tokenizer, monkeypatch):
    """Otherwise the host waits for the kernels before it, and the GPU then for the host."""
    empty, asked = torch.empty, []
    monkeypatch.setattr(
        torch, "empty", lambda *size, **options: asked.append(options.pop("pin_memory")) or empty(*size, **options)
    )
    monkeypatch.setattr(
        torch.Tensor, "to", lambda batch, device, **options: asked.append((device.type, options)) or batch
    )
    next(make_dataloader(tokenizer, 2, 64, "train", "cuda"))
    assert asked == [True, ("cuda", {"non_blocking": True})]


# Metric


class Guess(torch.nn.Module):
    """Nats of a target depend on its input token alone, and are NaN where they do not count: at BOS. Remembers what it
    was asked."""

    def __init__(self, tokenizer, device):
        super().__init__()
        self.nats = torch.nn.Parameter(torch.linspace(1, 9, tokenizer.get_vocab_size(), device=device))
        self.bos, self.asked = tokenizer.get_bos_token_id(), []

    def forward(self, x, y, reduction):
        assert reduction == "none" and 0 <= x.min() and x.max() < len(self.nats)
        self.asked.append((x.clone(), y.clone()))
        return torch.where(y == self.bos, math.nan, self.nats[x]).where(y >= 0, 0.0).view(-1)


@pytest.mark.parametrize(("B", "T", "split", "seed"), [(3, 50, "val", 6542), (7, 333, "test", 6541)])
@pytest.mark.parametrize("limit", [1234, EVAL_TOKENS])
def test_bpb_scores_each_target_once_in_batches_of_one_shape(
    tokenizer, device, monkeypatch, capsys, split, seed, limit, B, T
):
    """A split of fewer targets than EVAL_TOKENS is scored whole, and said so."""
    monkeypatch.setattr(prepare, "EVAL_TOKENS", limit)
    model, bos = Guess(tokenizer, device), tokenizer.get_bos_token_id()
    stream = [i for ids in tokenizer.encode(texts(seed), prepend=bos) for i in ids]
    bpb = evaluate_bpb(model, tokenizer, B, T, split)
    n = min(limit, len(stream) - 1)
    x, y = (torch.cat([batch[i].flatten() for batch in model.asked]) for i in range(2))
    assert x[:n].tolist() == stream[:n] and y[:n].tolist() == stream[1 : n + 1] and (y[n:] == -1).all()
    assert {(x.shape, y.shape) for x, y in model.asked} == {((B, T), (B, T))} and len(model.asked) == -(-n // (B * T))
    pairs = [(before, target) for before, target in pairwise(stream[: n + 1]) if target != bos]
    nbytes = sum(len(tokenizer.encoding.decode_single_token_bytes(target)) for _, target in pairs)
    assert limit == 1234 or nbytes == sum(len(document.encode()) for document in texts(seed))
    nats = model.nats.tolist()
    assert bpb == pytest.approx(sum(nats[before] for before, _ in pairs) / math.log(2) / nbytes, rel=1e-6)
    assert (f"the {split} split has only {n:,} targets" in capsys.readouterr().out) == (n < limit)


def test_the_model_is_scored_in_eval_mode_and_given_back_as_it_was(tokenizer, device):
    """A loss term or a layer of training alone stays out of val_bpb."""

    class Noisy(Guess):
        def __init__(self, *args):
            super().__init__(*args)
            self.noise, self.frozen = torch.nn.Dropout(0.9), torch.nn.Dropout(0.9).eval()

        def forward(self, x, y, reduction):
            assert not any(module.training for module in self.modules())
            return self.frozen(self.noise(super().forward(x, y, reduction))) + 1e9 * self.training

    model = Noisy(tokenizer, device)
    plain = evaluate_bpb(Guess(tokenizer, device), tokenizer, 4, 64)
    assert evaluate_bpb(model, tokenizer, 4, 64) == plain
    assert [module.training for module in model.modules()] == [True, True, False]


def test_autoresearchs_own_train_py_finds_what_it_imports_and_calls(tokenizer, device, capsys):
    """Its lines at 228791f that touch prepare, and a model of its interface."""
    from prepare import MAX_SEQ_LEN, TIME_BUDGET, Tokenizer, evaluate_bpb, make_dataloader

    tokenizer = Tokenizer.from_directory()
    model = Guess(tokenizer, device)
    train_loader = make_dataloader(tokenizer, 2, MAX_SEQ_LEN, "train")
    x, y, epoch = next(train_loader)
    assert x.shape == y.shape == (2, 2048) and x.device.type == device.type and epoch == 1 and TIME_BUDGET == 300
    assert evaluate_bpb(model, tokenizer, 2) == pytest.approx(evaluate_bpb(model, tokenizer, 3, 64), rel=1e-9)
