"""A rank's tensors, from the checkpoint or from the file that `kimi-k2 convert` wrote: the same bits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.neuron.torch_native.settings import Ranks, layout_of
from kimi_k2.sharding.convert import NeuronMapping, converted
from kimi_k2.sharding.experts import ConversionError
from kimi_k2.sharding.layout import GLOBAL_LAYER, Layout, PlannedTensor
from kimi_k2.sharding.manifest import MANIFEST, check_made_for
from kimi_k2.sharding.verify import open_rank_file

logger = logging.getLogger("vllm.kimi_k2")


def rank_tensors(
    directory: str | Path,
    config: KimiK2Config,
    planned: Iterable[PlannedTensor],
    ranks: Ranks,
    experts: str,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Name and local tensor of everything that this rank holds.

    Args:
        directory: a Hugging Face checkpoint, or a finished conversion for as many ranks.
        config: of the model.
        planned: what `settings.planned_tensors` gave.
        ranks: which this is.
        experts: format of the routed experts.
        dtype: of float weights.

    Raises:
        CheckpointError, ConfigError: a tensor or file is missing, damaged, or made for other ranks.
    """
    directory = Path(directory)
    read = _from_rank_file if (directory / MANIFEST).exists() else _from_checkpoint
    return read(directory, config, planned, ranks, layout_of(ranks, experts, dtype))


def _from_rank_file(
    directory: Path, config: KimiK2Config, planned: Iterable[PlannedTensor], ranks: Ranks, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    if ranks.dp is not None:
        raise ConfigError("ranks' files are cut for one replica; give the checkpoint itself", file=directory / MANIFEST)
    check_made_for(directory, config, layout)
    with open_rank_file(directory, ranks.moe_rank) as read:
        for tensor in planned:
            yield tensor.name, read(tensor.name)


def _from_checkpoint(
    directory: Path, config: KimiK2Config, planned: Iterable[PlannedTensor], ranks: Ranks, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """Layer by layer, by the converter that writes the ranks' files; only experts that this rank holds are read."""
    by_name = {tensor.name: tensor for tensor in planned}
    of_layer: dict[int, list[PlannedTensor]] = {}
    for tensor in by_name.values():
        of_layer.setdefault(tensor.layer, []).append(tensor)
    with CheckpointReader.for_config(directory, config) as reader:
        for tensor in of_layer.pop(GLOBAL_LAYER):
            source = tensor.name if tensor.name.startswith("lm_head.") else f"model.{tensor.name}"
            pieces = [reader.get_slice(source, *region) for region in tensor.regions(ranks.rank)]
            yield tensor.name, torch.cat(pieces, tensor.dim or 0).to(tensor.dtype)
        mapping = NeuronMapping(config, layout, reader.names(), reader.get, by_rank=True)
        error = ConversionError()
        for layer, tensors in of_layer.items():
            made: dict[str, Tensor] = {}
            local_experts = next(
                (tensor.experts_of(ranks.moe_rank) for tensor in tensors if ".mlp.experts." in tensor.name), range(0)
            )
            for module in mapping.modules_of(layer):
                if module.expert is not None and module.expert not in local_experts:
                    continue
                stored = [mapping.tensors_of(source) for source in module.sources]
                # One a layer: the load is to be no slower for it.
                report = module.expert == local_experts.start
                parts, measured = converted(module, stored, reader.check_module, report=report)
                error.add(measured)
                for part in parts:
                    if part.name not in by_name:
                        continue
                    tensor = by_name[part.name]
                    if part.expert is None:
                        made[part.name] = tensor.local(part.tensor, ranks.rank)
                        continue
                    if part.name not in made:
                        made[part.name] = torch.empty(tensor.local_shape, dtype=tensor.dtype)
                    share = ranks.moe_rank % len(part.tensor)
                    made[part.name][part.expert - tensor.experts_of(ranks.moe_rank).start].copy_(part.tensor[share])
            yield from made.items()
        logger.info(
            "kimi-k2: rank %d, experts as %s, one a layer measured: relative L2 error %.2e, %d of %d values changed",
            ranks.moe_rank, layout.experts, error.relative_l2, error.changed, error.values,
        )  # fmt: skip
