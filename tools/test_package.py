"""Builds wheel and sdist, and tries the wheel as a user has it: outside of the checkout.

Run by a Python that has `build` and all of Triptych's dependencies. The wheel goes into an
environment of its own, which finds the dependencies in this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from test_versions import tree

MOST_BYTES = 100_000_000  # that PyPI takes in a file, unless it was asked for more
COMMANDS = (
    ["bin/triptych", "--version"],
    ["bin/python", "-m", "triptych", "serve", "--help"],
    ["bin/triptych", "doctor", "--port=0"],
    ["bin/triptych", "demo", "--engine=fake", "--pattern=E/PD"],
)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="triptych-package-") as name:
        folder = Path(name)
        tree(folder / "source")
        build = [sys.executable, "-m", "build", "--outdir", str(folder / "dist")]
        subprocess.run([*build, str(folder / "source")], check=True, stdout=subprocess.DEVNULL)
        for file in sorted((folder / "dist").iterdir()):
            size = file.stat().st_size
            print(f"{file.name}: {size / 1e6:.1f} MB", flush=True)
            if size > MOST_BYTES:
                sys.exit(f"{file.name} is larger than the {MOST_BYTES / 1e6:.0f} MB of PyPI")
        shutil.rmtree(folder / "source")
        attempt(folder)
    return 0


def attempt(folder: Path) -> None:
    """Install the wheel without dependencies, and run its commands from an empty directory."""
    venv, empty = folder / "venv", folder / "empty"
    empty.mkdir()
    [wheel] = (folder / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(venv), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    [site] = venv.glob("lib/python*/site-packages")
    # Folders of packages alone: a link to the checkout is in a .pth file, not followed from here.
    folders = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "dependencies.pth").write_text("\n".join(folders))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRIPTYCH_", "PYTHON", "VIRTUAL_ENV"))
    }
    for program, *words in COMMANDS:
        done = subprocess.run(
            [str(venv / program), *words],
            cwd=empty,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{program} {' '.join(words)} failed:\n{done.stdout}")
        print(f"ok  {program} {' '.join(words)}", flush=True)
    code = "import triptych; print(triptych.__file__)"
    found = subprocess.check_output([venv / "bin/python", "-c", code], cwd=empty, text=True)
    if not found.startswith(str(venv)):
        sys.exit(f"another Triptych was tried: {found}")


if __name__ == "__main__":
    sys.exit(main())
