"""NeuronKimiK2ForCausalLM: Kimi-K2 on NxD Inference."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed_inference.models.layer_boundary_marker import ModuleMarkerEndWrapper, ModuleMarkerStartWrapper
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from safetensors.torch import load_file
from torch import Tensor, nn

from .attention import KimiK2Attention
from .checkpoint import CheckpointError, CheckpointMapping, CheckpointReader, StateDictReader
from .configuration_kimi_k2 import KimiK2InferenceConfig
from .kv_cache import LatentKVCacheManager
from .layers import KimiK2MLP, make_rms_norm
from .model_wrapper import KimiK2ModelWrapper
from .moe import KimiK2MoE
from .sharding import empty_rank, fill, model_on_meta, weights_of

logger = logging.getLogger("Neuron")


def rank_file(directory: Path, rank: int) -> Path:
    """A rank's weights beside a compiled model, where NxDI looks for them."""
    return directory / "weights" / f"tp{rank}_sharded_checkpoint.safetensors"


class KimiK2DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    attention_cls: Callable[[Any], nn.Module] = KimiK2Attention

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.is_moe = layer >= config.first_k_dense_replace
        self.input_layernorm = make_rms_norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self.attention_cls(config)
        self.post_attention_layernorm = make_rms_norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = self.make_moe(config) if self.is_moe else self.make_mlp(config)

    def make_mlp(self, config: Any) -> nn.Module:
        """The feed-forward of a dense layer."""
        return KimiK2MLP(config, config.intermediate_size)

    def make_moe(self, config: Any) -> nn.Module:
        """The feed-forward of a layer with experts."""
        return KimiK2MoE(config)

    def residual_and_normed(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention's output is added to, and its input."""
        return hidden_states, self.input_layernorm(hidden_states)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_value: tuple[Tensor, Tensor] | None = None,
        rank: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor, None]:
        """[B, S, H] to the same, with the cache's new entries and the rotation for the layers after.

        With sequence parallelism S is this rank's part of the sequence, and the entries are those of all of it.
        `rank`, int [1], is this rank's number; the other arguments are as in `KimiK2Attention.forward`.
        """
        hidden_states = ModuleMarkerStartWrapper()(hidden_states)  # the compiler's modular flow cuts between layers
        residual, normed = self.residual_and_normed(hidden_states)
        attended, entries, cos, sin = self.self_attn(normed, attention_mask, position_ids, past_key_value, **kwargs)
        hidden_states = residual + attended
        normed = self.post_attention_layernorm(hidden_states)
        out = self.mlp(normed, rank) if self.is_moe else self.mlp(normed)
        return ModuleMarkerEndWrapper()(hidden_states + out), entries, cos, sin, None


class NeuronKimiK2Model(NeuronBaseModel):
    """The graph that is traced: embedding, decoder layers, head and cache."""

    layer_cls = KimiK2DecoderLayer
    cache_cls = LatentKVCacheManager
    # Parameters that keep their dtype when NxDI casts the model: a rounded bias changes nearly every choice of experts.
    kept: tuple[str, ...] = ("scale", "e_score_correction_bias")

    def setup_attr_for_model(self, config: Any) -> None:
        """The attributes that NeuronBaseModel asks for."""
        neuron = config.neuron_config
        self.on_device_sampling = neuron.on_device_sampling_config is not None
        self.tp_degree = neuron.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads, self.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.max_batch_size = neuron.max_batch_size
        self.buckets = neuron.buckets

    def init_model(self, config: Any) -> None:
        """Build the modules."""
        neuron = config.neuron_config
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size, config.hidden_size, dtype=neuron.torch_dtype, shard_across_embedding=True
        )
        self.layers = nn.ModuleList(self.layer_cls(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = make_rms_norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, bias=False, dtype=neuron.torch_dtype,
            gather_output=not self.on_device_sampling,
        )  # fmt: skip

    def init_inference_optimization(self, config: Any) -> None:
        """The base's, with the compressed cache in place of its KV manager."""
        super().init_inference_optimization(config)
        self.kv_mgr = self.cache_cls(config, num_kv_head=self.num_key_value_heads, global_rank=self.rank_util)

    def get_model_output(self, *args: Any, **kwargs: Any) -> Any:
        """The base's; layers are told this rank's number, by which experts are found."""
        return super().get_model_output(*args, rank=self.rank_util.get_rank(), **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NeuronKimiK2Model:
        """Cast or move, but leave FP8, its scales and the routers' biases in their dtypes."""
        kept = {n: p.data for n, p in self.named_parameters() if n.endswith(self.kept) or p.dtype.itemsize == 1}
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            parameter = self.get_parameter(name)
            if parameter.dtype != tensor.dtype:
                parameter.data = tensor.to(parameter.device)
        return self


class NeuronKimiK2ForCausalLM(NeuronBaseForCausalLM):
    """Kimi-K2 for generation on Neuron; the README beside this folder says how to use it."""

    _model_cls = NeuronKimiK2Model
    mapping_cls: Callable[..., CheckpointMapping] = CheckpointMapping

    @classmethod
    def get_config_cls(cls) -> type[KimiK2InferenceConfig]:
        """KimiK2InferenceConfig."""
        return KimiK2InferenceConfig

    def get_model_wrapper_cls(self) -> type[KimiK2ModelWrapper]:
        """ModelWrapper for rows in any order, with this model's compiler arguments."""
        return KimiK2ModelWrapper

    def get_compiler_args(self) -> str | None:
        """None: NxDI builds its own, so that its options have their effects; the wrapper adds this model's."""
        return None

    @property
    def source(self) -> str:
        """The checkpoint's directory; from a compiled model's the configuration says where that was."""
        stated = getattr(self.config, "_name_or_path", "")
        return stated if stated and Path(stated).is_dir() else self.model_path

    @classmethod
    def mapping_from(cls, model_path: str, config: Any) -> CheckpointMapping:
        """From a checkpoint directory's tensors to the parameters, streamed."""
        return cls.mapping_cls(config, CheckpointReader(model_path))

    @classmethod
    def get_state_dict(cls, model_name_or_path: str, config: Any) -> dict[str, Tensor]:
        """The whole model as NxD's own loader takes it."""
        return cls.mapping_from(model_name_or_path, config).state_dict()

    @classmethod
    def convert_hf_to_neuron_state_dict(cls, hf_state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """The same from a state dict in memory, which is emptied on the way."""
        return cls.mapping_cls(config, StateDictReader(hf_state_dict)).state_dict()

    def checkpoint_loader_fn(self, mmap: bool = False) -> dict[str, Tensor]:
        """The whole model. NxDI's own rounds the routers' biases to the model's dtype."""
        return self.get_state_dict(self.source, self.config)

    @classmethod
    def save_quantized_state_dict(cls, model_path: str, config: Any) -> None:
        """Nothing: experts are converted as they are read. vLLM's plugin calls this before it compiles."""

    def rank_weights(self, first: int, count: int, directory: Path | None = None) -> list[dict[str, Tensor]]:
        """Weights of some ranks in one pass over the checkpoint, in memory or mapped to files of `directory`."""
        weights = weights_of(model_on_meta(self.models[0]))
        ranks = {}
        for rank in range(first, first + count):
            ranks[rank] = empty_rank(weights, directory and rank_file(directory, rank))
        fill(ranks, self.mapping_from(self.source, self.config).parameters(), weights, self.neuron_config)
        return list(ranks.values())

    def shard_weights(
        self, compiled_model_path: str, debug: bool = False, pre_shard_weights_hook: Callable[[Any], None] | None = None
    ) -> None:
        """NxDI's files, one a rank, streamed; only with `save_sharded_checkpoint`."""
        neuron = self.neuron_config
        if pre_shard_weights_hook is not None:
            pre_shard_weights_hook(self)
        if neuron.save_sharded_checkpoint and not neuron.skip_sharding:
            self.write_ranks(Path(compiled_model_path))

    def write_ranks(self, directory: Path) -> None:
        """Files of this machine's ranks, in one pass over the checkpoint."""
        (directory / "weights").mkdir(parents=True, exist_ok=True)
        self.rank_weights(self.neuron_config.start_rank_id, self.neuron_config.local_ranks_size, directory)

    def load_weights(
        self, compiled_model_path: str, start_rank_id: int | None = None, local_ranks_size: int | None = None
    ) -> None:
        """NxDI's; without files of the ranks they are cut as they are read. The routers' biases are read back.

        Raises:
            CheckpointError: a bias on the device is not what was loaded, bit for bit.
        """
        neuron = self.neuron_config
        first = neuron.start_rank_id if start_rank_id is None else start_rank_id
        count = neuron.local_ranks_size if local_ranks_size is None else local_ranks_size
        self.initialize(self.traced_model, self.weights_to_load(Path(compiled_model_path), first, count), first)

    def weights_to_load(self, compiled: Path, first: int, count: int) -> list[dict[str, Tensor]]:
        """Weights of some ranks."""
        if self.neuron_config.save_sharded_checkpoint:
            return [load_file(rank_file(compiled, rank)) for rank in range(first, first + count)]
        return self.rank_weights(first, count)

    @staticmethod
    def initialize(traced_model: Any, ranks: list[dict[str, Tensor]], first: int) -> None:
        """Hand the ranks' weights to NxD, and compare the routers' biases: transformed layouts have lost one before."""
        biases = {name: tensor for name, tensor in ranks[0].items() if name.endswith("e_score_correction_bias")}
        traced_model.nxd_model.initialize(ranks, torch.tensor([first], dtype=torch.int32))
        weights = getattr(traced_model.nxd_model, "weights", None)
        if not weights:
            logger.warning("the routers' biases cannot be read back: NxD's model has no weights")
            return
        loaded = {name.replace("->", "."): tensor for name, tensor in weights[0].items()}
        for name, given in biases.items():
            bias = loaded[name].cpu() if name in loaded else None
            if bias is None or bias.dtype != torch.float32 or not torch.equal(bias, given):
                raise CheckpointError(f"{name}: on the device it is not float32 with the bits that were loaded")
