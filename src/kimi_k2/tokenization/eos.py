"""Which tokens end a generation."""

from __future__ import annotations

from pathlib import Path

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.files import is_there, read_json

# <|im_end|> of the real vocabulary ends a turn in every chat model of the family, whatever config.json says.
IM_END = 163586
REAL_VOCAB_SIZE = 163840


def load_eos_token_ids(directory: str | Path, config: KimiK2Config) -> frozenset[int]:
    """Tokens that end generation: from generation_config.json, else config.json, and <|im_end|> in any case.

    Raises:
        ConfigError: generation_config.json is not JSON or its `eos_token_id` is no token id.
    """
    path = Path(directory) / "generation_config.json"
    eos: object = config.eos_token_id
    if is_there(path):
        try:
            raw = read_json(path, ConfigError)
        except FileNotFoundError:
            raise ConfigError("a link to a file that is not there", file=path) from None
        if not isinstance(raw, dict):
            raise ConfigError("expected a JSON object", file=path)
        eos = raw.get("eos_token_id", eos)
    listed = [] if eos is None else list(eos) if isinstance(eos, list) else [eos]
    ids: list[int] = []
    for token in listed:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab_size:
            raise ConfigError(
                f"expected token ids below {config.vocab_size}, got {token!r}", field="eos_token_id", file=path
            )
        ids.append(token)
    if config.vocab_size == REAL_VOCAB_SIZE:
        ids.append(IM_END)
    return frozenset(ids)
