"""Counts in HLO text: bytes read from parameters, floating-point operations, collectives.

A graph is taken as it stands before the compiler: every parameter is read once in full unless all its uses are gathers
or dynamic slices, of which only the result's bytes are read; dots count 2 * M * N * K; elementwise work is not counted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

DTYPE_BYTES = {
    "pred": 1, "s4": 1, "u4": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "f8e4m3fn": 1, "f8e4m3": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8,
}  # fmt: skip

# Operations that hand their operand on: what they read, their consumer reads.
TRANSPARENT = frozenset({"reshape", "transpose", "bitcast", "convert", "copy", "bitcast-convert", "get-tuple-element"})
COLLECTIVES = frozenset({"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"})

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$")
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_GROUPS = re.compile(r"replica_groups=\{(\{[^}]*\})")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]")


class HloParseError(ValueError):
    """The text is no HLO module, or uses an element type this module does not know."""


@dataclass(frozen=True)
class Shape:
    """Element type and dimensions of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes.

        Raises:
            HloParseError: unknown element type.
        """
        if self.dtype not in DTYPE_BYTES:
            raise HloParseError(f"unknown element type {self.dtype}")
        return prod(self.dims) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Instruction:
    """One instruction: result arrays (several for a tuple), opcode, operand names, and the text after the operands."""

    name: str
    op: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind, group size and payload.

    Attributes:
        nbytes: bytes of one result a rank.
    """

    kind: str
    ranks: int
    nbytes: int


@dataclass
class GraphCounts:
    """What one execution of the graph costs a rank.

    Attributes:
        read: bytes read by parameter name.
        held: bytes of the parameters, by name.
        flops: of dots and convolutions.
        collectives: how often each occurs.
    """

    read: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    collectives: dict[Collective, int] = field(default_factory=dict)

    def bytes_read(self, pattern: str = "") -> int:
        """Bytes read from parameters whose name `pattern` (a regular expression) is found in."""
        return sum(count for name, count in self.read.items() if re.search(pattern, name))

    def bytes_held(self, pattern: str = "") -> int:
        """Bytes of parameters whose name matches."""
        return sum(count for name, count in self.held.items() if re.search(pattern, name))

    @property
    def collective_bytes(self) -> int:
        """Result bytes of all collectives a rank."""
        return sum(one.nbytes * count for one, count in self.collectives.items())


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """The array shapes in a type, e.g. `(bf16[1,7168]{1,0}, f32[])`."""
    return tuple(
        Shape(match["dtype"], tuple(int(size) for size in match["dims"].split(",") if size))
        for match in _SHAPE.finditer(text)
    )


def entry_instructions(text: str) -> Iterator[Instruction]:
    """Instructions of the entry computation.

    Raises:
        HloParseError: there is no entry computation.
    """
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("ENTRY"):
            break
    else:
        raise HloParseError("no ENTRY computation in the text")
    for line in lines:
        if line.startswith("}"):
            return
        match = _INSTRUCTION.match(line)
        if match is None:
            raise HloParseError(f"cannot read instruction: {line.strip()[:120]}")
        inside, attributes = _split_operands(match["rest"])
        operands = (inside,) if match["op"] == "parameter" else tuple(_OPERAND.findall(inside))
        yield Instruction(match["name"], match["op"], parse_shapes(match["type"]), operands, attributes)


def _split_operands(rest: str) -> tuple[str, str]:
    depth = 1
    for position, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:position], rest[position + 1 :]
    raise HloParseError(f"unbalanced parentheses: {rest[:120]}")


def count(text: str, parameters: Mapping[int, str] | None = None) -> GraphCounts:
    """Count one HLO module.

    Args:
        text: HLO text.
        parameters: names by parameter number; others are called `p<number>`.

    Raises:
        HloParseError: the text cannot be read.
    """
    instructions = {one.name: one for one in entry_instructions(text)}
    consumers: dict[str, list[Instruction]] = defaultdict(list)
    for one in instructions.values():
        for operand in one.operands:
            consumers[operand].append(one)
    counts = GraphCounts()
    for one in instructions.values():
        if one.op == "parameter":
            number = int(one.operands[0])
            name = (parameters or {}).get(number, f"p{number}")
            size = sum(shape.nbytes for shape in one.shapes)
            counts.held[name] = size
            counts.read[name] = min(size, _read(one, consumers, size, DTYPE_BYTES[one.shapes[0].dtype]))
        elif one.op == "dot":
            counts.flops += _dot_flops(one, instructions)
        elif one.op in COLLECTIVES:
            # A tuple may carry a scalar token behind the payload.
            payload = max((shape.nbytes for shape in one.shapes), default=0)
            key = Collective(one.op, _group_size(one.attributes), payload)
            counts.collectives[key] = counts.collectives.get(key, 0) + 1
    return counts


def _read(one: Instruction, consumers: Mapping[str, list[Instruction]], full: int, item: int) -> int:
    total = 0
    for consumer in consumers[one.name]:
        if consumer.op in ("gather", "dynamic-slice"):
            if consumer.operands[0] == one.name:
                total += prod(consumer.shapes[0].dims) * item
            else:
                total += full  # it is the index
        elif consumer.op in ("dynamic-update-slice", "scatter") and consumer.operands[0] == one.name:
            continue  # written in place through the alias
        elif consumer.op in TRANSPARENT:
            total += _read(consumer, consumers, full, item)
        elif consumer.op == "slice":
            total += prod(consumer.shapes[0].dims) * item
        elif consumer.op == "tuple":
            continue
        else:
            return full
    return total


def _dot_flops(one: Instruction, instructions: Mapping[str, Instruction]) -> int:
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
    lhs = instructions[one.operands[0]].shapes[0].dims
    contracted = [int(dim) for dim in match[1].split(",") if dim] if match else []
    return 2 * prod(one.shapes[0].dims) * prod(lhs[dim] for dim in contracted)


def _group_size(attributes: str) -> int:
    if match := _GROUPS.search(attributes):
        return len(match[1].strip("{}").split(","))
    if match := _COUNTED.search(attributes):
        return int(match[2])
    return 1
