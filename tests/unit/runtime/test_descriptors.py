import resource
from pathlib import Path

import pytest

from triptych.runtime import descriptors


@pytest.fixture(autouse=True)
def unread():
    descriptors._most_maps.cache_clear()
    yield
    descriptors._most_maps.cache_clear()


def test_a_share_is_of_what_the_process_may_have():
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert descriptors.share(0.25) == most // 4
    told = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert descriptors.maps_share(0.125) == told // 8


@pytest.mark.parametrize("answer", [OSError("hidden"), b"unlimited"])
def test_a_kernel_that_does_not_tell_gives_the_usual(monkeypatch, answer):
    def read(path):
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(Path, "read_bytes", read)
    assert descriptors.maps_share(1) == descriptors.USUAL_MAPS
