"""Embeddings into vLLM and out of it: two connectors to its encoder cache.

vLLM accepts embeddings as an input for some models and media only. Its encoder cache accepts all:
vLLM does not encode an item whose embedding is there. ``EmbeddingConnector`` takes the embedding
from the request, where it is one more field of the item (EMBEDDING_FIELD), and puts it into the
cache. ``EmbeddingFileConnector`` writes embeddings to files, in an engine that only encodes.
vLLM loads both by name, in its own processes.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector
from vllm.platforms import current_platform

from triptych.engines.vllm.extension import FILE_TENSOR, embedding_file_name

log = logging.getLogger(__name__)
EMBEDDING_FIELD = "triptych_rows"  # the field of an item: its embedding [tokens, width]


@dataclass
class EmbeddingsToLoad(ECConnectorMetadata):  # type: ignore[misc]
    """The embeddings that vLLM's workers put into their caches before the next step."""

    found: dict[str, Tensor]


class EmbeddingConnector(ECConnectorBase):  # type: ignore[misc]
    """One instance runs beside the scheduler, and one in each worker."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._dtype = vllm_config.model_config.dtype
        self._embeddings: dict[str, Tensor] = {}  # by media hash, while a request needs them
        self._hashes: dict[str, list[str]] = {}  # by request
        self._users: Counter[str] = Counter()
        self._next_step: dict[str, Tensor] = {}

    # Beside the scheduler.

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Take the embeddings out of a request before vLLM schedules it and sends it to workers.

        They stay here until the request ends: it may need them again after a preemption.
        """
        if request.request_id not in self._hashes:
            hashes = self._hashes[request.request_id] = []
            for feature in request.mm_features:
                if feature.data is not None and EMBEDDING_FIELD in feature.data:
                    self._embeddings[feature.identifier] = feature.data.pop(EMBEDDING_FIELD).data
                    self._users[feature.identifier] += 1
                    hashes.append(feature.identifier)
        return True

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self._embeddings

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        identifier = request.mm_features[index].identifier
        if identifier in self._embeddings:
            self._next_step[identifier] = self._embeddings[identifier]

    def build_connector_meta(self, scheduler_output: Any) -> EmbeddingsToLoad:
        next_step, self._next_step = self._next_step, {}
        return EmbeddingsToLoad(next_step)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        for identifier in self._hashes.pop(request.request_id, ()):
            self._users[identifier] -= 1
            if not self._users[identifier]:
                del self._users[identifier], self._embeddings[identifier]
        return False, None

    # In a worker.

    def start_load_caches(self, encoder_cache: dict[str, Tensor], **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EmbeddingsToLoad)
        device = torch.device(current_platform.device_type)
        for identifier, rows in metadata.found.items():
            encoder_cache[identifier] = rows.to(device, self._dtype, non_blocking=True)

    def save_caches(self, encoder_cache: dict[str, Tensor], mm_hash: str, **kwargs: Any) -> None:
        """This connector only loads."""


class EmbeddingFileConnector(ECExampleConnector):  # type: ignore[misc]
    """For an engine that only encodes (a producer): writes each embedding to a file.

    vLLM's own connector ends the engine when it can't write a file, because the disk is full or the
    folder is gone. This one logs it; the encoder that waits for the file then fails that item.
    """

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def save_caches(self, encoder_cache: dict[str, Tensor], mm_hash: str, **kwargs: Any) -> None:
        path = os.path.join(self._storage_path, embedding_file_name(mm_hash))
        rows = encoder_cache[mm_hash].detach().cpu().contiguous()
        try:
            save_file({FILE_TENSOR: rows}, f"{path}.part")
            os.rename(f"{path}.part", path)  # a reader sees the whole file or none
        except (OSError, SafetensorError) as error:
            log.warning("could not write the embedding of item %s: %s", mm_hash, error)
