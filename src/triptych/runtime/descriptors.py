"""Open file descriptors: connections and shared segments take one each, so take all there are."""

from __future__ import annotations

import resource


def take_all() -> None:
    """Raise this process's soft limit to its hard limit; children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def share(part: float) -> int:
    """So many of what this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(soft * part)
