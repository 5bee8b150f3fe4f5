"""How a run ends early: signals, and the reason that its crash row gives."""

from __future__ import annotations

import re
import signal
import sys
import traceback
from pathlib import Path

from harness.git import script
from harness.warmup import is_out_of_memory
from prepare import PrepareError


def handle_signals(handler) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # leave it ignored under nohup
            signal.signal(number, handler)


def on_signal(number, frame):
    """Ends the run by an exception, so that it leaves a crash row."""
    handle_signals(signal.SIG_IGN)
    sys.exit(128 + number)


def crash_reason(error: BaseException) -> str:
    """`out of memory`, `NaN at step 40`, or the error's type with train.py's two innermost lines: if Linear.forward
    fails on a wrong shape, its caller is the line to fix."""
    if isinstance(error, SystemExit):
        reasons = {129: "terminal closed", 130: "interrupted", 143: "killed"}
        return reasons.get(error.code, f"exit status {error.code}")
    if is_out_of_memory(error):
        return "out of memory"
    if isinstance(error, (FloatingPointError, PrepareError)):
        return str(error)
    frames, name = traceback.extract_tb(error.__traceback__), script()
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == name]
    # torch.compile names them in its message
    lines += re.findall(rf'File ".*{re.escape(name)}", line (\d+)', str(error))
    where = ", called from".join(f" line {line}" for line in lines[:-3:-1])
    return type(error).__name__ + where
