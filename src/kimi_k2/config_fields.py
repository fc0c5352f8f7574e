"""Which fields of a config.json are known: what has no effect on the logits, what is allowed at one value alone.

Whatever is not listed, here or as a field of the configuration classes, is refused by its name: a field that nobody
here has heard of may be the one that changes what the model computes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kimi_k2.errors import ConfigError, KimiK2Warning

_WITHOUT_EFFECT: dict[str, str] = {
    "who wrote the file, and with which classes": "_name_or_path name_or_path _commit_hash transformers_version"
    " auto_map tokenizer_class unsloth_fixed unsloth_version finetuning_task task_specific_params model_name",
    "the dtype of the run is an option here": "dtype torch_dtype use_bfloat16",
    "training": "aux_loss_alpha seq_aux router_aux_loss_coef attention_dropout ignore_index"
    " gradient_checkpointing label2id id2label num_labels problem_type tf_legacy_loss classifier_dropout",
    "how transformers runs it or what it hands out": "is_decoder use_cache output_attentions output_hidden_states"
    " output_router_logits output_scores return_dict return_dict_in_generate torchscript chunk_size_feed_forward"
    " _attn_implementation _attn_implementation_internal _attn_implementation_autoset attn_implementation"
    " _experts_implementation _experts_implementation_internal experts_implementation",
    "how work is spread": "ep_size pretraining_tp",
    "generation defaults of transformers 4, which are options here": "bad_words_ids begin_suppress_tokens"
    " decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size"
    " exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length"
    " no_repeat_ngram_size num_beam_groups num_beams num_return_sequences prefix remove_invalid_values"
    " repetition_penalty sep_token_id suppress_tokens temperature top_k top_p typical_p",
}
WITHOUT_EFFECT = frozenset(name for names in _WITHOUT_EFFECT.values() for name in names.split())

# At these values a field says what the model does anyway; transformers and vLLM write many of them.
ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "attn_output_gate": (False, None),
    "cross_attention_hidden_size": (None,),
    "index_topk": (None,),
    "is_encoder_decoder": (False, None),
    "layer_types": (None,),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "pruned_heads": ({}, None),
    "rope_interleave": (True,),
    "sliding_window": (None,),
    "sparsity_config": (None, {}),
    "swiglu_limit": (None,),
    "tie_encoder_decoder": (False, None),
    "transform_config": (None, {}),
    "use_sliding_window": (False, None),
}

# vLLM's K2.5 calls its language model by the class of DeepSeek-V2, which serves both.
ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "KimiK2ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
)

_OTHER_MODELS = {
    "kimi_k3": "Kimi-K3",
    "kimi_linear": "Kimi-Linear",
    "kimi_vl": "Kimi-VL",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4",
    "glm_moe_dsa": "GLM-5",
}
_DEEPSEEK_V3_VOCABULARY = 129280


# A derivative's own account of where it comes from.
_NOTE = re.compile(r"_(info|notes?|comments?|metadata|provenance|history)$")


def is_note(name: str, value: Any, known: Collection[str]) -> bool:
    """Whether an unknown field is such an account, which can be no number of the model: of its fields it names none."""
    inner = value.keys() if isinstance(value, Mapping) else () if isinstance(value, str) else None
    return _NOTE.search(name) is not None and inner is not None and not any(field in known for field in inner)


def refuse_unknown(
    raw: Mapping[str, Any],
    known: Collection[str],
    place: str = "",
    *,
    only: Mapping[str, tuple[Any, ...]] = ONLY,
    harmless: Collection[str] = WITHOUT_EFFECT,
) -> None:
    """Refuse fields that are not known, and known ones at a value that asks for what is not computed.

    Args:
        raw: an object of a config.json.
        known: fields that are read.
        place: name of the object, empty for the file's own.
        only: values at which a field says nothing new.
        harmless: fields without an effect.

    Raises:
        ConfigError: naming the first such field.
    """
    for name, value in raw.items():
        if name in known or name in harmless:
            continue
        field = f"{place}.{name}" if place else str(name)
        if name not in only and is_note(str(name), value, known):
            warnings.warn(f"field {field!r} is taken for a note, and not read", KimiK2Warning, stacklevel=3)
            continue
        if name not in only:
            raise ConfigError(
                "not known, so it may change what the model computes; remove it if it has no effect", field=field
            )
        if not any(same(value, option) for option in only[name]):
            allowed = " or ".join(repr(option) for option in only[name])
            raise ConfigError(f"expected {allowed}, the one thing that is computed, got {value!r:.100}", field=field)


def require(raw: Mapping[str, Any], names: Collection[str], place: str) -> None:
    """Refuse an object without one of these fields; `place` is its name.

    Raises:
        ConfigError: naming the first that is missing.
    """
    for name in names:
        if name not in raw:
            raise ConfigError("missing", field=f"{place}.{name}")


def same(value: Any, other: Any) -> bool:
    """Equal, with true and 1 told apart."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def check_architecture(raw: Mapping[str, Any], place: str = "") -> None:
    """Refuse a config.json of another model, by that model's name.

    Raises:
        ConfigError: `model_type` or `architectures` is another model's.
    """
    prefix = f"{place}." if place else ""
    kind = raw.get("model_type")
    name = _OTHER_MODELS.get(kind) if isinstance(kind, str) else None
    if kind == "deepseek_v3" and raw.get("vocab_size") == _DEEPSEEK_V3_VOCABULARY:
        name = "DeepSeek-V3 (by its vocabulary of 129280)"
    if name is not None:
        raise ConfigError(
            f"this is {name}, another model; expected Kimi-K2, K2.5, K2.6 or K2.7", field=f"{prefix}model_type"
        )
    names = raw.get("architectures")
    if names is None:
        return
    if not isinstance(names, (list, tuple)) or not all(isinstance(architecture, str) for architecture in names):
        raise ConfigError(f"expected a list of names, got {names!r:.100}", field=f"{prefix}architectures")
    for architecture in names:
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(f"expected one of {known}, got {architecture!r:.100}", field=f"{prefix}architectures")


def check_limits(config: Any, limits: Mapping[str, tuple[float, float]]) -> None:
    """Refuse an object with an attribute below or above its limits; None is none.

    Raises:
        ConfigError: naming the first such attribute.
    """
    for field, (least, most) in limits.items():
        value = getattr(config, field)
        if value is not None and not least <= value <= most:
            bound = f"at least {least:g}" if value < least else f"at most {most:g}"
            raise ConfigError(f"expected {bound}, got {value!r:.100}", field=field)


def first_fault(
    error: ValidationError, file: str | Path | None, name: Callable[[str], str] = lambda field: field
) -> ConfigError:
    """The first thing that pydantic has found; `name` gives a field's name in the file."""
    first = error.errors()[0]
    where = ".".join(str(step) for step in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # raised by a validator; pydantic wraps every ValueError
        message, where = cause.message, ".".join(step for step in (where, cause.field) if step)
    else:
        message = "missing" if first["type"] == "missing" else f"{first['msg']}, got {first['input']!r:.200}"
    return ConfigError(message, field=name(where) if where else None, file=file)
