"""Scratch memory on a GPU: concurrent streams and graphs are right, memory stays bounded.

Needs a Hopper GPU and nvcc.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from exact import routing
from machines import Machine
from on_hopper import NEEDS_HOPPER, assert_words_are_clear
from stored_experts import Experts, drawn, of
from torch import Tensor

from kimi_k2.kernels.common import workspace
from kimi_k2.kernels.experts.entries import experts_beside_shared, shared_added_to_routed
from kimi_k2.kernels.router.router_gemm import router_decode
from kimi_k2.ops import experts as operations

pytestmark = NEEDS_HOPPER
EXPERTS, INTER, HIDDEN, TOP_K = 64, 256, 1024, 8
normal = Machine("gpu").normal
Call = Callable[[], tuple[Tensor, ...]]


@functools.cache
def experts_of(kind: str, inter: int = INTER) -> Experts:
    return of(drawn(kind, EXPERTS, inter, HIDDEN))


def operation(kind: str, tokens: int, seed: int) -> Call:
    torch.manual_seed(seed)
    x = normal(tokens, HIDDEN)
    if kind == "router":
        weight, bias = normal(384, HIDDEN), torch.randn(384, device="cuda")
        return lambda: tuple(router_decode(x, weight, bias, TOP_K))
    given, chosen = experts_of(kind), routing("whole", tokens, TOP_K, EXPERTS)
    return lambda: (given(x, *chosen),)


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


CASES = [("fp8", 64), ("fp8", 512), ("fp8", 4096), ("int4", 64), ("int4", 1024), ("router", 8)]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_streams_at_the_same_shape(kind: str, tokens: int, count: int, repeats: int = 50) -> None:
    """One of high priority, beside other work: SMs are taken before all blocks of a launch have one."""
    calls = [operation(kind, tokens, seed) for seed in range(count)]
    wanted = [call() for call in calls]
    other = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    beside, *streams = [torch.cuda.Stream(priority=-(number == 1)) for number in range(count + 1)]
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in calls]
    for _ in range(repeats):
        with torch.cuda.stream(beside):
            other @ other
        for stream, call, results in zip(streams, calls, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(call())
    torch.cuda.synchronize()
    for results, right in zip(found, wanted, strict=True):
        assert all(same(result, right) for result in results)


@pytest.mark.parametrize("together", [experts_beside_shared, shared_added_to_routed])
def test_shared_experts_of_two_streams(
    together: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, tokens: int = 1024
) -> None:
    """The second stream's shared expert runs while the first's waits to be added: it must not take its memory."""

    def routed(x: Tensor, *_: object) -> Tensor:
        torch.cuda._sleep(10**7)
        return torch.zeros_like(x)

    monkeypatch.setattr(operations, "routed_experts", routed)
    held = drawn("fp8", 1, INTER, HIDDEN)
    given = held, *routing("whole", tokens, 1, 1), held.gate_up.expert(0), held.down.expert(0)
    inputs = [normal(tokens, HIDDEN) for _ in range(2)]
    wanted = [together(x, *given) for x in inputs]
    torch.cuda.synchronize()
    found = []
    for x in inputs:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(together(x, *given))
    torch.cuda.synchronize()
    assert same(tuple(found), tuple(wanted))


@pytest.mark.parametrize("before", [("int4", 64), ("int4", 1024), ("fp8", 64), ("fp8", 512), ("fp8", 4096)])
def test_kernels_of_a_stream_share_its_counters(before: tuple[str, int]) -> None:
    """A fused launch of many tiles and groups counts in words that others have used before it."""
    kind, tokens = before
    other = operation(kind, tokens, 6)
    given, x, chosen = experts_of("fp8", 2048), normal(24, HIDDEN), routing("whole", 24, TOP_K, EXPERTS)
    wanted = given(x, *chosen, choice=[1, 16, 2, 1, 1])
    workspace.release()
    other()
    assert_words_are_clear()
    assert torch.equal(given(x, *chosen, choice=[1, 16, 2, 1, 1]), wanted)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("fp8", 16), ("fp8", 512), ("int4", 16), ("int4", 512), ("int4 w2_bf16", 16), ("int4 w2_bf16", 128)],
)
def test_beside_the_next_launch(kind: str, tokens: int, next_launch: Callable[[Call], None]) -> None:
    """What a stage of the ring holds is read before it is filled anew."""
    next_launch(operation(kind, tokens, 7))


def captured(call: Call) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
        for _ in range(3):
            result = call()
    return graph, result


@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_graphs_of_one_capture_stream_replayed_at_once(kind: str, tokens: int, repeats: int = 50) -> None:
    """And a third launch by launch beside them, at more tokens: its memory grows while the graphs hold theirs.

    A graph clears its own control words, also without a call before it; releasing the others does not touch them.
    """
    calls = [operation(kind, tokens, seed) for seed in range(2)]
    wanted = [call() for call in calls]
    torch.cuda.synchronize()
    workspace.release()
    graphs = [captured(call) for call in calls]
    workspace.release()
    beside = operation(kind, 16 if kind == "router" else tokens + 8, 9)
    also = beside()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(repeats):
        for stream, action in zip(streams, (graphs[0][0].replay, graphs[1][0].replay, beside), strict=True):
            with torch.cuda.stream(stream):
                again = action()
    torch.cuda.synchronize()
    assert all(same(result, right) for (_, result), right in zip(graphs, wanted, strict=True))
    assert again is not None and same(again, also)


@pytest.mark.parametrize(("kind", "tokens"), [*CASES[:-1], ("fp8", 8), ("fp8", 2100), ("int4", 8), ("int4", 33)])
def test_nothing_is_read_before_it_is_written(monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int) -> None:
    call = operation(kind, tokens, 5)
    wanted = call()[0]
    lay = workspace.scratch

    def poisoned(layout: workspace.Layout, device: torch.device) -> workspace.Scratch:
        memory = lay(layout, device)
        memory.owners[0].fill_(255)
        return memory

    monkeypatch.setattr("kimi_k2.kernels.experts.launch.scratch", poisoned)
    assert torch.equal(call()[0], wanted)
