"""Writes what the comments in the chart's values.yaml say: the table in its README and values.schema.json.

Above a value stands ``# -- what it is``, and where its type is not all, ``# @schema {…}`` with JSON schema in YAML.
``itemsFrom: NAME`` in it gives the items of a list the properties of the mapping NAME. ``--check`` writes nothing and
fails where a file is not as it would be written.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "helm" / "outrider"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
RESOURCES: dict[str, Any] = {
    "type": "object",
    "required": ["limits"],
    "additionalProperties": False,
    "properties": {
        "requests": {"type": "object"},
        "limits": {"type": "object", "required": ["cpu", "memory"]},
        "claims": {"type": "array"},
    },
}


@dataclass
class Value:
    """One key of values.yaml and what stands above it."""

    path: tuple[str, ...]
    default: Any
    text: str = ""
    schema: dict[str, Any] = field(default_factory=dict)


def read_values(source: str) -> list[Value]:
    """The documented keys in order, and the mappings that hold them. Raises ``ValueError`` if one lacks a comment."""
    tree = yaml.safe_load(source)
    values: list[Value] = []
    path: list[str] = []
    text, schema = "", {}
    for number, line in enumerate(source.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("# -- "):
            text = stripped[5:]
        elif stripped.startswith("# @schema "):
            schema = yaml.safe_load(stripped[10:])
        match = re.match(r"( *)([A-Za-z]\w*):(.*)", line)
        if match is None:
            continue
        depth = len(match[1]) // 2
        parent = tuple(path[:depth])
        if any(value.path == parent and value.text for value in values):
            continue  # inside a default that is one value
        path[depth:] = [match[2]]
        default = tree
        for key in path:
            default = default[key]
        holds_others = isinstance(default, dict) and not match[3].strip()
        if not text and not holds_others:
            raise ValueError(f"values.yaml:{number}: {'.'.join(path)} has no comment '# -- …'")
        values.append(Value(tuple(path), default, text, schema))
        text, schema = "", {}
    return values


def schema_of(values: list[Value]) -> dict[str, Any]:
    """JSON schema that knows every key, so that a wrong one is refused by name."""
    root: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": False,
        "definitions": {"resources": RESOURCES},
        # Helm gives every chart a mapping of this name.
        "properties": {"global": {"type": "object"}},
    }
    lists: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for value in values:
        node = root
        for key in value.path[:-1]:
            node = node["properties"][key]
        mine: dict[str, Any] = {"description": value.text} if value.text else {}
        extra = dict(value.schema)
        if not value.text:
            mine |= {"type": "object", "additionalProperties": False, "properties": {}}
        elif not extra.keys() & {"type", "enum", "$ref"}:
            mine["type"] = type_of(value.default)
        if "itemsFrom" in extra:
            lists.append((mine, {"from": extra.pop("itemsFrom"), "required": extra.pop("required", [])}))
        node["properties"][value.path[-1]] = mine | extra
    for node, items in lists:
        like = root["properties"][items["from"]]
        path = next(value.path for value in values if value.text == node["description"])
        root["properties"][path[0]]["items"] = {**like, "required": items["required"]}
    return root


def type_of(default: Any) -> str:
    """The JSON type of a default. Raises ``ValueError`` for null, which has none."""
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(default, kind):
            return name
    if isinstance(default, dict):
        return "object"
    raise ValueError(f"the default {default!r} needs a type in '# @schema'")


def table_of(values: list[Value]) -> str:
    """A Markdown table, one line for each value."""
    lines = ["| value | default | what it is |", "| --- | --- | --- |"]
    for value in values:
        if value.text:
            default = json.dumps(value.default)
            lines.append(f"| `{'.'.join(value.path)}` | `{default}` | {value.text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def outputs() -> dict[Path, str]:
    """Each file and what belongs into it."""
    values = read_values((CHART / "values.yaml").read_text())
    readme = (CHART / "README.md").read_text()
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    return {
        CHART / "values.schema.json": json.dumps(schema_of(values), indent=2, ensure_ascii=False) + "\n",
        CHART / "README.md": f"{before}{BEGIN}\n{table_of(values)}\n{END}{after}",
    }


def main(words: list[str]) -> int:
    stale = []
    for path, text in outputs().items():
        if not path.is_file() or path.read_text() != text:
            stale.append(path.name)
            if "--check" not in words:
                path.write_text(text)
    if stale and "--check" in words:
        print(f"not as values.yaml says: {', '.join(stale)}; run python scripts/chart_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
