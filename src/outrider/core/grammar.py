"""The language that a request's output must belong to, as plain data. See ``outrider.grammar`` for what it allows."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GrammarKind(enum.Enum):
    """How a language is described; the values are the names of the protocol's fields and of the client's options."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"


@dataclass(frozen=True)
class Grammar:
    """A language. ``text`` is the JSON schema, the regular expression, or the grammar in Lark's notation or GBNF."""

    kind: GrammarKind
    text: str
