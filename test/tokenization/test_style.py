"""The chat style of a checkpoint: from its template or its name, never from its quantization; and the override."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import TokenizerError
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint, write_synthetic_vocabulary
from kimi_k2.synthetic.config import tiny_config, with_format
from kimi_k2.tokenization.chat import built_in_template
from kimi_k2.tokenization.special_tokens import special_tokens
from kimi_k2.tokenization.style import ChatStyle, choose_style
from kimi_k2.tokenization.template import ChatTemplate
from kimi_k2.tokenization.tokenizer import KimiTokenizer

USER: list[dict[str, Any]] = [{"role": "user", "content": "U"}]
# The shape of the published K2-Thinking template: loop controls, slices, <think> in assistant turns only.
THINKING_SOURCE = """
{%- set ns = namespace(last=-1) -%}
{%- for idx in range(messages|length-1, -1, -1) -%}
  {%- if messages[idx]['role'] == 'assistant' and not messages[idx].get('tool_calls') -%}
    {%- set ns.last = idx -%}{%- break -%}
  {%- endif -%}
{%- endfor -%}
{%- for m in messages[:ns.last+1] + messages[ns.last+1:] -%}
  <|im_{{ m.role }}|>{{ m.role }}<|im_middle|>
  {%- if m.role == 'assistant' -%}<think>{{ m.get('reasoning_content', '') }}</think>{%- endif -%}
  {{ m.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


@pytest.mark.parametrize(("preset", "fmt", "style"), [
    ("kimi-k2-thinking", "bf16", "thinking"), ("kimi-k2-thinking", "int4", "thinking"),
    ("kimi-k2-instruct-0905", "int4", "instruct"), ("kimi-k2-instruct", "bf16", "instruct"),
    ("kimi-k2.5", "bf16", "k2.5"), ("kimi-k2.6", "fp8", "k2.5"), ("kimi-k2.7-code", "bf16", "k2.7"),
])  # fmt: skip
def test_synthetic_checkpoints_keep_their_style_in_any_format(
    tmp_path: Path, preset: str, fmt: Any, style: str
) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 512}
    config = with_format(tiny_config(preset, **sizes), fmt)
    write_synthetic_checkpoint(tmp_path, config)
    tokenizer = KimiTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.chat_style, tokenizer.style_reason) == (style, "the checkpoint's chat template")
    assert tokenizer.render_segments(USER) == built_in_template(ChatStyle(style)).render_segments(USER, style=style)
    assert KimiK2Config.from_pretrained(tmp_path).chat_style == style
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = KimiTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.chat_style, tokenizer.style_reason) == (style, "chat_style in config.json")


def test_other_templates() -> None:
    names = special_tokens(1792)
    assert ChatTemplate(THINKING_SOURCE, names).style() is ChatStyle.THINKING
    assert ChatTemplate(THINKING_SOURCE.replace("think>", "t>"), names).style() is ChatStyle.INSTRUCT
    assert ChatTemplate("{{ raise_exception('no') }}", names).style() is None


@pytest.mark.parametrize(("name", "style"), [
    ("moonshotai/Kimi-K2-Instruct", "instruct"), ("Kimi-K2-Instruct-0905", "instruct"), ("kimi_k2", "instruct"),
    ("moonshotai/Kimi-K2-Thinking", "thinking"), ("kimi-k2-thinking-bf16", "thinking"), ("Kimi-K2-Base", "instruct"),
    ("Kimi-K2.5", "k2.5"), ("kimi-k2.6-NVFP4", "k2.5"), ("Kimi-K2.7-Code", "k2.7"), ("kimi_k25", "k2.5"),
    ("AQ-MedAI/Kimi-K25-eagle3", "k2.5"), ("lightseekorg/kimi-k2.6-eagle3-mla", "k2.5"),
    ("models--moonshotai--Kimi-K2-Thinking", "thinking"), ("deepseek_v3", None), ("checkpoint-500", None), ("", None),
])  # fmt: skip
def test_names(name: str, style: str | None) -> None:
    assert ChatStyle.for_name(name) == style


@pytest.mark.parametrize(("directory", "config", "style"), [
    ("out", {"_name_or_path": "/models/Kimi-K2-Thinking/", "model_type": "kimi_k2"}, "thinking"),
    ("out", {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}}, "k2.5"),
    ("out", {"text_config": {"chat_style": "thinking"}}, "thinking"),
    ("out", {"chat_style": 3}, "instruct"),
    ("Kimi-K2.7-Code", {"model_type": "kimi_k25"}, "k2.7"),
    ("Kimi-K2-Instruct", {"model_type": "kimi_k25"}, "k2.5"),
    ("out", [1], "instruct"),
    ("Kimi-K2-Thinking-BF16", {"model_type": "kimi_k2", "quantization_config": None}, "thinking"),
    ("Kimi-K2-Instruct-INT4", {"quantization_config": {"quant_method": "compressed-tensors"}}, "instruct"),
    ("models--moonshotai--Kimi-K2.6/snapshots/0123abc", {}, "k2.5"),
])  # fmt: skip
def test_checkpoints_without_a_template(tmp_path: Path, directory: str, config: Any, style: str) -> None:
    (tmp_path / directory).mkdir(parents=True)
    (tmp_path / directory / "config.json").write_text(json.dumps(config))
    assert choose_style(tmp_path / directory).style == style


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "\ud800"])
def test_an_unreadable_config_is_another_readers_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    assert choose_style(tmp_path).style is ChatStyle.INSTRUCT


def test_the_override_wins(tmp_path: Path) -> None:
    write_synthetic_vocabulary(tmp_path, 512)
    (tmp_path / "chat_template.jinja").write_text(THINKING_SOURCE)
    assert KimiTokenizer.from_pretrained(tmp_path).chat_style is ChatStyle.THINKING
    same = KimiTokenizer.from_pretrained(tmp_path, style="thinking")
    assert same.chat_template is not None
    other = KimiTokenizer.from_pretrained(tmp_path, style="k2.5")
    assert (other.chat_style, other.style_reason) == ("k2.5", "given by the caller")
    assert other.render_segments(USER)[-1].text == "<think>"
    with pytest.raises(TokenizerError, match=r"expected one of instruct, thinking, k2\.5, k2\.7, got 'gpt'"):
        KimiTokenizer.from_pretrained(tmp_path, style="gpt")
