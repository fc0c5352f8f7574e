"""Our NKI kernels in the model, on the emulator: the same tokens, and the line's check decides."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import line
import pytest
import torch
from line import SLOW
from lowering import Lowering, name_of

from kimi_k2.errors import KimiK2Error
from kimi_k2.neuron.torch_native.attention import Pages
from kimi_k2.neuron.torch_native.kernels import Kernels
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config

# What the kernels take; a dense layer and two MoE layers, so that down projections ride.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3, "n_routed_experts": 128, "num_experts_per_tok": 8, "q_lora_rank": 128, "kv_lora_rank": 256,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "num_attention_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip


def checkpoint(directory: Path, tp: int, ep: int, cores: int) -> Path:
    """FP8; 64 columns of an expert a rank, 32 of the shared one, and few of the residual."""
    width = max(64 * tp // ep, 32 * tp)
    config = tiny_config(
        "kimi-k2-instruct-0905", hidden_size=128 * max(tp, cores), moe_intermediate_size=width, **SIZES
    )
    write_synthetic_checkpoint(directory, config, seed=4)
    return directory


@pytest.mark.parametrize(
    ("tp", "ep", "cores", "options"),
    [
        (2, 2, 2, {"segment": 16, "padding": -1}),
        pytest.param(1, 1, 1, {}, marks=SLOW),
        pytest.param(2, 1, 2, {}, marks=SLOW),
        pytest.param(4, 2, 1, {"segment": 8}, marks=SLOW),
    ],
)
def test_kernels_give_the_plain_models_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, ep: int, cores: int, options: dict[str, Any]
) -> None:
    """Lines of a step, a preemption, prefix hits and segments; each MoE layer of a step is one call."""
    directory = checkpoint(tmp_path, tp, ep, cores)
    line.with_kernels(monkeypatch, cores)
    lowering = Lowering(("fx", "aot"))
    deployment = {"tp": tp, "ep": ep, "held": "tiles", "width": 64, "buckets": ((32,), (3,)), **options}
    for rank in line.served(directory, count=3, compile_with=lowering, **deployment):
        wrong, off = line.differences(directory, rank)
        assert wrong == 0
        assert off < 2e-5
    (step,) = [graph.graph for graph in lowering.graphs.values() if called(graph.graph)["line.decode_layer"]]
    assert called(step)["line.decode_layer"] == 2


@pytest.mark.parametrize(
    ("kernels", "tokens"),
    [(True, 3), (False, 3), *(pytest.param(True, tokens, marks=SLOW) for tokens in (2, 4))],
)
def test_drafts_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: bool, tokens: int) -> None:
    """The plain model's tokens, whatever was drafted; a head reads transformers' residual stream.

    Its layers end a kernel's run of layers.
    """
    directory = checkpoint(tmp_path, 1, 1, 1)
    line.with_kernels(monkeypatch, 1, run=kernels)
    lowering = Lowering(("fx",))
    runner = line.alone(
        directory, quantization="tiles", width=64, buckets=((32,), (2,)), compile_with=lowering, **line.SAMPLED
    )
    runner.model.set_aux_hidden_state_layers((0, 2))
    requests = [line.Request(prompt) for prompt in line.prompts(directory)[:2]]
    theirs = load_transformers_model(directory, torch.float32)
    for request in requests:
        runner.prefill(request)
        with torch.no_grad():
            states = theirs(torch.tensor([request.prompt]), output_hidden_states=True).hidden_states
        wanted = torch.cat((states[0], states[2]), dim=-1)[0]
        assert (runner.aux[-1][: len(wanted)] - wanted).abs().max() < 2e-5
    assert line.verify(runner, requests, line.plain(directory, count=2)[0], tokens, 6) < 6
    calls = [called(graph.graph)["line.decode_layer"] for graph in lowering.graphs.values()]
    assert calls == [0, 2 * kernels]
    with pytest.raises(KimiK2Error, match="aux_hidden_state_layers"):
        runner.model.set_aux_hidden_state_layers((3,))


def called(graph: Any) -> Counter[str]:
    return Counter(name_of(node) for node in graph.graph.nodes)


@pytest.mark.parametrize(("cores", "dtype"), [(1, torch.float32), (2, torch.float32), (2, line.FP8)])
def test_only_rows_of_real_slots_are_written(monkeypatch: pytest.MonkeyPatch, cores: int, dtype: torch.dtype) -> None:
    """More rows than partitions, in any order, some of them padding; both orders of a page's dimensions; FP8 to 240."""
    line.with_kernels(monkeypatch, cores)
    generator = torch.Generator().manual_seed(cores)
    pages = torch.rand(2, 64, 1, 4, 6, generator=generator).to(dtype)
    slots = torch.randperm(256, generator=generator)[:150]
    entries, wanted = 500 * torch.rand(150, 12, generator=generator), pages.clone()
    slots = slots.masked_fill(torch.arange(150) % 7 == 0, -1)
    kept, held = slots > 0, entries.clamp(max=240) if dtype == line.FP8 else entries
    wanted.view(2, 256, 6)[:, slots[kept]] = torch.stack(held[kept].chunk(2, dim=1)).to(dtype)
    given = (pages.transpose(2, 3) if cores == 2 else pages).contiguous()
    Pages(given[0], given[1], Kernels.find()).write(entries, slots)
    assert torch.equal(given.view(2, 256, 6).float(), wanted.view(2, 256, 6).float())
