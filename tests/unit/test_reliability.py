"""docs/reliability.md names tests that exist, and every numbered test has a row there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()
ROWS = dict(re.findall(r"^\| ([BFL]\d+) \|(.*)\|$", PAGE, re.MULTILINE))


def test_every_row_is_there_once_and_is_held_or_says_that_it_is_not():
    assert len(re.findall(r"^\| [BFL]\d", PAGE, re.MULTILINE)) == len(ROWS)
    for letter, least in (("B", 60), ("F", 28), ("L", 7)):
        rows = [row for row in ROWS if row[0] == letter]
        assert len(rows) >= least
        assert rows == [f"{letter}{number}" for number in range(1, len(rows) + 1)]
    for row, text in ROWS.items():
        held_by = text.rpartition("|")[2].strip()
        assert ("::test_" in held_by) == ("no test checks this row" not in text), row


def test_every_test_that_it_names_exists():
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE):
        assert name in names_of_tests(TESTS / file), f"{file}::{name} has moved"


def test_every_numbered_test_has_a_row():
    for path in TESTS.rglob("test_*.py"):
        for name in names_of_tests(path):
            if number := re.match(r"test_([bf]\d+)_", name, re.IGNORECASE):
                assert number[1].upper() in ROWS, f"{path}::{name}"


def names_of_tests(path: Path) -> set[str]:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, functions)}
