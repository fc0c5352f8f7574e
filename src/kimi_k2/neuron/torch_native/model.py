"""`KimiK2ForVllmNeuron`: the class that vllm-neuron's runner makes, loads, compiles and calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, GenerationError, TensorShapeError
from kimi_k2.model.rope import RotaryEmbedding
from kimi_k2.neuron import layer_arguments
from kimi_k2.neuron.torch_native.attention import Attention, Pages, halves_of, rms_norm
from kimi_k2.neuron.torch_native.experts import Experts, mlp, route
from kimi_k2.neuron.torch_native.kernels import Kernels
from kimi_k2.neuron.torch_native.loading import rank_tensors
from kimi_k2.neuron.torch_native.settings import DEFAULT_FORMAT, Ranks, check_neuron_config, planned_tensors
from kimi_k2.ops.embedding import rotary_cos_sin
from kimi_k2.sharding import whole_layers
from kimi_k2.sharding.experts import expert_formats

FP8 = torch.float8_e4m3fn
cos_sin = rotary_cos_sin.__wrapped__  # type: ignore[attr-defined]


def layer_name(layer: int) -> str:
    """The line's name of a layer's cache and metadata."""
    return f"layers.{layer}.self_attn"


class Layer:
    """One decoder layer on one rank: x [T or, with tokens divided, T / ranks, H] to the same."""

    def __init__(
        self,
        config: KimiK2Config,
        layer: int,
        weights: nn.Module,
        ranks: Ranks,
        first: Tensor,
    ) -> None:
        self.config, self.weights, self.ranks = config, weights, ranks
        self.attention = Attention(config, weights.get_submodule("self_attn"), ranks)
        self.mlp = weights.get_submodule("mlp")
        self.experts = Experts(config, self.mlp, first) if config.is_moe_layer(layer) else None

    def norm(self, x: Tensor, name: str) -> Tensor:
        """One of the layer's norms."""
        rows: Tensor = rms_norm(x, self.weights.get_parameter(f"{name}.weight"), self.config.rms_norm_eps)
        return rows

    def __call__(
        self, x: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor], metadata: Any, divided: bool
    ) -> Tensor:
        """See the class; `divided`: each rank has its share of the tokens between the sums (sequence parallelism)."""
        tp = self.ranks.tp

        def normed(name: str) -> Tensor:
            rows = self.norm(x, name)
            return tp.all_gather(rows, 0) if divided else rows

        def summed(part: Tensor) -> Tensor:
            return tp.reduce_scatter(part, 0) if divided else tp.all_reduce(part)  # type: ignore[no-any-return]

        x = x + summed(self.attention(normed("input_layernorm"), positions, rotation, metadata))
        return x + summed(self._feed_forward(normed("post_attention_layernorm"), metadata))

    def _feed_forward(self, x: Tensor, metadata: Any) -> Tensor:
        if self.experts is None:
            return mlp(x, self.mlp)
        dp, rows = self.ranks.dp, x
        if dp is not None:  # other replicas' tokens pass this rank's experts too
            rows = dp.all_gather(x, 0)
        decode = metadata["max_query_len"] <= metadata["decode_token_threshold"]
        chosen = route(self.config, rows, self.mlp.get_submodule("router"))
        out = self.experts(rows, *chosen, decode=decode)
        if dp is not None:
            out = dp.reduce_scatter(out, 0)
        shared = getattr(self.mlp, "shared_experts", None)
        return out if shared is None or self.experts.shared is not None else out + mlp(x, shared)


class WholeLayers:
    """The MoE layers of one decode step: each is one kernel, its collectives inside.

    The residual goes from kernel to kernel in float32, with the down projections that ride in the sum before.

    Args:
        kernels: that run.
        layer: the first of the layers.
        positions: int64 [T], after each other the tokens of a line.
        rotation: float32, of `layer_arguments.rotation`.
        table: int32 [B, M], pages of each line.
        runs: of `Kernels.runs`.
    """

    def __init__(
        self, kernels: Kernels, layer: Layer, positions: Tensor, rotation: Tensor, table: Tensor, runs: dict[str, Any]
    ) -> None:
        ranks, experts = layer.ranks, layer.experts
        assert experts is not None
        self.kernels = kernels
        self.hidden: Tensor | None = None
        self.projected: Tensor | None = None
        self.shared = {
            **runs,
            **layer_arguments.numbers(layer.config),
            "rotation": rotation,
            "lengths": positions.view(len(table), -1)[:, :1].to(torch.int32),
            "first_expert": experts.first.to(torch.int32).view(1, 1),
            "ranks": ranks.tp.world_size,
            "groups": (tuple(range(ranks.tp.world_size)),),
        }

    def __call__(self, layer: Layer, x: Tensor, metadata: Any) -> Tensor:
        """As a layer's, of whole tokens; `x` is read before the first of them alone."""
        eps, attention = layer.config.rms_norm_eps, layer.attention
        if self.hidden is None:
            self.hidden = x.to(torch.float32)
            self.projected = layer_arguments.without_scalar(attention.down(layer.norm(x, "input_layernorm")), x, eps)
        assert attention.pages is not None, "bind_kv_cache comes first"
        latents, keys = attention.pages.halves
        weights = layer_arguments.weights(dict(layer.weights.named_parameters()), x.dtype)
        out, *entries = self.kernels.layer(
            hidden=self.hidden, projected=self.projected, latents=latents, keys=keys, **weights, **self.shared
        )
        attention.pages.write(torch.cat(halves_of(entries[0][0], entries[1][0]), dim=-1), metadata["slot_mapping"])
        self.hidden = hidden = out.flatten(1)
        if len(entries) > 2:
            self.projected = entries[2].flatten(1)[:, : layer.config.qkv_a_dim]
        return hidden.to(x.dtype)


class KimiK2ForVllmNeuron(nn.Module):
    """Kimi-K2 for vllm-neuron's torch-native line; K2.5 and newer as text.

    Parameters have names and shapes of `kimi-k2 convert --target neuron`, so that its files load as they are.

    Args:
        vllm_config: vLLM's; read where `from_configs` was not called.
        prefix: vLLM's; must be empty.
        hf_config: of the checkpoint.
        neuron_config: the line's.

    Raises:
        ConfigError: another model of this architecture, an option that is not obeyed, sizes that do not divide.
    """

    inv_freq: Tensor
    first_expert: Tensor
    # vLLM's SupportsEagle3; which of the two questions is asked depends on the version.
    supports_eagle3, has_own_lm_head, has_own_embed_tokens = True, False, False
    aux_layers: tuple[int, ...] = ()

    def __init__(
        self, vllm_config: Any = None, prefix: str = "", *, hf_config: Any = None, neuron_config: Any = None
    ) -> None:
        super().__init__()
        if prefix:
            raise ConfigError(f"expected none, got {prefix!r}", field="prefix")
        check_neuron_config(neuron_config)
        hf_config = hf_config if hf_config is not None else vllm_config.model_config.hf_config
        self.config = config = KimiK2Config.from_engine(hf_config)
        self.dtype = torch.get_default_dtype() if vllm_config is None else vllm_config.model_config.dtype
        config_dtype = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
        if vllm_config is None and config_dtype is not None:
            self.dtype = getattr(torch, config_dtype) if isinstance(config_dtype, str) else config_dtype
        self.experts = getattr(neuron_config, "quantization", None) or DEFAULT_FORMAT
        self.ranks = Ranks.of_process(neuron_config)
        self.kernels, self.whole = Kernels.find(), expert_formats()[self.experts].tiles
        if self.whole:
            whole_layers.check_model(config, int(self.ranks.tp.world_size), self.kernels.cores, halves=True)
        self.planned = planned_tensors(config, self.ranks, self.experts, self.dtype)
        if any(tensor.dtype == FP8 for tensor in self.planned) and neuron_config is not None:
            # The runner reads this word once the model is made, and tells the compiler of Trainium2 by it that its
            # e4m3 takes the values (else NCC_EVRF051).
            neuron_config.quantization = "fp8"
        for tensor in self.planned:
            _place(self, tensor.name, torch.empty(tensor.local_shape, dtype=tensor.dtype))
        # Computed, not loaded: on the CPU even where the line makes the model on the meta device.
        rope = RotaryEmbedding(config, device="cpu")
        self.multiplier = rope.multiplier
        self.register_buffer("inv_freq", rope.inv_freq, persistent=False)
        count = config.n_routed_experts // self.ranks.moe_ep
        first = self.ranks.moe_rank * self.ranks.moe_ep // self.ranks.of_moe * count
        self.register_buffer("first_expert", torch.tensor(first, device="cpu"), persistent=False)
        self.sampling, self.max_logprobs = getattr(neuron_config, "on_device_sampling_config", None), 0
        if self.sampling is not None:
            from vllm_neuron.nn import Sampler
            from vllm_neuron.nn.rejection_sampler import rejection_sampler

            group = getattr(self.ranks.tp, "device_group", None) if self.ranks.tp.world_size > 1 else None
            self.sampler = Sampler(self.sampling, process_group=group)
            self.rejection_sampler = rejection_sampler
            self.max_logprobs = neuron_config.max_logprobs
        self._layers: list[Layer] = []

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any) -> KimiK2ForVllmNeuron:
        """The line's constructor."""
        return cls(hf_config=hf_config, neuron_config=neuron_config)

    def load_weights(self, checkpoint_path: str | Path, device: torch.device, download_dir: Any = None) -> None:
        """This rank's weights from a checkpoint or a conversion, see `loading.rank_tensors`.

        Raises:
            CheckpointError, ConfigError: see there.
        """
        state = {}
        for name, tensor in rank_tensors(
            checkpoint_path, self.config, self.planned, self.ranks, self.experts, self.dtype
        ):
            shape = self.get_parameter(name).shape
            if tensor.shape != shape:
                raise TensorShapeError(f"is {list(tensor.shape)}, expected {list(shape)}", tensor=name)
            state[name] = nn.Parameter(tensor.to(device), requires_grad=False)
        self.load_state_dict(state, strict=True, assign=True)
        self.inv_freq = self.inv_freq.to(device)
        self.first_expert = self.first_expert.to(device)

    def get_kv_spec(self) -> Any:
        """One head of half a latent entry a layer, for each of the K and V pages."""
        from vllm_neuron.model.kv_cache import KVSpec, LayerSpec

        half = self.config.cache_dim // 2
        layers = range(self.config.num_hidden_layers)
        return KVSpec(layers=[LayerSpec(layer_name(layer), 1, half, self.dtype) for layer in layers])

    def bind_kv_cache(self, kv_caches: dict[str, list[Tensor]]) -> None:
        """Take the pages that the runner allocated, K's and V's by layer.

        Raises:
            ConfigError: they hold another dtype than the model's or e4m3.
        """
        layers = self.get_submodule("layers")
        self._layers = [
            Layer(self.config, number, layers.get_submodule(str(number)), self.ranks, self.first_expert)
            for number in range(self.config.num_hidden_layers)
        ]
        for number, layer in enumerate(self._layers):
            k, v = kv_caches[layer_name(number)]
            taken = (self.dtype,) if self.whole else (self.dtype, FP8)
            if k.dtype not in taken:
                expected = " or ".join(map(str, taken))
                raise ConfigError(f"expected {expected}, got {k.dtype}", field="kv_cache_dtype")
            layer.attention.pages = Pages(k, v, self.kernels)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Return the residual stream before these layers too, which an Eagle3 head reads.

        Raises:
            ConfigError: there is no such layer.
        """
        most = self.config.num_hidden_layers
        if wrong := [layer for layer in layers if not 0 <= layer < most]:
            raise ConfigError(f"expected layers 0 to {most - 1}, got {wrong[0]}", field="aux_hidden_state_layers")
        self.aux_layers = tuple(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Where the head's configuration names none."""
        most = self.config.num_hidden_layers
        return 2, most // 2, most - 3

    get_eagle3_default_aux_hidden_state_layers = get_eagle3_aux_hidden_state_layers

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """int64 or int32 [T] to [T, H]: each rank has some columns of every row."""
        rows = embedding(input_ids, self.get_parameter("embed_tokens.weight"))
        whole: Tensor = self.ranks.tp.all_gather(rows, -1)
        return whole

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Normed [B, H] to [B, vocab_size], float32."""
        gathered: Tensor = self.ranks.tp.all_gather(self._local_logits(hidden_states), -1)
        return gathered

    def _local_logits(self, hidden_states: Tensor) -> Tensor:
        return linear(hidden_states, self.get_parameter("lm_head.weight")).to(torch.float32)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn_metadata: dict[str, Any],
        sampling_positions: Tensor,
        sampling_params: Tensor | None = None,
        spec_decode_metadata: Any = None,
        logit_mask: Tensor | None = None,
        rank: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_token_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """A prompt's part, or a token (or several) of each line.

        Args:
            input_ids: [T], padded to a bucket.
            positions: [T].
            attn_metadata: by layer, see `layer_name`.
            sampling_positions: [B], tokens whose logits are wanted.
            sampling_params: [B, 3], top_k, top_p, temperature.
            spec_decode_metadata: of drafts among the tokens, all of which `sampling_positions` name; for the line's
                rejection sampler on the device. Without sampling there the runner judges them.
            logit_mask: bool [B, vocab_size], allowed tokens.
            rank: this rank among those of tensor parallelism, a scalar; needed at prefill on several ranks.
            inputs_embeds, is_token_ids: None: the line gives embeddings to its own models of images alone.

        Returns:
            With sampling on the device, tokens [B] (of drafts, what the rejection sampler gave) and, if `max_logprobs`
            is set, logits; else logits [B, vocab_size]. With auxiliary layers these, [T, layers * H], come second.

        Raises:
            GenerationError: drafts without auxiliary layers, a divided prompt without its rank, or embeddings.
        """
        if inputs_embeds is not None or is_token_ids is not None:
            raise GenerationError("inputs_embeds, is_token_ids: expected None, as prompts are tokens here")
        if spec_decode_metadata is not None and not self.aux_layers:
            raise GenerationError("spec_decode_metadata: expected None, as no Eagle3 head set auxiliary layers")
        x = self.embed_input_ids(input_ids)
        tokens, size = len(x), int(self.ranks.tp.world_size)
        first = attn_metadata[layer_name(0)]
        prefill = first["max_query_len"] > first["decode_token_threshold"]
        divided = size > 1 and prefill and tokens % size == 0 and self.ranks.dp is None
        if divided:
            if rank is None:
                raise GenerationError("rank: a prompt on several ranks needs it")
            x = x.view(size, tokens // size, -1).index_select(0, rank.view(1).to(torch.long)).squeeze(0)
        positions = positions.to(torch.long)
        rotation = cos_sin(positions, self.inv_freq, self.multiplier, self.dtype)
        whole = None if prefill else self._whole_layers(x, positions, first)
        aux = []
        for number, layer in enumerate(self._layers):
            if number in self.aux_layers:
                aux.append(self.ranks.tp.all_gather(x, 0) if divided else x)
            metadata = attn_metadata[layer_name(number)]
            if whole is not None and layer.experts is not None:
                x = whole(layer, x, metadata)
            else:
                x = layer(x, positions, rotation, metadata, divided)
        x = rms_norm(x, self.get_parameter("norm.weight"), self.config.rms_norm_eps)
        if divided:
            x = self.ranks.tp.all_gather(x, 0)
        x = x.index_select(0, sampling_positions.to(torch.long))
        if self.sampling is not None:
            local = self._local_logits(x)
            sampled: Tensor = self.sampler(local, sampling_params, logit_mask=logit_mask, tp_rank=rank)
            if spec_decode_metadata is not None:
                sampled = self.rejection_sampler(spec_decode_metadata, sampled)
            gathered = self.ranks.tp.all_gather(local, -1) if self.max_logprobs else None
            return (sampled, torch.cat(aux, dim=-1), gathered) if aux else (sampled, gathered)
        logits = self.compute_logits(x)
        if logit_mask is not None:
            logits = logits.masked_fill(~logit_mask, float("-inf"))
        return (logits, torch.cat(aux, dim=-1)) if aux else logits

    def _whole_layers(self, x: Tensor, positions: Tensor, metadata: Any) -> WholeLayers | None:
        """The kernels of a step of [T, H]; None where they do not run, and PyTorch computes with their weights."""
        kernels, table = self.kernels, metadata["block_table_tensor"]
        if not self.whole or len(x) > whole_layers.MOST_TOKENS or not kernels.can_run(x):
            return None
        runs = kernels.runs(table, int(metadata["block_size"]))
        if runs is None:
            return None
        angles = cos_sin(positions, self.inv_freq, self.multiplier, torch.float32)
        first = next(layer for layer in self._layers if layer.experts is not None)
        return WholeLayers(kernels, first, positions, layer_arguments.rotation(*angles), table, runs)


def _place(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` the parameter `name` of `root`, with the modules on its way."""
    path, _, last = name.rpartition(".")
    module = root
    for step in path.split("."):
        if not hasattr(module, step):
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
