"""W_UV after MLA attention at decode: `torch.ops.kimi_k2.value_rows` for a few tokens, one batched GEMM for more."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation

MAX_TOKENS = 8  # beyond, a batched GEMM of cuBLAS is faster


@kernel_operation("value_rows", "latent bf16[B,H,512], w_uv bf16[H,V,512] -> out bf16[B,H*V]")
def value_rows(latent: Tensor, w_uv: Tensor, *, out: Tensor) -> None:
    """out[b, h, v] = w_uv[h, v, :] . latent[b, h, :], attention's sums of latents, summed in float32."""
    sizes = *latent.shape[:2], w_uv.shape[1]
    launch("attention/value_rows", "kimi_value_rows", "value_rows", latent.device, latent, w_uv, out, *sizes)


def supports_batched(latent: Tensor, w_uv: Tensor) -> bool:
    """Any number of tokens in a dtype that cuBLAS multiplies, nothing to differentiate."""
    differentiated = torch.is_grad_enabled() and (latent.requires_grad or w_uv.requires_grad)
    return latent.is_cuda and latent.dtype == w_uv.dtype != torch.float32 and not differentiated


def batched_value_rows(latent: Tensor, w_uv: Tensor) -> Tensor:
    """`value_rows` by cuBLAS, which writes each head's columns where they belong; plainly, a copy puts them there.

    Args:
        latent: [B, H, rank].
        w_uv: [H, V, rank] of the same dtype.

    Returns:
        [B, H * V].
    """
    out = latent.new_empty(len(latent), *w_uv.shape[:2])
    torch.bmm(latent.transpose(0, 1), w_uv.mT, out=out.transpose(0, 1))
    return out.flatten(1)
