"""A JSON value that satisfies a JSON schema, always the same one for the same schema and seed.

Covers what tool definitions use: type, enum, const, properties and required, items, anyOf / oneOf / allOf, local
``$ref``, lengths, ranges, ``multipleOf``, formats. A ``pattern`` is not solved: the string is then plain letters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from homeport.fingerprint import JsonValue

_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "email": "someone@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "hostname": "example.com",
}
_DEPTH = 12


def value_for(schema: JsonValue, seed: int = 0) -> JsonValue:
    """A value valid under ``schema``; anything goes where the schema says nothing."""
    return _value(schema, schema if isinstance(schema, dict) else {}, seed, 0)


def text_for(schema: JsonValue, seed: int = 0) -> str:
    """The value as the engine would write it."""
    return json.dumps(value_for(schema, seed), ensure_ascii=False)


def _value(schema: JsonValue, root: Mapping[str, JsonValue], seed: int, depth: int) -> JsonValue:
    if not isinstance(schema, dict):
        return "value"
    schema = _resolve(schema, root)
    if "const" in schema:
        return schema["const"]
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return choices[seed % len(choices)]
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list) and options:
            # past the depth limit the last option is tried: in recursive schemas that is most often null
            return _value(options[-1] if depth > _DEPTH else options[seed % len(options)], root, seed, depth + 1)
    return _typed(schema, root, seed, depth)


def _resolve(schema: dict[str, JsonValue], root: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    merged = dict(schema)
    for _ in range(8):
        pointer = merged.pop("$ref", None)
        if not isinstance(pointer, str):
            break
        merged = {**_at(root, pointer), **merged}
    parts = merged.pop("allOf", None)
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, dict):
            merged = _merge(merged, _resolve(part, root))
    return merged


def _merge(left: dict[str, JsonValue], right: dict[str, JsonValue]) -> dict[str, JsonValue]:
    merged = {**right, **left}
    properties, more = left.get("properties"), right.get("properties")
    if isinstance(properties, dict) and isinstance(more, dict):
        merged["properties"] = {**more, **properties}
    required, also = left.get("required"), right.get("required")
    if isinstance(required, list) and isinstance(also, list):
        merged["required"] = [*required, *also]
    return merged


def _at(root: Mapping[str, JsonValue], pointer: str) -> dict[str, JsonValue]:
    place: JsonValue = dict(root)
    for step in pointer.lstrip("#/").split("/"):
        if step and isinstance(place, dict):
            place = place.get(step.replace("~1", "/").replace("~0", "~"))
    return place if isinstance(place, dict) else {}


def _typed(schema: dict[str, JsonValue], root: Mapping[str, JsonValue], seed: int, depth: int) -> JsonValue:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = "null" if depth > _DEPTH and "null" in kind else next(iter(kind), None)
    if kind == "object" or (kind is None and "properties" in schema):
        return _object(schema, root, seed, depth)
    if kind == "array":
        return _array(schema, root, seed, depth)
    if kind in ("integer", "number"):
        return _number(schema, kind == "integer", seed)
    if kind == "boolean":
        return seed % 2 == 0
    if kind == "null":
        return None
    return _string(schema, seed)


def _object(schema: dict[str, JsonValue], root: Mapping[str, JsonValue], seed: int, depth: int) -> JsonValue:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    wanted = names if depth > _DEPTH else [*properties, *(name for name in names if name not in properties)]
    return {name: _value(properties.get(name, {}), root, seed, depth + 1) for name in wanted}


def _array(schema: dict[str, JsonValue], root: Mapping[str, JsonValue], seed: int, depth: int) -> JsonValue:
    fixed = schema.get("prefixItems")
    head = [_value(item, root, seed, depth + 1) for item in fixed] if isinstance(fixed, list) else []
    least = schema.get("minItems")
    count = least if isinstance(least, int) else (0 if depth > _DEPTH or head else 1)
    items = schema.get("items", {})
    return head + [_value(items, root, seed + index, depth + 1) for index in range(len(head), count)]


def _number(schema: dict[str, JsonValue], whole: bool, seed: int) -> JsonValue:
    low = _bound(schema, "minimum", "exclusiveMinimum", 1.0 if whole else 0.5)
    high = _bound(schema, "maximum", "exclusiveMaximum", -1.0 if whole else -0.5)
    step = schema.get("multipleOf")
    unit = float(step) if isinstance(step, int | float) and step > 0 else 1.0
    if low is None:
        low = 0.0 if high is None or high >= 0 else high - unit
    value = math.ceil(low / unit) * unit
    room = 8 if high is None else max(0, int((high - value) / unit))
    value += (seed % (min(room, 8) + 1)) * unit
    if high is not None and value > high:
        value = (low + high) / 2
    return int(value) if whole or value == int(value) else value


def _bound(schema: dict[str, JsonValue], closed: str, opened: str, inward: float) -> float | None:
    bound = schema.get(closed)
    if isinstance(bound, int | float):
        return float(bound)
    bound = schema.get(opened)
    return float(bound) + inward if isinstance(bound, int | float) and not isinstance(bound, bool) else None


def _string(schema: dict[str, JsonValue], seed: int) -> str:
    known = schema.get("format")
    text = _FORMATS.get(known, "value") if isinstance(known, str) else "value"
    if text == "value" and seed:
        text += chr(ord("a") + seed % 26)
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int):
        text = text.ljust(least, "x")
    return text[:most] if isinstance(most, int) else text
