"""A name means one thing in the package: two modules define it only as a declared interface."""

from pathlib import Path

import pytest
from tests.unit.test_tools import ROOT, load

import triptych

PACKAGE = Path(triptych.__file__).parent
measure_code = load("measure_code")


@pytest.mark.parametrize("kind", [measure_code.find_types, measure_code.find_public_functions])
def test_a_name_means_one_thing(kind):
    assert measure_code.find_repeated(PACKAGE, kind) == {}


def test_every_interface_has_several_modules_and_a_reason(monkeypatch):
    interfaces = dict(measure_code.INTERFACES)
    assert all(reason for _, reason in interfaces.values())
    monkeypatch.setattr(measure_code, "INTERFACES", {})
    repeated = measure_code.find_repeated(PACKAGE, measure_code.find_public_functions)
    assert sorted(interfaces.keys() - repeated.keys()) == []


def test_the_measures_count_what_they_say(tmp_path):
    package = tmp_path / "src" / "triptych"
    package.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "architecture.md").write_text(
        "Not `two`.\n1. First `one.Thing.run`,\n   then on.\n"
    )
    (package / "one.py").write_text(
        '"""Doc\nstring."""\n\n# comment\nclass Thing:\n    """Doc."""\n\n'
        '    text = """two\nlines"""\n'
    )
    (package / "two.py").write_text(
        "Thing = int\n\ndef ask():\n    try:\n        pass\n"
        "    except (OSError, Exception):\n        pass\n"
        "    with suppress(Exception):\n        pass\n"
    )
    (package / "three.py").write_text("def ask(): ...\ndef main(): ...\ndef _private(): ...\n")
    assert [value for _, value in measure_code.measure(tmp_path)] == [
        "3 / 14",
        "1 / 3",
        "1",
        "1",
        "2",
    ]
    assert (ROOT / "docs" / "architecture.md").is_file()
    assert measure_code.find_spine(ROOT)
