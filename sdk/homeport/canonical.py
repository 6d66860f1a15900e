"""Tool definitions in canonical form. What a model generated is never passed through here.

In a schema, object keys and the set-like lists ``required`` and ``dependentRequired`` mean the same in any order, but a
prompt cache compares bytes. Lists whose order a model may read (``enum``, ``anyOf``, ``prefixItems``, ``examples``,
text) stay as they are.
"""

from __future__ import annotations

from homeport.fingerprint import JsonValue

SCHEMA_NAMES = ("parameters", "input_schema", "inputSchema", "outputSchema")
"""Where the APIs and MCP put a tool's schema."""

# values that are data, not schema: their own keys may carry an order that was meant
_DATA = frozenset({"enum", "const", "default", "example", "examples"})
# objects whose keys are names the caller chose, not schema words
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def tool(definition: JsonValue) -> JsonValue:
    """A tool definition with sorted object keys; one without a schema (a vendor's built-in tool) as it came.

    Chat completions' ``function`` wrapper, the flat form of Responses, and ``input_schema`` of Messages are known.
    """
    if not isinstance(definition, dict):
        return definition
    function = definition.get("function")
    if isinstance(function, dict) and _has_schema(function):
        return {key: _named(function) if key == "function" else definition[key] for key in sorted(definition)}
    return _named(definition) if _has_schema(definition) else definition


def schema(node: JsonValue) -> JsonValue:
    """A JSON schema with sorted object keys, ``required`` and ``dependentRequired``; every other list as it came."""
    if isinstance(node, list):
        return [schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: _member(key, node[key]) for key in sorted(node)}


def _named(definition: dict[str, JsonValue]) -> JsonValue:
    return {key: schema(definition[key]) if key in SCHEMA_NAMES else definition[key] for key in sorted(definition)}


def _has_schema(definition: dict[str, JsonValue]) -> bool:
    return any(isinstance(definition.get(name), dict) for name in SCHEMA_NAMES)


def _member(key: str, value: JsonValue) -> JsonValue:
    if key in _DATA:
        return value
    if key == "required":
        return _as_set(value)
    if isinstance(value, dict) and key == "dependentRequired":
        return {name: _as_set(value[name]) for name in sorted(value)}
    if isinstance(value, dict) and key in _MAPS:
        return {name: schema(value[name]) for name in sorted(value)}
    return schema(value)


def _as_set(value: JsonValue) -> JsonValue:
    if not isinstance(value, list):
        return value
    names = [name for name in value if isinstance(name, str)]
    return [*sorted(names)] if len(names) == len(value) else value
