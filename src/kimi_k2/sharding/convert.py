"""From one module's stored tensors to tensors of the output: whole, or of an expert by rank.

For neuron the mapping is the contrib model's own (`contrib_model.checkpoint`), with all stored formats, vectorised
conversions, and what the kernel of whole layers reads; for cuda it keeps the checkpoint's names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import EXPERT, LAYER
from kimi_k2.config import KimiK2Config
from kimi_k2.contrib_model.checkpoint import EXPERT_CUTS, CheckpointMapping, Module, Parameter
from kimi_k2.errors import CheckpointError, MissingTensorError
from kimi_k2.quantization.stored import Stored, StoredFormat, format_of
from kimi_k2.sharding import attention_tiles, early_qkv_a, early_router
from kimi_k2.sharding.experts import ConversionError, ExpertFormat, Matrix, input_first
from kimi_k2.sharding.layout import GLOBAL_LAYER, Layout, PlannedTensor

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TILE_CUTS = {
    "gate_up_proj.weight": (2, 2), "gate_up_proj.scale": (0, 2), "down_proj.weight": (0, 1), "down_proj.scale": (0, 1),
    "early_qkv_a.weight": (0, 1),
}  # fmt: skip
_error: ContextVar[ConversionError | None] = ContextVar("error", default=None)  # of the module that a thread converts


def modules_by_layer(names: Iterable[str]) -> dict[int, dict[str, list[str]]]:
    """Stored names by decoder layer (or GLOBAL_LAYER) and module, in their order."""
    layers: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        match = LAYER.match(name)
        layers[int(match[1]) if match else GLOBAL_LAYER][name.rpartition(".")[0]].append(name)
    return layers


def _read(names: Iterable[str], read: Callable[[str], Tensor]) -> Stored:
    return {name.rpartition(".")[2]: read(name) for name in names}


def converted(
    module: Module, stored: list[Stored], check: Callable[[str, Stored], None], *, report: bool = True
) -> tuple[list[Parameter], ConversionError]:
    """What a mapping's module becomes, and the error of what was requantized; safe to call from several threads.

    An expert's tensors are by rank: `PlannedTensor.expert_shape`.

    Args:
        module: of one of the two mappings.
        stored: tensors by suffix of each of its sources.
        check: called with each source and its tensors; the reader's `check_module`, which may refuse NaN.
        report: measure the error of a routed expert.

    Raises:
        CheckpointError: stored tensors contradict each other.
    """
    for source, tensors in zip(module.sources, stored, strict=True):
        check(source, tensors)
    error = ConversionError()
    token = _error.set(error if report else None)
    try:
        parameters = module.make(stored)
    except ValueError as reason:
        raise CheckpointError(str(reason), tensor=module.sources[0]) from reason
    finally:
        _error.reset(token)
    return [Parameter(f"{module.name}.{suffix}", tensor, module.expert) for suffix, tensor in parameters.items()], error


class NeuronMapping(CheckpointMapping):
    """The contrib model's mapping on kimi_k2's stored formats and those in which experts are held.

    Args:
        config: of the model.
        layout: ranks and formats.
        names: of the checkpoint's tensors, without prefix.
        read: called with one of them.
        experts: format of the routed experts; None for the layout's own.
        by_rank: whether a routed expert's tensors come by rank, else uncut.
    """

    error: type[Exception] = CheckpointError

    def __init__(
        self,
        config: KimiK2Config,
        layout: Layout,
        names: Iterable[str],
        read: Callable[[str], Tensor],
        *,
        experts: ExpertFormat | None = None,
        by_rank: bool = False,
    ) -> None:
        self.config, self.layout, self.read, self.by_rank = config, layout, read, by_rank
        self.dtype, self.ranks, self.of_experts = layout.dtype, layout.ranks, (layout.moe_tp, layout.moe_ep)
        self.experts = experts or layout.expert_format(config)
        self.expert_cuts = TILE_CUTS if self.experts.tiles else EXPERT_CUTS
        self.stored = {name: name for name in names}
        self.unread = set(self.stored)
        self.of_module = {m: n for modules in modules_by_layer(self.stored).values() for m, n in modules.items()}
        self.following: Tensor | None = None  # scaled projections of the layer behind the one that is made

    def tensors_of(self, module: str) -> Stored:
        """A module's tensors by suffix, read."""
        if module not in self.of_module:
            raise MissingTensorError("not among the tensors given", tensor=f"{module}.weight")
        self.unread.difference_update(self.of_module[module])
        return _read(self.of_module[module], self.read)

    def modules_of(self, layer: int) -> Iterator[Module]:
        """The base's; for the kernel of whole layers also what is folded."""
        root, stored, self.following = f"layers.{layer}", f"model.layers.{layer}", None
        if self.layout.layers and self.config.is_moe_layer(layer):
            if early_qkv_a.precedes_another(self.config, layer):
                self.following = early_qkv_a.scaled_projections(self.config, layer + 1, self.tensors_of)
                weight = self.following.T.to(self.dtype).contiguous()
                yield Module(root, (), lambda _: {early_qkv_a.RESIDUAL: weight})
            sources = tuple(f"{stored}.{name}" for name in early_router.SOURCES)
            yield Module(root, sources, partial(self._early_router, self._format(sources[2])))
        yield from super().modules_of(layer)

    def attention(self, own: str, stored: str) -> Iterator[Module]:
        """The base's; tiles in place of some of them, or beside."""
        moe = self.config.is_moe_layer(int(own.split(".")[1]))
        kind = self.layout.attention_tiles(self.config) if moe else ""
        for module in super().attention(own, stored):
            in_tiles = kind and module.name.endswith(attention_tiles.SOURCES)
            if not (in_tiles and attention_tiles.in_place_of_linears(kind)):
                yield module
            if in_tiles:
                yield Module(f"{own}.tiles", module.sources, partial(self._tiles, module.sources[0]))

    def mlp(self, own: str, stored: str) -> Iterator[Module]:
        """The base's; a shared expert in tiles is a stack of one."""
        held = self.experts.shared if own.endswith("shared_experts") else None
        if held is None:
            yield from super().mlp(own, stored)
            return
        names = tuple(f"{stored}.{name}" for name in PROJECTIONS)
        yield Module(own, names, partial(self._expert, names, held, 1, self.following, report=False))

    def expert(self, own: str, stored: str, expert: int) -> Module:
        """The base's, in `experts`' format."""
        names = tuple(f"{stored}.{name}" for name in PROJECTIONS)
        parts = self.layout.moe_tp if self.by_rank else 0
        return Module(own, names, partial(self._expert, names, self.experts, parts, self.following), expert)

    def plain(self, name: str, stored: Stored) -> Tensor:
        """A weight in the model's dtype."""
        return self._format(name).dequantize(stored, self.dtype)

    def _format(self, module: str) -> StoredFormat:
        return format_of(self.config.quantization, module)

    def _early_router(self, source: StoredFormat, read: list[Stored]) -> dict[str, Tensor]:
        gate, gamma = (stored["weight"].to(self.dtype) for stored in read[:2])
        residual, heads = early_router.fold(gate, gamma, read[2], source)
        return {early_router.RESIDUAL: residual, early_router.HEADS: heads}

    def _tiles(self, module: str, read: list[Stored]) -> dict[str, Tensor]:
        group = self.layout.query_group
        tiles = attention_tiles.make_tiles(self.config, self.layout, module, read[0])
        if self.by_rank:
            return tiles
        return {
            name: attention_tiles.of_each_rank(tile, group) if name.split(".")[0] in attention_tiles.OF_GROUP else tile
            for name, tile in tiles.items()
        }

    def _expert(
        self,
        names: tuple[str, ...],
        held: ExpertFormat,
        parts: int,
        following: Tensor | None,
        read: list[Stored],
        *,
        report: bool = True,
    ) -> dict[str, Tensor]:
        """Gate and up side by side, down, and what is folded behind it: [parts or 1, ...] each, uncut for 0 parts."""
        sizes = [self._shape(name) for name in names]
        matrices = (
            Matrix(stored, self._format(name), *size) for name, stored, size in zip(names, read, sizes, strict=True)
        )
        error = _error.get() if report else None
        gate, up, down = (held.convert(matrix, self.dtype, error) for matrix in matrices)
        tensors = {
            f"gate_up_proj.{suffix}": held.fuse(suffix, gate[suffix], up[suffix], parts=parts or 1) for suffix in gate
        }
        behind = {f"down_proj.{suffix}": input_first(down[suffix])[0] for suffix in down}
        if following is not None:
            behind["early_qkv_a.weight"] = early_qkv_a.fold(following, held.dequantized(down, *sizes[2]), self.dtype)
        for name, tensor in behind.items():
            dimension, sections = self.expert_cuts[name]
            cut = None if tensor.shape[dimension] == 1 else dimension + 1
            planned = PlannedTensor(name, tensor.dtype, (1, *tensor.shape), 0, cut, sections, parts or 1)
            tensors[name] = planned.by_rank(tensor)
        return tensors if parts else {name: tensor.squeeze(0) for name, tensor in tensors.items()}

    def _shape(self, module: str) -> tuple[int, int]:
        """Output and input size of an expert's matrix."""
        hidden, width = self.config.hidden_size, self.config.moe_intermediate_size
        if ".shared_experts." in module:
            width *= self.config.n_shared_experts
        return (hidden, width) if module.endswith("down_proj") else (width, hidden)


class CudaMapping:
    """The checkpoint's own names, experts stacked [E, output, input]; arguments as NeuronMapping's.

    Args:
        planned: the output's tensors by name.
    """

    def __init__(
        self,
        config: KimiK2Config,
        layout: Layout,
        names: Iterable[str],
        read: Callable[[str], Tensor],
        planned: Mapping[str, PlannedTensor],
    ) -> None:
        self.config, self.layout, self.planned, self.held = config, layout, planned, layout.held(config)
        self.layers, self.read = modules_by_layer(names), read
        self.of_module = {module: own for modules in self.layers.values() for module, own in modules.items()}

    def tensors_of(self, module: str) -> Stored:
        """A module's tensors by suffix, read."""
        return _read(self.of_module[module], self.read)

    def outer(self) -> Iterator[Module]:
        """Modules of no layer."""
        return self.modules_of(GLOBAL_LAYER)

    def modules_of(self, layer: int) -> Iterator[Module]:
        """A layer's modules, experts last and in order."""
        experts: dict[int, str] = {}
        for module in self.layers[layer]:
            if match := EXPERT.match(f"{module}.weight"):
                experts[int(match["expert"])] = module.rpartition(".")[0]
            else:
                yield Module(module, (module,), partial(self._module, module))
        for expert, root in sorted(experts.items()):
            names = tuple(f"{root}.{name}" for name in PROJECTIONS)
            yield Module(root.rpartition(".")[0], names, partial(self._expert, names), expert)

    def _module(self, module: str, read: list[Stored]) -> dict[str, Tensor]:
        source = format_of(self.config.quantization, module)
        if self.layout.experts == "bf16" and source.method is not None:
            return {"weight": source.dequantize(read[0], self.layout.dtype)}
        held = source.hold(read[0])
        return {
            suffix: self._kept(tensor, self.planned[f"{module}.{suffix}"].dtype, exact=len(read[0]) > 1)
            for suffix, tensor in held.items()
        }

    @staticmethod
    def _kept(tensor: Tensor, dtype: torch.dtype, *, exact: bool) -> Tensor:
        """In the planned dtype; left alone, and refused where it is written, if an exact value would be rounded."""
        return tensor if exact and torch.promote_types(tensor.dtype, dtype) != dtype else tensor.to(dtype)

    def _expert(self, names: tuple[str, ...], read: list[Stored]) -> dict[str, Tensor]:
        gate, up, down = (self._matrix(name, stored) for name, stored in zip(names, read, strict=True))
        root = names[0].rpartition(".experts.")[0] + ".experts"
        # Each on its own: down_proj may be stored in another format than gate_proj and up_proj.
        # The plain model's buffers are named without `.weight`.
        whole = {
            f"gate_up_proj{suffix.removeprefix('weight')}": torch.cat((gate[suffix], up[suffix])) for suffix in gate
        }
        whole |= {f"down_proj{suffix.removeprefix('weight')}": tensor for suffix, tensor in down.items()}
        return {name: self.planned[f"{root}.{name}"].by_rank(tensor) for name, tensor in whole.items()}

    def _matrix(self, module: str, stored: Stored) -> Stored:
        """One expert's matrix by suffix, output dimension first."""
        source = format_of(self.config.quantization, module)
        kept = self.layout.keeps and (source.method is None or format_of(self.held.quantization, module).method)
        return source.hold(stored) if kept else {"weight": source.dequantize(stored, self.layout.dtype)}
