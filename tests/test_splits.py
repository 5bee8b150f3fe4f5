"""Train, validation and test: no document is in two of them, each is in order; dataset_id tells them apart."""

import hashlib
import itertools
import shutil
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import pytest
from small_corpus import texts, tree, write_parquet

import prepare
from prepare import PrepareError, Tokenizer


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
        first, *documents = tokenizer.decode(tokens_of(folder, split)).split("<|reserved_0|>")
        assert first == ""
        splits[split] = documents
    return splits


def numbered(first: int, last: int) -> list[str]:
    """Documents [first, last), all different, each a few tokens long."""
    return [f"Document {i} of many.\nIts square is {i * i}." for i in range(first, last)]


def write_texts(folder: Path, *files: list[str]) -> Path:
    folder.mkdir(parents=True)
    for i, documents in enumerate(files):
        (folder / f"{i:03d}.txt").write_text("<|endoftext|>\n".join(documents), encoding="utf-8")
    return folder


# What becomes what


def test_climbmix_is_its_shards_in_order_and_the_last_two_are_test_and_validation(cache):
    test, val, *train = prepare.source_parts("climbmix", 6541)
    assert [path.name for path, *_ in [*train, test, val]] == [f"shard_{i:05d}.parquet" for i in range(6543)]
    for seed, name in enumerate(["shard_00000.parquet", "shard_00001.parquet", prepare.TEST_FILE, prepare.VAL_FILE]):
        write_parquet(cache / "climbmix" / "raw" / name, numbered(100 * seed, 100 * seed + 100))
    splits = splits_of(prepare.prepare("climbmix", 2))
    assert splits == {"train": numbered(0, 200), "test": numbered(200, 300), "val": numbered(300, 400)}


def test_tinystories_first_ten_thousand_are_test_the_next_validation_and_more_shards_than_it_fills_are_refused(cache):
    write_parquet(cache / "tinystories" / "raw" / "tinystories_gpt4_clean.parquet", numbered(0, 21_000))
    expected = {"test": numbered(0, 10_000), "val": numbered(10_000, 20_000), "train": numbered(20_000, 21_000)}
    assert splits_of(prepare.prepare("tinystories", 1)) == expected
    with pytest.raises(PrepareError, match=r"no text left for train_00001\.bin: give a smaller --num-shards"):
        prepare.prepare("tinystories", 2)
    cuts = [(start, stop) for _, start, stop in prepare.source_parts("tinystories", 11)]
    assert cuts[0][0] == 0 and [stop for _, stop in cuts[:-1]] == [start for start, _ in cuts[1:]]
    assert cuts[-1][0] < 2_732_634 <= cuts[-1][1]  # as many stories as there are


@pytest.mark.parametrize(
    ("ends", "num_shards", "train", "test"),
    [
        (dict(a=40, b=80, zzz=120, shard_06541=160, shard_06542=200), 9, 120, 120),
        # without the test file: the last 5% before val, or the whole file if it has fewer
        (dict(shard_00000=90, shard_00001=200, shard_06542=380), None, 181, 181),
        (dict(shard_00000=90, shard_00001=200, shard_06542=380), 1, 90, 181),
        (dict(shard_00000=90, shard_00001=95, shard_06542=275), None, 90, 90),
    ],
)
def test_climbmixs_files_in_a_folder_are_train_test_and_validation_in_order(tmp_path, ends, num_shards, train, test):
    *_, begin, end = ends.values()
    for (name, last), first in zip(ends.items(), [0, *ends.values()], strict=False):
        write_parquet(tmp_path / "data" / f"{name}.parquet", numbered(first, last))
    splits = splits_of(prepare.prepare(str(tmp_path / "data"), num_shards))
    assert splits == {"train": numbered(0, train), "test": numbered(test, begin), "val": numbered(begin, end)}


def test_climbmixs_files_are_too_few_without_one_for_train(tmp_path):
    write_parquet(tmp_path / "data" / "shard_06542.parquet", numbered(100, 200))
    write_parquet(tmp_path / "data" / "shard_00000.parquet", numbered(0, 5))
    with pytest.raises(PrepareError, match=r"no text left for train_00000\.bin: .*more"):
        prepare.prepare(str(tmp_path / "data"))
    (tmp_path / "data" / "shard_00000.parquet").rename(tmp_path / "data" / "shard_06541.parquet")
    splits = splits_of(prepare.prepare(str(tmp_path / "data")))
    documents = [*numbered(0, 5), *numbered(100, 200)]
    assert splits["val"] == own_splits(documents)["val"], "without any other file: a folder like others"


def test_the_embedded_documents_are_each_module_of_the_standard_library_once(cache, tmp_path, monkeypatch):
    """In the order of the hashes of their names, without tests and installed packages."""
    root, modules = tmp_path / "python", {}
    for i, document in enumerate(numbered(0, 117)):
        name = {1: "json/", 2: "site-packages/numpy/", 3: "json/test/"}.get(i % 11, "") + f"m{i}.py"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("\ufeff" + document)
        if i % 11 not in (2, 3):
            modules[name] = document
    (root / "json/__init__.py").touch()
    (root / "README.txt").write_text("no module")
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(root)}.get)
    splits = splits_of(prepare.prepare("embedded", 5))
    in_order = sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert splits["train"] + splits["test"] + splits["val"] == [modules[name] for name in in_order]
    assert [len(splits[split]) for split in ("train", "test", "val")] == [87, 4, 4]
    for name in in_order[5:]:
        (root / name).unlink()
    assert splits_of(prepare.prepare("embedded")) == splits  # another Python, not another text
    shutil.rmtree(cache)
    splits = splits_of(prepare.prepare("embedded"))
    assert [len(splits[split]) for split in ("train", "test", "val")] == [3, 1, 1]


def test_val_and_test_hold_what_the_metric_scores_and_little_more(tmp_path, monkeypatch):
    """Batches of three documents here: a target more than one of them holds takes a second one."""
    for name in ("a", "shard_06541", "shard_06542"):
        write_parquet(tmp_path / "data" / f"{name}.parquet", ["word " * 20_000] * 8)
    whole = prepare.prepare(str(tmp_path / "data"))
    document = len(tokens_of(whole, "val")) // 8
    for targets, batches in ((3 * document - 1, 1), (3 * document, 2)):
        monkeypatch.setattr(prepare, "EVAL_TOKENS", targets)
        folder = prepare.prepare(str(tmp_path / "data"))
        assert len(tokens_of(folder, "val")) == len(tokens_of(folder, "test")) == 3 * batches * document
        assert tokens_of(folder, "train") == tokens_of(whole, "train")


# A folder of one's own


def own_splits(documents: list[str]) -> dict[str, list[str]]:
    """In the order of their hashes: the first 5% for val, the next 5% for test."""
    documents = sorted(set(documents), key=lambda document: hashlib.sha256(document.encode()).digest())
    n = max(1, len(documents) // 20)
    return {"train": documents[2 * n :], "val": documents[:n], "test": documents[n : 2 * n]}


def test_the_hash_of_its_text_decides_which_split_a_document_is_in(tmp_path, capsys):
    """However the documents are spread over files, subfolders and kinds of file, with a byte order mark or without; a
    document that comes twice stays in one split. The tokenizer is the same, too, so it has learnt from all of them.
    What is not read is named, unless it is hidden."""
    documents, folder = numbered(0, 600), tmp_path / "data"
    expected = own_splits(documents)
    write_parquet(folder / "all.parquet", documents)
    whole = prepare.prepare(str(folder))
    (folder / "all.parquet").unlink()
    write_texts(folder / "sub" / "sub", *(["\ufeff" + document] for document in documents[:300]))
    (folder / "sub" / "sub" / "000.txt").rename(folder / "A.TXT")
    write_parquet(folder / "shard_06541.parquet", [*documents[450:], *documents[:20]])
    write_parquet(folder / "z.PARQUET", ["", None, *("\ufeff" + document for document in documents[300:450])])
    (folder / "empty.txt").touch()
    for name in ("notes.md", "sub/c.jsonl", "sub/.hidden.txt", ".git/a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("none of this")
    (folder / "linked").symlink_to(write_texts(tmp_path / "elsewhere", ["nor this"]))
    spread = prepare.prepare(str(folder))
    assert f"in {folder}, not read (3): linked, notes.md, sub/c.jsonl\n" in capsys.readouterr().out
    for found in splits_of(whole), splits_of(spread):
        assert {split: set(texts) for split, texts in found.items()} == {s: set(e) for s, e in expected.items()}
    assert sum(map(len, splits_of(whole).values())) == 600 and sum(map(len, splits_of(spread).values())) == 620
    assert splits_of(whole)["val"] == expected["val"] and splits_of(whole)["test"] == expected["test"]
    vocabulary = [Tokenizer.from_directory(directory).get_vocab_size() for directory in (whole, spread)]
    assert vocabulary[0] > 320 and abs(vocabulary[1] - vocabulary[0]) < 5


def test_names_of_files_do_not_matter_but_their_text_does(tmp_path, monkeypatch):
    folder = write_texts(tmp_path / "data", numbered(0, 100), numbered(100, 200))
    before = prepare.prepare(str(folder))
    (folder / "000.txt").rename(folder / "zzz.txt")
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path / "another cache"))
    after = prepare.prepare(str(folder))
    assert after.name == before.name and tree(after) == tree(before)
    (folder / "001.txt").write_text((folder / "001.txt").read_text().replace("Document 150", "Document 15O"))
    assert prepare.prepare(str(folder)).name != before.name


def test_the_tokenizer_learns_from_all_files_even_where_there_is_more_text_than_it_takes(tmp_path, monkeypatch):
    """Ten files with a word each, far more text than TOKENIZER_CHARS."""
    documents, seen = [f"{word}xyz {j} " * 20 for word in "abcdefghij" for j in range(200)], []
    for i in range(10):
        write_parquet(tmp_path / "data" / f"{i}.parquet", documents[200 * i : 200 * i + 200])
    monkeypatch.setattr(prepare, "TOKENIZER_CHARS", 40_000)
    train = prepare.Tokenizer.train
    monkeypatch.setattr(prepare.Tokenizer, "train", lambda texts, path: train(seen.extend(texts) or seen, path))
    prepare.prepare(str(tmp_path / "data"))
    assert 30_000 < sum(map(len, seen)) < 50_000 and len({text[0] for text in seen}) == 10
    assert set(seen) < set(own_splits(documents)["train"])


def test_a_folder_of_ones_own_is_cut_into_shards_of_one_size(tmp_path, monkeypatch):
    """A mapped file counts as an open one."""
    monkeypatch.setattr(prepare, "SHARD_CHARS", 80)
    documents, folder = numbered(0, 300), tmp_path / "data"
    write_texts(folder, documents[:200], documents[200:])
    directory = prepare.prepare(str(folder))
    tokenizer = Tokenizer.from_directory(directory)
    stream = prepare.TokenStream(tokenizer, "train")
    shards = [tokenizer.decode(stream.shard(i)).split("<|reserved_0|>")[1:] for i in range(len(stream.ends))]
    assert len(shards) > 110 and Path("/proc/self/maps").read_text().count("train_") <= 100
    train = list(itertools.chain(*shards))
    assert all(80 <= len("".join(shard)) < 130 for shard in shards[:-1])
    assert set(train) == set(own_splits(documents)["train"])
    fewer = prepare.prepare(str(folder), 3)
    assert splits_of(fewer) == splits_of(directory) | {"train": train[: sum(map(len, shards[:3]))]}
    assert len(list(fewer.glob("train_*.bin"))) == 3
    assert prepare.prepare(str(folder)) == fewer  # the number of shards stays until another one is asked for


@pytest.mark.parametrize("count", [2, 3, 10, 50])
def test_three_documents_are_split_in_three_all_the_same_and_fewer_are_refused(tmp_path, count):
    folder = str(write_texts(tmp_path / "data", numbered(0, count)))
    with pytest.raises(PrepareError, match="2 different documents are too few") if count < 3 else nullcontext():
        splits = splits_of(prepare.prepare(folder))
        assert all(splits.values()) and sorted(itertools.chain(*splits.values())) == sorted(numbered(0, count))


def test_a_novel_is_split_by_long_spans(tmp_path):
    """Validation and test are one span each, of 5%, in one piece: no page of theirs lies between two of train."""
    text = "".join(f"Line {i} of a novel, whose square is {i * i}.\n" for i in range(13_000))[:600_000]
    folder = prepare.prepare(str(write_texts(tmp_path / "data", [text])))
    splits = {split: "".join(pages) for split, pages in splits_of(folder).items()}
    assert sorted(len(splits[split]) // 10_000 for split in ("val", "test")) in ([3, 3], [0, 3])
    assert splits["val"] in text and splits["test"] in text and sum(map(len, splits.values())) == len(text)


def test_a_cache_inside_of_the_folder_is_not_part_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTORESEARCH_CACHE", str(tmp_path / "data" / "cache"))
    write_texts(tmp_path / "data", numbered(0, 60))
    assert prepare.prepare(str(tmp_path / "data")) == prepare.prepare(str(tmp_path / "data"))
    write_texts(tmp_path / "data" / "cache" / "of_mine", numbered(0, 60))
    assert prepare.prepare(str(tmp_path / "data" / "cache" / "of_mine"))


# The fingerprint


def test_dataset_id_changes_with_any_document_of_train_or_val_and_with_nothing_else(tmp_path):
    def id_after(name: str = "", change=list) -> str:
        for seed in (0, 1, 6541, 6542):
            file, documents = f"shard_{seed:05d}.parquet", texts(seed, count=20)
            write_parquet(tmp_path / "data" / file, change(documents) if file == name else documents)
        return prepare.dataset_id(prepare.prepare(str(tmp_path / "data")))

    before, changes = id_after(), (lambda d: [*d[:-1], d[-1] + " other"], lambda d: d[:-1], lambda d: d[::-1])
    seen = {id_after(file, change) for file in ("shard_00001.parquet", prepare.VAL_FILE) for change in changes}
    assert len(seen) == 6 and before not in seen
    assert [id_after(prepare.TEST_FILE, change) for change in changes] == [before] * 3


def test_an_edited_eval_tokens_changes_the_id_exactly_where_it_changes_what_is_scored(prepared, monkeypatch):
    """Also of data that were prepared before the edit; the split of this corpus has fewer targets than 2^22.

    The id is that of earlier versions: it holds the same tokens, and every figure so far was measured on such a one."""
    (folder,) = prepared.glob("corpus@*")
    total = len(tokens_of(folder, "val")) - 1
    ids = {}
    for value in (2**22, 2**23, total, total - 1, 1000):
        monkeypatch.setattr(prepare, "EVAL_TOKENS", value)
        ids[value] = prepare.dataset_id(folder)
    assert ids[2**22] == ids[2**23] == ids[total] == "corpus-0d993577"
    assert len({ids[total], ids[total - 1], ids[1000]}) == 3


def test_a_dataset_has_the_name_of_earlier_versions_unless_a_constant_differs(tmp_path, monkeypatch):
    folder = str(write_texts(tmp_path / "data", numbered(0, 200)))
    before = {data: prepare.find_source(data)[0] for data in ("climbmix", folder)}
    assert list(before.values()) == ["climbmix@7b78a85e", "data@e7e1a0d4"]
    others = dict(EVAL_TOKENS=1000, SPLIT_PATTERN=r"\s+|\S", SPECIAL_TOKENS=["<|bos|>"], SHARD_CHARS=1000)
    for constant, value in (others | dict(TOKENIZER_CHARS=1000, TOKENIZER_DOC_CHARS=10)).items():
        with monkeypatch.context() as patch:
            patch.setattr(prepare, constant, value)
            assert not {prepare.find_source(data)[0] for data in before} & set(before.values()), constant
    monkeypatch.setattr(prepare, "VOCAB_SIZE", 300)
    directory = prepare.prepare(folder)
    assert directory.name != before[folder] and Tokenizer.from_directory(directory).get_vocab_size() == 300


# The dataset of a clone


@pytest.fixture
def climbmix(cache, monkeypatch) -> Path:
    """What can be had without a network and a GPU: 12 shards."""
    names = [*(f"shard_{i:05d}.parquet" for i in range(12)), prepare.VAL_FILE, prepare.TEST_FILE]
    for seed, name in enumerate(names):
        write_parquet(cache / "climbmix" / "raw" / name, texts(seed, count=5))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return cache


@pytest.mark.parametrize(("capability", "shards"), [((7, 5), 2), ((8, 0), 10)])
def test_what_was_prepared_without_a_gpu_is_extended_on_one(climbmix, capsys, monkeypatch, capability, shards):
    def count() -> int:
        return int((prepare.prepare() / "train_shards").read_text())

    assert count() == 1 and "give --num-shards 2 (T4, V100) or 10" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        patch.setattr("torch.cuda.get_device_capability", lambda: capability)
        assert count() == shards and "no GPU" not in capsys.readouterr().out
        prepare.prepare(num_shards=5)
        assert count() == max(5, shards)
    assert count() == max(5, shards)  # and never fewer again, unless asked for
    prepare.prepare(num_shards=12)
    monkeypatch.setitem(sys.modules, "torch", None)  # loaded only where it decides
    assert count() == 12
    assert prepare.prepare(num_shards=1).name.endswith("x1")


def test_without_network_a_clone_goes_on_with_what_it_has(climbmix, capsys, monkeypatch):
    """Files whose token shards are there are not downloaded again."""
    own = prepare.prepare()
    shutil.rmtree(climbmix / "climbmix")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    assert prepare.prepare() == own and f"NO NETWORK: using {own.name}, which is ready in" in capsys.readouterr().out
    for options in (dict(data="climbmix"), dict(num_shards=2)):
        with pytest.raises(prepare.Unreachable):
            prepare.prepare(**options)
    (own / "train_shards").unlink()
    assert prepare.prepare(num_shards=1) == own


def test_two_clones_of_one_cache_keep_their_own_datasets(climbmix, tmp_path, monkeypatch):
    """Whatever the other one prepares: other shards, another folder, even one that is called climbmix."""

    def run(clone: str, *args) -> Path:
        monkeypatch.setattr(prepare, "DATASET", tmp_path / clone)
        return prepare.prepare(*args)

    monkeypatch.setattr(prepare, "SHARD_CHARS", 1000)
    folder = str(write_texts(tmp_path / "climbmix", numbered(0, 100)))
    first = run("ours", None, 2)
    assert first.name.startswith("climbmix@")
    others = [run("theirs", "climbmix", 1), run("theirs", folder, 3)]
    assert run("ours") == first not in others and run("theirs") == run("theirs", folder) == others[1]
    assert prepare.dataset_id().startswith("climbmix-folder-")
    monkeypatch.setattr(prepare, "DATASET", tmp_path / "new")
    assert prepare.current_dataset() == others[1]  # the one prepared last, before it has its own
    assert prepare.prepare("climbmix").name.endswith("x1")  # not the number of the folder's shards


def test_a_clone_adopts_a_dataset_once_and_says_so_when_it_is_gone(climbmix, tmp_path, monkeypatch):
    first, second = prepare.prepare("climbmix", 1), prepare.prepare("climbmix", 2)
    prepare.DATASET.write_text("")  # left by a run that was killed
    assert prepare.current_dataset() == second
    prepare.adopt_dataset(first)
    prepare.adopt_dataset(second)
    assert prepare.current_dataset() == prepare.prepare() == first and prepare.DATASET.read_text() == first.name
    shutil.rmtree(first)
    with pytest.raises(PrepareError, match=f"^'{first.name}' is not prepared in .*: run `python prepare"):
        prepare.current_dataset()
    own = prepare.prepare(str(write_texts(tmp_path / "folder", numbered(0, 100))))
    prepare.DATASET.write_text(own.name)  # adopted: the folder's path is not known
    assert prepare.prepare() == own
    with pytest.raises(PrepareError, match="run again with --data"):
        prepare.prepare(num_shards=2)
    (own / "val_00000.bin").unlink()
    with pytest.raises(PrepareError, match=f"this clone's dataset, {own.name}, is from a folder: run again with"):
        prepare.prepare()
    monkeypatch.setattr(prepare, "DATASET", Path("/proc/.dataset"))
    prepare.adopt_dataset(first)  # a clone that cannot be written to goes on without
