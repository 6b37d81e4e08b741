"""The set-up says what it does, and the version tests take both ends of every range."""

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pip_install(monkeypatch):
    module = load("pip_install")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    return module


def test_the_set_up_reports_its_phases_and_large_downloads(pip_install, capsys):
    teller = pip_install.Teller()
    for line in (
        "Collecting torch==2.13.0 (from triptych)",
        "Collecting filelock",
        "  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl (526.6 MB)",
        "  Downloading filelock-4.2.10-py3-none-any.whl (16 kB)",
        "Installing collected packages: filelock, torch",
    ):
        teller.hear(line + "\n")
    assert [line[10:] for line in capsys.readouterr().out.splitlines()] == [
        "looking for packages: 1 so far",
        "downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl, 526.6 MB",
        "installing 2 packages",
    ]


@pytest.mark.parametrize(
    ("wanted", "version", "gpu", "refused", "advised"),
    [
        ("auto", "2.13.0", False, False, True),
        ("auto", "2.13.0+cpu", False, False, False),
        ("auto", "2.13.0", True, False, False),
        ("cpu", "2.13.0", True, True, False),
        ("cpu", "2.13.0+cpu", False, False, False),
    ],
)
def test_the_chosen_torch_is_named_before_the_download(
    pip_install, monkeypatch, capsys, wanted, version, gpu, refused, advised
):
    report = json.dumps({"install": [{"metadata": {"version": version}}]})

    def run(argv, **_):
        assert argv[argv.index("-c") + 1] == "constraints.txt"
        return subprocess.CompletedProcess(argv, 0, report)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(pip_install, "has_gpu", lambda: gpu)
    words = ["-c", "constraints.txt", "-e", "."]
    told = pip_install.check_torch("python", wanted, words, pip_install.Teller())
    assert bool(told) is refused
    assert ("PIP_EXTRA_INDEX_URL" in told) is refused
    assert ("PIP_EXTRA_INDEX_URL" in capsys.readouterr().out) is advised


def test_lowest_has_the_lower_bound_of_every_range():
    lowest = dict(line.split("==") for line in load("test_versions").lowest())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in ("media", "torch", "cluster"):
        wanted += project["optional-dependencies"][extra]
    for requirement in wanted:
        if requirement == "triptych[media]":
            continue
        name, _, bounds = requirement.partition(">=")
        low, _, high = bounds.partition(",<")
        assert lowest[name.partition("[")[0]] == low, requirement
        assert high, f"{requirement} has no upper bound: newer ones were never tried"
