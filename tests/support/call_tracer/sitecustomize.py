"""Records when functions are entered, in every process that Python starts with this on its path.

``TRACED_CALLS`` names the functions (dotted, separated by spaces), ``TRACED_CALLS_FILE`` where a
line is written for each entry: the monotonic clock in nanoseconds, and the name.
"""

import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

WANTED = set(os.environ.get("TRACED_CALLS", "").split())
# By id of a code object, which is referenced so that no other gets its id; empty: not wanted.
_names: dict[int, tuple[CodeType, str]] = {}


def _name(frame: FrameType) -> str:
    name = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}"
    return name if name in WANTED else ""


def _record(frame: FrameType, event: str, _: Any) -> None:
    if event == "call":
        code = frame.f_code
        if id(code) not in _names:
            _names[id(code)] = code, _name(frame)
        if name := _names[id(code)][1]:
            os.write(_file, f"{time.monotonic_ns()} {name}\n".encode())


if WANTED:
    _file = os.open(os.environ["TRACED_CALLS_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    threading.setprofile(_record)
    sys.setprofile(_record)
