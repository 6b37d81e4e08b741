"""The glossary defines each word once, and the names of code in it exist."""

import ast
import re
from pathlib import Path

import triptych

PACKAGE = Path(triptych.__file__).parent
ROWS = re.findall(
    r"^\| (?!word|---)(.+?) \| (.+?) \| `([\w.]+)` \|$",
    (PACKAGE.parents[1] / "docs" / "glossary.md").read_text(),
    re.MULTILINE,
)


def test_every_word_is_defined_once():
    words = [word for row, _, _ in ROWS for word in row.split(", ")]
    assert len(words) == len(set(words)) > 50


def test_every_row_has_a_name_of_the_code():
    text = (PACKAGE.parents[1] / "docs" / "glossary.md").read_text()
    assert len(ROWS) == sum(line.startswith("| ") for line in text.splitlines()) - text.count(
        "| word |"
    )


def test_names_of_the_code_exist():
    assert [name for _, _, name in ROWS if not exists(name)] == []


def exists(dotted: str) -> bool:
    *folders, last = dotted.split(".")
    path = PACKAGE.joinpath(*folders)
    if (path / f"{last}.py").is_file() or (path / last).is_dir():
        return True
    module = path.with_suffix(".py")
    return module.is_file() and last in defined(module)


def defined(module: Path) -> set[str]:
    names = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names
