"""What holds for every test."""

from __future__ import annotations

import signal

# Under nohup it is ignored, by every process below too; some tests stop servers with it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
