"""Reading the small files beside a vocabulary: bounded in size and nesting, every failure a typed error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_k2 import files
from kimi_k2.errors import TokenizerError

# The published vocabulary has 2.8 MB, its configuration 5 kB.
MAX_BYTES = 2**26


def read_bytes(path: Path) -> bytes:
    """The content of a file of at most MAX_BYTES.

    Raises:
        TokenizerError: it cannot be read or is larger; the message names the file.
    """
    try:
        return files.read_bytes(path, MAX_BYTES, TokenizerError)
    except FileNotFoundError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """The content of a file in UTF-8; errors as for `read_bytes`."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: expected UTF-8: {error}") from None


def read_object(path: Path, field: str) -> Mapping[str, Any]:
    """The JSON object in a file, read for one field of it, which errors name; else as for `read_bytes`."""
    try:
        raw = json.loads(read_text(path))
    except TokenizerError:
        raise
    except RecursionError:
        raise TokenizerError(f"{path}: {field}: JSON nested too deeply") from None
    except ValueError as error:
        raise TokenizerError(f"{path}: {field}: not valid JSON: {error}") from None
    if not isinstance(raw, Mapping):
        raise TokenizerError(f"{path}: {field}: expected a JSON object, got {type(raw).__name__}")
    return raw
