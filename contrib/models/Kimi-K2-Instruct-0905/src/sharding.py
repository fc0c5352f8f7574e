"""The ranks' weights, streamed from a checkpoint: in memory, or as one file a rank.

NxD's own way holds the whole model and a copy of a rank's part. Here the ranks' tensors are allocated first, by the
shapes of the model's own parameters, and each of the checkpoint's tensors is cut into them as it comes, by the
attributes that NxD's loader reads. Beside the ranks' own bytes (of files: mapped, so that the system writes them out)
one module is in memory: an expert, or the embedding, 2.3 GB in BF16.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.trace.mock_torchdist import mock_distributed
from neuronx_distributed.utils.model_utils import init_on_device
from torch import Tensor, nn

from .checkpoint import CheckpointError, Parameter, cut

DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
}  # fmt: skip
Rank = dict[str, Tensor]
Weights = dict[str, nn.Parameter]


def model_on_meta(wrapper: Any) -> nn.Module:
    """A submodel without its weights, as NxD's builder makes it to cut a checkpoint."""
    neuron = wrapper.neuron_config
    with (
        mock_distributed(world_size=neuron.world_size),
        init_on_device(torch.device("meta"), force_custom_init_on_device=True),
    ):
        torch.distributed.init_process_group(backend="xla", rank=0, world_size=neuron.world_size)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=neuron.tp_degree, skip_collective_init=True, lnc_size=neuron.logical_nc_config
        )
        try:
            instance = wrapper.get_model_instance()
            instance.load_module()
            return instance.module
        finally:
            parallel_state.destroy_model_parallel()


def weights_of(model: nn.Module) -> Weights:
    """The parameters that a checkpoint fills; caches are none."""
    return {name: parameter for name, parameter in model.named_parameters() if not name.startswith("kv_mgr.")}


def empty_rank(weights: Weights, file: Path | None = None) -> Rank:
    """A rank's tensors, in memory or mapped to a safetensors file that is made here."""
    if file is None:
        return {name: torch.empty(weight.shape, dtype=weight.dtype) for name, weight in weights.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, weight in sorted(weights.items(), key=lambda item: -item[1].dtype.itemsize):  # so all are aligned
        start, end = end, end + weight.numel() * weight.dtype.itemsize
        header[name] = {"dtype": DTYPES[weight.dtype], "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(first + end)
    mapped = torch.from_file(str(file), shared=True, size=first + end, dtype=torch.uint8)
    offsets = {name: [first + offset for offset in entry["data_offsets"]] for name, entry in header.items()}
    return {name: mapped[a:b].view(weights[name].dtype).view(weights[name].shape) for name, (a, b) in offsets.items()}


def fill(ranks: dict[int, Rank], parameters: Iterable[Parameter], weights: Weights, neuron: Any) -> None:
    """Cut each parameter into the ranks' tensors, by the attributes of the model's own parameters.

    Args:
        ranks: each rank's tensors by its number.
        weights: the model's parameters.
        neuron: the neuron config.

    Raises:
        CheckpointError: a parameter is not of the model's shape, or stays empty.
    """
    tp = neuron.moe_tp_degree
    missing = set(weights)
    for name, tensor, expert in parameters:
        target: Any = weights[name]
        missing.discard(name)
        for rank, own in ranks.items():
            if expert is not None:
                local = len(target)
                if expert // local != rank // tp:
                    continue
                dimension, sections = target.expert_cut
                piece, held = cut(tensor, dimension, sections, rank % tp, tp), own[name][expert % local]
            elif getattr(target, "tensor_model_parallel", False):
                count = target.num_partitions
                piece = cut(tensor, target.partition_dim, target.partition_stride, rank % count, count)
                held = own[name]
            else:
                piece, held = tensor, own[name]
            if piece.shape != held.shape:
                raise CheckpointError(f"{name}: expected {list(held.shape)} of a rank, got {list(piece.shape)}")
            held.copy_(piece)
    if missing:
        raise CheckpointError(f"not in the checkpoint: {', '.join(sorted(missing)[:5])}")
