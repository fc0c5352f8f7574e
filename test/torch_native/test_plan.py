"""The planner's step on the torch-native line beside captured graphs of the model, at real widths without memory."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from dataclasses import replace

import line
import pytest
import torch
from lowering import Captured, name_of, stale_readers, written_by
from torch.fx import GraphModule
from torch.utils.flop_counter import FlopCounterMode

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.cost import decode_counts, prefill_counts
from kimi_k2.plan.roofline import Collective
from kimi_k2.plan.target import Target, load_target

PRESETS = ["trn2-native-tp4-ep16", "trn2-native-tp32-ep2", "trn2-native-tp32-ep2-nki"]
SLOW = pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="slow: runs with KIMI_K2_SLOW=1")
CONFIG = KimiK2Config.from_preset("kimi-k2-instruct-0905", num_hidden_layers=2)


@functools.cache
def target_of(preset: str) -> Target:
    return replace(load_target(preset, CONFIG), prompt=2048)


@pytest.mark.parametrize("preset", PRESETS)
def test_writes_are_of_rows(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the line lets kernels run a step and a prompt have no scatter: a kernel a layer moves the new rows."""
    for name, module in line.stand_ins(kernels=True).items():
        monkeypatch.setitem(sys.modules, name, module)
    for bucket, counts in zip(buckets(preset, every=False), (decode_counts, prefill_counts), strict=True):
        graph = captured.__wrapped__(preset, *bucket)
        assert stale_readers(graph) == []
        writes = [node for node in graph.graph.nodes if written_by(node)]
        assert {name_of(node) for node in writes} == {"line.write_pages"}
        rows = sum(node.args[2].meta["example_value"].nbytes for node in writes)
        planned = counts(CONFIG, target_of(preset), target_of(preset).sharding(CONFIG))
        assert planned.moved["cache write"] == 2 * rows


@functools.cache
def captured(preset: str, tokens: int, lines: int, slots: int, rank: int = 0) -> GraphModule:
    """One bucket's graph: a dense layer and an MoE layer."""
    model = line.on_meta(CONFIG, target_of(preset), rank)
    return Captured.of_call(model, line.call_on_meta(CONFIG, target_of(preset), tokens, lines, slots), (), "").graph


def buckets(preset: str, *, every: bool) -> list[tuple[int, int, int]]:
    """Tokens, lines and slots of the graphs: all, or the largest step's and prompt's."""
    target = target_of(preset)
    options = target.torch_native
    assert options is not None
    if not every:
        return [(target.batch, target.batch, target.context), (target.prompt, 1, target.context)]
    slots = (*(options.decode_context_length_buckets or ()), target.context)
    steps = [(many, many, length) for many in options.num_seqs_buckets or (1,) for length in slots]
    return steps + [(many, 1, target.context) for many in options.num_batched_tokens_buckets or ()]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("decode", [True, False])
def test_a_step_is_what_the_model_does(preset: str, decode: bool) -> None:
    """Operations, collectives, scatters, and bytes held."""
    target = target_of(preset)
    bucket = buckets(preset, every=False)[0 if decode else 1]
    graph = captured(preset, *bucket)
    planned = (decode_counts if decode else prefill_counts)(CONFIG, target, target.sharding(CONFIG))
    collectives: Counter[Collective] = Counter()
    for node in graph.graph.nodes:
        space, _, name = name_of(node).partition(".")
        if space == "line" and name != "uniform":
            made = node.meta["example_value"]
            kind = name.replace("_", "-")
            collectives[Collective(kind, target.layout.ranks, made.numel() * made.element_size())] += 1
    assert planned.collectives == collectives
    inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    with FlopCounterMode(display=False) as flops:
        graph(*[torch.empty(one.shape, dtype=one.dtype, device="meta") for one in inputs])
    assert planned.flops == pytest.approx(flops.get_total_flops(), rel=1e-3)
    held = sum(one.numel() * one.element_size() for one in line.on_meta(CONFIG, target, 0).parameters())
    assert held == planned.bytes_held() - planned.held["cache"]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_written_is_read_from_the_write(preset: str, every: bool) -> None:
    """No reader of pages behind a write has them from before; rank 37 has rank 0's graphs."""
    for bucket in buckets(preset, every=every):
        graph = captured(preset, *bucket)
        assert stale_readers(graph) == []
        assert sum(len(written_by(node)) for node in graph.graph.nodes) == 2 * CONFIG.num_hidden_layers
        if every:
            assert captured(preset, *bucket, rank=37).code == graph.code
