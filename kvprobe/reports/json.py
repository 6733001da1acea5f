"""The report document itself, as JSON: the contract that other tools build on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.reports import Report


def render(document: Mapping[str, Any], **_: object) -> str:
    """The document as one JSON object, keys in the document's order, with a final line break.

    Strict JSON: a number that JSON has no word for (nan, infinity) is unknown, which is null.
    ``document.schema.json`` beside this file describes the object.
    """
    return json.dumps(_strict(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


REPORT = Report("json", "the report document, for other tools", render)
