import os
import tempfile
import time

import pytest

from triptych.errors import InvalidConfig
from triptych.runtime import run_dir


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leave(temporary, name, age=120.0, mode=0o700):
    path = temporary / f"{run_dir.RUN_DIR_PREFIX}{name}"
    path.mkdir()
    (path / "PD-0.json").touch()
    path.chmod(mode)
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_new_one_lasts_as_long_as_its_scope(temporary):
    with run_dir.use("") as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "file").touch()
    assert list(temporary.iterdir()) == []


def test_a_named_one_stays(temporary):
    with run_dir.use(str(temporary / "a/b")) as path:
        pass
    assert path.is_dir()


def test_files_of_a_killed_server_are_removed(temporary):
    dead = leave(temporary, "dead")
    with run_dir.use(""):
        assert not dead.exists()


def test_a_live_one_is_not_swept():
    with run_dir.use("") as path:
        os.utime(path, (time.time() - 120,) * 2)
        with run_dir.use(""):
            assert path.exists()


def test_folders_that_are_new_or_open_to_others_or_links_are_not_removed(temporary):
    kept = [leave(temporary, "young", age=1), leave(temporary, "open", mode=0o755)]
    (temporary / "elsewhere").mkdir(mode=0o700)
    os.utime(temporary / "elsewhere", (time.time() - 120,) * 2)
    link = temporary / f"{run_dir.RUN_DIR_PREFIX}link"
    link.symlink_to(temporary / "elsewhere")
    with run_dir.use(""):
        assert all(path.exists() for path in [*kept, link, temporary / "elsewhere"])


@pytest.mark.parametrize("name", ["file/below", "file"])
def test_one_that_cannot_be_used_is_refused(temporary, name):
    (temporary / "file").touch()
    with pytest.raises(InvalidConfig, match="--run-dir"), run_dir.use(str(temporary / name)):
        pass
