"""
Where the time of a start goes, from `python train.py` until the clock starts: samples of what its threads do.

    python tests/bench/bench_start.py [options of train.py]    # with cold caches of PyTorch and Triton
    python tests/bench/bench_start.py --warm [options]         # with the caches of the last run

Prints the seconds of each phase, and of each kind of work in it, after a run of one step that is not logged.
"""

import argparse
import os
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PERIOD = 0.01  # seconds between samples

# A stack belongs to the first whose text is in one of its frames, such as `.../train.py:forward`
PHASES = {
    "model": "train.py:build_model",
    "forward": "train.py:forward",
    "backward": "torch/_tensor.py:backward",
    "optimizer": "train.py:step",
    "rest": "",
}
WORK = {
    "imports": "importlib._bootstrap>:_find_and_load",
    "waiting for Inductor's processes": "async_compile.py:wait",
    "Triton in this process": "triton/compiler/compiler.py:compile",
    "the C compiler for Triton's launchers": "triton/runtime/build.py:",
    "choosing between configurations": "triton_heuristics.py:benchmark_all_configs",
    "Inductor": "torch/_inductor/compile_fx.py:codegen_and_compile",
    "AOTAutograd and passes": "torch/_functorch/",
    "Dynamo": "torch/_dynamo/convert_frame.py:",
    "other": "",
}


def stack_of(frame) -> str:
    return "\n".join(f"{f.f_code.co_filename}:{f.f_code.co_name}" for f, _ in traceback.walk_stack(frame))


def sample(seconds: Counter, main: int, started: threading.Event) -> None:
    """Adds up the time per (phase, work) until the clock has started."""
    last = time.perf_counter()
    while not started.is_set():
        time.sleep(PERIOD)
        stacks = {thread: stack_of(frame) for thread, frame in sys._current_frames().items()}
        stack = stacks.pop(main)
        phase = next(name for name, text in PHASES.items() if text in stack)
        if phase == "backward":  # is compiled in a thread of autograd's own
            stack += "".join(other for other in stacks.values() if "torch/_functorch/" in other)
        now = time.perf_counter()
        seconds[phase, next(name for name, text in WORK.items() if text in stack)] += now - last
        last = now


def show(seconds: Counter) -> None:
    for phase in PHASES:
        work = {name: seconds[phase, name] for name in WORK if seconds[phase, name] >= 0.05}
        print(f"{phase:10}{sum(work.values()):5.1f} s: {', '.join(f'{name} {s:.1f}' for name, s in work.items())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", action="store_true", help="keep the caches of PyTorch and Triton")
    args, options = parser.parse_known_args()
    seconds, started = Counter(), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        if not args.warm:
            os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        threading.Thread(target=sample, args=(seconds, threading.get_ident(), started), daemon=True).start()
        import harness

        start = harness.Clock.start
        harness.Clock.start = lambda clock: (start(clock), started.set())[0]
        sys.argv = ["train.py", "--tokens=1", *options]  # with the batch of five minutes
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        finally:
            show(seconds)


if __name__ == "__main__":
    main()
