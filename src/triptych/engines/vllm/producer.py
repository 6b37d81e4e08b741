"""vLLM's encoder connector that writes embeddings to files, for an engine that only encodes.

vLLM's own dies, and its engine with it, when a file can't be written: the disk is full, or the one
who asked is gone and has swept. Here such an item has no file, which whoever waits for it notices.
Runs in vLLM's processes.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

from triptych.engines.vllm.native import FILE_TENSOR, embedding_file_name

log = logging.getLogger(__name__)


class EmbeddingFileConnector(ECExampleConnector):  # type: ignore[misc]
    """Only for a producer: nothing is read here."""

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def save_caches(self, encoder_cache: dict[str, Tensor], mm_hash: str, **kwargs: Any) -> None:
        path = os.path.join(self._storage_path, embedding_file_name(mm_hash))
        rows = encoder_cache[mm_hash].detach().cpu().contiguous()
        try:
            save_file({FILE_TENSOR: rows}, f"{path}.part")
            os.rename(f"{path}.part", path)  # whole or not at all
        except (OSError, SafetensorError) as error:
            log.warning("an embedding could not be written: %s", error)
