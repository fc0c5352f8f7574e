"""Modules of one weight: Linears, stored in any format under the checkpoint's own names, RMSNorm and the embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k2.checkpoint.names import modules
from kimi_k2.config import KimiK2Config
from kimi_k2.ops.embedding import embedding
from kimi_k2.ops.linear import Weight, dequantize, linear, rms_norm
from kimi_k2.quantization.stored import format_of


class Linear(nn.Module):
    """y = x W^T with W [rows, columns], no bias.

    Args:
        module: name in the checkpoint (decides whether the configuration quantizes it).
        keep_quantized: hold the stored form and dequantize at each call; otherwise hold W in `dtype`.
    """

    weight: Tensor
    weight_scale_inv: Tensor

    def __init__(
        self,
        config: KimiK2Config,
        module: str,
        rows: int,
        columns: int,
        *,
        dtype: torch.dtype,
        keep_quantized: bool = False,
    ) -> None:
        super().__init__()
        self.quantization = format_of(config.quantization, module)
        specs = {spec.name.rpartition(".")[2]: spec for spec in self.quantization.held(module, rows, columns)}
        self.suffixes = tuple(specs)
        self.quantized = keep_quantized and self.quantization.method is not None
        if self.quantized:
            for suffix, spec in specs.items():
                self.register_buffer(suffix, torch.empty(spec.shape, dtype=spec.dtype))
        else:
            self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)

    def load(self, stored: dict[str, Tensor]) -> None:
        """Take the stored tensors (by suffix) of this Linear, dequantizing unless the stored form is kept."""
        if self.quantized:
            for suffix, tensor in self.quantization.hold(stored).items():
                getattr(self, suffix).copy_(tensor)
        else:
            self.weight.copy_(self.quantization.dequantize(stored, self.weight.dtype))

    @property
    def rows(self) -> int:
        """Of the weight."""
        return len(getattr(self, self.suffixes[0] if self.quantized else "weight"))

    def stored(self) -> Weight:
        """The weight as it is held; its tensors are this module's own."""
        if not self.quantized:
            return Weight({"weight": self.weight})
        return Weight({suffix: getattr(self, suffix) for suffix in self.suffixes}, self.quantization.held_as)

    def hold(self, tensors: dict[str, Tensor]) -> None:
        """Hold these tensors, by suffix, instead of those that it has."""
        for suffix, tensor in tensors.items():
            parameter = suffix in self._parameters
            setattr(self, suffix, nn.Parameter(tensor, requires_grad=False) if parameter else tensor)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [rows, columns] in `dtype`."""
        return dequantize(self.stored(), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., columns] to [..., rows], dtype kept."""
        return linear(x, self.stored())


def add_modules(
    owner: nn.Module, config: KimiK2Config, layer: int, part: str, *, dtype: torch.dtype, keep_quantized: bool = False
) -> None:
    """Give `owner` the Linears, and norms of latents, that a checkpoint's layer has under `part`, by their names."""
    for module, (rows, *columns) in modules(config, layer):
        parent, _, name = module.rpartition(".")
        if parent != part:
            continue
        if not columns:
            owner.add_module(name, RMSNorm(rows, config.latent_norm_eps, dtype=dtype))
            continue
        full = f"model.layers.{layer}.{module}"
        owner.add_module(name, Linear(config, full, rows, columns[0], dtype=dtype, keep_quantized=keep_quantized))


class Embedding(nn.Module):
    """`ops.embedding.embedding` with its weight [V, H]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [B, S] to [B, S, H]."""
        return embedding(input_ids, self.weight)


class RMSNorm(nn.Module):
    """`ops.linear.rms_norm` with its weight."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size], dtype kept."""
        return rms_norm(x, self.weight, self.eps)
