"""From one unit of stored tensors to tensors of the output: a module's still uncut, an expert's by rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import EXPERT, LAYER
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError
from kimi_k2.quantization.stored import Stored, StoredFormat, format_of
from kimi_k2.sharding import attention_tiles, early_qkv_a
from kimi_k2.sharding.early_router import HEADS, RESIDUAL, fold
from kimi_k2.sharding.experts.format import ConversionError, ExpertFormat, Matrix, expert_formats, input_first
from kimi_k2.sharding.layout import GLOBAL_LAYER, Layout, PlannedTensor

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# What the early router's weights are made of.
_FOLDED = ("mlp.gate", "post_attention_layernorm", "self_attn.o_proj")


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


def modules_by_layer(names: Iterable[str]) -> dict[int, dict[str, list[str]]]:
    """Stored names by decoder layer (or GLOBAL_LAYER) and module, in their order."""
    layers: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        match = LAYER.match(name)
        layers[int(match[1]) if match else GLOBAL_LAYER][name.rpartition(".")[0]].append(name)
    return layers


def units(modules: Iterable[str], layout: Layout, *, shared: bool = False) -> Iterator[Unit]:
    """Group modules: an expert's three projections; for neuron the two down projections, and an early router's sources.

    With `shared` the shared expert is one like the others, a stack of its own. Experts come last and in order, so that
    the parts of a stacked tensor are written front to back.
    """
    experts: dict[int, list[str]] = {}
    joined: list[str] = []
    of_shared: list[str] = []
    modules = list(modules)
    folded: list[str] = []
    if layout.layers and any(module.endswith(".mlp.gate") for module in modules):
        folded = sorted(module for module in modules if module.endswith(_FOLDED))
        yield Unit(tuple(folded))
    for module in modules:
        if match := EXPERT.match(f"{module}.weight"):
            experts.setdefault(int(match["expert"]), []).append(module)
        elif shared and ".shared_experts." in module:
            of_shared.append(module)
        elif layout.target == "neuron" and module.endswith(("q_a_proj", "kv_a_proj_with_mqa")):
            joined.append(module)
        elif module not in folded:
            yield Unit((module,))
    if joined:
        yield Unit(tuple(sorted(joined, reverse=True)))  # q_a_proj first
    if of_shared:
        root = of_shared[0].rpartition(".")[0]
        yield Unit(tuple(f"{root}.{name}" for name in PROJECTIONS), 0)
    for expert in sorted(experts):
        root = experts[expert][0].rpartition(".")[0]
        yield Unit(tuple(f"{root}.{name}" for name in PROJECTIONS), expert)


class Converter:
    """Converts units; safe to call from several threads.

    Args:
        planned: the output's tensors by name.
        experts: format of the routed experts; None for the layout's own.
        report: measure the error of every expert.
        following: with early down projections, `early_qkv_a.scaled_projections` of the layer behind; None where there
            is none.
        ranks: in whose order attention's tiles lie; None for the layout's.
    """

    def __init__(
        self,
        config: KimiK2Config,
        layout: Layout,
        planned: Mapping[str, PlannedTensor],
        experts: ExpertFormat | None = None,
        *,
        report: bool = True,
        following: Tensor | None = None,
        ranks: int | None = None,
    ) -> None:
        self.config, self.layout, self.planned, self.report = config, layout, planned, report
        self.experts, self.following, self.ranks = experts, following, ranks or layout.ranks
        self.held = layout.held(config)
        if experts is None and not layout.keeps:
            self.experts = expert_formats()[layout.experts].for_layout(config, layout)

    @property
    def holds_shared(self) -> bool:
        """Whether the shared expert is held like the routed ones, see `units`."""
        return self.experts is not None and self.experts.shared is not None

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

    def _format(self, module: str) -> StoredFormat:
        return format_of(self.config.quantization, module)

    def _float(self, module: str, stored: Stored) -> Tensor:
        return self._format(module).dequantize(stored, self.layout.dtype)

    def _neuron(self, unit: Unit, stored: dict[str, Stored]) -> list[Part]:
        if len(unit.modules) == len(_FOLDED):
            parts = [part for module in unit.modules for part in self._neuron(Unit((module,)), stored)]
            return [*parts, *self._early_router(unit, stored)]
        module = unit.modules[0]
        name = module.removeprefix("model.")
        if len(unit.modules) == 2:
            whole = torch.cat([self._float(one, stored[one]) for one in unit.modules])
            return [Part(name.replace("q_a_proj", "qkv_a_proj") + ".weight", None, whole)]
        if name.endswith(".mlp.gate"):
            router = name.removesuffix("gate") + "router"
            bias = stored[module]["e_score_correction_bias"].to(torch.float32)
            weight = stored[module]["weight"].to(self.layout.dtype)
            if self.layout.transposed_router:
                weight = weight.T.contiguous()
            return [
                Part(f"{router}.linear_router.weight", None, weight),
                Part(f"{router}.e_score_correction_bias", None, bias),
            ]
        root, tiles = name.rpartition(".")[0], self.layout.attention_tiles(self.config)
        in_tiles = tiles and name.endswith(attention_tiles.SOURCES) and self._of_moe(module)
        made = self._attention_tiles(module, stored[module]) if in_tiles else []
        if not (in_tiles and attention_tiles.in_place_of_linears(tiles)):
            made.append(Part(f"{name}.weight", None, self._float(module, stored[module])))
        if self.following is not None and name.endswith(".input_layernorm"):
            weight = self.following.T.to(self.layout.dtype).contiguous()
            made.append(Part(f"{root}.{early_qkv_a.RESIDUAL}", None, weight))
        return made

    def _of_moe(self, module: str) -> bool:
        match = LAYER.match(module)
        return match is not None and self.config.is_moe_layer(int(match[1]))

    def _attention_tiles(self, module: str, stored: Stored) -> list[Part]:
        kind, dtype = self.layout.attention_tiles(self.config), self.layout.dtype
        source, name = self._format(module), module.removeprefix("model.")
        root = name.rpartition(".self_attn.")[0]
        group = self.layout.query_group
        made = attention_tiles.make_tiles(self.config, name, stored, source, self.ranks, kind, dtype, group)
        return [Part(f"{root}.{attention_tiles.NAME}.{suffix}", None, tile) for suffix, tile in made.items()]

    def _early_router(self, unit: Unit, stored: dict[str, Stored]) -> list[Part]:
        gate, norm, o_proj = unit.modules
        weight, gamma = (stored[one]["weight"].to(self.layout.dtype) for one in (gate, norm))
        residual, heads = fold(weight, gamma, stored[o_proj], self._format(o_proj))
        root = norm.removeprefix("model.").rpartition(".")[0]
        return [Part(f"{root}.{RESIDUAL}", None, residual), Part(f"{root}.{HEADS}", None, heads)]

    def _cuda(self, module: str, stored: Stored) -> list[Part]:
        source = self._format(module)
        if self.layout.experts == "bf16" and source.method is not None:
            return [Part(f"{module}.weight", None, self._float(module, stored))]
        made = []
        for suffix, tensor in source.hold(stored).items():
            name = f"{module}.{suffix}"
            made.append(Part(name, None, self._kept(tensor, self.planned[name].dtype, exact=len(stored) > 1)))
        return made

    @staticmethod
    def _kept(tensor: Tensor, dtype: torch.dtype, *, exact: bool) -> Tensor:
        """In the planned dtype; left alone, and refused where it is written, if an exact value would be rounded."""
        return tensor if exact and torch.promote_types(tensor.dtype, dtype) != dtype else tensor.to(dtype)

    def _expert(self, unit: Unit, stored: dict[str, Stored], error: ConversionError) -> list[Part]:
        shared = ".shared_experts." in unit.modules[0]
        format_ = self.experts.shared if self.experts is not None and shared else self.experts
        measured = error if self.report and not shared else None
        gate, up, down = (self._matrix(module, stored[module], format_, measured) for module in unit.modules)
        neuron, dtype = self.layout.target == "neuron", self.layout.dtype
        if neuron:
            moe = unit.modules[0].removeprefix("model.").rpartition(".mlp.")[0]
            root = f"{moe}.mlp.expert_mlps.{'shared_experts' if shared else 'mlp_op'}"
        else:
            root = unit.modules[0].rpartition(".experts.")[0] + ".experts"

        def part(projection: str, suffix: str, *matrices: Tensor) -> Part:
            # The plain model's buffers are named without `.weight`.
            name = f"{root}.{projection}" + (f".{suffix}" if neuron else suffix.removeprefix("weight"))
            tensor = self.planned[name]
            if format_ is None or not neuron:
                made = tensor.by_rank(torch.cat(matrices) if matrices[1:] else matrices[0])
            elif len(matrices) == 2:
                made = format_.fuse(suffix, *matrices, parts=tensor.parts)
            else:
                made = tensor.by_rank(input_first(*matrices)[0])
            return Part(name, unit.expert, made)

        # Each on its own: down_proj may be stored in another format than gate_proj and up_proj.
        first = [part("gate_up_proj", suffix, gate[suffix], up[suffix]) for suffix in gate]
        made = first + [part("down_proj", suffix, down[suffix]) for suffix in down]
        if self.following is not None and format_ is not None:
            tensor = self.planned[f"{root}.{early_qkv_a.NAME}.weight"]
            weight = early_qkv_a.fold(self.following, format_.dequantized(down, *self._shape(unit.modules[2])), dtype)
            made.append(Part(tensor.name, unit.expert, tensor.by_rank(weight)))
        return made

    def _matrix(
        self, module: str, stored: Stored, format_: ExpertFormat | None, error: ConversionError | None
    ) -> Stored:
        """One expert's matrix in the output format, by suffix, output dimension first."""
        source = self._format(module)
        if format_ is None and source.method is not None and format_of(self.held.quantization, module).method is None:
            return {"weight": source.dequantize(stored, self.layout.dtype)}
        if format_ is None:
            return source.hold(stored)
        return format_.convert(Matrix(stored, source, *self._shape(module)), self.layout.dtype, error)

    def _shape(self, module: str) -> tuple[int, int]:
        """Output and input size of an expert's matrix."""
        hidden, width = self.config.hidden_size, self.config.moe_intermediate_size
        if ".shared_experts." in module:
            width *= self.config.n_shared_experts
        return (hidden, width) if module.endswith("down_proj") else (width, hidden)
