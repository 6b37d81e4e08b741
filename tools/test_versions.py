"""Tries every Python with the lowest and the newest packages that pyproject.toml admits.

    python tools/test_versions.py                            all cells, a table at the end
    python tools/test_versions.py --python 3.12 --packages newest

For each cell it makes an empty environment, installs the wheel with the extras torch and cluster,
and, from an empty directory, runs `triptych doctor`, `triptych demo` and a choice of tests. A cell
that can't be built is a row of the table too, with the reason. The exit code is 0 if all are green.

`lowest` takes the lower bound of each range, `locked` constraints.txt, `newest` what pip finds.
Only wheels are taken. Where pip finds torch for CUDA alone, a cell needs 6 GB while it runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PACKAGES = ("lowest", "locked", "newest")
EXTRAS = ("torch", "cluster")
TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "openai", "psutil")
SHOWN = ("torch", "transformers", "av", "numpy", "pillow")
TESTS = (  # what other versions of Python and of packages can break
    "tests/unit/media",
    "tests/unit/prompt",
    "tests/unit/sources",
    "tests/unit/http",
    "tests/unit/api",
    "tests/unit/test_config.py",
    "tests/unit/engines/torch/test_llava_next_video.py",  # these two: tokens and logprobs of stock
    "tests/unit/engines/torch/test_qwen2_5_omni.py",
    "tests/unit/engines/torch/test_sampler.py",
    "tests/unit/engines/torch/test_weights.py",
    "--ignore=tests/unit/media/test_pool.py",  # slow, and of our own processes alone
    "-k=not leave_no_cycles and not cpu_time",  # slow
)
ONLY_WHEELS = ("--only-binary=:all:", "--no-binary=nkeys")  # nkeys has none, and is plain Python
STEP_SECONDS = 1800.0
LAST_LINES = 15


class Broken(Exception):
    """A step of a cell that failed, with the end of what it printed."""


@dataclass
class Cell:
    python: str
    packages: str
    steps: dict[str, float] = field(default_factory=dict)  # seconds of each that was green
    versions: str = ""
    size: str = ""
    error: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--python", action="append", choices=PYTHONS)
    parser.add_argument("--packages", action="append", choices=PACKAGES)
    parser.add_argument("--demo-only", action="store_true", help="doctor and demo, no tests")
    args = parser.parse_args()
    chosen = [
        Cell(python, packages)
        for python in args.python or PYTHONS
        for packages in args.packages or PACKAGES
    ]
    with tempfile.TemporaryDirectory(prefix="triptych-versions-") as name:
        folder = Path(name)
        wheel = build(folder)
        for cell in chosen:
            print(f"\nPython {cell.python}, {cell.packages} packages", flush=True)
            try:
                attempt(cell, wheel, folder, tests=not args.demo_only)
            except Broken as error:
                cell.error = str(error)
                print(cell.error, flush=True)
    print(f"\n{table(chosen)}")
    return 1 if any(cell.error for cell in chosen) else 0


def build(folder: Path) -> Path:
    """The wheel that all cells install."""
    source = folder / "source"
    tree(source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(source)], check=True)
    [wheel] = folder.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    return wheel


def tree(target: Path) -> None:
    """Copy what git knows of this tree, or would add: nothing that an earlier build left behind."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
    files = subprocess.run([*listed, "--exclude-standard"], capture_output=True, check=True)
    for file in filter(None, files.stdout.decode().split("\0")):
        if (ROOT / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target / file)


def attempt(cell: Cell, wheel: Path, folder: Path, *, tests: bool) -> None:
    """Build and try one cell; raises Broken."""
    venv, empty = folder / "venv", folder / "empty"
    for old in (venv, empty):
        shutil.rmtree(old, ignore_errors=True)
    empty.mkdir()
    python = str(venv / "bin" / "python")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRIPTYCH_", "PYTHON", "VIRTUAL_ENV"))
    }

    def step(name: str, argv: list[str], cwd: Path = empty) -> str:
        started = time.monotonic()
        done = run(argv, cwd, environment)
        seconds = time.monotonic() - started
        lines = [line for line in done.stdout.splitlines() if line and "WARNING: " not in line]
        if done.returncode:
            told = "\n".join(f"    {line}" for line in lines[-LAST_LINES:])
            raise Broken(f"{name} failed (code {done.returncode})\n{told}")
        cell.steps[name] = seconds
        print(f"  {name:8} {seconds:5.0f} s   {lines[-1] if lines else ''}", flush=True)
        return done.stdout

    interpreter = find_python(cell.python)
    step("venv", [interpreter, "-m", "venv", str(venv)])
    # Of what pip would compile few files are ever imported, and those Python compiles itself.
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    constraints = folder / "constraints.txt"
    constraints.write_text(constraints_of(cell.packages))
    wanted = [f"{wheel}[{','.join(EXTRAS)}]", *TOOLS]
    step("install", [*pip, *ONLY_WHEELS, "-c", str(constraints), *wanted])
    listed = step("versions", [python, "-m", "pip", "list", "--format=freeze"])
    found = dict(line.split("==") for line in listed.splitlines() if "==" in line)
    cell.versions = ", ".join(f"{name} {found.get(name, '-')}" for name in SHOWN)
    cell.size = folder_size(venv)
    triptych = str(venv / "bin" / "triptych")
    step("doctor", [triptych, "doctor", "--port=0"])
    step("demo", [triptych, "demo"])
    if not tests:
        return
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    step("tests", [*pytest, "--import-mode=importlib", *TESTS], ROOT)


def run(argv: list[str], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=STEP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise Broken(f"{Path(argv[0]).name} took more than {STEP_SECONDS:.0f} s") from None


def find_python(version: str) -> str:
    """An interpreter of that version: on PATH, or one of pyenv's, whose shims may lead nowhere."""
    for candidate in candidates(version):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    raise Broken(f"there is no python{version}, on PATH or below pyenv")


def candidates(version: str) -> Iterator[str]:
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if path := shutil.which(f"python{version}", path=folder):
            yield path
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(root.glob(f"versions/{version}.*/bin/python{version}")))


def constraints_of(packages: str) -> str:
    """The text of a constraints file: which versions pip is to take."""
    makers: dict[str, Callable[[], str]] = {
        "lowest": lambda: "\n".join(lowest()),
        "locked": lambda: (ROOT / "constraints.txt").read_text(),
        "newest": lambda: "",
    }
    return makers[packages]()


def lowest() -> Iterator[str]:
    """``av==14`` for ``av>=14,<20``, of all that the extras need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *optional["media"], *optional["torch"],
                        *optional["cluster"]]:  # fmt: skip
        if bound := re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?>=([0-9.]+)", requirement):
            yield f"{bound[1]}=={bound[2]}"


def folder_size(folder: Path) -> str:
    size = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    return f"{size / 1e9:.1f} GB"


def table(cells: list[Cell]) -> str:
    rows = [("Python", "packages", "result", "size", "install", "demo", "tests", "versions")]
    for cell in cells:
        result = cell.error.splitlines()[0] if cell.error else "green"
        times = [f"{cell.steps[n]:.0f} s" if n in cell.steps else "-" for n in rows[0][4:7]]
        rows.append(
            (cell.python, cell.packages, result, cell.size or "-", *times, cell.versions or "-")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
