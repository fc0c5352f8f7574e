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

SLOW = pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="slow: runs with KIMI_K2_SLOW=1")


@pytest.fixture(autouse=True)
def _line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in line.stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a few tokens pass their experts in blocks, several a time, as those of thousands do."""
    monkeypatch.setattr(cut, "BLOCK", 2)
    monkeypatch.setattr(cut, "COLUMNS", 128)


@pytest.mark.usefixtures("_short_blocks")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp8", {"padding": -1, "held": "blockwise"}),
        ("thinking", {"segment": 12, "tp": 2, "ep": 2, "sample": True}),
        pytest.param("fp8", {"segment": 8}, marks=SLOW),
        pytest.param("k2.5", {"tp": 2}, marks=SLOW),
        pytest.param("fp8", {"tp": 4, "ep": 2, "held": "blockwise"}, marks=SLOW),
        pytest.param("thinking", {"tp": 2, "dp": 2, "ep": 4, "segment": 8}, marks=SLOW),
    ],
    ids=str,
)
def test_tokens_are_the_plain_models(checkpoints: dict[str, Path], name: str, options: dict[str, Any]) -> None:
    """Ragged requests at different times, a preemption, prefix hits, padding in both spellings, ranks."""
    tokens = line.plain_tokens(checkpoints[name])
    for rank in served(checkpoints[name], **options):
        assert rank == tokens


def forced(runner: line.Runner, ids: list[int], start: int) -> torch.Tensor:
    """Logits of tokens `start` - 1 to the last but one: `start` in a prompt, the others one by one."""
    request = line.Request(ids[:start], len(ids))
    runner.prefill(request)
    for token in ids[start:-1]:
        request.output[-1] = token
        runner.decode([request])
    return torch.cat(runner.logits)


@pytest.mark.parametrize("segment", [pytest.param(0, marks=SLOW), 8])
def test_logits_and_graphs(checkpoints: dict[str, Path], segment: int) -> None:
    """Logits within 2e-5, and one graph a bucket: fullgraph, no recompilation after each bucket was seen once."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(model: Any) -> Any:
        return torch.compile(model, fullgraph=True, dynamic=False, backend=backend)

    torch._dynamo.reset()
    directory = checkpoints["fp8"]
    runner = alone(directory, line.NeuronConfig(quantization="blockwise"), segment=segment, compile_with=compiled)
    ids = prompts(directory)[1][:14]
    warm = forced(runner, ids[:9], 7)
    assert len(graphs) == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        runner.logits.clear()
        logits = forced(runner, ids, 7)
    assert len(graphs) == 2
    assert torch.equal(warm, logits[: len(warm)])
    plain = KimiK2ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        wanted = plain(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0, 6:-1]
    assert (logits - wanted).abs().max() < 2e-5


def test_bf16_is_no_farther_from_float32_than_transformers(checkpoints: dict[str, Path]) -> None:
    directory = checkpoints["bf16"]
    ids = prompts(directory)[1][:20]
    runner = alone(directory, line.NeuronConfig(quantization="bf16"), dtype=torch.bfloat16)
    mine = forced(runner, ids, 8)
    with torch.inference_mode():
        exact, theirs = (
            load_transformers_model(directory, dtype)(torch.tensor([ids])).logits[0, 7:-1].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    assert (mine - exact).norm() <= 1.05 * (theirs - exact).norm()


@pytest.mark.parametrize("experts", ["per_channel", "blockwise", "bf16"])
def test_both_loaders_give_the_same_bits(checkpoints: dict[str, Path], tmp_path: Path, experts: str) -> None:
    """From the checkpoint and from a rank's file, of every rank of TP2 x EP2."""
    directory = checkpoints["thinking"]
    config = KimiK2Config.from_pretrained(directory)
    Presharder(directory, tmp_path / "ranks", Layout(2, 2, experts=experts)).run()
    for rank in range(4):
        ranks = Ranks(SimpleNamespace(world_size=4, rank_in_group=rank), None, 2)
        planned = planned_tensors(config, ranks, experts, torch.bfloat16)
        both = [
            dict(rank_tensors(source, config, planned, ranks, experts, torch.bfloat16))
            for source in (directory, tmp_path / "ranks")
        ]
        assert set(both[0]) == set(both[1]) == {tensor.name for tensor in planned}
        for name, tensor in both[0].items():
            other = both[1][name]
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), name


def meta_graphs(rank: int) -> dict[str, str]:
    """Code of the graphs of all buckets, by bucket: one rank of 64, EP16, real widths, two layers, no memory."""
    replicas = line.Group(line.Meeting(1), 0)
    line.HERE.tp, line.HERE.dp, line.HERE.ep = line.MetaGroup(64, rank), replicas, 16
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905", num_hidden_layers=2)
    hf = SimpleNamespace(to_dict=config.to_hf_dict, dtype=torch.bfloat16)
    found: dict[str, str] = {}
    bucket = ""

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        assert bucket not in found, f"{bucket} was compiled twice"
        found[bucket] = graph.code
        return graph.forward

    with torch.device("meta"):
        model = KimiK2ForVllmNeuron.from_configs(hf, line.NeuronConfig(ep_degree=16))
        model.inv_freq, model.first_expert = model.inv_freq.to("meta"), model.first_expert.to("meta")
        half = torch.empty(256, 1, 32, 288, dtype=torch.bfloat16)
        model.bind_kv_cache({layer_name(layer): [half, half.clone()] for layer in range(2)})
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for tokens, lines, segment in ((1, 1, 0), (8, 8, 0), (128, 1, 0), (512, 1, 0), (512, 1, 2048)):
        decode = tokens == lines
        bucket = f"{'decode' if decode else 'segment' if segment else 'prompt'} {tokens}"
        metadata = {
            "block_table_tensor": empty(lines, 128, dtype=torch.int32),
            "slot_mapping": empty(tokens),
            "max_query_len": 1 if decode else tokens,
            "block_size": 32,
            "decode_token_threshold": 1,
            "kv_segment_size": segment,
        }
        for _ in range(2):
            logits = compiled(
                input_ids=empty(tokens, dtype=torch.int32),
                positions=empty(tokens),
                attn_metadata={layer_name(layer): metadata for layer in range(2)},
                sampling_positions=empty(lines),
                rank=empty(dtype=torch.int32),
            )
        assert logits.shape == (lines, config.vocab_size)
    return found


@SLOW
def test_every_rank_has_the_same_graphs_at_real_widths() -> None:
    first, other = meta_graphs(0), meta_graphs(37)
    assert len(first) == 5  # a graph a bucket, of three kinds
    assert first == other


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
    ids = prompts(directory)[1][:12]
    made = []
    for padding in (0, -1):
        runner = alone(directory, line.NeuronConfig(quantization="bf16"), padding=padding)
        request = line.Request(ids, 4)
        runner.prefill(request)
        runner.decode([request])
        before = [half[0].clone() for half in runner.pages[layer_name(0)]]
        assert all(bool((half == 1e4).all()) for half in before)
        made.append(torch.cat([logits[:1] for logits in runner.logits]))
    assert torch.equal(*made)
