import errno
import io
import json
import logging
import re
import sys

import pytest

from triptych.errors import InvalidConfig
from triptych.observe import log


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_events_are_lines_of_json(monkeypatch, capsys):
    monkeypatch.setenv("TRIPTYCH_LOG", "info")
    log.configure()
    out = logging.getLogger("triptych.some.where")
    out.debug("unseen")
    out.info("%s is ready", "E-0")
    out.error("failed", exc_info=ValueError("why"))
    ready, failed = lines(capsys)
    assert (ready["event"], ready["level"]) == ("E-0 is ready", "info")
    assert ready["source"] == "some.where"
    assert "ValueError: why" in failed["trace"]


def test_a_line_about_a_request_has_its_id(monkeypatch, capsys):
    monkeypatch.setenv("TRIPTYCH_LOG", "")
    log.configure("json")
    out = logging.getLogger("triptych.api.app")
    out.warning("request failed", extra={"request_id": "chatcmpl-1"})
    out.warning("no request")
    failed, other = lines(capsys)
    assert failed["request_id"] == "chatcmpl-1"
    assert "request_id" not in other


def test_text_lines_have_time_level_source_and_request(monkeypatch, capsys):
    monkeypatch.setenv("TRIPTYCH_LOG", "")
    log.configure("text")
    out = logging.getLogger("triptych.api.app")
    out.warning("request failed:\nno worker", extra={"request_id": "chatcmpl-1"})
    out.error("failed", exc_info=ValueError("why"))
    failed, other, *trace = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING api\.app\[\d+\] "
        r"request failed:\\nno worker request_id=chatcmpl-1",
        failed,
    )
    assert other.endswith(" failed")
    assert trace == ["ValueError: why"]


def test_warnings_by_default(monkeypatch, capsys):
    monkeypatch.setenv("TRIPTYCH_LOG", "")
    log.configure()
    logging.getLogger("triptych.x").info("unseen")
    logging.getLogger("triptych.x").warning("seen")
    logging.getLogger("asyncio").info("unseen")
    assert [line["event"] for line in lines(capsys)] == ["seen"]


def test_an_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv("TRIPTYCH_LOG", "bogus")
    with pytest.raises(InvalidConfig, match=r"'bogus' is not a log level: use debug, info"):
        log.configure()


def test_a_terminal_that_is_gone_stops_nothing(monkeypatch):
    """A closed terminal fails every write, also in the callback that stops the server."""

    class Gone(io.StringIO):
        def write(self, _):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    log.print_status("stopping")


def test_progress_prints_what_is_new_and_the_end(capsys):
    told = log.Progress()
    for fraction in (0.0, 0.1, 0.2, 1.0, 1.0):
        told("loading", fraction)
    told("warming up", 0.0)
    assert capsys.readouterr().err.splitlines() == [
        "loading ... 0%",
        "loading ... 100%",
        "warming up ... 0%",
    ]
