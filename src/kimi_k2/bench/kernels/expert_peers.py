"""Other implementations of routed experts where vLLM is installed: its Triton kernels, Marlin, DeepGEMM's pipeline.

Each is called as vLLM calls it, with the launches that vLLM ships for the shape. DeepGEMM is the copy that vLLM brings,
or one of its own; its pipeline is quantization, scatter by expert, GEMM, SwiGLU with quantization, GEMM, weighted sums.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_k2.bench.kernels.expert_formats import HIDDEN, Operation, RandomExperts, checkpoint
from kimi_k2.bench.kernels.harness import without
from kimi_k2.kernels.experts.entries import fp8_tensors
from kimi_k2.kernels.experts.w4a16_layout import GROUP

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
QUANTIZATION = "vllm.model_executor.layers.quantization.utils"
PART = 32
# DeepGEMM's pipeline counts the bytes of its rows in 32 bits and ends in an illegal access beyond; an expert's rows are
# padded to a multiple of 128.
DEEP_GEMM_PAIRS = (2**31 - 1) // HIDDEN
PADDING = 127


@dataclass(frozen=True)
class Peer:
    """An implementation for some experts.

    Attributes:
        name: e.g. "vLLM Triton".
        call: the operation.
        least: tokens from which it is timed.
        most_pairs: token-expert pairs to which it is; None for any.
    """

    name: str
    call: Operation
    least: int = 1
    most_pairs: int | None = None

    def takes(self, tokens: int, top_k: int) -> bool:
        """Whether it is timed at so many tokens."""
        return tokens >= self.least and (self.most_pairs is None or tokens * top_k <= self.most_pairs)


def triton(experts: RandomExperts) -> Peer:
    """vLLM's fused MoE kernel over e4m3 blocks or BF16 weights."""
    fused_moe, config = _module(f"{FUSED_MOE}.fused_moe"), _module(f"{FUSED_MOE}.config")
    fp8 = experts.name == "FP8"
    first, second = experts.stored.gate_up.tensors, experts.stored.down.tensors
    gate_up, down = first["weight"], second["weight"]
    quantized = None
    if fp8:
        scales = {"w1_scale": first["weight_scale_inv"], "w2_scale": second["weight_scale_inv"]}
        quantized = config.fp8_w8a8_moe_quant_config(**scales, block_shape=[128, 128])

    def run(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return fused_moe.fused_experts(x, gate_up, down, weights, indices, quant_config=quantized)

    return Peer("vLLM Triton", run)


def deep_gemm(experts: RandomExperts) -> Peer:
    """The steps of vLLM's `DeepGemmExperts`, with float32 scales as the checkpoint has them."""
    ours, gemms = _module(f"{FUSED_MOE}.deep_gemm_utils"), _module("vllm.utils.deep_gemm")
    fp8 = _module(f"{QUANTIZATION}.fp8_utils")
    if not gemms.is_deep_gemm_supported():
        raise ImportError("DeepGEMM is not supported here")
    gate_up, gate_up_scale, down, down_scale = fp8_tensors(experts.stored)
    count, inter = experts.shape

    def run(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        values, scales = fp8.per_token_group_quant_fp8(x, 128, use_ue8m0=False)
        values, scales, numbers, places, aligned = ours.deepgemm_moe_permute(
            aq=values, aq_scale=scales, topk_ids=indices, local_num_experts=count, expert_map=None,
            expert_tokens_meta=None,
        )  # fmt: skip
        rows, out = values.shape[0], torch.empty_like(x)
        first = torch.empty(rows, 2 * inter, dtype=torch.bfloat16, device=x.device)
        second = torch.empty(rows, x.shape[1], dtype=torch.bfloat16, device=x.device)
        with gemms.mk_alignment_scope(aligned):
            gemms.m_grouped_fp8_gemm_nt_contiguous((values, scales), (gate_up, gate_up_scale), first, numbers)
            middle = fp8.silu_mul_per_token_group_quant_fp8_colmajor(input=first, use_ue8m0=False)
            gemms.m_grouped_fp8_gemm_nt_contiguous(middle, (down, down_scale), second, numbers)
        ours.deepgemm_unpermute_and_reduce(
            a=second, topk_ids=indices, topk_weights=weights, inv_perm=places, expert_map=None, output=out
        )
        return out

    return Peer("DeepGEMM pipeline", run, least=512, most_pairs=DEEP_GEMM_PAIRS - PADDING * count)


def marlin(experts: RandomExperts) -> Peer:
    """Marlin's W4A16 experts; the weights are put into its order first."""
    operations, utils = _module("vllm._custom_ops"), _module(f"{QUANTIZATION}.marlin_utils")
    moe, types = _module(f"{FUSED_MOE}.experts.marlin_moe"), _module("vllm.scalar_type")

    def ordered(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """[E, N, K/8] along the input and [E, N, K/32] to Marlin's tiles."""
        count, rows, words = packed.shape
        none = torch.empty(count, 0, dtype=torch.int32, device=packed.device)
        tiles = operations.gptq_marlin_moe_repack(packed.mT.contiguous(), none, words * 8, rows, 4)
        return tiles, utils.marlin_moe_permute_scales(scale.mT.contiguous(), words * 8, rows, GROUP)

    parts = []
    for begin in range(0, experts.shape[0], PART):
        packed, scale, down, down_scale = checkpoint(experts, range(begin, min(begin + PART, experts.shape[0])))
        parts.append((*ordered(packed, scale), *ordered(down, down_scale)))
    first, first_scale, second, second_scale = (torch.cat(each) for each in zip(*parts, strict=True))
    kind = types.scalar_types.uint4b8.id
    workspace = utils.marlin_make_workspace_new(first.device, 4)

    def run(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = torch.empty_like(x)
        moe.fused_marlin_moe(
            x, first, second, None, None, first_scale, second_scale, weights, indices, quant_type_id=kind,
            moe_sum=operations.moe_sum, workspace=workspace, output=out,
        )  # fmt: skip
        return out

    return Peer("Marlin", run)


def _module(name: str) -> Any:
    return importlib.import_module(name)


# By the experts' format.
PEERS: dict[str, tuple[Callable[[RandomExperts], Peer], ...]] = {
    "FP8": (triton, deep_gemm),
    "INT4": (marlin,),
    "BF16": (triton,),
}


def peers(experts: RandomExperts, say: Callable[[str], None]) -> Iterator[Peer]:
    """Each implementation that is installed for the experts' format; `say` takes a line of why another is not."""
    for make in PEERS.get(experts.name, ()):
        try:
            yield make(experts)
        except (ImportError, AttributeError, RuntimeError) as failure:
            say(without(make.__name__, failure))
