"""Scratch memory of the kernels, on a CPU whose streams and captures are said by the test."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_k2.kernels.common import workspace
from kimi_k2.kernels.experts import fp8 as moe_fp8
from kimi_k2.kernels.experts import w4a16 as moe_w4a16
from kimi_k2.kernels.experts.launch import token_ranges
from kimi_k2.kernels.experts.tuning import ExpertChoice

CPU = torch.device("cpu")
HIDDEN, TOP_K = 7168, 8
Place = Callable[..., None]


@pytest.fixture
def stand_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Say which stream and capture the calls that follow are made on; the device's number is given with them."""

    def stand(stream: int, capture: int = 0, device: int = 0) -> None:
        monkeypatch.setattr(workspace, "_place", lambda _: (device, stream, capture))

    stand(1)
    workspace.release()
    yield stand
    workspace.release()


def layouts(
    module: Any, tokens: int, choice: ExpertChoice, inter: int = 256
) -> tuple[workspace.Layout, workspace.Sizes]:
    shape = tokens, TOP_K, 384, HIDDEN, inter
    return module._layout(*shape, choice), module.workspace_sizes(*shape, choice)


CHOICES = [
    ExpertChoice(True, 16, 4, 2, 1),
    ExpertChoice(True, 16, 1, 1, 4),
    ExpertChoice(False, 32, 2, 1, 1),
    ExpertChoice(False, 64, 1, 1, 2),
]


@pytest.mark.parametrize("module", [moe_fp8, moe_w4a16])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_buffers_do_not_overlap(stand_on: Place, module: Any, choice: ExpertChoice, tokens: int) -> None:
    layout, sizes = layouts(module, tokens, choice)
    memory = workspace.scratch(layout, CPU)
    assert set(memory.addresses) == set(sizes)
    spans = sorted((memory.addresses[n], memory.addresses[n] + count * t.itemsize) for n, (count, t) in sizes.items())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    owned = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in memory.owners]
    assert all(any(low <= begin and end <= high for low, high in owned) for begin, end in spans)
    data = memory.owners[0].data_ptr()
    assert all((memory.addresses[name] - data) % 512 == 0 for name in layout.data)


@pytest.mark.parametrize("module", [moe_fp8, moe_w4a16])
def test_a_flag_of_one_shape_is_never_a_counter_of_another(stand_on: Place, module: Any) -> None:
    """Also as the memory grows: flags keep the numbers of launches, counters must be zero."""
    flagged: set[int] = set()
    counted: set[int] = set()
    kept: list[Tensor] = []  # so that no address comes twice
    for tokens, choice in itertools.product((4, 64, 4000, 16), CHOICES):
        if choice.fused and tokens > 64:
            continue
        layout, _ = layouts(module, tokens, choice)
        memory = workspace.scratch(layout, CPU)
        kept.append(memory.owners[1])
        flags = memory.addresses["flags"]
        flagged |= set(range(flags, flags + 4 * layout.flag_words, 4))
        first = memory.addresses["ctrl"] + 4 * workspace.HEADER_WORDS
        counted |= set(range(first, first + 4 * layout.counter_words, 4))
    assert flagged and counted and not flagged & counted


def test_a_stream_keeps_its_words(stand_on: Place) -> None:
    first = workspace.control(100, 100, CPU)
    first[0] = 5
    assert workspace.control(2000, 50, CPU).data_ptr() == first.data_ptr(), "as long as they suffice"
    assert workspace.control(1, 1, CPU)[0] == 5
    larger = workspace.control(10, 2**20, CPU)
    assert larger.numel() >= 2**21 and not larger.any()
    assert workspace.control(100, 100, CPU).data_ptr() == larger.data_ptr(), "never smaller again"


@pytest.mark.parametrize("other", [{"stream": 2}, {"stream": 1, "device": 1}, {"stream": 1, "capture": 7}])
def test_streams_devices_and_captures_share_nothing(stand_on: Place, other: dict[str, int]) -> None:
    mine = workspace.control(1, 1, CPU), workspace.marked(64, CPU)
    stand_on(**other)
    theirs = workspace.control(1, 1, CPU), workspace.marked(64, CPU)
    assert not {t.data_ptr() for t in mine} & {t.data_ptr() for t in theirs}
    assert not theirs[0].any() and bool((theirs[1] == -1).all())
    stand_on(1)
    assert workspace.control(1, 1, CPU).data_ptr() == mine[0].data_ptr()


def test_two_captures_on_one_stream_share_nothing(stand_on: Place) -> None:
    """Their graphs may be replayed at the same time; the graph, not this module, keeps a finished capture's memory."""
    stand_on(1, capture=7)
    first = workspace.control(1, 1, CPU)
    assert workspace.control(1, 1, CPU).data_ptr() == first.data_ptr()
    stand_on(1, capture=8)
    second = workspace.control(1, 1, CPU)
    assert second.data_ptr() != first.data_ptr()
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    assert len(workspace._kept) == 1


def test_streams_are_bounded(stand_on: Place) -> None:
    for stream in range(1000):
        stand_on(stream)
        workspace.control(1, 1, CPU)
    assert len(workspace._kept) == workspace.MAX_STREAMS
    workspace.release()
    assert not workspace._kept


@pytest.mark.parametrize("module", [moe_fp8, moe_w4a16])
@pytest.mark.parametrize("inter", [256, 2048])
def test_data_is_bounded(module: Any, inter: int) -> None:
    choice = ExpertChoice(False, 64, 1, 1, 2)

    def needs(count: int) -> int:
        size: int = layouts(module, count, choice, inter)[0].bytes
        return size

    for tokens in (1, 3000, 16384, 16385, 65536, 131072, 262144):
        ranges = token_ranges(tokens, needs)
        assert [begin for begin, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
        assert ranges[0][0] == 0 and ranges[-1][1] == tokens
        assert max(needs(end - begin) for begin, end in ranges) <= workspace.MAX_BYTES
        assert len(ranges) <= -(-tokens // 16384), "16,384 tokens fit"


def test_few_sizes_over_all_lengths() -> None:
    """So that the allocator finds blocks again; none is more than an eighth too large."""
    needs = [
        (layout.bytes, sum(count * t.itemsize for name, (count, t) in sizes.items() if name in layout.data))
        for layout, sizes in (layouts(moe_fp8, n, ExpertChoice(False, 64, 1, 1, 2)) for n in range(512, 16384, 97))
    ]
    assert len({given for given, _ in needs}) <= 50
    assert all(asked <= given <= 1.13 * asked for given, asked in needs)
