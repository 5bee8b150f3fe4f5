"""The agent that is a script: each of its edits still fits train.py, and it proposes nothing twice."""

import random

from script_agent import EDITS, propose

import harness


def test_two_hundred_proposals_are_new_each_and_compile_and_every_edit_is_among_them():
    random.seed(1)
    train = harness.RESULTS.with_name("train.py").read_bytes()
    prompt, found = "", {train}
    for _ in range(200):
        what, text = propose(train, prompt)
        compile(text, "train.py", "exec")
        assert what not in prompt and text not in found
        prompt, found = f"{prompt}\n- {what}", found | {text}
    assert all(what in prompt for what in EDITS)
