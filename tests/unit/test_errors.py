from triptych import errors
from triptych.errors import TriptychError, rebuild_error


def leaves(base):
    return [base, *(leaf for sub in base.__subclasses__() for leaf in leaves(sub))]


def test_an_error_survives_the_way_through_another_process():
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


def test_every_code_is_told_in_the_tree_and_stands_there_once():
    for kind in leaves(errors.RequestError) + leaves(errors.ServiceError):
        if kind.__subclasses__() or "code" not in vars(kind):
            continue
        assert errors.__doc__.count(f"{kind.status} {kind.code}\n") == 1
