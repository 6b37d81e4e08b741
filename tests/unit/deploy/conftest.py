"""The shell that commands of rendered files are pasted into."""

import os
import subprocess

import pytest

TOLD = 'printf "%s\\n" "$(basename "$0")" "$@" >> told'
STUBS = {"openssl": 'echo "0a1b"', "docker": TOLD, "kubectl": TOLD}


@pytest.fixture
def paste(tmp_path):
    """Runs the commands that a file shows, in a folder of their own, which it gives.

    The arguments of docker and kubectl are in its file ``told``, a word in a line.
    """
    programs, folder = tmp_path / "bin", tmp_path / "pasted"
    programs.mkdir()
    folder.mkdir()
    for name, script in STUBS.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)

    def run(text):
        commands = [line[4:] for line in text.splitlines() if line.startswith("#   ")]
        assert commands
        for command in commands:
            env = {"PATH": f"{programs}:{os.environ['PATH']}"}
            subprocess.run(["sh", "-c", command], cwd=folder, env=env, check=True)
        return folder

    return run
