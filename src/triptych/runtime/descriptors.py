"""What the kernel gives a process so many of, however small each is: descriptors, and maps.

Connections and shared segments take a descriptor each, so take all there are. Decoded media and
shared segments take a map each; without maps a process can allocate nothing more.
"""

from __future__ import annotations

import functools
import resource
from pathlib import Path

USUAL_MAPS = 65530  # of a kernel that does not tell


def take_all() -> None:
    """Raise this process's soft limit to its hard limit; children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def share(part: float) -> int:
    """So many of what this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(soft * part)


def maps_share(part: float) -> int:
    """So many of the maps that this process may have."""
    return int(_most_maps() * part)


@functools.cache
def _most_maps() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_bytes())
    except (OSError, ValueError):
        return USUAL_MAPS
