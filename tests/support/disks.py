"""A directory on a disk that can be full: a real one where this process may mount, else played."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.runtime import directory, run_dir

SIZE = 64 << 10


class SmallDisk:
    """A tmpfs of 64 KiB at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        with contextlib.suppress(OSError), open(self._ballast, "wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass

    def free(self) -> None:
        self._ballast.unlink()


class PlayedDisk:
    """Writing raises what a disk that is full raises."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> None:
        self.path = path
        self._patch = patch
        self._code = code

    def fill(self) -> None:
        def full(*_: object) -> None:
            raise OSError(self._code, os.strerror(self._code))

        for module in (run_dir, directory):
            self._patch.setattr(module, "check_writable", full)
        self._patch.setattr(directory.WorkerFiles, "write", full)

    def free(self) -> None:
        self._patch.undo()


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk | PlayedDisk]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)]
    try:
        mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
    except FileNotFoundError:
        mounted = False
    if not mounted:
        with pytest.MonkeyPatch.context() as patch:
            yield PlayedDisk(path, patch)
        return
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
