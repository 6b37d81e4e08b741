import re
from pathlib import Path

from triptych import errors
from triptych.errors import TriptychError, rebuild_error


def leaves(base):
    return [base, *(leaf for sub in base.__subclasses__() for leaf in leaves(sub))]


def test_an_error_survives_another_process():
    for kind in leaves(errors.RequestError) + leaves(errors.ServiceError):
        error = kind.__new__(kind)
        TriptychError.__init__(error, "what to do", param="messages[0]")
        back = rebuild_error(error.failure())
        assert (back.status, back.code, back.message, back.param) == (
            error.status,
            error.code,
            "what to do",
            "messages[0]",
        )
        if kind.code not in {"internal_error", "service_unavailable"}:
            assert type(back) is kind


def test_every_code_is_in_the_tree_of_errors_once():
    for kind in leaves(errors.RequestError) + leaves(errors.ServiceError):
        if kind.__subclasses__() or "code" not in vars(kind):
            continue
        assert errors.__doc__.count(f"{kind.status} {kind.code}\n") == 1


def test_the_page_of_the_api_lists_every_code():
    """Proved with a code removed from the page."""
    page = Path(errors.__file__).parents[2] / "docs" / "interface.md"
    rows = re.findall(r"^\| ([45]\d\d(?:, [45]\d\d)*) \| (.*) \|$", page.read_text(), re.MULTILINE)
    listed = {
        (status, code)
        for statuses, codes in rows
        for status in map(int, statuses.split(", "))
        for code in re.findall(r"`([a-z_]+)`", codes)
    }
    kinds = [TriptychError, *leaves(errors.RequestError), *leaves(errors.ServiceError)]
    declared = {(kind.status, kind.code) for kind in kinds if "code" in vars(kind)}
    assert declared - listed == set()
    assert {code for _, code in listed} == {code for _, code in declared}
