"""NeuronKimiK2ForCausalLM: Kimi-K2 on NxD Inference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe.moe_configs import RoutedExpertsMLPOpsConfig
from neuronx_distributed.modules.moe.shared_experts import SharedExperts
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.quantization.quantize import convert
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from neuronx_distributed_inference.models.model_wrapper import (
    CONTEXT_ENCODING_MODEL_TAG,
    TOKEN_GENERATION_MODEL_TAG,
    ModelWrapper,
)
from neuronx_distributed_inference.modules.moe_v2 import initialize_moe_process_group
from safetensors.torch import load_file
from torch import Tensor, nn

from kimi_k2.contrib_model import modeling_kimi_k2 as base
from kimi_k2.contrib_model.layers import KimiK2MLP
from kimi_k2.contrib_model.moe import KimiK2Router
from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import HiddenStates
from kimi_k2.sharding.early_qkv_a import precedes_another
from kimi_k2.sharding.early_router import DTYPE

from . import cpu_mode, lora, patches, prefill
from .attention import KimiK2Attention
from .block_kv_cache import LatentBlockKVCacheManager
from .capture import capture_in_cpu_mode
from .checkpoint import check_router_bias, convert_state_dict, load_neuron_state_dict
from .config import KimiK2InferenceConfig
from .decode_layers import DecodeLayersKernel, FoldedRows, WholeLayers
from .draft_config import draft_state_dict, fused_state_dict, of_rank
from .experts import KimiK2ExpertMLPs
from .flash_decoding import every_nth
from .fused_speculation import KimiK2FusedSpecModel
from .kv_cache import LatentKVCacheManager
from .presharding import preshard
from .quantized import block_size, q_config, tile_dtype


class KimiK2MoE(MoE):
    """NxD's MoE, called as the hand-written class calls its own."""

    def forward(self, hidden_states: Tensor, rank: Tensor | None = None) -> Tensor:
        """[B, S, H] to the same; NxD's modules know their rank."""
        out: Tensor = super().forward(hidden_states)[0]
        return out


def make_moe(config: KimiK2InferenceConfig, *, early: bool = False) -> KimiK2MoE:
    """NxD's MoE with Kimi-K2's router and experts; routed and shared parts share one all-reduce.

    With `early` the next layer's down projections are held folded with the experts', for the kernel of whole layers.
    """
    hf, neuron = config.hf, config.neuron_config
    decode_tp, decode_ep, prefill_tp, prefill_ep = initialize_moe_process_group(config, False)
    blockwise = neuron.blockwise_matmul_config
    routed = RoutedExpertsMLPOpsConfig(
        num_experts=hf.n_routed_experts,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.moe_intermediate_size,
        top_k=hf.num_experts_per_tok,
        hidden_act=hf.hidden_act,
        glu_mlp=True,
        normalize_top_k_affinities=False,  # the router's weights are final
        enable_spmd_rank=blockwise.parallelize_token_to_block_mapping or neuron.moe_ep_degree > 1,
        use_index_calc_kernel=neuron.use_index_calc_kernel,
    )
    experts = KimiK2ExpertMLPs(
        tiles=tile_dtype(neuron),
        block=block_size(neuron),
        shared_width=config.shared_width,
        shared_tiles=config.shared_tiles,
        rows_at_once=neuron.prefill_rows_at_once,
        early=(hf.qkv_a_dim, neuron.torch_dtype) if early else None,
        routed_experts_mlp_config=routed,
        blockwise_matmul_config=blockwise,
        dtype=neuron.torch_dtype,
        is_prefill=neuron.is_prefill_stage,
        tensor_model_parallel_group=parallel_state.get_tensor_model_parallel_group(),
        expert_model_parallel_group=parallel_state.get_expert_model_parallel_group(),
        tkg_tensor_model_parallel_group=decode_tp,
        tkg_expert_model_parallel_group=decode_ep,
        cte_tensor_model_parallel_group=prefill_tp,
        cte_expert_model_parallel_group=prefill_ep,
    )
    shared = None
    if hf.n_shared_experts and not config.shared_width:
        shared = SharedExperts(
            hidden_size=hf.hidden_size,
            intermediate_size=hf.moe_intermediate_size,
            num_shared_experts=hf.n_shared_experts,
            hidden_act=hf.hidden_act,
            dtype=neuron.torch_dtype,
            reduce_dtype=neuron.rpl_reduce_dtype,
        )
    return KimiK2MoE(
        router=KimiK2Router(config),
        expert_mlps=experts,
        shared_experts=shared,
        sequence_parallel_enabled=neuron.sequence_parallel_enabled,
        sequence_dimension=1,
    ).eval()


class KimiK2DecoderLayer(base.KimiK2DecoderLayer):
    """The hand-written layer; a step's MoE layers may be one kernel, and a draft may read what is between layers."""

    def __init__(self, config: KimiK2InferenceConfig, layer: int) -> None:
        hf, neuron = config.hf, config.neuron_config
        moe = hf.is_moe_layer(layer)
        self.attention_cls = partial(KimiK2Attention, moe=moe)  # type: ignore[assignment]
        self.folds = bool(neuron.layers and precedes_another(hf, layer))
        super().__init__(config, layer)
        self.early_router = self.early_qkv_a = None
        if neuron.layers and moe:
            rows = {"residual_weight": hf.hidden_size, "heads_weight": hf.num_attention_heads * hf.v_head_dim}
            self.early_router = FoldedRows(rows, hf.n_routed_experts, DTYPE, neuron.tp_degree)
        if self.folds:
            rows = {"residual_weight": hf.hidden_size}
            self.early_qkv_a = FoldedRows(rows, hf.qkv_a_dim, neuron.torch_dtype, neuron.tp_degree)

    def make_mlp(self, config: KimiK2InferenceConfig) -> nn.Module:
        """The base's: NxDI's modules read an expert's width under the name of the dense layers'."""
        return KimiK2MLP(config, config.hf.intermediate_size)

    def make_moe(self, config: KimiK2InferenceConfig) -> nn.Module:
        """NxD's, with our experts."""
        return make_moe(config, early=self.folds)

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
                hidden_states = whole.run(hidden_states, attention_mask, position_ids, kwargs["active_mask"], states)
            return hidden_states, whole.next_entries(), kwargs["cos_cache"], kwargs["sin_cache"], None
        out = super().forward(hidden_states, attention_mask, position_ids, past_key_value, rank, **kwargs)
        if states is not None:
            states.pass_by(idx + 1, out[0])
        return out


class NeuronKimiK2Model(base.NeuronKimiK2Model):
    """The hand-written graph, with whole layers, states for drafts, cached prefixes and NxD's quantized layers."""

    layer_cls = KimiK2DecoderLayer

    def setup_attr_for_model(self, config: KimiK2InferenceConfig) -> None:
        """The attributes that NeuronBaseModel asks for."""
        super().setup_attr_for_model(config)
        neuron = config.neuron_config
        self.cache_cls = LatentBlockKVCacheManager if neuron.is_block_kv_layout else LatentKVCacheManager
        reads = neuron.is_eagle3 and not neuron.is_eagle_draft
        self.aux_layers = tuple(config.aux_layers) if reads else ()  # that a draft reads

    def init_model(self, config: KimiK2InferenceConfig) -> None:
        """Build the modules; routed experts are put into their quantized form here, so in CPU mode too."""
        super().init_model(config)
        neuron = config.neuron_config
        self.lm_head.gather_output = not self.on_device_sampling or neuron.on_cpu
        sizes = (neuron.logical_nc_config, neuron.tp_degree, neuron.num_cores_per_group)
        self.whole = DecodeLayersKernel(*sizes) if neuron.layers else None
        if neuron.quantized:
            convert(
                self,
                q_config=q_config(neuron),
                inplace=True,
                modules_to_not_convert=neuron.modules_to_not_convert,
            )

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
        if neuron.on_cpu and neuron.is_eagle3 and not neuron.on_device_sampling_config.do_sample:
            return logits.argmax(dim=-1).to(torch.int32)
        tokens: Tensor = super()._sample_on_device(logits, sampling_params, *stage)
        return tokens

    def _own(self, count: int) -> Tensor:
        """Which of `count` positions are this rank's, int64."""
        return every_nth(count, self.rank_util.get_rank(), self.num_cores_per_group)


class NeuronKimiK2ForCausalLM(NeuronBaseForCausalLM):
    """Kimi-K2 for generation on Neuron; see the README beside this folder for how to use it."""

    _model_cls = NeuronKimiK2Model
    compile_tag = TOKEN_GENERATION_MODEL_TAG  # the submodel that `get_compiler_args` is asked for

    def get_model_wrapper_cls(self) -> type[ModelWrapper]:
        """NxDI's, mended for CPU mode."""
        return cpu_mode.KimiK2ModelWrapper

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
        """Add the prefill submodel, with compiler arguments of its own.

        Raises:
            ConfigError: fused speculation without a draft, or a draft's own settings.
        """
        if self.neuron_config.is_eagle_draft:
            raise ConfigError("expected False: this is the target", field="is_eagle_draft")
        if self.neuron_config.enable_fused_speculation:
            if self.fused_spec_config is None:
                raise ConfigError("expected a draft, see `draft_head.with_draft`", field="fused_spec_config")
            self._model_cls = KimiK2FusedSpecModel
        self.compile_tag = CONTEXT_ENCODING_MODEL_TAG
        super().enable_context_encoding(**model_init_kwargs)
        self.compile_tag = TOKEN_GENERATION_MODEL_TAG

    @classmethod
    def get_config_cls(cls) -> type[KimiK2InferenceConfig]:
        """KimiK2InferenceConfig."""
        return KimiK2InferenceConfig

    def to_cpu(self) -> None:
        """NxDI's CPU mode, with expert-parallel process groups that gloo can use."""
        os.environ["NXD_CPU_MODE"] = "1"
        patches.apply_cpu_mode(self.neuron_config)
        with self._models_of_their_own():
            cpu_mode.load(self, super().to_cpu)
        cpu_mode.follow_prefixes(self.models)
        if self.neuron_config.lora_config is not None:
            lora.follow_stages({id(wrapper.model): wrapper.model for wrapper in self.models}.values())
        if self.neuron_config.flash_decoding_enabled:  # ModelBuilder makes the groups where there is a device
            parallel_state.initialize_kv_group(self.config.num_cores_per_group, sequential_ranks_in_group=True)
        if self.neuron_config.tensor_capture_config is not None:
            models = {id(wrapper.model): wrapper.model for wrapper in self.models}
            capture_in_cpu_mode(models.values(), self.neuron_config.tensor_capture_config)

    @contextmanager
    def _models_of_their_own(self) -> Iterator[None]:
        """A model for each stage in NxDI's CPU mode, which makes them for continuous batching alone.

        With sequence parallelism the two stages differ: decode has no sequence to cut.
        """
        neuron = self.neuron_config
        kept = neuron.is_continuous_batching
        neuron.is_continuous_batching = kept or neuron.sequence_parallel_enabled
        try:
            yield
        finally:
            neuron.is_continuous_batching = kept

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

    @classmethod
    def save_quantized_state_dict(cls, model_path: str, config: KimiK2InferenceConfig) -> None:
        """Nothing: experts are quantized from the checkpoint while they are sharded, so no other file is needed.

        NxDI's way loads the whole model through transformers first. vLLM's plugin calls this before it compiles.
        """

    def checkpoint_loader_fn(self, mmap: bool = False) -> dict[str, Tensor]:
        """The unsharded state dict, streamed from the checkpoint.

        NxDI's own loader reads everything first and then rounds router and bias to the model's dtype.
        """
        state = self.get_state_dict(self._source, self.config)
        fused = self.fused_spec_config
        if fused is None:
            return state
        return fused_state_dict(state, draft_state_dict(fused.draft_model_path, fused.draft_config))

    @property
    def _source(self) -> str:
        # From a compiled model's directory, which holds no checkpoint, the configuration says where that was.
        source: str = getattr(self.config, "_name_or_path", "")
        return source if source and Path(source).is_dir() else self.model_path

    def load_weights(
        self, compiled_model_path: str, start_rank_id: int | None = None, local_ranks_size: int | None = None
    ) -> None:
        """NxDI's, and the routers' biases are read back from the device.

        Beside converted files of the target, which know no draft, a head is cut as it is loaded.

        Raises:
            CheckpointError: see `check_router_bias`.
        """
        neuron = self.neuron_config
        fused = self.fused_spec_config
        first = neuron.start_rank_id if start_rank_id is None else start_rank_id
        if fused is None or not neuron.save_sharded_checkpoint:
            super().load_weights(compiled_model_path, start_rank_id, local_ranks_size)
        else:
            count = neuron.local_ranks_size if local_ranks_size is None else local_ranks_size
            self._load_fused(fused, compiled_model_path, first, count)
        files = compiled_model_path if neuron.save_sharded_checkpoint else None
        check_router_bias(self.traced_model.nxd_model, self._source, files, first)

    def _load_fused(self, fused: Any, compiled_model_path: str, first: int, count: int) -> None:
        head = draft_state_dict(fused.draft_model_path, fused.draft_config)
        files = Path(compiled_model_path, "weights")
        weights = [
            fused_state_dict(
                load_file(files / f"tp{rank}_sharded_checkpoint.safetensors"),
                of_rank(head, rank, self.neuron_config.tp_degree),
            )
            for rank in range(first, first + count)
        ]
        self.traced_model.nxd_model.initialize(weights, torch.tensor([first], dtype=torch.int32))

    @classmethod
    def get_state_dict(cls, model_name_or_path: str, config: KimiK2InferenceConfig) -> dict[str, Tensor]:
        """State dict of a checkpoint directory under NeuronKimiK2Model's names."""
        return load_neuron_state_dict(model_name_or_path, config.neuron_config, config.experts)

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict[str, Any], config: KimiK2InferenceConfig) -> dict[str, Tensor]:
        """The same for an unquantized state dict in memory."""
        return convert_state_dict(state_dict, config.hf, config.neuron_config, config.experts)

    def shard_weights(
        self, compiled_model_path: str, debug: bool = False, pre_shard_weights_hook: Callable[[Any], None] | None = None
    ) -> None:
        """Pre-shard beside the compiled model if the neuron config says `save_sharded_checkpoint`; see `preshard`."""
        neuron = self.neuron_config
        if pre_shard_weights_hook is not None:
            pre_shard_weights_hook(self)
        if neuron.save_sharded_checkpoint and not neuron.skip_sharding:
            preshard(self.model_path, compiled_model_path, neuron)

    def get_compiler_args(self) -> str:
        """neuronx-cc's arguments for the submodel that is being added: the configuration's, or a plain set.

        NxDI's ModelWrapper appends `--internal-hlo2tensorizer-options`, with what FP8 weights need.
        """
        neuron = self.neuron_config
        prefill = self.compile_tag == CONTEXT_ENCODING_MODEL_TAG
        plain = ["--model-type=transformer", "-O1" if prefill else "-O2", "--auto-cast=none"]
        return " ".join(neuron.compiler_args.get(self.compile_tag, [*plain, f"--lnc={neuron.logical_nc_config}"]))
