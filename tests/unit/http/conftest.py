"""Fixtures of the HTTP interface over a stub pipeline."""

from support.served_app import memory, open_site, pytest_asyncio_loop_factories, web, wire

__all__ = ["memory", "open_site", "pytest_asyncio_loop_factories", "web", "wire"]
