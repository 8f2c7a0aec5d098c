"""Python values as values of protocol fields. What a field cannot hold is refused by the field's name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.struct_pb2 import Value

from outrider.core.errors import InvalidRequest

SHOWN = 60  # characters of a long value that an error repeats
MAX_WHOLE = 1 << 53  # whole numbers up to it are exact as floats, and JSON of protobuf knows no others


def unsigned(field: str, value: Any, bits: int) -> int:
    """A whole number that so many bits hold. Raises ``InvalidRequest``, as all of these do."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise InvalidRequest(field, shown(value), f"a whole number from 0 to 2**{bits} - 1")
    return value


def number(field: str, value: Any, limit: str = "a finite number") -> float:
    """A finite number. ``limit`` says what is allowed where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(field, shown(value), "a number")
    try:
        converted = float(value)
    except OverflowError:
        raise InvalidRequest(field, shown(value), "a number that 64 bits hold") from None
    if not math.isfinite(converted):
        raise InvalidRequest(field, value, limit)
    return converted


def text(field: str, value: Any) -> str:
    """A string that can be sent."""
    if not isinstance(value, str):
        raise InvalidRequest(field, shown(value), "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, shown(value), "valid Unicode, without lone surrogates") from None
    return value


def flag(field: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise InvalidRequest(field, shown(value), "True or False")
    return value


def items(field: str, value: Any, kind: str) -> Sequence[Any]:
    """A list or another sequence; ``kind`` says of what."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise InvalidRequest(field, shown(value), f"a list of {kind}")
    return value


def json_value(field: str, value: Any) -> Value:
    """Anything that JSON can say."""
    result = Value()
    if value is None:
        result.null_value = 0  # type: ignore[assignment]
    elif isinstance(value, bool):
        result.bool_value = value
    elif isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise InvalidRequest(field, shown(value), "a whole number from -2**53 to 2**53")
    elif isinstance(value, int | float):
        result.number_value = number(field, value)
    elif isinstance(value, str):
        result.string_value = text(field, value)
    elif isinstance(value, Mapping):
        result.struct_value.SetInParent()
        for key, part in value.items():
            # An object's keys are strings; token ids are keys too.
            name = str(key) if isinstance(key, int) and not isinstance(key, bool) else text(field, key)
            result.struct_value.fields[name].CopyFrom(json_value(f"{field}[{name}]", part))
    else:
        result.list_value.SetInParent()
        for index, part in enumerate(items(field, value, "values that JSON knows")):
            result.list_value.values.append(json_value(f"{field}[{index}]", part))
    return result


def json_text(field: str, value: Any) -> str:
    """A JSON document: as text, or as the Python value that it stands for."""
    if isinstance(value, str):
        try:
            json.loads(text(field, value), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(field, shown(value), f"JSON ({error})") from None
        return value
    try:
        return text(field, json.dumps(value, allow_nan=False, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field, shown(value), f"a JSON document ({error})") from None


def shown(value: Any) -> Any:
    """The value, or the beginning of a long one, for an error."""
    if isinstance(value, str):
        return value if len(value) <= SHOWN else value[:SHOWN] + "..."
    if isinstance(value, int | float | None):
        return (
            value
            if not isinstance(value, int) or value.bit_length() <= 256
            else f"a number of {value.bit_length()} bits"
        )
    whole = repr(value)
    return value if len(whole) <= SHOWN else whole[:SHOWN] + "..."


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")
