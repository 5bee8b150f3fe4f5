"""
Do runs side by side measure what a run alone measures? And how many experiments per hour is that?

    python tests/bench/bench_wave.py                    # a run alone, twice, then one on each GPU: 18 minutes
    python tests/bench/bench_wave.py --seconds 60       # the same, shorter
    python tests/bench/bench_wave.py --tokens 10000000 --per-gpu 3   # that many on each GPU at once

It takes a clone of this repository's last commit, and the data that `prepare.py` has prepared.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import harness


def timed(clone: Path, *command: str) -> tuple[float, list[dict]]:
    """Seconds, and the rows that it has left."""
    before, start = len(harness.read_results(clone / "results.tsv")), time.perf_counter()
    env = os.environ | {"AUTORESEARCH_RUN": '{"log": true}'}  # or a short run by itself would leave none
    subprocess.run([sys.executable, "-m", "night", *command], cwd=clone, env=env, check=True)
    return time.perf_counter() - start, harness.read_results(clone / "results.tsv")[before:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="of training instead of five minutes")
    parser.add_argument("--tokens", type=int, help="to train on instead")
    parser.add_argument("--gpu", help="whose numerics and size")
    parser.add_argument("--per-gpu", type=int, default=1)
    args = parser.parse_args()
    import torch

    gpus = max(1, torch.cuda.device_count())
    given = {"seconds": args.seconds, "tokens": args.tokens, "gpu": args.gpu}
    options = [f"--{name}={value}" for name, value in given.items() if value]
    seeds = ",".join(map(str, range(gpus * args.per_gpu)))
    with tempfile.TemporaryDirectory() as folder:
        harness.run_git("clone", "-q", str(harness.RESULTS.parent), folder)
        timed(Path(folder), "run", *options)  # compiles: what is measured finds it in the caches
        alone, (row,) = timed(Path(folder), "run", *options)
        together, rows = timed(Path(folder), "wave", "HEAD", f"--seeds={seeds}", f"--per-gpu={args.per_gpu}", *options)
    print(f"\n{gpus} x {harness.gpu_name()}, {args.per_gpu} runs on each at once")
    print(f"{'':24}{'alone':>10}{'together':>10}{'ratio':>8}")
    print(f"{'seconds, all included':24}{alone:10.1f}{together:10.1f}{together / alone:8.3f}")
    for name, choose in {"fewest": min, "median": statistics.median, "most": max}.items():
        tokens = choose(other["tokens_M"] for other in rows)
        ratio = tokens / row["tokens_M"] if row["tokens_M"] else 0.0
        print(f"{f'tokens, M, {name}':24}{row['tokens_M']:10.1f}{tokens:10.1f}{ratio:8.3f}")
    hourly = 3600 / alone, 3600 * len(rows) / together
    print(f"{'experiments an hour':24}{hourly[0]:10.1f}{hourly[1]:10.1f}{hourly[1] / hourly[0]:8.3f}")
    print("crashes:", sum(other["status"] == "crash" for other in [row, *rows]))


if __name__ == "__main__":
    main()
