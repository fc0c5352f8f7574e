"""Small layers: float32 sums, RMSNorm, the SwiGLU MLP of dense layers and of the shared expert."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.mappings import gather_from_sequence_parallel_region
from neuronx_distributed.utils import cpu_mode
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

Dims = tuple[list[int], list[int]]


def make_rms_norm(size: int, eps: float) -> nn.Module:
    """RMSNorm: the SDK's fused operator, which only the Neuron compiler knows; on a CPU transformers'."""
    return LlamaRMSNorm(size, eps) if cpu_mode() else CustomRMSNorm(size, eps)


def dot_float32(left: Tensor, right: Tensor, contracting: Dims, batch: Dims = ([], [])) -> Tensor:
    """XLA's dot_general with a float32 result, whatever the operands' dtype.

    The matrix engine takes BF16 and sums in float32. A BF16 result would round the sums, and operands widened to
    float32 run at a quarter of the speed; elsewhere than on XLA they are widened, which gives the same numbers.

    Args:
        left, right: operands of one dtype.
        contracting, batch: dimensions of `left` and of `right` that are summed over, and that are paired.

    Returns:
        float32 [paired dimensions, left's others, right's others].
    """
    if left.device.type == "xla":
        import torch_xla

        dims = (contracting, batch)
        return torch_xla._XLAC._xla_dot_general(left, right, dims, preferred_element_type=torch.float32)
    names = [list("abcdefgh"[: left.dim()]), list("ijklmnop"[: right.dim()])]
    for left_dim, right_dim in [*zip(*batch, strict=True), *zip(*contracting, strict=True)]:
        names[1][right_dim] = names[0][left_dim]
    paired = [names[0][dim] for dim in batch[0]]
    summed = [names[0][dim] for dim in contracting[0]]
    free = [name for name in names[0] + names[1] if name not in paired + summed]
    equation = f"{''.join(names[0])},{''.join(names[1])}->{''.join(paired + free)}"
    return torch.einsum(equation, left.to(torch.float32), right.to(torch.float32))


class KimiK2MLP(nn.Module):
    """SwiGLU MLP over all ranks.

    Args:
        width: columns of all ranks.
        reduce: sum the ranks' parts; without, the input has all tokens and the output is this rank's part of the sum.
    """

    def __init__(self, config: Any, width: int, *, reduce: bool = True) -> None:
        super().__init__()
        neuron = config.neuron_config
        column = {"bias": False, "gather_output": False, "dtype": neuron.torch_dtype}
        self.sequence_parallel = reduce and neuron.sequence_parallel_enabled
        self.gate_proj = ColumnParallelLinear(config.hidden_size, width, **column)
        self.up_proj = ColumnParallelLinear(config.hidden_size, width, **column)
        self.down_proj = RowParallelLinear(
            width, config.hidden_size, bias=False, input_is_parallel=True, dtype=neuron.torch_dtype,
            reduce_output=reduce, reduce_dtype=neuron.rpl_reduce_dtype,
            sequence_parallel_enabled=self.sequence_parallel, sequence_dimension=1,
        )  # fmt: skip

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H], both cut along S with sequence parallelism."""
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, 1)
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
