"""The names of what can be called: ``triptych://namespace.component.endpoint``.

A namespace keeps clusters apart that share one NATS server; a component is a worker; an endpoint
is what it offers. /cluster shows them. Subjects of NATS are made of these names, so nothing that
means something in a subject (dots, wildcards, blanks) may be in them.
"""

from __future__ import annotations

import re

from msgspec import Struct

from triptych.errors import InvalidConfig

SCHEME = "triptych://"
GENERATE = "generate"  # the one endpoint of a worker
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Endpoint(Struct, frozen=True):
    namespace: str
    component: str
    endpoint: str

    def __post_init__(self) -> None:
        for what in self.__struct_fields__:
            check_name(what, getattr(self, what))

    def __str__(self) -> str:
        return f"{SCHEME}{self.namespace}.{self.component}.{self.endpoint}"

    def subject(self, epoch: int) -> str:
        """Of NATS, for one incarnation of the worker."""
        return f"triptych.{self.namespace}.requests.{self.component}.{self.endpoint}.{epoch}"


def check_name(what: str, name: str) -> None:
    """Refuse what cannot be a name."""
    if not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"'{name}' cannot be the name of a {what}. Use letters, digits, '-' and '_', at "
            "most 64."
        )
