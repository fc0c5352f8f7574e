"""The tokenizer against tiktoken used directly and against Hugging Face's BPE built from the same ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k2.errors import TokenizerError
from kimi_k2.synthetic.checkpoint import synthetic_ranks, write_synthetic_vocabulary
from kimi_k2.tokenization.special_tokens import NAMED, special_tokens
from kimi_k2.tokenization.tokenizer import PATTERN, VOCABULARY_NAME, KimiTokenizer, _bounded_pieces

TEXTS = [
    "Hello, world! It's 12345 o'clock.\n\n  Don't PANIC\tNow",
    "中文English混合汉字 abc 北京市",
    "naïve café Ñandú ÀÉ ǅ ʰ",
    "emoji 🙂🙃 and ‮bidi‬ marks",
    "trailing spaces   \n   \r\n",
    " ",
]
DIRECT = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=synthetic_ranks(1792), special_tokens={})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary")
    write_synthetic_vocabulary(path, 2048)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> KimiTokenizer:
    return KimiTokenizer.from_pretrained(directory)


def test_special_ids_of_the_facts() -> None:
    names = special_tokens(163_584)
    for name, token in (
        ("[BOS]", 163584), ("[EOS]", 163585), ("<|im_end|>", 163586), ("<|im_user|>", 163587),
        ("<|im_assistant|>", 163588), ("<|start_header_id|>", 163590), ("<|end_header_id|>", 163591),
        ("[EOT]", 163593), ("<|im_system|>", 163594), ("<|tool_calls_section_begin|>", 163595),
        ("<|tool_calls_section_end|>", 163596), ("<|tool_call_begin|>", 163597),
        ("<|tool_call_argument_begin|>", 163598), ("<|tool_call_end|>", 163599), ("<|im_middle|>", 163601),
        ("<|media_begin|>", 163602), ("<|media_pad|>", 163605), ("<think>", 163606), ("</think>", 163607),
        ("[UNK]", 163838), ("[PAD]", 163839),
    ):  # fmt: skip
        assert names[name] == token
    assert len(names) == 256
    assert max(names.values()) == 163839


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_round_trips_and_equals_tiktoken(tokenizer: KimiTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == DIRECT.encode_ordinary(text)
    assert tokenizer.decode_bytes(ids).decode("utf-8", "replace") == text.encode("utf-8", "replace").decode()


@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_as_hugging_face_bpe(directory: Path, text: str) -> None:
    """tokenizers' BPE and pretokenizer, as transformers' converter makes them of the same file."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    theirs = TikTokenConverter(str(directory / VOCABULARY_NAME), pattern=PATTERN).converted()
    assert DIRECT.encode_ordinary(text) == theirs.encode(text, add_special_tokens=False).ids


def test_han_runs_stand_alone() -> None:
    regex = pytest.importorskip("regex")
    pieces = regex.findall(PATTERN, "中文English混合 12345 Pascal's", flags=regex.V1)
    assert pieces == ["中文", "English", "混合", " ", "123", "45", " Pascal's"]


def test_user_text_cannot_forge_special_tokens(tokenizer: KimiTokenizer) -> None:
    special = set(tokenizer.special_tokens.values())

    def chat(content: str) -> list[int]:
        segments = tokenizer.render_segments([{"role": "user", "content": content}])
        return [token for token in tokenizer.encode_segments(segments) if token in special]

    for name in NAMED.values():
        forged = f"a{name}b"
        assert not special & set(tokenizer.encode(forged))
        assert tokenizer.special_tokens[name] in tokenizer.encode(forged, allow_special=True)
        assert chat(forged) == chat("ab")


@given(st.lists(st.integers(0, 2047), max_size=40))
@settings(max_examples=100, deadline=None)
def test_streamed_decoding_equals_whole(tokenizer: KimiTokenizer, ids: list[int]) -> None:
    decoder = tokenizer.incremental_decoder()
    assert "".join(map(decoder.feed, ids)) + decoder.flush() == tokenizer.decode(ids)


def test_very_long_runs_are_cut_and_lossless(tokenizer: KimiTokenizer) -> None:
    for text in ("a" * 60_000, " " * 60_000, "ab " * 200_000, "x" * 25_000 + " y"):
        pieces = list(_bounded_pieces(text))
        assert "".join(pieces) == text
        assert all(len(run) <= 25_000 for piece in pieces for run in piece.split())
    assert tokenizer.decode(tokenizer.encode("a" * 60_000)) == "a" * 60_000
    assert len(list(_bounded_pieces("x" * 25_000 + " y"))) == 1


def test_cutting_long_runs_cuts_no_special_token(tokenizer: KimiTokenizer) -> None:
    end = tokenizer.special_tokens["<|im_end|>"]
    for before in range(24_990, 25_001):
        assert tokenizer.encode("x" * before + "<|im_end|>" + "y" * 9, allow_special=True).count(end) == 1


@given(st.lists(st.sampled_from([*NAMED.values(), "<|reserved_token_1797|>", "a", " b", "<|", "汉"]), max_size=12))
@settings(max_examples=100, deadline=None)
def test_special_tokens_are_found_as_tiktoken_finds_them(tokenizer: KimiTokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert tokenizer.encode(text, allow_special=True) == tokenizer.encoding.encode(text, allowed_special="all")


def test_stop_tokens(tokenizer: KimiTokenizer) -> None:
    names = tokenizer.special_tokens
    assert tokenizer.stop_token_ids == {names["<|im_end|>"], names["[EOS]"], names["[EOT]"]}
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size) == (1792, 2047, 2048)


def test_ids_outside_the_vocabulary(tokenizer: KimiTokenizer) -> None:
    for token in (-1, 2048):
        with pytest.raises(TokenizerError, match=f"token id {token} is not in"):
            tokenizer.decode([token])


def test_too_small_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="got a size of 255"):
        write_synthetic_vocabulary(tmp_path, 511)
