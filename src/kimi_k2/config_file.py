"""A config.json's spellings brought to one: transformers 4.x or 5.x, wrapped in `text_config` or not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from kimi_k2.config_fields import ONLY, check_architecture, refuse_unknown, same
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.stored import StoredFormat, parse_quantization
from kimi_k2.vision_config import OUTER_FIELDS, names_in_file, normalised_vision

QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
# attribute_map of transformers' DeepseekV3Config: files saved by 5.x may carry the other name.
_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
_DERIVED = ("head_dim", "qk_head_dim", "layer_types")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What belongs to the prompt and to transformers' class of K2.5, not to the language model.
_OUTER_HARMLESS = frozenset({"use_unified_vision_chunk", "video_placeholder"})
_OUTER_ONLY = {**ONLY, "encoder_only": (False,), "language_only": (False,), "tie_word_embeddings": (False,)}

_ROPE_YARN = {
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
}
_ROPE_KIND = {"type", "rope_type", "rope_theta"}
_ROPE_ONLY = {"partial_rotary_factor": (1, None)}


class Normalised(NamedTuple):
    """One flat dict with KimiK2Config's field names, and where the file has them.

    Attributes:
        flat: the fields.
        place: of the language model's fields, empty or `text_config.`.
        renamed: a field's whole name in the file, where it is another.
    """

    flat: dict[str, Any]
    place: str
    renamed: dict[str, str]

    def name(self, field: str) -> str:
        """The file's own dotted name of a field that KimiK2Config calls so."""
        if field in self.renamed:
            return self.renamed[field]
        first, dot, rest = field.partition(".")
        return f"{self.renamed.get(first, self.place + first)}{dot}{rest}"


def normalised(raw: Any, fields: Collection[str]) -> Normalised:
    """Bring the known spellings of a config to one flat dict, and refuse what is not known.

    Args:
        raw: the parsed file.
        fields: of KimiK2Config that a file may have.

    Raises:
        ConfigError: a field is unknown, or two that say the same thing contradict each other.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"expected a JSON object at the top level, got {type(raw).__name__}")
    check_architecture(raw)
    for holder in (raw, raw.get("text_config")):
        _refuse_mlx(holder if isinstance(holder, Mapping) else {})
    known = {*fields, *_ALIASES, *_DERIVED, *QUANTIZATION_FIELDS, "rope_parameters", "architectures"}
    text: Any = raw
    place = prefix = ""
    if "text_config" in raw:
        text, place, prefix = raw["text_config"], "text_config.", "language_model."
        if not isinstance(text, Mapping):
            raise ConfigError(f"expected an object, got {type(text).__name__}", field="text_config")
        check_architecture(text, "text_config")
        _check_outer(raw, text, known)
    refuse_unknown(text, known | (set() if place else {*OUTER_FIELDS, "vision_config"}), place.rstrip("."))
    flat = {name: value for name, value in text.items() if name in fields}
    flat["tensor_prefix"] = prefix
    for name in ("chat_style", *_TOKENS):
        if flat.get(name) is None:
            flat[name] = raw.get(name)
    renamed = {f"vision.{field}": theirs for field, theirs in names_in_file(raw).items()} | {"vision": "vision_config"}
    renamed["media_placeholder_token_id"] = renamed["vision.image_token_id"]
    for theirs, ours in _ALIASES.items():
        if theirs not in text:
            continue
        if ours in text and not same(text[ours], text[theirs]):
            raise ConfigError(f"is {text[theirs]!r} but {ours} is {text[ours]!r}", field=place + theirs)
        flat[ours] = text[theirs]
        renamed[ours] = place + (ours if ours in text else theirs)
    _check_derived(text, flat, place)
    renamed["rope_scaling"] = place + normalise_rope(text, flat, place)
    flat["vision"] = normalised_vision(raw.get("vision_config"), raw, flat.get("hidden_size"))
    flat["quantization"], flat["kv_cache_fp8"] = _quantization(raw, text, place)
    return Normalised(flat, place, renamed)


def _refuse_mlx(raw: Mapping[str, Any]) -> None:
    """MLX writes `quantization`, and the same object as `quantization_config`, without saying whose method it is."""
    for name in ("quantization", *QUANTIZATION_FIELDS):
        value = raw.get(name)
        if isinstance(value, Mapping) and "quant_method" not in value and {"group_size", "bits"} <= value.keys():
            raise ConfigError(
                "MLX's stored form; expected safetensors in a form of Hugging Face's quantizers", field=name
            )


def _check_outer(raw: Mapping[str, Any], text: Mapping[str, Any], known: Collection[str]) -> None:
    """The level around `text_config`: it repeats the language model's fields as they are, if at all."""
    if raw.get("model_type") not in (None, "kimi_k25"):
        raise ConfigError(f"expected 'kimi_k25', got {raw['model_type']!r:.100}", field="model_type")
    own = {"text_config", "vision_config", "model_type", "architectures", "chat_style", *_TOKENS, *OUTER_FIELDS}
    repeated = set(known) - own - set(QUANTIZATION_FIELDS) - set(_OUTER_ONLY)
    for name in raw:
        if name in repeated and not same(raw[name], text.get(name)):
            raise ConfigError(f"is {raw[name]!r:.100} but text_config.{name} is {text.get(name)!r:.100}", field=name)
    read = {*own, *repeated, *QUANTIZATION_FIELDS, *_OUTER_HARMLESS}
    refuse_unknown(raw, read - {"tie_word_embeddings"}, only=_OUTER_ONLY)


def _check_derived(text: Mapping[str, Any], flat: Mapping[str, Any], place: str) -> None:
    """Fields that transformers derives from others; in a file they win there, so another value is another model."""
    rope, nope, layers = (flat.get(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "num_hidden_layers"))
    whole = nope + rope if isinstance(nope, int) and isinstance(rope, int) else None
    for name, expected in (("head_dim", rope), ("qk_head_dim", whole)):
        if text.get(name) is not None and not same(text[name], expected):
            raise ConfigError(
                f"expected {expected}, as the other sizes say, got {text[name]!r:.100}", field=place + name
            )
    types = text.get("layer_types")
    if types is not None and types != ["full_attention"] * (layers if isinstance(layers, int) else 0):
        raise ConfigError(
            f"expected null or full_attention in each layer, got {types!r:.100}", field=f"{place}layer_types"
        )


def normalise_rope(text: Mapping[str, Any], flat: dict[str, Any], place: str) -> str:
    """Set `rope_theta` and `rope_scaling`; returns the name of the object that holds them.

    transformers takes `rope_scaling` where both objects are there (`rope_scaling or rope_parameters`).
    """
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(text.get(name), (Mapping, type(None))):
            raise ConfigError(f"expected an object or null, got {type(text[name]).__name__}", field=place + name)
    key = "rope_scaling" if text.get("rope_scaling") or not text.get("rope_parameters") else "rope_parameters"
    flat["rope_scaling"] = None
    rope = text.get(key)
    if not rope:
        return key
    where = place + key
    kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None] or ["default"]
    for kind in kinds:
        if kind not in ("default", "yarn") or kind != kinds[0]:
            raise ConfigError(f"expected 'yarn' or 'default', got {kind!r:.100}", field=f"{where}.rope_type")
    read = _ROPE_KIND | (_ROPE_YARN if kinds[0] == "yarn" else set())
    refuse_unknown(rope, read, where, only=_ROPE_ONLY, harmless=())
    theta = rope.get("rope_theta")
    if theta is not None and not same(flat.setdefault("rope_theta", theta), theta):
        outer = flat["rope_theta"]
        raise ConfigError(f"is {theta!r} but the top-level rope_theta is {outer!r}", field=f"{where}.rope_theta")
    if kinds[0] == "yarn":
        yarn = {name: rope[name] for name in _ROPE_YARN if name in rope}
        if yarn.get("factor") is None and "original_max_position_embeddings" in rope:
            # transformers' rule: DeepSeek-style configs may leave the factor to the ratio of the two lengths.
            maximum, original = flat.get("max_position_embeddings"), rope["original_max_position_embeddings"]
            if isinstance(maximum, int) and isinstance(original, int) and original > 0:
                yarn["factor"] = maximum / original
        flat["rope_scaling"] = yarn
    return key


def _quantization(raw: Mapping[str, Any], text: Mapping[str, Any], place: str) -> tuple[StoredFormat | None, bool]:
    """The checkpoint's format and whether it asks for an FP8 cache; K2.5 has the object at both levels."""
    specs: list[tuple[str, StoredFormat, bool]] = []
    outer = raw.get("quantization_config")
    # modelopt writes its own beside the whole model, and leaves the quantization that it read in `text_config`.
    whole = not place or (isinstance(outer, Mapping) and outer.get("quant_method") == "modelopt")
    for holder, where in ((raw, ""),) if whole else ((text, place), (raw, "")):
        for key in QUANTIZATION_FIELDS:
            if holder.get(key) is None:
                continue
            field = where + key
            specs.append((field, parse_quantization(holder[key], field=field), _is_fp8_cache(holder[key], field)))
    for field, *said in specs[1:]:
        if said != list(specs[0][1:]):
            raise ConfigError(f"says something else than {specs[0][0]}; expected one of them, or the same", field=field)
    return specs[0][1:] if specs else (None, False)


# The one kv_cache_scheme that is supported; an e4m3 cache holds the values as they are, at scale 1.
KV_CACHE_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor"}
_KV_CACHE_ONLY = {
    "dynamic": (False,),
    "symmetric": (True,),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (None,),
    "scale_dtype": (None,),
}
_KV_CACHE_HARMLESS = {"observer", "observer_kwargs", "zp_dtype"}


def _is_fp8_cache(quantization: Any, field: str) -> bool:
    """Whether a `quantization_config` has compressed-tensors' `kv_cache_scheme`, of which FP8 a tensor is supported."""
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if scheme is None:
        return isinstance(quantization, Mapping) and quantization.get("kv_cache_quant_algo") == "FP8"  # modelopt's
    field = f"{field}.kv_cache_scheme"
    if not isinstance(scheme, Mapping):
        raise ConfigError(f"expected an object or null, got {type(scheme).__name__}", field=field)
    for name, wanted in KV_CACHE_SCHEME.items():
        if scheme.get(name, "tensor") != wanted:  # modelopt leaves the strategy out
            raise ConfigError(f"expected {wanted!r}, got {scheme.get(name)!r:.100}", field=f"{field}.{name}")
    refuse_unknown(scheme, KV_CACHE_SCHEME, field, only=_KV_CACHE_ONLY, harmless=_KV_CACHE_HARMLESS)
    return True
