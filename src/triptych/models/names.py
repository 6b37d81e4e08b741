"""Names of a checkpoint's tensors to those of our modules: one loop over a family's table."""

from __future__ import annotations

from collections.abc import Sequence

WeightPrefix = tuple[
    str, str, str
]  # of a stored name; "encoder", "language" or "" (not served); ours

# Computed, though old checkpoints store them.
_COMPUTED = (".inv_freq", ".embeddings.position_ids")


def map_weight_name(name: str, prefixes: Sequence[WeightPrefix]) -> tuple[str, str] | None:
    """Part and parameter name of a stored tensor; the first prefix that fits decides.

    One that nothing fits is the language part's, under its own name.
    """
    if name.endswith(_COMPUTED):
        return None
    for prefix, part, renamed in prefixes:
        if name.startswith(prefix):
            return (part, renamed + name.removeprefix(prefix)) if part else None
    return "language", name


def with_outer_prefix(
    prefixes: Sequence[WeightPrefix], outer: str = "model."
) -> tuple[WeightPrefix, ...]:
    """The same prefixes, with and without an outer one, which transformers 5 may have saved."""
    return tuple((outer + name, part, own) for name, part, own in prefixes) + tuple(prefixes)
