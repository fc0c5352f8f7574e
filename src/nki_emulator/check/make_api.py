"""Write `api.json`, NKI's names and parameters by release, from a clone of aws-neuron-sdk with its tags.

`python -m nki_emulator.check.make_api CLONE`. The API of 0.7 (SDK 2.33) is taken as that of 0.6: its tag is not public.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TAGS = {"0.3": "v2.29.0", "0.4": "v2.30.0", "0.5": "v2.31.0", "0.6": "v2.32.0"}
MODULES = ("language", "isa", "collectives")


def names_of(text: str) -> dict[str, Any]:
    """Public names of a module of stubs: parameters of a function, members of an enumeration, else []."""
    declared: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            declared[node.name] = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        elif isinstance(node, ast.ClassDef):
            declared[node.name] = {"members": sorted(_members(node))}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    declared.setdefault(target.id, "value")
    return {name: signature for name, signature in declared.items() if not name.startswith("_")}


def _members(node: ast.ClassDef) -> set[str]:
    members: set[str] = set()
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            members.add(statement.name)
        for target in getattr(statement, "targets", [getattr(statement, "target", None)]):
            if isinstance(target, ast.Name):
                members.add(target.id)
    return {name for name in members if not name.startswith("_")}


def main(clone: str) -> None:
    """Write the file beside this module: of each name, [release from which it holds, what it is or null], in order."""
    table: dict[str, dict[str, list[Any]]] = {module: {} for module in MODULES}
    for module, names in table.items():
        for release, tag in TAGS.items():
            path = f"{tag}:nki/api/nki/{module}/__init__.py"
            shown = subprocess.run(["git", "-C", clone, "show", path], check=True, capture_output=True, text=True)
            declared = names_of(shown.stdout)
            for name in sorted({*declared, *names}):
                history = names.setdefault(name, [])
                if not history or history[-1][1] != declared.get(name):
                    history.append([release, declared.get(name)])
    lines = [
        f' "{module}": {{\n'
        + ",\n".join(f"  {json.dumps(n)}: {json.dumps(h)}" for n, h in sorted(names.items()))
        + "\n }"
        for module, names in table.items()
    ]
    Path(__file__).with_name("api.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
