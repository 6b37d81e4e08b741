"""``triptych render``: prints the settings of a server as a Compose file or Kubernetes manifests.

It only writes documents. It starts and applies nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, Literal

from triptych.commands.terminal import write_stdout
from triptych.config import Config
from triptych.deploy import compose, kubernetes
from triptych.deploy.container import Containers, unmounted_comment

Target = Literal["compose", "kubernetes"]

# Written without quotes: a word that no YAML reader takes for a number, a date or a boolean. Old
# readers take `y` and `n` for booleans; PyYAML itself quotes `null`, `yes`, `off` and the like.
_PLAIN = re.compile(r"(?![ynYN]$)[A-Za-z/][A-Za-z0-9_./@-]*(:[A-Za-z0-9_./@-]+)*")
_FILE = re.compile(r"([!-~]([ -~]*[!-~])?\n)([ -~]*[!-~]\n)+")  # lines that `|` keeps as they are


def run(target: Target, config: Config, containers: Containers) -> int:
    """Print what ``target`` reads."""
    write_stdout(render_text(target, config, containers), end="")
    return 0


def render_text(target: Target, config: Config, containers: Containers) -> str:
    if target == "compose":
        documents = [compose.compose_document(config, containers)]
        comments = compose.compose_comments(config)
    else:
        documents = kubernetes.kubernetes_documents(config, containers)
        comments = kubernetes.kubernetes_comments(config, containers)
    return unmounted_comment(config, containers) + comments + to_yaml(documents)


def to_yaml(documents: Sequence[dict[str, Any]]) -> str:
    """The documents in block style, keys in their order."""
    import yaml  # for this command alone

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)  # lists stand below their key, indented

    def represent(dumper: Dumper, text: str) -> Any:
        style = None if _PLAIN.fullmatch(text) else "|" if _FILE.fullmatch(text) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    Dumper.add_multi_representer(str, represent)  # a Role
    text: str = yaml.dump_all(documents, None, Dumper, sort_keys=False, width=sys.maxsize)
    return text
