"""Chat styles: which member of the Kimi-K2 family a checkpoint talks like, and how that is found out.

The stored number format says nothing about it: K2-Thinking can be stored in BF16 and K2-Instruct in INT4. What counts,
in this order: the caller's word, what the checkpoint's own chat template writes, `chat_style` in its config.json (our
presets have it), the model's name in config.json, the directory's name, `model_type`, which several members share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kimi_k2.errors import TokenizerError
from kimi_k2.files import read_data

_NUMBER = re.compile(r"k2[._p-]?([5-9])(?!\d)")
_KIMI = re.compile(r"kimi[._-]?k2")


class ChatStyle(StrEnum):
    """Which member of the family: they differ in how reasoning and tools are shown.

    INSTRUCT (K2-Instruct, 0905) shows no reasoning. THINKING (K2-Thinking) writes <think> in assistant turns, and the
    model opens its reasoning itself. K25 (K2.5, K2.6) opens it in the prompt, declares tools in TypeScript and has no
    system prompt of its own. K27 (K2.7-Code) is as K25, but keeps the reasoning of all turns unless told otherwise.
    """

    INSTRUCT = "instruct"
    THINKING = "thinking"
    K25 = "k2.5"
    K27 = "k2.7"

    @property
    def is_k25(self) -> bool:
        """Whether this is K2.5 or a later member."""
        return self in (ChatStyle.K25, ChatStyle.K27)

    @classmethod
    def for_name(cls, name: str) -> ChatStyle | None:
        """The style of a model's name, such as `moonshotai/Kimi-K2-Thinking`; None if it says nothing."""
        found = member(name)
        styles = {None: None, "k2": cls.INSTRUCT, "k2-thinking": cls.THINKING, "k2.7": cls.K27}
        return styles.get(found, cls.K25)


def member(name: str) -> str | None:
    """`k2`, `k2-thinking`, `k2.5` ... of a name such as `moonshotai/Kimi-K2.5`; None if it names none."""
    lowered = name.lower()
    if number := _NUMBER.search(lowered):
        return f"k2.{number[1]}"
    if not _KIMI.search(lowered):
        return None
    return "k2-thinking" if "thinking" in lowered else "k2"


@dataclass(frozen=True)
class StyleChoice:
    """A checkpoint's style, and in a few words where it was taken from."""

    style: ChatStyle
    reason: str


def choose_style(
    directory: str | Path, *, template_style: ChatStyle | None = None, override: ChatStyle | str | None = None
) -> StyleChoice:
    """The chat style of a checkpoint; see the module's first lines for the order of the sources.

    Args:
        directory: the checkpoint; its config.json may be missing or unreadable, which is another reader's error.
        template_style: what the checkpoint's own template writes; see `ChatTemplate.style`.
        override: the caller's word.

    Returns:
        INSTRUCT, the plainest, if nothing tells.

    Raises:
        TokenizerError: `override` is no style.
    """
    if override is not None:
        if override not in list(ChatStyle):
            raise TokenizerError(f"chat style: expected one of {', '.join(ChatStyle)}, got {override!r}")
        return StyleChoice(ChatStyle(override), "given by the caller")
    if template_style is not None:
        return StyleChoice(template_style, "the checkpoint's chat template")
    directory = Path(directory)
    config = _config(directory)
    text = config.get("text_config")
    holders = [config, *([text] if isinstance(text, Mapping) else [])]
    for holder in holders:
        chat_style = holder.get("chat_style")
        if chat_style in list(ChatStyle):
            return StyleChoice(ChatStyle(chat_style), "chat_style in config.json")
    is_k25 = any(holder.get("model_type") in ("kimi_k25", "kimi_k2_5") for holder in holders)
    for name, reason in _names(directory, config):
        style = ChatStyle.for_name(name)
        if style is not None and (style.is_k25 or not is_k25):
            return StyleChoice(style, reason)
    if is_k25:
        return StyleChoice(ChatStyle.K25, "model_type in config.json, which K2.5, K2.6 and K2.7 share")
    return StyleChoice(ChatStyle.INSTRUCT, "nothing names another style")


def member_of(directory: Path) -> str | None:
    """The first that config.json, the directory or the repository's name in a Hugging Face cache names."""
    found = (member(name) for name, _ in _names(directory, _config(directory)))
    return next(filter(None, found), None)


def _config(directory: Path) -> Mapping[str, Any]:
    try:
        raw = read_data(directory / "config.json", TokenizerError)
    except (TokenizerError, FileNotFoundError):
        return {}
    return raw if isinstance(raw, Mapping) else {}


def _names(directory: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a checkpoint may be called, and who says so."""
    for holder in (config, config.get("text_config")):
        path = holder.get("_name_or_path") if isinstance(holder, Mapping) else None
        if isinstance(path, str):  # a name that transformers wrote may be a local path: its last part counts
            yield path.rstrip("/").rpartition("/")[2], f"_name_or_path {path!r} in config.json"
    path = directory.absolute()
    models = [path.parent.parent.name] if path.parent.name == "snapshots" else []  # of a Hugging Face cache
    for name in dict.fromkeys((path.name, *models, path.resolve().name)):
        yield name, f"the directory's name {name!r}"
