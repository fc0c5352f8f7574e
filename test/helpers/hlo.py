"""Counts in HLO text: bytes read from parameters, floating-point operations, collectives.

A graph is taken as it stands before the compiler. A parameter is read once in full if any use needs all of it; gathers
and slices read their result's bytes, each time, however often that is more than the parameter holds. Gathers and
scatters of intermediate arrays move their rows through memory and are counted apart. Dots count 2 * M * N * K.
Elementwise work is not counted: it is taken to be fused with what produces or consumes it.

`peak_live_bytes` is what intermediate arrays take at once. Modelled: a compiler orders and fuses anew.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from kernel_calls import CallCost, call_cost

from kimi_k2.plan.cost import Collective, GraphCounts

DTYPE_BYTES = {
    "pred": 1, "s4": 1, "u4": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "f8e4m3fn": 1, "f8e4m3": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8,
}  # fmt: skip

# Operations that hand their operand on: what they read, their consumer reads.
TRANSPARENT = frozenset({"reshape", "transpose", "bitcast", "convert", "copy", "bitcast-convert", "get-tuple-element"})
# Operands of what writes to a cache: which is written to, and with what. A prompt stands before what is left of it.
UPDATES = {"dynamic-update-slice": (0, 1), "scatter": (0, 2), "concatenate": (1, 0)}
COLLECTIVES = frozenset({"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"})

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$")
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(")
_TO_APPLY = re.compile(r"to_apply=%?([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_GROUPS = re.compile(r"replica_groups=\{(\{[^}]*\})")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]")


@dataclass(frozen=True)
class Shape:
    """Element type and dimensions of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.dims) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Instruction:
    """One instruction: result arrays (several for a tuple), opcode, operand names, and the text after the operands."""

    name: str
    op: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """The array shapes in a type, e.g. `(bf16[1,7168]{1,0}, f32[])`."""
    return tuple(
        Shape(match["dtype"], tuple(int(size) for size in match["dims"].split(",") if size))
        for match in _SHAPE.finditer(text)
    )


def entry_instructions(text: str) -> Iterator[Instruction]:
    """Instructions of the entry computation."""
    _, _, entry = text.partition("\nENTRY ")
    body, closed, _ = entry.partition("\n}")
    assert closed, text[:120]
    for line in body.splitlines()[1:]:
        match = _INSTRUCTION.match(line)
        assert match is not None, line
        inside, attributes = _split_operands(match["rest"])
        operands = (inside,) if match["op"] == "parameter" else tuple(_OPERAND.findall(inside))
        yield Instruction(match["name"], match["op"], parse_shapes(match["type"]), operands, attributes)


def reducers(text: str) -> dict[str, str]:
    """Opcode of the root of every computation, by its name: what `to_apply` does."""
    opcodes, current = {}, ""
    for line in text.splitlines():
        if line.endswith("{") and (match := _COMPUTATION.match(line)):
            current = match["name"]
        elif line.lstrip().startswith("ROOT") and (root := _INSTRUCTION.match(line)):
            opcodes[current] = root["op"]
    return opcodes


def _split_operands(rest: str) -> tuple[str, str]:
    depth = 1
    for position, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:position], rest[position + 1 :]
    raise AssertionError(f"unbalanced parentheses: {rest[:120]}")


def count(text: str, parameters: Mapping[int, str]) -> GraphCounts:
    """Count one HLO module.

    Custom calls of our NKI kernels read of their operands what the kernels' own DMA reads (`kernel_calls`); other
    custom calls all of them. What kernels read of intermediate arrays, and write, is moved. Collectives inside a kernel
    are counted with the others.

    Args:
        text: HLO text.
        parameters: names by parameter number; others are called `p<number>`.
    """
    instructions = {instruction.name: instruction for instruction in entry_instructions(text)}
    consumers: dict[str, list[Instruction]] = defaultdict(list)
    for instruction in instructions.values():
        for operand in instruction.operands:
            consumers[operand].append(instruction)
    combined = reducers(text)
    counts = GraphCounts()
    for instruction in instructions.values():
        if instruction.op == "parameter":
            number = int(instruction.operands[0])
            name = parameters.get(number, f"p{number}")
            counts.held[name] = sum(shape.nbytes for shape in instruction.shapes)
            whole, rows = _read(instruction, consumers, DTYPE_BYTES[instruction.shapes[0].dtype], instructions)
            counts.read[name] = rows + (counts.held[name] if whole else 0)
        elif instruction.op == "dot":
            counts.flops += _dot_flops(instruction, instructions)
        elif instruction.op == "scatter" or (
            # Of a parameter the rows are among what is read of it.
            instruction.op == "gather" and not is_parameter(instruction.operands[0], instructions)
        ):
            counts.moved[instruction.op] += _moved(instruction, instructions, combined)
        elif instruction.op == "custom-call" and (cost := kernel_cost(instruction, instructions)):
            moved = cost.written + sum(
                size
                for operand, size in zip(instruction.operands, cost.read, strict=True)
                if not is_parameter(operand, instructions)
            )
            counts.moved["kernels"] += moved
            counts.collectives.update(Collective(*collective) for collective in cost.collectives)
        elif instruction.op in COLLECTIVES:
            # A tuple may carry a scalar token behind the payload.
            payload = max((shape.nbytes for shape in instruction.shapes), default=0)
            counts.collectives[Collective(instruction.op, _group_size(instruction.attributes), payload)] += 1
    return counts


def stale_readers(text: str, caches: Mapping[str, tuple[int, int]]) -> list[str]:
    """What is not in order where a graph reads and writes caches, as `lowering.stale_readers` has it of FX graphs.

    A cache's output is one chain of updates of its own parameter, none of which is lost. Whoever reads it as it was
    before an update has the new entries by another way: they reach what is no cache, or a kernel that read made them.

    Args:
        text: HLO text.
        caches: numbers of the parameter and of the output, by name.
    """
    instructions = {instruction.name: instruction for instruction in entry_instructions(text)}
    outputs = list(instructions.values())[-1].operands
    users: dict[str, list[Instruction]] = defaultdict(list)
    for instruction in instructions.values():
        for operand in instruction.operands:
            users[operand].append(instruction)

    def behind(name: str, without: str) -> set[str]:
        """Instructions that need one, but by the one that is left out."""
        found, waiting = set[str](), [name]
        while waiting:
            for user in users[waiting.pop()]:
                if user.name not in found and user.name != without:
                    found.add(user.name)
                    waiting.append(user.name)
        return found

    views = TRANSPARENT | {"slice"}

    def source(name: str) -> Instruction:
        while instructions[name].op in views:
            name = instructions[name].operands[0]
        return instructions[name]

    of_caches, said = {output for _, output in caches.values()}, []
    others = {name for number, name in enumerate(outputs) if number not in of_caches}
    for cache, (number, output) in caches.items():
        chain = [source(outputs[output])]
        while chain[-1].op in UPDATES:
            chain.append(source(chain[-1].operands[UPDATES[chain[-1].op][0]]))
        if chain[-1].op != "parameter" or chain[-1].operands[0] != str(number):
            said.append(f"{cache}: what is given back is no update of it")
        versions = {link.name for link in chain}
        for instruction in instructions.values():
            if instruction.op in views or instruction.op in ("parameter", "tuple") or instruction in chain:
                continue
            read = [index for index, name in enumerate(instruction.operands) if source(name).name in versions]
            if not read:
                continue
            if instruction.op in ("dynamic-update-slice", "scatter") and read[0] == 0:
                said.append(f"{cache}: {instruction.name} is lost")
            at = chain.index(source(instruction.operands[read[0]]))
            for update in chain[:at]:
                written = source(update.operands[UPDATES[update.op][1]])
                # A kernel that reads the cache makes the entries itself.
                if written.name not in behind(instruction.name, "") | {instruction.name} and not others & behind(
                    written.name, update.name
                ):
                    said.append(f"{cache}: {instruction.name} reads what was there before {update.name}")
    return said


def kernel_cost(instruction: Instruction, instructions: Mapping[str, Instruction]) -> CallCost | None:
    """What a custom call moves, if it is a kernel of ours."""
    shapes = (instructions[operand].shapes[0] for operand in instruction.operands)
    return call_cost(instruction.attributes, tuple((shape.dtype, shape.dims) for shape in shapes))


def _read(
    instruction: Instruction,
    consumers: Mapping[str, list[Instruction]],
    item: int,
    instructions: Mapping[str, Instruction],
) -> tuple[bool, int]:
    """Whether some use needs all of a parameter, and the bytes that gathers, slices and kernels read of it."""
    whole, rows = False, 0
    for consumer in consumers[instruction.name]:
        if consumer.op in ("gather", "dynamic-slice", "slice") and consumer.operands[0] == instruction.name:
            rows += prod(consumer.shapes[0].dims) * item
        elif consumer.op in ("dynamic-update-slice", "scatter") and consumer.operands[0] == instruction.name:
            continue  # written in place through the alias
        elif consumer.op == "custom-call" and (cost := kernel_cost(consumer, instructions)):
            rows += sum(
                size for name, size in zip(consumer.operands, cost.read, strict=True) if name == instruction.name
            )
        elif consumer.op in TRANSPARENT:
            inner, more = _read(consumer, consumers, item, instructions)
            whole, rows = whole or inner, rows + more
        elif consumer.op != "tuple":
            whole = True
    return whole, rows


def is_parameter(name: str, instructions: Mapping[str, Instruction]) -> bool:
    """Whether an array is a parameter, or a view of one."""
    source = instructions.get(name)
    while source is not None and source.op in TRANSPARENT:
        source = instructions.get(source.operands[0])
    return source is not None and source.op == "parameter"


def _moved(instruction: Instruction, instructions: Mapping[str, Instruction], combined: Mapping[str, str]) -> int:
    """Bytes of a gather's rows, or of a scatter's: updates read, rows written, and read first if they are added to."""
    if instruction.op == "gather":
        return instruction.shapes[0].nbytes
    updates = instructions[instruction.operands[2]].shapes[0].nbytes
    match = _TO_APPLY.search(instruction.attributes)
    return updates * (3 if match and combined.get(match[1]) == "add" else 2)


def _dot_flops(instruction: Instruction, instructions: Mapping[str, Instruction]) -> int:
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    lhs = instructions[instruction.operands[0]].shapes[0].dims
    contracted = [int(dim) for dim in match[1].split(",") if dim] if match else []
    return 2 * prod(instruction.shapes[0].dims) * prod(lhs[dim] for dim in contracted)


def _group_size(attributes: str) -> int:
    if match := _GROUPS.search(attributes):
        return len(match[1].strip("{}").split(","))
    if match := _COUNTED.search(attributes):
        return int(match[2])
    return 1


# Results that are views of an operand, or so cheap that no compiler stores them.
VIEWS = frozenset({"reshape", "bitcast", "bitcast-convert", "get-tuple-element", "tuple", "broadcast"})
FREE = VIEWS | {"parameter", "constant", "iota"}


def peak_live_bytes(text: str) -> int:
    """Bytes of all intermediate arrays alive at once, at most, in the order in which the instructions stand, unfused.

    An array lives from the instruction that makes it to the last one that reads it or a view of it. Parameters are not
    counted, nor is what only leaves the graph: that is the cache, which NxDI updates in place, and a few logits.
    """
    instructions = list(entry_instructions(text))
    last = _last_uses(instructions)
    users: dict[str, set[str]] = defaultdict(set)
    for instruction in instructions:
        for operand in instruction.operands:
            users[operand].add(instruction.op)
    ends: dict[int, int] = defaultdict(int)
    live = peak = 0
    for index, instruction in enumerate(instructions):
        if instruction.op not in FREE and users[instruction.name] != {"tuple"}:
            nbytes = sum(shape.nbytes for shape in instruction.shapes)
            live += nbytes
            ends[last[instruction.name]] += nbytes
            peak = max(peak, live)
        live -= ends[index]
    return peak


def _last_uses(instructions: list[Instruction]) -> dict[str, int]:
    """Place of the last instruction that needs each result."""
    last: dict[str, int] = {}
    for index in reversed(range(len(instructions))):
        instruction = instructions[index]
        until = last.get(instruction.name, index) if instruction.op in VIEWS else index
        last.setdefault(instruction.name, index)
        for operand in instruction.operands:
            last[operand] = max(last.get(operand, 0), until)
    return last


def summary(counts: GraphCounts) -> dict[str, Any]:
    """Counts of a graph as JSON types."""
    return {
        "weight_bytes_held": sum(counts.held.values()),
        "weight_bytes_read": counts.bytes_read(),
        "bytes_moved": sum(counts.moved.values()),
        "routed_expert_bytes_read": counts.bytes_read(r"\.mlp\.experts\."),
        "flops": counts.flops,
        "collectives": [
            {"kind": collective.kind, "ranks": collective.ranks, "bytes": collective.nbytes, "times": times}
            for collective, times in sorted(counts.collectives.items(), key=lambda item: str(item))
        ],
    }
