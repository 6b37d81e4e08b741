from __future__ import annotations

import pytest

from triptych.models import family

TABLE = family.with_outer_prefix(
    (
        ("tower.inner.", "encoder", "tower."),
        ("tower.", "encoder", "tower."),
        ("talker.", "", ""),
    )
)


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        ("tower.inner.x", ("encoder", "tower.x")),
        ("tower.x", ("encoder", "tower.x")),
        ("model.tower.inner.x", ("encoder", "tower.x")),
        ("model.layers.0.x", ("language", "model.layers.0.x")),
        ("lm_head.weight", ("language", "lm_head.weight")),
        ("talker.x", None),
        ("model.layers.0.rotary_emb.inv_freq", None),
        ("tower.embeddings.position_ids", None),
    ],
)
def test_the_first_prefix_that_fits_decides(stored: str, found: tuple[str, str] | None) -> None:
    assert family.map_weight_name(stored, TABLE) == found
