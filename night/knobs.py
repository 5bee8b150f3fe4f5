"""The numbers of a train.py that a tuner may move: what they are, their ranges, and edits of them."""

import ast
import math
import re
from collections.abc import Collection
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

from night.proposals import parse
from prepare import PrepareError

RATES = "LR|RATE|DECAY|SCALE|EPS"  # a constant below 1 is a fraction of something unless its name has one of these


class Knob(NamedTuple):
    """A positive number in train.py, and where to search: in [low, high]."""

    name: str
    value: float
    text: str
    place: tuple[int, int]  # in train.py: its first byte, and the one after its last
    low: float
    high: float
    log: bool  # whether to search on a log scale; not for fractions

    def fit(self, x: float) -> float:
        """x to three digits; an integer as an integer, 2**17 as a power of two."""
        if x == self.value:
            return x
        if "**" in self.text:
            return 2 ** round(math.log2(x))
        x = min(self.high, max(self.low, float(f"{x:.3g}")))
        return x if isinstance(self.value, float) else round(x)

    def literal(self, value: float) -> str:
        """value in the notation of `text`: 2**17, 200_000."""
        if "**" in self.text:
            return f"2**{int(math.log2(value))}"
        return f"{value:_}" if "_" in self.text else repr(value)


def read_knobs(source: bytes, names: Collection[str] = ()) -> list[Knob]:
    """The top-level constants of a train.py that are positive numbers, or only `names`.

    Raises PrepareError for unknown names, without any knob, and if the file does not parse."""
    if not (tree := parse(source)):
        raise PrepareError("train.py is no valid Python: run it to see where")
    nodes = {}
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], value):
                nodes[name] = None if name in nodes else value  # assigned twice: no single number to edit
    lines, found = [0, *accumulate(map(len, source.splitlines(keepends=True)))], {}
    for name, node in nodes.items():
        value = number(node) if node else None
        if value and 1e-99 < value < 1e99 and node.lineno == node.end_lineno:
            fraction = value < 1 and not re.search(RATES, name)
            room = 0.75 * min(value, 1 - value)
            low, high = (value - room, value + room) if fraction else (value / 2, value * 2)
            first, end = (lines[node.lineno - 1] + offset for offset in (node.col_offset, node.end_col_offset))
            found[name] = Knob(name, value, source[first:end].decode(), (first, end), low, high, not fraction)
    if missing := [name for name in names if name not in found]:
        raise PrepareError(f"no knob {', '.join(missing)} in train.py: use some of {', '.join(found)}")
    if not found:
        raise PrepareError("train.py has no knob: set a constant to a positive number on a line of its own, LR = 0.04")
    return [knob for name, knob in found.items() if name in (names or found)]


def number(node: ast.expr) -> float | None:
    """The value of a number or of arithmetic on numbers, such as 2**17; None for anything else."""
    if all(isinstance(part, (ast.Constant, ast.BinOp, ast.operator)) for part in ast.walk(node)):
        with suppress(ArithmeticError, TypeError, ValueError):
            value = eval(ast.unparse(node))
            return value if type(value) in (int, float) else None


def edit(source: bytes, values: dict[Knob, float]) -> bytes:
    """train.py with other numbers."""
    for knob in sorted(values, key=lambda knob: knob.place, reverse=True):
        first, end = knob.place
        source = source[:first] + knob.literal(values[knob]).encode() + source[end:]
    return source


def nudged(source: bytes, factor: float) -> bytes:
    """train.py with its constants times a factor close to 1, but for integers and fractions: too little to matter,
    enough for other luck. Unchanged if it has none, or cannot be read."""
    with suppress(PrepareError):
        knobs = [knob for knob in read_knobs(source) if knob.log and isinstance(knob.value, float)]
        return edit(source, {knob: float(f"{knob.value * factor:.6g}") for knob in knobs})
    return source
