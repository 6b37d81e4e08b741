"""Rows go from a request into the encoder cache, and stay while a request may need them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from triptych.engines.vllm.connector import EMBEDDING_FIELD, EmbeddingConnector


@pytest.fixture
def connector() -> EmbeddingConnector:
    config: Any = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(is_ec_producer=False, is_ec_consumer=True),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    return EmbeddingConnector(config, ECConnectorRole.SCHEDULER)


def request(name: str, **rows: torch.Tensor | None) -> Any:
    """A request with an item for each hash; None: of its shape alone."""
    features = []
    for identifier, given in rows.items():
        fields = {"image_grid_thw": torch.tensor([1, 2, 2])}
        if given is not None:
            fields[EMBEDDING_FIELD] = given
        item = MultiModalKwargsItem(
            {
                field: MultiModalFieldElem(value, MultiModalBatchedField())
                for field, value in fields.items()
            }
        )
        features.append(SimpleNamespace(identifier=identifier, data=item))
    return SimpleNamespace(request_id=name, mm_features=features)


def load(connector: EmbeddingConnector) -> dict[str, torch.Tensor]:
    """What a worker's cache holds after the step."""
    connector.bind_connector_metadata(connector.build_connector_meta(None))
    cache: dict[str, torch.Tensor] = {}
    connector.start_load_caches(cache)
    return cache


def test_rows_move_from_the_request_into_the_cache(connector):
    asked = request("r", a=torch.ones(2, 3), b=None)
    assert connector.ensure_cache_available(asked, 0)
    assert [EMBEDDING_FIELD in feature.data for feature in asked.mm_features] == [False, False]
    assert connector.has_cache_item("a")
    assert not connector.has_cache_item("b")
    connector.update_state_after_alloc(asked, 0)
    connector.update_state_after_alloc(asked, 1)
    cache = load(connector)
    assert set(cache) == {"a"}
    assert torch.equal(cache["a"], torch.ones(2, 3))


def test_a_step_loads_what_it_needs_and_the_next_nothing_more(connector):
    asked = request("r", a=torch.ones(2, 3))
    connector.ensure_cache_available(asked, 0)
    assert not load(connector)  # nothing was scheduled yet
    connector.update_state_after_alloc(asked, 0)
    assert load(connector)
    assert not load(connector)


def test_rows_stay_for_a_preempted_request_and_go_with_its_end(connector):
    asked = request("r", a=torch.ones(2, 3))
    for _ in range(2):
        connector.ensure_cache_available(asked, 0)
        assert connector.has_cache_item("a")
    assert connector.request_finished(asked) == (False, None)
    assert not connector.has_cache_item("a")
    assert not connector._users


def test_the_last_of_two_requests_lets_go_of_what_they_share(connector):
    first, second = (request(name, a=torch.ones(2, 3)) for name in "12")
    connector.ensure_cache_available(first, 0)
    connector.ensure_cache_available(second, 0)
    connector.request_finished(first)
    assert connector.has_cache_item("a")
    connector.request_finished(second)
    assert not connector.has_cache_item("a")


def test_one_picture_twice_in_a_request_is_let_go_once(connector):
    asked = request("r", a=torch.ones(2, 3))
    asked.mm_features += request("r", a=torch.ones(2, 3)).mm_features
    connector.ensure_cache_available(asked, 0)
    connector.request_finished(asked)
    assert not connector._embeddings
    assert not connector._users


def test_a_request_that_ended_before_it_was_seen(connector):
    assert connector.request_finished(request("r", a=torch.ones(2, 3))) == (False, None)
