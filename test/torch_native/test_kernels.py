"""Our NKI kernels in the model, on the emulator: the same tokens, and the line's check decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import line
import pytest
import torch
from lowering import Lowering, name_of

from kimi_k2.neuron.torch_native.attention import Pages
from kimi_k2.neuron.torch_native.kernels import Kernels
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config

# What the kernels take: eight experts a token, 64 columns a rank, whole partitions.
SIZES: dict[str, Any] = {
    "num_experts_per_tok": 8, "kv_lora_rank": 128, "num_hidden_layers": 2, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.parametrize("runs", [True, False])
def test_kernels_give_the_plain_models_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """TP2 in FP8 tiles with the shared expert in them; a step of one line chooses few enough experts."""
    write_synthetic_checkpoint(tmp_path, tiny_config("kimi-k2-instruct-0905", **SIZES), seed=4)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    line.put(monkeypatch, line.stand_ins(kernels=runs))
    drawn = [[token % 200 for token in prompt] for prompt in line.prompts(tmp_path)[:2]]
    monkeypatch.setattr(line, "prompts", lambda directory, seed=5: drawn)
    lowering = Lowering(("earlier", "aot") if runs else ("earlier",))
    for rank in line.served(tmp_path, tp=2, held="tiles", width=32, buckets=((32,), (1, 2)), compile_with=lowering):
        assert line.differences(tmp_path, rank)[0] == 0
    nodes = [node for one in lowering.graphs.values() for node in one.graph.graph.nodes]
    called = {node.args[0] for node in nodes if name_of(node) == "line.nki"} | {name_of(node) for node in nodes}
    kernels = {line.ROUTER, line.EXPERTS, "mla_decode_pages", "line.write_pages"}
    assert called & kernels == (kernels if runs else set())


@pytest.mark.parametrize(("cores", "dtype"), [(1, torch.float32), (2, torch.float32), (2, line.FP8)])
def test_only_rows_of_real_slots_are_written(monkeypatch: pytest.MonkeyPatch, cores: int, dtype: torch.dtype) -> None:
    """More rows than partitions, in any order, some of them padding; both orders of a page's dimensions; FP8 to 240."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(cores))
    line.put(monkeypatch, line.stand_ins(kernels=True))
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
