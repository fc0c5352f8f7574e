"""From one unit of stored tensors to tensors of the output: a module's still uncut, an expert's by rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import EXPERT
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError
from kimi_k2.quantization.config import Fp8BlockQuantization
from kimi_k2.quantization.fp8_block import dequantize_fp8_block, quantize_fp8_block
from kimi_k2.quantization.fp8_channel import (
    dequantize_fp8_channel,
    quantize_fp8_channel,
    requantize_fp8_channel,
)
from kimi_k2.quantization.neuron_e4m3 import halve_blocks, halve_codes
from kimi_k2.quantization.stored import dequantize_stored
from kimi_k2.sharding.errors import ConversionError, compare, halving_error
from kimi_k2.sharding.layout import Layout, expert_block
from kimi_k2.sharding.planned import PlannedTensor

Stored = dict[str, Tensor]
_ROWS = 32
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Part(NamedTuple):
    """A whole tensor of the output; or of one expert, by rank: `PlannedTensor.expert_shape`."""

    name: str
    expert: int | None
    tensor: Tensor


@dataclass(frozen=True)
class Unit:
    """Modules that are converted together, and the expert they belong to."""

    modules: tuple[str, ...]
    expert: int | None = None


def units(modules: Iterable[str], layout: Layout) -> Iterator[Unit]:
    """Group modules: an expert's three projections; the two down projections of the attention for neuron. Experts
    come last and in order, so that the parts of a stacked tensor are written front to back."""
    experts: dict[int, list[str]] = {}
    joined: list[str] = []
    for module in modules:
        if match := EXPERT.match(f"{module}.weight"):
            experts.setdefault(int(match["expert"]), []).append(module)
        elif layout.target == "neuron" and module.endswith(("q_a_proj", "kv_a_proj_with_mqa")):
            joined.append(module)
        else:
            yield Unit((module,))
    if joined:
        yield Unit(tuple(sorted(joined, reverse=True)))  # q_a_proj first
    for expert in sorted(experts):
        root = experts[expert][0].rpartition(".")[0]
        yield Unit(tuple(f"{root}.{name}" for name in PROJECTIONS), expert)


class Converter:
    """Converts units; safe to call from several threads.

    Args:
        planned: the output's tensors by name, at least those that experts make.
        report: measure the error of every expert.
    """

    def __init__(
        self, config: KimiK2Config, layout: Layout, planned: Mapping[str, PlannedTensor], *, report: bool = True
    ) -> None:
        self.config, self.layout, self.planned, self.report = config, layout, planned, report
        self.block = expert_block(config, layout)

    def convert(self, unit: Unit, stored: dict[str, Stored]) -> tuple[list[Part], ConversionError]:
        """Output tensors of a unit from its modules' stored tensors by suffix, and the error of what was requantized.

        NaN stays NaN: whether there may be any is the reader's to say.

        Raises:
            CheckpointError: stored tensors of a module contradict each other.
        """
        error = ConversionError()
        try:
            if unit.expert is not None:
                return self._expert(unit, stored, error), error
            if self.layout.target == "cuda":
                return self._cuda(unit.modules[0], stored[unit.modules[0]]), error
            return self._neuron(unit, stored), error
        except ValueError as reason:
            raise CheckpointError(str(reason), tensor=unit.modules[0]) from reason

    def _float(self, stored: Stored) -> Tensor:
        return dequantize_stored(stored, self.config.quantization, self.layout.dtype)

    def _neuron(self, unit: Unit, stored: dict[str, Stored]) -> list[Part]:
        module = unit.modules[0]
        name = module.removeprefix("model.")
        if len(unit.modules) == 2:
            whole = torch.cat([self._float(stored[one]) for one in unit.modules])
            return [Part(name.replace("q_a_proj", "qkv_a_proj") + ".weight", None, whole)]
        if name.endswith(".mlp.gate"):
            router = name.removesuffix("gate") + "router"
            bias = stored[module]["e_score_correction_bias"].to(torch.float32)
            return [
                Part(f"{router}.linear_router.weight", None, stored[module]["weight"].to(self.layout.dtype)),
                Part(f"{router}.e_score_correction_bias", None, bias),
            ]
        return [Part(f"{name}.weight", None, self._float(stored[module]))]

    def _cuda(self, module: str, stored: Stored) -> list[Part]:
        if self.layout.experts == "bf16" and len(stored) > 1 and "e_score_correction_bias" not in stored:
            return [Part(f"{module}.weight", None, self._float(stored))]
        kept = {suffix: tensor for suffix, tensor in stored.items() if suffix != "weight_shape"}
        quantized = len(kept) > 1 and "e_score_correction_bias" not in kept
        return [
            Part(f"{module}.{suffix}", None, tensor.to(_kept_dtype(tensor, suffix, quantized, self.layout.dtype)))
            for suffix, tensor in kept.items()
        ]

    def _expert(self, unit: Unit, stored: dict[str, Stored], error: ConversionError) -> list[Part]:
        gate, up, down = (self._matrix(stored[module], error) for module in unit.modules)
        neuron = self.layout.target == "neuron"
        if neuron:
            moe = unit.modules[0].removeprefix("model.").rpartition(".experts.")[0]
            root = f"{moe}.expert_mlps.mlp_op"
        else:
            root = unit.modules[0].rpartition(".experts.")[0] + ".experts"

        def part(projection: str, suffix: str, *matrices: Tensor) -> Part:
            # The plain model's buffers are named without `.weight`.
            name = f"{root}.{projection}" + (f".{suffix}" if neuron else suffix.removeprefix("weight"))
            tensor = self.planned[name]
            if not neuron:
                made = tensor.by_rank(torch.cat(matrices) if matrices[1:] else matrices[0])
            elif tensor.dim == 2:
                made = input_first(*matrices, parts=tensor.parts)
            else:
                made = tensor.by_rank(input_first(*matrices)[0])
            return Part(name, unit.expert, made)

        # Each on its own: down_proj may be stored in another format than gate_proj and up_proj.
        first = [part("gate_up_proj", suffix, gate[suffix], up[suffix]) for suffix in gate]
        return first + [part("down_proj", suffix, down[suffix]) for suffix in down]

    def _matrix(self, stored: Stored, error: ConversionError) -> Stored:
        """One expert's matrix in the output format, by suffix, output dimension first."""
        layout, quantization = self.layout, self.config.quantization
        if layout.experts == "stored":
            return {suffix: tensor for suffix, tensor in stored.items() if suffix != "weight_shape"}
        if layout.experts == "per_channel":
            codes, scale = self._per_channel(stored, error)
            return {"weight": codes, "scale": scale}
        if layout.experts == "blockwise":
            codes, scale = self._blockwise(stored, error)
            return {"weight": codes, "scale": scale}
        return {"weight": dequantize_stored(stored, quantization, layout.dtype)}

    def _per_channel(self, stored: Stored, error: ConversionError) -> tuple[Tensor, Tensor]:
        def observe(plain: Tensor, codes: Tensor, scale: Tensor) -> None:
            error.add(compare(plain, dequantize_fp8_channel(codes, scale)))

        quantization, observer = self.config.quantization, observe if self.report else None
        if "weight_scale_inv" in stored:
            assert isinstance(quantization, Fp8BlockQuantization)
            block = quantization.weight_block_size
            return requantize_fp8_channel(stored["weight"], stored["weight_scale_inv"], block, observer)
        return quantize_fp8_channel(dequantize_stored(stored, quantization, torch.float32), observer)

    def _blockwise(self, stored: Stored, error: ConversionError) -> tuple[Tensor, Tensor]:
        quantization = self.config.quantization
        square = (self.block, self.block)
        if "weight_scale_inv" in stored:
            assert isinstance(quantization, Fp8BlockQuantization)
            weight, scale = stored["weight"], stored["weight_scale_inv"]
            if self.report:
                error.add(halving_error(weight, scale.to(torch.float32), quantization.weight_block_size))
            return halve_blocks(weight, scale, quantization.weight_block_size, self.block, allow_nan=True)
        plain = dequantize_stored(stored, quantization, torch.float32)
        weight, scale = quantize_fp8_block(plain, square)
        halved, doubled = halve_codes(weight, allow_nan=True), scale * 2.0
        if self.report:
            error.add(compare(plain, dequantize_fp8_block(halved, doubled, square)))
        return halved, doubled


def input_first(*matrices: Tensor, parts: int = 1) -> Tensor:
    """[N, K] matrices of one shape to [parts, K, columns]: of each matrix a part's columns, side by side."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[matrices[0].dtype.itemsize]
    rows, columns = matrices[0].shape
    width = rows // parts
    out = torch.empty(parts, columns, width * len(matrices), dtype=matrices[0].dtype)
    target = out.view(bits).numpy()
    for place, matrix in enumerate(matrices):
        source = matrix.view(bits).numpy().reshape(parts, width, columns)
        # A few rows at a time, so that each cache line is read and written once; torch walks the whole matrix.
        for first in range(0, width, _ROWS):
            some = source[:, first : first + _ROWS]
            column = place * width + first
            target[:, :, column : column + some.shape[1]] = some.transpose(0, 2, 1)
    return out


def _kept_dtype(tensor: Tensor, suffix: str, quantized: bool, dtype: torch.dtype) -> torch.dtype:
    """Stored dtypes stay for quantized weights, scales and the router's bias; other floats become `dtype`."""
    if suffix == "weight_scale_inv" or suffix == "e_score_correction_bias":
        return torch.float32
    return tensor.dtype if quantized else dtype
