"""KimiK2InferenceConfig: Hugging Face's fields under the names that NxDI's modules read, checked by kimi_k2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.model.rope import rope_inv_freq
from kimi_k2.quantization.stored import parse_quantization
from kimi_k2.sharding.attention_tiles import check_sizes
from kimi_k2.sharding.experts import tiles
from kimi_k2.sharding.experts.format import ExpertFormat, held_format, quantization_types
from kimi_k2.sharding.layout import Decode, Layout

from . import lora, options
from .presharding import layout_of
from .quantized import MODULES_TO_NOT_CONVERT

# The Hugging Face fields that are carried along; enough to rebuild a KimiK2Config from a saved neuron config.
HF_FIELDS = tuple(name for name in KimiK2Config.model_fields if name not in ("quantization", "tensor_prefix"))


EXPERTS_OF_KERNEL = 8


class KimiK2NeuronConfig(MoENeuronConfig):
    """MoENeuronConfig with what Kimi-K2's router and experts need.

    Args:
        decode: form of a decode step. `xla`: PyTorch operations. `layers`: all MoE layers in one NKI kernel with its
            collectives inside (decode_layers.py): the vendor's `nki` where it is importable, and in CPU mode its
            emulator. The weights are those of `kimi-k2 convert --preset`. With `lora_config` it is always `xla`.
        decode_layers_per_kernel: with `layers`, so many MoE layers a call, should one kernel of all not compile; None
            for all.
        prefill_rows_at_once: tokens of the experts' blocks that one operation of the PyTorch prefill takes: more move
            fewer bytes, and hold more.
        compiler_args: arguments of neuronx-cc by submodel tag; the model has a plain set for a tag that is not there.
        num_cores_per_group: with `flash_decoding_enabled`, ranks that share one latent cache. NxDI's name and rule: by
            default all, as there is one key head.

    Raises:
        ConfigError: an option that the model does not follow, see options.py.
    """

    def __init__(
        self,
        *,
        decode: Decode = "xla",
        decode_layers_per_kernel: int | None = None,
        prefill_rows_at_once: int = 16384,
        compiler_args: Mapping[str, Sequence[str]] | None = None,
        num_cores_per_group: int | None = None,
        **kwargs: Any,
    ) -> None:
        options.check(kwargs)
        if prefill_rows_at_once < 1:
            raise ConfigError(f"expected at least 1, got {prefill_rows_at_once}", field="prefill_rows_at_once")
        if lora.in_xla_form(decode, kwargs) != decode:
            decode, decode_layers_per_kernel = "xla", None
        # The router returns weights that are normalised and scaled already.
        kwargs["disable_normalize_top_k_affinities"] = True
        kwargs.setdefault("router_config", {"dtype": torch.float32, "act_fn": "sigmoid"})
        # Loading is reading then: NxD's transformation of layouts runs on the host, over a terabyte.
        kwargs.setdefault("weights_to_skip_layout_optimization", [".*"])
        kwargs.setdefault("disable_kv_cache_tiling", True)  # which NxDI turns on for drafts
        if kwargs.get("is_continuous_batching") and not kwargs.get("is_block_kv_layout"):
            kwargs.setdefault("apply_seq_ids_mask", True)
        if kwargs.get("quantized"):
            if kwargs.get("quantization_type") not in quantization_types():
                expected = " or ".join(quantization_types())
                raise ConfigError(
                    f"expected {expected}, got {kwargs.get('quantization_type')!r}", field="quantization_type"
                )
            kwargs.setdefault("modules_to_not_convert", list(MODULES_TO_NOT_CONVERT))
            # NxDI demands a path; our loader converts from the checkpoint itself.
            kwargs.setdefault("quantized_checkpoints_path", "")
        super().__init__(**kwargs)
        options.check(vars(self))
        options.check_together(self)
        self.decode, self.decode_layers_per_kernel = decode, decode_layers_per_kernel
        options.check_decode(self)
        lora.check(self)
        self.num_cores_per_group = options.cores_per_group(self, num_cores_per_group)
        if self.query_group:
            options.check_shared_cache(self, self.num_cores_per_group)
        elif self.layers:
            options.check_slots(self)
        self.prefill_rows_at_once = prefill_rows_at_once
        self.compiler_args = {tag: list(arguments) for tag, arguments in (compiler_args or {}).items()}

    @property
    def layers(self) -> bool:
        """Whether a decode step's MoE layers are one NKI kernel, with experts in tiles."""
        return self.decode == "layers"

    @property
    def query_group(self) -> int:
        """Ranks that share a cache, each of which makes the queries of all their heads; 0 where none does."""
        return self.num_cores_per_group if self.layers and self.num_cores_per_group > 1 else 0


def load_kimi_config(source: str | Path | KimiK2Config) -> Callable[[InferenceConfig], None]:
    """The `load_config` callable for a checkpoint directory (or a configuration); transformers knows no `kimi_k2`.

    Raises:
        ConfigError: config.json is missing or invalid, naming the field.
    """
    config = source if isinstance(source, KimiK2Config) else KimiK2Config.from_pretrained(source)

    def load(target: InferenceConfig) -> None:
        fields = config.model_dump()
        for name in HF_FIELDS:
            setattr(target, name, fields[name])
        target.tensor_prefix = config.tensor_prefix
        if config.quantization is not None:  # whether attention and the shared expert have FP8 blocks
            target.quantization_config = config.quantization.to_hf_dict()
        if not isinstance(source, KimiK2Config):
            target._name_or_path = str(source)

    return load


class KimiK2InferenceConfig(InferenceConfig):
    """Configuration of NeuronKimiK2ForCausalLM.

    `hf` is the validated KimiK2Config; all mathematics reads it. The other attributes are what NxDI's own modules look
    for (`num_local_experts`, `intermediate_size` of an expert, `head_dim` ...).
    """

    intermediate_size: int

    def add_derived_config(self) -> None:
        """Set NxDI's names from Hugging Face's."""
        self.num_cores_per_group = self.neuron_config.num_cores_per_group
        missing = [name for name in self.get_required_attributes() if not hasattr(self, name)]
        if missing:
            raise ConfigError("missing", field=missing[0])
        hf = self.hf
        if not hasattr(self, "dense_intermediate_size"):
            self.dense_intermediate_size = hf.intermediate_size
            self.intermediate_size = hf.moe_intermediate_size  # ExpertMLPsV2 reads the expert's width here
        self.num_local_experts = hf.n_routed_experts
        # What model_base asks every Hugging Face config for.
        self.output_attentions = self.output_hidden_states = False
        self.return_dict = self.use_cache = True
        self._check_parallelism()

    @property
    def hf(self) -> KimiK2Config:
        """The validated Hugging Face configuration."""
        # transformers' deepseek_v3 class keeps no field that it has no use for, such as moe_layer_freq.
        fields = {name: getattr(self, name) for name in HF_FIELDS if hasattr(self, name)}
        fields["intermediate_size"] = getattr(self, "dense_intermediate_size", fields["intermediate_size"])
        if stored := getattr(self, "quantization_config", None):
            fields["quantization"] = parse_quantization(stored)
        return KimiK2Config.model_validate(fields)

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention's scores, with YaRN's magnitude."""
        return self.hf.softmax_scale

    def rotary(self) -> tuple[list[float], float]:
        """Inverse frequencies of the rotary pairs, and the factor on cos and sin."""
        scaling = self.hf.rope_scaling
        return rope_inv_freq(self.hf, "cpu").tolist(), scaling.rotary_multiplier if scaling else 1.0

    @property
    def layout(self) -> Layout:
        """Ranks and formats of the weights."""
        return layout_of(self.neuron_config)

    @property
    def experts(self) -> ExpertFormat:
        """How the routed experts are held, and in tiles the shared one."""
        held = held_format(self.neuron_config)
        return held.for_layout(self.hf, self.layout) if held.tiles else held

    @property
    def shared_width(self) -> int:
        """Columns of the shared expert that a rank holds in tiles; 0 where it is three linears."""
        return 0 if self.experts.shared is None else tiles.shared_width(self.hf, self.layout)

    @property
    def shared_tiles(self) -> torch.dtype | None:
        """Dtype of the shared expert's tiles; None where it is three linears."""
        shared, dtype = self.experts.shared, self.neuron_config.torch_dtype
        if shared is None:
            return None
        tile_dtype: torch.dtype = dtype if shared.quantization_type is None else torch.float8_e4m3fn
        return tile_dtype

    def _check_parallelism(self) -> None:
        hf, neuron = self.hf, self.neuron_config
        tp, moe_tp, moe_ep = neuron.tp_degree, neuron.moe_tp_degree, neuron.moe_ep_degree
        if hf.n_group != 1:
            raise ConfigError(f"expected 1, got {hf.n_group}", field="n_group")
        if moe_ep > 1 and moe_tp * moe_ep != tp:
            raise ConfigError(f"moe_tp_degree x moe_ep_degree is {moe_tp * moe_ep}, expected tp_degree ({tp})")
        for field, size, degree in (
            ("num_attention_heads", hf.num_attention_heads, tp),
            ("moe_intermediate_size", hf.moe_intermediate_size, moe_tp if moe_ep > 1 else tp),
            ("n_routed_experts", hf.n_routed_experts, moe_ep),
            ("intermediate_size", hf.intermediate_size, tp),
            ("hidden_size", hf.hidden_size, tp if neuron.layers else 1),
        ):
            if size % degree:
                raise ConfigError(f"{size} does not divide among {degree} ranks", field=field)
        if neuron.layers:
            self._check_layers()

    def _check_layers(self) -> None:
        hf, neuron = self.hf, self.neuron_config
        tiles.check_width(hf, self.layout)
        check_sizes(hf)
        options.check_layer_sizes(hf, neuron.tp_degree, neuron.query_group)
        if not self.shared_width:
            expected = "the shared expert in tiles, of 32 or 64 columns a rank"
            raise ConfigError(f"decode 'layers' needs {expected}", field="decode")
        rank, rope, cores = hf.kv_lora_rank, hf.qk_rope_head_dim, neuron.logical_nc_config
        if rank % 128 or rank > 512 or rope > 128:
            raise ConfigError(
                f"the attention kernel takes a multiple of 128 up to 512, and up to 128 rotary values, got {rank} and"
                f" {rope}",
                field="kv_lora_rank",
            )
        if hf.num_experts_per_tok != EXPERTS_OF_KERNEL:
            raise ConfigError(
                f"the experts kernel takes {EXPERTS_OF_KERNEL}, got {hf.num_experts_per_tok}",
                field="num_experts_per_tok",
            )
        if hf.hidden_size % (128 * cores):
            raise ConfigError(
                f"the kernels take a multiple of {128 * cores}, got {hf.hidden_size}", field="hidden_size"
            )

    def get_required_attributes(self) -> list[str]:
        """All fields that KimiK2Config cannot do without."""
        return [name for name, field in KimiK2Config.model_fields.items() if field.is_required()]

    @classmethod
    def get_neuron_config_cls(cls) -> type[KimiK2NeuronConfig]:
        """The neuron config class that NxDI builds from JSON."""
        return KimiK2NeuronConfig
