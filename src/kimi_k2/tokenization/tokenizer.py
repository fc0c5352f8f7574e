"""KimiTokenizer: the published `tiktoken.model` vocabulary on OpenAI's tiktoken."""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from kimi_k2.errors import TokenizerError
from kimi_k2.files import read_bytes
from kimi_k2.limits import TOKENIZER_BYTES
from kimi_k2.tokenization.chat import built_in_template
from kimi_k2.tokenization.config_file import TokenizerConfig
from kimi_k2.tokenization.special_tokens import BOS, EOS, EOT, IM_END, PAD, VIDEO_PLACEHOLDER
from kimi_k2.tokenization.style import ChatStyle, StyleChoice, choose_style
from kimi_k2.tokenization.template import ChatTemplate, Segment

VOCABULARY_NAME = "tiktoken.model"

# The pretokenizer is part of the vocabulary's format: ranks were learned on these pieces. Han runs stand alone;
# elsewhere letters split by case, numbers into at most three digits.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# tiktoken's regex engine recurses: very long texts or runs overflow its stack, so the published tokenizer cuts there.
MAX_CHARS = 400_000
MAX_RUN = 25_000
_LONG_RUN = re.compile(rf"\s{{1,{MAX_RUN}}}|\S{{1,{MAX_RUN}}}")


class KimiTokenizer:
    """Encodes and decodes with tiktoken; user text never turns into special tokens unless asked to.

    Attributes:
        vocab_size: base ranks and special slots (163840 in the published vocabulary).
        special_tokens: name -> id.
        bos_token_id, eos_token_id, pad_token_id: ids of [BOS], [EOS] and [PAD].
        stop_token_ids: tokens that end a turn: <|im_end|>, [EOS] and [EOT].
        chat_template: the checkpoint's own template, or None: then the built-in one of `chat_style` is used.
        chat_style: which member of the family this is; `style_reason` says in a few words why.
    """

    def __init__(
        self,
        ranks: dict[bytes, int],
        names: dict[str, int],
        chat_template: ChatTemplate | None = None,
        choice: StyleChoice | None = None,
    ) -> None:
        self.special_tokens = names
        self.chat_template = chat_template
        choice = choice or StyleChoice(ChatStyle.INSTRUCT, "no other was asked for")
        self.chat_style, self.style_reason = choice.style, choice.reason
        self._special = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
        self.encoding = tiktoken.Encoding(VOCABULARY_NAME, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=names)
        self.vocab_size = self.encoding.n_vocab
        self.bos_token_id, self.eos_token_id, self.pad_token_id = names[BOS], names[EOS], names[PAD]
        self.stop_token_ids = frozenset(names[token] for token in (IM_END, EOS, EOT))

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, style: ChatStyle | str | None = None) -> KimiTokenizer:
        """Read `tiktoken.model`, and special names and a chat template from the other files if they are there.

        Args:
            directory: the checkpoint.
            style: overrides what the checkpoint says of its chat style (see `choose_style`). A template of the
                checkpoint's own that has another style is then left aside for the built-in one.

        Raises:
            TokenizerError: a file is missing or malformed; the message names file and line or field.
        """
        directory = Path(directory)
        ranks = read_ranks(directory / VOCABULARY_NAME)
        config = TokenizerConfig.from_pretrained(directory, len(ranks))
        template = ChatTemplate.from_pretrained(directory, config)
        own = template.style() if template else None
        choice = choose_style(directory, template_style=own, override=style)
        if style is not None and own is not None and own is not choice.style:
            template = None
        return cls(ranks, config.names, chat_template=template, choice=choice)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`; with `allow_special`, names of special tokens in it become those tokens."""
        if not allow_special:
            return [token for piece in _bounded_pieces(text) for token in self.encoding.encode_ordinary(piece)]
        # Split at the names here, not in tiktoken: cutting a long run must not cut a name.
        ids: list[int] = []
        end = 0
        for match in self._special.finditer(text):
            ids += [*self.encode(text[end : match.start()]), self.special_tokens[match[0]]]
            end = match.end()
        return ids + self.encode(text[end:])

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Token ids of a rendered conversation, in which only the template's own markup is special.

        Raises:
            TokenizerError: a video's placeholder, which is no token; see `media.prompt.MediaProcessor`.
        """
        segments = list(segments)
        if VIDEO_PLACEHOLDER not in self.special_tokens and any(
            segment.markup and segment.text == VIDEO_PLACEHOLDER for segment in segments
        ):
            raise TokenizerError("a video needs the media processor, which puts its frames' tokens into the prompt")
        return [token for segment in segments for token in self.encode(segment.text, allow_special=segment.markup)]

    def render_segments(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[Segment]:
        """A conversation in the checkpoint's own template, else in the built-in one of its style.

        Options, result and errors as for `ChatTemplate.render_segments`; `style` is the checkpoint's if not given.

        Raises:
            TokenizerError: also for `thinking` and `preserve_thinking` that the model's template would not heed.
        """
        style = ChatStyle(options.pop("style", self.chat_style))
        template = built_in_template(style) if self.chat_template is None else self.chat_template
        always = style is ChatStyle.THINKING or (style.is_k25 and not template.reads("thinking"))
        if options.get("thinking") is False and always:
            raise TokenizerError(f"thinking: a checkpoint of the style {style.value!r} cannot be told not to reason")
        never = style is ChatStyle.INSTRUCT or not template.reads("preserve_thinking")
        if options.get("preserve_thinking") and never:
            raise TokenizerError(f"preserve_thinking: the template (style {style.value!r}) keeps no earlier reasoning")
        return template.render_segments(messages, style=style, **options)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            TokenizerError: an id is outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Exact bytes of token ids."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise TokenizerError(f"token id {token} is not in 0..{self.vocab_size - 1}")
        decoded: bytes = self.encoding.decode_bytes(list(ids))
        return decoded

    def incremental_decoder(self) -> IncrementalDecoder:
        """A decoder for one stream of tokens."""
        return IncrementalDecoder(self)


class IncrementalDecoder:
    """Turns a stream of tokens into text as soon as whole characters are known."""

    def __init__(self, tokenizer: KimiTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Text that this token completes; empty while a character is cut between tokens."""
        return self._utf8.decode(self._tokenizer.decode_bytes([token]))

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a tiktoken vocabulary: a line a token, base64 bytes and rank.

    Raises:
        TokenizerError: the file is missing, a line is malformed, a rank or token occurs twice, or one is missing.
    """
    try:
        lines = read_bytes(path, TOKENIZER_BYTES, TokenizerError).splitlines()
    except FileNotFoundError as error:
        raise TokenizerError(f"cannot be read: {error.strerror}", file=path) from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            value = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerError(f"{path}: line {number}: expected base64 and a rank, got {line[:60]!r}") from None
        if token in ranks or not token:
            raise TokenizerError(f"{path}: line {number}: token {token!r} is empty or occurs twice")
        ranks[token] = value
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{path}: expected every rank from 0 to {len(ranks) - 1} once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(f"{path}: expected all 256 single bytes, {len(missing)} are missing, first {missing[0]}")
    return ranks


def _bounded_pieces(text: str) -> Iterator[str]:
    """Cut text after MAX_CHARS characters, and runs of spaces or of non-spaces after MAX_RUN."""
    for start in range(0, len(text), MAX_CHARS):
        piece = text[start : start + MAX_CHARS]
        begin = 0
        for run in _LONG_RUN.finditer(piece):
            following = piece[run.end() : run.end() + 1]
            is_cut = run.end() - run.start() == MAX_RUN and following and following.isspace() == run[0].isspace()
            if is_cut:
                yield piece[begin : run.end()]
                begin = run.end()
        yield piece[begin:]
