"""What a benchmark sends: prompts with their settings, from files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.client import ConfigError, Message

MAX_TOKENS = 128  # where an item names none
GRAMMARS = ("json_schema", "regex", "ebnf")
OPTIONS = ("temperature", "top_k", "top_p", "stop", *GRAMMARS)


@dataclass(frozen=True)
class Item:
    """One request of a workload: either a prompt or messages.

    Attributes:
        options: further settings of the request, as the client takes them.
    """

    name: str
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    max_tokens: int = MAX_TOKENS
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_grammar(self) -> bool:
        return any(name in self.options for name in GRAMMARS)

    @property
    def plain_prompt(self) -> str:
        """As one text, for models without a chat template."""
        if not self.messages:
            return self.prompt
        turns = "".join(f"{message['role']}: {message['content']}\n\n" for message in self.messages)
        return f"{turns}assistant:"


def tagged(item: Item, tag: str) -> Item:
    """The item with a tag before its prompt, so that no server finds the prompt in its prefix cache."""
    if not item.messages:
        return replace(item, prompt=f"# {tag}\n{item.prompt}")
    first, *others = item.messages
    return replace(item, messages=({**first, "content": f"({tag}) {first['content']}"}, *others))


@dataclass(frozen=True)
class Workload:
    """A name and its items, in the order in which they are sent."""

    name: str
    items: tuple[Item, ...]
    source: str


def read_items(path: Path, name: str | None = None) -> Workload:
    """The workload in a file of JSON lines, each an object with ``prompt`` or ``messages``.

    Further keys: ``max_tokens`` and those of ``OPTIONS``. Raises ``ConfigError``, which names file and line.
    """
    name = name or path.stem
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the workload {path}: {error}") from error
    items = [
        _item(line, f"{name}[{number}]", f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not items:
        raise ConfigError(f"the workload {path} holds no requests")
    return Workload(name, tuple(items), str(path))


def _item(line: str, name: str, where: str) -> Item:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f'{where}: an object such as {{"prompt": "..."}} is wanted')
    unknown = sorted(value.keys() - {"prompt", "messages", "max_tokens", *OPTIONS})
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}")
    if ("prompt" in value) == ("messages" in value):
        raise ConfigError(f"{where}: either prompt or messages is wanted")
    max_tokens = value.get("max_tokens", MAX_TOKENS)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens is {max_tokens!r}, but must be a whole number from 1 on")
    return Item(
        name,
        prompt=_text(value.get("prompt", ""), f"{where}: prompt"),
        messages=_messages(value.get("messages", []), where),
        max_tokens=max_tokens,
        options={key: value[key] for key in OPTIONS if key in value},
    )


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: messages must be a list")
    for message in value:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ConfigError(f'{where}: each message is an object with "role" and "content"')
        _text(message["role"], f"{where}: role")
        _text(message["content"], f"{where}: content")
    return tuple(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r:.60}, but must be a string")
    return value
