"""NKI's names by release, from `api.json` (`make_api` says from where), and what calls of them may look like."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

from nki_emulator.check.rules import RELEASES

# Parameters that take members of an enumeration.
ENUMERATED = {"engine", "dge_mode", "oob_mode", "reduce_cmd", "dma_engine", "perf_mode"}
# Not among the stubs, but in the prose or in AWS's kernels.
_ALSO = {
    "language": {"hbm", "ds", "range", "bool"},
    "isa": {"constants"},
    "collectives": {"ReplicaGroup"},
}


@cache
def _table() -> dict[str, dict[str, list[Any]]]:
    table: dict[str, dict[str, list[Any]]] = json.loads(Path(__file__).with_name("api.json").read_text())
    return table


def entry(module: str, name: str, release: str) -> Any:
    """What a name is in a release: parameters, "value" or {"members"}; None where it has none."""
    declared = None
    for first, parameters in _table()[module].get(name, []):
        if RELEASES.index(first) <= RELEASES.index(release):
            declared = parameters
    return "value" if declared is None and name in _ALSO[module] else declared


def member_missing(module: str, name: str, member: str, release: str) -> bool:
    """Whether a class of a module lacks a member; False where the release's members are not known."""
    declared = entry(module, name, release)
    return isinstance(declared, dict) and bool(declared["members"]) and member not in declared["members"]


def wrong_parameters(module: str, name: str, call: ast.Call, release: str) -> str:
    """What is wrong with a call's arguments; empty where nothing is."""
    takes = entry(module, name, release)
    if not isinstance(takes, list):
        return ""
    if len(call.args) > len(takes):
        return f"{name} takes at most {len(takes)} arguments"
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in takes:
            return f"{name} has no parameter {keyword.arg}"
    for position, argument in enumerate(call.args):
        if isinstance(argument, ast.Name) and argument.id in takes and takes[position] != argument.id:
            return f"{name}: {argument.id} stands where {takes[position]} is taken"
    return ""
