"""YAML read strictly, variables expanded, and validation errors as lines that name the path and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Where: TypeAlias = "tuple[str | int, ...]"
"""A place in the file: keys and list positions."""

_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class StrictLoader(yaml.SafeLoader):
    """YAML in which a key may stand once: a second one would silently win."""


def _strict_mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
            continue
        if key_node.value in seen:
            raise yaml.MarkedYAMLError(problem=f"key {key_node.value!r} stands twice", problem_mark=key_node.start_mark)
        seen.add(key_node.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


StrictLoader.add_constructor("tag:yaml.org,2002:map", _strict_mapping)


def yaml_fault(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else f"not YAML: {problem}"


def expand(value: Any, env: Mapping[str, str], where: Where, errors: list[str]) -> Any:
    """Replace ``${NAME}`` and ``${NAME:-default}`` in every string value; ``$$`` is a plain dollar."""
    if isinstance(value, dict):
        return {key: expand(item, env, (*where, key), errors) for key, item in value.items()}
    if isinstance(value, list):
        return [expand(item, env, (*where, i), errors) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = str(match.group(1))
        if match.group() == "$$":
            return "$"
        default: str | None = match.group(2)
        found = env.get(name, default)
        if found is None:
            errors.append(
                f"{path_text(where)}: environment variable {name} is not set; export it or write ${{{name}:-...}}"
            )
        return found or ""

    return _VARIABLE.sub(replace, value)


def validation_faults(error: ValidationError, root: type[BaseModel], known: Sequence[str] = ()) -> list[str]:
    """One line per faulty place; places that a line in ``known`` names already are left out."""
    by_place: dict[str, list[str]] = {}
    faults = error.errors()
    missing = {fault["loc"] for fault in faults if fault["type"] == "missing"}
    for fault in faults:
        where = tuple(part for part in fault["loc"] if not _is_tag(part, fault["loc"]))
        told = by_place.setdefault(path_text(where), [])
        message = _message(fault, where, root, {loc[-1] for loc in missing if loc[:-1] == fault["loc"][:-1]})
        if message not in told:
            told.append(message)
    named = {line.partition(": ")[0] for line in known}
    return [f"{place}: {'; or '.join(messages)}" for place, messages in by_place.items() if place not in named]


def _message(fault: ErrorDetails, where: Where, root: type[BaseModel], missing: Collection[str | int]) -> str:
    """What is wrong in words; ``missing``: required keys that are not given beside it."""
    given = fault["input"]
    match fault["type"]:
        case "extra_forbidden":
            return f"unknown key{_near(str(where[-1]), where[:-1], root, missing)}"
        case "missing":
            return "is missing; add it"
        case "string_pattern_mismatch":
            return f"{given!r} is no name; use letters, digits, '.', '_' and '-', up to 63"
        case "model_type" | "model_attributes_type" | "dict_type":
            message = f"must be a mapping with {', '.join(_known_keys(where, root)) or 'keys and values'}"
        case "list_type":
            message = "must be a list; write it with '-' or in brackets"
        case "union_tag_invalid":
            return f"unknown type {given.get('type')!r}; use {fault['ctx']['expected_tags']}"
        case "union_tag_not_found":
            return "is missing `type`; add it"
        case _:
            text = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
            message = text.replace("should be", "must be", 1) if text.startswith("should") else text
    shown = isinstance(given, str | int | float) or given is None
    return f"{message} (got {given!r})" if shown and repr(given) not in message else message


_TAGS = frozenset({"file", "dns", "kubernetes"})
_TYPES = frozenset({"KvEventSource", "[key]", "dict[str,any]", "str", "int"})


def _is_tag(part: str | int, where: tuple[str | int, ...]) -> bool:
    """Whether a part of an error's place is pydantic's own mark (a union's branch), not a key of the file."""
    if not isinstance(part, str):
        return False
    if part in _TAGS:
        at = where.index("discovery") if "discovery" in where else len(where)
        return where[at + 2 : at + 3] == (part,)
    return part in _TYPES or part.startswith(("literal[", "constrained-"))


def path_text(where: Where) -> str:
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "file"


def _near(key: str, where: Where, root: type[BaseModel], missing: Collection[str | int]) -> str:
    """The key that was meant: of several alike the one that is needed and not there."""
    known = _known_keys(where, root)
    close = difflib.get_close_matches(key, known)
    if close:
        meant = next((name for name in close if name in missing), close[0])
        return f"; did you mean {meant!r}?"
    return f"; known keys are {', '.join(known)}" if known else "; remove it"


def _known_keys(where: Where, root: type[BaseModel]) -> list[str]:
    """The keys allowed at a place, found by walking the models; empty when the place is no section."""
    current: list[type[BaseModel]] = [root]
    for part in where:
        found = [section.model_fields[part].annotation for section in current if part in section.model_fields]
        if found:  # else a list position or the key of a mapping of sections: the same sections go on
            current = [section for annotation in found for section in _sections_of(annotation)]
    return list(dict.fromkeys(name for section in current for name in section.model_fields))


def _sections_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in getattr(annotation, "__args__", ()) for section in _sections_of(part)]
