"""Kimi-K2 on the torch-native line's contract: served tokens and logits beside the plain model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import line
import pytest
import torch
from line import SLOW, alone, hf_config, prompts, served
from lowering import Lowering
from transformers import DynamicCache

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KimiK2Error
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder

FILES = Layout(1, 2, experts="bf16", dtype=torch.float32)
FULL = {"buckets": line.ALL_BUCKETS}


@pytest.mark.usefixtures("_short_blocks")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp8", {"padding": -1, "held": "blockwise"}),
        ("thinking", {"segment": 16, "tp": 2, "ep": 2, "sample": True, "converted": FILES}),
        pytest.param("fp8", {"segment": 8, **FULL}, marks=SLOW),
        pytest.param("k2.5", {"tp": 2, **FULL}, marks=SLOW),
        pytest.param("fp8", {"tp": 4, "ep": 2, "held": "blockwise"}, marks=SLOW),
        pytest.param("fp8", {"tp": 4, "ep": 4, "held": "blockwise", "segment": 8}, marks=SLOW),
        pytest.param("thinking", {"tp": 2, "dp": 2, "ep": 4, "segment": 8}, marks=SLOW),
    ],
    ids=str,
)
def test_every_route_gives_the_plain_models_tokens(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """Ragged requests at different times, a preemption, prefix hits, padding in both spellings, ranks, their files.

    Each step is run as AOTAutograd and as the FX passes make it, which must agree.
    """
    lowering, weights, given = Lowering(), checkpoints[name], dict(options)
    if (layout := given.pop("converted", None)) is not None:
        Presharder(weights, tmp_path / "ranks", layout).run()
        shutil.copy(weights / "config.json", tmp_path / "ranks")
        weights = tmp_path / "ranks"
    for seed in range(5, 5 + int(os.environ.get("KIMI_K2_DRAWS", "8")) // 8):
        for rank in served(weights, seed=seed, compile_with=lowering, **given):
            wrong, off = line.differences(checkpoints[name], rank, seed)
            assert wrong == 0
            assert off < 2e-5


def test_the_device_draws_what_the_mask_and_the_request_allow(bf16: Path) -> None:
    """TP2, two lines of a step with requests of their own: one with masks and a temperature, and one that is greedy."""
    directory, lowering = bf16, Lowering()
    vocabulary = KimiK2Config.from_pretrained(directory).vocab_size
    allowed = torch.rand(6, vocabulary, generator=torch.Generator().manual_seed(3)) < 0.02

    def run(rank: int) -> list[line.Request]:
        config = line.NeuronConfig(quantization="bf16", **line.SAMPLED)
        runner = line.Runner(directory, hf_config(directory), config, rank=rank, compile_with=lowering, structured=True)
        masked, greedy = (line.Request(prompt) for prompt in prompts(directory)[:2])
        masked.params, masked.allowed = (-1.0, 0.95, 1.5), lambda: allowed[len(masked.output)]
        for request in (masked, greedy):
            runner.prefill(request)
        for _ in range(5):
            runner.decode([masked, greedy])
        return [masked, greedy]

    (masked, greedy), other = line.on_ranks(2, 1, 1, run)
    assert [one.output for one in other] == [masked.output, greedy.output]
    assert bool(allowed[range(6), masked.output].all())
    likeliest = torch.stack(masked.logits).masked_fill(~allowed, float("-inf")).argmax(-1)
    assert masked.output != likeliest.tolist()  # it is drawn
    assert greedy.output == line.plain(directory)[0][1][:6]


def forced(runner: line.Runner, ids: list[int], start: int) -> torch.Tensor:
    """Logits of tokens `start` - 1 to the last but one: `start` in a prompt, the others one by one."""
    request = line.Request(ids[:start])
    runner.prefill(request)
    for token in ids[start:-1]:
        request.output[-1] = token
        runner.decode([request])
    return torch.stack(request.logits)


def test_one_graph_a_bucket(fp8: Path) -> None:
    """fullgraph, and no recompilation after each bucket was seen once."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(model: Any) -> Any:
        call: Any = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        return lambda **named: [call(**named)]

    torch._dynamo.reset()
    runner = alone(fp8, quantization="blockwise", segment=8, width=4, compile_with=compiled)
    ids = prompts(fp8)[1][:14]
    forced(runner, ids[:9], 7)
    assert len(graphs) == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        forced(runner, ids, 7)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attention_dp_size": 2}, "attention_dp_size"),
        ({"fp8_packed_kv": True}, "fp8_packed_kv"),
        ({"modules_to_not_convert": ["o_proj"]}, "modules_to_not_convert"),
        ({"quantization": "mxfp4"}, "quantization"),
        ({"ep_degree": 2}, "ep_degree"),
        ({"changes": {"scoring_func": "softmax"}}, "scoring_func"),
        ({"dcp": 2}, "decode_context_parallel_size"),
        ({"head": "Eagle3DeepseekV2ForCausalLM"}, "speculative_config.model"),
        ({"async_scheduling": True}, "async_scheduling"),
        ({"cache": torch.float16}, "kv_cache_dtype"),
        ({}, "inputs_embeds"),
        ({}, "is_token_ids"),
    ],
)
def test_options_are_obeyed_or_refused(
    fp8: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], field: str
) -> None:
    options = dict(changes)
    monkeypatch.setattr(line.HERE, "dcp", options.pop("dcp", 1), raising=False)
    draft = SimpleNamespace(hf_config=SimpleNamespace(architectures=[options.pop("head", "Eagle3LlamaForCausalLM")]))
    scheduling = SimpleNamespace(async_scheduling=options.pop("async_scheduling", False))
    engine = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft), scheduler_config=scheduling)
    monkeypatch.setattr(line.HERE, "config", engine, raising=False)
    token = torch.zeros(1, dtype=torch.long)
    with pytest.raises(KimiK2Error, match=field):
        alone(fp8, **options).model(token, token, {}, token, **{field: token})


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """transformers' cache of latents and rotated keys, with what e4m3 keeps of them."""

    def update(self, *states: Any, **options: Any) -> Any:
        rounded = (state.to(line.FP8).to(state.dtype) if isinstance(state, torch.Tensor) else state for state in states)
        return super().update(*rounded, **options)


@pytest.mark.parametrize(("dtype", "pages"), [(torch.bfloat16, None), (torch.float32, line.FP8)])
def test_rounding_is_that_of_transformers(bf16: Path, dtype: torch.dtype, pages: Any) -> None:
    """In BF16 no farther off than its model; with FP8 pages, which segments and decode read, its cache rounded."""
    directory = bf16
    ids = prompts(directory)[1][:20]
    options: dict[str, Any] = {"segment": 8, "cache": pages} if pages else {"compile_with": line.eager}
    mine = forced(alone(directory, quantization="bf16", dtype=dtype, **options), ids, 8)

    def theirs(dtype: torch.dtype, cache: DynamicCache) -> torch.Tensor:
        with torch.inference_mode():
            out = load_transformers_model(directory, dtype)(torch.tensor([ids]), past_key_values=cache)
            logits: torch.Tensor = out.logits[0, 7:-1].double()
            return logits

    exact = theirs(torch.float64, DynamicCache())
    if not pages:
        assert (mine - exact).norm() <= 1.05 * (theirs(dtype, DynamicCache()) - exact).norm()
        return
    rounded = theirs(torch.float64, RoundedCache())
    assert (mine - rounded).abs().max() < 2e-5
    assert (rounded - exact).norm() > 1e-3 * exact.norm()  # what is rounded is seen
