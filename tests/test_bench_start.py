"""Claims about bench_start.py: samples go to the phase and the work that a thread is in."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from bench_start import sample

CALLS = {
    "train.py": "forward",
    "torch/_dynamo/convert_frame.py": "compile",
    "torch/_inductor/compile_fx.py": "codegen_and_compile",
}


@pytest.mark.parametrize("depth, work", [(1, "other"), (2, "Dynamo"), (3, "Inductor")])
def test_time_goes_to_the_phase_and_to_the_kind_of_work(depth, work):
    began, ended = threading.Event(), threading.Event()

    def call() -> None:
        began.set()
        ended.wait()

    for file, function in [*CALLS.items()][:depth][::-1]:
        scope = {"call": call}
        exec(compile(f"def {function}(): call()", file, "exec"), scope)
        call = scope[function]
    thread = threading.Thread(target=call)
    thread.start()
    began.wait()
    seconds, looks = Counter(), iter([False] * 20 + [True])
    sample(seconds, thread.ident, SimpleNamespace(is_set=lambda: next(looks)))
    ended.set()
    assert seconds.keys() == {("forward", work)}
    assert seconds.total() > 0.1
