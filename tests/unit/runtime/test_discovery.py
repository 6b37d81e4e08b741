"""Names of endpoints, and the subjects that are made of them."""

import pytest

from triptych.errors import InvalidConfig
from triptych.runtime.discovery import Endpoint


def test_a_name_and_the_subject_of_one_incarnation():
    endpoint = Endpoint("prod", "PD-0", "generate")
    assert str(endpoint) == "triptych://prod.PD-0.generate"
    assert endpoint.subject(7) == "triptych.prod.requests.PD-0.generate.7"


@pytest.mark.parametrize("name", ["", "PD.0", "*", ">", "PD 0", "gener\nate", "généré", "x" * 65])
def test_characters_with_a_meaning_in_a_subject_are_refused_in_names(name):
    for names in ((name, "PD-0", "generate"), ("prod", name, "generate"), ("prod", "PD-0", name)):
        with pytest.raises(InvalidConfig):
            Endpoint(*names)
