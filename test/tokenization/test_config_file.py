"""Drawn tokenizer files beside transformers' own reading of the same directory: the same ids, or refused by name."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kimi_k2.errors import TokenizerError
from kimi_k2.synthetic.checkpoint import write_synthetic_vocabulary
from kimi_k2.tokenization.config_file import CONFIG_NAME, MAP_NAME
from kimi_k2.tokenization.special_tokens import special_tokens
from kimi_k2.tokenization.tokenizer import PATTERN, VOCABULARY_NAME, KimiTokenizer, read_ranks

transformers = pytest.importorskip("transformers")
tiktoken = pytest.importorskip("tiktoken")
FILES, SIZE = 200, 512 + 256
BUILT_IN = special_tokens(512)
TEXT = "Ab  <|im_end|>  c d'll [BOS]x<think> y </think>\n[PAD] <|reserved_token_517|> [EOT]é[UNK]"
TEMPLATE = (
    "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ mask_token }}|{{ image_token }}"
    "{% for message in messages %}<|im_user|> {{ message.content }} <|im_end|> {% endfor %}"
)
# Of tokenizer_config.json, or of both files where it ends in _token or _tokens.
FIELDS: dict[str, list[Any]] = {
    "bos_token": ["[BOS]", {"__type": "AddedToken", "content": "[BOS]", "lstrip": False}, "<|im_user|>", None],
    "eos_token": ["[EOS]", "<|im_end|>", "[EOT]", None],
    "unk_token": ["[UNK]", None],
    "pad_token": ["[PAD]", "[EOS]"],
    "mask_token": ["<think>", None],
    "image_token": ["<|media_pad|>"],
    "additional_special_tokens": [["<|im_end|>", "<|im_user|>"], [], None],
    "extra_special_tokens": [{}, ["[EOT]"]],
    "add_bos_token": [False],
    "clean_up_tokenization_spaces": [False],
    "model_max_length": [1000000000000000019884624838656],
    "padding_side": ["left", "right"],
    "tokenizer_class": ["TikTokenTokenizer"],
    "auto_map": [{"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}],
    "errors": ["replace"],
    "chat_template": [TEMPLATE],
}
REFUSED: dict[str, list[Any]] = {
    "bos_token": ["<s>", 3, {"content": "[BOS]", "lstrip": True}, ["[BOS]"]],
    "eos_token": ["</s>"],
    "pad_token": ["<pad>", {"content": "[PAD]", "odd": 1}],
    "image_token": ["<image>"],
    "additional_special_tokens": [["<|new|>"], "x"],
    "extra_special_tokens": [{"image_token": "<image>"}, [3]],
    "add_bos_token": [True],
    "add_eos_token": [True, "yes"],
    "add_prefix_space": [True],
    "clean_up_tokenization_spaces": [True],
    "do_lower_case": [True],
    "split_special_tokens": [True],
    "errors": ["strict"],
    "chat_template": [[{"name": "default", "template": "x"}], 1],
    "added_tokens_decoder": [
        [],
        {"3": {"content": "a"}},
        {"512": "[BOS]"},
        {"x": {"content": "a"}},
        {"520": {}},
        {"520": {"content": ""}},
        {"520": {"content": 3}},
        {"99999": {"content": "a"}},
        None,
        {"520": {"content": "[BOS]"}},
        {"512": {"content": "begin"}},
    ],
    "pad_tokn": ["[PAD]"],
    "foo": [1],
}
# Of an entry of added_tokens_decoder.
ENTRY: dict[str, list[Any]] = {
    "special": [True, False],
    "normalized": [True, False],
    "lstrip": [False],
    "rstrip": [False],
    "single_word": [False],
}
ENTRY_REFUSED = {"lstrip": True, "rstrip": True, "single_word": True, "odd": 1}


def theirs(directory: Path) -> Any:
    """transformers' tokenizer of Python code over tiktoken, as the published one is."""

    class TikTokenTokenizer(transformers.PreTrainedTokenizer):  # type: ignore[misc, name-defined]
        vocab_files_names: ClassVar = {"vocab_file": VOCABULARY_NAME}

        def __init__(self, vocab_file: str, **options: Any) -> None:
            ranks = read_ranks(Path(vocab_file))
            self.model = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
            # Slots without an entry keep the published names.
            added = {token: transformers.AddedToken(name, special=True) for name, token in BUILT_IN.items()}
            options["added_tokens_decoder"] = added | (options.get("added_tokens_decoder") or {})
            super().__init__(**{"bos_token": "[BOS]", "eos_token": "[EOS]"} | options)  # the published defaults

        @property
        def vocab_size(self) -> int:
            return int(self.model.n_vocab)

        def get_vocab(self) -> dict[str, int]:
            added: dict[str, int] = self.added_tokens_encoder
            return {str(number): number for number in range(self.vocab_size)} | added

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return [str(token) for token in self.model.encode_ordinary(text)]

        def _convert_token_to_id(self, token: str) -> int:
            return int(token)

    return TikTokenTokenizer.from_pretrained(directory)


def draw_files(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {name: draw.choice(FIELDS[name]) for name in draw.sample(list(FIELDS), draw.randint(1, 7))}
    mapped = {name: draw.choice(FIELDS[name]) for name in draw.sample(list(FIELDS)[:6], draw.choice([0, 0, 1, 2]))}
    for value in mapped.values():  # the second file's objects need no word for what they are
        if isinstance(value, dict):
            mapped = {"bos_token": {"content": "[BOS]"}}
    if draw.random() < 0.7:
        entries: dict[str, Any] = {}
        for name, token in draw.sample(sorted(BUILT_IN.items()), draw.randint(1, 250)):
            entry = {"content": name, **{key: draw.choice(values) for key, values in ENTRY.items()}}
            if name.startswith("<|reserved") and draw.random() < 0.2:
                entry["content"] = f"<|own_{token}|>"
            entries[str(token)] = entry
        if draw.random() < 0.1:
            odd = draw.choice(list(ENTRY_REFUSED))
            draw.choice(list(entries.values()))[odd] = ENTRY_REFUSED[odd]
        config["added_tokens_decoder"] = entries
    if draw.random() < 0.2:
        name = draw.choice(list(REFUSED))
        config[name] = draw.choice(REFUSED[name])
    if draw.random() < 0.08:
        mapped[draw.choice(["bos_token", "foo", "additional_special_tokens"])] = draw.choice(["<s>", ["<|new|>"]])
    return config, mapped


def outcome(directory: Path, config: dict[str, Any], mapped: dict[str, Any]) -> str:
    (directory / CONFIG_NAME).write_text(json.dumps(config))
    if mapped:
        (directory / MAP_NAME).write_text(json.dumps(mapped))
    try:
        ours = KimiTokenizer.from_pretrained(directory)
    except TokenizerError as error:
        assert error.file in (str(directory / CONFIG_NAME), str(directory / MAP_NAME))
        assert error.field is not None
        assert error.field.partition(".")[0] in (config if str(error.file).endswith(CONFIG_NAME) else mapped)
        return "refused"
    own = theirs(directory)
    ids = own(TEXT, add_special_tokens=False)["input_ids"]
    assert ours.encode(TEXT, allow_special=True) == ids
    messages = [{"role": "user", "content": "plain text"}]
    text = own.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
    if "chat_template" not in config:
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    segments = KimiTokenizer.from_pretrained(directory).render_segments(messages)
    assert "".join(segment.text for segment in segments) == text
    assert ours.encode_segments(segments) == own(text, add_special_tokens=False)["input_ids"]
    return "same"


def test_drawn_files_beside_transformers(tmp_path: Path) -> None:
    draw, found = random.Random(45), Counter[str]()
    for number in range(FILES):
        directory = tmp_path / str(number)
        directory.mkdir()
        write_synthetic_vocabulary(directory, SIZE)
        found[outcome(directory, *draw_files(draw))] += 1
    print(f"\n{FILES} pairs of files: {dict(found)}")
    assert min(found["same"], found["refused"]) > FILES // 6


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_obeyed_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_synthetic_vocabulary(tmp_path, SIZE)
    for value in REFUSED[name]:
        (tmp_path / CONFIG_NAME).write_text(json.dumps({name: value}))
        with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: field '{name}"):
            KimiTokenizer.from_pretrained(tmp_path)
        if name.endswith("_token") and name != "add_bos_token":
            (tmp_path / CONFIG_NAME).write_text("{}")
            (tmp_path / MAP_NAME).write_text(json.dumps({name: value}))
            with pytest.raises(TokenizerError, match=rf"special_tokens_map\.json: field '{name}"):
                KimiTokenizer.from_pretrained(tmp_path)
            (tmp_path / MAP_NAME).unlink()
