"""Entry point of `sglang.srt.plugins`: our parser of tool calls under a name of its own."""

from __future__ import annotations

import importlib
import logging

logger = logging.getLogger("sglang.kimi_k2")

PARSER = "kimi_k2_stream"


def register() -> None:
    """Offer the parser to SGLang. What a version of it lacks is named, and nothing is changed."""
    try:
        names = importlib.import_module("sglang.srt.function_call.parser_names").TOOL_CALL_PARSER_NAMES
        parser = importlib.import_module("sglang.srt.function_call.function_call_parser").FunctionCallParser
        detector = importlib.import_module("kimi_k2.serving.sglang.detector").KimiK2StreamDetector
        parser.ToolCallParserEnum[PARSER] = detector
    except (ImportError, AttributeError) as error:
        logger.warning("kimi-k2: no parser %s, since SGLang has changed: %s", PARSER, error)
        return
    if PARSER not in names:
        names.append(PARSER)
