"""How well downloading and tokenizing overlap: climbmix from a local server of limited speed.

python tests/bench/bench_prepare.py DIR --rate 50    # DIR: parquet files with climbmix's names; rate in MB/s

Prints how long downloading takes alone, tokenizing alone (training the tokenizer included), and both together.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import prepare  # noqa: E402

PREFIX = "/datasets/karpathy/climbmix-400b-shuffle/resolve/main/"


def serve(folder: Path, rate: float, url) -> None:
    from http_faults import FaultyServer

    with FaultyServer(
        {PREFIX + path.name: path.read_bytes() for path in folder.glob("*.parquet")}, rate=rate
    ) as server:
        url.send(server.url)
        time.sleep(3600)


def seconds(function, *args) -> np.ndarray:
    """Wall time and CPU time of this process."""
    start = np.array([time.perf_counter(), time.process_time()])
    function(*args)
    return np.array([time.perf_counter(), time.process_time()]) - start


def download_all(shards: int) -> None:
    paths = [path for path, *_ in prepare.source_parts("climbmix", shards)]
    for future in prepare.download_ahead(prepare.HUB["climbmix"], paths).values():
        future.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, default=50.0, help="MB/s of the server")
    args = parser.parse_args()
    shards = sum(file.name not in (prepare.VAL_FILE, prepare.TEST_FILE) for file in args.folder.glob("*.parquet"))
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(args.folder, 1e6 * args.rate, theirs), daemon=True)
    server.start()
    os.environ["HF_ENDPOINT"] = ours.recv()
    with tempfile.TemporaryDirectory() as apart, tempfile.TemporaryDirectory() as together:
        os.environ["AUTORESEARCH_CACHE"] = apart
        download = seconds(download_all, shards)
        tokenize = seconds(prepare.prepare, "climbmix", shards)
        os.environ["AUTORESEARCH_CACHE"] = together
        both = seconds(prepare.prepare, "climbmix", shards)
    server.terminate()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {args.rate:.0f} MB/s, {shards} train shards")
    for name, alone, beside, whole in zip(("wall", "CPU"), download, tokenize, both, strict=True):
        print(f"{name}: download {alone:.1f} s, tokenize {beside:.1f} s, both {whole:.1f} s", end=", ")
        print(f"{whole / max(alone, beside):.2f} of the longer, {whole / (alone + beside):.2f} of the sum")


if __name__ == "__main__":
    main()
