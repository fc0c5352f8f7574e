"""Kimi-K2 on the torch-native line's contract: served tokens and logits beside the plain model."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import line
import pytest
import torch
from line import alone, hf_config, prompts, served
from lowering import Lowering
from transformers import DynamicCache

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KimiK2Error
from kimi_k2.neuron.torch_native.loading import rank_tensors
from kimi_k2.neuron.torch_native.settings import Ranks, planned_tensors
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder

SLOW = pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="slow: runs with KIMI_K2_SLOW=1")
FULL = {"buckets": line.ALL_BUCKETS}


@pytest.mark.usefixtures("_short_blocks")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp8", {"padding": -1, "held": "blockwise"}),
        ("thinking", {"segment": 16, "tp": 2, "ep": 2, "sample": True}),
        pytest.param("fp8", {"segment": 8, **FULL}, marks=SLOW),
        pytest.param("k2.5", {"tp": 2, **FULL}, marks=SLOW),
        pytest.param("fp8", {"tp": 4, "ep": 2, "held": "blockwise"}, marks=SLOW),
        pytest.param("fp8", {"tp": 4, "ep": 4, "held": "blockwise", "segment": 8}, marks=SLOW),
        pytest.param("thinking", {"tp": 2, "dp": 2, "ep": 4, "segment": 8}, marks=SLOW),
    ],
    ids=str,
)
def test_every_route_gives_the_plain_models_tokens(
    checkpoints: dict[str, Path], name: str, options: dict[str, Any]
) -> None:
    """Ragged requests at different times, a preemption, prefix hits, padding in both spellings, ranks.

    Each step is run as AOTAutograd, the earlier and the later pass make it, which must agree.
    """
    lowering = Lowering()
    for seed in range(5, 5 + int(os.environ.get("KIMI_K2_DRAWS", "8")) // 8):
        for rank in served(checkpoints[name], seed=seed, compile_with=lowering, **options):
            wrong, off = line.differences(checkpoints[name], rank, seed)
            assert wrong == 0
            assert off < 2e-5


def test_the_device_draws_what_the_mask_and_the_request_allow(checkpoints: dict[str, Path]) -> None:
    """TP2, lines of a step with requests of their own: masks, top-k, top-p, temperature, and one that is greedy."""
    directory, lowering = checkpoints["bf16"], Lowering()
    vocabulary = KimiK2Config.from_pretrained(directory).vocab_size
    allowed = torch.rand(6, vocabulary, generator=torch.Generator().manual_seed(3)) < 0.02

    def run(rank: int) -> list[line.Request]:
        config = line.NeuronConfig(quantization="bf16", **line.SAMPLED)
        runner = line.Runner(directory, hf_config(directory), config, rank=rank, compile_with=lowering, structured=True)
        masked, narrow, greedy = (line.Request(prompt) for prompt in prompts(directory)[:3])
        masked.params, masked.allowed = (-1.0, 0.95, 1.5), lambda: allowed[len(masked.output)]
        narrow.params = (3.0, 1.0, 2.0)
        for request in (masked, narrow, greedy):
            runner.prefill(request)
        for _ in range(5):
            runner.decode([masked, narrow, greedy])
        return [masked, narrow, greedy]

    (masked, narrow, greedy), other = line.on_ranks(2, 1, 1, run)
    assert [one.output for one in other] == [masked.output, narrow.output, greedy.output]
    assert all(allowed[step, token] for step, token in enumerate(masked.output))
    best = [logits.topk(3).indices.tolist() for logits in narrow.logits]
    assert all(token in three for token, three in zip(narrow.output, best, strict=True))
    assert narrow.output != [three[0] for three in best]  # it is drawn
    assert greedy.output == line.plain(directory)[0][2][:6]


def forced(runner: line.Runner, ids: list[int], start: int) -> torch.Tensor:
    """Logits of tokens `start` - 1 to the last but one: `start` in a prompt, the others one by one."""
    request = line.Request(ids[:start])
    runner.prefill(request)
    for token in ids[start:-1]:
        request.output[-1] = token
        runner.decode([request])
    return torch.stack(request.logits)


def test_one_graph_a_bucket(checkpoints: dict[str, Path]) -> None:
    """fullgraph, and no recompilation after each bucket was seen once."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(model: Any) -> Any:
        call: Any = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        return lambda **named: [call(**named)]

    torch._dynamo.reset()
    runner = alone(checkpoints["fp8"], quantization="blockwise", segment=8, width=4, compile_with=compiled)
    ids = prompts(checkpoints["fp8"])[1][:14]
    forced(runner, ids[:9], 7)
    assert len(graphs) == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        forced(runner, ids, 7)


def test_bf16_is_no_farther_from_float32_than_transformers(checkpoints: dict[str, Path]) -> None:
    directory = checkpoints["bf16"]
    ids = prompts(directory)[1][:20]
    mine = forced(alone(directory, quantization="bf16", dtype=torch.bfloat16, compile_with=line.eager), ids, 8)
    with torch.inference_mode():
        exact, theirs = (
            load_transformers_model(directory, dtype)(torch.tensor([ids])).logits[0, 7:-1].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    assert (mine - exact).norm() <= 1.05 * (theirs - exact).norm()


@pytest.mark.parametrize(
    ("name", "experts"),
    [("fp8", "per_channel"), ("fp8", "blockwise"), ("thinking", "per_channel"), ("thinking", "bf16")],
)
def test_a_checkpoint_loads_as_its_conversion(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, experts: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same bits for every rank of TP2 x EP2; test_presharder holds the conversion to the plain model's weights."""
    directory, dtype = checkpoints[name], torch.bfloat16
    config = KimiK2Config.from_pretrained(directory)
    Presharder(directory, tmp_path / "ranks", Layout(2, 2, experts=experts, dtype=dtype)).run()
    caplog.set_level("INFO", "vllm.kimi_k2")
    for rank in range(4):
        ranks = Ranks(SimpleNamespace(world_size=4, rank_in_group=rank), None, 2)
        planned = planned_tensors(config, ranks, experts, dtype)
        checkpoint, converted = (
            dict(rank_tensors(source, config, planned, ranks, experts, dtype))
            for source in (directory, tmp_path / "ranks")
        )
        assert set(checkpoint) == set(converted) == {tensor.name for tensor in planned}
        for key, tensor in checkpoint.items():
            assert tensor.dtype == converted[key].dtype
            mine, other = (one.reshape(-1).view(torch.uint8) for one in (tensor, converted[key]))
            assert torch.equal(mine, other), key
    assert ("relative L2 error 0.00e+00" in caplog.text) == (experts == "bf16")


def test_drafts_are_verified_and_a_heads_layers_returned(checkpoints: dict[str, Path]) -> None:
    """Two drafts a line, every other one wrong: the plain model's tokens; the residual stream is transformers'."""
    directory = checkpoints["bf16"]
    tokens = line.plain(directory)[0][:2]
    runner = alone(directory, quantization="bf16", on_device_sampling_config=SimpleNamespace(max_top_k=256))
    runner.model.set_aux_hidden_state_layers((0, 1))
    requests = [line.Request(prompt) for prompt in prompts(directory)[:2]]
    theirs = load_transformers_model(directory, torch.float32)
    with torch.no_grad():
        for request in requests:
            runner.prefill(request)
            states = theirs(torch.tensor([request.prompt]), output_hidden_states=True).hidden_states
            wanted = torch.cat(states[:2], dim=-1)[0]
            assert (runner.aux[-1][: len(wanted)] - wanted).abs().max() < 2e-5
    runner.threshold, steps = 3, 0
    while min(len(request.output) for request in requests) < 6:
        ahead = [[*right, 0, 0][len(one.output) :] for one, right in zip(requests, tokens, strict=True)]
        runner.decode(requests, [[first, second + steps % 2] for first, second, *_ in ahead])
        steps += 1
    assert steps < 4
    for request, right in zip(requests, tokens, strict=True):
        assert request.output[:8] == right[: len(request.output)]
    with pytest.raises(KimiK2Error, match="aux_hidden_state_layers"):
        runner.model.set_aux_hidden_state_layers((2,))


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
    ],
)
def test_options_are_obeyed_or_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], field: str
) -> None:
    options = dict(changes)
    monkeypatch.setattr(line.HERE, "dcp", options.pop("dcp", 1), raising=False)
    draft = SimpleNamespace(hf_config=SimpleNamespace(architectures=[options.pop("head", "Eagle3LlamaForCausalLM")]))
    engine = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft))
    monkeypatch.setattr(line.HERE, "config", engine, raising=False)
    with pytest.raises(KimiK2Error, match=field):
        alone(checkpoints["fp8"], **options)


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """transformers' cache of latents and rotated keys, with what e4m3 keeps of them."""

    def update(self, *states: Any, **options: Any) -> Any:
        rounded = (one.to(line.FP8).to(one.dtype) if isinstance(one, torch.Tensor) else one for one in states)
        return super().update(*rounded, **options)


def test_pages_of_fp8_are_transformers_rounded_cache(checkpoints: dict[str, Path]) -> None:
    """Prompt in segments and tokens one by one, which read pages alone; the reference is in float64."""
    directory = checkpoints["bf16"]
    ids = prompts(directory)[1][:20]
    mine = forced(alone(directory, quantization="bf16", segment=8, cache=line.FP8), ids, 8)
    model = load_transformers_model(directory, torch.float64)
    with torch.inference_mode():
        exact, rounded = (
            model(torch.tensor([ids]), past_key_values=cache()).logits[0, 7:-1]
            for cache in (DynamicCache, RoundedCache)
        )
    assert (mine - rounded).abs().max() < 2e-5
    assert (rounded - exact).norm() > 1e-3 * exact.norm()  # what is rounded is seen


def test_embeddings_and_pages_of_another_dtype_are_refused(checkpoints: dict[str, Path]) -> None:
    runner = alone(checkpoints["fp8"], compile_with=line.eager)
    token = torch.zeros(1, dtype=torch.long)
    for name in ("inputs_embeds", "is_token_ids"):
        with pytest.raises(KimiK2Error, match=name):
            runner.model(token, token, {}, token, **{name: token})
    pages = {name: [half.to(torch.float16) for half in halves] for name, halves in runner.pages.items()}
    with pytest.raises(KimiK2Error, match="kv_cache_dtype"):
        runner.model.bind_kv_cache(pages)
