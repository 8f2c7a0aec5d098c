"""The sampling settings of a request as it came: every default filled in, every control resolved."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.descriptor import FieldDescriptor

from outrider.controls import CONTROLS, Facts, resolve_controls
from outrider.core.errors import InvalidRequest
from outrider.core.grammar import Grammar
from outrider.core.sampling import Sampling, Verifier
from outrider.core.wire import grammar_from_wire
from outrider.router.limits import SHOWN, check_sampling, checked_logprobs_mode, checked_verifier
from outrider.v1 import common_pb2, generation_pb2

CheckGrammar = Callable[[Grammar], None]

MAX_EXACT_INTEGER = 2**53  # of a double


@dataclass(frozen=True)
class Defaults:
    """What a request takes where it says nothing.

    Attributes:
        verifier: for requests that sample and name none.
    """

    verifier: Verifier = Verifier.COUPLED


@dataclass(frozen=True)
class GivenControls:
    """The controls that a client set, in the form that it wrote.

    Attributes:
        fields: those that it set by their fields, by name.
        others: those that it named in the map of controls.
    """

    fields: Mapping[str, Any]
    others: Mapping[str, Any]

    def get(self, name: str) -> Any | None:
        """The value of one control, however it was set; None where it was not."""
        return self.fields.get(name, self.others.get(name))

    def spelt(self, name: str) -> str:
        """The field of one control, as the client spelt it."""
        return f"sampling.controls[{name!r}]" if name in self.others else f"sampling.{name}"

    def resolved(self, facts: Facts) -> tuple[tuple[str, Any], ...]:
        """As ``Sampling.controls``. Raises ``InvalidRequest`` with the field as the client spelt it."""
        resolved = list(resolve_controls(self.fields, facts))
        for name, value in self.others.items():
            spelt = self.spelt(name)
            if name in self.fields:
                raise InvalidRequest(spelt, value, f"absent, for sampling.{name} is given too")
            try:
                resolved.extend(resolve_controls({name: value}, facts))
            except InvalidRequest as error:
                part = error.field.removeprefix(f"sampling.{name}")
                raise InvalidRequest(spelt if part == error.field else spelt + part, error.value, error.limit) from None
        return tuple(sorted(resolved, key=lambda item: item[0]))


def given_controls(params: generation_pb2.SamplingParams) -> GivenControls:
    """Every control that the message sets: by a field of its name, or in the map.

    Raises ``InvalidRequest`` for a name that is too long to be one, or to be repeated.
    """
    fields = {}
    for control in CONTROLS:
        descriptor = params.DESCRIPTOR.fields_by_name.get(control.name)
        if descriptor is not None and _is_given(params, descriptor):
            fields[control.name] = _field_value(getattr(params, control.name))
    for name in params.controls:
        if len(name) > SHOWN:
            raise InvalidRequest(
                "sampling.controls", f"{name[:SHOWN]}...", "an object whose names are those of controls"
            )
    others = {name: json_of_value(params.controls[name]) for name in sorted(params.controls)}
    return GivenControls(fields, others)


def sampling_from_params(
    params: generation_pb2.SamplingParams,
    given: GivenControls,
    *,
    defaults: Defaults,
    facts: Facts,
    prompt_len: int,
    check_grammar: CheckGrammar,
) -> Sampling:
    """Raises ``InvalidRequest``. ``check_grammar`` raises it for a grammar that does not compile."""
    temperature = params.temperature if params.HasField("temperature") else 1.0
    if params.verifier != 0:
        verifier = checked_verifier(params.verifier)
    else:
        verifier = Verifier.GREEDY if temperature == 0 else defaults.verifier
    sampling = Sampling(
        temperature=temperature,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        verifier=verifier,
        prompt_len=prompt_len,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        logprobs_mode=checked_logprobs_mode(params.logprobs_mode),
    )
    check_sampling(sampling)
    sampling = replace(sampling, controls=given.resolved(facts))
    if not params.HasField("grammar"):
        return sampling
    return replace(sampling, grammar=checked_grammar(params.grammar, check_grammar))


def checked_grammar(message: common_pb2.Grammar, check_grammar: CheckGrammar) -> Grammar:
    """The grammar of a message. Raises ``InvalidRequest`` for one that is empty or does not compile."""
    grammar = grammar_from_wire(message)
    if grammar is None:
        raise InvalidRequest("sampling.grammar", "empty", "one of json_schema, regex and ebnf, or absent")
    check_grammar(grammar)
    return grammar


def json_of_value(value: struct_pb2.Value) -> Any:
    """A ``google.protobuf.Value`` as JSON of Python; whole numbers are integers, and NaN stays what it is."""
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        return int(number) if abs(number) <= MAX_EXACT_INTEGER and number == int(number) else number
    if kind == "struct_value":
        return {name: json_of_value(item) for name, item in value.struct_value.fields.items()}
    if kind == "list_value":
        return [json_of_value(item) for item in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


def _is_given(params: generation_pb2.SamplingParams, descriptor: FieldDescriptor) -> bool:
    if descriptor.is_repeated:  # maps too
        return len(getattr(params, descriptor.name)) > 0
    return params.HasField(descriptor.name)  # type: ignore[arg-type]  # stubs list the names


def _field_value(value: Any) -> Any:
    """A scalar as it is, a map as a dict, a repeated field as a list."""
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, bool | int | float | str | bytes) else list(value)
