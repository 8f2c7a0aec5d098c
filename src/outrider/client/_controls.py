"""Sampling controls as protocol fields: those of ``outrider.controls``, whichever there are.

A control that the protocol gives a field is sent in it. Any other travels by name, so that a new control needs nothing
here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from outrider.client._values import items, json_value, number, shown, text, unsigned
from outrider.controls import CONTROLS, NumberControl, by_name
from outrider.core.errors import InvalidRequest
from outrider.v1 import generation_pb2

_NO_CONTROLS = frozenset(
    (
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "verifier",
        "grammar",
        "controls",
        "logprobs",
        "prompt_logprobs",
        "logprobs_mode",
    )
)

CONTROL_FIELDS: Mapping[str, FieldDescriptor] = {
    name: field
    for name, field in generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name.items()
    if name not in _NO_CONTROLS
}
"""The controls that have a field of their own."""

CONTROL_NAMES = frozenset(CONTROL_FIELDS) | {control.name for control in CONTROLS}


def set_controls(params: generation_pb2.SamplingParams, given: Mapping[str, Any]) -> None:
    """Put values by the names of controls into the message. Raises ``InvalidRequest``.

    Names that nobody knows are sent too: the server says which ones it knows.
    """
    for name, value in given.items():
        field = CONTROL_FIELDS.get(text("sampling.controls", name))
        if field is None:
            params.controls[name].CopyFrom(json_value(f"sampling.{name}", value))
        elif field.message_type is not None:
            _set_map(params, field, field.message_type, value)
        elif field.is_repeated:
            _set_list(params, field, value)
        else:
            setattr(params, name, _scalar(f"sampling.{name}", field, value))


def _set_map(params: generation_pb2.SamplingParams, field: FieldDescriptor, entry: Descriptor, value: Any) -> None:
    key_field, value_field = entry.fields_by_name["key"], entry.fields_by_name["value"]
    name = f"sampling.{field.name}"
    if not isinstance(value, Mapping):
        raise InvalidRequest(name, shown(value), "a mapping such as {1: 0.5}")
    entries = getattr(params, field.name)
    for key, part in value.items():
        # Keys of JSON objects are strings.
        plain = int(key) if isinstance(key, str) and key.isdecimal() else key
        number_of_key = _scalar(f"{name}[{shown(key)}]", key_field, plain)
        if number_of_key in entries:
            raise InvalidRequest(f"{name}[{shown(key)}]", key, "a key that is named once only")
        entries[number_of_key] = _scalar(f"{name}[{number_of_key}]", value_field, part)


def _set_list(params: generation_pb2.SamplingParams, field: FieldDescriptor, value: Any) -> None:
    name = f"sampling.{field.name}"
    is_text = field.cpp_type == FieldDescriptor.CPPTYPE_STRING
    if is_text and isinstance(value, str):
        value = [value]
    parts = getattr(params, field.name)
    for index, part in enumerate(items(name, value, "strings" if is_text else "whole numbers")):
        parts.append(_scalar(f"{name}[{index}]", field, part))


def _scalar(name: str, field: FieldDescriptor, value: Any) -> Any:
    """``value`` as an element of the field."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return text(name, value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_UINT32:
        return unsigned(name, value, 32)
    return number(name, value, _limit(field.name))


def _limit(name: str) -> str:
    """What a number must be, in the words of its control."""
    control = by_name(name)
    words = control.limit(math.inf) if isinstance(control, NumberControl) else None
    return words or "a finite number"


def takes_list(name: str) -> bool:
    """Whether the field of this control is a list; False where it has no field."""
    field = CONTROL_FIELDS.get(name)
    return field is not None and field.is_repeated and field.message_type is None
