"""Our classes as vLLM calls them, without an engine: graphs of prompts, ranks, exchanges."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
from torch import Tensor

from kimi_k2.errors import ConfigError
from kimi_k2.ops.experts import route
from kimi_k2.serving.vllm.adapter import Deployment

engines.need("vllm")

HELD = 12345  # bytes


def test_layers_that_the_target_lacks() -> None:
    from kimi_k2.serving.vllm.model import KimiK2ForVllm

    target: Any = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=3))
    KimiK2ForVllm.set_aux_hidden_state_layers(target, (3, 0, 3))
    assert target._seen == (0, 3)
    with pytest.raises(ConfigError, match=r"eagle_aux_hidden_state_layer_ids': \[4\], of a target with 3 layers"):
        KimiK2ForVllm.set_aux_hidden_state_layers(target, (1, 4))


class OnGpu(torch.Tensor):
    """Says that it is there."""

    is_cuda = property(lambda self: True)


class Nccl:
    """vLLM's group of two ranks with the same rows; as NCCL does, it reads the values that follow a tensor's first."""

    def gather_rows(self, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
        rows = [tensor.as_strided(tensor.shape, (tensor.shape[1], 1), tensor.storage_offset()) for tensor in tensors]
        return [torch.cat((row, row)) for row in rows]


def test_rows_as_nccl_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain router's experts are a view of all experts' order."""
    from kimi_k2.serving.vllm import ranks

    monkeypatch.setattr(ranks, "Group", lambda _: Nccl())
    monkeypatch.setattr(ranks, "tokens_of_replicas", lambda: [5, 5])
    x = torch.randn(5, 32)
    indices, weights = route(x, torch.randn(16, 32), torch.zeros(16), 8)
    assert not indices.is_contiguous()
    given: list[Tensor] = [one.as_subclass(OnGpu) for one in (x, indices, weights)]
    for found, wanted in zip(ranks.Exchange().gather(given), (x, indices, weights), strict=True):
        assert torch.equal(found, torch.cat((wanted, wanted)))


class Graphs:
    """Stands for graphs of steps with prompts, and for their recorder: keeps for how many tokens they were asked."""

    fails = False

    def __init__(self, *given: Any) -> None:
        self.widest, self.widths = given[2] if len(given) > 1 else 0, [1]

    def capture(self) -> str | None:
        return "operation not permitted when stream is capturing" if self.fails else None

    def held(self) -> int:
        return HELD


@pytest.mark.parametrize(
    ("changed", "others", "widest"),
    [
        ({}, None, 4096),  # or what a step has at most; the environment says otherwise
        ({"max_num_batched_tokens": 2048}, None, 2048),
        ({"asked": "512"}, None, 512),
        ({"asked": "0"}, None, None),
        ({}, 4096, 4096),  # several ranks make those of the rank that wants the fewest
        ({}, 1024, 1024),
        ({}, 8192, 4096),
        ({}, 0, None),
        ({"enforce_eager": True}, None, None),
        ({"cudagraph_mode": SimpleNamespace(name="NONE")}, None, None),
        ({"is_cuda": False}, None, None),
        ({"fails": True}, None, None),  # such steps are then launched one by one
    ],
)
def test_which_prompts_are_in_graphs(
    changed: dict[str, Any],
    others: int | None,
    widest: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a deployment asks for decides; `others` are the tokens up to which another rank wants graphs."""
    from kimi_k2.serving.vllm import prompt_graphs as module

    monkeypatch.setattr(module, "least_of_ranks", lambda number: number if others is None else min(number, others))
    for name in ("GraphRecorder", "PromptGraphs"):
        monkeypatch.setattr(module, name, Graphs)
    monkeypatch.setattr(Graphs, "fails", changed.get("fails", False))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    if "asked" in changed:
        monkeypatch.setenv("KIMI_K2_VLLM_GRAPH_TOKENS", changed["asked"])
    fields = {"max_num_batched_tokens": 8192, "enforce_eager": False, "is_cuda": True}
    one: Any = SimpleNamespace(**{"cudagraph_mode": SimpleNamespace(name="FULL_AND_PIECEWISE"), **fields, **changed})
    for part in ("compilation_config", "scheduler_config", "model_config", "weight"):
        setattr(one, part, one)
    with caplog.at_level(logging.WARNING):
        graphs, bytes_held = module.prompt_graphs([], one, Deployment(one))
    assert (graphs and graphs.widest, bytes_held) == (widest, HELD if widest else 0)
    said = "launched one by one: no graph of them: operation not permitted when stream is capturing"
    assert (said in caplog.text) == ("fails" in changed)
