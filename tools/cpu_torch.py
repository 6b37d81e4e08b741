"""Refuses, before anything is fetched, where pip would take torch for CUDA: gigabytes for nothing.

Run by the Python of a new environment for a machine without a GPU: see setup_vllm.sh.
"""

import json
import platform
import subprocess
import sys

TORCH = "torch==2.13.0"
ASKED = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", TORCH)


def main() -> None:
    if platform.machine() != "x86_64":  # elsewhere there is no other than that for CPUs
        return
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *ASKED],
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        sys.exit(f"pip finds no {TORCH}")
    [found] = json.loads(done.stdout)["install"]
    version = found["metadata"]["version"]
    if not version.endswith("+cpu"):
        sys.exit(
            f"pip would take {TORCH} for CUDA, which is no use without a GPU. Set "
            "PIP_EXTRA_INDEX_URL to PyTorch's index of CPU packages, and begin again."
        )


if __name__ == "__main__":
    main()
