"""Train, validation and test: no document is in two of them, each is in order; dataset_id tells them apart."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest
from http_faults import FaultyServer, respond
from small_corpus import ROOT, run_prepare, texts, tree, write_corpus, write_parquet

import prepare
from prepare import PrepareError, Tokenizer

CLIMBMIX = "/datasets/karpathy/climbmix-400b-shuffle/resolve/main/"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tokens_of(folder: Path, split: str) -> list[int]:
    stream = prepare.TokenStream(Tokenizer.from_directory(folder), split)
    return stream.read(0, len(stream)).tolist()


def splits_of(folder: Path) -> dict[str, list[str]]:
    """The documents of each split, back from its tokens."""
    tokenizer, splits = Tokenizer.from_directory(folder), {}
    for split in ("train", "val", "test"):
        tokens = np.array(tokens_of(folder, split))
        starts = np.flatnonzero(tokens == tokenizer.get_bos_token_id())
        assert starts[0] == 0
        splits[split] = [tokenizer.decode(ids[1:].tolist()) for ids in np.split(tokens, starts[1:])]
    return splits


def numbered(first: int, last: int) -> list[str]:
    """Documents [first, last), all different, each a few tokens long."""
    return [f"Document {i} of many.\nIts square is {i * i}." for i in range(first, last)]


def write_texts(folder: Path, *files: list[str]) -> Path:
    folder.mkdir()
    for i, documents in enumerate(files):
        (folder / f"{i:03d}.txt").write_text("<|endoftext|>\n".join(documents), encoding="utf-8")
    return folder


# What becomes what


def test_climbmix_is_its_shards_in_order_and_the_last_two_are_test_and_validation(cache):
    train, val, test = prepare.hub_splits("climbmix", 6541)
    files = [path.name for path, *_ in train + test + val]
    assert files == [f"shard_{i:05d}.parquet" for i in range(6543)]
    assert {(start, stop) for _, start, stop in train + test + val} == {(0, None)}
    for seed, name in enumerate(["shard_00000.parquet", "shard_00001.parquet", prepare.TEST_FILE, prepare.VAL_FILE]):
        write_parquet(cache / "climbmix" / "raw" / name, numbered(100 * seed, 100 * seed + 100))
    splits = splits_of(prepare.prepare("climbmix", 2))
    assert splits == {"train": numbered(0, 200), "test": numbered(200, 300), "val": numbered(300, 400)}


def test_tinystories_first_ten_thousand_are_test_and_the_next_validation(cache):
    write_parquet(cache / "tinystories" / "raw" / "tinystories_gpt4_clean.parquet", numbered(0, 21_000))
    splits = splits_of(prepare.prepare("tinystories", 1))
    assert splits["test"] == numbered(0, 10_000)
    assert splits["val"] == numbered(10_000, 20_000)
    assert splits["train"] == numbered(20_000, 21_000)
    train, val, test = prepare.hub_splits("tinystories", 11)
    cuts = [(start, stop) for _, start, stop in test + val + train]
    assert cuts[0][0] == 0 and [stop for _, stop in cuts[:-1]] == [start for start, _ in cuts[1:]]
    assert cuts[-1][0] < 2_732_634 <= cuts[-1][1]  # as many stories as there are
    assert len({path for path, *_ in train + val + test}) == 1


def test_more_shards_than_the_text_fills_are_refused(cache):
    write_parquet(cache / "tinystories" / "raw" / "tinystories_gpt4_clean.parquet", numbered(0, 21_000))
    with pytest.raises(PrepareError, match=r"no text for train_00001\.bin: ask for fewer --num-shards"):
        prepare.prepare("tinystories", 2)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_text_in_another_encoding_is_refused(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("naïve\n" * 100, encoding)
    with pytest.raises(PrepareError, match=r"a\.txt is not UTF-8 at byte \d: convert it"):
        prepare.prepare(str(tmp_path))


def test_a_folder_with_a_test_file_tests_on_it_and_validates_on_the_last_file(tmp_path):
    for name in ("zzz", "shard_06542", "shard_06541", "b", "a"):
        write_parquet(tmp_path / "data" / f"{name}.parquet", [f"{name} {document}" for document in numbered(0, 40)])
    splits = splits_of(prepare.prepare(str(tmp_path / "data")))
    names = {split: [document.partition(" ")[0] for document in documents] for split, documents in splits.items()}
    assert names["train"] == ["a"] * 40 + ["b"] * 40 + ["zzz"] * 40
    assert (names["test"], names["val"]) == (["shard_06541"] * 40, ["shard_06542"] * 40)


@pytest.mark.parametrize("kind", ["parquet", "txt"])
def test_of_a_folder_without_a_test_file_five_percent_before_the_last_file_are_for_test(tmp_path, kind):
    """Of 300 documents 15; the last train file has only 10 of them."""
    files = [numbered(0, 90), numbered(90, 190), numbered(190, 200), numbered(200, 300)]
    if kind == "txt":
        write_texts(tmp_path / "data", *files)
    for i, documents in enumerate(files if kind == "parquet" else []):
        write_parquet(tmp_path / "data" / f"{i}.parquet", documents)
    folder = prepare.prepare(str(tmp_path / "data"))
    expected = {"train": numbered(0, 185), "test": numbered(185, 200), "val": numbered(200, 300)}
    assert splits_of(folder) == expected
    fewer = prepare.prepare(str(tmp_path / "data"), 1)  # val and test do not depend on the number of train shards
    assert splits_of(fewer) == expected | {"train": numbered(0, 90)}
    assert (fewer / "train_shards").read_text() == "1\n"


@pytest.mark.parametrize("kind", ["parquet", "txt"])
@pytest.mark.parametrize(("count", "test", "val"), [(100, 90, 95), (59, 55, 57), (3, 1, 2)])
def test_a_single_file_gives_its_last_twentieth_to_validation_and_the_one_before_to_test(
    tmp_path, kind, count, test, val
):
    if kind == "parquet":
        write_parquet(tmp_path / "data" / "all.parquet", numbered(0, count))
    else:
        write_texts(tmp_path / "data", numbered(0, count))
    splits = splits_of(prepare.prepare(str(tmp_path / "data")))
    assert splits == {"train": numbered(0, test), "test": numbered(test, val), "val": numbered(val, count)}


def test_a_folder_of_one_document_per_file_is_split_by_files(tmp_path):
    write_texts(tmp_path / "data", *([document] for document in numbered(0, 100)))
    splits = splits_of(prepare.prepare(str(tmp_path / "data")))
    assert splits == {"train": numbered(0, 94), "test": numbered(94, 99), "val": numbered(99, 100)}


def test_there_may_be_more_shards_than_open_files_are_allowed_at_first(tmp_path, cache):
    write_texts(tmp_path / "data", *([document] for document in numbered(0, 100)))
    prepare.prepare(str(tmp_path / "data"))
    code = "import prepare; print(len(prepare.TokenStream(prepare.Tokenizer.from_directory(), 'train').tokens))"
    command = ["bash", "-c", f'ulimit -S -n 64; exec {sys.executable} -c "{code}"']
    environment = os.environ | {"AUTORESEARCH_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "94\n"


def test_shards_are_counted_beyond_9999(tmp_path):
    (tmp_path / "train_shards").write_text("10259\n")
    assert prepare.shard_paths(tmp_path, "train")[-1].name == "train_10258.bin"


def test_a_lone_file_of_the_test_files_name_is_no_test_file(tmp_path):
    write_parquet(tmp_path / "data" / prepare.TEST_FILE, numbered(0, 100))
    assert len(splits_of(prepare.prepare(str(tmp_path / "data")))["train"]) == 90


@pytest.mark.parametrize("files", [[2], [1, 1], [1, 50]])
def test_too_few_documents_for_three_splits_are_refused(tmp_path, files):
    write_texts(tmp_path / "data", *(numbered(0, count) for count in files))
    with pytest.raises(PrepareError, match="too few documents"):
        prepare.prepare(str(tmp_path / "data"))


def test_the_embedded_corpus_is_each_module_of_the_standard_library_once(tmp_path, monkeypatch):
    """In the order of the hashes of their names, without tests and installed packages."""
    root, modules = tmp_path / "python", {}
    for i, document in enumerate(numbered(0, 110)):
        name = f"{['', 'json/', 'site-packages/numpy/', 'json/test/'][i % 11 if i % 11 < 4 else 0]}m{i}.py"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(document)
        if i % 11 not in (2, 3):
            modules[name] = document
    (root / "json/__init__.py").touch()
    (root / "README.txt").write_text("no module")
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(root)}.get)
    splits = splits_of(prepare.prepare("embedded", 5))
    in_order = sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert splits["train"] + splits["test"] + splits["val"] == [modules[name] for name in in_order]
    assert [len(splits[split]) for split in ("train", "test", "val")] == [82, 4, 4]


def test_documents_come_in_order_from_many_batches_in_many_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.os, "cpu_count", lambda: 3)
    documents = [f"{i} " + "and so on " * (27_000 if i % 3 else 9_000) for i in range(40)]  # 30 batches
    write_parquet(tmp_path / "data" / "a.parquet", documents)
    write_parquet(tmp_path / "data" / "b.parquet", ["the last file"])
    splits = splits_of(prepare.prepare(str(tmp_path / "data")))
    assert splits["train"] + splits["test"] == documents


def test_val_and_test_hold_what_the_metric_scores_and_little_more(tmp_path, monkeypatch):
    """Batches of three documents here: a target more than one of them holds takes a second one."""
    for name in ("a", "shard_06541", "shard_06542"):
        write_parquet(tmp_path / "data" / f"{name}.parquet", ["word " * 20_000] * 20)
    whole = prepare.prepare(str(tmp_path / "data"))
    document = len(tokens_of(whole, "val")) // 20
    for targets, batches in ((3 * document - 1, 1), (3 * document, 2)):
        monkeypatch.setattr(prepare, "EVAL_TOKENS", targets)
        monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path / str(batches)))
        folder = prepare.prepare(str(tmp_path / "data"))
        assert len(tokens_of(folder, "val")) == len(tokens_of(folder, "test")) == 3 * batches * document
        assert tokens_of(folder, "train") == tokens_of(whole, "train")


# --num-shards


def test_more_shards_than_files_are_all_files(tmp_path):
    write_corpus(tmp_path / "corpus")
    for shards in (99, 3, None):
        folder = prepare.prepare(str(tmp_path / "corpus"), shards)
        assert (folder / "train_shards").read_text() == "3\n"
    assert (prepare.prepare(str(tmp_path / "corpus"), 1) / "train_shards").read_text() == "1\n"


@pytest.mark.parametrize("shards", [0, -1, 6542])
def test_impossible_numbers_of_shards_are_refused_before_anything_happens(cache, shards):
    with pytest.raises(PrepareError, match="give 1 to 6541"):
        prepare.prepare("climbmix", shards)
    assert not cache.exists()


# The fingerprint


def test_dataset_id_changes_with_any_document_of_train_or_val_and_with_nothing_else(tmp_path):
    def id_after(name: str = "", change=lambda documents: documents, folder: str = "data") -> str:
        for seed in (0, 1, 6541, 6542):
            documents = texts(seed, count=20)
            file = f"shard_{seed:05d}.parquet"
            write_parquet(tmp_path / folder / file, change(documents) if file == name else documents)
        return prepare.dataset_id(prepare.prepare(str(tmp_path / folder)))

    before, seen = id_after(), set()
    assert before.startswith("data-") and len(before) == len("data-1a2b3c4d")
    changes = [lambda d: ["Other " + d[0], *d[1:]], lambda d: [*d[:-1], d[-1] + " other"], lambda d: d[:-1]]
    changes += [lambda d: [d[1], d[0], *d[2:]], lambda d: [*d, "one more"]]
    for file in ("shard_00000.parquet", "shard_00001.parquet", prepare.VAL_FILE):
        seen |= {id_after(file, change) for change in changes}
    assert len(seen) == 15 and before not in seen
    for change in changes:
        assert id_after(prepare.TEST_FILE, change) == before
    assert id_after(folder="elsewhere/data") == before


def test_dataset_id_changes_with_the_order_of_train_shards(tmp_path):
    ids = []
    for order in ("abc", "acb"):  # the same first file, hence the same tokenizer
        for name, seed in zip(order + "v", (0, 1, 2, 3), strict=True):
            write_parquet(tmp_path / order / "data" / f"{name}.parquet", texts(seed))
        write_parquet(tmp_path / order / "data" / prepare.TEST_FILE, texts(4))
        ids.append(prepare.dataset_id(prepare.prepare(str(tmp_path / order / "data"))))
    assert ids[0] != ids[1]


@pytest.mark.parametrize("deleted", [True, False])
def test_a_damaged_test_shard_is_made_again_as_its_line_says(tmp_path, deleted):
    folder = prepare.prepare(str(write_corpus(tmp_path / "corpus")))
    before = tree(folder)
    shard = folder / "test_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(PrepareError, match="delete it and train_shards there"):
        prepare.TokenStream(Tokenizer.from_directory(), "test")
    if deleted:
        shard.unlink()
        (folder / "train_shards").unlink()
    assert prepare.prepare(str(tmp_path / "corpus")) == folder and tree(folder) == before


def test_a_folder_whose_last_train_file_went_into_the_test_split_is_ready(tmp_path, monkeypatch):
    write_texts(tmp_path / "data", numbered(0, 100), numbered(100, 103), numbered(103, 110))
    folder = prepare.prepare(str(tmp_path / "data"))
    assert (folder / "train_shards").read_text() == "1\n"
    monkeypatch.setattr(prepare, "documents", None)  # nothing is read again
    assert prepare.prepare(str(tmp_path / "data")) == folder


def test_prepared_without_a_gpu_a_hub_dataset_has_one_shard_and_says_so(cache, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert len(prepare.hub_splits("climbmix", None)[0]) == 1 and "give --num-shards 2" in capsys.readouterr().out
    assert len(prepare.hub_splits("climbmix", 1)[0]) == 1 and not capsys.readouterr().out


def test_a_dataset_of_the_first_version_is_made_anew(tmp_path):
    """Its train split held what is for testing now."""
    folder = prepare.prepare(str(write_corpus(tmp_path / "corpus")))
    before = tree(folder)
    (folder / "test_00000.bin").unlink()
    for shard in folder.glob("*.bin"):
        shard.write_bytes(b"tokshard\1\0\0\0" + shard.read_bytes()[12:])
    assert prepare.prepare(str(tmp_path / "corpus")) == folder and tree(folder) == before


def test_token_shards_of_an_interrupted_run_are_kept(tmp_path, monkeypatch):
    write_texts(tmp_path / "data", numbered(0, 50), numbered(50, 100), numbered(100, 110))

    def tokenize(texts, path: Path, *args, real=prepare.tokenize):
        if path.name == "train_00001.bin":  # the last one
            raise KeyboardInterrupt
        return real(texts, path, *args)

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(prepare, "tokenize", tokenize)
        prepare.prepare(str(tmp_path / "data"))
    (kept,) = (tmp_path / "cache").rglob("train_00000.bin")
    inode = kept.stat().st_ino
    splits = splits_of(prepare.prepare(str(tmp_path / "data")))
    assert splits == {"train": numbered(0, 95), "test": numbered(95, 100), "val": numbered(100, 110)}
    assert kept.stat().st_ino == inode


# Downloading and tokenizing overlap


def test_the_next_file_is_downloaded_while_one_is_tokenized(tmp_path, monkeypatch):
    """Reading a file waits here until another one has been asked for, as long as there is one."""
    names = ["shard_00000.parquet", "shard_00001.parquet", prepare.VAL_FILE, prepare.TEST_FILE]
    files, asked, read = {}, {name: threading.Event() for name in names}, []
    for seed, name in enumerate(names):
        write_parquet(tmp_path / name, texts(seed))
        files[CLIMBMIX + name] = (tmp_path / name).read_bytes()

    def documents(path: Path, real=prepare.documents):
        read.append(path.name)
        others = [asked[name] for name in names if name not in read]
        assert not others or any(event.wait(60 / len(others)) for event in others), f"{read} alone"
        return real(path)

    def notice(handler, body) -> None:
        asked[handler.path.rpartition("/")[2]].set()
        respond(handler, body)

    monkeypatch.setattr(prepare, "documents", documents)
    with FaultyServer(files, [notice] * 4) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        prepare.prepare("climbmix", 2)
    assert read[0] == names[0] and sorted(read[1:]) == sorted(names)  # the first is read for the tokenizer, too


def test_files_whose_token_shards_are_there_are_not_downloaded_again(tmp_path, cache, monkeypatch):
    for seed, name in enumerate(["shard_00000.parquet", prepare.VAL_FILE, prepare.TEST_FILE]):
        write_parquet(cache / "climbmix" / "raw" / name, texts(seed))
    folder = prepare.prepare("climbmix", 1)
    shutil.rmtree(folder / "raw")
    (folder / "train_shards").unlink()
    run = run_prepare("--data", "climbmix", "--num-shards", 1, cache=cache, HF_ENDPOINT="http://127.0.0.1:9")
    assert run.returncode == 0, run.stderr
