"""tokenizer_config.json and special_tokens_map.json: obeyed as transformers obeys them, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from kimi_k2.config_fields import refuse_unknown
from kimi_k2.errors import ConfigError, TokenizerError
from kimi_k2.files import read_fields
from kimi_k2.limits import TOKENIZER_BYTES
from kimi_k2.tokenization.special_tokens import BOS, EOS, EOT, IM_END, PAD, special_tokens

CONFIG_NAME, MAP_NAME = "tokenizer_config.json", "special_tokens_map.json"
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_READ = {"added_tokens_decoder", "chat_template"}
_WITHOUT_EFFECT: dict[str, str] = {
    "who wrote it, and with which classes": "auto_map backend is_local local_files_only name_or_path processor_class"
    " special_tokens_map_file tokenizer_class tokenizer_file use_fast legacy init_inputs",
    "of batches, which nothing here pads or cuts": "max_length model_input_names model_max_length pad_to_multiple_of"
    " pad_token_type_id padding padding_side stride truncation truncation_side truncation_strategy",
}
_HARMLESS = frozenset(name for names in _WITHOUT_EFFECT.values() for name in names.split())
_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "do_lower_case"),
        (False, None),
    ),
    **dict.fromkeys(("split_special_tokens", "spaces_between_special_tokens"), (False, None)),
    "errors": ("replace", None),
}
# Of an entry of added_tokens_decoder: whether a token is special shows in what is left out of decoded text alone.
_ENTRY_ONLY = dict.fromkeys(("lstrip", "rstrip", "single_word"), (False, None))
_ENTRY_HARMLESS = ("special", "normalized", "__type")


@dataclass(frozen=True)
class TokenizerConfig:
    """What the files say.

    Attributes:
        names: special tokens, name -> id: all 256 slots, as the files call them.
        variables: special tokens that a chat template is given by name.
        chat_template: Jinja source, where tokenizer_config.json has it.
        file: tokenizer_config.json, for messages.
    """

    names: dict[str, int]
    variables: dict[str, str]
    chat_template: str | None
    file: Path

    @classmethod
    def from_pretrained(cls, directory: str | Path, base: int) -> TokenizerConfig:
        """Read the files of a checkpoint; what they leave out is as published.

        Args:
            directory: of the checkpoint.
            base: ranks of the vocabulary, after which the special slots come.

        Raises:
            TokenizerError: a file cannot be read, or a field is not known or asks for what is not done here.
        """
        path, beside = Path(directory) / CONFIG_NAME, Path(directory) / MAP_NAME
        fields, mapped = map(_read, (path, beside))
        names = _names(fields.get("added_tokens_decoder", {}), base, path)
        own, others = _tokens(fields, path), _tokens(mapped, beside)
        for name, value in others.items():
            if own.get(name, value) != value:
                raise TokenizerError(f"is {value!r:.100}, {own[name]!r:.100} in {CONFIG_NAME}", field=name, file=beside)
        if "added_tokens_decoder" not in fields:  # transformers reads the second file there alone
            own = others | own
        for name, value in own.items():
            for token in value if isinstance(value, tuple) else (value,):
                if token is not None and token not in names:
                    file = path if name in fields else beside
                    raise TokenizerError(f"no token is called {token!r:.100}", field=name, file=file)
        variables = {"bos_token": BOS, "eos_token": EOS} | {name: own[name] for name in own if name not in _LISTS}
        source = fields.get("chat_template")
        if not isinstance(source, (str, type(None))):
            raise TokenizerError(
                f"expected Jinja source, got {type(source).__name__}", field="chat_template", file=path
            )
        return cls(names, {name: token for name, token in variables.items() if token is not None}, source, path)


def _read(path: Path) -> Mapping[str, Any]:
    raw = read_fields(path, TokenizerError, TOKENIZER_BYTES)
    _check(raw, {*_LISTS, *filter(_is_variable, raw), *(_READ if path.name == CONFIG_NAME else ())}, path)
    return raw


def _is_variable(name: str) -> bool:
    """Whether a field is a special token, which transformers gives a template by that name: `bos_token` and others."""
    return name.endswith("_token") and name not in _ONLY


def _check(raw: Mapping[str, Any], known: set[str], path: Path, place: str = "", **lists: Any) -> None:
    try:
        refuse_unknown(raw, known, place, **({"only": _ONLY, "harmless": _HARMLESS} | lists))
    except ConfigError as error:
        raise TokenizerError(error.message, field=error.field, file=path) from None


def _names(added: Any, base: int, path: Path) -> dict[str, int]:
    """Names from `added_tokens_decoder`, which differ between the members of the family, win over the built-in."""
    place = "added_tokens_decoder"
    by_id = {token: name for name, token in special_tokens(base).items()}
    if not isinstance(added, Mapping):
        raise TokenizerError(f"expected id -> {{content}}, got {type(added).__name__}", field=place, file=path)
    for key, entry in added.items():
        name = entry.get("content") if isinstance(entry, Mapping) else None
        token = int(key) if key.isdecimal() and len(key) < 20 else -1
        if token not in by_id or not isinstance(name, str) or not name:
            raise TokenizerError(
                f"expected names of ids {base}..{base + len(by_id) - 1}, got {key:.20}: {shown(name)}",
                field=place,
                file=path,
            )
        _check(entry, {"content"}, path, f"{place}.{key}", only=_ENTRY_ONLY, harmless=_ENTRY_HARMLESS)
        by_id[token] = name
    names = {name: token for token, name in by_id.items()}
    if len(names) != len(by_id):
        raise TokenizerError("a name occurs twice", field=place, file=path)
    for name in (BOS, EOS, PAD, IM_END, EOT):
        if name not in names:
            raise TokenizerError(f"no token is called {name}", field=place, file=path)
    return names


def _text(value: Any, name: str, path: Path) -> str | None:
    """A token's name, which an object may hold; null is none."""
    if isinstance(value, Mapping):
        _check(value, {"content"}, path, name, only=_ENTRY_ONLY, harmless=_ENTRY_HARMLESS)
        value = value.get("content", value)
    if not isinstance(value, (str, type(None))):
        raise TokenizerError(f"expected text, got {type(value).__name__}", field=name, file=path)
    return value


def _tokens(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Special tokens by their names in a template; and the lists of those that are special besides.

    transformers would make those that the vocabulary has not.
    """
    found: dict[str, Any] = {name: _text(fields[name], name, path) for name in filter(_is_variable, fields)}
    for name in _LISTS:
        value = fields.get(name)
        tokens = list(value.values()) if isinstance(value, Mapping) else value
        if not isinstance(tokens, (list, type(None))):
            raise TokenizerError(f"expected a list of tokens, got {type(value).__name__}", field=name, file=path)
        if tokens:
            found[name] = tuple(_text(token, name, path) for token in tokens)
    return found
