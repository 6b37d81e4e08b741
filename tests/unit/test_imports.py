"""Imports point one way, and the frontend loads no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import triptych

ROOT = Path(triptych.__file__).parent
FLOORS = [  # a module may import from its own floor's package and from floors below
    {"cli", "__main__"},
    {"deploy"},
    {"commands"},
    {"usage"},
    {"api"},
    {"http"},
    {"prompt", "parsers", "sources"},
    {"pipeline"},
    {"stages"},
    {"engines"},
    {"models"},
    {"media"},
    {"placement", "transfer", "runtime"},
    {
        "blocks",
        "host",
        "config",
        "environment",
        "messages",
        "recipe",
        "requirements",
        "topology",
        "transfer.registry",  # a table, of which config takes the choices of --transport
        "errors",
        "checkpoint",
        "observe",
        "__init__",
    },
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            names = [alias.name for alias in node.names]
            yield from (f"{node.module}.{name}" for name in names)


def on_floor(parts):
    """The name in FLOORS that a module belongs to, the more exact one first."""
    return next((name for name in (".".join(parts[:2]), parts[0]) if name in FLOOR), None)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here = on_floor(path.relative_to(ROOT).with_suffix("").parts)
    assert here, f"{path.name} has no floor yet"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "triptych" or len(parts) < 2:
            continue
        there = on_floor(parts[1:]) or "__init__"
        assert FLOOR[there] >= FLOOR[here], f"{path.name} imports {name}, which is above it"
        if FLOOR[there] == FLOOR[here] and {here, there} == {"transfer", "runtime"}:
            pytest.fail(f"{path.name}: transfer and runtime do not know each other")


@pytest.mark.parametrize(
    "module",
    [
        "triptych.api.app",
        "triptych.commands.launch",
        "triptych.stages.process",
        "triptych.commands.ask",
        "triptych.commands.chat",
        "triptych.commands.demo",
    ],
)
def test_no_torch_without_need(module):
    code = (
        f"import sys, {module}; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'PIL', 'av') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (["--help"], ["http.client", "asyncio", "aiohttp", "jinja2", "triptych.deploy"]),
        (["serve", "--help"], ["http.client", "asyncio", "aiohttp", "jinja2", "triptych.deploy"]),
        (
            ["ask", "What?", "--url=http://127.0.0.1:1"],
            ["aiohttp", "jinja2", "uvloop", "triptych.commands.launch"],
        ),
        (
            ["chat", "--url=http://127.0.0.1:1"],
            ["aiohttp", "jinja2", "uvloop", "triptych.commands.launch"],
        ),
    ],
    ids=lambda words: words[0],
)
def test_commands_for_people_load_little(words, absent):
    """They start as fast as they load. Only a temporary server needs what a server needs."""
    code = (
        "import atexit, sys; from triptych.cli import main; "
        f"atexit.register(lambda: print([m for m in {absent} if m in sys.modules])); "
        f"main({words})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
