import pytest

from triptych.errors import InvalidPattern
from triptych.topology import Group, Role, Topology


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [
        ("EPD", [("EPD", 1)]),
        ("E/PD", [("E", 1), ("PD", 1)]),
        ("E/P/D", [("E", 1), ("P", 1), ("D", 1)]),
        ("EP/D", [("EP", 1), ("D", 1)]),
        ("E*2/P/D*3", [("E", 2), ("P", 1), ("D", 3)]),
        ("EPD*4", [("EPD", 4)]),
    ],
)
def test_a_pattern_is_read_and_written_back(pattern, groups):
    topology = Topology.parse(pattern)
    assert topology.groups == tuple(Group(Role(role), count) for role, count in groups)
    assert str(topology) == pattern


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("D/P", "E is missing"),
        ("P/D", "E is missing"),
        ("E/D/P", "in that order"),
        ("E/P/D/D", "D stands in it twice"),
        ("E/X/D", "'X' is not a stage"),
        ("E*0/PD", "no worker at all"),
        ("", "is not a role"),
        ("E//PD", "is not a role"),
        ("E/PD*", "is not a role"),
        ("e/pd", "is not a role"),
        ("E/PD*300", "more than 256"),
        ("E/PD ", "is not a role"),
    ],
)
def test_a_setting_that_cannot_be_served_is_refused_with_the_reason(pattern, reason):
    with pytest.raises(InvalidPattern, match=reason):
        Topology.parse(pattern)


def test_a_role_knows_its_phases():
    phases = {
        role: (Role(role).encodes, Role(role).phases) for role in ("E", "EP", "P", "PD", "EPD")
    }
    assert phases == {
        "E": (True, ""),
        "EP": (True, "P"),
        "P": (False, "P"),
        "PD": (False, "PD"),
        "EPD": (True, "PD"),
    }
