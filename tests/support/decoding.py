"""Decode pools whose processes a test controls, and what such a pool leaves behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import psutil

from triptych.config import CacheSettings, Config, Limits
from triptych.media.pool import DecodePool
from triptych.messages import MediaItem
from triptych.recipe import Recipes

RECIPES = Recipes("a revision")


def pool(processes=1, cache=0, preparer="support.preparer", **limits):
    config = Config(
        decode_processes=processes,
        cache=CacheSettings(decoded=cache),
        limits=msgspec.structs.replace(Limits(), **limits),
    )
    return DecodePool(RECIPES, config, preparer=preparer)


def item(*words, kind="image", form="file"):
    """An item that makes the process do something: see ``support.preparer``."""
    return MediaItem(kind, 0, json.dumps(words).encode(), form)


def told(prepared):
    """What the process gave."""
    return json.loads(bytes(prepared.arrays[0].buffer))


def children():
    return [
        child.pid
        for child in psutil.Process().children()
        if "triptych.media.sandbox" in child.cmdline()
    ]


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def maps():
    """Lines of this process's maps that are memory of decoded media."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:triptych-media" in line]
