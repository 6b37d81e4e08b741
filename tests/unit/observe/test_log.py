import json
import logging

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


def test_warnings_by_default(monkeypatch, capsys):
    monkeypatch.setenv("TRIPTYCH_LOG", "")
    log.configure()
    logging.getLogger("triptych.x").info("unseen")
    logging.getLogger("triptych.x").warning("seen")
    logging.getLogger("asyncio").info("unseen")
    assert [line["event"] for line in lines(capsys)] == ["seen"]


def test_an_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv("TRIPTYCH_LOG", "bogus")
    with pytest.raises(InvalidConfig, match=r"'bogus' is no level: say debug, info"):
        log.configure()
