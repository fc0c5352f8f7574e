"""How tools are shown to the model: compact JSON (K2, K2-Thinking) or a TypeScript namespace (K2.5, K2.6).

Both forms are made from definitions whose keys are sorted at every level, as the published tokenizers do before they
render, so that the prompt does not depend on the order in which a client wrote its schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kimi_k2.errors import TokenizerError
from kimi_k2.tokenization.messages import function_of

_INDENT = "  "
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION_MEMBERS = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Tool definitions with keys sorted at every level.

    Raises:
        TokenizerError: a tool is no object, or a function among them has no name or parameters that are no object.
    """
    if tools is None:
        return []
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise TokenizerError(f"tools: expected a list of definitions, got {type(tools).__name__}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise TokenizerError(f"tool {index}: expected an object, got {type(tool).__name__}")
        if tool.get("type", "function") != "function":
            continue
        if (function := function_of(tool)) is None:
            raise TokenizerError(f"tool {index}: field 'function.name': expected a function's name")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise TokenizerError(f"tool {index}: field 'function.parameters': expected a JSON schema object")
    try:
        return [_sorted_keys(tool) for tool in tools]
    except TypeError:
        raise TokenizerError("tools: expected text for all keys of objects") from None


def typescript_declaration(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The TypeScript namespace of tools that `checked_tools` returned.

    Returns:
        None if there is no function among them or a schema has no TypeScript form: then JSON is what the model sees.
    """
    functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
    try:
        declared = [_FunctionWriter().write(function) for function in functions]
    except (AttributeError, LookupError, TypeError, ValueError):
        return None  # no TypeScript form; malformed schemas fail in as many ways as there are fields
    if not declared:
        return None
    return "\n".join(["# Tools", "", "## functions", "namespace functions {", *declared, "}", ""])


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_sorted_keys(item) for item in value]
    return value


class _FunctionWriter:
    """Writes one function; collects the definitions that its schema refers to."""

    def __init__(self) -> None:
        self._definitions: dict[str, Any] = {}
        self._refers_to_root = False

    def write(self, function: Mapping[str, Any]) -> str:
        parameters = function.get("parameters") or {}
        argument = self._object(parameters, "")
        lines = []
        if self._refers_to_root:
            # A named interface lets the schema speak of itself; its fields keep the order of the sorted schema.
            fields = self._fields(parameters, _INDENT, list(parameters.get("properties", {})))
            lines.append("interface parameters {" + (_block(fields) if fields else "") + "}")
            argument = "parameters"
        for name, schema in list(self._definitions.items()):
            if isinstance(schema, Mapping) and schema.get("description"):
                lines.append(_comment(schema["description"], ""))
            lines.append(f"interface {name} {self._type(schema, '')}")
        if function.get("description"):
            lines.append(_comment(function["description"], ""))
        lines.append(f"type {function['name']} = (_: {argument}) => any;")
        return "\n".join(lines)

    def _type(self, schema: Any, indent: str) -> str:
        """The type of a schema; its first line continues where the caller stands, further ones get `indent`."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if not isinstance(schema, Mapping):
            raise ValueError
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(member, indent) for member in schema["anyOf"])
        if "enum" in schema:
            return _enumeration(schema)
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(_UNION_MEMBERS[member] for member in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if kind is None and schema:
            raise ValueError
        return {None: "any", "integer": "number"}.get(kind, str(kind))

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self._refers_to_root = True
            return "parameters"
        name = reference.rpartition("/")[2]
        if not reference.startswith("#/$defs/") or name not in self._definitions:
            raise ValueError
        return name

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        self._definitions.update(schema.get("$defs") or {})
        required = set(schema.get("required") or ())
        names = sorted(schema.get("properties", {}), key=lambda name: (name not in required, name))
        fields = self._fields(schema, indent + _INDENT, names)
        additional = schema.get("additionalProperties")
        if additional is not None:
            value = "never" if additional is False else self._type(additional, indent + _INDENT)
            fields.append(f"{indent}{_INDENT}[k: string]: {value}")
        return "{" + _block(fields) + indent + "}" if fields else "{}"

    def _fields(self, schema: Mapping[str, Any], indent: str, names: Sequence[str]) -> list[str]:
        required = set(schema.get("required") or ())
        fields = []
        for name in names:
            member = schema["properties"][name]
            value = self._type(member, indent)
            mark = "" if name in required else "?"
            fields.append(f"{_documentation(member, indent)}{_default(member, indent)}{indent}{name}{mark}: {value}")
        return fields

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        item = schema.get("items") or {}
        inner = indent + _INDENT
        documentation = _documentation(item, inner)
        if not documentation:
            return f"Array<{self._type(item, indent)}>"
        return f"Array<\n{documentation}{inner}{self._type(item, inner)}\n{indent}>"


def _block(fields: Sequence[str]) -> str:
    return "\n" + ",\n".join(fields) + "\n"


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


def _documentation(schema: Any, indent: str) -> str:
    """Comment lines of a schema: its description, and the limits of a plain string, number or array."""
    if not isinstance(schema, Mapping):
        return ""
    text = _comment(schema["description"], indent) + "\n" if schema.get("description") else ""
    kind = schema.get("type")
    is_plain = not any(key in schema for key in ("$ref", "anyOf", "enum"))
    keys = _CONSTRAINTS.get(kind, ()) if is_plain and isinstance(kind, str) else ()
    limits = ", ".join(f"{key}: {schema[key]}" for key in keys if key in schema)
    return f"{text}{indent}// {limits}\n" if limits else text


def _default(schema: Any, indent: str) -> str:
    value = schema.get("default") if isinstance(schema, Mapping) else None
    if value is None:
        return ""
    # Python's spelling of numbers and truth values is what the models were trained on.
    spelled = repr(value) if isinstance(value, (int, float)) else json.dumps(value, ensure_ascii=False)
    return f"{indent}// Default: {spelled}\n"


def _enumeration(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        others = [member for member in kind if member != "null"]
        if len(kind) > 2 or (len(kind) == 2 and len(others) == 2) or not kind:
            raise ValueError
        kind = others[0] if others else "null"
    accepted = _ENUM_TYPES.get(kind) if isinstance(kind, str) else None
    for value in schema["enum"]:
        if accepted and value is not None and not isinstance(value, accepted):
            raise ValueError
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
