"""A lowered graph cut at its collectives: one rank of many is executed at a time, and the sums are made by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import executed
import jax
import numpy as np
import torch
from jax._src.lib import xla_client

_COLLECTIVE = re.compile(r"^\s*(%[\w.-]+) = (.+?) (all-reduce|all-gather)\(([^)]*)\)(.*)$")
TYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "s64": torch.int64}


@dataclass(frozen=True)
class Cut:
    """One collective: its kind, its first operand's name, the parameter in its place, and its result's type."""

    kind: str
    operand: str
    parameter: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class CutProgram:
    """A graph whose collectives' results are parameters and whose collectives' operands are outputs.

    Of the operands only that of collective number `phase` is an output: what it does not need is not computed.
    """

    def __init__(self, graph: Any, phase: int) -> None:
        self.graph = graph
        options = xla_client._xla.HloPrintOptions()
        options.print_large_constants = True
        options.print_operand_shape = False
        options.print_metadata = False
        text = xla_client.XlaComputation(graph.proto).get_hlo_module().to_string(options)
        self.cuts: list[Cut] = []
        head, entry = text[: text.index("\nENTRY ")], text[text.index("\nENTRY ") + 1 :]
        head = "HloModule cut\n" + head.partition("\n")[2]
        lines = entry.splitlines()
        types, body = {}, []
        number = len(graph.parameters) + len(graph.constants)
        for line in lines[1:]:
            if match := re.match(r"^\s*(?:ROOT )?(%?[\w.-]+) = (.+?) [\w-]+\(", line):
                types[match[1]] = match[2]
            if found := _COLLECTIVE.match(line):
                name, kind_type, kind, operands, _ = found.groups()
                first, *rest = [one.strip() for one in operands.split(",")]
                element = re.findall(r"\w+\[[\d,]*\](?:\{[\d,]*\})?", kind_type)[0]
                letters, sizes = re.match(r"(\w+)\[([\d,]*)\]", element).groups()  # type: ignore[union-attr]
                shape = tuple(int(size) for size in sizes.split(",") if size)
                self.cuts.append(Cut(kind, first, number, TYPES[letters], shape))
                body.append(f"  %fed.{number} = {element} parameter({number})")
                if rest:
                    body.append(f"  {name} = {kind_type} tuple(%fed.{number}, {rest[0]})")
                else:
                    body.append(f"  {name} = {kind_type} copy(%fed.{number})")
                number += 1
            elif line.strip().startswith("ROOT"):
                body.append(line.replace("ROOT ", ""))
            elif line.strip() != "}":
                body.append(line)
        output = self.cuts[phase].operand
        body.append(f"  ROOT %cut.out = ({types[output]}) tuple({output})")
        module = xla_client._xla.hlo_module_from_text("\n".join([head, "ENTRY %cut {", *body, "}"]))
        computation = xla_client.XlaComputation(module.as_serialized_hlo_module_proto())
        mlir = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
        device = jax.devices()[0]
        self.executable = device.client.compile_and_load(
            mlir, xla_client.DeviceList((device,)), xla_client.CompileOptions()
        )

    def __call__(self, parts: dict[str, Any], fed: list[torch.Tensor]) -> torch.Tensor:
        """Run one rank and give its operand.

        Args:
            parts: each named parameter, a tensor or what `place` made of one.
            fed: the collectives' results; those that are not known yet may hold anything.
        """
        names, constants = self.graph.parameters, self.graph.constants
        count = len(names) + len(constants)
        arguments = [parts[names[number]] if number in names else constants[number] for number in range(count)]
        held = [place(value) if isinstance(value, torch.Tensor) else value for value in [*arguments, *fed]]
        return executed.to_torch(self.executable.execute_sharded(held).disassemble_into_single_device_arrays()[0][0])


def place(tensor: torch.Tensor) -> Any:
    """The tensor on the device."""
    return jax.device_put(np.ascontiguousarray(executed.to_numpy(tensor)))
