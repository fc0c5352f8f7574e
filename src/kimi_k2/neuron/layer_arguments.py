"""What the kernels of whole layers (`kimi_k2.nki.kernels.layers`) are given, from what a layer of both classes has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.sharding.early_qkv_a import NAME as FOLDED
from kimi_k2.sharding.early_qkv_a import RESIDUAL as NEXT_RESIDUAL
from kimi_k2.sharding.early_router import HEADS, RESIDUAL

_NORMS = {
    "q_norm": "self_attn.q_a_layernorm", "kv_norm": "self_attn.kv_a_layernorm", "norm": "post_attention_layernorm",
}  # fmt: skip
# With a weight and, of FP8, a scale each.
_TILES = {
    "q_b": "self_attn.tiles.q_b", "w_uk": "self_attn.tiles.w_uk", "w_uv": "self_attn.tiles.w_uv",
    "o": "self_attn.tiles.o", "gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj",
    "shared_gate_up": "mlp.shared_experts.gate_up_proj", "shared_down": "mlp.shared_experts.down_proj",
}  # fmt: skip
_OTHERS = {
    "early_residual": RESIDUAL, "early_heads": HEADS, "next_residual": NEXT_RESIDUAL,
    "next_experts": f"mlp.experts.{FOLDED}.weight", "next_shared": f"mlp.shared_experts.{FOLDED}.weight",
}  # fmt: skip


def weights(held: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A MoE layer's weights by the fields of the kernel's `Layer`; what is missing there is None.

    Args:
        held: all that the layer holds, by name.
        dtype: the model's, of the norms; on a device they have it, and nothing is copied. Beside float32 FP8 weights
            become it too.
    """
    tensors = {field: held[f"{name}.weight"].to(dtype) for field, name in _NORMS.items()}
    tensors |= {field: held[name] for field, name in _OTHERS.items() if name in held}
    for field, own in _TILES.items():
        of_group = own.replace(".tiles.", ".tiles.group_")  # of all ranks that share a cache, in the place of its own
        name = of_group if f"{of_group}.weight" in held else own
        weight = held[f"{name}.weight"]  # the Tensor Engine takes float32 beside float32 alone
        tensors["o_proj" if field == "o" else field] = weight.to(dtype) if dtype == torch.float32 else weight
        if f"{name}.scale" in held:
            tensors[f"{field}_scales"] = held[f"{name}.scale"]
    for field in [field for field in tensors if field.startswith("shared_") or field == "next_shared"]:
        tensors[field] = tensors[field].squeeze(0)  # a stack of one
    if "gate_up_scales" not in tensors:  # of float weights ones
        ones = torch.ones(len(tensors["down"]), 3, tensors["gate_up"].shape[2], device=tensors["down"].device)
        tensors |= {"gate_up_scales": ones[:, :2], "down_scales": ones[:, 2:]}
    tensors["down_scales"] = tensors["down_scales"].squeeze(1)
    if "shared_down_scales" in tensors:
        tensors["shared_down_scales"] = tensors["shared_down_scales"].squeeze(0)
    return tensors | {"bias": held["mlp.router.e_score_correction_bias"].unsqueeze(0)}


def numbers(config: KimiK2Config) -> dict[str, Any]:
    """The kernels' arguments that the configuration gives."""
    return {
        "num_experts": config.n_routed_experts,
        "softmax_scale": config.softmax_scale,
        "routed_scaling_factor": config.routed_scaling_factor,
        "eps": config.rms_norm_eps,
        "latent_eps": config.latent_norm_eps,
    }


def rotation(cosines: Tensor, sines: Tensor) -> Tensor:
    """What the kernels take, float32 [2, rope, T], from [T, rope / 2] each: both once a value, sines signed."""
    both = (torch.stack(pair, dim=-1).flatten(1) for pair in ((cosines, cosines), (-sines, sines)))
    return torch.stack(tuple(both)).transpose(1, 2).contiguous()


def without_scalar(projected: Tensor, hidden: Tensor, eps: float) -> Tensor:
    """Down projections [.., N] of normed hidden [.., H] without the scalar of the norm, the kernel's: float32."""
    mean = hidden.to(torch.float32).square().mean(dim=-1, keepdim=True)
    return projected.to(torch.float32) * torch.sqrt(mean + eps)


def torch_tensor(array: Any) -> Tensor:
    """A kernel's result as a tensor; torch does not know ml_dtypes' bfloat16."""
    if isinstance(array, Tensor) or array.dtype.name != "bfloat16":
        return torch.as_tensor(array)
    return torch.as_tensor(array.view("uint16")).view(torch.bfloat16)


def emulated_fp8(tensor: Tensor) -> Any:
    """An e4m3fn tensor under Trainium's name for the same bits below 256 (`kimi_k2.quantization.neuron_e4m3`)."""
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor
    import ml_dtypes

    return tensor.detach().contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3)
