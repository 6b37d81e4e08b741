"""Rendered documents read back as they were."""

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.deploy import to_yaml

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "null",
        "Yes",
        "off",
        "~",
        "1e3",
        "0x10",
        "2001-01-01",
        "a: b",
        "a #b",
        "-",
        "nats:2",
        "=",
        "<<",
        "a: b\n  #c\n",
        " a\nb\n",
        "a\nb ",
        "a\n\n",
    ]
)
LEAVES = WORDS | st.integers() | st.booleans()
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.lists(st.dictionaries(WORDS, TREES, min_size=1, max_size=4), min_size=1, max_size=3))
def test_documents_come_back_as_they_were(documents):
    """Fails with ``[^\\n]*`` as ``_FILE``."""
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents


def test_it_is_block_style_that_people_read():
    document = {"a": {"b": [{"c": 1, "d": "2"}, ["e"]], "f": {}, "g": []}}
    assert to_yaml([document, {"h": True}]) == (
        'a:\n  b:\n    - c: 1\n      d: "2"\n    - - e\n  f: {}\n  g: []\n---\nh: true\n'
    )
    assert to_yaml([{"a": {"file": "b: 1\n  c\n"}}]) == "a:\n  file: |\n    b: 1\n      c\n"


def test_words_that_some_readers_take_for_others_are_quoted():
    words = ["y", "N", "yes", "null", "1e3", "0o7", "010", "1:20"]
    for line in to_yaml([{"a": words}]).splitlines()[1:]:
        assert line[4] in "'\"", line
