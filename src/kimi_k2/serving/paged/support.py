"""What plugins of every engine ask first: whether the engine is as we know it, and whether the GPU is our kernels'."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from kimi_k2.checkpoint.names import modules
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.kernels.attention.mla_prefill import NOPE, VALUE
from kimi_k2.kernels.attention.mla_sizes import LATENT, PAGE, ROPE
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.experts.entries import FOUR_BIT_FLOATS
from kimi_k2.kernels.experts.w4a16_layout import FORMATS, INT4
from kimi_k2.quantization.fp8_block import Fp8BlockFormat
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.quantization.stored import StoredFormat
from kimi_k2.serving.paged.heads import kernel_heads
from kimi_k2.sharding.layout import Layout
from kimi_k2.variables import switch

# Of our parsers in every engine, and what the engines call their own; `KIMI_K2_PARSERS=0` leaves the second to them.
PARSER, ENGINES_PARSER, PARSERS = "kimi_k2_stream", "kimi_k2", "KIMI_K2_PARSERS"


def parser_names() -> list[str]:
    """By which our parsers can be asked for."""
    return [PARSER, *([ENGINES_PARSER] if switch(PARSERS, True) else [])]


def lacking(needed: Iterable[tuple[str, str]], as_text: Iterable[tuple[str, str]] = ()) -> list[str]:
    """What of an engine is gone, `module.name` each.

    Args:
        needed: modules, and names in them.
        as_text: modules whose import would be slow, and text in their source; it ends in a bracket.
    """
    gone = []
    for module, name in needed:
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            gone.append(f"{module}.{name}")
    for module, text in as_text:
        if text not in _source(module):
            gone.append(f"{module}: {text.removesuffix('(')}")
    return gone


def _source(module: str) -> str:
    """Of a module, empty where there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:  # the package that would hold it is none
        return ""
    return "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")


def config_of(hf_config: Any, added: Collection[str] = ()) -> KimiK2Config:
    """Our configuration of the language model that an engine describes; `added` are fields of its own.

    Raises:
        ConfigError: it is no member of the family, or its weights are stored in a format without kernels here.
    """
    config = KimiK2Config.from_engine(hf_config, added)
    if (reason := refusal_of_format(config.quantization)) is not None:
        raise ConfigError(reason, field="quantization_config")
    return config


def refusal_of_format(quantization: StoredFormat | None) -> str | None:
    """Why weights stored so are left to the engine's own model, None if they are not."""
    if quantization is None or isinstance(quantization, (Fp8BlockFormat, *FOUR_BIT_FLOATS)):
        return None
    if isinstance(quantization, Int4GroupFormat):
        size, known = quantization.group_size, sorted(stored.group for stored in FORMATS if stored.scale == INT4.scale)
        return None if size in known else f"INT4 in groups of {size}; our kernels read groups of {known}"
    return f"weights stored as {quantization.name}, which our loader in an engine does not take"


def held_by_ranks(config: KimiK2Config, layout: Layout) -> KimiK2Config:
    """Of a layout, with BF16 for four-bit floats outside the routed experts, which no kernel reads."""
    held, scheme = layout.held(config), config.quantization
    if not isinstance(scheme, FOUR_BIT_FLOATS):
        return held
    layers = range(config.num_hidden_layers)
    others = [f"model.layers.{n}.{name}" for n in layers for name, shape in modules(config, n) if len(shape) == 2]
    return held.model_copy(update={"quantization": scheme.model_copy(update={"ignore": (*scheme.ignore, *others)})})


def refusal_of_gpu(config: KimiK2Config, ranks: int, dtype: torch.dtype, page: int | None, hopper: bool) -> str | None:
    """Why our kernels cannot serve, None if they can; a CUDA graph cannot hold the plain functions in their place.

    Args:
        config: of the language model.
        ranks: that share its heads.
        dtype: of activations and cache.
        page: slots a page of the cache; None if the kernels' size can be had.
        hopper: whether the GPU is one.
    """
    sizes = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    heads = config.num_attention_heads // ranks
    for reason, holds in (
        ("a GPU that is no Hopper", not hopper),
        ("no nvcc, which the kernels are built with", find_nvcc() is None),
        (f"{dtype}, the kernels take torch.bfloat16", dtype != torch.bfloat16),
        (f"attention of sizes {sizes}", sizes != (LATENT, ROPE, NOPE, VALUE)),
        (f"{heads} heads a rank", kernel_heads(heads) is None),
        (f"pages of {page} tokens, the kernels take {PAGE}", page not in (None, PAGE)),
    ):
        if holds:
            return reason
    return None
