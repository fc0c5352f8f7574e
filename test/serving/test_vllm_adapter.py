"""What the plug-in reaches of vLLM is all in its adapter's tables, and in the vLLM that is installed."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_k2.serving.vllm import adapter

SOURCES = {
    path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in Path(adapter.__file__).parent.glob("*.py")
}
LISTED = {name for names in (*adapter.ATTRIBUTES.values(), *adapter.VARYING.values()) for name in names}
# Variables here that hold objects of vLLM's.
THEIRS = {"runner", "scheduled", "cached", "common", "common_attn_metadata", "vllm_config", "drafter"}
# What is asked of such objects by name, and of what they hold: PyTorch's, and Python's.
PLAIN = {
    name for kind in (torch.Tensor, torch.device, torch.Event, dict, list, tuple, deque, str) for name in dir(kind)
}
# Ours, in an object of vLLM's; and fields by which `flags` and `support` know what they leave to vLLM.
OURS = {"of_kimi_k2", "class_name", "models", "name"}


@pytest.fixture(scope="module")
def root() -> Path:
    """The folder of the vLLM that is installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vllm (docs/engines.md): not importable here: vllm")
    return Path(spec.origin).parents[1]


def chain(node: ast.expr) -> list[str]:
    """`a.b[0].c` as a, b, c; empty for what begins with no name."""
    names: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        node = node.value
    return [*reversed([*names, node.id])] if isinstance(node, ast.Name) else []


def test_the_adapter_alone_imports_vllm() -> None:
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            if module == "adapter":
                continue
            assert not (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"), module
            assert not (isinstance(node, ast.Import) and any(one.name.startswith("vllm") for one in node.names)), module


def test_every_name_is_used_and_in_the_table() -> None:
    text = {module: ast.unparse(tree) for module, tree in SOURCES.items() if module != "adapter"}
    for name in adapter.NAMES:
        assert any(re.search(rf"\b{name}\b", one) for one in text.values()), name
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == adapter.__name__:
                assert {one.name for one in node.names} <= {*adapter.NAMES, "Deployment"}


def test_every_attribute_is_in_the_table() -> None:
    """Of the configuration none is read but by a name of ours."""
    unlisted = set()
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            names = chain(node) if isinstance(node, ast.Attribute) else []
            if names[:1] == ["self"]:
                names = names[1:]
            if names[:1] == ["it"]:
                unlisted |= {(module, name) for name in names[1:2] if name not in adapter.SETTINGS}
            if names and names[0] in THEIRS:
                unlisted |= {(module, name) for name in names[1:] if name not in LISTED | PLAIN | OURS}
    assert not unlisted


def test_nothing_is_lacking(root: Path) -> None:
    assert adapter.OLDEST <= adapter.version(root) <= adapter.NEWEST
    assert adapter.lacking(root) == []


def test_a_renamed_name_is_seen(root: Path, tmp_path: Path) -> None:
    """Of a copy, in which each module of the tables has its rows by other names."""
    rows: dict[str, set[str]] = {module: set(names) for module, names in adapter.ATTRIBUTES.items()}
    for name, row in adapter.NAMES.items():
        for module in row.modules:
            rows.setdefault(module, set()).add(name)
    for module, names in rows.items():
        file = adapter.file_of(module, root)
        if file.is_file():
            copy = tmp_path / file.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = re.sub(rf"\b({'|'.join(names)})\b", r"\1_renamed", file.read_text(encoding="utf-8"))
            copy.write_text(text, encoding="utf-8")
    version = Path("vllm", "_version.py")
    (tmp_path / version).write_text((root / version).read_text(encoding="utf-8"), encoding="utf-8")
    wanted = {f"{row.modules[0]}: {name}" for name, row in adapter.NAMES.items()}
    wanted |= {f"{module}: {name}" for module, names in adapter.ATTRIBUTES.items() for name in names}
    assert wanted <= set(adapter.lacking(tmp_path))


def test_a_name_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(adapter.NAMES, "Gone", adapter.Row("a test", ("json.decoder", "json.nowhere")))
    with pytest.raises(ImportError, match=r"vLLM has no Gone in json\.decoder or json\.nowhere"):
        vars(adapter)["__getattr__"]("Gone")
    unknown: Any = adapter
    with pytest.raises(AttributeError, match="no attribute Unknown"):
        unknown.Unknown  # noqa: B018
