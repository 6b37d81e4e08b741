"""Results as JSON, with what is needed to judge and repeat them, and the table in docs/."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
PACKAGES = ("aiohttp", "httptools", "msgspec", "tokenizers", "torch", "transformers", "uvloop")


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    what: str
    found: float
    unit: str
    target: float | None = None
    at_least: bool = False  # the target is a floor, not a ceiling
    detail: str = ""

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.found >= self.target if self.at_least else self.found <= self.target

    def row(self) -> str:
        sign = "≥" if self.at_least else "≤"
        target = "" if self.target is None else f"{sign} {self.target:g} {self.unit}".strip()
        mark = {None: "", True: "yes", False: "**no**"}[self.met]
        return f"| {self.what} | {self.found:.4g} {self.unit} | {target} | {mark} | {self.detail} |"


def save(name: str, figures: list[Figure], details: Any, quick: bool) -> Path:
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    result = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "changed_files": len(_git("status", "--porcelain", "--untracked-files=no").splitlines()),
        "command": f"python -m benchmarks {name}" + (" --quick" if quick else ""),
        "machine": machine(),
        "figures": [
            {
                "what": figure.what,
                "found": round(figure.found, 4),
                "unit": figure.unit,
                "target": figure.target,
                "at_least": figure.at_least,
                "met": figure.met,
                "detail": figure.detail,
            }
            for figure in figures
        ],
        "details": details,
    }
    file.write_text(_one_line_each(json.dumps(result, indent=2)) + "\n")
    return file


def commit() -> str:
    return _git("rev-parse", "HEAD")


def code() -> str:
    """A name of the commit and of whatever was changed since."""
    digest = hashlib.sha256(_git("diff", "HEAD").encode())
    for name in _git("ls-files", "--others", "--exclude-standard").splitlines():
        digest.update(name.encode() + (ROOT / name).read_bytes())
    return f"{commit()[:10]}-{digest.hexdigest()[:8]}"


def machine() -> dict[str, Any]:
    cpu = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [line for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[0].split()[1]) / 2**20, 1) if memory else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "load_average": os.getloadavg()[0],
    }


def write_page() -> None:
    """Put the figures of every result file between the markers of docs/benchmarks.md."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    tables = "\n\n".join(_table(result) for result in results if "figures" in result)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")


def _table(result: dict[str, Any]) -> str:
    rows = [
        Figure(
            entry["what"],
            entry["found"],
            entry["unit"],
            entry["target"],
            entry["at_least"],
            entry["detail"],
        ).row()
        for entry in result["figures"]
    ]
    host = result["machine"]
    return "\n".join(
        [
            f"### {result['name']}",
            "",
            f"`{result['command']}`, {result['date'][:10]}, commit `{result['commit'][:10]}`, "
            f"{host['cores']} cores of {host['cpu']}, Python {host['python']}.",
            "",
            "| what | found | target | met | |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )


def _one_line_each(text: str) -> str:
    """Innermost lists and objects on one line: a round is then a line, and a diff can be read."""
    return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def _lines(file: str) -> list[str]:
    path = Path(file)
    return path.read_text().splitlines() if path.is_file() else []
