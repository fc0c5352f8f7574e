"""Environment variables of ours that users set, a table of which is in docs/cli.md: their names and values."""

from __future__ import annotations

import difflib
import os

from kimi_k2.errors import ConfigError

PREFIX = "KIMI_K2_"
NAMES = (
    "CACHE", "EXPERTS", "KERNELS", "PARSERS", "SGLANG_GPU", "VLLM_DECODE_GRAPHS", "VLLM_GPU", "VLLM_GRAPH_TOKENS",
)  # fmt: skip
NEAR = 0.85  # of SequenceMatcher: a letter more or less; tests' variables are farther off


def check_names() -> None:
    """Raises ConfigError if a variable is set whose name is nearly one of ours."""
    for name in os.environ:
        rest = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and rest not in NAMES:
            for near in difflib.get_close_matches(rest, NAMES, 1, NEAR):
                raise ConfigError(f"no such environment variable; did you mean {PREFIX}{near}?", field=name)


def switch(name: str, default: bool) -> bool:
    """A variable that is 0 or 1; `default` if it is not set. Raises ConfigError for another value."""
    value = os.environ.get(name) or str(int(default))
    if value not in ("0", "1"):
        raise ConfigError(f"expected 0 or 1, got {value!r}", field=name)
    return value == "1"


def whole(name: str, default: int) -> int:
    """A variable that is a number from 0 on; `default` if it is not set. Raises ConfigError for another value."""
    value = os.environ.get(name) or str(default)
    if not value.isdecimal():
        raise ConfigError(f"expected a number from 0 on, got {value!r}", field=name)
    return int(value)
