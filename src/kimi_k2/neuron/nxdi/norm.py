"""RMSNorm: the SDK's fused operator on Neuron, the plain one on a CPU."""

from __future__ import annotations

from neuronx_distributed.utils import cpu_mode
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
from torch import nn

from kimi_k2.model.linear import RMSNorm


def make_rms_norm(size: int, eps: float) -> nn.Module:
    """RMSNorm over `size` values. CustomRMSNorm lowers to a custom call that only the Neuron compiler knows.

    The weight is a float32 parameter until NxDI casts the model.
    """
    return RMSNorm(size, eps) if cpu_mode() else CustomRMSNorm(size, eps)
