"""Everything around the training loop: clock, warm-up, score, log, GPU, signals, summary. Not edited during research.

torch is imported inside functions, because night supervises runs without it.
"""

from pathlib import Path

from harness.clock import Clock
from harness.columns import COLUMNS, HEADER, SEED, budget_name, clean, crashed, parse_row, seed
from harness.experiment import crash_reason, handle_signals, run
from harness.flash import load_fa3, load_fa4
from harness.git import DECISIVE, clean_environment, git_head, git_problem, run_git, uncommitted
from harness.gpu import GPU, GPUS, gpu_name, named_gpu, peak_flops, pick_gpu, this_gpu
from harness.log import add_row, edit_log, log_result, parse_log, read_results
from harness.record import night_record
from harness.summary import mfu_percent, score
from harness.warmup import start_compiler, warm_up
from harness.weights import load_weights, sample, save_weights

RESULTS = Path(__file__).resolve().parent.with_name("results.tsv")  # used as harness.RESULTS, so tests can move it
WEIGHTS = RESULTS.with_name("model.safetensors")
