"""Rooms for a server on other people's machines, written down: Compose files and Kubernetes
manifests from the settings that ``triptych serve`` takes.

Data in, documents out: nothing here starts, applies or looks at anything.
"""

from __future__ import annotations

from typing import Literal

from triptych.commands.show.terminal import write
from triptych.config import Config
from triptych.deploy import compose, kubernetes, yaml
from triptych.deploy.container import Containers, unmounted

Target = Literal["compose", "kubernetes"]


def run(target: Target, config: Config, containers: Containers) -> int:
    """Print what ``target`` reads."""
    write(text(target, config, containers), end="")
    return 0


def text(target: Target, config: Config, containers: Containers) -> str:
    if target == "compose":
        documents, head = [compose.document(config, containers)], compose.head(config)
    else:
        documents = kubernetes.documents(config, containers)
        head = kubernetes.head(config, containers)
    return unmounted(config, containers) + head + yaml.dump(documents)
