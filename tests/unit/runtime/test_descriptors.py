import resource
from pathlib import Path

import pytest

from triptych.runtime import process


@pytest.fixture(autouse=True)
def unread():
    process._most_maps.cache_clear()
    yield
    process._most_maps.cache_clear()


def test_a_share_is_of_what_the_process_may_have():
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert process.descriptor_share(0.25) == most // 4
    told = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert process.memory_map_share(0.125) == told // 8


@pytest.mark.parametrize("answer", [OSError("hidden"), b"unlimited"])
def test_a_kernel_that_does_not_tell_gives_the_usual(monkeypatch, answer):
    def read(path):
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(Path, "read_bytes", read)
    assert process.memory_map_share(1) == process.USUAL_MAPS
