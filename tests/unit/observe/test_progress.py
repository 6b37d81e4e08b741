import errno
import io
import sys

from triptych.observe.log import Progress, print_status


def test_a_terminal_that_is_gone_stops_nothing(monkeypatch):
    """A closed terminal fails every write, also in the callback that stops the server."""

    class Gone(io.StringIO):
        def write(self, _):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    print_status("stopping")


def test_it_emits_new_tokens_and_the_end_only(capsys):
    told = Progress()
    for fraction in (0.0, 0.1, 0.2, 1.0, 1.0):
        told("loading", fraction)
    told("warming up", 0.0)
    assert capsys.readouterr().err.splitlines() == [
        "loading ... 0%",
        "loading ... 100%",
        "warming up ... 0%",
    ]
