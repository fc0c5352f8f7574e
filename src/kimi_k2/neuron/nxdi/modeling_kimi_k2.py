"""NeuronKimiK2ForCausalLM: Kimi-K2 on NxD Inference."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor, nn

from kimi_k2.checkpoint.names import IGNORED
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.contrib_model import modeling_kimi_k2 as base
from kimi_k2.contrib_model.checkpoint import Parameter, StateDictReader
from kimi_k2.contrib_model.moe import Held
from kimi_k2.contrib_model.sharding import empty_rank, fill, model_on_meta
from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import HiddenStates
from kimi_k2.sharding.convert import NeuronMapping
from kimi_k2.sharding.early_qkv_a import precedes_another
from kimi_k2.sharding.early_router import DTYPE, HEADS, RESIDUAL
from kimi_k2.spellings import plain_name

from . import cpu_mode, lora, prefill
from .attention import KimiK2Attention
from .block_kv_cache import LatentBlockKVCacheManager
from .capture import capture_in_cpu_mode
from .config import KimiK2InferenceConfig
from .decode_layers import DecodeLayersKernel, WholeLayers
from .draft_config import draft_state_dict, fused_state_dict
from .experts import CutWeights, TiledMoE
from .flash_decoding import every_nth
from .fused_speculation import KimiK2FusedSpecModel
from .kv_cache import LatentKVCacheManager
from .model_wrapper import KimiK2ModelWrapper
from .presharding import preshard


def _folded(rows: Mapping[str, int], columns: int, dtype: torch.dtype, ranks: int) -> CutWeights:
    """A layer's folded weights that the kernel alone reads, of which a rank has its rows."""
    return CutWeights({name: Held((count // ranks, columns), dtype, (0, 1)) for name, count in rows.items()}, ranks)


class KimiK2DecoderLayer(base.KimiK2DecoderLayer):
    """The hand-written layer; a step's MoE layers may be one kernel, and a draft may read what is between layers."""

    def __init__(self, config: KimiK2InferenceConfig, layer: int) -> None:
        hf, neuron = config.hf, config.neuron_config
        moe = hf.is_moe_layer(layer)
        self.attention_cls = partial(KimiK2Attention, moe=moe)
        self.folds = bool(neuron.layers and precedes_another(hf, layer))
        super().__init__(config, layer)
        self.early_router = self.early_qkv_a = None
        if neuron.layers and moe:
            rows = {"residual_weight": hf.hidden_size, "heads_weight": hf.num_attention_heads * hf.v_head_dim}
            self.early_router = _folded(rows, hf.n_routed_experts, DTYPE, neuron.tp_degree)
        if self.folds:
            rows = {"residual_weight": hf.hidden_size}
            self.early_qkv_a = _folded(rows, hf.qkv_a_dim, neuron.torch_dtype, neuron.tp_degree)

    def make_moe(self, config: KimiK2InferenceConfig) -> nn.Module:
        """The base's, or in tiles."""
        return TiledMoE(config, early=self.folds) if config.neuron_config.layers else super().make_moe(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_value: tuple[Tensor, Tensor] | None = None,
        rank: Tensor | None = None,
        whole: WholeLayers | None = None,
        states: HiddenStates | None = None,
        idx: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor, None]:
        """The base's.

        With `whole`, a step, the first MoE layer computes all of them. `states` takes what a draft reads of the
        residual around this layer, number `idx`.
        """
        if states is not None and idx == 0:
            states.pass_by(0, hidden_states)
        if whole is not None and self.is_moe:
            if not whole.begun:
                hidden_states = whole.run(
                    hidden_states, attention_mask, position_ids, cast(Tensor, rank), kwargs["active_mask"], states
                )
            return hidden_states, whole.next_entries(), kwargs["cos_cache"], kwargs["sin_cache"], None
        out = super().forward(hidden_states, attention_mask, position_ids, past_key_value, rank, **kwargs)
        if states is not None:
            states.pass_by(idx + 1, out[0])
        return out


class NeuronKimiK2Model(base.NeuronKimiK2Model):
    """The hand-written graph, with whole layers, states for drafts, cached prefixes and NxD's quantized layers."""

    layer_cls = KimiK2DecoderLayer
    kept = (*base.NeuronKimiK2Model.kept, RESIDUAL, HEADS)  # of the early router, in float32

    def setup_attr_for_model(self, config: KimiK2InferenceConfig) -> None:
        """The attributes that NeuronBaseModel asks for."""
        super().setup_attr_for_model(config)
        neuron = config.neuron_config
        self.cache_cls = LatentBlockKVCacheManager if neuron.is_block_kv_layout else LatentKVCacheManager
        reads = neuron.is_eagle3 and not neuron.is_eagle_draft
        self.aux_layers = tuple(config.aux_layers) if reads else ()  # that a draft reads

    def init_model(self, config: KimiK2InferenceConfig) -> None:
        """Build the modules."""
        super().init_model(config)
        neuron = config.neuron_config
        # NxDI gathers `output_logits` itself.
        self.lm_head.gather_output = not self.on_device_sampling or (neuron.on_cpu and not neuron.output_logits)
        sizes = (neuron.logical_nc_config, neuron.tp_degree, neuron.num_cores_per_group)
        self.whole = DecodeLayersKernel(*sizes) if neuron.layers else None

    def _create_context_attn_mask(self, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        """The base's; of a prefill behind a cached prefix it is over the prefix, bool [B, 1, 1, prefix].

        With flash decoding that is over this rank's positions of the prefix.
        """
        mask: Tensor = super()._create_context_attn_mask(attention_mask, **kwargs)
        if mask.dim() != 2:
            return mask
        if self.neuron_config.flash_decoding_enabled:
            mask = mask.index_select(1, self._own(mask.shape[1]))
        return mask[:, None, None, :].to(torch.bool)

    def get_model_output(self, *args: Any, **kwargs: Any) -> Any:
        """The base's; behind a cached prefix under flash decoding layers are told which tokens are this rank's."""
        split = self.neuron_config.flash_decoding_enabled and self.is_prefix_caching
        if split and kwargs["is_for_context_encoding"] and self.prefix_size:
            kwargs["own"] = self._own(kwargs["input_ids"].shape[1])
        step = not kwargs["is_for_context_encoding"]
        if step and self.whole is not None and self.whole.runs_on(kwargs["input_ids"].device):
            kwargs["whole"] = WholeLayers(self.layers, self.whole, self.neuron_config.decode_layers_per_kernel)
        if not self.aux_layers:
            return super().get_model_output(*args, **kwargs)
        kwargs["states"] = states = HiddenStates(self.aux_layers)
        hidden, caches = super().get_model_output(*args, **kwargs)
        # NxDI's own hidden states are of fixed layers; the last columns are the model's output.
        self.full_hidden_states: Tensor = states.joined()
        hidden = torch.cat((self.full_hidden_states, hidden[..., -self.hidden_size :]), dim=-1)
        self.sliced_hidden = kwargs["is_for_context_encoding"]
        if self.sliced_hidden:  # NxDI's own slice is as wide as one hidden state
            last = kwargs["position_ids"].max(dim=1, keepdim=True).indices
            hidden = hidden.gather(1, last.unsqueeze(2).expand(-1, -1, hidden.shape[2]))
        return hidden, caches

    def _sample_on_device(self, logits: Tensor, sampling_params: Tensor, *stage: bool) -> Tensor:
        """The base's; in CPU mode, where every rank has all logits, without NxD's argmax over the ranks' parts."""
        neuron = self.neuron_config
        if neuron.on_cpu and neuron.output_logits:
            logits = gather_from_tensor_model_parallel_region(logits)
        if neuron.on_cpu and neuron.is_eagle3 and not neuron.on_device_sampling_config.do_sample:
            return logits.argmax(dim=-1).to(torch.int32)
        tokens: Tensor = super()._sample_on_device(logits, sampling_params, *stage)
        return tokens

    def _own(self, count: int) -> Tensor:
        """Which of `count` positions are this rank's, int64."""
        return every_nth(count, self.rank_util.get_rank(), self.num_cores_per_group)


def mapping_of(config: KimiK2InferenceConfig, reader: Any) -> NeuronMapping:
    """The mapping of a checkpoint, or of a state dict in memory."""
    return NeuronMapping(config.hf, config.layout, reader.names(), reader.get, experts=config.experts)


class NeuronKimiK2ForCausalLM(base.NeuronKimiK2ForCausalLM):
    """The hand-written application, with resumable pre-sharding, drafts, adapters and a CPU mode that follows all."""

    _model_cls = NeuronKimiK2Model
    mapping_cls = staticmethod(mapping_of)

    def get_model_wrapper_cls(self) -> type[KimiK2ModelWrapper]:
        """The base's, for prefix caching and CPU mode too."""
        return KimiK2ModelWrapper

    def forward(
        self,
        input_ids: Tensor,
        seq_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """NxDI's; with prefix caching a prompt longer than the largest prefill graph goes through it in parts.

        Raises:
            ValueError: such a prompt comes together with others.
        """
        inputs = {"seq_ids": seq_ids, "attention_mask": attention_mask, "position_ids": position_ids, **kwargs}
        for part in prefill.parts(self.neuron_config, {"input_ids": input_ids, **inputs}):
            out = super().forward(**part)
        return out

    def enable_context_encoding(self, **model_init_kwargs: Any) -> None:
        """Add the prefill submodel.

        Raises:
            ConfigError: fused speculation without a draft, or a draft's own settings.
        """
        if self.neuron_config.is_eagle_draft:
            raise ConfigError("expected False: this is the target", field="is_eagle_draft")
        if self.neuron_config.enable_fused_speculation:
            if self.fused_spec_config is None:
                raise ConfigError("expected a draft, see `draft_head.with_draft`", field="fused_spec_config")
            self._model_cls = KimiK2FusedSpecModel
        super().enable_context_encoding(**model_init_kwargs)

    @classmethod
    def get_config_cls(cls) -> type[KimiK2InferenceConfig]:
        """KimiK2InferenceConfig."""
        return KimiK2InferenceConfig

    def to_cpu(self) -> None:
        """NxDI's CPU mode, with what it lacks."""
        cpu_mode.load(self, super().to_cpu)
        models, neuron = cpu_mode.models_of(self.models), self.neuron_config
        cpu_mode.follow_prefixes(models)
        if neuron.lora_config is not None:
            lora.follow_stages(models)
        if neuron.flash_decoding_enabled:  # ModelBuilder makes the groups where there is a device
            parallel_state.initialize_kv_group(self.config.num_cores_per_group, sequential_ranks_in_group=True)
        if neuron.tensor_capture_config is not None:
            capture_in_cpu_mode(models, neuron.tensor_capture_config)

    def _copy_past_key_values(self, outputs: list[Tensor]) -> None:
        """In CPU mode, hand a pass's states, which are its last outputs, to every submodel."""
        cpu_mode.copy_states(self.models, outputs)

    def compile(self, compiled_model_path: str, *args: Any, **kwargs: Any) -> None:
        """NxDI's; with `on_cpu` there is nothing to compile and the configuration alone is saved."""
        if self.neuron_config.on_cpu:
            self.config.save(compiled_model_path)
            return
        super().compile(compiled_model_path, *args, **kwargs)

    def load(self, compiled_model_path: str, *args: Any, **kwargs: Any) -> None:
        """NxDI's; with `on_cpu` the weights come from the checkpoint, see `to_cpu`."""
        if self.neuron_config.on_cpu:
            self.to_cpu()
            return
        super().load(compiled_model_path, *args, **kwargs)

    def checkpoint_loader_fn(self, mmap: bool = False) -> dict[str, Tensor]:
        """The whole model, with its draft."""
        state, fused = super().checkpoint_loader_fn(mmap), self.fused_spec_config
        if fused is None:
            return state
        return fused_state_dict(state, draft_state_dict(fused.draft_model_path, fused.draft_config))

    @classmethod
    def mapping_from(cls, model_path: str, config: KimiK2InferenceConfig) -> NeuronMapping:
        """From a checkpoint directory's tensors to the parameters, streamed.

        Raises:
            ConfigError, CheckpointError: see `KimiK2Config.from_pretrained` and `CheckpointReader`.
        """
        return mapping_of(config, CheckpointReader.for_config(model_path, KimiK2Config.from_pretrained(model_path)))

    @classmethod
    def convert_hf_to_neuron_state_dict(
        cls, hf_state_dict: dict[str, Tensor], config: KimiK2InferenceConfig
    ) -> dict[str, Tensor]:
        """From a state dict in memory; names may be other exporters'."""
        plain = {plain_name(name): tensor for name, tensor in hf_state_dict.items()}
        reader = StateDictReader({name: tensor for name, tensor in plain.items() if not IGNORED.search(name)})

        def read(name: str) -> Tensor:  # kept, as some are read again
            return plain[reader.stored[name]]

        return NeuronMapping(config.hf, config.layout, reader.names(), read, experts=config.experts).state_dict()

    def weights_to_load(self, compiled: Path, first: int, count: int) -> list[dict[str, Tensor]]:
        """The base's; beside converted files of the target, which know no draft, a head is cut as it is loaded."""
        neuron, fused = self.neuron_config, self.fused_spec_config
        if not neuron.save_sharded_checkpoint and (fused is not None or neuron.lora_config is not None):
            weights: list[dict[str, Tensor]] = self.get_builder().shard_checkpoint()  # NxD knows adapters' weights
            return weights
        weights = super().weights_to_load(compiled, first, count)
        if fused is None:
            return weights
        head = draft_state_dict(fused.draft_model_path, fused.draft_config)
        model = model_on_meta(self.models[0]).get_submodule("draft_model")
        held = {name: model.get_parameter(name) for name in head}
        own = {rank: empty_rank(held) for rank in range(first, first + count)}
        fill(own, (Parameter(name, tensor) for name, tensor in head.items()), held, neuron)
        return [fused_state_dict(*both) for both in zip(weights, own.values(), strict=True)]

    def write_ranks(self, directory: Path) -> None:
        """Those of all ranks, see `preshard`."""
        preshard(self.source, directory, self.neuron_config)
