"""Router logits, and router logits with the gate behind them in one launch, for few tokens on Hopper.

`torch.ops.kimi_k2.router_gemm` makes the logits of `kimi_k2.ops.experts.route` for bfloat16 tokens and weights (sums in
float32, over a fixed order for up to 64 tokens; cuBLAS with float32 output above). `torch.ops.kimi_k2.router_decode` is
`router_gemm` followed by `fused_gate`, up to 64 tokens. csrc/router_gemm.cuh says how the launch works.

One launch passes the logits between blocks while it runs; two launches overlap (the gate's begins while the GEMM's
ends) and give every token a block of its own, so `router_decode` makes two beyond `ONE_LAUNCH_TOKENS`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import is_hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import Structure, structure
from kimi_k2.kernels.common.workspace import marked
from kimi_k2.kernels.router.gate import (
    CHOICE,
    CHOSEN,
    LIMITS,
    VALID,
    GateArguments,
    gate_arguments,
    launch_gate,
    warps_a_block,
)

MAX_TOKENS = 64
MAX_FUSED_EXPERTS = 384
# Up to here one launch is faster than two (H200: 4.5 us against 5.4 for one token, 5.5 against 6.3 for 16).
ONE_LAUNCH_TOKENS = 16
_RouterArguments = structure("router/csrc/router_gemm.cuh", "RouterArgs")


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether `router_gemm` takes x [T, H] and weight [E, H]: bfloat16 on a Hopper GPU."""
    return x.is_cuda and router_gemm.fits(x=x, weight=weight) and is_hopper(x.device)


def supports_decode(x: Tensor, weight: Tensor, top_k: int, *, n_group: int = 1) -> bool:
    """Whether `router_decode` takes these arguments."""
    fits = x.shape[0] <= MAX_TOKENS and weight.shape[0] <= MAX_FUSED_EXPERTS and 0 < top_k <= 16
    return fits and n_group == 1 and supports(x, weight)


PRODUCT = "x bf16[T,H], weight bf16[E,H]"
SIZES = "H % 256 == 0; E % 32 == 0"


def absent_logits(device: torch.device) -> Tensor:
    """Scratch of the one launch on the current stream, every value marked as not yet written, as each launch leaves it.

    In a graph's capture the marks are written anew at the beginning of every replay.
    """
    return marked(MAX_TOKENS * MAX_FUSED_EXPERTS, device).view(torch.float32)


def all_resident(experts: int, sm_count: int) -> bool:
    """Whether all blocks of the one launch run at once, so that they may wait for each other.

    Eight blocks for 16 experts (32 beyond 16 tokens), two of them to an SM; a quarter of the room is left
    for clusters that do not fill a group of SMs.
    """
    return experts // 16 * 8 <= 1.5 * sm_count


def launch_router(x: Tensor, weight: Tensor, logits: Tensor, gate: Structure | None, **others: Any) -> None:
    """Launch the GEMM, with the gate if given; `others` are further fields of the arguments.

    Raises:
        KernelError: the launch failed, or there is no instance for the sizes.
    """
    plain = GateArguments(tokens=x.shape[0], experts=weight.shape[0], programmatic=1)
    arguments = _RouterArguments(
        gate=plain if gate is None else gate,
        x=x,
        weight=weight,
        logits=logits,
        hidden=x.shape[1],
        fused=gate is not None,
        **others,
    )
    launch("router/gate", "kimi_router", "the router", x.device, arguments)


@kernel_operation("router_gemm", f"{PRODUCT} -> logits f32[T,E]; {SIZES}")
def router_gemm(x: Tensor, weight: Tensor, *, logits: Tensor) -> Tensor | None:
    """x weight^T in float32; the same bits in every run."""
    if x.shape[0] > MAX_TOKENS:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    launch_router(x, weight, logits, None)
    return None


DECODE = f"{SIZES}; T <= {MAX_TOKENS}; E <= {MAX_FUSED_EXPERTS}; {LIMITS}"


@kernel_operation("router_decode", f"{PRODUCT}, {CHOICE}, {VALID}, inverse f32[T]? -> {CHOSEN}; {DECODE}")
def router_decode(
    x: Tensor,
    weight: Tensor,
    e_score_correction_bias: Tensor,
    top_k: int,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    num_valid: Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
    inverse: Tensor | None = None,
    *,
    indices: Tensor,
    weights: Tensor,
) -> None:
    """`router_gemm` and `fused_gate` in one operation.

    Args and returns: as those two, and `inverse`, times which logits are taken.
    """
    tokens, experts = x.shape[0], weight.shape[0]
    gate = gate_arguments(e_score_correction_bias, indices, weights, norm_topk_prob, routed_scaling_factor, num_valid)
    if tokens <= ONE_LAUNCH_TOKENS and all_resident(experts, gate.sm_count):
        launch_router(x, weight, absent_logits(x.device), gate, inverse=inverse)
        return
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    launch_router(x, weight, logits, None, inverse=inverse)
    gate.logits, gate.warps = logits.data_ptr(), warps_a_block(tokens)
    launch_gate(gate, x.device)
