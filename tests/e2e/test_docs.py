"""What the documents say is so: links, names, settings, the snippet and the demo."""

import base64
import functools
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.servers import serving
from triptych import config
from triptych.cli import _parser
from triptych.config import flags

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text()


def resolve(name):
    """``pipeline.run.Pipeline.run`` below triptych, to whatever it names."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(["triptych", *parts[:end]]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], module)
    raise AssertionError(f"{name} names nothing")


def test_every_step_of_the_architecture_names_something_that_is_there():
    text = (ROOT / "docs/architecture.md").read_text()
    life = text.split("## A request's life")[1].split("\n## ")[0]
    names = re.findall(r"`([a-z_]+(?:\.\w+)+)`", life)
    assert len(names) >= 15
    for name in names:
        resolve(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def test_the_tree_in_the_readme_is_the_tree():
    tree = README.split("## The tree")[1].split("```")[1]
    for folder in (ROOT / "src/triptych").iterdir():
        if (folder / "__init__.py").is_file():
            assert f"  {folder.name}/" in tree, folder.name
    for name in re.findall(r"(\w+\.py)", tree):
        assert (ROOT / "src/triptych" / name).is_file(), name


def test_make_targets_of_the_readme_are_there():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(
        r"^make ([a-z]+)", README + (ROOT / "CONTRIBUTING.md").read_text(), re.M
    ):
        assert target in targets


@pytest.mark.parametrize("file", sorted(ROOT.glob("deploy/*.toml")), ids=lambda p: p.name)
def test_settings_files_are_valid(file):
    read = config.load(tomllib.loads(file.read_text()), {})
    assert file.stem == read.pattern.lower().replace("/", "-")


def test_help_teaches_every_setting():
    done = subprocess.run(
        [sys.executable, "-m", "triptych", "serve", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    for flag in flags():
        assert flag.name in done.stdout
    assert "E*2/P/D*3" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_can_be_read_and_typed(page):
    """Those in code blocks: every word is known, and no shell takes a ``*`` for files."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.S | re.M)
    for line in "\n".join(blocks).splitlines():
        if line.startswith("triptych "):
            words = shlex.split(line, comments=True)
            _parser().parse_args(words[1:])
            assert not any("*" in word and f"'{word}'" not in line for word in words)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/operations.md"])
def test_flags_in_documents_are_there(page):
    known = {flag.name for flag in flags()} | {"--config", "--role", "--index", "--help"}
    for name in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b(?!\.)(?!-)", page.read_text()):
        assert name in known, name


def test_the_readmes_snippet_runs():
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    picture = (ROOT / "src/triptych/assets/demo.png").read_bytes()
    with serving("--engine=fake", "--pattern=E/PD", "--enable-multimodal") as server:
        code = code.replace("http://127.0.0.1:8000", server.url)
        code = code.replace("base64,...", f"base64,{base64.b64encode(picture).decode()}")
        names = {}
        exec(code, names)  # our own README
        assert names["answer"].choices[0].message.content
        names["client"].close()


@pytest.mark.parametrize(
    ("engine", "note"), [("torch", "random weights"), ("fake", "answers are invented")]
)
def test_the_demo_asks_and_answers(engine, note):
    argv = [sys.executable, "-m", "triptych", "demo", f"--engine={engine}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for line in ("picture ", "question ", "answer ", "stages "):
        assert re.search(rf"^{line}", done.stdout, re.M), done.stdout
    stages = re.search(r"^stages +(.*)$", done.stdout, re.M)[1]
    for stage in ("encode", "transfer", "prefill", "decode"):
        assert re.search(rf"{stage} \d+\.\d ms", stages)
    assert note in done.stdout
    assert (ROOT / re.search(r"^picture +(\S+)", done.stdout, re.M)[1]).is_file()
