"""Structured logs: one JSON object a line on stderr, level from TRIPTYCH_LOG.

``log = get(__name__)``, then ``log.info("worker_ready", worker=id)``: a name, then fields.
It rides on the standard library's logging, so that tests and embedders can listen there.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Any

import msgspec

_encode = msgspec.json.Encoder(enc_hook=str).encode


class Log:
    """A named source of events."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, error: BaseException | None = None, **fields: Any) -> None:
        """With the traceback of ``error``, where one is given."""
        if error is not None:
            fields["trace"] = "".join(traceback.format_exception(error))
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields})


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "source": record.name.removeprefix("triptych."),
            "event": record.getMessage(),
            "pid": record.process,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def get(name: str) -> Log:
    return Log(logging.getLogger(name))


def configure() -> None:
    """Send the events of this process to stderr. Unset or unknown level: warnings and worse."""
    level = logging.getLevelNamesMapping().get(os.environ.get("TRIPTYCH_LOG", "").upper())
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(_Lines())
    root = logging.getLogger()
    root.handlers[:] = [lines]
    root.setLevel(logging.WARNING)
    logging.getLogger("triptych").setLevel(logging.WARNING if level is None else level)
