"""Entry point of `sglang.srt.plugins`: SGLang calls `register` in each of its processes, before it reads arguments."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from kimi_k2.serving.paged.support import PARSER, lacking, parser_names
from kimi_k2.serving.sglang import support
from kimi_k2.serving.sglang.support import ARCHITECTURES, BACKEND, STEP, overrides, without_graphs_of_prompts

logger = logging.getLogger("sglang.kimi_k2")


def register() -> None:
    """Offer the parser of tool calls, and our model for the Kimi-K2 family; other models stay SGLang's."""
    register_parser()
    register_model()


def register_parser() -> None:
    """Offer the parsers of calls and of reasoning to SGLang. What a version of it lacks is named, and left out."""
    for names, module, mapping, own, name in (
        ("function_call.parser_names.TOOL_CALL_PARSER_NAMES", "function_call.function_call_parser.FunctionCallParser",
         "ToolCallParserEnum", "detector", "KimiK2StreamDetector"),
        ("parser.reasoning_parser_names.REASONING_PARSER_NAMES", "parser.reasoning_parser.ReasoningParser",
         "DetectorMap", "reasoning", "KimiK2StreamReasoningDetector"),
    ):  # fmt: skip
        try:
            known, parser = _found(f"sglang.srt.{names}"), _found(f"sglang.srt.{module}")
            detector = _found(f"kimi_k2.serving.sglang.{own}.{name}")
            getattr(parser, mapping).update(dict.fromkeys(parser_names(), detector))
        except (ImportError, AttributeError) as error:
            logger.warning("kimi-k2: no parser %s (%s), since SGLang has changed: %s", PARSER, own, error)
            continue
        if PARSER not in known:
            known.append(PARSER)


def _found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def register_model() -> None:
    """Have SGLang ask `support.overrides` about models of K2's architecture, and know our backend of attention."""
    if gone := lacking(support.NEEDED, support.AS_TEXT):
        logger.warning("kimi-k2: all operations are SGLang's, since it has changed; gone: %s", ", ".join(gone))
        return
    from sglang.srt.arg_groups import choices, model_override_base, resolution_hooks
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if BACKEND in choices.ATTENTION_BACKEND_CHOICES:  # once a process
        return
    choices.add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_backend)
    for architecture in ARCHITECTURES:
        model_override_base.register_model_override(architecture)(overrides)
    resolution_hooks.register_resolution_hook(STEP)(without_graphs_of_prompts)


def _backend(runner: Any) -> Any:
    from kimi_k2.serving.sglang.attention import PoolBackend

    return PoolBackend(runner)
