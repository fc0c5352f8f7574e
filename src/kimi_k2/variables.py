"""Environment variables of ours that users set, a table of which is in docs/cli.md: their names and values."""

from __future__ import annotations

import difflib
import os
import re

from kimi_k2.errors import ConfigError

PREFIX = "KIMI_K2_"
_SWITCH, _WHOLE = ("[01]", "0 or 1"), ("[0-9]+", "a number from 0 on")
_PIN = r"\s*([\w*]+\s*=\s*\w+|plain)\s*"
# The form of each one's values, as an expression and in words.
FORMS = {
    "CACHE": (".*", "a directory"),
    "EXPERTS": ("stored|w2_bf16", "stored or w2_bf16"),
    "KERNELS": (rf"{_PIN}(,{_PIN})*", "op=name,op=name or plain"),
    "PARSERS": _SWITCH,
    "SGLANG_GPU": _SWITCH,
    "VLLM_DECODE_GRAPHS": _SWITCH,
    "VLLM_GPU": _SWITCH,
    "VLLM_GRAPH_TOKENS": _WHOLE,
}
# Of the tests, which run commands: they say what is tested, and nothing here reads them.
OF_TESTS = (
    "COMPILED", "COMPLETE", "CUDA_ON_CPU", "DRAWS", "EXPECTED", "GOLDEN", "MODEL", "PORT",
    "PUBLISHED_TEMPLATES", "REAL_TOWER", "SLOW", "SOAK_SECONDS", "TEST_PAGES", "TEST_RECORD",
)  # fmt: skip


def check_environment() -> None:
    """Raises ConfigError if a variable of our prefix is set that is none of ours, or to no value of its."""
    for name, value in os.environ.items():
        rest = name.removeprefix(PREFIX)
        if name == rest or rest in OF_TESTS:
            continue
        if rest not in FORMS:
            near = difflib.get_close_matches(rest, FORMS, 1)
            meant = f"did you mean {PREFIX}{near[0]}?" if near else f"there are {', '.join(FORMS)} behind {PREFIX}"
            raise ConfigError(f"no such environment variable; {meant}", field=name)
        if value:
            _check(name, value, FORMS[rest])


def _check(name: str, value: str, form: tuple[str, str]) -> str:
    if re.fullmatch(form[0], value, re.DOTALL) is None:
        raise ConfigError(f"expected {form[1]}, got {value!r:.100}", field=name)
    return value


def switch(name: str, default: bool) -> bool:
    """A variable that is 0 or 1; `default` if it is not set. Raises ConfigError for another value."""
    return _check(name, os.environ.get(name) or str(int(default)), _SWITCH) == "1"


def whole(name: str, default: int) -> int:
    """A variable that is a number from 0 on; `default` if it is not set. Raises ConfigError for another value."""
    return int(_check(name, os.environ.get(name) or str(default), _WHOLE))
