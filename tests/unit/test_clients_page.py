"""docs/clients.md names tests that exist, and every test of a client stands there; its versions are
those of the environment."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "clients"
PAGE = (ROOT / "docs" / "clients.md").read_text()


def named() -> set[tuple[str, str]]:
    """(file, test) of every cell; a row's second column names its file."""
    found = set()
    for row in re.findall(r"^\|(.*`test_\w+\.py`.*)\|$", PAGE, re.MULTILINE):
        file = re.findall(r"`(test_\w+\.py)`", row)[0]
        found |= {(file, name) for name in re.findall(r"`(test_\w+)`", row)}
    return found


def written() -> set[tuple[str, str]]:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {
        (path.name, node.name)
        for path in CLIENTS.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions) and node.name.startswith("test_")
    }


def test_the_page_names_the_tests_that_there_are():
    assert named() == written()


def test_versions_are_those_that_are_installed():
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints-clients.txt").read_text().splitlines()
        if "==" in line
    )
    package = json.loads((CLIENTS / "npm" / "package.json").read_text())
    pinned |= {f"npm:{name}": version for name, version in package["dependencies"].items()}
    versions = re.findall(r"`([@:\w/-]+)` (\d+\.[\w.]+)", PAGE)
    assert len(versions) >= 9
    for name, version in versions:
        assert pinned[name] == version, name
