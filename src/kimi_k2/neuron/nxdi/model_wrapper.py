"""The hand-written ModelWrapper for prefix caching, adapters and captured tensors, and in CPU mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from neuronx_distributed_inference.models.model_wrapper import CONTEXT_ENCODING_MODEL_TAG, ModelWrapper

from kimi_k2.contrib_model import model_wrapper as base

from .cpu_mode import states


class KimiK2ModelWrapper(base.KimiK2ModelWrapper):
    """ModelWrapper whose rows may come in any order and whose prompts may have a single token."""

    def row_order(self, lines: torch.Tensor) -> torch.Tensor | None:
        """The base's; with block tables a sequence has no line."""
        return None if self.is_prefix_caching else super().row_order(lines)

    def reordered(self, outputs: Sequence[Any], back: torch.Tensor) -> list[Any]:
        """In the order of the call; in CPU mode states come last."""
        first = len(outputs) if self.is_neuron() else len(outputs) - len(states(self.model))
        return [*self.rows(outputs[:first], back), *outputs[first:]]

    def pad_inputs(self, *args: Any, pad_type: str = "first_fit") -> tuple[Any, ...]:
        """The base's; with block tables the mask is a prefix's, and `prefill.of_one_token` marks a single token."""
        if not self.is_prefix_caching:
            return super().pad_inputs(*args, pad_type=pad_type)
        padded: tuple[Any, ...] = tuple(ModelWrapper.pad_inputs(self, *args, pad_type=pad_type))
        if self.tag != CONTEXT_ENCODING_MODEL_TAG:
            return padded
        return (*padded[:2], padded[2] * (args[2] > 0).any(dim=1, keepdim=True), *padded[3:])

    def _forward_with_pad(self, *args: Any) -> Any:
        # With block tables sequences lie in the batch as they come. On a device NxDI takes the first rows of the
        # output; in CPU mode it takes those of the sequences' numbers.
        if self.is_prefix_caching and not self.is_neuron():
            args = (*args[:3], torch.arange(args[3].shape[0], dtype=args[3].dtype), *args[4:])
        return super()._forward_with_pad(*args)
