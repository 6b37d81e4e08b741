"""Runs `pip install` and says what it does, a line at a time, with the seconds since the start.

    tools/pip_install.py --torch auto .venv/bin/python -c constraints.txt -e '.[torch,dev]'

``--torch`` says which torch is wanted where pip would take the one for CUDA (5 GB in all, not 1.9):
``cuda`` takes it, ``cpu`` refuses it, ``auto`` takes it and, where no GPU is, says how to come by
the smaller one.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

EVERY_SECONDS = 3.0  # a line at most so often, but for phases
DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")
ADVICE = (
    "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU packages (the URL that pytorch.org shows "
    "for Linux, Pip, CPU)"
)
_COLLECTING = re.compile(r"Collecting ([A-Za-z0-9._\[\],-]+)")
_DOWNLOADING = re.compile(r"Downloading (\S+) \(([^)]+)\)")
_INSTALLING = re.compile(r"Installing collected packages: (.*)")


class Teller:
    """Lines of pip become lines for people."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._said = -EVERY_SECONDS
        self._count = 0

    def say(self, text: str, *, now: bool = True) -> None:
        passed = time.monotonic() - self._start
        if now or passed - self._said >= EVERY_SECONDS:
            print(f"  {passed:4.0f} s  {text}", flush=True)
            self._said = passed

    def hear(self, line: str) -> None:
        line = line.strip()
        if _COLLECTING.match(line):
            self._count += 1
            self.say(f"looking for packages: {self._count} so far", now=False)
        elif found := _DOWNLOADING.match(line):
            size = found[2]
            large = "GB" in size or ("MB" in size and float(size.split()[0]) >= 30)
            self.say(f"downloading {found[1].rsplit('/', 1)[-1]}, {size}", now=large)
        elif found := _INSTALLING.match(line):
            self.say(f"installing {len(found[1].split(','))} packages")
        elif line.startswith("Building"):
            self.say(line[0].lower() + line[1:], now=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--torch", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("python", help="of the environment")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="of `pip install`")
    args = parser.parse_args()
    words: list[str] = args.words
    teller = Teller()
    if args.torch != "cuda" and (refusal := check_torch(args.python, args.torch, words, teller)):
        print(refusal, file=sys.stderr)
        return 1
    code = install(args.python, words, teller)
    if code == 0:
        teller.say(f"done: {size_of(args.python)}")
    return code


def check_torch(python: str, wanted: str, words: list[str], teller: Teller) -> str:
    """Says which torch pip would take; gives why it is refused, or nothing."""
    if platform.machine() != "x86_64" or (wanted == "auto" and has_gpu()):
        return ""  # elsewhere there is none but that for CPUs
    constraints = [word for pair in pairwise(words) if pair[0] == "-c" for word in pair]
    asked = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", "torch"]
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    teller.say("asking pip which torch it would take")
    done = subprocess.run([*pip, *constraints, *asked], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return ""  # the installation will say what is wrong
    [found] = json.loads(done.stdout)["install"]
    version = found["metadata"]["version"]
    if version.endswith("+cpu"):
        teller.say(f"torch {version}: for CPUs, 1.9 GB in all")
        return ""
    if wanted == "cpu":
        return (
            f"TORCH=cpu, but pip would take torch {version} for CUDA: {ADVICE}, or give TORCH=cuda."
        )
    teller.say(f"torch {version} for CUDA: 5 GB in all, and no GPU is here. For 1.9 GB instead,")
    teller.say(f"stop this and {ADVICE}")
    return ""


def has_gpu() -> bool:
    return any(Path(driver).exists() for driver in DRIVERS)


def install(python: str, words: list[str], teller: Teller) -> int:
    argv = [python, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar=off"]
    heard: list[str] = []
    with subprocess.Popen(
        [*argv, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            heard.append(line)
            teller.hear(line)
        code = pip.wait()
    if code:
        sys.stderr.write("".join(heard[-40:]))
    return code


def size_of(python: str) -> str:
    folder = Path(python).absolute().parents[1]
    size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_symlink())
    return f"{folder.name} has {size / 1e9:.1f} GB"


if __name__ == "__main__":
    sys.exit(main())
