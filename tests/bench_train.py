"""
Whole runs side by side: named recipes, each for so many seconds, on the same data and machine.

    python tests/bench_train.py hopper sdpa turing --seconds 60
    python tests/bench_train.py same-shape ../autoresearch/train.py --seconds 60 --eval bos

A recipe is train.py with constants moved. A path is any other train.py that speaks autoresearch's interface, with its
own prepare.py beside it or ours; its TIME_BUDGET is set to the same seconds. `--eval bos` scores our weights as
autoresearch does, too: each row of 2048 starts a document (BOS-aligned best-fit packing), so contexts are longer than
in the windows of our val_bpb, and the number is lower.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Python that runs inside the child before train.main(); `row` replaces fields of a row of PLATFORMS
RECIPES = {
    "default": "",
    "hopper": "force('hopper')",
    "sdpa": "force('hopper'); train.load_fa3 = lambda: None",
    "turing": "force('turing')",
    "cpu": "force('cpu')",
    "four-bit": "train.FOUR_BIT = True",
    # autoresearch's own model and batch at 228791f, without what we add to it; and with our shorter windows
    "same-shape": "same_shape(); row('hopper', window=1024); train.WINDOW_PATTERN = 'SSSL'",
    "same-shape-256": "same_shape()",
}
PRELUDE = """
import dataclasses, inspect, sys, textwrap, train
def row(name, **new): train.PLATFORMS[name] = dataclasses.replace(train.PLATFORMS[name], **new)
def force(name): sys.argv += ['--platform', name]
def same_shape():
    row('hopper', depth=8, n_embd=512, total_batch=2**19)
    train.NGRAMS = ()
    source = textwrap.dedent(inspect.getsource(train.Attention.forward))
    for addition in ("k = torch.where(self.shifted, F.pad(k, (0, 0, 0, 0, 1, -1)), k)", "y = y * gate[:, :, :H]"):
        assert addition in source, addition
        source = source.replace(addition, "")
    exec(source, vars(train))
    train.Attention.forward = train.forward
    train.scale_batch = lambda platform, seconds: platform
{recipe}
train.main()
"""
BOS = """
sys.path.append({tests!r})
import bench_train
print(f"bos: {{bench_train.bos_aligned_bpb():.6f}}")
"""
PEER = "import prepare, runpy; prepare.TIME_BUDGET = {seconds}; runpy.run_path({path!r}, run_name='__main__')"
KEYS = {  # column: key in the summary of our train.py; a peer prints the first five
    "val_bpb": "val_bpb",
    "peak MB": "peak_vram_mb",
    "MFU %": "mfu_percent",
    "M tokens": "total_tokens_M",
    "total s": "total_seconds",
    "tok/s": "tokens_per_sec",
    "first step s": "first_step_sec",
    "nf4": "val_bpb_nf4",
}


def run(name: str, seconds: float, log: Path, bos: bool = False) -> dict[str, str]:
    """One child process; its summary as a dictionary, its output in the log."""
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    if name in RECIPES:
        code = PRELUDE.format(recipe=RECIPES[name]) + bos * BOS.format(tests=str(Path(__file__).parent))
        arguments, cwd = ["--seconds", str(seconds)], ROOT
    else:
        path = Path(name).resolve()
        code, arguments, cwd = PEER.format(seconds=int(seconds), path=str(path)), [], path.parent
    start, first, end = time.perf_counter(), None, 0.0
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output = b""
        for chunk in iter(lambda: process.stdout.read1(4096), b""):
            output += chunk
            if first is None and b"step 0000" in output:
                first = time.perf_counter() - start
            if b"\nbos: " not in output:
                end = time.perf_counter() - start
        process.wait()
        text = output.decode(errors="replace")
        file.write(text)
    summary = dict(re.findall(r"^(\w+): +(\S.*)$", text.rpartition("---")[2], re.M))
    summary.setdefault("first_step_sec", f"{first or 0:.1f}")
    if "tokens_per_sec" not in summary and "training_seconds" in summary:
        # autoresearch's clock leaves its first 11 steps out, its tokens don't
        steps = float(summary["num_steps"])
        tokens = 1e6 * float(summary["total_tokens_M"]) * max(steps - 11, 1) / steps
        summary["tokens_per_sec"] = f"{tokens / float(summary['training_seconds']):.0f}"
    summary["total_seconds"] = f"{end:.1f}"  # from outside, for everybody
    return summary


def bos_aligned_bpb(batch_size: int = 32, tokens: int = 2**22) -> float:
    """val_bpb of the saved weights on rows that start with BOS, packed best-fit; what does not fit is cropped."""
    import math

    import torch

    import prepare
    import train

    tokenizer = prepare.Tokenizer.from_directory()
    (shard,) = prepare.open_shards(tokenizer.directory, "val", tokenizer.fingerprint)
    bounds = [*shard.documents.tolist(), len(shard.tokens)]
    documents = [shard.tokens[a:b] for a, b in itertools.pairwise(bounds)]
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    flash = train.load_fa3()
    platform = train.pick_platform(capability, flash is not None)
    model, _ = train.load_checkpoint(platform, tokenizer.get_vocab_size(), flash)
    T, device = model.platform.seq_len, platform.device
    sizes = torch.tensor(tokenizer.token_bytes(), device=device)
    nats = torch.zeros((), dtype=torch.float64, device=device)
    total, buffer, rows = 0, [], []

    def score():
        nonlocal nats, total
        batch = torch.tensor(rows, device=device)
        x, y = batch[:, :-1], batch[:, 1:]
        with torch.no_grad():
            loss = model(x, y.contiguous(), reduction="none").view(-1)
        weight = sizes[y.reshape(-1)]
        nats += (loss.double() * (weight > 0)).sum()
        total += weight.sum().item()
        rows.clear()

    scored = 0
    while (documents or buffer) and scored < tokens:
        row: list[int] = []
        while len(row) < T + 1 and (documents or buffer):
            while len(buffer) < 1000 and documents:
                buffer.append(documents.pop(0))
            room = T + 1 - len(row)
            fitting = [d for d in buffer if len(d) <= room]
            best = max(fitting, key=len) if fitting else min(buffer, key=len)
            buffer = [d for d in buffer if d is not best]
            row += best[:room].tolist()
        if len(row) == T + 1:
            rows.append(row)
            scored += T
        if rows and (len(rows) == batch_size or not (documents or buffer)):
            score()
    return nats.item() / (math.log(2) * total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help=f"of {', '.join(RECIPES)}, or paths of other train.py")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--eval", choices=["bos"])
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="folder for the children's output")
    args = parser.parse_args()
    columns = {**KEYS, **({"bos bpb": "bos"} if args.eval else {})}
    lines = [" | ".join(["recipe".ljust(16), *(c.rjust(12) for c in columns)])]
    for name in args.recipes:
        log = args.logs / f"bench_train_{re.sub(r'[^A-Za-z0-9]+', '_', name)}.log"
        summary = run(name, args.seconds, log, args.eval == "bos")
        lines.append(" | ".join([name[-16:].ljust(16), *(summary.get(k, "-").rjust(12) for k in columns.values())]))
        print(lines[-1] if "val_bpb" in summary else f"{name}: no summary, see {log}", flush=True)
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
