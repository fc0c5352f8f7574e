"""KimiK2Config: a checkpoint's `config.json`, validated field by field.

Reads the configurations of K2-Instruct, K2-Instruct-0905, K2-Thinking, K2.5, K2.6 and K2.7. The last three
wrap the language model in `text_config`, prefix its tensor names with `language_model.`, and add a `vision_config`.
transformers 4.x writes `rope_theta` and `rope_scaling`, transformers 5.x `rope_parameters`; both are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    Strict,
    ValidationError,
    model_validator,
)

from kimi_k2.config_fields import check_limits, first_fault
from kimi_k2.config_file import KV_CACHE_SCHEME, normalised
from kimi_k2.errors import ConfigError
from kimi_k2.files import read_data
from kimi_k2.limits import CONFIG_FIELDS, EXPERTS_OF_ALL_LAYERS, YARN_FIELDS
from kimi_k2.quantization.stored import StoredFormat, format_of, parse_quantization
from kimi_k2.vision_config import VisionConfig

# Hugging Face builds q_a_layernorm and kv_a_layernorm with the class default and never passes
# config.rms_norm_eps on. The checkpoints were trained and are served that way.
LATENT_NORM_EPS = 1e-6

MODELOPT = "hf_quant_config.json"
PRESET_DIR = Path(__file__).parent / "presets"
ADAPTER = "adapter_config.json"
# Fields of KimiK2Config that no file has under that name.
DERIVED = ("quantization", "kv_cache_fp8", "tensor_prefix", "vision")


class YarnScaling(BaseModel):
    """YaRN parameters (Peng et al. 2023, arXiv 2309.00071), named as in `rope_scaling`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: PositiveFloat | None = None
    truncate: bool = True  # the ramp's ends are rounded to whole pairs

    @model_validator(mode="after")
    def _within_limits(self) -> YarnScaling:
        check_limits(self, YARN_FIELDS)
        return self

    @staticmethod
    def _mscale(factor: float, mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    @property
    def rotary_multiplier(self) -> float:
        """Factor on cos and sin: mscale over mscale_all_dim, 1.0 for Kimi-K2 where both are 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.factor, self.mscale) / self._mscale(self.factor, self.mscale_all_dim)
        return self._mscale(self.factor, 1.0)

    @property
    def softmax_multiplier(self) -> float:
        """Factor on the softmax scale: the square of the `mscale_all_dim` magnitude."""
        return self._mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


_ADDED_BY_VLLM = ("total_num_heads", "total_num_kv_heads")


class KimiK2Config(BaseModel):
    """The language model's hyperparameters; field names and meanings are Hugging Face's.

    Raises:
        ConfigError: (from the constructors `from_pretrained`, `from_dict`, `from_preset`) naming the field
            that is missing, mistyped or inconsistent.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    model_type: Literal["kimi_k2", "deepseek_v3"] = "kimi_k2"
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    n_routed_experts: PositiveInt
    n_shared_experts: NonNegativeInt
    num_experts_per_tok: PositiveInt
    first_k_dense_replace: NonNegativeInt
    moe_layer_freq: PositiveInt = 1
    n_group: PositiveInt
    topk_group: PositiveInt
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: bool
    routed_scaling_factor: PositiveFloat
    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    rope_theta: PositiveFloat
    rope_scaling: YarnScaling | None = None
    rms_norm_eps: PositiveFloat
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    tie_word_embeddings: Literal[False] = False
    bos_token_id: int | None = None
    eos_token_id: int | Annotated[tuple[int, ...], Strict(False)] | None = None  # a list in the file
    pad_token_id: int | None = None
    num_nextn_predict_layers: NonNegativeInt = 0
    initializer_range: PositiveFloat = 0.02
    quantization: SerializeAsAny[StoredFormat] | None = None
    kv_cache_fp8: bool = False  # the checkpoint asks for an e4m3 KV cache: compressed-tensors' kv_cache_scheme
    tensor_prefix: Literal["", "language_model."] = ""
    chat_style: Literal["instruct", "thinking", "k2.5", "k2.7"] | None = None
    vision: VisionConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> KimiK2Config:
        def require(field: str, condition: bool, expectation: str) -> None:
            if not condition:
                raise ConfigError(f"{expectation}, got {getattr(self, field)!r:.100}", field=field)

        check_limits(self, CONFIG_FIELDS)
        require(
            "n_routed_experts",
            self.num_hidden_layers * self.n_routed_experts <= EXPERTS_OF_ALL_LAYERS,
            f"expected at most {EXPERTS_OF_ALL_LAYERS} experts in all {self.num_hidden_layers} layers",
        )
        require(
            "num_key_value_heads",
            self.num_key_value_heads == self.num_attention_heads,
            f"expected num_attention_heads ({self.num_attention_heads}), since MLA has one latent for all heads",
        )
        require("qk_rope_head_dim", self.qk_rope_head_dim % 2 == 0, "expected an even number (RoPE turns pairs)")
        require(
            "n_group",
            self.n_routed_experts % self.n_group == 0,
            f"expected a divisor of n_routed_experts ({self.n_routed_experts})",
        )
        require("topk_group", self.topk_group <= self.n_group, f"expected at most n_group ({self.n_group})")
        require(
            "num_experts_per_tok",
            self.num_experts_per_tok <= self.n_routed_experts // self.n_group * self.topk_group,
            "expected at most the number of experts in the topk_group chosen groups",
        )
        require(
            "n_group",
            self.n_group == 1 or self.n_routed_experts // self.n_group >= 2,
            "expected groups of at least two experts (a group is ranked by its best two)",
        )
        require("num_nextn_predict_layers", self.num_nextn_predict_layers == 0, "expected 0 (no MTP layers)")
        if self.vision is not None and self.vision.image_token_id >= self.vocab_size:
            token_id = self.vision.image_token_id
            raise ConfigError(f"expected below {self.vocab_size}, got {token_id}", field="media_placeholder_token_id")
        for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
            tokens = getattr(self, field)
            tokens = tokens if isinstance(tokens, tuple) else [tokens]
            known = all(token is None or 0 <= token < self.vocab_size for token in tokens)
            require(field, known, f"expected below {self.vocab_size}")
        return self

    # -- derived -----------------------------------------------------------------------------------

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head: qk_nope_head_dim + qk_rope_head_dim (192)."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dim(self) -> int:
        """Values a token a layer in the compressed cache: kv_lora_rank + qk_rope_head_dim (576)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qkv_a_dim(self) -> int:
        """Values a token of both down projections: q_lora_rank + cache_dim (2112)."""
        return self.q_lora_rank + self.cache_dim

    @property
    def softmax_scale(self) -> float:
        """Scale on the attention logits: qk_head_dim^-0.5 times the squared YaRN magnitude."""
        yarn = self.rope_scaling.softmax_multiplier if self.rope_scaling else 1.0
        result: float = self.qk_head_dim**-0.5 * yarn
        return result

    @property
    def latent_norm_eps(self) -> float:
        """Epsilon of q_a_layernorm and kv_a_layernorm; see LATENT_NORM_EPS."""
        return LATENT_NORM_EPS

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) holds routed experts rather than a dense MLP."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def format_of_experts(self, projection: str = "experts.0.gate_proj") -> StoredFormat:
        """What a projection of the first layer with experts is stored in."""
        layer = next((layer for layer in range(self.num_hidden_layers) if self.is_moe_layer(layer)), 0)
        return format_of(self.quantization, f"model.layers.{layer}.mlp.{projection}")

    # -- constructors ------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> KimiK2Config:
        """Read `config.json` from a checkpoint directory (or the path of the JSON file itself)."""
        path = Path(directory)
        if not path.exists():
            if (PRESET_DIR / f"{directory}.json").is_file():
                raise ConfigError(
                    "the name of a published configuration, which has no weights; "
                    "expected a checkpoint's directory or repository",
                    file=path,
                )
            raise ConfigError("no such directory; expected a checkpoint, or its config.json", file=path)
        if path.suffix == ".gguf" or (
            path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf"))
        ):
            raise ConfigError("GGUF, llama.cpp's format; expected a Hugging Face checkpoint in safetensors", file=path)
        if (path / ADAPTER).exists():
            raise ConfigError(
                "an adapter (PEFT's), which transformers would add to the weights beside it; merge it, or move it away",
                file=path / ADAPTER,
            )
        path = path / "config.json" if path.is_dir() else path
        try:
            raw = read_data(path, ConfigError)
        except FileNotFoundError:
            raise ConfigError("no such file; expected a Hugging Face config.json", file=path) from None
        return cls.from_dict(_with_modelopt(raw, path.with_name(MODELOPT)), file=path)

    @classmethod
    def from_preset(cls, name: str, *, vision: Any = None, **overrides: Any) -> KimiK2Config:
        """One of the published configurations that ship with the package, e.g. `kimi-k2-instruct-0905`.

        Args:
            name: of a file in presets/, without its suffix.
            vision: fields of its `vision_config` to override, in the published names, if it has one.
            overrides: fields of the language model. Media tokens keep their place at the end of the vocabulary.
        """
        path = PRESET_DIR / f"{name}.json"
        if not path.is_file():
            raise ConfigError(f"unknown preset '{name}'; expected one of: {', '.join(published())}")
        raw = raw_preset(name)
        text = raw.get("text_config", raw)
        if "vision_config" in raw:
            raw["media_placeholder_token_id"] += overrides.get("vocab_size", text["vocab_size"]) - text["vocab_size"]
            joined = {"text_hidden_size": overrides.get("hidden_size", text["hidden_size"])}
            raw["vision_config"].update({**joined, **(vision or {})})
        text.update(overrides)
        return cls.from_dict(raw, file=None if overrides else path)  # of which an override may be wrong

    @classmethod
    def load(cls, model: str | Path) -> KimiK2Config:
        """A checkpoint directory's configuration, or a published one by name where there is no such directory.

        Raises:
            ConfigError: neither exists, or a field is wrong.
        """
        if Path(model).exists():
            return cls.from_pretrained(model)
        if not (PRESET_DIR / f"{model}.json").is_file():
            raise ConfigError(
                f"no such directory, and not one of the published configurations: {', '.join(published())}", file=model
            )
        return cls.from_preset(str(model))

    @classmethod
    def from_engine(cls, hf_config: Any, added: Collection[str] = ()) -> KimiK2Config:
        """Validate what an engine made of config.json; without what vLLM adds to its quantization while it loads.

        Args:
            hf_config: a transformers configuration (`to_dict`).
            added: fields that the engine adds to it.

        Raises:
            ConfigError: see `from_dict`.
        """
        raw = {name: value for name, value in hf_config.to_dict().items() if name not in added}
        for holder in (raw, raw.get("text_config")):
            for key in ("quantization_config", "compression_config"):
                if isinstance(holder, dict) and isinstance(quantization := holder.get(key), dict):
                    if isinstance(said := quantization.get("quantization"), dict):  # hf_quant_config.json's
                        quantization = {"quant_method": "modelopt", **said}
                    holder[key] = {name: value for name, value in quantization.items() if name not in _ADDED_BY_VLLM}
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Any, *, file: str | Path | None = None) -> KimiK2Config:
        """Validate a parsed config.json, of transformers 4.x or 5.x, wrapped in `text_config` or not.

        Raises:
            ConfigError: a field is missing, wrong or unknown; with its name in the file.
        """
        try:
            read = normalised(raw, set(cls.model_fields) - set(DERIVED))
        except ConfigError as error:
            raise ConfigError(error.message, field=error.field, file=error.file or file) from None
        try:
            return cls.model_validate(read.flat)
        except ConfigError as error:
            raise ConfigError(error.message, field=error.field and read.name(error.field), file=file) from None
        except ValidationError as error:
            raise first_fault(error, file, read.name) from None

    def to_hf_dict(self) -> dict[str, Any]:
        """The plain (unwrapped) `config.json` content in transformers 4.x form, quantization included."""
        raw = self.model_dump(exclude=set(DERIVED), exclude_none=True)
        raw["architectures"] = ["DeepseekV3ForCausalLM"]
        if self.rope_scaling:
            raw["rope_scaling"] = {"type": "yarn", **self.rope_scaling.model_dump(exclude_none=True)}
        if self.quantization:
            raw["quantization_config"] = self.quantization.to_hf_dict()
            if self.kv_cache_fp8:
                raw["quantization_config"]["kv_cache_scheme"] = dict(KV_CACHE_SCHEME)
        return raw


def _with_modelopt(raw: Any, path: Path) -> Any:
    """A config.json with what modelopt says in a file of its own, which holds for the whole model.

    Raises:
        ConfigError: the file is no such file, or says something else than config.json.
    """
    if not path.is_file() or not isinstance(raw, dict):
        return raw
    modelopt = read_data(path, ConfigError)
    said = modelopt.get("quantization") if isinstance(modelopt, dict) else None
    if not isinstance(said, dict):
        raise ConfigError("expected an object", field="quantization", file=path)
    quantization = {"quant_method": "modelopt", **said}
    try:
        stored_format = parse_quantization(quantization, field="quantization")
    except ConfigError as error:
        raise ConfigError(error.message, field=error.field, file=path) from None
    own = raw.get("quantization_config")
    if own is not None and parse_quantization(own) != stored_format:
        raise ConfigError(f"says something else than {MODELOPT}", field="quantization_config", file=path.parent)
    return {**raw, "quantization_config": quantization} if own is None else raw


def raw_preset(name: str = "kimi-k2-instruct-0905") -> dict[str, Any]:
    """A file of presets/; it, or its text_config, with `like` says what differs from another of them."""
    raw: dict[str, Any] = json.loads((PRESET_DIR / f"{name}.json").read_text(encoding="utf-8"))
    if "like" in raw.get("text_config", ()):
        raw["text_config"] = changed(raw_preset(raw["text_config"].pop("like")), raw["text_config"])
    return changed(raw_preset(raw.pop("like")), raw) if "like" in raw else raw


def changed(base: Any, changes: Any) -> Any:
    """An object with other members, and with other members of its members."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return {**base, **{name: changed(base.get(name), value) for name, value in changes.items()}}


def published() -> list[str]:
    """The names of presets/."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.json"))
