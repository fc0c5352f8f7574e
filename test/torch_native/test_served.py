"""Kimi-K2 on the torch-native line's contract: served tokens and logits beside the plain model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import line
import pytest
import torch
from line import alone, hf_config, prompts, served
from lowering import Lowering

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KimiK2Error
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.neuron.torch_native.loading import rank_tensors
from kimi_k2.neuron.torch_native.model import KimiK2ForVllmNeuron, layer_name
from kimi_k2.neuron.torch_native.settings import Ranks, planned_tensors
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.plan import torch_native as cut
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config

SLOW = pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="slow: runs with KIMI_K2_SLOW=1")


@pytest.fixture
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a few tokens pass their experts in blocks, several a time, as those of thousands do."""
    monkeypatch.setattr(cut, "BLOCK", 4)
    monkeypatch.setattr(cut, "COLUMNS", 1024)


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
        for rank in served(checkpoints[name], seed=seed, lowering=lowering, **options):
            wrong, off = line.differences(checkpoints[name], rank, seed)
            assert wrong == 0
            assert off < 2e-5


def test_the_device_draws_what_the_mask_and_the_request_allow(checkpoints: dict[str, Path]) -> None:
    """TP2, lines of a step with requests of their own: masks, top-k, top-p, temperature, and one that is greedy."""
    directory = checkpoints["bf16"]
    drawn, steps = line.prompts(directory)[:3], 6
    vocabulary = KimiK2Config.from_pretrained(directory).vocab_size
    allowed = torch.rand(steps, vocabulary, generator=torch.Generator().manual_seed(3)) < 0.02
    lowering = Lowering()

    def run(rank: int) -> list[line.Request]:
        config = line.NeuronConfig(quantization="bf16", max_logprobs=-1)
        config.on_device_sampling_config = SimpleNamespace(max_top_k=256)
        runner = line.Runner(directory, hf_config(directory), config, rank=rank, compile_with=lowering, structured=True)
        masked, narrow, greedy = (line.Request(list(prompt), steps) for prompt in drawn)
        masked.params, masked.allowed = (-1.0, 0.95, 1.5), lambda: allowed[len(masked.output)]
        narrow.params = (3.0, 1.0, 2.0)
        for request in (masked, narrow, greedy):
            runner.prefill(request)
        for _ in range(steps - 1):
            runner.decode([masked, narrow, greedy])
        return [masked, narrow, greedy]

    ranks = line.on_ranks(2, 1, 1, run)
    masked, narrow, greedy = ranks[0]
    assert [one.output for one in ranks[1]] == [one.output for one in ranks[0]]
    assert all(allowed[step, token] for step, token in enumerate(masked.output))
    best = [logits.topk(3).indices.tolist() for logits in narrow.logits]
    assert all(token in three for token, three in zip(narrow.output, best, strict=True))
    assert narrow.output != [three[0] for three in best]  # it is drawn
    assert greedy.output == line.plain(directory)[0][2][:steps]


def forced(runner: line.Runner, ids: list[int], start: int) -> torch.Tensor:
    """Logits of tokens `start` - 1 to the last but one: `start` in a prompt, the others one by one."""
    request = line.Request(ids[:start], len(ids))
    runner.prefill(request)
    for token in ids[start:-1]:
        request.output[-1] = token
        runner.decode([request])
    return torch.stack(request.logits)


def test_one_graph_a_bucket(tmp_path: Path) -> None:
    """fullgraph, and no recompilation after each bucket was seen once."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(model: Any) -> Any:
        call: Any = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        return lambda **named: [call(**named)]

    torch._dynamo.reset()
    write_synthetic_checkpoint(tmp_path, tiny_config("kimi-k2-instruct-0905", num_hidden_layers=2), seed=0)
    config = line.NeuronConfig(quantization="blockwise")
    runner = alone(tmp_path, config, segment=8, width=4, compile_with=compiled)
    ids = prompts(tmp_path)[1][:14]
    forced(runner, ids[:9], 7)
    assert len(graphs) == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        forced(runner, ids, 7)


def test_bf16_is_no_farther_from_float32_than_transformers(checkpoints: dict[str, Path]) -> None:
    directory = checkpoints["bf16"]
    ids = prompts(directory)[1][:20]
    runner = alone(directory, line.NeuronConfig(quantization="bf16"), dtype=torch.bfloat16, compile_with=line.eager)
    mine = forced(runner, ids, 8)
    with torch.inference_mode():
        exact, theirs = (
            load_transformers_model(directory, dtype)(torch.tensor([ids])).logits[0, 7:-1].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    assert (mine - exact).norm() <= 1.05 * (theirs - exact).norm()


def of_plain(weights: dict[str, torch.Tensor], name: str, rank: int) -> torch.Tensor:
    """The plain model's slice of a tensor of one rank of four: TP2 x EP2, cut by hand."""
    root, _, last = name.removesuffix(".weight").rpartition(".")
    layer = root.partition(".mlp.")[0]
    if last == "qkv_a_proj":
        whole = torch.cat([weights[f"{root}.{one}.weight"] for one in ("q_a_proj", "kv_a_proj_with_mqa")])
        return whole.chunk(4)[rank]
    if ".router." in name:
        return weights[f"{layer}.mlp.gate." + ("weight" if name.endswith("weight") else "e_score_correction_bias")]
    if ".mlp.experts." in name:
        group, share = divmod(rank, 2)
        of_group = {one: weights[f"{layer}.mlp.experts.{one}"].chunk(2)[group] for one in ("gate_up_proj", "down_proj")}
        if last == "down_proj":
            return of_group[last].chunk(2, dim=2)[share].mT
        return torch.cat([one.chunk(2, dim=1)[share] for one in of_group[last].chunk(2, dim=1)], dim=1).mT
    whole = weights[f"{root}.{last}.weight" if root else f"{last}.weight"]
    if last in ("embed_tokens", "o_proj", "down_proj"):
        return whole.chunk(4, dim=1)[rank]
    return whole if "norm" in last else whole.chunk(4)[rank]


@pytest.mark.parametrize(
    ("name", "experts"),
    [("fp8", "per_channel"), ("fp8", "blockwise"), ("thinking", "per_channel"), ("thinking", "bf16")],
)
def test_both_loaders_give_the_plain_models_weights(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, experts: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of every rank of TP2 x EP2: the checkpoint's and the rank's file's the same bits, and the plain model's slice.

    Experts' FP8 values end at 240: blocks are halved, exact but for the last bit of the smallest; a scale a channel
    rounds, and says by how much.
    """
    directory, dtype = checkpoints[name], torch.bfloat16
    config = KimiK2Config.from_pretrained(directory)
    Presharder(directory, tmp_path / "ranks", Layout(2, 2, experts=experts)).run()
    caplog.set_level("INFO", "vllm.kimi_k2")
    plain, exact = (
        {one.removeprefix("model."): tensor for one, tensor in model.state_dict().items()}
        for model in (KimiK2ForCausalLM.from_pretrained(directory, dtype=one) for one in (dtype, torch.float32))
    )
    for rank in range(4):
        ranks = Ranks(SimpleNamespace(world_size=4, rank_in_group=rank), None, 2)
        planned = planned_tensors(config, ranks, experts, dtype)
        both = [
            dict(rank_tensors(source, config, planned, ranks, experts, dtype))
            for source in (directory, tmp_path / "ranks")
        ]
        assert set(both[0]) == set(both[1]) == {tensor.name for tensor in planned}
        for key, tensor in both[0].items():
            other = both[1][key]
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), key
            if key.endswith("scale"):
                continue
            scale = both[0].get(key.removesuffix("weight") + "scale")
            if scale is None:
                assert torch.equal(tensor, of_plain(plain, key, rank)), key
                continue
            spread = scale
            for dim in (1, 2):
                spread = spread.repeat_interleave(tensor.shape[dim] // spread.shape[dim], dim)
            wanted = of_plain(exact, key, rank)
            off, size = (tensor.float() * spread - wanted).abs() / spread, wanted.abs() / spread
            normal = size >= 2.0**-6  # of e4m3; below a step is 2^-9
            assert bool((off[~normal] <= 2.0**-10 * (1 + 2.0**-18)).all()), key
            assert bool((off[normal] <= (0 if experts == "blockwise" else size[normal] * 2.0**-4)).all()), key
    assert "relative L2 error" in caplog.text
    assert ("relative L2 error 0.00e+00" in caplog.text) == (experts == "bf16")


def test_drafts_are_verified_and_a_heads_layers_returned(checkpoints: dict[str, Path]) -> None:
    """Two drafts a line, every other one wrong: the plain model's tokens; the residual stream is transformers'."""
    directory = checkpoints["bf16"]
    tokens, sampling = line.plain(directory)[0][:2], SimpleNamespace(max_top_k=256)
    runner = alone(directory, line.NeuronConfig(quantization="bf16", on_device_sampling_config=sampling))
    runner.model.set_aux_hidden_state_layers((0, 1))
    requests = [line.Request(prompt, 8) for prompt in prompts(directory)[:2]]
    with torch.no_grad():
        for request in requests:
            runner.prefill(request)
            ids = torch.tensor([request.prompt])
            theirs = load_transformers_model(directory, torch.float32)(ids, output_hidden_states=True).hidden_states
            wanted = torch.cat((theirs[0], theirs[1]), dim=-1)[0]
            assert (runner.aux[-1][: len(wanted)] - wanted).abs().max() < 2e-5
    runner.threshold, steps = 3, 0
    while min(len(request.output) for request in requests) < 6:
        drafts = []
        for request, right in zip(requests, tokens, strict=True):
            ahead = [*right, 0, 0][len(request.output) :][:2]
            drafts.append([ahead[0], ahead[1] + steps % 2])
        runner.verify(requests, drafts)
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
    ],
)
def test_options_are_obeyed_or_refused(checkpoints: dict[str, Path], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(KimiK2Error, match=field):
        alone(checkpoints["fp8"], line.NeuronConfig(**changes))


def test_a_divided_cache_and_other_models_are_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KimiK2Error, match="scoring_func"):
        alone(checkpoints["fp8"], line.NeuronConfig(), changes={"scoring_func": "softmax"})
    monkeypatch.setattr(line.HERE, "dcp", 2, raising=False)
    with pytest.raises(KimiK2Error, match="decode_context_parallel_size"):
        alone(checkpoints["fp8"], line.NeuronConfig())


def test_vllm_accepts_the_class(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own registry, which a front end asks before there is a worker."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    registry = pytest.importorskip("vllm.model_executor.models.registry", reason="vLLM is not installed")
    registry.ModelRegistry.register_model("KimiK2ForVllmNeuron", KimiK2ForVllmNeuron)
    config = SimpleNamespace(hf_config=hf_config(checkpoints["fp8"]), runner_type="generate", model_impl="vllm")
    assert registry.is_text_generation_model(KimiK2ForVllmNeuron), config


def test_padding_of_every_line_changes_nothing(checkpoints: dict[str, Path]) -> None:
    """A padded decode of one request has the logits of the request alone, whatever the null block holds."""
    directory = checkpoints["fp8"]
    made = []
    for padding in (0, -1):
        runner = alone(directory, line.NeuronConfig(quantization="bf16"), padding=padding, compile_with=line.eager)
        made.append(forced(runner, prompts(directory)[1][:12], 11))
        assert all(bool((half[0] == 1e4).all()) for half in runner.pages[layer_name(0)])
    assert torch.equal(*made)
