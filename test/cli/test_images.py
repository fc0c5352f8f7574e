"""`generate --image --video`, conversations that name images, and `chat`'s /image and /video."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import kimi
from pictures import drawn, write_video
from PIL import Image
from plain_tokens import answers

from kimi_k2.api import KimiK2


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("media")
    Image.fromarray(drawn(60, 90, 1)).save(root / "a.png")
    write_video(root / "b.mp4", np.stack([drawn(28, 56, seed) for seed in range(9)]), 3)
    return {"image": str(root / "a.png"), "video": str(root / "b.mp4")}


def expected(directory: Path, content: Any) -> str:
    model = KimiK2.from_pretrained(directory)
    params = replace(model.params, max_new_tokens=8)
    [tokens] = answers(model, [model.prompt([{"role": "user", "content": content}])], params)
    return model.tokenizer.decode([token for token in tokens if token not in params.eos_token_ids])


def test_generate(k25_int4: Path, media: dict[str, str], tmp_path: Path) -> None:
    content = [{"image": media["image"]}, {"video": media["video"]}, {"type": "text", "text": "What?"}]
    wanted = expected(k25_int4, content)
    conversation = tmp_path / "c.json"
    conversation.write_text(json.dumps([{"role": "user", "content": content}]))
    for given in (
        ["--image", media["image"], "--video", media["video"], "-p", "What?"],
        ["--messages", str(conversation)],
        ["--messages", str(conversation), "--draft", "ngram"],
    ):
        done = kimi("generate", k25_int4, *given, "--max-new-tokens", "8")
        assert wanted.strip() in done.stdout
    assert wanted != expected(k25_int4, "What?")


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("thinking", ["--image", "{image}", "-p", "x"], "no vision tower"),
        ("k2.5", ["--image", "/nowhere.png", "-p", "x"], "/nowhere.png: no such file"),
        ("k2.5", ["--image", "{video}", "-p", "x"], "no image of a kind that is read"),
        ("k2.5", ["--image", "{image}", "--raw", "-p", "x"], "go with"),
    ],
)
def test_errors(
    checkpoints: dict[str, Path], media: dict[str, str], name: str, arguments: list[str], says: str
) -> None:
    words = [word.format(**media) for word in arguments]
    done = kimi("generate", checkpoints[name], *words, status=None)
    assert done.exit_code != 0
    assert says in done.output + str(done.exception)


def test_chat(k25_int4: Path, media: dict[str, str]) -> None:
    typed = "/image nowhere.png\n/image {image}\n/video {video}\nWhat?\n/quit\n".format(**media)
    done = kimi("chat", k25_int4, "--max-new-tokens", "4", "--temperature", "0", input=typed)
    assert "no such file: nowhere.png" in done.output
    assert "with the next message: a.png, b.mp4" in done.output
