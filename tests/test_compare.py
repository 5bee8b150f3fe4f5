"""compare.py: one shuffled text for everybody, the same rows, two metrics, no text twice."""

import re
from collections import Counter
from pathlib import Path

import compare
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from bench_train import measure
from small_corpus import copy_files, texts, write_corpus, write_parquet

import prepare


def documents(folder: Path, *names: str) -> list[str]:
    return [text for name in names for text in pq.read_table(folder / name).column(0).to_pylist()]


def test_every_train_document_is_once_somewhere_and_none_of_validation_or_test(tmp_path):
    source = write_corpus(tmp_path / "source")
    leaked = texts(6542, count=2)
    write_parquet(source / "shard_00001.parquet", [*texts(1), *texts(0, count=5), *leaked, "", None])
    write_parquet(source / compare.VAL, [*texts(6542), *leaked])
    counts = compare.shuffle(source, tmp_path / "a")
    names = [name for name in counts if name not in (compare.VAL, compare.TEST)]
    assert names == ["shard_00000.parquet", "shard_00001.parquet", "shard_00002.parquet"]
    train = documents(tmp_path / "a", *names)
    expected = [text for seed in (0, 1, 2) for text in texts(seed)]
    assert Counter(train) == Counter(expected) and train != expected
    assert documents(tmp_path / "a", compare.VAL) == texts(6542)
    assert sorted(path.name for path in (tmp_path / "a/peers").iterdir()) == [*names, compare.VAL]
    compare.shuffle(source, tmp_path / "other", seed=8)
    assert documents(tmp_path / "other", *names) != train
    (source / compare.TEST).unlink()
    counts = compare.shuffle(source, tmp_path / "no-test")  # everybody leaves the same 5% alone
    assert counts[compare.TEST] == 9
    assert Counter(documents(tmp_path / "no-test", *counts)) == Counter(expected + texts(6542))


def test_rows_begin_with_a_document_and_use_each_once():
    random = np.random.RandomState(0)
    sizes = random.randint(2, 60, 400)
    text = [np.arange(size) + 1000 * i for i, size in enumerate(sizes)]  # token 1000 i + j: the j-th of document i
    rows = [*compare.pack(text, 40, buffer_size=20)]
    assert {len(row) for row in rows} == {40} and len(rows) > 200
    kept = Counter()
    for row in rows:
        starts = np.flatnonzero(row % 1000 == 0)
        assert starts[0] == 0
        for part in np.split(row.astype(int), starts[1:]):
            assert (np.diff(part) == 1).all(), "a document, perhaps without its end"
            kept[part[0]] += 1
    assert set(kept.values()) == {1}


class Model(torch.nn.Linear):
    """Its nats depend on the target, its position and the tokens before it."""

    def forward(self, x, y, reduction):
        return (1 + y % 7 + torch.arange(x.shape[1]) / 100 + x.cumsum(1) % 3).view(-1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A shuffled corpus, beside the cache that it is prepared in and the rows that are saved of it."""
    place = tmp_path_factory.mktemp("compare")
    compare.shuffle(write_corpus(place / "source"), place / "new")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTORESEARCH_CACHE", str(place / "cache"))
        tokenizer = prepare.Tokenizer.from_directory(prepare.prepare(str(place / "new")))
        compare.save_rows(prepare, tokenizer, place / "rows.npz")
    return place / "new"


@pytest.fixture
def saved(corpus, monkeypatch) -> Path:
    """The rows; and the cache is the current one."""
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(corpus.with_name("cache")))
    return corpus.with_name("rows.npz")


def test_windows_are_val_bpb_and_rows_are_scored_target_by_target(saved):
    tokenizer, model = prepare.Tokenizer.from_directory(), Model(1, 1)
    nats = lambda x, y: model(x, y, "none")  # noqa: E731
    expected = prepare.evaluate_bpb(model, tokenizer, 1, 2048)
    x, y = (torch.from_numpy(part).long() for part in np.load(saved)["rows"])
    assert (x[:, 0] == tokenizer.get_bos_token_id()).all()
    sizes = torch.tensor(tokenizer.token_bytes)[y]
    by_hand = (nats(x, y).view(y.shape) * (sizes > 0)).double().sum() / sizes.sum() / np.log(2)
    for batch_size in (1, 3):
        found = compare.score(nats, saved, batch_size, "cpu", tokenizer)
        assert found["windows"] == pytest.approx(expected, rel=1e-6)
        assert found["rows"] == pytest.approx(by_hand.item(), rel=1e-6)
    short = compare.score(nats, saved, 4, "cpu", seq_len=256)
    assert short["windows"] == pytest.approx(prepare.evaluate_bpb(model, tokenizer, 4, 256), rel=1e-6)
    tokenizer.decode = lambda ids: "other text"
    with pytest.raises(AssertionError, match="another tokenizer"):
        compare.score(nats, saved, 1, "cpu", tokenizer)


PEER_PREPARE = """
import pyarrow.parquet as pq, torch, itertools
from pathlib import Path
DATA_DIR, TIME_BUDGET, Tokenizer = "/its/own", 300, None
def make_dataloader(tokenizer, B, T, split):
    for epoch in itertools.count(1):
        for path in sorted(Path(DATA_DIR).glob("*.parquet"))[:-1]:  # the last is for validation
            for text in pq.read_table(path).column(0).to_pylist():
                ids = (tokenizer.encode(text, prepend=tokenizer.get_bos_token_id()) * T)[: T + 1]
                row = torch.tensor([ids] * B)
                yield row[:, :-1], row[:, 1:], epoch
def evaluate_bpb(*args):
    raise AssertionError("its own metric")
"""
PEER_TRAIN = """
from prepare import TIME_BUDGET, Tokenizer, evaluate_bpb, make_dataloader
import torch
model = torch.nn.Linear(1, 1)
model.forward = lambda x, y, reduction: torch.full((y.numel(),), 2.0)
tokenizer = Tokenizer.from_directory()
loader = make_dataloader(tokenizer, 2, 8, "train")
for step in range(TIME_BUDGET):
    next(loader)
print(f"val_bpb: {evaluate_bpb(model, tokenizer, 2)}\\nnum_steps: {step + 1}")
"""


@pytest.mark.parametrize(("steps", "ends"), [(180, True), pytest.param(181, False, marks=pytest.mark.slow)])
def test_a_peer_reads_the_shuffled_text_once_and_is_scored_by_both(steps, ends, corpus, saved, tmp_path):
    (tmp_path / "prepare.py").write_text(PEER_PREPARE)
    (tmp_path / "train.py").write_text(PEER_TRAIN)
    copy_files(clone := tmp_path / "clone")  # this one may have a dataset of its own
    code, *rest = compare.child(f"{tmp_path}/train.py", corpus, saved, steps)
    code = code.replace("compare.adapt", f"compare.ROOT = type(compare.ROOT)({str(clone)!r})\ncompare.adapt")
    summary = measure(code, *rest, log := tmp_path / "log")
    assert ("rows" in summary) == ends, log.read_text()
    assert ("read a document twice" in log.read_text()) == (not ends)
    if ends:
        expected = compare.score(lambda x, y: torch.full(y.shape, 2.0), saved, 1, "cpu")
        assert {name: float(summary[name]) for name in ("windows", "rows")} == pytest.approx(expected, abs=2e-6)


@pytest.mark.slow
def test_train_py_is_run_and_scored_by_both(corpus, saved, tmp_path):
    summary = measure(*compare.child("default", corpus, saved, 1, seed=7), log := tmp_path / "log")
    assert float(summary["windows"]) == float(summary["val_bpb"]) and float(summary["rows"]) > 0, log.read_text()
    assert re.search("not logged", log.read_text()) and summary["seed"] == "7"
