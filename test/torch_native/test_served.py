"""Kimi-K2 on the torch-native line's contract: served tokens and logits beside the plain model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import line
import pytest
import torch
from plain_tokens import expected
from processes import run_together

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KimiK2Error
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder

RANKS = Path(__file__).with_name("ranks.py")
WANTED = 8
SLOW = pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="slow: runs with KIMI_K2_SLOW=1")


def prompts(vocabulary: int) -> list[list[int]]:
    """Eight of drawn lengths; the third begins like the second."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 40, (8,), generator=generator).tolist()
    drawn = [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    drawn[2] = drawn[1][:5] + drawn[2]
    return drawn


def served(tmp_path: Path, directory: Path, **options: Any) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """What each replica served, and the plain model's tokens."""
    job: dict[str, Any] = {
        "tp": 1,
        "dp": 1,
        "ep": 1,
        "quantization": "bf16",
        "padding": 0,
        "segment": 0,
        "dtype": "float32",
    } | options
    vocabulary = KimiK2Config.from_pretrained(directory).vocab_size
    job |= {"prompts": prompts(vocabulary), "wanted": WANTED, "meeting": str(tmp_path / "meeting")}
    job |= {"directory": job.get("directory", str(directory)), "config": str(directory), "out": str(tmp_path / "out")}
    (tmp_path / "job.json").write_text(json.dumps(job))
    world = job["tp"] * job["dp"]
    run_together([[sys.executable, RANKS, tmp_path / "job.json", rank] for rank in range(world)])
    made = [torch.load(tmp_path / f"out.{replica}") for replica in range(job["dp"])]
    plain = [{"prompt": prompt, "new_tokens": WANTED} for prompt in job["prompts"]]
    return made, expected(directory, "float32", plain)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp8", {"padding": -1, "quantization": "blockwise"}),
        ("thinking", {"segment": 12, "tp": 2, "ep": 2, "sample": True}),
        pytest.param("fp8", {"segment": 8}, marks=SLOW),
        pytest.param("k2.5", {"tp": 2}, marks=SLOW),
        pytest.param("fp8", {"tp": 4, "ep": 2, "quantization": "blockwise"}, marks=SLOW),
        pytest.param("thinking", {"tp": 2, "dp": 2, "ep": 4, "segment": 8}, marks=SLOW),
    ],
    ids=str,
)
def test_tokens_are_the_plain_models(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """Ragged requests at different times, a preemption, prefix hits, padding in both spellings, ranks."""
    made, tokens = served(tmp_path, checkpoints[name], **options)
    for replica in made:
        assert replica["tokens"] == tokens


def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    own, replicas = line.groups(0, 1, 1)
    for name, module in line.stand_ins(own, replicas, 1).items():
        monkeypatch.setitem(sys.modules, name, module)


def hf_config(directory: Path, **changes: Any) -> SimpleNamespace:
    raw = json.loads((directory / "config.json").read_text()) | changes
    return SimpleNamespace(to_dict=lambda: raw, dtype=torch.float32)


@pytest.mark.parametrize("segment", [0, 8])
def test_logits_and_graphs(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, segment: int) -> None:
    """Logits within 2e-5, and one graph a bucket: fullgraph, no recompilation after each bucket was seen once."""
    one_process(monkeypatch)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    directory, config = checkpoints["fp8"], line.NeuronConfig(quantization="blockwise")
    runner = line.Runner(
        directory, hf_config(directory), config, segment=segment,
        compile_with=lambda model: torch.compile(model, fullgraph=True, dynamic=False, backend=backend),
    )  # fmt: skip
    ids = prompts(KimiK2Config.from_pretrained(directory).vocab_size)[0]
    request = line.Request(ids[:7], 6)
    runner.prefill(request)
    runner.decode([request])
    warm = len(graphs)
    assert warm == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        while len(request.output) < 6:
            runner.decode([request])
        again = line.Request(ids[1:6], 1)
        runner.prefill(again)
    assert len(graphs) == warm
    plain = KimiK2ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    whole = torch.tensor([request.tokens])
    at = torch.arange(whole.shape[1])[None]
    with torch.inference_mode():
        logits = plain(whole, at, None)[0, len(request.prompt) - 1 : -1]
    mine = torch.cat(runner.logits[: len(logits)])
    assert (mine - logits).abs().max() < 2e-5


@pytest.mark.parametrize("experts", ["per_channel", "blockwise", "bf16"])
def test_both_loaders_give_the_same_bits(checkpoints: dict[str, Path], tmp_path: Path, experts: str) -> None:
    """From the checkpoint and from a rank's file, of every rank of TP2 x EP2."""
    from kimi_k2.neuron.torch_native.loading import rank_tensors
    from kimi_k2.neuron.torch_native.settings import Ranks, planned_tensors

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
def test_options_are_obeyed_or_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], field: str
) -> None:
    one_process(monkeypatch)
    with pytest.raises(KimiK2Error, match=field):
        line.Runner(checkpoints["fp8"], hf_config(checkpoints["fp8"]), line.NeuronConfig(**changes))


def test_other_models_of_the_architecture_are_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_process(monkeypatch)
    other = hf_config(checkpoints["fp8"], scoring_func="softmax")
    with pytest.raises(KimiK2Error, match="scoring_func"):
        line.Runner(checkpoints["fp8"], other, line.NeuronConfig())
