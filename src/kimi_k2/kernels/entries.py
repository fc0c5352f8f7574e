"""The kernels' places in the table of operations (`ops.registry`, which imports this module on the first CUDA tensor).

Each entry has the arguments of the plain function that it stands for. The order of an operation's entries is the order
of preference; `before` says where a later one goes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention import attend_values as attend
from kimi_k2.kernels.attention import mla_decode, mla_prefill, value_rows
from kimi_k2.kernels.attention import query as query_kernel
from kimi_k2.kernels.common.hardware import is_hopper
from kimi_k2.kernels.experts import fp8 as moe_fp8
from kimi_k2.kernels.experts import fp8_decode as moe_decode
from kimi_k2.kernels.experts import w4a16 as moe_w4a16
from kimi_k2.kernels.experts.w4a16_layout import checkpoint_order, prepare_w4a16
from kimi_k2.kernels.linear import fused_linear
from kimi_k2.kernels.router import norm_route
from kimi_k2.kernels.router.gate import MAX_EXPERTS, MAX_TOP_K, fused_gate
from kimi_k2.kernels.router.router_gemm import MAX_TOKENS, router_decode, router_gemm
from kimi_k2.kernels.rowwise import decode as rope_cache
from kimi_k2.kernels.rowwise import prefill as rowwise
from kimi_k2.ops import experts as ops_experts
from kimi_k2.ops import linear as ops_linear
from kimi_k2.ops import mla as ops_mla
from kimi_k2.ops import mla_decode as ops_decode
from kimi_k2.ops import norm as ops_norm
from kimi_k2.ops import router as ops_router
from kimi_k2.ops.cache import store_entries
from kimi_k2.ops.experts import ExpertWeights
from kimi_k2.ops.rotary import apply_rotary_interleaved
from kimi_k2.ops.weights import Weight, dequantize_fp8_block

BLOCK = (128, 128)

# Row by row: norm, RoPE, cache, dequantization.
ops_norm.rms_norm.entry("triton", takes=rowwise.supports_rms_norm)(rowwise.rms_norm)
apply_rotary_interleaved.entry("triton", takes=rowwise.supports_apply_rotary_interleaved)(
    rowwise.apply_rotary_interleaved
)
store_entries.entry("triton", takes=rowwise.supports_store_entries)(rowwise.store_entries)
dequantize_fp8_block.entry("triton", takes=rowwise.supports_dequantize_fp8_block)(rowwise.dequantize_fp8_block)


@ops_norm.add_norm.entry("fused", takes=lambda x, delta, weight, eps: rope_cache.supports_sum(x))
def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rope_cache.add_norm`."""
    made: tuple[Tensor, Tensor] = rope_cache.add_norm(x, delta, weight, eps)
    return made


# Linears.
ops_linear.fp8_linear.entry("triton_decode", takes=fused_linear.supports_fp8_linear)(fused_linear.fp8_linear)


def _linear_fits(x: Tensor, weight: Weight) -> bool:
    """FP8 blocks or BF16, few BF16 tokens."""
    if weight.fp8_block is not None:
        stored = weight.tensors["weight"], weight.tensors["weight_scale_inv"]
        return fused_linear.supports_fp8_linear(x, *stored, weight.fp8_block)
    return weight.quantization is None and fused_linear.supports_bf16_linear(x, weight.tensors["weight"])


def _supports_project(x: Tensor, weight: Weight, norm_weight: Tensor | None = None, eps: float = 1e-6) -> bool:
    return _linear_fits(x, weight)


@ops_linear.project.entry("fused_linear", takes=_supports_project, joins={"fp8_linear": "triton_decode"})
def project(x: Tensor, weight: Weight, norm_weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """`fused_linear` with or without the norm."""
    tensors = weight.tensors
    out: Tensor = fused_linear.fused_linear(x, tensors["weight"], tensors.get("weight_scale_inv"), norm_weight, eps)
    return out


def _supports_add_project(x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor, eps: float) -> bool:
    return _linear_fits(x, weight)


@ops_linear.add_project.entry(
    "fused_linear", takes=_supports_add_project, joins={"add_norm": "fused", "project": "fused_linear"}
)
def add_project(
    x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`fused_add_linear`; `fused_linear` where there is nothing to add."""
    stored = weight.tensors["weight"], weight.tensors.get("weight_scale_inv")
    if delta is None:
        return fused_linear.fused_linear(x, *stored, norm_weight, eps), x
    made: tuple[Tensor, Tensor] = fused_linear.fused_add_linear(x, delta, *stored, norm_weight, eps)
    return made


# Attention.
ops_mla.mla_naive_attention.entry("mla_prefill", takes=mla_prefill.supports_mla_naive_attention)(
    mla_prefill.mla_naive_attention
)


def _supports_absorbed(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, positions: Tensor, softmax_scale: float
) -> bool:
    """One new token a sequence, in BF16, of sizes that `mla_decode` takes; the cache in one piece."""
    if q_latent.shape[1] != 1 or not cache.is_contiguous() or not is_hopper(cache.device):
        return False
    query = torch.cat((q_latent, q_rope), dim=-1).squeeze(1)
    return mla_decode.supports(query, cache, positions.squeeze(1).int())


@ops_mla.mla_absorbed_attention.entry("mla_decode", takes=_supports_absorbed)
def mla_absorbed_attention(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, positions: Tensor, softmax_scale: float
) -> Tensor:
    """`mla_decode`; padding attends to slot 0, as in the plain function."""
    query = torch.cat((q_latent, q_rope), dim=-1).squeeze(1)
    seq_lens = (positions.squeeze(1).clamp(min=0) + 1).int()
    return mla_decode.mla_decode(query, cache, seq_lens, softmax_scale).unsqueeze(1)


def _supports_mla_decode(query: Tensor, cache: Tensor, seq_lens: Tensor, softmax_scale: float, rank: int) -> bool:
    return rank == mla_decode.LATENT and mla_decode.supports(query, cache, seq_lens)


@ops_decode.mla_decode.entry("mla_decode", takes=_supports_mla_decode)
def decode_attention(query: Tensor, cache: Tensor, seq_lens: Tensor, softmax_scale: float, rank: int) -> Tensor:
    """`mla_decode`, in CUDA C++ where nvcc is found, in Triton elsewhere."""
    out: Tensor = mla_decode.mla_decode(query, cache, seq_lens, softmax_scale)
    return out


ops_decode.value_rows.entry("cuda", takes=value_rows.supports)(value_rows.value_rows)


def _supports_attend_values(query: Tensor, cache: Tensor, seq_lens: Tensor, w_uv: Tensor, softmax_scale: float) -> bool:
    return attend.supports(query, cache, seq_lens, w_uv)


ops_decode.attend_values.entry(
    "cuda", takes=_supports_attend_values, joins={"mla_decode": "mla_decode", "value_rows": "cuda"}
)(attend.attend_values)


def _supports_absorb(
    q: Tensor, kv_a: Tensor, norm_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, w_uk: Tensor,
    cache: Tensor, eps: float,
) -> bool:  # fmt: skip
    return rope_cache.supports(q, w_uk, cache)


ops_decode.absorb_and_store.entry("triton", takes=_supports_absorb)(rope_cache.absorb_and_store)


def _supports_query(
    qkv_a: Tensor, q_norm: Tensor, q_b: Weight, kv_norm: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
    w_uk: Tensor, cache: Tensor, q_eps: float, kv_eps: float,
) -> bool:  # fmt: skip
    return q_b.fp8_block == BLOCK and query_kernel.supports(qkv_a, q_b.tensors["weight"], w_uk, cache)


@ops_decode.query_and_entry.entry(
    "cuda", takes=_supports_query, joins={"project": "fused_linear", "absorb_and_store": "triton"}
)
def query_and_entry(
    qkv_a: Tensor, q_norm: Tensor, q_b: Weight, kv_norm: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
    w_uk: Tensor, cache: Tensor, q_eps: float, kv_eps: float,
) -> Tensor:  # fmt: skip
    """`query_and_entry` of an FP8 q_b."""
    stored = q_b.tensors["weight"], q_b.tensors["weight_scale_inv"]
    out: Tensor = query_kernel.query_and_entry(
        qkv_a, q_norm, *stored, kv_norm, cos, sin, positions, w_uk, cache, q_eps, kv_eps
    )
    return out


# Router.
def _supports_route(
    x: Tensor,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    *,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
) -> bool:
    """BF16 tokens without expert groups; up to 64 of 256 or 384 experts, more of up to 512."""
    experts, hidden = weight.shape
    fits = experts in (256, 384) if x.shape[0] <= MAX_TOKENS else experts % 32 == 0 and experts <= MAX_EXPERTS
    return (
        is_hopper(x.device)
        and x.dtype == weight.dtype == torch.bfloat16
        and e_score_correction_bias.dtype == torch.float32
        and x.shape[0] > 0
        and fits
        and hidden % 256 == 0
        and n_group == 1
        and 0 < top_k <= MAX_TOP_K
    )


@ops_router.route.entry("router", takes=_supports_route)
def route(
    x: Tensor,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    *,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`router_decode`, for more tokens `router_gemm` and `fused_gate`."""
    how = e_score_correction_bias, top_k, norm_topk_prob, routed_scaling_factor
    chosen: tuple[Tensor, Tensor]
    if x.shape[0] <= MAX_TOKENS:
        chosen = router_decode(x.contiguous(), weight, *how)
    else:
        chosen = fused_gate(router_gemm(x.contiguous(), weight), *how)
    return chosen


def _supports_add_norm_route(
    x: Tensor,
    delta: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    *,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
) -> bool:
    return norm_route.supports(x, weight, top_k, n_group=n_group)


@ops_router.add_norm_route.entry("cuda", takes=_supports_add_norm_route, joins={"add_norm": "fused", "route": "router"})
def add_norm_route(
    x: Tensor,
    delta: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    *,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`norm_route.add_norm_route`."""
    how = e_score_correction_bias, top_k, norm_topk_prob, routed_scaling_factor
    made: tuple[Tensor, Tensor, Tensor, Tensor] = norm_route.add_norm_route(x, delta, norm_weight, eps, weight, *how)
    return made


# Experts.
def _fp8_experts(experts: ExpertWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate_up, down = experts.gate_up.tensors, experts.down.tensors
    return gate_up["weight"], gate_up["weight_scale_inv"], down["weight"], down["weight_scale_inv"]


def _is_fp8(experts: ExpertWeights) -> bool:
    """Blocks of 128x128, whole ones."""
    if experts.gate_up.fp8_block != BLOCK or experts.down.fp8_block != BLOCK:
        return False
    _, _, down, scale = _fp8_experts(experts)
    count, hidden, inter = down.shape
    return tuple(scale.shape) == (count, hidden // BLOCK[0], inter // BLOCK[1])


def _supports_moe_decode(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> bool:
    """FP8 blocks of 128x128 kept as stored, BF16 tokens, few of them."""
    if x.dtype != torch.bfloat16 or not _is_fp8(experts):
        return False
    _, hidden, inter = experts.down.tensors["weight"].shape
    return moe_decode.supports(x.shape[0], topk_indices.shape[1], hidden, inter, x.device)


@ops_experts.routed_experts.entry("moe_decode", takes=_supports_moe_decode)
def routed_experts_decode(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """`moe_decode` over the experts that this rank holds."""
    routing = topk_indices.contiguous(), topk_weights.float().contiguous()
    out: Tensor = moe_decode.moe_decode(x.contiguous(), *_fp8_experts(experts), *routing, experts.expert_map)
    return out


def _supports_moe_fp8(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> bool:
    """FP8 blocks of 128x128 kept as stored, BF16 tokens."""
    if x.dtype != torch.bfloat16 or not is_hopper(x.device) or not _is_fp8(experts):
        return False
    count, hidden, inter = experts.down.tensors["weight"].shape
    return (
        hidden % moe_fp8.SLAB == 0
        and inter % moe_fp8.BLOCK == 0
        and max(hidden, inter) <= 64 * moe_fp8.BLOCK
        and count <= moe_fp8.MAX_EXPERTS
    )


@ops_experts.routed_experts.entry("moe_fp8", takes=_supports_moe_fp8)
def routed_experts_fp8(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """`moe_fp8` over the experts that this rank holds."""
    routing = topk_indices.contiguous(), topk_weights.float().contiguous()
    out: Tensor = moe_fp8.moe_fp8(x.contiguous(), *_fp8_experts(experts), *routing, experts.expert_map)
    return out


@dataclass(frozen=True)
class W4A16Order:
    """The order in memory that `moe_w4a16` wants (`moe_w4a16_layout`), of gate_up_proj or of down_proj."""

    gate_up: bool

    def restore(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """One expert's projection in the checkpoint's order."""
        return checkpoint_order(tensors, self.gate_up)


W4A16_ORDERS = W4A16Order(True), W4A16Order(False)


def _int4_experts(experts: ExpertWeights) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    gate_up, down = experts.gate_up.tensors, experts.down.tensors
    second = down["weight_packed"] if "weight_packed" in down else down["weight"]
    return gate_up["weight_packed"], gate_up["weight_scale"], second, down.get("weight_scale")


def _is_int4(experts: ExpertWeights, dtype: torch.dtype) -> bool:
    """INT4 kept as stored, groups of 32 (the second projection may be BF16), for BF16 tokens."""
    scheme: Any = experts.gate_up.quantization
    if "weight_packed" not in experts.gate_up.tensors or dtype != torch.bfloat16:
        return False
    packed = experts.down.tensors.get("weight_packed")
    how = scheme.num_bits, scheme.group_size, scheme.strategy, scheme.type
    if moe_w4a16.expert_mode(*how, down_proj_quantized=packed is not None) is None:
        return False
    down = experts.down.tensors["weight"] if packed is None else packed
    if packed is None and down.dtype != torch.bfloat16:
        return False
    count, hidden, columns = down.shape
    return moe_w4a16.supports(hidden, columns if packed is None else columns * 8, count, down.device)


def prepare_w4a16_experts(experts: ExpertWeights, dtype: torch.dtype) -> ExpertWeights | None:
    """Put the experts into `moe_w4a16`'s order, in place, if it would serve tokens of `dtype`; None if not.

    Raises:
        KernelError: a CUDA graph is being captured.
    """
    if experts.gate_up.order is not None or not _is_int4(experts, dtype):
        return None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise KernelError("INT4 experts must be prepared before a graph is captured: their order changes")
    prepare_w4a16(*_int4_experts(experts), in_place=True)
    gate_up, down = (replace(w, order=o) for w, o in zip((experts.gate_up, experts.down), W4A16_ORDERS, strict=True))
    return replace(experts, gate_up=gate_up, down=down)


def supports_moe_w4a16(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> bool:
    """What `prepare_w4a16_experts` has put into order, BF16 tokens, up to 16 experts a token."""
    prepared = (experts.gate_up.order, experts.down.order) == W4A16_ORDERS
    return prepared and topk_indices.shape[1] <= 16 and _is_int4(experts, x.dtype)


@ops_experts.routed_experts.entry("moe_w4a16", takes=supports_moe_w4a16, prepare=prepare_w4a16_experts)
def routed_experts_w4a16(x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
    """`moe_w4a16` over the experts that this rank holds."""
    routing = topk_indices.contiguous(), topk_weights.float().contiguous()
    out: Tensor = moe_w4a16.moe_w4a16(x.contiguous(), *_int4_experts(experts), *routing, experts.expert_map)
    return out


def _supports_joined(
    x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor, shared_gate_up: Weight,
    shared_down: Weight,
) -> bool:  # fmt: skip
    """What `moe_decode` takes, and a shared expert of the routed ones' width and format."""
    if not _supports_moe_decode(x, experts, topk_indices, topk_weights):
        return False
    fp8 = shared_gate_up.fp8_block == shared_down.fp8_block == BLOCK
    return fp8 and shared_down.tensors["weight"].shape == experts.down.tensors["weight"].shape[1:]


@ops_experts.routed_experts_with_shared.entry(
    "moe_decode", takes=_supports_joined, joins={"routed_experts": "moe_decode"}
)
def experts_with_shared(
    x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor, shared_gate_up: Weight,
    shared_down: Weight,
) -> Tensor:  # fmt: skip
    """`moe_decode`, with the shared expert as one more of the routed ones."""
    routing = topk_indices.contiguous(), topk_weights.float().contiguous()
    shared = [
        weight.tensors[name] for weight in (shared_gate_up, shared_down) for name in ("weight", "weight_scale_inv")
    ]
    out: Tensor = moe_decode.moe_decode(x.contiguous(), *_fp8_experts(experts), *routing, experts.expert_map, *shared)
    return out


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


@ops_experts.routed_experts_with_shared.entry("side_stream", takes=lambda x, *_: x.is_cuda)
def experts_beside_shared(
    x: Tensor, experts: ExpertWeights, topk_indices: Tensor, topk_weights: Tensor, shared_gate_up: Weight,
    shared_down: Weight,
) -> Tensor:  # fmt: skip
    """The shared expert on a second stream: it fills what routing leaves idle. Fork and join become a graph's edges."""
    main, side = torch.cuda.current_stream(x.device), _side_stream(x.device.index)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        shared = ops_experts.swiglu(x, shared_gate_up, shared_down)
    routed = ops_experts.routed_experts(x, experts, topk_indices, topk_weights)
    main.wait_stream(side)
    return routed + shared
