"""When steps with prompts run from CUDA graphs, and of which sizes: what a deployment asks for decides."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import needs
import pytest
import torch
from again import Again

from kimi_k2.engine.prompt_step import padded_width

needs.engine("vllm")

HELD = 12345


class Recorder:
    """Stands for the recorder of CUDA graphs."""

    def __init__(self, weak: object) -> None: ...

    def held(self) -> int:
        return HELD


class Graphs:
    """Stands for the graphs: keeps how many tokens they were asked for."""

    fails = False

    def __init__(self, steps: list[object], norm: object, widest: int, record: Recorder, least: object) -> None:
        self.widest, self.widths = widest, [widest]

    def capture(self) -> str | None:
        return "operation not permitted when stream is capturing" if self.fails else None


def made(monkeypatch: pytest.MonkeyPatch, others: int | None = None, **changed: Any) -> tuple[Graphs | None, int]:
    """The graphs of a deployment as vLLM's defaults leave it, but for what is changed.

    `others` are the tokens up to which another rank wants graphs, None on one GPU.
    """
    from kimi_k2.serving.vllm import prompt_graphs as module

    monkeypatch.setattr(module, "least_of_ranks", lambda number: number if others is None else min(number, others))
    fields = {
        "max_num_batched_tokens": 8192, "enforce_eager": False,
        "cudagraph_mode": SimpleNamespace(name="FULL_AND_PIECEWISE"), "is_cuda": True, **changed,
    }  # fmt: skip
    one = SimpleNamespace(**fields)
    for part in ("compilation_config", "scheduler_config", "model_config", "weight"):
        setattr(one, part, one)
    monkeypatch.setattr(module, "GraphRecorder", Recorder)
    monkeypatch.setattr(module, "PromptGraphs", Graphs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found: tuple[Any, int] = module.prompt_graphs([], one, one)  # type: ignore[arg-type]
    return found


def test_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 4,096 tokens, or what a step has at most; the environment says otherwise."""
    narrow: dict[str, Any] = {"max_num_batched_tokens": 2048}
    for changed, tokens, widest in (({}, "", 4096), (narrow, "", 2048), ({}, "512", 512)):
        if tokens:
            monkeypatch.setenv("KIMI_K2_VLLM_GRAPH_TOKENS", tokens)
        graphs, held = made(monkeypatch, **changed)
        assert graphs is not None
        assert (graphs.widest, held) == (widest, HELD)
    monkeypatch.setenv("KIMI_K2_VLLM_GRAPH_TOKENS", "0")
    assert made(monkeypatch) == (None, 0)


def test_several_ranks_make_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the rank that wants the fewest."""
    for others, widest in ((4096, 4096), (1024, 1024), (8192, 4096)):
        graphs, _ = made(monkeypatch, others)
        assert graphs is not None
        assert graphs.widest == widest
    assert made(monkeypatch, others=0) == (None, 0)


@pytest.mark.parametrize(
    "changed", [{"enforce_eager": True}, {"cudagraph_mode": SimpleNamespace(name="NONE")}, {"is_cuda": False}]
)
def test_none(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    assert made(monkeypatch, **changed) == (None, 0)


def test_a_capture_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Such steps are then launched one by one."""
    monkeypatch.setattr(Graphs, "fails", True)
    with caplog.at_level(logging.WARNING):
        assert made(monkeypatch) == (None, 0)
    assert "launched one by one" in caplog.text
    assert "not permitted when stream is capturing" in caplog.text


class Layer:
    """Stands for a layer: its attention puts what it is given into the first rows, and keeps what all rows held."""

    width = 6

    def __init__(self) -> None:
        self.reduce = lambda x: x
        self.layer = SimpleNamespace(mlp=None)
        self.attention = SimpleNamespace(config=SimpleNamespace(hidden_size=4, qk_rope_head_dim=2))
        self.rows: list[torch.Tensor] = []

    def enter(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x

    def expand(self, qkv_a: torch.Tensor, rotation: object) -> tuple[torch.Tensor, torch.Tensor]:
        return qkv_a, qkv_a

    def leave(self, x: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows.append(torch.cat([x, values], dim=1))
        return x, x

    def attend(self, qkv_a: object, made: object, batch: Any, cache: object, values: torch.Tensor) -> None:
        values[: batch.tokens] = batch.tokens


def test_padding_is_the_same_whatever_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of one size, the first with more tokens: rows behind the second's are zero again."""
    from kimi_k2.serving.vllm import prompt_graphs as module

    monkeypatch.setattr(module, "add_norm", lambda x, delta, weight, eps: (x, x))
    layer, norm = Layer(), SimpleNamespace(weight=torch.zeros(4), eps=1e-6)

    wide = padded_width(200)
    graphs = module.PromptGraphs([layer], norm, wide, Again())  # type: ignore[list-item, arg-type]
    graphs.capture()
    for tokens in (wide, wide - 5):
        batch: Any = SimpleNamespace(rotation=(torch.ones(tokens, 1), torch.ones(tokens, 1)), tokens=tokens)
        made = graphs(torch.full((tokens, 4), 7.0), batch, [torch.empty(0)])
        assert made.shape == (tokens, 4)
    last = layer.rows[-1]
    assert last.shape == (wide, 10)
    assert last[: wide - 5].count_nonzero() == (wide - 5) * 10
    assert not last[wide - 5 :].any()
