"""When the id of a worker may be taken."""

import os
import subprocess

import pytest

from triptych.errors import InvalidConfig
from triptych.messages import WorkerRecord
from triptych.runtime.discovery import Directory
from triptych.stages.worker import _check_free


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path)


def register(directory, pid, epoch=None):
    epoch = epoch or directory.claim("PD-0")
    directory.write(WorkerRecord("PD-0", "PD", epoch, "127.0.0.1:1", pid, "m"))


def test_the_id_of_a_living_worker_is_refused(directory):
    register(directory, os.getpid())
    with pytest.raises(InvalidConfig, match="--index"):
        _check_free(directory, "PD-0")


def test_the_id_of_a_dead_one_is_free_before_its_lease_is_over(directory):
    with subprocess.Popen(["true"]) as process:
        register(directory, process.pid)
    assert "PD-0" in directory.view()
    _check_free(directory, "PD-0")


def test_a_dead_one_that_nobody_has_waited_for_is_dead(directory):
    with subprocess.Popen(["true"]) as process:
        register(directory, process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _check_free(directory, "PD-0")


def test_a_later_process_of_the_same_number_is_another(directory):
    """Numbers come back, in containers at once: the process must be older than the record."""
    directory.path.mkdir(exist_ok=True)
    register(directory, os.getpid(), epoch=1)
    _check_free(directory, "PD-0")
