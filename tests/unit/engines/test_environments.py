"""Which Python the workers of an engine get, and what is said where none will do."""

import sys
from pathlib import Path

import pytest

from triptych.config import Config
from triptych.engines import environments
from triptych.engines.base import ENGINES, EngineKind
from triptych.engines.environments import engine_python
from triptych.errors import InvalidConfig


@pytest.fixture
def kinds(monkeypatch):
    """An engine that is made of a package of the standard library, and one of none that exists."""
    monkeypatch.setitem(ENGINES, "here", EngineKind("x", "json"))
    monkeypatch.setitem(
        ENGINES, "nowhere", EngineKind("x", "no_such_package", "`make setup-nowhere`")
    )


def fake_python(path: Path, script: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("engine", ["torch", "fake"])
def test_our_own_engines_run_in_our_own(engine):
    assert engine_python(Config(engine=engine)) == sys.executable


@pytest.mark.usefixtures("kinds")
def test_a_package_that_we_have_needs_no_other():
    assert engine_python(Config(engine="here")) == sys.executable


@pytest.mark.usefixtures("kinds")
def test_without_one_the_error_says_how_to_come_by_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(InvalidConfig, match=r"make setup-nowhere.*--engine-python"):
        engine_python(Config(engine="nowhere"))


@pytest.mark.usefixtures("kinds")
def test_one_beside_ours_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    python = fake_python(tmp_path / ".venv-nowhere/bin/python", "exit 0")
    assert engine_python(Config(engine="nowhere")) == python


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo no_such_package", "lacks no_such_package.*make setup-nowhere"),
        ("echo triptych av", r"lacks triptych, av.*\[media\]"),
        ("echo broken >&2; exit 1", "can't be run: broken"),
    ],
)
def test_one_that_lacks_something_is_refused(tmp_path, script, told):
    python = fake_python(tmp_path / "python", script)
    with pytest.raises(InvalidConfig, match=told):
        engine_python(Config(engine="nowhere", engine_python=python))


@pytest.mark.usefixtures("kinds")
def test_one_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="can't be run"):
        engine_python(Config(engine="nowhere", engine_python=str(tmp_path / "none")))


@pytest.mark.usefixtures("kinds")
def test_a_real_interpreter_is_asked():
    with pytest.raises(InvalidConfig, match=r"lacks no_such_package\."):
        environments._check_python(sys.executable, ENGINES["nowhere"])


@pytest.mark.parametrize(
    "given", [{"engine_args": "--x"}, {"engine_python": "python3"}, {"encoder": "native"}]
)
@pytest.mark.parametrize("engine", ["torch", "fake"])
def test_what_our_own_engines_would_ignore_is_refused(engine, given):
    with pytest.raises(InvalidConfig, match=f"not to {engine}"):
        engine_python(Config(engine=engine, **given))
