"""The real NIXL, which registers SGLang's memory as the host's.

SGLang registers its KV cache as GPU memory whatever its device is. On a CPU that memory is ordinary
memory, and NIXL must register it as such. For tests alone: the adapter knows nothing of it.
"""

from __future__ import annotations

from typing import Any

from nixl_cu13 import _api
from nixl_cu13._api import *  # noqa: F403
from nixl_cu13._api import nixl_agent_config as nixl_agent_config

GPU, HOST = "VRAM", "DRAM"


class nixl_agent(_api.nixl_agent):  # the name that SGLang imports
    def register_memory(self, regions: Any, mem_type: str | None = None, *rest: Any, **more: Any):
        return super().register_memory(regions, _host(mem_type), *rest, **more)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None):
        return super().get_reg_descs(descs, _host(mem_type))

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None):
        return super().get_xfer_descs(descs, _host(mem_type))

    def prep_xfer_dlist(
        self, agent: str, descs: Any, mem_type: str | None = None, *rest: Any, **more: Any
    ):
        return super().prep_xfer_dlist(agent, descs, _host(mem_type), *rest, **more)


def _host(mem_type: str | None) -> str | None:
    return HOST if mem_type == GPU else mem_type
