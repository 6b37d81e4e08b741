"""A worker's own folder, and what is left of those that were killed."""

import os
import subprocess
import sys

from triptych.engines.vllm.load import make_private_folder


def test_each_is_new_and_private(tmp_path):
    one, other = (
        make_private_folder(str(tmp_path)),
        make_private_folder(str(tmp_path)),
    )
    assert one != other
    assert one.parent == other.parent == tmp_path
    assert one.stat().st_mode & 0o077 == 0


def test_files_of_a_dead_worker_are_removed_and_nothing_else(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f"vllm-{dead.pid}-abc"
    (left / "deep").mkdir(parents=True)
    (left / "deep" / "file").touch()
    stays = [tmp_path / name for name in ("vllm-x-1", "other", f"vllm-{os.getppid()}-abc")]
    for path in stays:
        path.mkdir()
    mine = make_private_folder(str(tmp_path))
    assert set(tmp_path.iterdir()) == {mine, *stays}


def test_without_a_run_directory_it_is_a_temporary_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert make_private_folder("").parent == tmp_path
