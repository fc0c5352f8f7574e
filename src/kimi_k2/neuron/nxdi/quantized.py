"""NxD's quantization settings; how experts are held and converted is `kimi_k2.sharding.experts`."""

from __future__ import annotations

from typing import Any

import torch

# Only the routed experts are quantized; a name matches as a part of the module's path (NxD's convert()).
MODULES_TO_NOT_CONVERT = (
    "lm_head", "embed_tokens", "norm", "self_attn", "router", "shared_experts",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def q_config(neuron_config: Any) -> dict[str, Any]:
    """The dictionary that NxD's `convert` takes, as DecoderModelInstance.load_module builds it."""
    from neuronx_distributed.quantization import quantization_config as nxd

    if neuron_config.quantization_type == nxd.QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC.value:
        config = nxd.get_default_expert_wise_per_channel_custom_qconfig_dict()
    else:
        config = nxd.get_default_blockwise_custom_qconfig_dict()
        config["block_axis"] = neuron_config.quantization_block_axis
        config["block_size"] = neuron_config.quantization_block_size
    config["quantized_dtype"] = nxd.QuantizedDtype.get_dtype(neuron_config.quantization_dtype)
    result: dict[str, Any] = config
    return result


def tile_dtype(neuron_config: Any) -> torch.dtype | None:
    """Dtype of the routed experts' tiles; None where they are held in NxD's own arrangement."""
    if not neuron_config.layers:
        return None
    dtype: torch.dtype = torch.float8_e4m3fn if neuron_config.quantized else neuron_config.torch_dtype
    return dtype


def block_size(neuron_config: Any) -> int:
    """Rows and columns of the routed experts' FP8 blocks; 0 where they have none, or lie in tiles."""
    blocks = neuron_config.quantized and neuron_config.quantization_type == "blockwise_symmetric"
    return int(neuron_config.quantization_block_size[0]) if blocks and not neuron_config.layers else 0
