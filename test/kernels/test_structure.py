"""Arguments of launches: the structures that Python reads from CUDA C++ lie in memory as a compiler lays them out."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention import mla_cuda, query
from kimi_k2.kernels.comm import push_all_reduce
from kimi_k2.kernels.common.build import KERNELS
from kimi_k2.kernels.common.structure import Structure, structure
from kimi_k2.kernels.experts import fp8, fp8_decode, w4a16
from kimi_k2.kernels.router import gate, router_gemm

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


def test_what_is_no_structure_of_plain_fields_is_refused() -> None:
    with pytest.raises(KernelError, match="there is no structure Nothing"):
        structure("router/csrc/gate.cuh", "Nothing")
    with pytest.raises(KernelError, match=r"RouterSmem: .* is no declaration of plain fields"):
        structure("router/csrc/router_gemm.cuh", "RouterSmem")
    with pytest.raises(AttributeError, match="hiden"):
        fp8_decode.Arguments(hiden=7)
