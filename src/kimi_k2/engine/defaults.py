"""What a checkpoint says of generation: `generation_config.json`, obeyed as transformers obeys it, or refused by name.

transformers reads the same fields of config.json where that file is not there, and there alone. One thing is otherwise
here: a file that names no end token leaves config.json's, where transformers would never end.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kimi_k2.config import KimiK2Config
from kimi_k2.config_fields import refuse_unknown
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.errors import ConfigError, GenerationError, KimiK2Warning
from kimi_k2.files import is_there, read_fields

NAME = "generation_config.json"
# <|im_end|> of the real vocabulary ends a turn in every chat model of the family, whatever config.json says.
IM_END = 163586
REAL_VOCAB_SIZE = 163840
# What transformers takes where a file asks for sampling and leaves these out.
_TEMPERATURE, _TOP_K = 1.0, 50

_COUNTS = {"max_new_tokens": "max_new_tokens", "min_new_tokens": "min_tokens", "top_k": "top_k"}
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_OF_SAMPLING = {"temperature": (1,), "top_k": (0, _TOP_K), "top_p": (1,), "min_p": (0,)}
_READ = {*_COUNTS, *_NUMBERS, "do_sample", "eos_token_id", "max_length", "min_length"}
_WITHOUT_EFFECT: dict[str, str] = {
    "who wrote it": "transformers_version _from_model_config _commit_hash",
    "nothing here is padded or begins with them": "bos_token_id pad_token_id decoder_start_token_id",
    "how transformers runs": "use_cache cache_implementation max_cache_len prefill_chunk_size compile_config"
    " disable_compile",
    "what it hands out": "return_dict_in_generate output_attentions output_hidden_states output_scores output_logits",
    "of beams, of which there is one": "early_stopping length_penalty renormalize_logits",
    "of an assistant, which no file names": "is_assistant num_assistant_tokens num_assistant_tokens_schedule"
    " assistant_confidence_threshold assistant_lookbehind target_lookbehind max_matching_ngram_size",
}
_HARMLESS = frozenset(name for names in _WITHOUT_EFFECT.values() for name in names.split())
# Whatever else transformers knows, by the value at which, besides null, it does nothing.
_IDLE: dict[Any, str] = {
    None: "max_time stop_strings use_mtp top_h sequence_bias watermarking_config cache_config assistant_early_exit"
    " assistant_ensemble_weight prompt_lookup_num_tokens speculation_type continuous_batching_config penalty_alpha"
    " dola_layers constraints force_words_ids forced_bos_token_id forced_eos_token_id suppress_tokens"
    " begin_suppress_tokens bad_words_ids exponential_decay_length_penalty",
    0: "no_repeat_ngram_size encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff diversity_penalty",
    1: "typical_p encoder_repetition_penalty guidance_scale num_beams num_return_sequences num_beam_groups",
    "false": "remove_invalid_values token_healing low_memory",
}
_ONLY = {name: (False if idle == "false" else idle, None) for idle, names in _IDLE.items() for name in names.split()}
# transformers 4 wrote these into config.json whether or not anybody had chosen them.
_WRITTEN_BY_4 = {
    "max_length": 20, "min_length": 0, "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    "repetition_penalty": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class GenerationDefaults:
    """What holds where a call does not say otherwise.

    Attributes:
        sampling: fields of SamplingParams that the file decides, and the tokens that end a sequence.
        max_length: tokens of the longest prompt and the replies together, where `max_new_tokens` is not said.
        min_length: the same, before which no end token is chosen, where `min_tokens` is not said.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    min_length: int | None = None

    @classmethod
    def from_pretrained(cls, directory: str | Path, config: KimiK2Config) -> GenerationDefaults:
        """Read a checkpoint's file.

        Args:
            directory: of the checkpoint.
            config: of the same.

        Raises:
            ConfigError: a field is not known, asks for what `generate` has not, or has a value that is none of its.
        """
        path = Path(directory) / NAME
        where = path if is_there(path) else path.with_name("config.json")
        raw = read_fields(where, ConfigError)
        try:
            return cls._parse(raw if where == path else _of_config(raw), config, str(path))
        except ConfigError as error:
            raise ConfigError(error.message, field=error.field, file=where) from None

    @classmethod
    def _parse(cls, raw: Mapping[str, Any], config: KimiK2Config, origin: str) -> GenerationDefaults:
        refuse_unknown(raw, _READ, only=_ONLY, harmless=_HARMLESS)
        named = {ours: name for name, ours in _COUNTS.items()} | {name: name for name in _NUMBERS}
        fields = {ours: raw[name] for ours, name in named.items() if raw.get(name) is not None}
        try:
            SamplingParams(**fields)
        except GenerationError as error:
            field, _, message = str(error).partition(": ")
            raise ConfigError(message, field=named[field]) from None
        sampled = raw.get("do_sample")
        if not isinstance(sampled, (bool, type(None))):
            raise ConfigError(f"expected true or false, got {sampled!r:.100}", field="do_sample")
        if sampled:
            fields = {"temperature": _TEMPERATURE, "top_k": _TOP_K} | fields
            if fields["temperature"] == 0:
                raise ConfigError("expected above 0 beside do_sample, got 0", field="temperature")
        else:
            idle = [name for name, does in _OF_SAMPLING.items() if fields.get(name, does[0]) not in does]
            if idle:
                warnings.warn(
                    f"{origin}: {', '.join(idle)}: without do_sample tokens are chosen greedily, as transformers does,"
                    " unless a temperature is asked for",
                    KimiK2Warning,
                    stacklevel=4,
                )
            fields.pop("temperature", None)
            if idle or sampled is False:
                fields["temperature"] = 0.0
        lengths = [_length(raw, name, least) for name, least in (("max_length", 1), ("min_length", 0))]
        if "max_new_tokens" in fields or (lengths[0] or 0) >= config.max_position_embeddings:
            lengths[0] = None  # published files repeat the context's length, which bounds nothing
        if "min_tokens" in fields:
            lengths[1] = None
        return cls(fields | {"eos_token_ids": _end_ids(raw, config)}, *lengths)

    def params(self, chosen: Mapping[str, Any], otherwise: Mapping[str, Any]) -> SamplingParams:
        """How tokens are chosen: what a call chose, else what the file says, else the command's own.

        Raises:
            GenerationError: see `with_chosen`.
        """
        return with_chosen(SamplingParams(**{**otherwise, **self.sampling}), chosen)

    def without(self, chosen: Mapping[str, Any]) -> GenerationDefaults:
        """The same where a call has said these fields of SamplingParams."""
        most = None if "max_new_tokens" in chosen else self.max_length
        return GenerationDefaults(self.sampling, most, None if "min_tokens" in chosen else self.min_length)

    def bounded(self, params: SamplingParams, longest: int) -> SamplingParams:
        """With what follows from the file's whole lengths.

        Args:
            params: of the call.
            longest: tokens of the batch's longest prompt: transformers pads the others to it.

        Raises:
            GenerationError: the prompt alone has `max_length` tokens.
        """
        found: dict[str, Any] = {}
        if self.max_length is not None:
            if longest >= self.max_length:
                raise GenerationError(
                    f"a prompt of {longest} tokens: {NAME} has a max_length of {self.max_length}; say how many new"
                    " tokens (max_new_tokens)"
                )
            found["max_new_tokens"] = self.max_length - longest
        if self.min_length is not None:
            found["min_tokens"] = max(params.min_tokens, self.min_length - longest)
        return replace(params, **found)


def with_chosen(params: SamplingParams, chosen: Mapping[str, Any]) -> SamplingParams:
    """The same with fields that a call chose.

    Raises:
        GenerationError: a field is unknown or out of range, or beside the others it could do nothing.
    """
    if unknown := set(chosen) - set(SamplingParams.__dataclass_fields__):
        raise GenerationError(f"sampling: no such field: {', '.join(sorted(unknown))}")
    params = replace(params, **chosen)
    for name in ("top_k", "top_p", "min_p") if params.temperature == 0 else ():
        if name in chosen and chosen[name] != getattr(SamplingParams, name):
            raise GenerationError(f"{name}: goes with a temperature; at 0 the likeliest token is taken")
    if chosen.get("min_tokens", 0) > params.max_new_tokens:
        expected = f"expected at most max_new_tokens ({params.max_new_tokens})"
        raise GenerationError(f"min_tokens: {expected}, got {params.min_tokens}")
    return params


def _of_config(outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of generation in config.json, which older files have; of the model and of generation is none."""
    merged = {**(outer.get("text_config") or {}), **outer}
    names = (_READ | set(_ONLY)) - {"eos_token_id"}
    return {name: value for name, value in merged.items() if name in names and value != _WRITTEN_BY_4.get(name)}


def _length(raw: Mapping[str, Any], name: str, least: int) -> int | None:
    value = raw.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ConfigError(f"expected a whole number from {least} on, got {value!r:.100}", field=name)
    return value


def _end_ids(raw: Mapping[str, Any], config: KimiK2Config) -> frozenset[int]:
    """Tokens that end generation: the file's, else config.json's, and <|im_end|> in any case."""
    eos: Any = raw.get("eos_token_id", config.eos_token_id)
    listed = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
    for token in listed:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab_size:
            raise ConfigError(f"expected token ids below {config.vocab_size}, got {token!r}", field="eos_token_id")
    return frozenset(listed) | ({IM_END} if config.vocab_size == REAL_VOCAB_SIZE else set())
