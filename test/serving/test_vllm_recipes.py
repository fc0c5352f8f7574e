"""Flags of published recipes together, named and drawn: the tokens of the plain model, which are those of vLLM's own.

`KIMI_K2_DRAWS=40 KIMI_K2_SLOW=1` adds forty drawn combinations, and those of up to four ranks: hours on two cores.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from adapters import merge, write_adapter
from heads import write_following_head
from plain_tokens import expected
from vllm_engine import OURS, WIDE, requests, serve

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

needs.engine("vllm")

SEED = 50
DRAWS = int(os.environ.get("KIMI_K2_DRAWS", "2"))
LEFT_TO_STOCK = "all operations are vLLM's: "


@dataclass
class Deployment:
    """What a combination of flags is served with.

    Attributes:
        model: its directory.
        job: requests.
        out: for what flags write.
        draw: values of flags.
        options: of the engine, and of `serve`.
        wanted: tokens of each request, of a model; None for the plain model's.
        other: a model whose weights come later.
        proofs: what shows that a flag was obeyed, of the answer and the log.
    """

    model: Path
    job: list[dict[str, Any]]
    out: Path
    draw: random.Random
    options: dict[str, Any] = field(default_factory=dict)
    wanted: Callable[[Path], list[list[int]]] | None = None
    other: Path | None = None
    proofs: list[Callable[[dict[str, Any], str], bool]] = field(default_factory=list)

    def tokens(self, model: Path) -> list[list[int]]:
        return self.wanted(model) if self.wanted else expected(model, "float32", self.job)


def plain(directory: Path) -> KimiK2ForCausalLM:
    return KimiK2ForCausalLM.from_pretrained(directory, dtype=torch.float32)


def expected_of_adapters(directory: Path, job: list[dict[str, Any]]) -> list[list[int]]:
    """Greedy tokens of the plain model with a request's adapter merged, each request alone."""
    wanted: dict[int, list[int]] = {}
    for adapter in {tuple(one.get("adapter") or ()) for one in job}:
        model = plain(directory)
        if adapter:
            merge(model, Path(adapter[1]))
        for number, one in enumerate(job):
            if tuple(one.get("adapter") or ()) == adapter:
                params = SamplingParams(one["new_tokens"], ignore_eos=True)
                wanted[number] = generate(model, [one["prompt"]], params).token_ids[0]
    return [wanted[number] for number in range(len(job))]


def tensor(it: Deployment) -> None:
    it.options["tensor_parallel_size"] = 2


def pipeline(it: Deployment) -> None:
    """Without eager execution, as vLLM's worker on a CPU makes what stages hand on when it warms a model up."""
    it.options |= {"pipeline_parallel_size": 2, "enforce_eager": False}


def context(it: Deployment) -> None:
    tensor(it)
    it.options |= {"decode_context_parallel_size": 2, "worker_extension_cls": "spread_slots.SpreadSlots"}
    it.options["dcp_kv_cache_interleave_size"] = it.draw.choice([1, 4])
    it.options.setdefault("block_size", 16)
    it.options["parts"] = True
    it.proofs.append(lambda _, log: "prepared by vLLM: decode context parallelism" in log)


def experts(it: Deployment) -> None:
    tensor(it)
    it.options |= {"enable_expert_parallel": True, "enable_ep_weight_filter": it.draw.random() < 0.5}


def parts(it: Deployment) -> None:
    it.options |= {"parts": True, "max_num_batched_tokens": it.draw.choice([16, 32, 48])}
    it.options.setdefault("block_size", 32)


def prefixes(it: Deployment) -> None:
    parts(it)
    it.options["enable_prefix_caching"] = True
    it.job[-1]["prompt"] = it.job[0]["prompt"][:50] + it.job[-1]["prompt"][:20]


def pages(it: Deployment) -> None:
    it.options |= {"parts": True, "block_size": it.draw.choice([16, 32, 64, 128])}


def few_pages(it: Deployment) -> None:
    it.options |= {"parts": True, "block_size": 16, "num_gpu_blocks_override": 26, "enable_prefix_caching": False}


def adapters(it: Deployment) -> None:
    """Every third request has none; the others' touch all that may be, or attention and shared experts alone."""
    it.options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    model = plain(it.model)
    both = [write_adapter(model, it.out / "all", 8, 1), write_adapter(model, it.out / "some", 4, 2, experts=False)]
    for number, one in enumerate(it.job):
        if number % 3:
            one["adapter"] = [number % 3, str(both[number % 3 - 1])]
    it.job[-1]["arrival"] += 200  # the last, which has none, by itself
    it.wanted = lambda model: expected_of_adapters(model, it.job)

    def calls(answer: dict[str, Any], _: str) -> bool:
        made = {name: sum(entries.values()) for name, entries in answer["calls"].items()}
        # The fused one where no token has an adapter; ranks count for themselves.
        return made["absorb_and_store"] > made["query_and_entry"] > 0 or not any(made.values())

    def differ(answer: dict[str, Any], _: str) -> bool:
        base = expected(it.model, "float32", it.job)
        same = [one == other for one, other in zip(answer["tokens"], base, strict=True)]
        return same == [not number % 3 for number in range(len(same))]

    it.proofs += [calls, differ]


def ngram(it: Deployment) -> None:
    for one in it.job:
        one["prompt"] = (one["prompt"][:20] * 4)[:60]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    it.options["speculative_config"] = drafts
    it.proofs.append(lambda answer, _: 0 < answer["accepted"] < answer["draft"])


def eagle3(it: Deployment) -> None:
    target = plain(it.model)
    write_following_head(
        it.out / "head", target, expected(it.model, "float32", it.job), dtype=target.lm_head.weight.dtype
    )
    it.options["speculative_config"] = {
        "method": "eagle3", "model": str(it.out / "head"), "num_speculative_tokens": 3,
    }  # fmt: skip
    parts(it)
    it.options["block_size"] = 64
    it.proofs.append(lambda answer, _: answer["accepted"] > 0)


def fp8_cache(it: Deployment) -> None:
    it.options["kv_cache_dtype"] = "fp8"
    it.wanted = lambda model: expected(model, "float32", it.job, torch.float8_e4m3fn)


def invariant(it: Deployment) -> None:
    it.options["environment"] = {"VLLM_BATCH_INVARIANT": "1"}


def ahead(it: Deployment) -> None:
    it.options["ahead"] = True


def reload_weights(it: Deployment) -> None:
    it.other = it.out / "other"
    write_synthetic_checkpoint(it.other, KimiK2Config.from_pretrained(it.model), seed=77)
    it.options["swaps"] = [(it.draw.choice(["reload", "parts"]), str(it.other))]


def connector(it: Deployment) -> None:
    extra = {"shared_storage_path": str(it.out / "stored")}
    it.options["kv_transfer_config"] = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
    }  # fmt: skip


Flags = tuple[Callable[[Deployment], None], ...]
FLAGS = [
    tensor, pipeline, context, experts, parts, prefixes, pages, few_pages, adapters, ngram, eagle3, fp8_cache,
    invariant, ahead, reload_weights, connector,
]  # fmt: skip
SEVERAL = (tensor, pipeline, context, experts)
# Of vLLM's own: either says the same of an argument, or of the tokens that answers have.
CLASH = [
    {context, few_pages}, {ngram, eagle3}, {adapters, fp8_cache}, {ngram, prefixes}, {eagle3, pages},
    {eagle3, few_pages}, {few_pages, pages}, {prefixes, few_pages}, {parts, prefixes},
]  # fmt: skip
# Of published recipes; then single ones in INT4, which vLLM's own model does not serve on a CPU.
NAMED: list[tuple[str, Flags]] = [
    ("bf16", (pipeline, context)), ("bf16", (experts, fp8_cache, eagle3)), ("bf16", (adapters, eagle3)),
    ("bf16", (experts, adapters, reload_weights)), ("bf16", (adapters,)), ("thinking", (adapters,)),
    ("thinking", (adapters, reload_weights)), ("thinking", (prefixes, context)),
]  # fmt: skip


def combinations(count: int) -> list[tuple[str, Flags]]:
    """Those named and so many drawn; two thirds of those of several ranks are left out, as each takes minutes."""
    draw, found = random.Random(SEED), list[Flags]()
    while len(found) < count:
        drawn = tuple(sorted(draw.sample(FLAGS, draw.choice([2, 2, 3])), key=FLAGS.index))
        left_out = any(flag in SEVERAL for flag in drawn) and draw.random() < 0.66
        if drawn not in found and not left_out and not any(pair <= set(drawn) for pair in CLASH):
            found.append(drawn)
    return NAMED + [("bf16", flags) for flags in found]


def name_of(row: tuple[str, Flags]) -> str:
    return "+".join([row[0], *(flag.__name__ for flag in row[1])])


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """BF16 weights of sizes that vLLM's own model serves on a CPU, and INT4."""
    directory = tmp_path_factory.mktemp("recipes") / "model"
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2-instruct", **WIDE), "bf16"), seed=3)
    return {"bf16": directory, "thinking": checkpoints["thinking"]}


@pytest.mark.parametrize("row", combinations(DRAWS), ids=name_of)
def test_together(row: tuple[str, Flags], models: dict[str, Path], tmp_path: Path) -> None:
    """The tokens, where ours serves and where it leaves the deployment to vLLM's model by a reason in the log.

    An engine that does not start has to be one that does not start without our model either.
    """
    name, flags = row
    if any(flag in SEVERAL for flag in flags) and not os.environ.get("KIMI_K2_SLOW"):
        pytest.skip("KIMI_K2_SLOW=1 starts up to four ranks for each")
    it = Deployment(models[name], requests(seed=SEED, count=4), tmp_path, random.Random(name_of(row)))
    for one in it.job:
        one["new_tokens"] = 16
    for flag in flags:
        flag(it)
    try:
        answer, log = serve(it.model, "float32", it.job, tmp_path, **it.options)
    except AssertionError as error:
        with pytest.raises(AssertionError) as stock:
            serve(it.model, "float32", it.job, tmp_path, plugins="kimi_k2_parsers", **it.options)
        last = [str(one).strip().splitlines()[-1] for one in (error, stock.value)]
        pytest.skip(f"vLLM does not start: {last}")
    reasons = set(re.findall(f"{LEFT_TO_STOCK}(.*)", log))
    print(f"\n{name_of(row)}: {reasons or 'ours'}", flush=True)
    assert answer["tokens"] == it.tokens(it.model)
    assert reasons or (OURS in log and all(proof(answer, log) for proof in it.proofs))
    if it.other is not None and not reasons:
        assert answer["again"] == [it.tokens(it.other)]
