"""The agent that is a script: its edits still fit train.py, and it proposes nothing twice."""

import random

import pytest
from script_agent import EDITS, propose

import harness

TRAIN = harness.RESULTS.with_name("train.py").read_bytes()


def test_each_edit_has_one_place():
    places = {what: TRAIN.count(old.encode()) for what, (old, _) in EDITS.items()}
    assert set(places.values()) == {1}, places


@pytest.mark.slow
def test_two_hundred_proposals_are_new_each_and_compile():
    random.seed(1)
    prompt, found = "", {TRAIN}
    for _ in range(200):
        what, text = propose(TRAIN, prompt)
        compile(text, "train.py", "exec")
        assert what not in prompt and text not in found
        prompt, found = f"{prompt}\n- {what}", found | {text}
    assert all(what in prompt for what in EDITS)
