"""``triptych frontend``: the process around HTTP interface, processor and pipeline."""

from __future__ import annotations
