"""docs/cases.md names tests that exist, for every case that it promises, and other pages lead to it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "cases.md"
CASES = [
    *(f"S{number}" for number in range(1, 11)),
    *(f"E{number}" for number in range(1, 8)),
    *("M1", "M2"),
    *(f"V{number}" for number in range(1, 5)),
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> dict[str, str]:
    """Each case's line of the table."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]
    return {line.split("|")[1].strip(): line for line in lines}


def functions(path: Path) -> set[str]:
    """Names of the test functions at the top of a module."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_case_has_its_line() -> None:
    assert list(rows()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_the_tests_that_a_line_names_exist(case: str) -> None:
    line = rows()[case]
    named = NAMED.findall(line)
    assert len(named) == line.count("::") > 0  # a name that the pattern does not take would go unchecked
    for file, function in named:
        assert (ROOT / file).is_file(), file
        assert function.startswith("test_")
        assert function in functions(ROOT / file), f"{file} has no {function}"


@pytest.mark.parametrize(("page", "link"), [("README.md", "docs/cases.md"), ("docs/exactness.md", "cases.md")])
def test_other_pages_lead_there(page: str, link: str) -> None:
    assert f"]({link})" in (ROOT / page).read_text(encoding="utf-8")
