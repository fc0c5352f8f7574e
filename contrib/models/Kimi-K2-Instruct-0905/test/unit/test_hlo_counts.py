# ruff: noqa: E501 (HLO has one instruction a line)
"""Counts in HLO text, against figures worked out by hand."""

from __future__ import annotations

import pytest

from kimi_k2.plan.hlo import Collective, HloParseError, count
from kimi_k2.plan.roofline import Machine, roofline

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


def test_roofline_adds_communication_to_the_larger_of_memory_and_compute() -> None:
    machine = Machine("unit", 1.0, 1.0, 1.0, 1000.0, "made up")
    modelled = roofline(count(MODULE), machine)
    assert modelled.memory == 144
    assert modelled.compute == 384
    # A ring all-reduce of 96 bytes over 4 ranks moves 2 * 3/4 of them.
    assert modelled.communication == 144 + 1000
    assert modelled.bound == 384 + 1144


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
