"""KimiK2InferenceConfig: Hugging Face's fields under the names that NxDI's modules read, checked by kimi_k2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from neuronx_distributed_inference.models.config import InferenceConfig

from kimi_k2.config import KimiK2Config
from kimi_k2.contrib_model import configuration_kimi_k2 as base
from kimi_k2.contrib_model.quantization import StoredForm
from kimi_k2.plan import nxdi
from kimi_k2.quantization.stored import parse_quantization
from kimi_k2.sharding.experts import PARTITIONS, ExpertFormat, shared_width
from kimi_k2.sharding.layout import Decode, Layout
from kimi_k2.sharding.whole_layers import slots_at_once, token_buckets

from . import lora
from .presharding import layout_of

# NxDI's options beyond the hand-written class's, with tests in test/nxd, and this class's own.
FOLLOWED = frozenset((
    "disable_kv_cache_tiling", "enable_eagle_speculation", "enable_fused_speculation", "flash_decoding_enabled",
    "is_block_kv_layout", "is_eagle3", "is_eagle_draft", "is_prefix_caching", "lora_config", "pa_block_size",
    "pa_num_blocks", "prefix_buckets", "speculation_length", "tensor_capture_config",
    "decode", "decode_layers_per_kernel", "num_cores_per_group",
))  # fmt: skip

# The Hugging Face fields that are carried along; enough to rebuild a KimiK2Config from a saved neuron config.
HF_FIELDS = tuple(name for name in KimiK2Config.model_fields if name not in ("quantization", "tensor_prefix"))


class KimiK2NeuronConfig(base.KimiK2NeuronConfig):
    """The hand-written configuration with forms of decode, flash decoding, prefix caching, adapters and drafts.

    Args:
        decode: form of a decode step. `xla`: PyTorch operations. `layers`: all MoE layers in one NKI kernel with its
            collectives inside (decode_layers.py): the vendor's `nki` where it is importable, and in CPU mode its
            emulator. The weights are those of `kimi-k2 convert --preset`. With `lora_config` it is always `xla`.
        decode_layers_per_kernel: with `layers`, so many MoE layers a call, should one kernel of all not compile; None
            for all.
        num_cores_per_group: with `flash_decoding_enabled`, ranks that share one latent cache. NxDI's name and rule: by
            default all, as there is one key head.
        kwargs: the hand-written class's arguments.

    Raises:
        ConfigError: an option that the model does not follow, see `kimi_k2.plan.nxdi`.
    """

    FOLLOWED = base.FOLLOWED | FOLLOWED
    token_generation_buckets: list[int] | None

    def __init__(
        self,
        *,
        decode: Decode = "xla",
        decode_layers_per_kernel: int | None = None,
        num_cores_per_group: int | None = None,
        **kwargs: Any,
    ) -> None:
        if lora.in_xla_form(decode, kwargs) != decode:
            decode, decode_layers_per_kernel = "xla", None
        kwargs.setdefault("disable_kv_cache_tiling", True)  # which NxDI turns on for drafts
        if kwargs.get("is_block_kv_layout"):
            kwargs.setdefault("apply_seq_ids_mask", False)  # a sequence has blocks, and no line
        self.decode, self.decode_layers_per_kernel = decode, decode_layers_per_kernel
        self.num_cores_per_group = num_cores_per_group
        with nxdi.typed():
            super().__init__(**kwargs)

    def check_together(self) -> None:
        """The base's, and `kimi_k2.plan.nxdi`'s."""
        super().check_together()
        lora.check(self)
        self.num_cores_per_group = group = nxdi.check_together(self)
        if self.layers and self.enable_bucketing and not self.token_generation_buckets:
            self.token_generation_buckets = token_buckets(self.seq_len, slots_at_once(self.logical_nc_config, group))

    @property
    def layers(self) -> bool:
        """Whether a decode step's MoE layers are one NKI kernel, with experts in tiles."""
        return self.decode == "layers"

    @property
    def query_group(self) -> int:
        """Ranks that share a cache, each of which makes the queries of all their heads; 0 where none does."""
        cores = self.num_cores_per_group or 1
        return cores if self.layers and cores > 1 else 0


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


class KimiK2InferenceConfig(base.KimiK2InferenceConfig):
    """The hand-written configuration of a model that kimi_k2 has checked; `hf` is that KimiK2Config."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with nxdi.typed():
            super().__init__(*args, **kwargs)

    def add_derived_config(self) -> None:
        """The base's."""
        super().add_derived_config()
        hf, neuron = self.hf, self.neuron_config
        self.num_cores_per_group = neuron.num_cores_per_group
        nxdi.check_kept(hf, self.layout, neuron.logical_nc_config)

    @property
    def hf(self) -> KimiK2Config:
        """The validated Hugging Face configuration."""
        # transformers' deepseek_v3 class keeps no field that it has no use for, such as moe_layer_freq.
        fields = {name: getattr(self, name) for name in HF_FIELDS if hasattr(self, name)}
        if stored := getattr(self, "quantization_config", None):
            fields["quantization"] = parse_quantization(stored)
        return KimiK2Config.model_validate(fields)

    @property
    def stored_form(self) -> StoredForm:
        """Of the experts' blocks; kimi_k2 reads more forms."""
        return StoredForm(block=self.hf.format_of_experts().e4m3_block)

    def held_blocks(self) -> tuple[int, int]:
        """The base's; of tiles 128 hidden values and a rank's columns."""
        width = self.moe_intermediate_size // self.neuron_config.moe_tp_degree
        return (PARTITIONS, width) if self.neuron_config.layers else super().held_blocks()

    @property
    def layout(self) -> Layout:
        """Ranks and formats of the weights."""
        return layout_of(self.neuron_config)

    @property
    def experts(self) -> ExpertFormat:
        """How the routed experts are held, and in tiles the shared one."""
        return self.layout.expert_format(self.hf)

    @property
    def shared_width(self) -> int:
        """Columns of the shared expert that a rank holds in tiles; 0 where it is three linears."""
        return 0 if self.experts.shared is None else shared_width(self.hf, self.layout.ranks)

    @property
    def shared_tiles(self) -> torch.dtype | None:
        """Dtype of the shared expert's tiles; None where it is three linears."""
        shared, dtype = self.experts.shared, self.neuron_config.torch_dtype
        if shared is None:
            return None
        tile_dtype: torch.dtype = dtype if shared.quantization_type is None else torch.float8_e4m3fn
        return tile_dtype

    @classmethod
    def get_neuron_config_cls(cls) -> type[KimiK2NeuronConfig]:
        """The neuron config class that NxDI builds from JSON."""
        return KimiK2NeuronConfig
