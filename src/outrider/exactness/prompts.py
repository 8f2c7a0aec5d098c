"""Prompts for those who bring none: pieces of one text, as many different ones as are needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from outrider.core.errors import ConfigError

_TEXT = """\
The with statement is used to wrap the execution of a block with methods defined by a context manager. A function call
evaluates its arguments before the call is attempted; when a name is not found at all, an exception is raised. Once upon
a time a ship left the harbour at dawn, and nobody on the shore could say where it was bound. def median(values): return
sorted(values)[len(values) // 2] if values else None. Three apples cost two coins, so seven apples cost about five of
them; how much do twelve cost? Return a list of the words in the string, using sep as the delimiter. To make bread, mix
flour, water, salt and yeast, let the dough rest until it has doubled, fold it, and bake it in a hot oven. The museum
opens at nine and closes at six, except on Mondays. for line in open(path): total += len(line.split()). Rivers carry
sand to the sea, where the tide sorts it by size. An object's type is accessed by the built-in function; it determines
the operations that the object supports. If the condition is true the loop goes on, else it ends, and the clause that
follows it is executed. {"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"]} Dear reader, thank you for
your letter of last week, which I read with great pleasure."""

MIN_WORDS, MAX_WORDS = 3, 14


def built_in(seed: int) -> Iterator[str]:
    """Endlessly many prompts, few of them alike."""
    words = _TEXT.split()
    rng = np.random.default_rng([seed, 2])
    while True:
        length = int(rng.integers(MIN_WORDS, MAX_WORDS + 1))
        start = int(rng.integers(0, len(words) - length))
        yield " ".join(words[start : start + length])


def from_file(path: Path) -> list[str]:
    """One prompt in each line that is not blank. Raises ``ConfigError``."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: cannot read {path}: {error}") from error
    if not lines:
        raise ConfigError(f"--prompts: {path} holds no prompt")
    return lines


def different(texts: Iterator[str], encode: Callable[[str], list[int]], count: int) -> list[tuple[int, ...]]:
    """The first ``count`` different prompts as tokens, or as many as there are among fifty times that many texts."""
    found: dict[tuple[int, ...], None] = {}
    for text in itertools.islice(texts, 50 * count):
        tokens = tuple(encode(text))
        if tokens:
            found[tokens] = None
        if len(found) == count:
            break
    return list(found)
