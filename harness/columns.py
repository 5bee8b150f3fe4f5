"""A row of results.tsv: a dict with one value per column, empty where there is none."""

from __future__ import annotations

import math
import re
from contextlib import suppress

from prepare import TIME_BUDGET

SEED = 42  # unless --seed is given
# docs/log.md says what each column means. by: "" in rows from before there was such a column
COLUMNS = ("commit", "val_bpb", "memory_gb", "status", "description", "gpu", "dataset", "budget", "seed", "tokens_M")
COLUMNS += ("test_bpb", "reason", "by")
HEADER = "\t".join(COLUMNS)
EIGHT = (*COLUMNS[:7], "tokens_M")  # until November 2026; karpathy/autoresearch has the first five
LAYOUTS = {"\t".join(columns): columns for columns in (COLUMNS, EIGHT, COLUMNS[:5])}  # by header


def budget_name(seconds: float | None = None, tokens: int | None = None) -> str:
    """The budget column: `300 s` or `38.6 M tokens`."""
    return f"{seconds or TIME_BUDGET:.12g} s" if tokens is None else f"{tokens / 1e6:.12g} M tokens"


EMPTY = dict(description="", gpu="", dataset="", budget=budget_name(), seed=SEED, tokens_M=0.0, test_bpb=None)
EMPTY |= dict(reason="", by="")


def parse_row(line: str, columns: tuple[str, ...] = COLUMNS) -> dict | None:
    """The row of a line; None if it is no row. A spreadsheet puts quotes around a field with a comma."""
    fields = (re.sub('^"(.*)"$', r"\1", field) for field in line.split("\t"))
    with suppress(ValueError):
        row = EMPTY | dict(zip(columns, map(clean, fields), strict=True))
        if columns == EIGHT:
            row |= parse_eight(row)
        row["seed"], row["test_bpb"] = int(row["seed"]), float(row["test_bpb"]) if row["test_bpb"] else None
        row |= {key: float(str(row[key]).replace(",", ".")) for key in ("val_bpb", "memory_gb", "tokens_M")}
        numbers = (value for value in row.values() if isinstance(value, float))
        if row["status"] in ("keep", "discard", "crash", "report") and all(map(math.isfinite, numbers)):
            return row


def parse_eight(row: dict) -> dict:
    """What a row of eight columns has inside its description, as `idea, seed 7, test 1.234567 [reason]`, and gpu, as
    `T4, 60 s, report`."""
    text, found = row["description"], {}
    if row["status"] == "crash" and text.endswith("]"):
        text, _, found["reason"] = text[:-1].rpartition("[")
    idea = r"(?P<description>.*?)(, seed (?P<seed>-?\d+))?(, test (?P<test_bpb>\d+\.\d{6}))? *"
    place = r"(?P<gpu>.*?)(, (?P<budget>[^,]* (s|tokens)))?(, (?P<status>report))?"
    for form, value in (idea, text), (place, row["gpu"]):
        found |= {key: part for key, part in re.fullmatch(form, value).groupdict().items() if part is not None}
    if found["description"].endswith(" (train.py differs)"):
        found["commit"] = row["commit"] + "+"
    return found


def format_row(row: dict) -> str:
    test = "" if row["test_bpb"] is None else f"{row['test_bpb']:.6f}"
    text = row | {"val_bpb": f"{row['val_bpb']:.6f}", "test_bpb": test}
    text |= {key: f"{row[key]:.1f}" for key in ("memory_gb", "tokens_M")}
    return "\t".join(clean(text[key]) for key in COLUMNS)


def seed(text: str) -> int:
    """A seed that PyTorch takes, for argparse. ValueError for others."""
    if -(2**63) <= int(text) < 2**64:
        return int(text)
    raise ValueError


def clean(field: str) -> str:
    """One line of printable text. Double quotes become single, as pandas would see a quoted field."""
    return "".join(c if c.isprintable() else " " for c in str(field)).replace('"', "'").strip()


def identity(row: dict) -> tuple:
    """What stays the same when somebody edits a row's status or text."""
    return tuple(row[key] for key in ("commit", "val_bpb", "gpu", "dataset", "budget", "seed"))


def crashed(row: dict) -> bool:
    """Whether a run crashed, which the status of a report's row does not tell."""
    return row["status"] == "crash" or bool(row["reason"])
