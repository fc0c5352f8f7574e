"""What the plug-in reaches of vLLM is all in its adapter's tables, and in the vLLM that is installed."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import deque
from pathlib import Path

import engines
import pytest
import torch

from kimi_k2.serving.vllm import adapter

SOURCES = {
    path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in Path(adapter.__file__).parent.glob("*.py")
}
LISTED = {name for names in (*adapter.ATTRIBUTES.values(), *adapter.VARYING.values()) for name in names}
# Modules that give what vLLM's objects say as types of ours; variables there that hold such objects.
READ = ("runner", "step", "verifying_runner")
THEIRS = {"of", "batch", "cached", "common", "drafter", "found", "manager", "scheduled", "state", "table", "worker",
          "wrapper"}  # fmt: skip
# What is asked of such objects by name, and of what they hold: PyTorch's, and Python's.
PLAIN = {
    name for kind in (torch.Tensor, torch.device, torch.Event, dict, list, tuple, deque, str) for name in dir(kind)
}
# Of types of ours, and of torch.distributed.
OURS = {*adapter.SETTINGS, "all_reduce", "positions", "propose", "seq_lens"}
# Of the adapter's own, what other modules import.
OWN = {"Deployment", "is_hopper", "platform", "unless_changed"}
# In other modules: what vLLM's methods do that ours of the same name follow, what vLLM puts into our model or asks of
# it, and what a builder has of its base.
INHERITED = {
    "worker": {"compile_or_warm_up_model", "execute_model", "sleep", "wake_up"},
    "model": {"lora_manager", "num_redundant_experts", "quant_config"},
    "chosen": {"capture_fn", "layer_id"},
    "attention": {"_cudagraph_support", "_init_reorder_batch_threshold", "block_size", "reorder_batch_threshold"},
}


@pytest.fixture(scope="module")
def root() -> Path:
    """The folder of the vLLM that is installed."""
    engines.need("vllm")
    return Path(str(importlib.util.find_spec("vllm").origin)).parents[1]  # type: ignore[union-attr]


def chain(node: ast.expr) -> list[str]:
    """`a.b[0].c` as a, b, c; empty for what begins with no name."""
    names: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        node = node.value
    return [*reversed([*names, node.id])] if isinstance(node, ast.Name) else []


def test_every_name_is_used_and_in_the_table() -> None:
    """And no other module imports vLLM."""
    functions = [node for node in SOURCES["adapter"].body if isinstance(node, ast.FunctionDef)]
    users = [ast.unparse(tree) for tree in (*(SOURCES[one] for one in SOURCES.keys() - {"adapter"}), *functions)]
    assert not any(re.search(r"^\s*(from|import) vllm\b", user, re.MULTILINE) for user in users)
    for name in adapter.NAMES:
        assert any(re.search(rf"\b{name}\b", user) for user in users), name
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == adapter.__name__:
                assert {one.name for one in node.names} <= OWN | adapter.NAMES.keys()


def test_every_attribute_is_in_the_table() -> None:
    """Of the configuration none is read but by a name of ours, of other objects none outside of `READ`."""
    unlisted, outside = set(), {module: set[str]() for module in INHERITED}
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            names = chain(node)
            if names[:1] == ["self"]:
                names = names[1:]
            if names[:1] == ["it"]:
                unlisted |= {(module, name) for name in names[1:2] if name not in adapter.SETTINGS}
            if module in READ and names and names[0] in THEIRS:
                unlisted |= {(module, name) for name in names[1:] if name not in LISTED | PLAIN}
            if module not in (*READ, "adapter") and node.attr in LISTED - PLAIN - OURS:
                outside.setdefault(module, set()).add(node.attr)
    assert not unlisted
    assert outside == INHERITED


def test_nothing_is_lacking(root: Path) -> None:
    assert adapter.OLDEST <= adapter.version(root) <= adapter.NEWEST
    assert adapter.lacking(root) == []


def test_a_renamed_name_is_seen(root: Path, tmp_path: Path) -> None:
    """Where each module of the tables has its rows by other names, and only asks for them by their own."""
    tables = [*adapter.ATTRIBUTES.items(), *((row.modules[0], (name,)) for name, row in adapter.NAMES.items())]
    for module, names in tables:
        file = adapter.file_of(module, tmp_path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as written:
            written.write("class Renamed:\n" + "".join(f"    {name}_renamed = other.{name}\n" for name in names))
    version = Path("vllm", "_version.py")
    (tmp_path / version).write_text((root / version).read_text(encoding="utf-8"), encoding="utf-8")
    wanted = {f"{module}: {name}" for module, names in tables for name in names}
    assert wanted <= set(adapter.lacking(tmp_path))
