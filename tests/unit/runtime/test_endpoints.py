"""Names of endpoints, and the subjects that are made of them."""

import pytest

from triptych.errors import InvalidConfig
from triptych.runtime.endpoints import Endpoint


def test_a_name_is_read_as_it_is_written():
    text = "triptych://prod.PD-0.generate"
    endpoint = Endpoint.parse(text)
    assert endpoint == Endpoint("prod", "PD-0", "generate")
    assert str(endpoint) == text
    assert endpoint.subject(7) == "triptych.prod.requests.PD-0.generate.7"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prod.PD-0.generate",
        "http://prod.PD-0.generate",
        "triptych://prod.generate",
        "triptych://prod.PD.0.generate",
        "triptych://.PD-0.generate",
        "triptych://prod.*.generate",
        "triptych://prod.>.generate",
        "triptych://prod.PD 0.generate",
        "triptych://prod.PD-0.gener\nate",
        "triptych://prod.PD-0.généré",
        f"triptych://prod.{'x' * 65}.generate",
    ],
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(InvalidConfig):
        Endpoint.parse(text)
