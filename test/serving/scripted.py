"""Checkpoints for servers: a tokenizer that Hugging Face's loaders read, and weights that write a given text."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import torch
from judge import slice_config
from safetensors.torch import load_file, save_file

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format
from kimi_k2.tokenization.special_tokens import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    IM_END,
    IM_MIDDLE,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
    special_tokens,
)
from kimi_k2.tokenization.tokenizer import PATTERN, KimiTokenizer

# What the scripted model writes after every prompt: no token twice, as each one is chosen by the one before.
SCRIPT = f"{THINK}Why{THINK_END}So{SECTION_BEGIN}{CALL_BEGIN}run:0{ARGUMENT_BEGIN}{{}}{CALL_END}{SECTION_END}{IM_END}"


def write_hf_tokenizer(directory: Path) -> None:
    """`tokenizer.json` of the checkpoint's tiktoken vocabulary, with transformers' converter."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tokenizer = KimiTokenizer.from_pretrained(directory)
    base = tokenizer.vocab_size - 256
    names = [name for name, _ in sorted(special_tokens(base).items(), key=lambda item: item[1])]
    made = TikTokenConverter(
        str(directory / "tiktoken.model"), pattern=PATTERN, extra_special_tokens=names, additional_special_tokens=names
    ).converted()
    template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="[BOS]", eos_token=IM_END, pad_token="[PAD]", chat_template=template,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.save_pretrained(directory)
    for text in ("Hello é 漢 123", SCRIPT):
        assert fast.encode(text) == tokenizer.encode(text, allow_special=True)


def write_random_checkpoint(directory: Path, model: str = "kimi-k2-thinking", **sizes: int) -> None:
    """Random weights, in BF16, with a tokenizer."""
    write_synthetic_checkpoint(directory, with_format(tiny_config(model, **sizes), "bf16"), seed=11)
    write_hf_tokenizer(directory)


def write_scripted_checkpoint(
    directory: Path, scripts: Mapping[str, tuple[str, ...]] | None = None, **sizes: int
) -> None:
    """K2-Thinking whose layers add nothing, and whose head names the token after the last one of a script.

    Args:
        directory: where it is written.
        scripts: what it writes, no token twice, and after which tokens, spelled out, that a prompt ends in.
        sizes: of the configuration.
    """
    tiny = tiny_config("kimi-k2-thinking", hidden_size=768, num_hidden_layers=2, **sizes)
    config = with_format(slice_config("kimi-k2-thinking") if torch.cuda.is_available() else tiny, "bf16")
    write_synthetic_checkpoint(directory, config, seed=1)
    write_hf_tokenizer(directory)
    tokenizer, follows = KimiTokenizer.from_pretrained(directory), dict[int, int]()
    for script, after in (scripts or {SCRIPT: (IM_MIDDLE,)}).items():
        written = tokenizer.encode(script, allow_special=True)
        starts = [tokenizer.encode(text, allow_special=True)[-1] for text in after]
        pairs = [*itertools.product(starts, written[:1]), *itertools.pairwise(written)]
        assert len({before for before, _ in pairs} - follows.keys()) == len(pairs), "a token occurs twice"
        follows |= dict(pairs)
    head = torch.zeros(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
    for before, following in follows.items():
        head[following, before] = 1.0
    for file in directory.glob("*.safetensors"):
        weights = load_file(file)
        for name, tensor in weights.items():
            if name == "lm_head.weight":
                weights[name] = head
            elif name == "model.embed_tokens.weight":
                weights[name] = torch.eye(*tensor.shape, dtype=tensor.dtype)
            elif name == "model.norm.weight":
                weights[name] = torch.ones_like(tensor)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                weights[name] = torch.zeros_like(tensor)
        save_file(weights, file, metadata={"format": "pt"})
