"""The unsharded state dict of the Neuron model, by the converter that writes the ranks' files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import expected_tensors
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import MissingTensorError, UnexpectedTensorError
from kimi_k2.quantization.stored import Stored
from kimi_k2.sharding.convert import Converter, modules_by_layer, units
from kimi_k2.sharding.early_qkv_a import precedes_another, scaled_projections
from kimi_k2.sharding.experts.format import ExpertFormat
from kimi_k2.sharding.layout import Decode, Layout
from kimi_k2.sharding.plan import make_plan


def whole_state_dict(
    config: KimiK2Config,
    dtype: torch.dtype,
    experts: ExpertFormat,
    names: Iterable[str],
    read: Callable[[str], Tensor],
    *,
    decode: Decode | None = None,
    query_group: int = 0,
    ranks: int = 1,
) -> dict[str, Tensor]:
    """Every tensor of NeuronKimiK2Model that a checkpoint holds, uncut.

    Args:
        config: of the model.
        dtype: of float weights.
        experts: how the routed experts are held.
        names: stored names, without prefix; all that `config` implies and no others.
        read: called once with each.
        decode: of `Layout`.
        query_group: of `Layout`.
        ranks: that will divide the heads, in whose order attention's tiles lie.

    Raises:
        MissingTensorError, UnexpectedTensorError: `names` are not those that `config` implies.
    """
    names, expected = list(names), {spec.name for spec in expected_tensors(config)}
    if lost := sorted(expected.difference(names)):
        raise MissingTensorError("not among the tensors given", tensor=lost[0])
    if more := sorted(set(names) - expected):
        raise UnexpectedTensorError("the configuration implies no such tensor", tensor=more[0])
    layout = Layout(1, experts=experts.name, dtype=dtype, decode=decode, query_group=query_group)
    planned = {tensor.name: tensor for tensor in make_plan(config, layout, experts).tensors}
    state: dict[str, Tensor] = {}
    layers = modules_by_layer(names)
    ahead: dict[str, Tensor] = {}  # read for the layer before

    def stored_of(layer: int, module: str, *, keep: bool = False) -> Stored:
        tensors = {name: ahead.pop(name) if name in ahead else read(name) for name in layers[layer][module]}
        if keep:
            ahead.update(tensors)
        return {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}

    for layer, modules in sorted(layers.items()):
        following = None
        if layout.layers and precedes_another(config, layer):
            following = scaled_projections(config, layer + 1, partial(stored_of, layer + 1, keep=True))
        converter = Converter(config, layout, planned, experts, report=False, following=following, ranks=ranks)
        for unit in units(modules, layout, shared=converter.holds_shared):
            stored = {module: stored_of(layer, module) for module in unit.modules}
            for part in converter.convert(unit, stored)[0]:
                if part.expert is None:
                    state[part.name] = part.tensor.contiguous()
                    continue
                if part.name not in state:
                    state[part.name] = torch.empty(planned[part.name].shape, dtype=part.tensor.dtype)
                state[part.name][part.expert].copy_(part.tensor[0])
    return state


def load_whole_state_dict(
    reader: CheckpointReader,
    config: KimiK2Config,
    dtype: torch.dtype,
    experts: ExpertFormat,
    *,
    decode: Decode | None = None,
    query_group: int = 0,
    ranks: int = 1,
) -> dict[str, Tensor]:
    """`whole_state_dict` of an open checkpoint."""
    return whole_state_dict(
        config,
        dtype,
        experts,
        reader.names(),
        reader.get,
        decode=decode,
        query_group=query_group,
        ranks=ranks,
    )
