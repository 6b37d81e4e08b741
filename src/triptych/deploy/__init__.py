"""Rooms for a server on other people's machines, written down: Compose files and Kubernetes
manifests from the settings that ``triptych serve`` takes.

Data in, documents out: nothing here starts, applies or looks at anything.
"""

from __future__ import annotations

from typing import Literal

from triptych.commands.show.terminal import write_stdout
from triptych.config import Config
from triptych.deploy import compose, kubernetes, yaml
from triptych.deploy.container import Containers, unmounted_comment

Target = Literal["compose", "kubernetes"]


def run(target: Target, config: Config, containers: Containers) -> int:
    """Print what ``target`` reads."""
    write_stdout(render_text(target, config, containers), end="")
    return 0


def render_text(target: Target, config: Config, containers: Containers) -> str:
    if target == "compose":
        documents, head = (
            [compose.compose_document(config, containers)],
            compose.compose_comments(config),
        )
    else:
        documents = kubernetes.kubernetes_documents(config, containers)
        head = kubernetes.kubernetes_comments(config, containers)
    return unmounted_comment(config, containers) + head + yaml.dump(documents)
