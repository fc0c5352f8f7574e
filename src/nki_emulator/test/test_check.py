"""The language checker: right kernels pass at every release, wrong ones and the migration guide's old forms do not."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nki_emulator.check import ERROR, RELEASES, RULES, check
from nki_emulator.errors import NkiError
from nki_emulator.settings import settings

HEADER = """\
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
import nki
import nki.isa as nisa
import nki.language as nl
import nki.collectives as ncc
from nki.isa import dma_engine
"""


def made(path: Path, source: str, name: str = "kernel") -> Any:
    """A kernel of a source text, in a module of its own."""
    file = path / f"kernel_{len(list(path.iterdir()))}.py"
    file.write_text(HEADER + textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location("wrong_kernel", file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["wrong_kernel"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def body(*lines: str, arguments: str = "data", before: str = "") -> str:
    return f"{before}\n@nki.jit\ndef kernel({arguments}):\n" + "".join(f"    {line}\n" for line in lines)


TILE = "tile = nl.ndarray((128, 4), dtype=nl.int32, buffer=nl.sbuf)"


def with_class(text: str) -> str:
    return body("return C(data)", before=text)


# Of each rule at least two kernels that break it.
WRONG: dict[str, tuple[str, ...]] = {
    "is-operator": (body("if data is None:", "    return data"), body("return data if data is not None else 1")),
    "in-operator": (body("return 1 in (1, 2)"), body("if data.dtype not in (1, 2):", "    return data")),
    "matmul-operator": (body("return data @ data"), body("tile = (data @ data) + 1", "return tile")),
    "class-base": (
        with_class("class B(nl.NKIObject):\n    pass\nclass C(B):\n    pass"),
        with_class("class C(NamedTuple):\n    x: int"),
        with_class("class C:\n    pass"),
    ),
    "super": (
        with_class("class C(nl.NKIObject):\n    def __init__(self, x):\n        super().__init__()"),
        body("return super(nl.NKIObject, data)"),
    ),
    "decorator": (
        with_class("class C(nl.NKIObject):\n    @classmethod\n    def make(cls):\n        return cls()"),
        with_class(
            "import functools\nclass C(nl.NKIObject):\n    @functools.cache\n    def f(self):\n        return 1"
        ),
    ),
    "property": (
        with_class("class C(nl.NKIObject):\n    @property\n    def f(self):\n        return 1"),
        with_class("class C(nl.NKIObject):\n    x: int\n    @property\n    def y(self):\n        return self.x"),
    ),
    "signature": (body("return data", arguments="data, *, flag=True"), body("return data", arguments="*data")),
    "nested-function": (
        body("def inner():", "    return data", "return inner()"),
        body("class Inner(nl.NKIObject):", "    x: int", "return Inner()"),
    ),
    "lambda": (body("f = lambda x: x", "return f(data)"), body("return data.map(lambda x: x + 1)")),
    "closure": (
        body("global count", "count = 1", "return data"),
        body("n = 1", "def f():", "    nonlocal n", "    n = 2", "return n"),
    ),
    "comprehension": (body("return [x for x in (1, 2)]"), body("return sum(x for x in (1, 2))")),
    "container": (body("return {1, 2}"), body("return set((1, 2))")),
    "dictionary-key": (body("return {1: data}"), body("d = dict()", "d[2] = data", "return d")),
    "value": (body("return 2 ** 3 + 4294967296"), body("return 3j")),
    "statement": (body("import math", "return data"), body("with data:", "    pass"), body("del data")),
    "try": (
        body("try:", "    return data", "except ValueError:", "    return 1"),
        body("try:", "    x = data", "finally:", "    x = 1", "return x"),
    ),
    "raise": (body("raise ValueError('x')"), body("if data.shape[0] > 1:", "    raise TypeError", "return data")),
    "loop-else": (
        body("for x in range(2):", "    pass", "else:", "    x = 3", "return x"),
        body("x = 0", "while x < 2:", "    x += 1", "else:", "    x = 0", "return x"),
    ),
    "star": (body("return (*data.shape, 1)"), body("return max(*data.shape)")),
    "chained-slice": (body("one = slice(0, 1)", "return data[one]"), body("return data[slice(1, 2), :]")),
    "builtin": (body("return sorted(data.shape)"), body("return map(abs, data.shape)")),
    "rare-builtin": (body("return any(data.shape)"), body("return getattr(data, 'shape')")),
    "string-buffer": (
        body("return nl.ndarray((1, 1), dtype=nl.int8, buffer='sbuf')"),
        body("return nl.zeros((1, 1), dtype=nl.int8, buffer='psum')"),
    ),
    "integer-enumeration": (
        body(TILE, "nisa.dma_copy(dst=tile, src=data, dge_mode=2)"),
        body(TILE, "nisa.memset(dst=tile, value=0, engine=1)"),
    ),
    "api-name": (body("return nl.nothing(data)"), body("return nisa.engine.warp"), body("nisa.tensor_magic(data)")),
    "api-parameter": (
        body(TILE, "nisa.dma_copy(dst=tile, src=data, dst_rmw_op=nl.add)"),
        body(TILE, "nisa.memset(tile, 0, nisa.engine.vector, 'name', 1, 2)"),
        body("return ncc.all_reduce(data, data, None, nl.add, group=1)"),
    ),
    "jit-platform": (
        "@nki.jit(platform_target='trn2')\ndef kernel(data):\n    return data\n",
        "@nki.jit(mode='auto', platform_target='trn1')\ndef kernel(data):\n    return data\n",
    ),
    "jit-mode": (
        "@nki.jit(mode='trace')\ndef kernel(data):\n    return data\n",
        "@nki.jit(mode='torchxla')\ndef kernel(data):\n    return data\n",
    ),
    "old-namespace": (
        body("return neuronxcc.nki.language.load(data)", before="neuronxcc = None"),
        body("return neuronxcc.nki.isa.iota(data)", before="neuronxcc = None"),
    ),
    "deprecated-loop": (
        body("for i in nl.dynamic_range(4):", "    pass", "return data"),
        body("for i in nl.dynamic_range(0, 8, 2):", "    pass", "return data"),
    ),
    "deprecated-range": (
        body("for i in nl.affine_range(4):", "    pass", "return data"),
        body("for i in nl.sequential_range(4):", "    pass", "return data"),
    ),
}
# What stands beside them and is right.
RIGHT = (
    body("if data == None:", "    return data", "return data if data != None else 1"),
    with_class(
        "@dataclass\nclass C(nl.NKIObject):\n    x: int = 1\n    @staticmethod\n    def f(y):\n        return y"
    ),
    with_class("class E(Enum):\n    x = 1\nclass C(nl.NKIObject):\n    def __init__(self, x):\n        self.x = E.x"),
    body("d = {'a': 1}", "d['b'] = 2", "x = 0", "while x < 2:", "    x += 1", "print(f'{x}')", "return d"),
    body(TILE, "nisa.memset(tile, 0)", "nisa.dma_copy(dst=tile, src=data, dge_mode=nisa.dge_mode.hwdge)"),
    body("out = nl.ndarray((1, 1), dtype=nl.int8, buffer=nl.shared_hbm)", "return out", arguments="data, s=(1, 1)"),
)


@pytest.mark.parametrize("rule", RULES)
def test_a_wrong_kernel_is_found(rule: str, tmp_path: Path) -> None:
    """In the releases of the rule, with the file, the line and the document; in no other."""
    assert len(WRONG[rule]) >= 2
    for source in WRONG[rule]:
        kernel = made(tmp_path, source)
        for release in RELEASES:
            found = [finding for finding in check(kernel, release) if finding.rule == rule]
            assert bool(found) == RULES[rule].holds(release), (release, source)
            for finding in found:
                assert finding.file.startswith(str(tmp_path))
                assert finding.line > len(HEADER.splitlines())
                assert RULES[rule].source in str(finding)


@pytest.mark.parametrize("source", RIGHT)
def test_a_right_kernel_passes(source: str, tmp_path: Path) -> None:
    assert [str(finding) for release in RELEASES for finding in check(made(tmp_path, source), release)] == []


def test_what_a_kernel_calls_is_read_too(tmp_path: Path) -> None:
    inner = "def inner(x):\n    return x is None\n"
    held = "class C(nl.NKIObject):\n    def f(self, x):\n        return inner(x)\n"
    kernel = made(tmp_path, inner + held + body("c = C()", "return c.f(data)"))
    (found,) = check(kernel, "0.3")
    assert (found.rule, found.line) == ("is-operator", len(HEADER.splitlines()) + 2)


def test_what_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NkiError, match=r"one of 0\.3, 0\.4"):
        check(made(tmp_path, RIGHT[0]), "0.2")
    with pytest.raises(NkiError, match="a Python function with its source"):
        check(len, "0.3")


# --- The migration guide's own pieces, where it is at hand: NKI_SDK names a clone of aws-neuron-sdk.

SDK = os.environ.get("NKI_SDK")
# Names that the guide's pieces take for granted.
GIVEN = """\
neuronxcc = None
psum_tensor = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.psum)
dst_f4 = nl.ndarray((128, 8), dtype=nl.float4_e2m1fn_x4, buffer=nl.sbuf)
src_ui16 = nl.ndarray((128, 8), dtype=nl.uint16, buffer=nl.sbuf)
reg = nisa.register_alloc(1)
hbm_tensor = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
TILE, N, B, C, L, x = 128, 8, 1, 128, 8, data
"""


def pieces() -> list[Any]:
    """(what it is about, release, old form, new form) of nki/migration/index.rst, down to 0.2 to 0.3."""
    text = (Path(SDK or "") / "nki/migration/index.rst").read_text()
    text = text[: text.index("Migrating from NKI 0.1.0")]
    blocks = [
        (textwrap.dedent(match.group(2)).strip(), text[: match.start()])
        for match in re.finditer(r"\.\. code-block:: python\n\n((?:[ ]*\n)*)((?:[ ]+\S.*\n|\n)+)", text)
    ]
    found: list[Any] = []
    before = ""
    for code, above in blocks:
        title = re.findall(r"^(.+)\n[~-]{5,}$", above, re.M)[-1]
        halves = re.split(r"# NKI 0\.[23]\.0.*\n", code)
        if len(halves) == 3 and halves[0].strip() == "" and "NKI 0.2.0" in code:
            found.append(pytest.param("0.3", halves[1], halves[2], id=title))
        elif above.rstrip().endswith("Before:"):
            before = code
        elif above.rstrip().endswith("After:"):
            found.append(pytest.param("0.6", before, code, id=title))
    return found


def of_piece(path: Path, code: str) -> Any:
    """A piece as a kernel, or the kernel that it holds."""
    if "def my_kernel" in code:
        return made(path, re.sub(r"^my_kernel.*$", "", code, flags=re.M), "my_kernel")
    lines = [line for line in code.splitlines() if not line.startswith("from ")]
    text = GIVEN + textwrap.dedent("\n".join(lines)).replace("...,", "data,").replace("(...)", "(data)")
    end = "return output" if "output = " in code else "return data"
    return made(path, body(*text.splitlines(), end))


@pytest.mark.skipif(not SDK, reason="needs NKI_SDK, a clone of aws-neuron-sdk")
@pytest.mark.parametrize(("release", "old", "new"), pieces() if SDK else [])
def test_the_migration_guide(release: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = of_piece(tmp_path, old)
    if not check(kernel, release):  # what a run shows
        monkeypatch.setattr(settings, "release", release)
        arguments = np.zeros((128, 8), np.float32), [0, 3, 1, 2]
        with pytest.raises((NkiError, TypeError), match=r"PSUM|hwdge|whole number|shared_hbm|no lists|nl\.while_loop"):
            kernel(*arguments[: 2 if "in_perm" in old else 1])
    assert [str(finding) for finding in check(of_piece(tmp_path, new), release) if finding.level == ERROR] == []
