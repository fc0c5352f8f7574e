"""FP8 experts for a few tokens on Hopper: `torch.ops.kimi_k2.moe_decode`.

Replaces `ops.experts.routed_experts` (and the shared expert beside it, if its width is the routed ones') where
hardly any expert is chosen twice: every token-expert pair is a GEMM of its own, bound by reading the weights once.
Unlike `moe_fp8` it does not quantize activations: tokens are bfloat16, the intermediate and all sums float32.
csrc/fp8_decode.cu says how its two launches work. In batch-invariant mode it has `parts`, and the bits that many tokens
have by other operations: csrc/fp8_few.cu. Capture-safe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import runs_cuda
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import structure
from kimi_k2.kernels.experts.fp8 import BLOCK, BLOCKS, LIMITS
from kimi_k2.kernels.experts.launch import ROUTING, fill

# Beyond, `moe_fp8` is faster: it reads an expert that several tokens chose once (H200, TP8, 8 tokens: 85.7 us against
# 99.4; TP4, four: 84.2 against 96.5, 35.7 against 91.8 where all go to the same experts).
MAX_TOKENS = 4
MAX_ROWS = 8192  # of all pairs' intermediates, from two tokens on
MAX_SLOTS = 17
# With `parts`: slots, blocks of 128 values of a token's intermediate, widths of an expert's.
MOST_SLOTS, MOST_BLOCKS, WIDTHS = 10, 48, (128, 256, 512)
# What a token's intermediate may take of an SM's shared memory.
SHARED_BYTES = 220_000
HIDDEN = (1024, 7168)
Arguments = structure("experts/csrc/expert_arguments.cuh", "ExpertArguments")


def supports(tokens: int, top_k: int, hidden: int, inter: int, device: torch.device) -> bool:
    """Whether `moe_decode` is the operation for these sizes on this device (compute capability 9.0, nvcc)."""
    return (
        runs_cuda(device)
        and 0 < tokens <= MAX_TOKENS
        and (tokens == 1 or tokens * top_k * inter <= MAX_ROWS)
        and top_k < MAX_SLOTS
        and hidden in HIDDEN
        and inter % BLOCK == 0
        and (top_k + 1) * inter * 4 <= SHARED_BYTES
    )


SHARED = (
    "shared_gate_up e4m3[2*I,H]?, shared_gate_up_scale_inv f32[2*I/128,H/128]?, shared_down e4m3[H,I]?,"
    " shared_down_scale_inv f32[H/128,I/128]?"
)
TOGETHER = "(shared_gate_up is None) == (shared_gate_up_scale_inv is None) == (shared_down is None)"


@kernel_operation(
    "moe_decode",
    f"x bf16[T,H], {BLOCKS}, {ROUTING}, {SHARED} -> out bf16[T,H]; {LIMITS}; {TOGETHER}"
    f" == (shared_down_scale_inv is None); parts is not None or H in {HIDDEN} and k < {MAX_SLOTS};"
    f" parts is None or len(parts) == 3 and I in {WIDTHS} and T <= {MAX_TOKENS} and 2 <= k;"
    f" parts is None or k + (shared_gate_up is not None) <= min({MOST_SLOTS}, {MOST_BLOCKS * BLOCK} // I)",
)
def moe_decode(
    x: Tensor,
    gate_up_proj: Tensor,
    gate_up_proj_scale_inv: Tensor,
    down_proj: Tensor,
    down_proj_scale_inv: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale_inv: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale_inv: Tensor | None = None,
    parts: list[int] | None = None,
    *,
    out: Tensor,
) -> None:
    """Sum over each token's chosen experts of weight * down(silu(gate(x)) * up(x)), and the shared expert's.

    Args:
        x .. expert_map: as `moe_fp8` takes them; H 1024 or 7168, k up to 16.
        shared_gate_up: gate rows first, of an expert that every token passes; its tensors are all there or all None.
        parts: None, or for T up to 4, 2 <= k and I 128, 256 or 512 the parts of the columns that are summed apart,
            `splits1` of `moe_fp8` and `cluster` of the shared expert's two launches of `block_gemm`: the bits are those
            of `moe_fp8`, unfused with `splits2` 1, plus those of `block_gemm` in two terms.
    """
    shared = (shared_gate_up, shared_gate_up_scale_inv, shared_down, shared_down_scale_inv)
    weights = (gate_up_proj, gate_up_proj_scale_inv, down_proj, down_proj_scale_inv)
    tokens, top_k, _, _, inter = shape = (*topk_indices.shape, *down_proj.shape)
    slots = top_k + (shared_gate_up is not None)
    intermediate = torch.empty(tokens * slots * inter, dtype=torch.float32, device=x.device)
    tensors = (x, topk_indices, topk_weights, expert_map, *weights, *shared, intermediate, out)
    arguments = fill(Arguments, shape, topk_indices, expert_map, *tensors)
    if parts is None:
        launch("experts/fp8_decode", "kimi_experts_decode", "moe_decode", x.device, arguments)
    else:
        arguments.up_parts, arguments.shared_up_parts, arguments.shared_down_parts = parts
        launch("experts/fp8_few", "kimi_experts_few", "moe_decode", x.device, arguments)
