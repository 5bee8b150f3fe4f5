"""
Compares train.py with other projects: the same shuffled text, the same validation rows, two metrics, no text twice.

    python tests/bench/compare.py shuffle DIR NEW    # all train documents of DIR over the shards of NEW, each once
    python tests/bench/compare.py run default ../autoresearch/train.py --data NEW --seconds 170

`run` makes NEW this clone's dataset. A peer is a train.py that speaks autoresearch's interface, unchanged, in your own
checkout: it keeps its data loader and its own prepare.py, which gets our tokenizer, NEW's train shards and the budget.
A peer without that interface calls `score` with a function that returns nats.

windows: the validation text cut anywhere, as for our val_bpb. rows: 2048 targets each, the first of a document (packed
best-fit; what does not fit is cropped), as autoresearch is scored. Each metric favours whoever trains on such inputs.
A run that would read a document twice ends with an error. Loaders that crop documents use up the text 9% sooner.
"""

import argparse
import hashlib
import importlib.util
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SEQ_LEN, SCORED = 2048, 2**22  # targets per row, and at most so many in each metric
TRAIN, TEST, VAL = "shard_{:05d}.parquet".format, "shard_06541.parquet", "shard_06542.parquet"
OURS = """
import sys
sys.argv[0] = "train.py"
sys.path.append({tests!r})
import compare, prepare
compare.install(prepare, {saved!r})
import harness, train
harness.summary.evaluate_bpb = prepare.evaluate_bpb
{recipe}
harness.run(train.train, train.build_model)
"""
PEER = """
import runpy, sys
import prepare
sys.path.append({tests!r})
import compare
compare.adapt(prepare, {data!r}, {seconds})
compare.install(prepare, {saved!r})
runpy.run_path({path!r}, run_name="__main__")
"""


# ---- The text
def shuffle(source: Path, target: Path, seed: int = 7) -> dict[str, int]:
    """Shuffles the train documents of `source` over as many shards in `target`, and copies validation and test. Without
    a test shard, 5% of the train documents become one, as prepare.py would take them, too.

    No document is in them twice, nor in two of the three splits. target/peers has links to all but the test shard,
    which peers would train on. Returns the number of documents in each shard.
    """
    paths = {path.name: path for path in sorted(source.glob("shard_*.parquet"))}
    assert VAL in paths, f"{source} has no {VAL}"
    assert target.resolve() != source.resolve(), "give another folder for the shuffled shards"
    seen: set[bytes] = set()
    held_out = {name: unseen(paths.pop(name), seen) for name in (VAL, TEST) if name in paths}
    documents = [text for path in paths.values() for text in unseen(path, seen)]
    random.Random(seed).shuffle(documents)
    if TEST not in held_out:
        cut = len(documents) // 20
        held_out[TEST], documents = documents[:cut], documents[cut:]
    size = -(-len(documents) // len(paths))
    shards = {TRAIN(i): documents[i * size : (i + 1) * size] for i in range(len(paths))} | held_out
    (target / "peers").mkdir(parents=True, exist_ok=True)
    for name, texts in shards.items():
        write(target / name, texts)
        if name != TEST:
            (target / "peers" / name).unlink(missing_ok=True)
            (target / "peers" / name).symlink_to(Path("..", name))
    return {name: len(texts) for name, texts in shards.items()}


def unseen(path: Path, seen: set[bytes]) -> list[str]:
    import pyarrow.parquet as pq

    texts = []
    for text in filter(None, pq.read_table(path, columns=["text"]).column(0).to_pylist()):
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            texts.append(text)
    return texts


def write(path: Path, texts: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000, compression="zstd")


# ---- Two metrics
def pack(documents: list[np.ndarray], size: int, buffer_size: int = 1000) -> Iterator[np.ndarray]:
    """Rows of `size` tokens, each from the start of a document: the largest that fits comes next; if none does, the
    shortest is cropped. Each document is used once; an unfilled last row is dropped."""
    waiting, buffer = documents[::-1], []
    while True:
        row: list[int] = []
        while len(row) < size:
            while len(buffer) < buffer_size and waiting:
                buffer.append(waiting.pop())
            if not buffer:
                return
            room = size - len(row)
            fitting = [i for i, document in enumerate(buffer) if len(document) <= room]
            lengths = [len(document) for document in buffer]
            best = max(fitting, key=lengths.__getitem__) if fitting else lengths.index(min(lengths))
            row += buffer.pop(best)[:room].tolist()
        yield np.array(row, np.int32)


def save_rows(ours, tokenizer, path: Path) -> None:
    """Saves what both metrics score: inputs and targets as rows, targets outside of the text as -1."""
    stream = ours.TokenStream(tokenizer, "val")
    text = stream.read(0, len(stream)).astype(np.int32)
    starts = np.flatnonzero(text == tokenizer.get_bos_token_id())
    rows = np.stack([*pack(np.split(text, starts[1:]), SEQ_LEN + 1)])[: SCORED // SEQ_LEN]
    n = min(SCORED, len(text) - 1)
    padding = 0, -n % SEQ_LEN
    windows = [np.pad(text[:n], padding), np.pad(text[1 : n + 1], padding, constant_values=-1)]
    arrays = dict(windows=np.stack(windows).reshape(2, -1, SEQ_LEN), rows=np.stack([rows[:, :-1], rows[:, 1:]]))
    sample = np.array([tokenizer.decode(rows[0, :100].tolist())])
    np.savez(path, token_bytes=np.array([*tokenizer.token_bytes, 0]), sample=sample, **arrays)


def score(nats: Callable, saved, batch_size: int, device, tokenizer=None, seq_len: int = SEQ_LEN) -> dict[str, float]:
    """Bits per byte on windows and on rows. nats: (x, y), each int64 (batch_size, seq_len) on the device -> nats of
    each target, of any shape. tokenizer: to check that the rows are made of its tokens."""
    import torch

    data, found = np.load(saved), {}
    if tokenizer is not None:
        assert tokenizer.decode(data["rows"][0, 0, :100].tolist()) == data["sample"][0], "another tokenizer"
    token_bytes = torch.from_numpy(data["token_bytes"]).to(device)
    for name in ("windows", "rows"):
        x, y = (torch.from_numpy(part).long().view(-1, seq_len) for part in data[name])
        missing = -len(x) % batch_size  # the last batch is as large as the others, or models are compiled anew
        x = torch.cat([x, x[:1].expand(missing, -1)]).to(device)
        y = torch.cat([y, y.new_full((missing, seq_len), -1)]).to(device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        sizes = token_bytes[y]  # a target of -1 gets the 0 at the end
        with torch.no_grad():
            for i in range(0, len(x), batch_size):
                scored = sizes[i : i + batch_size] > 0
                loss = nats(x[i : i + batch_size], y[i : i + batch_size]).view(scored.shape)
                total += torch.where(scored, loss, 0.0).sum(dtype=torch.float64)
        found[name] = (total / (math.log(2) * sizes.sum())).item()
    return found


# ---- In the child
def once(loader: Iterator) -> Iterator:
    """The batches of a loader; ends the process where it begins to read the text again."""
    for batch in loader:
        if batch[2] > 1:
            sys.exit("compare: it would read a document twice: give fewer --seconds, or more text")
        yield batch


def install(prepare, saved: str | Path) -> None:
    """Lets a prepare module score both metrics (it returns `windows`), and its loader read the text only once."""
    make_dataloader = prepare.make_dataloader

    def guarded(tokenizer, B, T, split, *args, **options):
        loader = make_dataloader(tokenizer, B, T, split, *args, **options)
        return once(loader) if split == "train" else loader

    def evaluate_bpb(model, tokenizer, batch_size, seq_len=SEQ_LEN, split="val"):
        device = next(model.parameters()).device
        model.eval()
        size = min(seq_len, SEQ_LEN)  # the same context for everybody
        rows = batch_size * seq_len // size  # as many tokens at once
        found = score(lambda x, y: model(x, y, reduction="none"), saved, rows, device, tokenizer, size)
        print("\n".join(["", *(f"{name}: {bpb:.6f}" for name, bpb in found.items())]))
        return found["windows"]

    prepare.make_dataloader, prepare.evaluate_bpb = guarded, evaluate_bpb


def our_prepare():
    """Our prepare.py, beside a peer's of the same name."""
    spec = importlib.util.spec_from_file_location("our_prepare", ROOT / "prepare.py")
    sys.modules["our_prepare"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def adapt(prepare, data: str, seconds: float) -> None:
    """Gives a peer's prepare module our tokenizer, its train shards and the budget; its loader stays."""
    ours = our_prepare()
    prepare.Tokenizer, prepare.get_token_bytes = ours.Tokenizer, ours.get_token_bytes
    prepare.DATA_DIR, prepare.TIME_BUDGET = str(Path(data, "peers").resolve()), seconds


# ---- Command line
def child(name: str, data: Path, saved: Path, seconds: float, seed: int = 42) -> tuple[str, list[str], Path]:
    """Python code, its arguments, and the folder it runs in."""
    from bench_train import RECIPES

    values = dict(tests=str(Path(__file__).parent), saved=str(saved), data=str(data.resolve()), seconds=seconds)
    if Path(name).suffix == ".py":
        path = Path(name).resolve()
        return PEER.format(path=str(path), **values), [], path.parent
    arguments = ["--seconds", str(seconds), "--seed", str(seed), *(["--gpu", name] if name not in RECIPES else [])]
    return OURS.format(recipe=RECIPES.get(name, ""), **values), arguments, ROOT


def run(args: argparse.Namespace) -> None:
    from bench_train import KEYS, measure

    ours = our_prepare()
    tokenizer = ours.Tokenizer.from_directory(ours.prepare(str(args.data)))
    saved = tokenizer.directory.resolve() / f"rows-{SEQ_LEN}.npz"
    if not saved.exists():
        save_rows(ours, tokenizer, saved)
    os.environ["AUTORESEARCH_CACHE"] = str(ours.cache_dir().resolve())  # peers run in other folders
    keys = {"windows": "windows", "rows": "rows"} | {column: key for column, key in KEYS.items() if key != "val_bpb"}
    print(" | ".join(["".ljust(24), *(column.rjust(12) for column in keys)]))
    for name in args.recipes:
        log = args.logs / f"compare_{Path(name).resolve().parent.name if name.endswith('.py') else name}.log"
        summary = measure(*child(name, args.data, saved, args.seconds, args.seed), log)
        line = " | ".join([name[-24:].ljust(24), *(summary.get(key, "-").rjust(12) for key in keys.values())])
        print(line if "rows" in summary else f"{name}: no score, see {log}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("shuffle", help="shuffle the train documents of a folder over its shards").add_argument
    add("source", type=Path, metavar="DIR")
    add("target", type=Path, metavar="NEW")
    add("--seed", type=int, default=7)
    add = commands.add_parser("run", help="train and score each, one after the other").add_argument
    add("recipes", nargs="+", help="a recipe of bench_train.py, a GPU's name, or the path of another train.py")
    add("--data", type=Path, required=True, metavar="NEW")
    add("--seconds", type=float, default=170)
    add("--seed", type=int, default=42, help="ours; a peer's is in its file")
    add("--logs", type=Path, default=Path("/tmp"), help="folder for their output")
    args = parser.parse_args()
    if args.command == "run":
        return run(args)
    for name, count in shuffle(args.source, args.target, args.seed).items():
        print(f"{name}: {count} documents")


if __name__ == "__main__":
    main()
