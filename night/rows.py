"""What the rows of results.tsv say of experiments."""

import math
import re
import statistics

import harness

REPORT = ", report"  # ends the gpu of a report's rows, so that they compare among themselves only
TEST = ", test "  # in their description, before the score on the test split


def name_of(row: dict) -> tuple[str, str]:
    """Commit and description of the row's run: without the reason of a crash, and the test score of a report."""
    description = row["description"]
    if row["status"] == "crash":
        description = description.rpartition("[")[0].rstrip()
    return row["commit"], description.partition(TEST)[0] if row["gpu"].endswith(REPORT) else description


def rows_of(commit: str) -> list[dict]:
    return [row for row in harness.read_results() if row["commit"] == commit]


def rows_on(gpu: str, dataset: str) -> list[dict]:
    """The rows on a dataset, and on a gpu that matches a pattern."""
    return [row for row in harness.read_results() if row["dataset"] == dataset and re.fullmatch(gpu, row["gpu"])]


def experiments() -> list[dict]:
    """The rows of results.tsv, without those of reports and without a crash whose run has a later row."""
    rows = [row for row in harness.read_results() if not row["gpu"].endswith(REPORT)]
    last = {(*name_of(row), row["gpu"], row["dataset"]): i for i, row in enumerate(rows)}
    return [row for i, row in enumerate(rows) if row["status"] != "crash" or i in last.values()]


def seed_noise(gpu: str, dataset: str) -> float:
    """Standard deviation of val_bpb from seed to seed, by the runs of a report; 0 without a report."""
    rows = [row for row in rows_on(re.escape(gpu + REPORT), dataset) if row["status"] != "crash"]
    groups = [[row["val_bpb"] for row in rows if row["commit"] == commit] for commit in {row["commit"] for row in rows}]
    variances = [statistics.variance(group) for group in groups if len(group) > 1]
    return math.sqrt(statistics.mean(variances)) if variances else 0.0
