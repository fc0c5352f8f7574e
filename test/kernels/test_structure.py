"""Arguments of launches: the structures that Python reads from CUDA C++ lie in memory as a compiler lays them out."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import zeros

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention import mla_cuda, query
from kimi_k2.kernels.comm import push_all_reduce
from kimi_k2.kernels.common import workspace
from kimi_k2.kernels.common.build import KERNELS
from kimi_k2.kernels.common.structure import Structure, structure
from kimi_k2.kernels.experts import fp8, fp8_decode, w4a16
from kimi_k2.kernels.router import gate, norm_route, router_gemm

CASES = [
    (query.Arguments, "attention/csrc/entry.cuh", "attention/csrc/query.cu"),
    (query.AbsorbArguments, "attention/csrc/entry.cuh", "attention/csrc/absorb.cu"),
    (mla_cuda._Arguments, "attention/csrc/mla.cuh"),
    (push_all_reduce.Arguments, "comm/csrc/all_reduce.cu"),
    (fp8_decode.Arguments, "experts/csrc/expert_arguments.cuh"),
    (fp8.Arguments, "experts/csrc/fp8.cuh"),
    (w4a16.Arguments, "experts/csrc/fp8.cuh", "experts/csrc/w4a16.cuh"),
    (w4a16.DecodeArguments, "experts/csrc/w4a16_decode.cu"),
    (gate.GateArguments, "router/csrc/gate.cuh"),
    (router_gemm._RouterArguments, "router/csrc/gate.cuh", "router/csrc/router_gemm.cuh"),
]
OPAQUE = ("__nv_bfloat16", "int4", "uint4", "uint2", "PlannedMerge")


def program(ours: type[Structure], sources: tuple[str, ...], shift: int) -> str:
    """C++ that compiles if sizes and offsets are those of ours, which are taken as larger by `shift`."""
    names = {name for kind in ours.__mro__ for name, *_ in kind.__dict__.get("_fields_", ())}
    lines = ["#include <cstddef>", "#include <cstdint>", *(f"struct {name};" for name in OPAQUE)]
    for source in sources:
        text = (KERNELS / source).read_text()
        lines += re.findall(r"^constexpr int .*kMaxRanks.*;$", text, re.M)
        structures = re.findall(r"^struct \w*Arg\w*(?: : [\w:]+)? \{$.*?^\};", text, re.M | re.S)
        lines += [one.replace("moe::", "") for one in structures]
    lines += [f"static_assert(sizeof({ours.__name__}) == {ctypes.sizeof(ours)});"]
    for name in sorted(names):
        lines.append(f"static_assert(offsetof({ours.__name__}, {name}) == {getattr(ours, name).offset + shift});")
    return "\n".join(lines)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("ours", "sources"), [(ours, sources) for ours, *sources in CASES])
def test_layouts_are_the_compilers(ours: type[Structure], sources: tuple[str, ...], tmp_path: Path) -> None:
    for shift in (0, 4):
        (tmp_path / "layout.cpp").write_text(program(ours, sources, shift))
        command = ["g++", "-std=c++17", "-fsyntax-only", "-w", str(tmp_path / "layout.cpp")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode == 0) == (shift == 0), done.stderr


def test_values_are_set_in_order_and_by_name() -> None:
    tensor = zeros(3)
    made = fp8_decode.Arguments(tensor, None, tensor[1:], hidden=7, ids64=True)
    assert (made.x, made.topk_indices, made.topk_weights) == (tensor.data_ptr(), None, tensor.data_ptr() + 4)
    assert (made.hidden, made.ids64, made.tokens) == (7, 1, 0)
    with pytest.raises(AttributeError, match="hiden"):
        fp8_decode.Arguments(hiden=7)
    with pytest.raises(AttributeError, match="hiden"):
        made.hiden = 7


def test_a_structure_is_one_class_in_whichever_file_it_is_read() -> None:
    structures: list[Any] = [case[0] for case in CASES]
    nested = [kind for one in structures for _, kind in one._fields_ if issubclass(kind, Structure)]
    assert nested == [gate.GateArguments]
    held = gate.GateArguments(tokens=3, scale=0.5)
    made = router_gemm._RouterArguments(gate=held, hidden=7)
    assert (made.gate.tokens, made.gate.scale, made.hidden) == (3, 0.5, 7)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Structure]:
    """The structures that launches get, on a machine without a GPU."""
    made: list[Structure] = []

    def launch(library: str, function: str, operation: str, device: object, *arguments: object) -> None:
        made.extend(one for one in arguments if isinstance(one, Structure))

    for module in (fp8, fp8_decode, w4a16, gate, router_gemm, query, mla_cuda):
        monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(module, "hopper", lambda *_: ("NVIDIA H200", 132), raising=False)
    monkeypatch.setattr(norm_route, "all_resident", lambda *_: True)
    for control, value in (("control", 0), ("marked", -1)):
        words = torch.full((2**16,), value, dtype=torch.int32)
        monkeypatch.setattr(workspace, control, lambda *_, words=words: words)
    monkeypatch.setattr(router_gemm, "marked", workspace.marked)
    return made


BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return zeros(*shape, dtype=dtype)


def test_every_launch_fills_its_structure(launched: list[Structure]) -> None:
    """The host's code up to the launch; what a tensor is given for is its address."""
    x, indices, scores = empty(2, 1024), zeros(2, 2, dtype=torch.int64), zeros(2, 2)
    blocks = (empty(4, 256, 1024, dtype=E4M3), zeros(4, 2, 8), empty(4, 1024, 128, dtype=E4M3), zeros(4, 8, 1))
    shared = [tensor[0] for tensor in blocks]
    packed = zeros(4, 256, 128, dtype=torch.int32), empty(4, 256, 32), zeros(4, 1024, 16, dtype=torch.int32)
    fp8.moe_fp8.function(x, *blocks, indices, scores)
    for parts in (None, [2, 4, 1]):
        fp8_decode.moe_decode.function(x, *blocks, indices, scores, None, *shared, parts)
    for choice in (None, [0, 32, 2, 1, 1]):
        w4a16.moe_w4a16.function(x, *packed, empty(4, 1024, 4), indices, scores, choice=choice)
    bias, weight, norm = zeros(384), empty(384, 1024), empty(1024)
    gate.fused_gate.function(zeros(2, 384), bias, 8)
    router_gemm.router_gemm.function(x, weight)
    for launches in (1, 2):
        router_gemm.router_decode.function(x, weight, bias, 8, launches=launches, inverse=zeros(2))
    norm_route.add_norm_route.function(x, x, norm, 1e-6, weight, bias, 8)
    angles, slots, w_uk, cache = empty(2, 32), zeros(2, dtype=torch.int64), empty(8, 128, 512), empty(2, 64, 576)
    rest = empty(512), angles, angles, slots, w_uk, cache
    query.query_and_entry.function(empty(2, 2112), empty(1536), empty(1536, 1536), None, *rest, 1e-6, 1e-6)
    query.absorb.function(empty(2, 1536), empty(2, 2112)[:, 1536:], *rest, 1e-6)
    lengths, table, plan = zeros(2, dtype=torch.int32), zeros(2, 1, dtype=torch.int32), zeros(200, 4, dtype=torch.int32)
    given = empty(2, 8, 576), cache, lengths, 0.1
    mla_cuda.run(*given, table, 2)
    mla_cuda.run_planned(*given, None, plan)
    mla_cuda.run_planned(empty(2, 8, 576), cache.to(E4M3), lengths, 0.1, table, plan, terms=1)
    push_all_reduce.fill_arguments(x, x, lengths, [1, 2], 4096, 1)
    assert " ".join(type(one).__name__ for one in launched) == (
        "Fp8Args ExpertArguments ExpertArguments DecodeArguments Args GateArgs RouterArgs RouterArgs RouterArgs"
        " GateArgs RouterArgs QueryArguments AbsorbArguments Arguments Arguments Arguments"
    )
    decode, router = launched[1], launched[10]
    assert launched[2].shared_down_parts == 1
    assert (decode.x, decode.shared_down_scale) == (x.data_ptr(), shared[3].data_ptr())
    assert (router.gate.bias, router.gate.experts, router.delta, router.fused) == (
        bias.data_ptr(),
        384,
        x.data_ptr(),
        1,
    )
    assert (launched[13].table, launched[14].table, launched[14].plan) == (table.data_ptr(), None, plan.data_ptr())


def test_what_is_no_structure_of_plain_fields_is_refused() -> None:
    with pytest.raises(KernelError, match="there is no structure Nothing"):
        structure("router/csrc/gate.cuh", "Nothing")
    with pytest.raises(KernelError, match=r"RouterSmem: .* is no declaration of plain fields"):
        structure("router/csrc/router_gemm.cuh", "RouterSmem")
