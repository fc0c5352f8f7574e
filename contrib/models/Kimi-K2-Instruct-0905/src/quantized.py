"""Forms in which the routed experts are held, and NxD's quantization settings for each.

Trainium2's e4m3 ends at 240: the codes whose exponent bits are all ones, 256 to 448 in the checkpoint's e4m3fn, read as
NaN there. No weight below may hold one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kimi_k2.quantization.config import Quantization
from kimi_k2.quantization.fp8_block import quantize_fp8_block
from kimi_k2.quantization.fp8_channel import quantize_fp8_channel
from kimi_k2.quantization.neuron_e4m3 import halve_blocks
from kimi_k2.quantization.stored import dequantize_stored

CHECKPOINT_BLOCK = 128

# Only the routed experts are quantized; a name matches as a part of the module's path (NxD's convert()).
MODULES_TO_NOT_CONVERT = (
    "lm_head", "embed_tokens", "norm", "self_attn", "router", "shared_experts",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


class ExpertFormat(Protocol):
    """How one expert's matrix is held."""

    def convert(
        self, stored: dict[str, Tensor], quantization: Quantization | None, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Stored tensors of one [out, in] matrix to NxD's, by suffix, input dimension first."""
        ...

    def neuron_options(self) -> dict[str, Any]:
        """Arguments of MoENeuronConfig."""
        ...


@dataclass(frozen=True)
class FloatExperts:
    """Dequantized weights in the model's dtype."""

    def convert(
        self, stored: dict[str, Tensor], quantization: Quantization | None, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        return {"weight": dequantize_stored(stored, quantization, dtype).mT}

    def neuron_options(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class BlockwiseFp8Experts:
    """FP8 with one float32 scale a square block.

    The checkpoint's codes are halved and its scales doubled, which is exact but for the lowest bit of subnormals and
    leaves no code above 224. A rank's width may be less than a block of the checkpoint (64 rows at 32 ranks, 32 at 64):
    scales are then repeated for blocks of that width, so that NxD cuts gate and up on block borders and no scale is
    shared between them.

    Args:
        block_size: side of a block; a divisor of 128.
    """

    block_size: int = CHECKPOINT_BLOCK

    @classmethod
    def for_rank_width(cls, width: int) -> BlockwiseFp8Experts:
        """The largest block that divides both the checkpoint's block and `width`, a rank's share of an expert."""
        return cls(math.gcd(CHECKPOINT_BLOCK, width))

    def convert(
        self, stored: dict[str, Tensor], quantization: Quantization | None, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        square = (self.block_size, self.block_size)
        if "weight_scale_inv" in stored:
            weight, scale, block = stored["weight"], stored["weight_scale_inv"], (CHECKPOINT_BLOCK, CHECKPOINT_BLOCK)
        else:
            plain = dequantize_stored(stored, quantization, torch.float32)
            (weight, scale), block = quantize_fp8_block(plain, square), square
        weight, scale = halve_blocks(weight, scale, block, self.block_size)
        return {"weight": weight.mT, "scale": scale.mT}

    def neuron_options(self) -> dict[str, Any]:
        return {
            "quantized": True,
            "quantization_type": "blockwise_symmetric",
            "quantization_dtype": "f8e4m3",
            "quantization_block_axis": [1, 2],
            "quantization_block_size": [self.block_size, self.block_size],
        }


@dataclass(frozen=True)
class ChannelFp8Experts:
    """FP8 with one float32 scale an output channel of each expert; requantized, error about 2.6 % of the weights."""

    def convert(
        self, stored: dict[str, Tensor], quantization: Quantization | None, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        weight, scale = quantize_fp8_channel(dequantize_stored(stored, quantization, torch.float32))
        return {"weight": weight.mT, "scale": scale.mT}

    def neuron_options(self) -> dict[str, Any]:
        return {
            "quantized": True,
            "quantization_type": "expert_wise_per_channel_symmetric",
            "quantization_dtype": "f8e4m3",
        }


def expert_format(neuron_config: Any) -> ExpertFormat:
    """The format that a neuron config describes."""
    if not neuron_config.quantized:
        return FloatExperts()
    if neuron_config.quantization_type == "expert_wise_per_channel_symmetric":
        return ChannelFp8Experts()
    return BlockwiseFp8Experts(neuron_config.quantization_block_size[0])


def q_config(neuron_config: Any) -> dict[str, Any]:
    """The dictionary that NxD's `convert` takes, as DecoderModelInstance.load_module builds it."""
    from neuronx_distributed.quantization import quantization_config as nxd

    if neuron_config.quantization_type == "expert_wise_per_channel_symmetric":
        config = nxd.get_default_expert_wise_per_channel_custom_qconfig_dict()
    else:
        config = nxd.get_default_blockwise_custom_qconfig_dict()
        config["block_axis"] = neuron_config.quantization_block_axis
        config["block_size"] = neuron_config.quantization_block_size
    config["quantized_dtype"] = nxd.QuantizedDtype.get_dtype(neuron_config.quantization_dtype)
    return config
