# ruff: noqa: E501 (HLO has one instruction a line)
"""Counts in HLO text, against figures worked out by hand."""

from __future__ import annotations

import pytest
from hlo import HloParseError, count, peak_live_bytes

from kimi_k2.plan.roofline import Collective, GraphCounts, Machine, roofline

MODULE = """HloModule example

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %x, f32[] %y)
}

ENTRY %main (p0: s64[2,1], p1: f8e4m3fn[6,4,8], p2: bf16[3,4], p3: f32[10,5]) -> (f32[2,8], bf16[3,8]) {
  %p1 = f8e4m3fn[6,4,8]{2,1,0} parameter(1)
  %p0 = s64[2,1]{1,0} parameter(0)
  %chosen = f8e4m3fn[2,4,8]{2,1,0} gather(f8e4m3fn[6,4,8]{2,1,0} %p1, s64[2,1]{1,0} %p0), offset_dims={1,2}, slice_sizes={1,4,8}
  %wide = bf16[2,4,8]{2,1,0} convert(f8e4m3fn[2,4,8]{2,1,0} %chosen)
  %p2 = bf16[3,4]{1,0} parameter(2)
  %dot = bf16[3,2,8]{2,1,0} dot(bf16[3,4]{1,0} %p2, bf16[2,4,8]{2,1,0} %wide), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %p3 = f32[10,5]{1,0} parameter(3)
  %part = f32[2,5]{1,0} slice(f32[10,5]{1,0} %p3), slice={[0:2], [0:5]}
  %both = (bf16[3,2,8]{2,1,0}, bf16[]) all-reduce(bf16[3,2,8]{2,1,0} %dot, bf16[] %token), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %out = (f32[2,5]{1,0}) tuple(f32[2,5]{1,0} %part)
}
"""


def test_reads_flops_and_collectives() -> None:
    counts = count(MODULE, {1: "experts.weight"})
    assert counts.held == {"p0": 16, "experts.weight": 192, "p2": 24, "p3": 200}
    # Of the experts two of six are gathered, of p3 two rows of ten are sliced.
    assert counts.read == {"p0": 16, "experts.weight": 64, "p2": 24, "p3": 40}
    assert counts.flops == 2 * (3 * 2 * 8) * 4
    assert counts.collectives == {Collective("all-reduce", 4, 96): 1}
    assert counts.bytes_read("experts") == 64


ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %x, f32[] %y)
}
"""


def module(*lines: str) -> str:
    """An entry computation of these lines, the last one its root."""
    body = "\n".join(f"  {line}" for line in lines[:-1])
    return f"HloModule m\n{ADD}\nENTRY %main () -> f32[] {{\n{body}\n  ROOT {lines[-1]}\n}}\n"


def test_a_gather_reads_its_rows_however_often_they_come() -> None:
    """20 rows of 4 x 2 bytes out of a bank of 3: more than the bank holds."""
    counts = count(
        module(
            "%bank = bf16[3,4]{1,0} parameter(0)",
            "%rows = s64[20,1]{1,0} parameter(1)",
            "%out = bf16[20,4]{1,0} gather(bf16[3,4]{1,0} %bank, s64[20,1]{1,0} %rows), offset_dims={1}, slice_sizes={1,4}",
        )
    )
    assert counts.held["p0"] == 24
    assert counts.read == {"p0": 160, "p1": 160}
    assert counts.moved == {}


def test_index_add_reads_updates_and_reads_and_writes_rows() -> None:
    """torch's index_add is a scatter whose computation adds: 6 rows of 5 floats, three times; 2 if rows are replaced."""
    scatter = (
        "%out = f32[9,5]{1,0} scatter(f32[9,5]{1,0} %zero, s64[6]{0} %rows, f32[6,5]{1,0} %wide),"
        " update_window_dims={1}, to_apply=%add"
    )
    lines = (
        "%rows = s64[6]{0} parameter(0)",
        "%updates = bf16[6,5]{1,0} parameter(1)",
        "%wide = f32[6,5]{1,0} convert(bf16[6,5]{1,0} %updates)",
        "%none = f32[] constant(0)",
        "%zero = f32[9,5]{1,0} broadcast(f32[] %none), dimensions={}",
    )
    counts = count(module(*lines, scatter))
    assert counts.moved == {"scatter": 3 * 6 * 5 * 4}
    assert counts.memory_bytes == 6 * 8 + 6 * 5 * 2 + 360
    replaced = ADD.replace("%add", "%last").replace("add(f32[] %x, f32[] %y)", "copy(f32[] %y)")
    assert count(module(*lines, scatter.replace("%add", "%last")) + replaced).moved == {"scatter": 2 * 6 * 5 * 4}


def test_a_gather_of_what_was_computed_moves_its_rows() -> None:
    counts = count(
        module(
            "%hidden = bf16[4,8]{1,0} parameter(0)",
            "%rows = s64[10,1]{1,0} parameter(1)",
            "%twice = bf16[4,8]{1,0} add(bf16[4,8]{1,0} %hidden, bf16[4,8]{1,0} %hidden)",
            "%out = bf16[10,8]{1,0} gather(bf16[4,8]{1,0} %twice, s64[10,1]{1,0} %rows), offset_dims={1}",
        )
    )
    assert counts.moved == {"gather": 10 * 8 * 2}
    assert counts.read == {"p0": 64, "p1": 80}


def test_a_slice_reads_its_part_and_a_dot_all_of_it_once() -> None:
    """Two slices of a parameter, and two dots with another, which is read once."""
    counts = count(
        module(
            "%cache = bf16[16,4]{1,0} parameter(0)",
            "%weight = bf16[4,4]{1,0} parameter(1)",
            "%at = s32[] parameter(2)",
            "%a = bf16[2,4]{1,0} slice(bf16[16,4]{1,0} %cache), slice={[0:2], [0:4]}",
            "%b = bf16[3,4]{1,0} dynamic-slice(bf16[16,4]{1,0} %cache, s32[] %at, s32[] %at), dynamic_slice_sizes={3,4}",
            "%c = bf16[2,4]{1,0} dot(bf16[2,4]{1,0} %a, bf16[4,4]{1,0} %weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            "%d = bf16[3,4]{1,0} dot(bf16[3,4]{1,0} %b, bf16[4,4]{1,0} %weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            "%out = (bf16[2,4]{1,0}, bf16[3,4]{1,0}) tuple(bf16[2,4]{1,0} %c, bf16[3,4]{1,0} %d)",
        )
    )
    assert counts.read == {"p0": 2 * 4 * 2 + 3 * 4 * 2, "p1": 32, "p2": 4}
    assert counts.flops == 2 * (2 * 4) * 4 + 2 * (3 * 4) * 4


def test_an_all_reduce_is_its_result_once() -> None:
    counts = count(
        module(
            "%p = f32[7]{0} parameter(0)",
            "%once = f32[7]{0} all-reduce(f32[7]{0} %p), replica_groups=[2,32]<=[64], to_apply=%add",
            "%again = f32[7]{0} all-reduce(f32[7]{0} %once), replica_groups=[2,32]<=[64], to_apply=%add",
        )
    )
    assert counts.collectives == {Collective("all-reduce", 32, 28): 2}
    assert counts.collective_bytes == 56


def test_arrays_live_until_their_last_use() -> None:
    """40 bytes and their 80 in float32 are alive together, then 80 and 80; the reshaped view keeps the first of them."""
    peak = peak_live_bytes(
        module(
            "%p = bf16[20]{0} parameter(0)",
            "%half = bf16[20]{0} negate(bf16[20]{0} %p)",
            "%wide = f32[20]{0} convert(bf16[20]{0} %half)",
            "%view = f32[4,5]{1,0} reshape(f32[20]{0} %wide)",
            "%other = f32[4,5]{1,0} exponential(f32[4,5]{1,0} %view)",
            "%sum = f32[4,5]{1,0} add(f32[4,5]{1,0} %view, f32[4,5]{1,0} %other)",
            "%small = f32[] reduce(f32[4,5]{1,0} %sum)",
            "%out = (f32[]) tuple(f32[] %small)",
        )
    )
    assert peak.nbytes == 240
    assert [one.name for _, one in peak.largest] == ["wide", "other", "sum"]


def test_roofline_adds_communication_to_the_larger_of_memory_and_compute() -> None:
    machine = Machine("unit", 1.0, 1.0, 1.0, 1000.0, "made up")
    modelled = roofline(count(MODULE), machine)
    assert modelled.memory == 144
    assert modelled.compute == 384
    # A ring all-reduce of 96 bytes over 4 ranks moves 2 * 3/4 of them.
    assert modelled.communication == 144 + 1000
    assert modelled.bound == 384 + 1144
    # A reduce-scatter's result is one rank's part of what it moves; an all-gather's is the whole.
    for kind, moved in (("reduce-scatter", 96 * 4 * 3 / 4), ("all-gather", 96 * 3 / 4)):
        alone = GraphCounts(collectives={Collective(kind, 4, 96): 2})
        assert roofline(alone, machine).communication == 2 * (moved + 1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no ENTRY"),
        ("ENTRY %m () -> f32[] {\n  gibberish\n}", "cannot read"),
        ("ENTRY %m () -> q7[3] {\n  %p = q7[3]{0} parameter(0)\n}", "unknown element type q7"),
    ],
)
def test_unreadable_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(HloParseError, match=message):
        count(text)
