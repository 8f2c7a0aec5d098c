"""Sampling controls as options of a command, made from their declarations in ``outrider.controls``."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import Annotated, Any

import typer

from outrider.client._controls import takes_list
from outrider.controls import CONTROLS, Control

_PLAIN: Mapping[str, type] = {"FLOAT": float, "INT": int, "INTEGER": int, "TEXT": str}
_NUMBERS = re.compile(r"\s*-?\d+\s*(,\s*-?\d+\s*)*,?\s*")


def with_control_options(command: Callable[..., None], *, after: str, panel: str) -> Callable[..., None]:
    """A command whose ``**controls`` is one option for each control, shown behind the parameter ``after``.

    The command gets the values of those that were given, as the client takes them.
    """
    names = {control.name: control for control in CONTROLS}
    parameters = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        if parameter.name == after:
            parameters += [_parameter(control, panel) for control in CONTROLS]

    @functools.wraps(command)
    def wrapper(**options: Any) -> None:
        given = {name: options.pop(name) for name in names}
        command(
            **options,
            **{name: parsed(names[name], value) for name, value in given.items() if value is not None},
        )

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def parsed(control: Control, value: Any) -> Any:
    """What was written behind the option of a control, as the client takes it. Raises ``typer.BadParameter``."""
    if control.metavar in _PLAIN:
        return value
    if control.repeated:
        return [json_or_list(option_name(control), text) for text in value]
    return json_or_list(option_name(control), value, is_list=takes_list(control.name))


def json_or_list(option: str, text: str, *, is_list: bool = False) -> Any:
    """JSON, or whole numbers with commas between them; with ``is_list`` a single one is a list too."""
    if _NUMBERS.fullmatch(text) and (is_list or "," in text):
        return [int(number) for number in text.split(",") if number.strip()]
    try:
        return json.loads(text, object_pairs_hook=_each_key_once)
    except (ValueError, RecursionError) as error:
        what = "a list such as 1,2,3, or JSON" if is_list else "JSON"
        raise typer.BadParameter(f"{text[:60]!r} is not {what} ({error}).", param_hint=f"'{option}'") from None


def option_name(control: Control) -> str:
    """Its option."""
    return "--" + control.name.replace("_", "-")


def _parameter(control: Control, panel: str) -> inspect.Parameter:
    kind: Any = _PLAIN.get(control.metavar, str)
    option = typer.Option(
        option_name(control),
        help=control.help,
        metavar=control.metavar,
        show_default=False,
        rich_help_panel=panel,
    )
    values = GenericAlias(list, (kind,)) if control.repeated else kind
    annotation: Any = Annotated[values | None, option]
    return inspect.Parameter(control.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key is there twice")
    return result
