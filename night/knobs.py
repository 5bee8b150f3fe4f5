"""The numbers of a train.py that a tuner may move: what they are, their ranges, and edits of them."""

import ast
import math
import re
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from night.proposals import parse
from prepare import PrepareError

SIZES = ("depth", "n_embd", "window", "total_batch_size")  # fields of Config to search unless --knobs names others;
# with --tokens none, as they change what a token costs
RATES = "(?i)LR|RATE|DECAY|SCALE|EPS"  # a constant below 1 is a fraction of something unless its name has one of these


class Knob(NamedTuple):
    """A positive number in train.py, and where to search: in [low, high] or, for some integers, among `choices`."""

    name: str
    value: float
    text: str
    place: tuple[int, int, int]  # line, counted from 0; first byte, and the one after the last
    low: float
    high: float
    log: bool  # whether to search on a log scale; not for fractions
    choices: tuple[int, ...]

    def fit(self, x: float) -> float:
        """The allowed value nearest to x: one of the choices, or x to three digits within [low, high]."""
        if x == self.value:
            return x
        if self.choices:
            return min(self.choices, key=lambda n: abs(n - x))
        return type(self.value)(min(self.high, max(self.low, float(f"{x:.3g}"))))

    def literal(self, value: float) -> str:
        """value in the notation of `text`: 2**17, 200_000."""
        if "**" in self.text and math.log2(value).is_integer():
            return f"2**{int(math.log2(value))}"
        return f"{value:_}" if "_" in self.text else repr(value)

    def __str__(self) -> str:
        where = ", ".join(map(str, self.choices)) or f"{self.low:g} to {self.high:g}{', log scale' * self.log}"
        return f"{self.name:24} {self.text:12} {where}"


def read_knobs(
    source: bytes, live: int | None, names: Collection[str] = (), searched: Collection[str] = SIZES
) -> list[Knob]:
    """The top-level constants of a train.py, and those in `searched` of its SIZES[live]; or only `names`.

    Raises PrepareError for unknown names, without any knob, and if the file does not parse."""
    nodes, fields, rows, size, sizes = {}, {}, {}, None, {}
    if not (tree := parse(source)):
        raise PrepareError("train.py is no valid Python: run it to see where")
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name("SIZES")], ast.Tuple(elements)):
                rows = dict(enumerate(elements))
            case ast.Assign([ast.Name("SIZE")], ast.Call() as size):  # replaces all rows
                pass
            case ast.Assign([ast.Name(name)], value):
                nodes[name] = None if name in nodes else value  # assigned twice: no single number to edit
            case ast.ClassDef(name):
                fields[name] = {item.target.id: item.value for item in node.body if isinstance(item, ast.AnnAssign)}
    match (None, size) if size else getattr(rows.get(live), "elts", None):
        case [_, ast.Call(ast.Name(name), args, keywords)]:
            defaults = fields.get(name, {})
            sizes = defaults | dict(zip(defaults, args, strict=False))
            sizes |= {word.arg: word.value for word in keywords}
    lines, values = source.splitlines(), {name: number(node) for name, node in sizes.items() if node}
    named = {name: node for name, node in (nodes | sizes).items() if node}
    found = {name: knob for name, node in named.items() if (knob := make_knob(name, lines, node, values))}
    wanted = names or [name for name in found if name in searched or name not in sizes]
    if missing := [name for name in names if name not in found]:
        raise PrepareError(f"no knob {', '.join(missing)} in train.py: use some of {', '.join(found)}")
    if not (knobs := [knob for name, knob in found.items() if name in wanted]):
        raise PrepareError("train.py has no knob: set a constant to a positive number on a line of its own, LR = 0.04")
    return knobs


def number(node: ast.expr) -> float | None:
    """The value of a number or of arithmetic on numbers, such as 2**17; None for anything else."""
    if all(isinstance(part, (ast.Constant, ast.BinOp, ast.operator)) for part in ast.walk(node)):
        with suppress(ArithmeticError, TypeError, ValueError):
            value = eval(ast.unparse(node))
            return value if type(value) in (int, float) else None


def make_knob(name: str, lines: list[bytes], node: ast.expr, sizes: dict[str, float | None]) -> Knob | None:
    """A knob, or None unless it is a positive number on one line."""
    value, line = number(node), lines[node.lineno - 1]
    if not value or not 1e-99 < value < 1e99 or node.lineno != node.end_lineno:
        return None
    choices = neighbours(name, value, sizes) if isinstance(value, int) else ()
    fraction = value < 1 and not re.search(RATES, name)
    room = 0.75 * min(value, 1 - value)
    low, high = (value - room, value + room) if fraction else (value / 2, value * 2)
    if choices:
        low, high = min(choices), max(choices)
    first, end = node.col_offset, node.end_col_offset
    text = line[first:end].decode()
    return Knob(name, value, text, (node.lineno - 1, first, end), low, high, not fraction, tuple(choices))


def neighbours(name: str, value: int, sizes: dict[str, float | None]) -> list[int]:
    """The values to try for an integer below 16, a power of two, or a size, which must fit the others; else []."""

    def other(field: str) -> int:
        return sizes.get(field) or 1

    if name == "n_embd":
        unit = other("head_dim")
        return [unit * heads for heads in range(max(1, value // unit - 2), value // unit + 3)]
    if value < 16:
        return list(range(max(1, value - 2), value + 3))
    around = [value // 4, value // 2, value, value * 2, value * 4] if value & (value - 1) == 0 else []
    if name == "total_batch_size":
        return [n for n in around if n % (other("device_batch_size") * other("seq_len")) == 0 or n == value]
    return around


def edit(source: bytes, values: dict[Knob, float]) -> bytes:
    """train.py with other numbers. Keeps aligned columns aligned."""
    lines = source.splitlines(keepends=True)
    for knob in sorted(values, key=lambda knob: knob.place, reverse=True):
        line, start, end = knob.place
        text, rest = knob.literal(values[knob]).encode(), lines[line][end:]
        longer = len(text) - (end - start)
        rest = re.sub(rb" {2,}", lambda gap: b" " * max(2, len(gap[0]) - longer), rest, count=1)  # noqa: B023
        lines[line] = lines[line][:start] + text + rest
    return b"".join(lines)


def nudged(source: bytes, factor: float) -> bytes:
    """train.py with its constants times a factor close to 1, but for integers, fractions and sizes: too little to
    matter, enough for other luck. Unchanged if it has none, or cannot be read."""
    with suppress(PrepareError):
        knobs = [knob for knob in read_knobs(source, None) if knob.log and isinstance(knob.value, float)]
        return edit(source, {knob: float(f"{knob.value * factor:.6g}") for knob in knobs})
    return source
