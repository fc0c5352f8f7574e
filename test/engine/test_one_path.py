"""Attention stands once for each purpose: the plain model, the engine, and one arrangement a Neuron framework."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "kimi_k2", ROOT / "contrib" / "models" / "Kimi-K2-Instruct-0905" / "src"
# What a class or a function of a module uses, by the last part of the name. NxDI writes what `_entries` returns.
QUERY = {"q_b_proj", "rotated_queries", "query_and_entry", "absorb_and_store"}
WRITE = {"store_entries", "store_slots", "update", "query_and_entry", "absorb_and_store", "write", "_entries"}
ATTENTION = {"attend_values", "mla_decode", "mla_absorbed_attention", "mla_naive_attention", "softmax"}
# The operations themselves, their kernels, and programs that time or check kernels one by one.
APART = {"ops", "kernels", "nki", "bench"}


def used(node: ast.AST) -> Iterator[str]:
    """Names of what is called or handed on, and texts, by which weights are named too."""
    for one in ast.walk(node):
        if isinstance(one, (ast.Attribute, ast.Name)):
            yield one.attr if isinstance(one, ast.Attribute) else one.id
        elif isinstance(one, ast.Constant):
            yield str(one.value)


def joined(source: str) -> Iterator[str]:
    """Classes, and functions outside them, that project queries, write the cache and attend."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names = set(used(node))
            if names & QUERY and names & WRITE and names & ATTENTION:
                yield node.name


def test_where_attention_is_arranged() -> None:
    found = {
        f"{path.relative_to(source).as_posix()}: {name}"
        for source in SOURCES
        for path in sorted(source.rglob("*.py"))
        if path.relative_to(source).parts[0] not in APART
        for name in joined(path.read_text(encoding="utf-8"))
    }
    assert found == {
        "model/attention.py: MultiHeadLatentAttention",
        "engine/layer_step.py: LayerStep",
        "attention.py: KimiK2Attention",  # NxDI
        "neuron/torch_native/attention.py: Attention",
    }
