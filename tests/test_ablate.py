"""The ablations still fit train.py: each leaves a train.py that trains, and trains otherwise."""

import functools
import itertools
import types

import pytest
import torch
from ablate import EDITS, OF_EXPERTS, without

import harness

TRAIN = harness.RESULTS.with_name("train.py").read_text()


@functools.cache
def losses(*left_out: str) -> list[float]:
    """Of eight steps of a tiny model on text that repeats itself."""
    module = types.ModuleType("train")  # dataclasses look up their module by this name
    exec(compile(without(TRAIN, left_out), "train.py", "exec"), vars(module))
    config = module.Config(2, 64, 32, 64, 16, 2, 2 * 64, 512, num_experts=4, vocab_size=32)
    torch.manual_seed(1)
    model = module.build_model(config, torch.device("cpu"), harness.named_gpu("cpu"))
    optimizer, scaler = module.make_optimizer(model), module.make_scaler(model)
    tokens = torch.randint(32, (8, 2, 33)).repeat(1, 1, 2)
    batches = itertools.cycle((row[:, :64], row[:, 1:65], 1) for row in tokens)
    seen = []
    for step in range(8):
        module.set_schedules(optimizer, step / 8)
        seen.append(module.train_step(model, optimizer, scaler, batches)[0].item())
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS | OF_EXPERTS)
def test_without_a_mechanism_the_model_trains_otherwise(name):
    assert losses(name) != losses() and max(losses(name)) < 4


def test_mechanisms_can_be_left_out_together():
    assert max(losses(*EDITS, *OF_EXPERTS)) < 4
