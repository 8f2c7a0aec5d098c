"""The sampling controls beyond temperature, top-k and top-p, and the facts that follow from a request's settings.

Every module of this package that holds a subclass of ``Control`` adds a control; nothing else has to know its name.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.controls.base import Control, Facts, NumberControl, RowText, Stage
from outrider.core.errors import InvalidRequest
from outrider.core.sampling import Sampling
from outrider.core.sampling import sampling_fault as _basic_fault

__all__ = [
    "CONTROLS",
    "Control",
    "Facts",
    "NumberControl",
    "RowText",
    "Stage",
    "by_name",
    "gather_needed",
    "needs_text",
    "resolve_controls",
    "sampling_fault",
]


def _find_controls() -> tuple[Control, ...]:
    found: list[Control] = []
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Control) and not inspect.isabstract(kind) and kind.__module__ == module.__name__:
                found.append(kind())
    return tuple(sorted(found, key=lambda control: (control.stage, control.order, control.name)))


CONTROLS: tuple[Control, ...] = _find_controls()
"""Every control, in the order in which they apply."""

_BY_NAME: Mapping[str, Control] = {control.name: control for control in CONTROLS}


def by_name(name: str) -> Control | None:
    """The control of that name, or None."""
    return _BY_NAME.get(name)


def resolve_controls(given: Mapping[str, Any], facts: Facts) -> tuple[tuple[str, Any], ...]:
    """What a user gave as ``Sampling.controls``. Raises ``InvalidRequest`` that names the field and the limit."""
    resolved: list[tuple[str, Any]] = []
    for name in sorted(given):
        control = by_name(name)
        if control is None:
            known = ", ".join(sorted(_BY_NAME))
            raise InvalidRequest(f"sampling.controls[{name!r}]", given[name], f"absent: the controls are {known}")
        value = control.resolve(given[name], facts)
        if value is not None:
            resolved.append((name, value))
    return tuple(resolved)


def sampling_fault(sampling: Sampling, vocab_size: int) -> str | None:
    """What is wrong with settings that came over the network, or None. Names the field and the limit."""
    fault = _basic_fault(sampling)
    for name, value in sampling.controls if fault is None else ():
        control = by_name(name)
        fault = (
            f"sampling.controls names {name!r}, which is not known here"
            if control is None
            else (control.fault(value, vocab_size))
        )
        if fault is not None:
            return fault
    return fault


def needs_text(sampling: Sampling) -> bool:
    """Whether a row's distribution depends on the tokens before it otherwise than through the model."""
    if sampling.grammar is not None:
        return True
    return any(control.needs_text for control in _of(sampling.controls))


def gather_needed(sampling: Sampling) -> bool:
    """Whether a row's outcome needs more of the vocabulary than each rank's best token (see ``pairs_suffice``)."""
    return bool(
        sampling.controls
        or sampling.grammar is not None
        or sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
    )


def _of(controls: Iterable[tuple[str, Any]]) -> list[Control]:
    return [control for name, _ in controls if (control := by_name(name)) is not None]
