import pytest

from triptych.errors import InvalidConfig
from triptych.runtime.process import ready_marker


def test_it_is_there_only_while_ready(tmp_path):
    """Fails without the ``unlink`` before: a killed process would be taken for a ready one."""
    file = tmp_path / "ready"
    file.touch()  # of one that was killed
    with ready_marker(str(file)) as ready:
        assert not file.exists()
        ready()
        assert file.exists()
    assert not file.exists()


def test_none_is_made_without_a_name():
    with ready_marker("") as ready:
        ready()


def test_one_that_cannot_be_made_is_refused_at_once(tmp_path):
    with (
        pytest.raises(InvalidConfig, match="--ready-file"),
        ready_marker(str(tmp_path / "no" / "x")),
    ):
        pass
