"""Frozen dataclasses to JSON and back, for JSON that a stranger may have written.

Reading is by the declared types: an unknown key is ignored (a newer kvprobe may add one), a
missing key takes the default, a wrong type is an error. Size is bounded, and depth by the parser.
Text comes back printable: it is going to be shown on somebody's terminal.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, TypeVar, Union

T = TypeVar("T")

MAX_BYTES = 8 << 20


def to_json(value: Any) -> bytes:
    """A dataclass as JSON text, one key a line."""
    return (json.dumps(asdict(value), indent=1, allow_nan=False) + "\n").encode()


def parse_json(data: bytes, max_bytes: int = MAX_BYTES) -> Any:
    """Plain JSON values.

    Raises:
        ValueError: not JSON, too large, too deep, or with a number that JSON does not have.
    """
    if len(data) > max_bytes:
        raise ValueError(f"larger than {max_bytes} bytes")
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def from_json(kind: type[T], value: Any) -> T:
    """Build a dataclass from parsed JSON.

    Raises:
        ValueError: a value is missing or of the wrong type; the message names it.
    """
    return typing.cast(T, _convert(kind, value, kind.__name__.lower()))


def printable(text: str) -> str:
    """``text`` with control characters and lone surrogates escaped; the rest is untouched."""
    if text.isprintable():
        return text
    text = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [a for a in arguments if a is not type(None)]
        return _convert(inner[0], value, where)
    if origin is tuple:
        return _convert_tuple(arguments, value, where)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not an object")
        return {key: _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(kind):
        return _convert_dataclass(typing.cast(type[Any], kind), value, where)
    return _convert_scalar(kind, value, where)


def _convert_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is not a list")
    if arguments[-1] is Ellipsis:
        return tuple(_convert(arguments[0], item, f"{where}[]") for item in value)
    if len(value) != len(arguments):
        raise ValueError(f"{where} has {len(value)} items, not {len(arguments)}")
    return tuple(_convert(a, item, where) for a, item in zip(arguments, value, strict=True))


def _convert_dataclass(kind: type[Any], value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    found = {}
    hints = typing.get_type_hints(kind)
    for item in fields(kind):
        if item.name in value:
            found[item.name] = _convert(hints[item.name], value[item.name], f"{where}.{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{where}.{item.name} is missing")
    return kind(**found)


def _convert_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is not {'text' if kind is str else kind.__name__}")
    if kind is int and not -(2**63) <= value < 2**64:
        raise ValueError(f"{where} is out of range")
    return printable(value) if kind is str else value
