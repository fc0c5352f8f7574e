"""SGLang on a CPU with our model in it: the plain model's tokens, whenever requests come, whatever is cached."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from judge import Judge
from plain_tokens import expected
from sglang_stand_ins import CALLED, environment_with_stand_ins

engines.need("sglang")

LAYERS, MOE_LAYERS = 3, 2
OURS = "operations are ours, plain ones, since this is a CPU"
NEW_TOKENS = 64
# Of a logit below float32's best, the mean of a round: 0.002 to 0.015; with one token of the prompt changed 0.06.
BEST = 0.03


# The first steps of a process are slow, so that all of a round would come during them.
WARM = engines.requests(0, count=1)


def behind(first: list[dict[str, Any]], tokens: list[list[int]], draw: random.Random) -> list[dict[str, Any]]:
    """Requests that begin with earlier ones and parts of their answers."""
    following = engines.requests(draw.random())
    for request, before, answered in zip(following, first, tokens, strict=True):
        request["prompt"] = [*before["prompt"], *answered[: draw.randrange(NEW_TOKENS)], *request["prompt"]]
    return following


def check_answers(
    directory: Path, dtype: str, job: list[dict[str, Any]], tokens: list[list[int]], plain: list[list[int]], whole: bool
) -> None:
    """A round's tokens are the plain model's; in 16 bits near float32's best, of whole prompts as near as its."""
    if dtype == "float32":
        assert tokens == plain
        return
    judge = Judge(directory)
    ours, theirs = (
        torch.stack([judge.gaps(request["prompt"], row).mean() for request, row in zip(job, rows, strict=True)]).mean()
        for rows in (tokens, plain)
    )
    print(f"\n{directory.name}: a logit below float32's best, mean: ours {float(ours):.4f}, plain {float(theirs):.4f}")
    assert float(ours) < (min(BEST, 1.5 * float(theirs)) if whole else BEST)


def check_ours(calls: dict[str, dict[str, int]], steps: list[list[int]]) -> None:
    """Our operations ran: each layer's as often as there were steps, all plain."""
    sums = {name: sum(entries.values()) for name, entries in calls.items()}
    assert sums["add_project"] == LAYERS * len(steps)
    assert sums["add_norm_route"] == sums["routed_experts_with_shared"] == MOE_LAYERS * len(steps)
    decodes = sum(1 for sequences, _ in steps if sequences)
    assert sums["mla_decode"] == sums["value_rows"] == LAYERS * decodes
    assert decodes >= NEW_TOKENS
    assert all(entry == "plain" for entries in calls.values() for entry, count in entries.items() if count)


PARTS = {"chunked_prefill_size": 32, "enable_mixed_chunk": True}
# SGLang takes FP8 and INT4 with 16-bit activations alone.
ROWS: list[Any] = [
    ("fp8", {}), ("thinking", {}), ("bf16", {}), ("thinking", PARTS), ("bf16", PARTS),
    ("bf16", {**PARTS, "page_size": 16}),  # as on a GPU
    ("k2.5", {"enable_multimodal": False}),
    *(
        pytest.param(name, {"tp_size": 2, "ep_size": groups}, marks=engines.SLOW)
        for name in ("wide", "thinking", "bf16")
        for groups in (1, 2)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), ROWS)
def test_same_tokens_as_the_plain_model(
    name: str,
    options: dict[str, Any],
    checkpoints: dict[str, Path],
    wide: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And once more behind what the first requests have left in the radix cache; others' decodes beside parts."""
    draw, dtype = random.Random(name), "float32" if name == "bf16" else "bfloat16"
    directory, ranks, page = {**checkpoints, "wide": wide}[name], options.get("tp_size", 1), options.get("page_size", 1)
    if ranks > 1:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    if name == "k2.5":  # in SGLang's class for it, whose vision tower has its sizes by SGLang's own names
        directory = tmp_path / "k2.5"
        shutil.copytree(checkpoints["k2.5"], directory)
        config = json.loads((directory / "config.json").read_text())
        config["vision_config"] |= {key.removeprefix("vt_"): size for key, size in config["vision_config"].items()}
        (directory / "config.json").write_text(json.dumps(config))
    first = engines.requests(name, longest=200 if options == PARTS else 90)
    wanted = expected(directory, dtype, first)
    second = behind(first, wanted, draw)
    answer, log = engines.serve(
        directory, dtype, [WARM, first, second], tmp_path, worker=Path(__file__).with_name("sglang_requests.py"),
        environment=environment_with_stand_ins(tmp_path / "stand_ins"), **options,
    )  # fmt: skip
    assert log.count(OURS) == 1 and CALLED not in log
    assert len(answer["ranks"]) == ranks
    whole = "chunked_prefill_size" not in options and ranks == 1 and name != "k2.5"
    for at, job, plain in ((1, first, wanted), (2, second, expected(directory, dtype, second))):
        check_answers(directory, dtype, job, answer["tokens"][at], plain, whole)
    for request, cached in zip(first, answer["cached"][2], strict=True):
        assert cached % page == 0 and cached > len(request["prompt"]) - page
    for rank in answer["ranks"]:
        if whole:
            check_ours(rank["calls"], rank["steps"])
        elif "chunked_prefill_size" in options:
            assert sum(prompts > 1 for _, prompts in rank["steps"]) > 3  # others' decodes beside a part
