"""A whole run, in this process and recorded: what settings, text, clock and seed arrive where, and what is scored.

The model is tiny and the budget is in tokens, so that a run takes a second and is the same on every machine. It looks
into train.py by its names: a branch that renames or replaces its parts is not asked to pass this file.
"""

import copy
import dataclasses
import gc
import io
import math
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from reference_model import relative_error
from small_corpus import texts

import harness
import prepare
import train

T = 64  # tokens in a sequence
TINY = train.Config(2, 64, 32, T, T, 2, 8 * T, 512, eval_seq_len=T)  # four device batches of two sequences to a step
VALIDATION = texts(6542)  # as in the prepared corpus
Weights = dict[str, torch.Tensor]


class Run:
    """What happened from the first step on, in lists with an item per step."""

    def __init__(self):
        self.progress, self.gradients = [], []  # what schedules were set for; lm_head's gradient at the optimizer
        self.batches, self.losses = [], []  # lists: of (inputs, targets) and their losses
        self.weights: list[Weights] = []  # the initial ones, then those that each step has left
        self.evaluated = set()  # shapes of the batches that were scored
        self.model, self.out = None, ""

    @property
    def summary(self) -> dict[str, str]:
        return dict(re.findall(r"^(\w+): +(.+)$", self.out, re.MULTILINE))

    @property
    def text(self) -> torch.Tensor:
        """(sequences, 2, T): inputs and targets in the order in which the model saw them."""
        return torch.cat([torch.stack(batch, dim=1) for batches in self.batches for batch in batches])


def weights_of(model: train.GPT) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def run(prepared, tmp_path_factory) -> Callable[..., Run]:
    """Runs train.py's command line for so many tokens."""

    def run(tokens: int, *args: str, dtype=torch.float32, memory=math.inf, loss_scale=None, **sizes) -> Run:
        """memory: sequences in one device batch that do not fit any longer; loss_scale: in fp16, at the start."""
        record, out = Run(), io.StringIO()
        init, forward, step = train.GPT.__init__, train.GPT.forward, train.MuonAdamW.step
        set_schedules = train.set_schedules

        def on_init(model, *args):
            record.model = model
            init(model, *args)

        def on_schedules(optimizer, progress):
            record.weights = record.weights or [weights_of(record.model)]
            record.progress.append(progress)
            record.batches.append([])
            record.losses.append([])
            set_schedules(optimizer, progress)

        def on_forward(model, idx, targets=None, reduction="mean"):
            if len(idx) >= memory:
                raise torch.OutOfMemoryError("CUDA out of memory")
            loss = forward(model, idx, targets, reduction)
            if not record.progress:
                return loss  # of the warm-up
            if targets is None:
                record.evaluated.add(tuple(idx.shape))
            else:
                record.batches[-1].append((idx.clone(), targets.clone()))
                record.losses[-1].append(loss.item())
            return loss

        def on_step(optimizer):
            gradient = record.model.lm_head.weight.grad.clone()
            step(optimizer)
            if record.progress:
                record.gradients.append(gradient)
                record.weights.append(weights_of(record.model))

        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
            patch.setenv("AUTORESEARCH_CACHE", str(prepared))
            patch.setattr(harness, "RESULTS", tmp_path_factory.mktemp("run") / "results.tsv")
            patch.setattr(harness.experiment, "handle_signals", lambda handler: None)
            patch.setattr(train.GPT, "__init__", on_init)
            patch.setattr(train.GPT, "forward", on_forward)
            patch.setattr(train.MuonAdamW, "step", on_step)
            patch.setattr(train, "set_schedules", on_schedules)
            patch.setattr(train, "SIZES", ((0, dataclasses.replace(TINY, **sizes)),))
            patch.setattr(train, "pick_numerics", lambda *_: (dtype, "sdpa"))
            if loss_scale:
                scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale, growth_interval=10)
                patch.setattr(train, "make_scaler", lambda model: copy.deepcopy(scaler))
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)  # it would outlast the run
            patch.setattr(gc, "collect", lambda: 0)  # takes longer than the run in a process with so many objects
            patch.setattr(sys, "argv", ["train.py", "--tokens", str(tokens), *args])
            harness.run(train.train, train.build_model)
        record.out = out.getvalue()
        return record

    return run


@pytest.fixture(scope="module")
def plain(run) -> Run:
    """Ten steps of the tiny configuration."""
    return run(8 * T * 10, "--seed", "7")


def with_weights(model: train.GPT, weights: Weights) -> train.GPT:
    model = copy.deepcopy(model)
    for name, p in model.named_parameters():
        p.data, p.grad = weights[name], None
    return model


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize(("device_batch", "sequences", "batches"), [(2, 8, 4), (1, 3, 3)])
def test_a_step_accumulates_its_total_batch_and_balances_the_experts(run, device_batch, sequences, batches):
    record = run(5 * sequences * T, device_batch_size=device_batch, total_batch_size=sequences * T, num_experts=2)
    assert [len(step) for step in record.batches] == [batches] * 5
    assert {tuple(t.shape) for step in record.batches for batch in step for t in batch} == {(device_batch, T)}
    assert record.summary["num_steps"] == "5"
    assert record.summary["total_tokens_M"] == f"{5 * sequences * T / 1e6:.1f}"
    for block in record.model.blocks[-1::-2]:
        one, other = (block.experts.bias / train.BALANCE_RATE).tolist()  # steps up: one's gain is the other's loss
        assert one == -other and abs(one) in map(pytest.approx, range(6))  # 0: both had as many


def test_val_bpb_is_that_of_all_validation_text_and_of_the_weights_as_the_last_step_left_them(plain, tokenizer):
    """From the model's logits alone, in float64, a window at a time."""
    model, bos = with_weights(plain.model, plain.weights[-1]), tokenizer.get_bos_token_id()
    stream = [token for ids in tokenizer.encode(VALIDATION, prepend=bos) for token in ids]
    nats, nbytes = 0.0, 0
    for start in range(0, len(stream) - 1, T):
        window = torch.tensor([stream[start : start + T]])
        with torch.no_grad():
            log_p = model(torch.nn.functional.pad(window, (0, T - window.size(1))))[0].double().log_softmax(-1)
        for position, target in enumerate(stream[start + 1 : start + T + 1]):
            if target != bos:
                nats -= log_p[position, target].item()
                nbytes += len(tokenizer.encoding.decode_single_token_bytes(target))
    assert float(plain.summary["val_bpb"]) == pytest.approx(nats / math.log(2) / nbytes, abs=2e-5)


def test_steps_get_their_share_of_the_budget_the_loaders_batches_in_order_and_print_the_mean_loss(plain, tokenizer):
    assert plain.progress == pytest.approx([i / 10 for i in range(10)])
    expected = islice(prepare.make_dataloader(tokenizer, 1, T, "train", "cpu"), 8 * 10)
    assert torch.equal(plain.text, torch.cat([torch.stack([x, y], dim=1) for x, y, _ in expected]))
    printed = float(re.search(r"loss (\d+\.\d+)", plain.out)[1])
    assert printed == pytest.approx(np.mean(plain.losses[0]), abs=1e-4), "in nats, over the total batch"


def test_the_optimizer_gets_the_mean_gradient_of_the_total_batch_and_of_no_earlier_one(plain):
    for weights, batches, gradient in zip(plain.weights, plain.batches, plain.gradients, strict=False):
        model = with_weights(plain.model, weights)
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        model(x, y).backward()
        assert relative_error(gradient, model.lm_head.weight.grad) < 1e-4


def test_a_device_batch_that_does_not_fit_is_halved_and_the_step_stays_what_it_is(plain, run):
    halved = run(8 * T * 10, "--seed", "7", device_batch_size=8, memory=3)
    assert halved.out.count("Out of memory") == 2
    assert torch.equal(halved.text, plain.text) and len(halved.batches) == 10
    assert {batch[0].shape for step in halved.batches for batch in step} == {(2, T)}
    sample = (1, T)
    assert halved.evaluated - {sample} == {(2, T)}, "what did not fit in training is not tried in evaluation"
    assert equal(halved.weights[-1], plain.weights[-1])


@pytest.mark.slow
def test_in_fp16_steps_that_overflow_change_no_weight_and_are_counted_and_the_others_learn(run):
    """One device batch: CPUs cannot add sparse gradients in fp16."""
    record = run(8 * T * 40, dtype=torch.float16, loss_scale=2.0**32, device_batch_size=8)
    skipped = [equal(a, b) for a, b in pairwise(record.weights)]
    assert skipped[0] and 3 < sum(skipped) < 30, skipped
    assert record.summary["skipped_steps"] == str(sum(skipped))
    assert {p.dtype for name, p in record.weights[-1].items() if "ngram" in name} == {torch.float16}
    assert all(p.isfinite().all() for p in record.weights[-1].values())
    assert record.losses[-1][0] < record.losses[0][0] - 1


def test_the_seed_chooses_the_initial_weights_and_not_the_text(plain, run, tokenizer):
    other = run(8 * T * 10, "--seed", "8")
    config = dataclasses.replace(TINY, vocab_size=tokenizer.get_vocab_size())
    for seed, record in ((7, plain), (8, other)):
        model = train.GPT(config, torch.float32, "sdpa")
        torch.manual_seed(seed)
        model.init_weights()
        assert equal(record.weights[0], weights_of(model)), "nothing else has drawn from it"
    assert not equal(plain.weights[0], other.weights[0])
    assert torch.equal(plain.text, other.text)
