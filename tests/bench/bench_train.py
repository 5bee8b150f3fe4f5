"""
Whole runs side by side: named recipes, each for so many seconds, on the same data and machine.

    python tests/bench/bench_train.py default no-fa3 T4 --seconds 60
    python tests/bench/bench_train.py same-shape ../autoresearch/train.py --seconds 60

A recipe is train.py with constants moved, or the name of a GPU whose numerics and size it takes. A path is any other
train.py that speaks autoresearch's interface, with its own prepare.py beside it or ours; its TIME_BUDGET is set to the
same seconds. Its val_bpb is its own metric, on text in its own order: compare.py compares scores.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Python that runs inside the child before the run
RECIPES = {
    "default": "",
    "no-fa3": "harness.gpu.installed = lambda kind: False",
    "four-bit": "train.FOUR_BIT = True",
    # autoresearch's own model and batch at 228791f, without what we add to it
    "same-shape": """
import dataclasses, inspect, textwrap
shape = dict(depth=8, n_embd=512, seq_len=2048, eval_seq_len=2048, window=1024, num_experts=0)
shape |= dict(device_batch_size=128, total_batch_size=2**19)
config = dataclasses.replace(train.SIZES[-1][1], **shape)
train.pick_size = lambda gpu: config
train.scale_batch = lambda config, seconds: config
train.NGRAMS = ()
sources = {}
for owner, method, ours, theirs in (
    (train.Attention, "forward", "k = torch.where(self.slow, F.pad(k, (0, 0, 0, 0, 1, -1)), k)", ""),
    (train.Attention, "forward", "self.shift) * gate[:, :, :H]", "self.shift)"),
    (
        train.GPT,
        "trunk",
        "torch.where(found.unsqueeze(-1), F.embedding(followers, embed), embed[-1])",
        "0",
    ),
    (train.GPT, "forward", "*induction(idx)", "None, None"),
):
    source = sources.get((owner, method)) or textwrap.dedent(inspect.getsource(getattr(owner, method)))
    assert ours in source, ours
    sources[owner, method] = source.replace(ours, theirs)
    exec(sources[owner, method], vars(train))
    setattr(owner, method, vars(train).pop(method))
""",
}
CHILD = """
import sys, harness, train
sys.argv[0] = "train.py"
{recipe}
harness.run(train.train, train.build_model)
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
}


def child(name: str, seconds: float) -> tuple[str, list[str], Path]:
    """Python code, its arguments, and the folder it runs in."""
    if Path(name).suffix == ".py":
        path = Path(name).resolve()
        return PEER.format(seconds=int(seconds), path=str(path)), [], path.parent
    arguments = ["--seconds", str(seconds), *(["--gpu", name] if name not in RECIPES else [])]
    return CHILD.format(recipe=RECIPES.get(name, "")), arguments, ROOT


def measure(code: str, arguments: list[str], cwd: Path, log: Path) -> dict[str, str]:
    """One child process; its summary as a dictionary, its output in the log."""
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    start, first = time.perf_counter(), None
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output = b""
        for chunk in iter(lambda: process.stdout.read1(4096), b""):
            output += chunk
            if first is None and b"step 0000" in output:
                first = time.perf_counter() - start
        process.wait()
        end = time.perf_counter() - start
        text = output.decode(errors="replace")
        file.write(text)
    summary = dict(re.findall(r"^(\w+): +(\S.*)$", text, re.M))
    summary.setdefault("first_step_sec", f"{first or 0:.1f}")
    if "tokens_per_sec" not in summary and "training_seconds" in summary:
        # autoresearch's clock leaves its first 11 steps out, its tokens don't
        steps = float(summary["num_steps"])
        tokens = 1e6 * float(summary["total_tokens_M"]) * max(steps - 11, 1) / steps
        summary["tokens_per_sec"] = f"{tokens / float(summary['training_seconds']):.0f}"
    summary["total_seconds"] = f"{end:.1f}"  # from outside, for everybody
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help=f"{', '.join(RECIPES)}, a --gpu, or another train.py")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="folder for the children's output")
    args = parser.parse_args()
    lines = [" | ".join(["recipe".ljust(16), *(c.rjust(12) for c in KEYS)])]
    for name in args.recipes:
        log = args.logs / f"bench_train_{re.sub(r'[^A-Za-z0-9]+', '_', name)}.log"
        summary = measure(*child(name, args.seconds), log)
        lines.append(" | ".join([name[-16:].ljust(16), *(summary.get(k, "-").rjust(12) for k in KEYS.values())]))
        print(lines[-1] if "val_bpb" in summary else f"{name}: no summary, see {log}", flush=True)
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
