"""SGLang on a CPU with our model in it: the plain model's tokens, whenever requests come, whatever is cached."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from judge import Judge
from plain_tokens import expected
from sglang_stand_ins import CALLED, environment_with_stand_ins

needs.engine("sglang")

WORKER = Path(__file__).with_name("sglang_requests.py")
LAYERS, MOE_LAYERS = 3, 2
OURS = "operations are ours, plain ones, since this is a CPU"
NEW_TOKENS = 64
# Of a logit below float32's best, the mean of a round: 0.002 to 0.015; with one token of the prompt changed 0.06.
BEST = 0.03


def requests(draw: random.Random, count: int = 8, most: int = 90) -> list[dict[str, Any]]:
    """Prompts of 3 tokens and more, arriving within a second; four at most run at once."""
    return [
        {
            "prompt": [draw.randrange(512) for _ in range(draw.randint(3, most))],
            "new_tokens": NEW_TOKENS,
            "arrival": draw.random(),
        }
        for _ in range(count)
    ]


# The first steps of a process are slow, so that all of a round would come during them.
WARM = requests(random.Random(0), count=1)


def behind(first: list[dict[str, Any]], tokens: list[list[int]], draw: random.Random) -> list[dict[str, Any]]:
    """Requests that begin with earlier ones and parts of their answers."""
    made = requests(draw, len(first))
    for one, before, answered in zip(made, first, tokens, strict=True):
        one["prompt"] = [*before["prompt"], *answered[: draw.randrange(NEW_TOKENS)], *one["prompt"]]
    return made


def serve(
    directory: Path, dtype: str, rounds: list[list[dict[str, Any]]], tmp_path: Path, **options: Any
) -> tuple[dict[str, Any], str]:
    """What sglang_requests.py answers, and its log."""
    asked, result, log = tmp_path / "asked.json", tmp_path / "result.json", tmp_path / "log"
    asked.write_text(json.dumps({"dtype": dtype, "rounds": rounds, "options": options}))
    environment = environment_with_stand_ins(tmp_path / "stand_ins")
    command = [sys.executable, str(WORKER), str(directory), str(asked), str(result)]
    with log.open("w") as written:
        done = subprocess.run(command, stdout=written, stderr=written, env=environment, timeout=600)
    text = log.read_text()
    assert result.exists(), (done.returncode, text[-4000:])
    assert CALLED not in text
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer, text


def check_answers(directory: Path, dtype: str, job: list[dict[str, Any]], answer: dict[str, Any], at: int) -> None:
    """A round's tokens are the plain model's; in 16 bits, where parts round otherwise, near float32's best."""
    if dtype == "float32":
        assert answer["tokens"][at] == expected(directory, dtype, job)
        return
    judge = Judge(directory)
    gaps = [judge.gaps(one["prompt"], tokens).mean() for one, tokens in zip(job, answer["tokens"][at], strict=True)]
    assert torch.stack(gaps).mean() < BEST


def check_ours(calls: dict[str, dict[str, int]], steps: list[list[int]]) -> None:
    """Our operations ran: each layer's as often as there were steps, all plain."""
    sums = {name: sum(entries.values()) for name, entries in calls.items()}
    assert sums["add_project"] == LAYERS * len(steps)
    assert sums["add_norm_route"] == sums["routed_experts_with_shared"] == MOE_LAYERS * len(steps)
    decodes = sum(1 for sequences, _ in steps if sequences)
    assert sums["mla_decode"] == sums["value_rows"] == LAYERS * decodes
    assert decodes >= NEW_TOKENS
    assert all(entry == "plain" for entries in calls.values() for entry, count in entries.items() if count)


# SGLang takes FP8 and INT4 with 16-bit activations alone: whole prompts then give the plain model's tokens.
@pytest.mark.parametrize(("name", "dtype"), [("fp8", "bfloat16"), ("thinking", "bfloat16"), ("bf16", "float32")])
def test_same_tokens_as_the_plain_model(name: str, dtype: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """And once more behind what the first requests have left in the radix cache."""
    draw = random.Random(name)
    first = requests(draw)
    wanted = expected(checkpoints[name], dtype, first)
    second = behind(first, wanted, draw)
    answer, log = serve(checkpoints[name], dtype, [WARM, first, second], tmp_path)
    assert OURS in log
    assert answer["tokens"][1] == wanted
    check_answers(checkpoints[name], dtype, second, answer, 2)
    for one, cached in zip(first, answer["cached"][2], strict=True):
        assert cached >= len(one["prompt"])
    [rank] = answer["ranks"]
    check_ours(rank["calls"], rank["steps"])


@pytest.mark.parametrize(("name", "dtype"), [("thinking", "bfloat16"), ("bf16", "float32")])
def test_prompts_in_parts_among_decodes(name: str, dtype: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Steps of 32 new tokens at most, those of decodes among them."""
    job = requests(random.Random(name), most=200)
    parts = {"chunked_prefill_size": 32, "enable_mixed_chunk": True}
    answer, log = serve(checkpoints[name], dtype, [WARM, job], tmp_path, **parts)
    assert OURS in log
    check_answers(checkpoints[name], dtype, job, answer, 1)
    [rank] = answer["ranks"]
    assert sum(prompts > 1 for _, prompts in rank["steps"]) > 3  # others' decodes beside a part


def test_text_of_k25(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """In SGLang's class for K2.5, whose vision tower has its sizes by SGLang's own names."""
    directory = tmp_path / "k2.5"
    shutil.copytree(checkpoints["k2.5"], directory)
    config = json.loads((directory / "config.json").read_text())
    vision = config["vision_config"]
    vision |= {name.removeprefix("vt_"): size for name, size in vision.items()}
    (directory / "config.json").write_text(json.dumps(config))
    job = requests(random.Random(25))
    answer, log = serve(directory, "bfloat16", [WARM, job], tmp_path, enable_multimodal=False)
    assert OURS in log
    check_answers(directory, "bfloat16", job, answer, 1)


def test_pages_of_several_tokens(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As on a GPU: prompts in parts over pages of 16, then others behind them from whole pages of the radix cache."""
    draw = random.Random(16)
    first = requests(draw)
    wanted = expected(checkpoints["bf16"], "float32", first)
    second = behind(first, wanted, draw)
    parts = {"chunked_prefill_size": 32, "enable_mixed_chunk": True, "page_size": 16}
    answer, log = serve(checkpoints["bf16"], "float32", [WARM, first, second], tmp_path, **parts)
    assert OURS in log
    assert answer["tokens"][1:] == [wanted, expected(checkpoints["bf16"], "float32", second)]
    assert all(cached % 16 == 0 for cached in answer["cached"][2])
    assert any(answer["cached"][2])


@pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="KIMI_K2_SLOW=1 starts two ranks for each")
@pytest.mark.parametrize("groups", [1, 2], ids=["cut", "shared out"])
@pytest.mark.parametrize(("name", "dtype"), [("wide", "bfloat16"), ("thinking", "bfloat16"), ("bf16", "float32")])
def test_two_ranks(
    name: str,
    dtype: str,
    groups: int,
    checkpoints: dict[str, Path],
    wide: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensor parallelism, with routed experts cut or shared out."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    job, directory = requests(random.Random(name)), {**checkpoints, "wide": wide}[name]
    answer, log = serve(directory, dtype, [WARM, job], tmp_path, tp_size=2, ep_size=groups)
    assert log.count(OURS) == 1
    assert len(answer["ranks"]) == 2
    check_answers(directory, dtype, job, answer, 1)
