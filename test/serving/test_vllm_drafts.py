"""Our model as the target of vLLM's drafts on a CPU: the plain model's tokens, drafts accepted or not."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import pytest
import torch
from heads import write_following_head
from plain_tokens import expected
from scripted import write_random_checkpoint
from vllm_engine import OURS, WIDE, requests, serve

from kimi_k2.drafts.config import Form
from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format
from kimi_k2.tokenization.tokenizer import KimiTokenizer

needs.engine("vllm")

DRAFTS = 3
PROMPTS = int(os.environ.get("KIMI_K2_DRAWS", "8"))
WITHIN = 600 + 4 * PROMPTS  # seconds


def check(answer: dict[str, Any], log: str) -> None:
    """Our operations ran, with several new tokens of a request in a decode."""
    assert OURS in log
    calls = {name: sum(entries.values()) for name, entries in answer["calls"].items()}
    assert calls["mla_decode"] == calls["value_rows"] > 3 * answer["steps"] / 2
    assert calls["next_step"] == 0


def test_ngram(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Prompts that repeat themselves, some of them each other; they come in parts, and behind cached prefixes."""
    job = requests(seed=21, count=PROMPTS)
    for one in job:
        one["prompt"] = (one["prompt"][:20] * 4)[:60]
    job[-1]["prompt"] = job[0]["prompt"]
    drafts = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "block_size": 32, "enable_prefix_caching": True}
    options |= {"parts": True, "timeout": WITHIN}
    answer, log = serve(checkpoints["bf16"], "float32", job, tmp_path, speculative_config=drafts, **options)
    assert answer["tokens"] == expected(checkpoints["bf16"], "float32", job)
    check(answer, log)
    assert "decode steps are prepared by vLLM: drafts by ngram" in log
    assert answer["verified"] == answer["drafted"] == 0
    assert 0 < answer["accepted"] < answer["draft"]


def accepted(tokens: list[int], follows: list[int], needed: int) -> int:
    """Drafts that an answer of `needed` tokens takes, each of them what follows its newest token, `DRAFTS` times."""
    have, taken = 1, 0
    while have < needed:
        draft = follows[tokens[have - 1]]
        same = next((n for n in range(DRAFTS) if tokens[have + n] != draft), DRAFTS)
        have, taken = have + same + 1, taken + same
    return taken


@pytest.mark.parametrize(("form", "ahead"), [("llama", False), ("llama", True), ("mla", True)])
def test_eagle3(form: Form, ahead: bool, tmp_path: Path) -> None:
    """A head that knows what often follows a token: what the target's last layer makes tells it which.

    With a Llama head prompts come in parts; vLLM's MLA on a CPU takes them whole.
    """
    directory, head, job = tmp_path / "wide", tmp_path / "head", requests(seed=22, count=PROMPTS)
    config = with_format(tiny_config("kimi-k2-instruct", **WIDE), "bf16")
    write_synthetic_checkpoint(directory, config, seed=3)
    longer = [{**one, "new_tokens": one["new_tokens"] + DRAFTS} for one in job]
    wanted, target = expected(directory, "float32", longer), KimiK2ForCausalLM.from_pretrained(directory)
    follows = write_following_head(head, target, wanted, form, dtype=torch.float32)
    parts = form == "llama"
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "block_size": 64} if parts else {}
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}
    options |= {"parts": parts, "ahead": ahead, "timeout": WITHIN}
    answer, log = serve(directory, "float32", job, tmp_path, speculative_config=drafts, **options)
    check(answer, log)
    assert answer["verified"] == answer["drafted"] > answer["steps"] / 2  # the others have prompts
    assert answer["tokens"] == [tokens[: one["new_tokens"]] for one, tokens in zip(job, wanted, strict=True)]
    taken = sum(accepted(tokens, follows, one["new_tokens"]) for one, tokens in zip(job, wanted, strict=True))
    assert answer["accepted"] == taken > answer["draft"] / 20


@pytest.mark.parametrize("ahead", [False, True])
def test_structured_output(ahead: bool, tmp_path: Path) -> None:
    """Of every second request, with drafts that its grammar refuses: the tokens without drafts, all of them allowed.

    Requests are preempted meanwhile.
    """
    directory, head, job = tmp_path / "model", tmp_path / "head", requests(seed=23)
    write_random_checkpoint(directory)
    for one in job[::2]:
        one["sampling"] = {"structured_outputs": {"regex": "([a-z]{1,3} )*"}}
    options: dict[str, Any] = {"skip_tokenizer_init": False, "max_num_batched_tokens": 64, "block_size": 32}
    options["num_gpu_blocks_override"] = 14  # so few that some are taken back
    plain, _ = serve(directory, "float32", job, tmp_path, parts=True, **options)
    target = KimiK2ForCausalLM.from_pretrained(directory)
    write_following_head(head, target, plain["tokens"], dtype=torch.float32, head_dim=64)
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}
    answer, log = serve(
        directory, "float32", job, tmp_path, parts=True, ahead=ahead, speculative_config=drafts, **options
    )
    check(answer, log)
    assert answer["tokens"] == plain["tokens"]
    assert 0 < answer["accepted"] < answer["draft"]
    assert answer["verified"] > 0 < answer["preempted"]
    tokenizer = KimiTokenizer.from_pretrained(directory)
    for tokens in answer["tokens"][::2]:
        assert re.fullmatch("([a-z]{1,3} )*[a-z]{0,3}", tokenizer.decode(tokens))


def test_layers_that_the_target_lacks() -> None:
    from kimi_k2.serving.vllm.model import KimiK2ForVllm

    target: Any = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=3))
    KimiK2ForVllm.set_aux_hidden_state_layers(target, (3, 0, 3))
    assert target._seen == (0, 3)
    with pytest.raises(ConfigError, match=r"eagle_aux_hidden_state_layer_ids': \[4\], of a target with 3 layers"):
        KimiK2ForVllm.set_aux_hidden_state_layers(target, (1, 4))
