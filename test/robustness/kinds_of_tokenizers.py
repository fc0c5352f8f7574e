"""Kinds of malformed vocabulary, tokenizer_config.json, chat template and generation_config.json.

Conversion does not read them. `test_config_file.py` and `test_defaults.py` have what fields say wrongly,
`test_hostile.py` what templates do.
"""

from __future__ import annotations

import base64
import os

from damage import Damage, Kind, line, linked, member, placed, remove, sparse, write
from kinds_of_text import of_file

VOCABULARY, CONFIG = "tiktoken.model", "tokenizer_config.json"
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
A_TOKEN = base64.b64encode(b"never seen")

VOCABULARIES: list[tuple[str, Damage]] = [
    *of_file(VOCABULARY).items(),
    ("a line of one word", line(VOCABULARY, 7, b"IQ==")),
    ("a line of three words", line(VOCABULARY, 7, b"IQ== 7 7")),
    ("no base64", line(VOCABULARY, 7, b"%%% 7")),
    ("a rank that is no number", line(VOCABULARY, 7, A_TOKEN + b" seven")),
    ("a rank of 5,000 digits", line(VOCABULARY, 7, A_TOKEN + b" " + b"9" * 5000)),
    ("a rank twice", line(VOCABULARY, 300, A_TOKEN + b" 7")),
    ("a negative rank", line(VOCABULARY, 300, A_TOKEN + b" -1")),
    ("a rank missing", line(VOCABULARY, 300, None)),
    ("a byte missing", line(VOCABULARY, 0, A_TOKEN + b" 0")),
    ("a token twice", line(VOCABULARY, 300, b"IQ== 300")),
    ("an empty token", line(VOCABULARY, 300, b"= 300")),
]


def kinds() -> list[Kind]:
    """All of them."""
    found = [Kind(f"vocabulary: {name}", "fp8", damage, VOCABULARY, ("load",)) for name, damage in VOCABULARIES]
    for name, title in ((CONFIG, "tokenizer_config"), (GENERATION, "generation_config")):
        ways = of_file(name)
        found.append(Kind(f"{title}: missing", "fp8", ways.pop("missing"), "", ()))
        found += [Kind(f"{title}: {way}", "fp8", damage, name, ("load",)) for way, damage in ways.items()]
    found += [
        Kind("template: binary", "fp8", write(TEMPLATE, bytes(range(255, 0, -1))), TEMPLATE, ("load",)),
        Kind("template: 70 MB of nothing", "fp8", sparse(TEMPLATE, 70_000_000), TEMPLATE, ("load",)),
        Kind("template: a loop of links", "fp8", placed(TEMPLATE, linked(TEMPLATE)), TEMPLATE, ("load",)),
        Kind("template: a pipe", "fp8", placed(TEMPLATE, os.mkfifo), TEMPLATE, ("load",)),
        Kind("template: missing", "fp8", remove(TEMPLATE), "", ()),
        Kind("template: no Jinja", "fp8", write(TEMPLATE, "{% if %}"), TEMPLATE, ("load",)),
        Kind("generation_config: eos null", "fp8", member(GENERATION, "eos_token_id", None), "", ()),
    ]
    return found
