"""The planner's step on the torch-native line beside the model's own: operations, collectives, bytes held."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import line
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.cost import decode_counts, prefill_counts
from kimi_k2.plan.roofline import Collective
from kimi_k2.plan.target import load_target


class Counted(line.MetaGroup):
    """Keeps what was called, as `Collective` counts it: bytes of the result."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size, 0)
        self.calls: Counter[Collective] = Counter()

    def _note(self, kind: str, out: torch.Tensor) -> torch.Tensor:
        self.calls[Collective(kind, self.world_size, out.numel() * out.element_size())] += 1
        return out

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self._note("all-gather", super().all_gather(x, dim))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._note("all-reduce", super().all_reduce(x))

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self._note("reduce-scatter", super().reduce_scatter(x, dim))


@pytest.mark.parametrize("preset", ["trn2-native-tp4-ep16", "trn2-native-tp32-ep2", "trn2-native-tp32-ep2-nki"])
@pytest.mark.parametrize("decode", [True, False])
def test_a_step_is_what_the_model_does(monkeypatch: pytest.MonkeyPatch, preset: str, decode: bool) -> None:
    """Real widths on tensors without memory: a dense layer and an MoE layer."""
    for name, module in line.stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905", num_hidden_layers=2)
    target = replace(load_target(preset, config), prompt=2048)
    options, group = target.torch_native, Counted(64)
    assert options is not None
    model = line.on_meta(config, target, group)
    lines = target.batch if decode else 1
    tokens = lines if decode else target.prompt
    segment = 0 if decode else (options.kv_segment_size_buckets or (0,))[0]
    with FlopCounterMode(display=False) as flops:
        line.call_on_meta(model, tokens, lines, target.context, options.block_size, segment)
    sharding = target.sharding(config)
    planned = (decode_counts if decode else prefill_counts)(config, target, sharding)
    assert planned.collectives == group.calls
    assert planned.flops == pytest.approx(flops.get_total_flops(), rel=1e-3)
    held = sum(one.numel() * one.element_size() for one in model.parameters())
    assert held == planned.bytes_held() - planned.held["cache"]
