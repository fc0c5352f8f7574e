"""Kinds of malformed vocabulary, tokenizer_config.json, chat template and generation_config.json.

Conversion and `inspect` do not read them: what they refuse is what the weights need.
"""

from __future__ import annotations

import base64

from damage import DELETED, Damage, Kind, line, linked, member, placed, remove, sparse, write
from kinds_of_text import of_file

VOCABULARY, CONFIG = "tiktoken.model", "tokenizer_config.json"
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
A_TOKEN = base64.b64encode(b"never seen")
_NAMES = "added_tokens_decoder"

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
CONFIGS: list[tuple[str, Damage]] = [
    *(one for one in of_file(CONFIG).items() if one[0] != "missing"),
    ("names in a list", member(CONFIG, _NAMES, [1])),
    ("names a number", member(CONFIG, _NAMES, 3)),
    ("names null", member(CONFIG, _NAMES, None)),
    ("an id that is no number", member(CONFIG, f"{_NAMES}/x", {"content": "a"})),
    ("an id of a plain token", member(CONFIG, f"{_NAMES}/3", {"content": "a"})),
    ("an id beyond the vocabulary", member(CONFIG, f"{_NAMES}/99999", {"content": "a"})),
    ("a name that is a number", member(CONFIG, f"{_NAMES}/514/content", 3)),
    ("an empty name", member(CONFIG, f"{_NAMES}/514/content", "")),
    ("an entry without a name", member(CONFIG, f"{_NAMES}/514/content", DELETED)),
    ("an entry that is a name", member(CONFIG, f"{_NAMES}/514", "<|im_end|>")),
    ("a name twice", member(CONFIG, f"{_NAMES}/514/content", "[EOS]")),
    ("no end of turn", member(CONFIG, f"{_NAMES}/514/content", "<|im_over|>")),
]
SOURCES: list[tuple[str, str]] = [
    ("no Jinja", "{% if %}"),
    ("loops in loops", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    ("a look into Python", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    ("an import", "{% import 'os' as os %}{{ os }}"),
    ("an include", "{% include '/etc/passwd' %}"),
    ("deep", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
    ("nothing", ""),
    ("long", "x" * 100_000),
]
GENERATIONS: list[tuple[str, Damage]] = [
    *(one for one in of_file(GENERATION).items() if one[0] != "missing"),
    ("eos a string", member(GENERATION, "eos_token_id", "x")),
    ("eos beyond", member(GENERATION, "eos_token_id", 768)),
    ("eos negative", member(GENERATION, "eos_token_id", [-1])),
    ("eos true", member(GENERATION, "eos_token_id", True)),
    ("eos an object", member(GENERATION, "eos_token_id", {"a": 1})),
    ("eos of 5,000 digits", member(GENERATION, "eos_token_id", 10**400)),
]


def kinds() -> list[Kind]:
    """All of them."""
    found = [Kind(f"vocabulary: {name}", "fp8", damage, VOCABULARY, "g") for name, damage in VOCABULARIES]
    found += [Kind(f"tokenizer_config: {name}", "fp8", damage, CONFIG, "g") for name, damage in CONFIGS]
    found += [Kind(f"template: {name}", "fp8", write(TEMPLATE, source), TEMPLATE, "g") for name, source in SOURCES]
    found += [
        Kind("template: binary", "fp8", write(TEMPLATE, bytes(range(255, 0, -1))), TEMPLATE, "g"),
        Kind("template: 70 MB of nothing", "fp8", sparse(TEMPLATE, 70_000_000), TEMPLATE, "g"),
        Kind("template: a loop of links", "fp8", placed(TEMPLATE, linked(TEMPLATE)), TEMPLATE, "g"),
        Kind("template: missing", "fp8", remove(TEMPLATE), "", ""),
        Kind("tokenizer_config: missing", "fp8", remove(CONFIG), "", ""),
        Kind("template in tokenizer_config a number", "fp8", _moved_template(5), "chat_template", "g"),
        Kind("template in tokenizer_config no Jinja", "fp8", _moved_template("{% if %}"), "chat_template", "g"),
    ]
    found += [Kind(f"generation_config: {name}", "fp8", damage, GENERATION, "g") for name, damage in GENERATIONS]
    found += [
        Kind("generation_config: missing", "fp8", remove(GENERATION), "", ""),
        Kind("generation_config: eos null", "fp8", member(GENERATION, "eos_token_id", None), "", ""),
    ]
    return found


def _moved_template(source: object) -> Damage:
    """A template in tokenizer_config.json alone."""
    put_there, take_away = member(CONFIG, "chat_template", source), remove(TEMPLATE)
    return lambda directory: (put_there(directory), take_away(directory))
