"""Everything around an experiment: clock, warm-up, log, GPU, signals, summary, sample text. Not edited during research.

torch is imported inside functions, because night supervises runs without it.
"""

from pathlib import Path

from harness.clock import Clock
from harness.experiment import crash_reason, handle_signals, mfu_percent, run, score
from harness.git import clean_environment, git_head, run_git
from harness.gpu import GPU, GPUS, fa3_installed, gpu_name, load_fa3, named_gpu, peak_flops, pick_gpu, this_gpu
from harness.log import (
    COLUMNS,
    DIFFERS,
    HEADER,
    SEED,
    Description,
    budget_name,
    clean,
    locked,
    log_result,
    parse_row,
    plain_subject,
    read_results,
)
from harness.record import night_record, write_record
from harness.warmup import num_params, start_compiler, warm_up
from harness.weights import load_weights, sample, save_weights

RESULTS = Path(__file__).resolve().parent.with_name("results.tsv")  # the files look it up here
WEIGHTS = RESULTS.with_name("model.safetensors")

__all__ = [
    "COLUMNS",
    "DIFFERS",
    "GPU",
    "GPUS",
    "HEADER",
    "RESULTS",
    "SEED",
    "WEIGHTS",
    "Clock",
    "Description",
    "budget_name",
    "clean",
    "clean_environment",
    "crash_reason",
    "fa3_installed",
    "git_head",
    "gpu_name",
    "handle_signals",
    "load_fa3",
    "load_weights",
    "locked",
    "log_result",
    "mfu_percent",
    "named_gpu",
    "night_record",
    "num_params",
    "parse_row",
    "peak_flops",
    "pick_gpu",
    "plain_subject",
    "read_results",
    "run",
    "run_git",
    "sample",
    "save_weights",
    "score",
    "start_compiler",
    "this_gpu",
    "warm_up",
    "write_record",
]
