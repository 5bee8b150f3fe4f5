"""What a trained model is worth: its score, and the summary that a run prints."""

from __future__ import annotations

import math
import time
from contextlib import suppress

from harness import remote
from harness.clock import Clock
from harness.gpu import this_gpu
from harness.record import night_record, process_seconds
from harness.referee import eval_shape, evaluate_bpb
from harness.warmup import num_params
from prepare import Tokenizer


def summarize(model, clock: Clock, device, tokenizer: Tokenizer, numbers: dict) -> tuple[dict, dict]:
    """Scores the model. Returns the summary, with what train() adds to it, and the values of the row."""
    import torch

    start = time.perf_counter()
    val_bpb, test_bpb = score(model, tokenizer, "val"), None
    eval_seconds = time.perf_counter() - start
    if night_record().get("score_test"):
        test_bpb = score(model, tokenizer, "test")
        numbers["test_bpb"] = round(test_bpb, 6)
    memory = torch.cuda.max_memory_allocated()  # bytes; 0 without a GPU
    seconds, total, tokens_M = clock.elapsed(), process_seconds(), clock.tokens / 1e6
    summary = {
        "val_bpb": round(val_bpb, 6),
        "training_seconds": round(seconds, 1),
        "total_seconds": round(total, 1),
        "peak_vram_mb": round(memory / 2**20, 1),
        "mfu_percent": round(mfu_percent(model, clock, device), 2),
        "total_tokens_M": round(tokens_M, 1),
        "num_steps": clock.steps,
        "num_params_M": round(num_params(model) / 1e6, 1),
        "depth": numbers.get("depth", "?"),
        "tokens_per_sec": round(clock.tokens / seconds),
        "first_step_sec": round(total - (time.perf_counter() - clock.started), 1),
        "eval_seconds": round(eval_seconds, 1),
    }
    row = dict(val_bpb=val_bpb, test_bpb=test_bpb, memory_gb=memory / 2**30, tokens_M=tokens_M)
    return summary | numbers | summary, row


def mfu_percent(model, clock: Clock, device) -> float:
    """Share of the peak FLOP/s of this GPU (not of --gpu's); 0 without a GPU or a flops_per_token() that works."""
    with suppress(Exception):  # of an edited model that has other layers
        if device.type == "cuda":
            return 100 * model.flops_per_token() * clock.tokens / clock.elapsed() / this_gpu().peak_flops
    return 0.0


def score(model, tokenizer: Tokenizer, split: str) -> float:
    """Bits per byte of a split. Raises FloatingPointError if not finite."""
    if remote.channel():
        return remote.answer(model, tokenizer.get_vocab_size(), split)
    bpb = evaluate_bpb(model, tokenizer, *eval_shape(model.config), split)
    if not math.isfinite(bpb):
        raise FloatingPointError(f"{split}_bpb is {bpb}")
    return bpb
