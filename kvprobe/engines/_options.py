"""An engine's options from its command line, as adapters' ``detect`` needs them.

Nothing here raises on what a stranger wrote: what cannot be read is absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

_ANY_HOST = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}
_INT64 = 1 << 63
_MOST_DIGITS = 20
_TRUE = {"1", "true", "yes", "on"}


class Options:
    """``--name value``, ``--name=value`` and ``--name`` of a command line; ``-tp 8`` as well.

    ``-`` and ``_`` in names are one; names are asked for as ``kv-transfer-config``, ``tp``.
    ``rest`` is what belongs to no option, the program first; a word behind a flag cannot be told
    from a value of that flag, so it is not in ``rest``.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._values: dict[str, list[str]] = {}
        rest: list[str] = []
        name: str | None = None
        for word in arguments:
            if word[:1] == "-" and word.lstrip("-")[:1].isalpha():
                text, equals, value = word.lstrip("-").partition("=")
                name = text.replace("_", "-")
                self._values.setdefault(name, [])
                if equals:
                    self._values[name].append(value)
                    name = None
            elif name is not None:
                self._values[name].append(word)
                name = None
            else:
                rest.append(word)
        self.rest = tuple(rest)

    def has(self, name: str) -> bool:
        """Whether the option is there, with or without a value."""
        return name in self._values

    def all(self, name: str) -> tuple[str, ...]:
        """Every value of an option that may be repeated."""
        return tuple(self._values.get(name, ()))

    def text(self, *names: str) -> str | None:
        """The last value under the first of ``names`` that has one."""
        return next((self._values[n][-1] for n in names if self._values.get(n)), None)

    def number(self, *names: str) -> int | None:
        """The same as an integer; None where it is none."""
        return integer(self.text(*names))

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object; also what vLLM writes ``--name.key value``. Empty where there is none."""
        found = json_object(self.text(name))
        for option, values in self._values.items():
            if option.startswith(name + ".") and values:
                place = found
                *folders, last = option[len(name) + 1 :].replace("-", "_").split(".")
                for folder in folders:
                    inner = place.get(folder)
                    if not isinstance(inner, dict):
                        inner = place[folder] = {}
                    place = inner
                place[last] = _json(values[-1], values[-1])
        return found


def json_object(text: str | None) -> dict[str, Any]:
    """The JSON object that ``text`` is; empty where it is none."""
    found = _json(text or "", None)
    return found if isinstance(found, dict) else {}


def integer(value: object) -> int | None:
    """A whole number given as a number or as text, else None; so is one that int64 cannot hold."""
    if isinstance(value, str) and len(value) <= _MOST_DIGITS:
        try:
            value = int(value)
        except ValueError:
            return None
    return value if type(value) is int and -_INT64 <= value < _INT64 else None


def words(value: object) -> str | None:
    """Text that says something, else None."""
    return value if isinstance(value, str) and value else None


def switched_on(environment: Mapping[str, str], name: str) -> bool:
    """Whether an environment variable says yes."""
    return environment.get(name, "").strip().lower() in _TRUE


def address(host: str | None, port: int) -> str:
    """``HOST:PORT`` by which a server that listens on ``host`` is reached from this machine."""
    host = (host or "").strip("[]")
    host = _ANY_HOST.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_port(endpoint: str, default: int) -> int | None:
    """The port of an endpoint (``http://localhost:4318/x``, ``127.0.0.1:4317``) on loopback.

    None where it is another machine's or cannot be read: kvprobe listens on loopback only.
    """
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    own = host == "localhost" or host == "::1" or host.startswith("127.")
    return (port or default) if own else None


def _json(text: str, default: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return default
