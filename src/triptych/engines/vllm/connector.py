"""Embeddings into vLLM, for whatever model: a connector to its encoder cache.

vLLM takes embeddings of some models and kinds of media as input, and of others not. Its encoder
cache takes all: an item whose rows lie there is never encoded. Here they come with the request, as
one more field of the item (ROWS), and go from there into the cache. vLLM loads this class by name
in its own process, once beside the scheduler and once in each worker. Nothing is fetched from
elsewhere, and what is missing is not noticed here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.platforms import current_platform

EMBEDDING_FIELD = "triptych_rows"  # the field of an item: its embedding [tokens, width]


@dataclass
class EmbeddingsToLoad(ECConnectorMetadata):  # type: ignore[misc]
    """What the workers are to put into their caches before this step."""

    found: dict[str, Tensor]


class EmbeddingConnector(ECConnectorBase):  # type: ignore[misc]
    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._dtype = vllm_config.model_config.dtype
        self._rows: dict[str, Tensor] = {}  # by media hash, while a request holds them
        self._held: dict[str, list[str]] = {}  # request: hashes
        self._holders: Counter[str] = Counter()
        self._wanted: dict[str, Tensor] = {}  # for the step that is being put together

    # Beside the scheduler.

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Called before anything of a request is scheduled: take over what it brought.

        Rows may be needed again when the request is preempted, so they stay until it ends. They
        are taken out of the request, which goes to the workers too.
        """
        if request.request_id not in self._held:
            held = self._held[request.request_id] = []
            for feature in request.mm_features:
                if feature.data is not None and EMBEDDING_FIELD in feature.data:
                    self._rows[feature.identifier] = feature.data.pop(EMBEDDING_FIELD).data
                    self._holders[feature.identifier] += 1
                    held.append(feature.identifier)
        return True

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self._rows

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        identifier = request.mm_features[index].identifier
        if identifier in self._rows:
            self._wanted[identifier] = self._rows[identifier]

    def build_connector_meta(self, scheduler_output: Any) -> EmbeddingsToLoad:
        wanted, self._wanted = self._wanted, {}
        return EmbeddingsToLoad(wanted)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        for identifier in self._held.pop(request.request_id, ()):
            self._holders[identifier] -= 1
            if not self._holders[identifier]:
                del self._holders[identifier], self._rows[identifier]
        return False, None

    # In a worker.

    def start_load_caches(self, encoder_cache: dict[str, Tensor], **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EmbeddingsToLoad)
        device = torch.device(current_platform.device_type)
        for identifier, rows in metadata.found.items():
            encoder_cache[identifier] = rows.to(device, self._dtype, non_blocking=True)

    def save_caches(self, encoder_cache: dict[str, Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Nothing leaves from here."""
