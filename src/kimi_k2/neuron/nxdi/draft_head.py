"""An Eagle3 head on NxD's parallel layers, as the draft model of NxDI's fused speculation.

The mathematics is that of `kimi_k2.drafts.head`, in both published forms. NxDI has such a draft for Llama alone, and
none with a vocabulary of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from torch import Tensor, nn

from kimi_k2.contrib_model.attention import masked
from kimi_k2.contrib_model.layers import dot_float32, make_rms_norm
from kimi_k2.contrib_model.modeling_kimi_k2 import KimiK2DecoderLayer
from kimi_k2.drafts.head import rotate_halves
from kimi_k2.plan.nxdi import AUX_LAYERS

from .attention import KimiK2Attention
from .config import KimiK2InferenceConfig
from .draft_config import KimiK2DraftConfig
from .kv_cache import LatentKVCacheManager
from .modeling_kimi_k2 import NeuronKimiK2Model


class LatentHeadAttention(KimiK2Attention):
    """The MLA form: the target's attention, whose input is twice as wide as its output."""

    def __init__(self, config: KimiK2DraftConfig) -> None:
        self.norm_eps = config.draft.rms_norm_eps
        super().__init__(config)

    def make_projections(self) -> None:
        """The base's, but for the input's width."""
        super().make_projections()
        hf, dtype = self.config.hf, self.config.neuron_config.torch_dtype
        self.qkv_a_proj = ColumnParallelLinear(
            2 * hf.hidden_size, hf.qkv_a_dim, bias=False, gather_output=True, dtype=dtype
        )


class LlamaHeadAttention(nn.Module):
    """The Llama form: grouped queries, rotated by halves; a rank has its heads of the cache."""

    rotation: Any = KimiK2Attention.rotation

    def __init__(self, config: KimiK2DraftConfig) -> None:
        super().__init__()
        draft, neuron = config.draft, config.neuron_config
        heads, groups, self.width = draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim
        self.heads, self.groups = heads // neuron.tp_degree, groups // neuron.tp_degree
        column = {"bias": False, "gather_output": False, "dtype": neuron.torch_dtype}
        for name, rows in (("q_proj", heads), ("k_proj", groups), ("v_proj", groups)):
            setattr(self, name, ColumnParallelLinear(2 * draft.hidden_size, rows * self.width, **column))
        self.o_proj = RowParallelLinear(
            heads * self.width, draft.hidden_size, bias=False, input_is_parallel=True, dtype=neuron.torch_dtype,
            reduce_dtype=neuron.rpl_reduce_dtype,
        )  # fmt: skip
        self.inv_freq, self.rotary_multiplier = config.rotary()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_value: tuple[Tensor, Tensor] | None = None,
        active_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
        """[B, S, 2 H] to [B, S, H]; arguments and results as KimiK2Attention's, entries [B, groups, S, head_dim]."""
        rotation = self.rotation(position_ids, hidden_states.dtype)

        def heads(name: str, count: int) -> Tensor:
            projected: Tensor = getattr(self, name)(hidden_states)
            return projected.unflatten(2, (count, self.width))

        query = rotate_halves(heads("q_proj", self.heads), *rotation).transpose(1, 2)
        query = query.unflatten(1, (self.groups, -1)).flatten(2, 3)  # a group's heads lie one behind another
        key = rotate_halves(heads("k_proj", self.groups), *rotation).transpose(1, 2)
        value = heads("v_proj", self.groups).transpose(1, 2)
        present = self._scores(query, key, attention_mask if past_key_value is None else active_mask)
        if past_key_value is None:
            summed = self._summed(present.softmax(dim=-1), value)
        else:
            keys, values = past_key_value
            prior = self._scores(query, keys, attention_mask)
            weights = torch.cat((prior, present), dim=-1).softmax(dim=-1)
            past = prior.shape[-1]
            summed = self._summed(weights[..., :past], values) + self._summed(weights[..., past:], value)
        batch, tokens = position_ids.shape
        values = summed.to(hidden_states.dtype).view(batch, self.heads, tokens, self.width).transpose(1, 2)
        return self.o_proj(values.flatten(2)), (key, value), *rotation

    def _scores(self, query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """Masked scores float32 [B, groups, heads of one x S, slots]."""
        scores = dot_float32(query, keys, ([3], [3]), ([0, 1], [0, 1])) * self.width**-0.5
        if mask is None:
            return scores
        return masked(scores.unflatten(2, (self.heads // self.groups, -1)), mask.unsqueeze(2)).flatten(2, 3)

    @staticmethod
    def _summed(weights: Tensor, values: Tensor) -> Tensor:
        return dot_float32(weights.to(values.dtype), values, ([3], [2]), ([0, 1], [0, 1]))


class KimiK2DraftLayer(KimiK2DecoderLayer):
    """The head's layer, dense: it reads the token's embedding and a hidden state side by side, [B, S, 2 H]."""

    def __init__(self, config: KimiK2DraftConfig) -> None:
        draft = config.draft
        self.attention_cls = LlamaHeadAttention if draft.form == "llama" else LatentHeadAttention
        super().__init__(config, -1)
        self.hidden_norm = make_rms_norm(draft.hidden_size, draft.rms_norm_eps)
        self.norm_before_residual = draft.norm_before_residual

    def residual_and_normed(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden state, normed where the head says so, and both inputs normed."""
        embeds, hidden = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        return normed if self.norm_before_residual else hidden, both


class HeadKVCacheManager(LatentKVCacheManager):
    """NxDI's cache of keys and values, [B, groups of a rank, S, head_dim] each, for the Llama form."""

    def _init_kv_shape(self, config: KimiK2DraftConfig, layer_to_cache_size_mapping: Any = None) -> None:
        super()._init_kv_shape(config, layer_to_cache_size_mapping)
        draft, (lines, _, length, _) = config.draft, self.k_shape
        groups = draft.num_key_value_heads // config.neuron_config.tp_degree
        self.k_shape = self.v_shape = (lines, groups, length, draft.head_dim)


class KimiK2DraftModel(NeuronKimiK2Model):
    """The draft's part of the fused graph."""

    def init_model(self, config: KimiK2DraftConfig) -> None:
        """Build the modules; `tokens` is the target's token of each row of lm_head."""
        draft, dtype = config.draft, config.neuron_config.torch_dtype
        size, eps = draft.hidden_size, draft.rms_norm_eps
        read = AUX_LAYERS * size
        self.draft = draft
        self.embed_tokens = ParallelEmbedding(
            draft.vocab_size, size, config.hf.pad_token_id, dtype=dtype, shard_across_embedding=True
        )
        self.fc = ColumnParallelLinear(read, size, bias=False, gather_output=True, dtype=dtype)
        self.input_norm = make_rms_norm(read, eps) if draft.norm_before_fc else None
        norms = (make_rms_norm(size, eps) for _ in range(AUX_LAYERS))
        self.fc_norm = nn.ModuleList(norms) if draft.fc_norm else None
        self.layers = nn.ModuleList([KimiK2DraftLayer(config)])
        self.whole = None
        self.norm = make_rms_norm(size, eps)
        gathered = config.neuron_config.on_cpu
        self.lm_head = ColumnParallelLinear(
            size, draft.draft_vocab_size, bias=False, gather_output=gathered, dtype=dtype
        )
        self.tokens = nn.Parameter(torch.zeros(draft.draft_vocab_size, dtype=torch.int32), requires_grad=False)

    def init_inference_optimization(self, config: KimiK2DraftConfig) -> None:
        """The base's, with keys and values a head in the Llama form's cache."""
        super().init_inference_optimization(config)
        if config.draft.form == "llama":
            self.kv_mgr = HeadKVCacheManager(config, num_kv_head=1, global_rank=self.rank_util)

    def _process_eagle3_hidden_states(self, hidden_states: Tensor, prev_hidden: Tensor, weight_gather: bool) -> Tensor:
        """Embeddings [B, S, H] beside hidden states: the target's, [B, S, 3 H], become [B, S, H] first."""
        if prev_hidden.shape[2] != hidden_states.shape[2]:
            if self.input_norm is not None:
                prev_hidden = self.input_norm(prev_hidden)
            if self.fc_norm is not None:
                auxiliary = prev_hidden.chunk(AUX_LAYERS, dim=-1)
                prev_hidden = torch.cat(
                    [norm(hidden) for norm, hidden in zip(self.fc_norm, auxiliary, strict=True)], dim=-1
                )
            prev_hidden = self.fc(prev_hidden)
        return torch.cat((hidden_states, prev_hidden), dim=2)

    def get_model_output(self, *args: Any, **kwargs: Any) -> Any:
        """The base's; what the next drafted token starts from is normed where the head says so."""
        out = super().get_model_output(*args, **kwargs)
        if self.draft.norm_output:
            self.full_hidden_states: Tensor = self.norm(self.full_hidden_states)
        return out

    def _sample_on_device(self, *args: Any) -> Tensor:
        """The likeliest row of lm_head, as the target's token."""
        return self.tokens[super()._sample_on_device(*args).long()]


class NeuronKimiK2DraftForCausalLM(NeuronBaseForCausalLM):
    """What NxDI asks a draft's classes of: `FusedSpecNeuronConfig.draft_model_cls`. It is no application of its own."""

    _model_cls = KimiK2DraftModel

    @classmethod
    def get_config_cls(cls) -> type[KimiK2DraftConfig]:
        """KimiK2DraftConfig."""
        return KimiK2DraftConfig


def with_draft(config: KimiK2InferenceConfig, directory: str | Path) -> KimiK2InferenceConfig:
    """`config` with a head as its draft, in NxDI's FusedSpecNeuronConfig.

    Raises:
        ConfigError: see `KimiK2DraftConfig.of`.
    """
    draft = KimiK2DraftConfig.of(directory, config)
    config.aux_layers = draft.aux_layers
    config.fused_spec_config = FusedSpecNeuronConfig(
        NeuronKimiK2Model,
        draft_config=draft,
        draft_model_path=str(directory),
        draft_model_cls=NeuronKimiK2DraftForCausalLM,
    )
    return config
