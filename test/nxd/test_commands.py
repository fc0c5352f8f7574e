"""`generate` and `chat` with the neuron backend in CPU mode print what they print with the plain model."""

from __future__ import annotations

from pathlib import Path

from harness import command

from kimi_k2.config import KimiK2Config
from kimi_k2.synthetic.draft import write_synthetic_head

ON_CPU = ("--backend", "neuron", "--on-cpu", "--preset", "trn2-tp32-ep2")


def test_generate_prints_the_plain_models_text(fp8: Path) -> None:
    """Two ranks are the preset's expert parallelism; one of them prints, and only the text."""
    asked = ("generate", fp8, "--prompt", "Hello", "--max-new-tokens", "12")
    plain = command(*asked)
    assert plain.strip()
    assert command(*asked, *ON_CPU, "--max-model-len", "128") == plain
    assert command(*asked, *ON_CPU, "--max-model-len", "128", ranks=2) == plain


def test_generate_with_a_draft_in_the_graph(fp8: Path, tmp_path: Path) -> None:
    """The preset's FP8 blocks beside a head in BF16."""
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    write_synthetic_head(tmp_path, KimiK2Config.from_pretrained(fp8), "mla", eagle_config=layers)
    asked = ("generate", fp8, "--prompt", "Hello", "--max-new-tokens", "12")
    drafts = ("--draft", tmp_path, "--draft-tokens", "2", "--max-model-len", "128")
    assert command(*asked, *ON_CPU, *drafts, ranks=2) == command(*asked)


def test_chat_answers_turn_by_turn(fp8: Path) -> None:
    asked = ("chat", fp8, "--max-new-tokens", "6", "--temperature", "0")
    spoken = "Hello\nAnd now?\n/quit\n"
    plain, neuron = (
        [
            line
            for line in command(*asked, *more, stdin=spoken).splitlines()
            if "TTFT" not in line and "style" not in line
        ]
        for more in ((), (*ON_CPU, "--max-model-len", "256"))
    )
    assert neuron == plain
    assert any(plain)
