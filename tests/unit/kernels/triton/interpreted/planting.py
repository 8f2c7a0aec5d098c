"""A kernel's module with one bug planted, to show that a check would catch it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def planted(folder: Path, module: ModuleType, right: str, wrong: str) -> ModuleType:
    """The module with ``right``, which occurs once, replaced. Triton reads the source, so that it is a file."""
    source = Path(str(module.__file__)).read_text()
    if source.count(right) != 1:  # not an assertion: those are what planted bugs are caught by
        raise ValueError(f"{right!r} occurs {source.count(right)} times in {module.__file__}")
    name = f"planted_{module.__name__.rpartition('.')[2]}_{abs(hash((right, wrong)))}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    changed = importlib.util.module_from_spec(spec)
    sys.modules[name] = changed  # dataclasses look there
    spec.loader.exec_module(changed)
    return changed
