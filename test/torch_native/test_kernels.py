"""Our NKI kernels in the model, on the emulator: the same tokens, and the line's check decides."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import line
import pytest
import torch
from lowering import Lowering, name_of

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config

# What the kernels take: eight experts a token, 64 columns a rank, whole partitions.
SIZES: dict[str, Any] = {
    "num_experts_per_tok": 8, "kv_lora_rank": 128, "num_hidden_layers": 2, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiled")
    write_synthetic_checkpoint(directory, tiny_config("kimi-k2-instruct-0905", **SIZES), seed=4)
    return directory


@pytest.mark.parametrize("runs", [True, False])
def test_kernels_give_the_plain_models_tokens(tiled: Path, monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """TP2 in FP8 tiles with the shared expert in them; a step of one line chooses few enough experts."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    for name, module in line.stand_ins(kernels=runs).items():
        monkeypatch.setitem(sys.modules, name, module)
    drawn = [[token % 200 for token in prompt] for prompt in line.prompts(tiled)[:2]]
    monkeypatch.setattr(line, "prompts", lambda directory, seed=5: drawn)
    lowering = Lowering(("earlier", "aot") if runs else ("earlier",))
    for rank in line.served(tiled, tp=2, held="tiles", width=32, buckets=((32,), (1, 2)), lowering=lowering):
        assert line.differences(tiled, rank)[0] == 0
    called = {
        node.args[0] if name_of(node) == "line.nki" else name_of(node)
        for one in lowering.graphs.values()
        for node in one.graph.graph.nodes
        if name_of(node) in ("line.nki", "line.write_pages")
    }
    kernels = {"noaux_tc_router", "selective_experts", "mla_decode_pages", "line.write_pages"}
    assert called == (kernels if runs else set())


@pytest.mark.parametrize("cores", [1, 2])
def test_only_rows_of_real_slots_are_written(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """More rows than partitions, in any order, some of them padding; both orders of a page's dimensions."""
    line.stand_ins(kernels=True)
    generator = torch.Generator().manual_seed(cores)
    pages = torch.rand(2, 64, 1, 4, 6, generator=generator)
    slots = torch.randperm(256, generator=generator)[:150].to(torch.int32)
    slots[::7] = 2**31 - 1
    entries, wanted = torch.rand(150, 12, generator=generator), pages.clone()
    for slot, entry in zip(slots.tolist(), entries, strict=True):
        if slot < 256:
            wanted[0].view(256, 6)[slot], wanted[1].view(256, 6)[slot] = entry.chunk(2)
    given = pages.transpose(2, 3) if cores == 2 else pages
    given = given.contiguous()
    line.write_pages(given[0], given[1], entries, slots.unsqueeze(1), cores)
    assert torch.equal(given.view(2, 256, 6), wanted.view(2, 256, 6))
