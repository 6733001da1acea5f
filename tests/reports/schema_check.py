"""A checker for the part of JSON Schema that ``document.schema.json`` uses.

A keyword it does not know is an error, so that the schema cannot say more than is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_KNOWN = {
    "$schema", "$defs", "$ref", "title", "description", "type", "properties", "required", "items",
    "additionalProperties", "enum", "const", "anyOf", "minimum", "maximum", "pattern",
}  # fmt: skip


def errors(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "") -> Iterator[str]:
    """One line per violation."""
    unknown = set(schema) - _KNOWN
    assert not unknown, f"keywords that are not checked: {unknown}"
    if "$ref" in schema:
        yield from errors(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in schema:
        ways = [list(errors(value, way, root, at)) for way in schema["anyOf"]]
        if all(ways):
            yield from min(ways, key=len)
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{at}: {value!r} is not {schema['const']!r}"
    yield from _type_errors(value, schema, at)
    if isinstance(value, dict):
        yield from _object_errors(value, schema, root, at)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from errors(item, schema["items"], root, f"{at}[{index}]")


def _type_errors(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    names = schema.get("type", [])
    if names and not any(
        _is(value, name) for name in ([names] if isinstance(names, str) else names)
    ):
        yield f"{at}: {value!r} is no {names}"
    if _is(value, "number") and not (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
    ):
        yield f"{at}: {value!r} is out of bounds"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{at}: {value!r} does not match {schema['pattern']}"


def _object_errors(
    value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], at: str
) -> Iterator[str]:
    for name in schema.get("required", []):
        if name not in value:
            yield f"{at}.{name}: missing"
    known = schema.get("properties", {})
    rest = schema.get("additionalProperties")
    for name, item in value.items():
        if name in known:
            yield from errors(item, known[name], root, f"{at}.{name}")
        elif isinstance(rest, dict):
            yield from errors(item, rest, root, f"{at}.{name}")


def _is(value: Any, name: str) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "boolean": (bool,),
        "integer": (int,),
        "number": (int, float),
        "null": (type(None),),
    }
    if name in ("integer", "number") and isinstance(value, bool):
        return False
    return isinstance(value, kinds[name])
