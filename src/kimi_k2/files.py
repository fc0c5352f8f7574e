"""JSON files read within limits, with an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kimi_k2.errors import CheckpointError, ConfigError, CorruptHeaderError
from kimi_k2.limits import JSON_BYTES, JSON_NESTING


def read_json(path: Path, error: type[ConfigError | CheckpointError] = CorruptHeaderError) -> Any:
    """The content of a JSON file.

    Args:
        path: of the file.
        error: raised where the file is no JSON, too large or too deeply nested.

    Raises:
        FileNotFoundError: there is no such file.
    """
    try:
        size = path.stat().st_size
        if size > JSON_BYTES:
            raise error(f"{size} bytes; at most {JSON_BYTES} are read", file=path)
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as reason:
        raise error(f"cannot be read: {reason.strerror}", file=path) from None
    except ValueError as reason:
        if isinstance(reason, error):
            raise
        raise error(f"not valid JSON: {reason}", file=path) from None


def parse_json(data: bytes) -> Any:
    """Parsed UTF-8 JSON.

    Raises:
        ValueError: it is none, or too deeply nested.
    """
    try:
        content = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"nested more than {JSON_NESTING} deep") from None
    level = [content] if isinstance(content, (dict, list)) else []
    for _ in range(JSON_NESTING + 1):
        if not level:
            return content
        children = (child for one in level for child in (one.values() if isinstance(one, dict) else one))
        level = [child for child in children if isinstance(child, (dict, list))]
    raise ValueError(f"nested more than {JSON_NESTING} deep")
