"""Triptych serves multimodal language models in three stages: encode, prefill and decode."""

__version__ = "0.1.0"
