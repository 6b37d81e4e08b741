"""Fixtures with a tiny checkpoint of each family."""

from support.tiny_checkpoints import checkpoints, model

__all__ = ["checkpoints", "model"]
