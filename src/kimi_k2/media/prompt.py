"""Conversations with images and videos: media read, and their tokens put where the chat template has placeholders."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from PIL import Image

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import MediaError
from kimi_k2.media.config import MediaConfig
from kimi_k2.media.image import process_image
from kimi_k2.media.patches import Media
from kimi_k2.media.video import process_video
from kimi_k2.tokenization.messages import IMAGE_PARTS, VIDEO_PARTS, Message, part_kind, translated
from kimi_k2.tokenization.special_tokens import (
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    VIDEO_PLACEHOLDER,
)
from kimi_k2.tokenization.template import Segment
from kimi_k2.tokenization.tokenizer import KimiTokenizer
from kimi_k2.vision_config import VisionConfig


@dataclass(frozen=True)
class MediaPrompt:
    """A conversation for the model.

    Attributes:
        ids: token ids; each token of `media_token_ids` stands for one row of the tower's output.
        media: images and video chunks in the order of their tokens.
        segments: what the template rendered, media not yet expanded.
    """

    ids: list[int]
    media: tuple[Media, ...]
    segments: tuple[Segment, ...]


class MediaProcessor:
    """Turns messages into prompts, as transformers' `Kimi_K25Processor` does.

    Args:
        tokenizer: of the checkpoint.
        vision: of its configuration.
        config: limits and rates.

    Raises:
        MediaError: `config` cuts other patches than the tower takes.
    """

    def __init__(self, tokenizer: KimiTokenizer, vision: VisionConfig, config: MediaConfig | None = None) -> None:
        self.tokenizer, self.vision = tokenizer, vision
        self.config = config or MediaConfig()
        ours = (self.config.patch_size, (self.config.merge_size,) * 2)
        if ours != (vision.patch_size, vision.merge_kernel_size) or self.config.frames_a_chunk > vision.pos_emb_time:
            raise MediaError("the processor's patch_size, merge_size or frames of a chunk are not the tower's")

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, tokenizer: KimiTokenizer | None = None, config: KimiK2Config | None = None
    ) -> MediaProcessor:
        """For a checkpoint, whose files of the processor are read if it has any.

        Raises:
            MediaError: its configuration has no vision tower.
            ConfigError, TokenizerError: a file is missing or malformed.
        """
        config = config or KimiK2Config.from_pretrained(directory)
        if config.vision is None:
            raise MediaError("this checkpoint has no vision tower: it takes text only", file=directory)
        tokenizer = tokenizer or KimiTokenizer.from_pretrained(directory)
        return cls(tokenizer, config.vision, MediaConfig.from_pretrained(directory))

    def __call__(self, messages: Sequence[Message], **options: Any) -> MediaPrompt:
        """A prompt of a conversation.

        Args:
            messages: OpenAI-style. A part of an image is `{"type": "image", "image": X}` or `{"type": "image_url",
                "image_url": {"url": X}}`, the same for `video`; X is a path, a `file:` or `data:` URL, bytes, or (of an
                image) a Pillow image.
            options: as for `ChatTemplate.render_segments` (tools, thinking ...).

        Raises:
            MediaError: a medium cannot be read, see `process_image` and `process_video`, or the template leaves one
                out.
            TokenizerError: a message is malformed.
        """
        bare, sources = taken_out(messages)
        segments = self.tokenizer.render_segments(bare, **options)
        slots = [segment for segment in segments if segment.markup and segment.text in (MEDIA_PAD, VIDEO_PLACEHOLDER)]
        kinds = [MEDIA_PAD if kind == "image" else VIDEO_PLACEHOLDER for kind, _, _ in sources]
        if [slot.text for slot in slots] != kinds:
            raise MediaError(f"the chat template has places for {len(slots)} of {len(sources)} images and videos")
        remaining = iter(sources)
        ids: list[int] = []
        media: list[Media] = []
        text = ""  # held back, since a video's first time continues it
        for segment in segments:
            if not segment.markup:
                text += segment.text
                continue
            if segment.text not in (MEDIA_PAD, VIDEO_PLACEHOLDER):
                ids += [*self.tokenizer.encode(text), *self.tokenizer.encode(segment.text, allow_special=True)]
            else:
                kind, source, where = next(remaining)
                name, content = _content(source, kind, where)
                if kind == "image":
                    image = process_image(content, self.config, name=name)
                    tokens = image.grid.tokens(self.vision.merge_kernel_size)  # begin and end are the template's
                    ids += [*self.tokenizer.encode(text), *[self.vision.image_token_id] * tokens]
                    media.append(image)
                else:
                    chunks = process_video(content, self.config, name=name)
                    ids += self.video_tokens(chunks, text)
                    media += chunks
            text = ""
        ids += self.tokenizer.encode(text)
        return MediaPrompt(ids, tuple(media), tuple(segments))

    def video_tokens(self, chunks: Sequence[Media], text: str = "") -> list[int]:
        """What takes the place of a video's placeholder: for every chunk its time and its tokens.

        Args:
            text: that stands before it; with the first time it is one text to the tokenizer.
        """
        special, vision = self.tokenizer.special_tokens, self.vision
        token = vision.image_token_id if vision.video_token_id is None else vision.video_token_id
        ids: list[int] = []
        for chunk in chunks:
            ids += self.tokenizer.encode(text + timestamp(chunk.seconds or 0.0))
            text = ""
            ids += [special[MEDIA_BEGIN], *self.tokenizer.encode("video"), special[MEDIA_CONTENT]]
            ids += [token] * chunk.grid.tokens(vision.merge_kernel_size) + [special[MEDIA_END]]
        return ids


def timestamp(seconds: float) -> str:
    """hh:mm:ss.fff of a time within a day, cut to whole milliseconds."""
    whole = int(seconds)
    return f"{whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"


def taken_out(messages: Sequence[Message]) -> tuple[list[Any], list[tuple[str, Any, str]]]:
    """Translated messages with bare image and video parts; and of each of these kind, source, and where it stands.

    Templates need no more, and a source may be long or no text.
    """
    bare: list[Any] = []  # what is no message is the template's to refuse
    sources: list[tuple[str, Any, str]] = []
    plain = [(number, each) for number, given in enumerate(messages) for each in translated(given, number)]
    for index, message in plain:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)):
            parts = list(content)
            for number, part in enumerate(content):
                if isinstance(part, Mapping) and (kind := part_kind(part)):
                    names = IMAGE_PARTS if kind == "image" else VIDEO_PARTS
                    source = next((part[name] for name in (*names, "url", "path") if part.get(name) is not None), None)
                    source = source.get("url") if isinstance(source, Mapping) else source
                    sources.append((kind, source, f"message {index}: content[{number}]"))
                    parts[number] = {"type": kind}
            message = {**message, "content": parts}
        bare.append(message)
    return bare, sources


def _content(source: Any, kind: str, where: str) -> tuple[str, Any]:
    """Name and content of a source: a path, bytes or a Pillow image."""
    if isinstance(source, (bytes, bytearray)):
        return where, bytes(source)
    if isinstance(source, Path):
        return str(source), source
    if kind == "image" and isinstance(source, Image.Image):
        return where, source
    if not isinstance(source, str) or not source:
        raise MediaError(f"expected a path or a data: URL of the {kind}, got {type(source).__name__}", file=where)
    scheme = source.partition(":")[0].lower() if ":" in source else ""
    if scheme == "data":
        return where, _data_url(source, where)
    if scheme == "file":
        try:
            return source, Path(unquote(urlsplit(source).path))
        except ValueError as error:
            raise MediaError(f"expected a file: URL: {error}", file=where) from None
    if scheme in ("http", "https", "ftp"):
        raise MediaError("addresses are not fetched; give a file or a data: URL", file=where)
    return source, Path(source)


def _data_url(source: str, where: str) -> bytes:
    head, comma, body = source.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaError("expected data:TYPE;base64,CONTENT", file=where)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"not valid base64: {error}", file=where) from None
