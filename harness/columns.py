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
    """The values that a row of eight columns has inside its description and gpu."""
    text, found = row["description"], {}
    if row["status"] == "crash" and text.endswith("]"):
        text, _, found["reason"] = text[:-1].rpartition("[")
    for key, mark, kind, form in (("test_bpb", ", test ", float, ".6f"), ("seed", ", seed ", int, "d")):
        subject, _, value = text.rstrip().rpartition(mark)
        with suppress(ValueError):
            if format(kind(value), form) == value:
                found[key], text = value, subject
    gpu, *others = row["gpu"].split(", ")
    for other in others:
        if other == "report":
            found["status"] = other
        elif other.endswith((" s", " tokens")):
            found["budget"] = other
        else:
            gpu += f", {other}"
    uncommitted = "+" if text.endswith(" (train.py differs)") else ""
    return found | dict(commit=row["commit"] + uncommitted, description=text.rstrip(), gpu=gpu)


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
