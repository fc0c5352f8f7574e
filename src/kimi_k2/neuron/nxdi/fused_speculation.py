"""NxDI's fused speculation with an Eagle3 head: drafting and verification in one graph.

A step drafts `speculation_length - 1` tokens with the head, gives them and the last token to the target at once, keeps
what the target says itself (greedily; or by rejection with NxDI's sampler), and has the head read what was verified.
Several tokens a line go through the target's own decode form, its kernels too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from neuronx_distributed_inference.models import model_base
from neuronx_distributed_inference.models.model_base import NeuronFusedSpecModel
from torch import Tensor, nn

from .config import KimiK2InferenceConfig


class Chosen(nn.Module):
    """In place of the draft's sampler: what the draft has chosen already, drafted with certainty."""

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Tokens [B, 1] and their probabilities."""
        return tokens, torch.ones(tokens.shape, device=tokens.device)


class KimiK2FusedSpecModel(NeuronFusedSpecModel):
    """NeuronFusedSpecModel, whose draft gives tokens also where the target samples, and which has a CPU mode."""

    def __init__(self, config: KimiK2InferenceConfig) -> None:
        super().__init__(config)
        self.draft_sampler = Chosen()
        if config.neuron_config.on_cpu and not self.greedy:
            model_base.rand_like = torch.rand_like  # upstream's is an XLA operation

    @property
    def kv_mgr(self) -> SimpleNamespace:
        """All that a step updates, in the order of its last outputs, where NxDI's CPU mode looks for caches."""
        caches = [*self.draft_model.kv_mgr.past_key_values, *self.target_model.kv_mgr.past_key_values]
        return SimpleNamespace(past_key_values=[*caches, self.hidden_state_rolling_buffer.hidden_states])

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """NxDI's; in CPU mode without the next step's inputs, which lie between tokens and caches."""
        outputs: list[Tensor] = super().forward(*args, **kwargs)
        return [outputs[0], *outputs[4:]] if self.neuron_config.on_cpu else outputs

    def bfloat16(self) -> KimiK2FusedSpecModel:
        """The cast of CPU mode, as NeuronKimiK2Model has it."""
        self.target_model.bfloat16()
        self.draft_model.bfloat16()
        self.hidden_state_rolling_buffer.bfloat16()
        return self
