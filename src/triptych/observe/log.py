"""Structured logs: one JSON object a line on stderr, level from TRIPTYCH_LOG.

Modules log with the standard library, and this is what becomes of it.
"""

from __future__ import annotations

import logging
import os
import sys

import msgspec

from triptych.errors import InvalidConfig

LEVELS = ("debug", "info", "warning", "error", "critical")

_encode = msgspec.json.Encoder(enc_hook=str).encode


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "source": record.name.removeprefix("triptych."),
            "event": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def configure() -> None:
    """Send the events of this process to stderr. Without a level: warnings and worse."""
    level = os.environ.get("TRIPTYCH_LOG") or "warning"
    if level.lower() not in LEVELS:
        raise InvalidConfig(f"TRIPTYCH_LOG='{level}' is no level: say {', '.join(LEVELS)}")
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(_Lines())
    root = logging.getLogger()
    root.handlers[:] = [lines]
    root.setLevel(logging.WARNING)
    logging.getLogger("triptych").setLevel(level.upper())
