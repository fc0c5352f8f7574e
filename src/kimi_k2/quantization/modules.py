"""Which modules a list in a quantization config names, by the rule of the library that wrote it.

Names are spelled as any writer of checkpoints spells them, or as here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import regex

from kimi_k2.errors import ConfigError
from kimi_k2.limits import MODULE_PATTERNS
from kimi_k2.spellings import plain_module, spelled

# `compressed`: names and, after `re:`, expressions that match from the start (compressed-tensors).
# `transformers`: expressions that match from the start to a dot or the end, or endings (`should_convert_module`).
# `glob`: names with `*` and `?` (modelopt).
# `substring`: parts of names (AWQ). `quark`: names with `*`, and expressions after `re:`.
Rule = Literal["compressed", "transformers", "glob", "substring", "quark"]

_SECONDS_A_MATCH = 0.05
_KEPT = 16
# By the list's identity: a list of 100,000 names would take longer to hash than to look up.
_COMPILED: dict[tuple[int, Rule], tuple[tuple[str, ...], Callable[[str], bool]]] = {}


def names_module(entries: tuple[str, ...], rule: Rule, module: str) -> bool:
    """Whether a list of modules names `module` (no `.weight`, no prefix); in time that does not grow with plain names.

    Raises:
        ConfigError: an expression takes too long.
    """
    key = id(entries), rule
    cached = _COMPILED.get(key)
    if cached is None or cached[0] is not entries:
        if len(_COMPILED) >= _KEPT:
            _COMPILED.clear()
        cached = _COMPILED[key] = entries, _compile(entries, rule)
    return cached[1](module)


def module_list(raw: Any, rule: Rule, field: str) -> tuple[str, ...]:
    """A list of modules, checked; None is empty.

    Raises:
        ConfigError: it is no list of names, holds what is no expression, or more expressions than are tried.
    """
    if not isinstance(raw, (list, tuple, type(None))) or not all(isinstance(name, str) for name in raw or ()):
        raise ConfigError(f"expected a list of names, got {raw!r:.100}", field=field)
    entries = tuple(raw or ())
    if "Linear" in entries and rule == "compressed":
        raise ConfigError("expected names of modules, got 'Linear', which is all of them", field=field)
    patterns = [pattern for entry in entries if (pattern := _pattern(entry, rule)) is not None]
    if len(patterns) > MODULE_PATTERNS:
        raise ConfigError(f"expected at most {MODULE_PATTERNS} expressions, got {len(patterns)}", field=field)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"{pattern!r:.100} is no regular expression: {error}", field=field) from None
    return entries


def listed(raw: Mapping[str, Any], rule: Rule, field: str, *names: str) -> tuple[str, ...]:
    """The list of modules that an object has under one of these names; under several it is the same.

    Raises:
        ConfigError: it is not, or `module_list` refuses it.
    """
    lists = [module_list(raw[name], rule, f"{field}.{name}") for name in names if name in raw]
    if len(set(lists)) > 1:
        raise ConfigError(f"differs from {names[0]}", field=f"{field}.{names[1]}")
    return lists[0] if lists else ()


def _pattern(entry: str, rule: Rule) -> str | None:
    """The regular expression that an entry is, None for a plain name."""
    if rule == "substring":
        return None
    if rule in ("compressed", "quark") and entry.startswith("re:"):
        return entry[3:]
    if rule == "compressed":
        return None
    if rule in ("glob", "quark"):
        return fnmatch.translate(entry) if any(wildcard in entry for wildcard in "*?[") else None
    # A plain name is an expression too, whose dots match anything; a name is found faster as a name.
    return None if re.fullmatch(r"[\w.]*", entry) else rf"(?:{entry})(?:(?<=\.)|(?=\.|$))"


def _compile(entries: tuple[str, ...], rule: Rule) -> Callable[[str], bool]:
    patterns = [
        (_matcher(pattern), "language" in pattern)
        for entry in entries
        if (pattern := _pattern(entry, rule)) is not None
    ]
    names = frozenset(plain_module(entry) for entry in entries if _pattern(entry, rule) is None)
    endings, packages = (tuple(names), names) if rule == "transformers" else ((), frozenset())

    def named(module: str) -> bool:
        if rule == "substring" and any(name in module for name in names):
            return True
        if module in names or (endings and module.endswith(endings)):
            return True
        dots = [index for index, letter in enumerate(module) if letter == "."] if packages else []
        if any(module[:dot] in packages or module[: dot + 1] in packages for dot in dots):
            return True
        for matches, wrapped in patterns:
            if matches(module):
                return True
            if wrapped and any(matches(other.removesuffix(".")) for other in spelled(f"{module}.")):
                return True
        return False

    return named


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a regular expression of a checkpoint matches a module's name; it may be made to run for ever.

    What it returns raises ConfigError where an expression takes too long.
    """
    # As published: two quantifiers, none of a group. These cannot take long, and `re` is eight times as fast.
    if len(re.findall(r"[*+?{]", pattern)) <= 2 and not re.search(r"\)[*+?{]", pattern):
        match = re.compile(pattern).match
        return lambda module: match(module) is not None

    def matches(module: str) -> bool:
        try:
            return regex.match(pattern, module, timeout=_SECONDS_A_MATCH) is not None
        except (TimeoutError, regex.error) as error:
            raise ConfigError(f"{pattern!r:.100}: {error}", field="quantization_config.ignore") from None

    return matches
