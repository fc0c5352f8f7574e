"""The MLP of dense layers on NxD's parallel layers."""

from __future__ import annotations

from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.nn import functional as F

from .config import KimiK2InferenceConfig


class KimiK2MLP(nn.Module):
    """SwiGLU MLP of the first, dense layers."""

    def __init__(self, config: KimiK2InferenceConfig) -> None:
        super().__init__()
        hidden, width, dtype = config.hf.hidden_size, config.hf.intermediate_size, config.neuron_config.torch_dtype
        column = {"bias": False, "gather_output": False, "dtype": dtype}
        self.sequence_parallel = config.neuron_config.sequence_parallel_enabled
        self.gate_proj = ColumnParallelLinear(hidden, width, **column)
        self.up_proj = ColumnParallelLinear(hidden, width, **column)
        self.down_proj = RowParallelLinear(
            width, hidden, bias=False, input_is_parallel=True, dtype=dtype,
            reduce_dtype=config.neuron_config.rpl_reduce_dtype,
            sequence_parallel_enabled=self.sequence_parallel, sequence_dimension=1,
        )  # fmt: skip

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H], both cut along S with sequence parallelism."""
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, 1)
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        return out
