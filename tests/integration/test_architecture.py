"""docs/architecture.md is true: its names exist, and a request enters them in that order."""

import importlib
import re
import time
from pathlib import Path

import triptych
from support import pictures
from support.servers import image_part, serving, text_part

PAGE = Path(triptych.__file__).parents[2] / "docs" / "architecture.md"
TRACER = Path(__file__).parents[1] / "support" / "call_tracer"
NAME = re.compile(r"`([a-z_0-9]+(?:\.\w+)+)`")


def section(title: str) -> str:
    return PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def steps() -> list[str]:
    """Names of the numbered list, in order."""
    listed = re.findall(r"^\d+\. .*\n(?: +.*\n)*", section("A request's life"), re.MULTILINE)
    assert len(listed) == 12
    return NAME.findall("".join(listed))


def find(dotted: str) -> object:
    """The object of a dotted name within the package."""
    words = dotted.split(".")
    for count in range(len(words), 0, -1):
        try:
            found: object = importlib.import_module(".".join(["triptych", *words[:count]]))
        except ModuleNotFoundError:
            continue
        for word in words[count:]:
            found = getattr(found, word)
        return found
    raise AssertionError(f"{dotted} is no module of the package")


def test_every_name_on_the_page_exists():
    beside = NAME.findall(section("Beside this path"))
    assert len(steps()) > 20
    assert len(beside) > 20
    for name in [*steps(), *beside]:
        assert find(name) is not None


def test_a_request_enters_the_functions_in_the_documented_order(tmp_path):
    """Proved with two steps of the page exchanged, and with a name that no request enters."""
    order = [f"{name}.__init__" if isinstance(find(name), type) else name for name in steps()]
    calls = tmp_path / "calls"
    env = {
        "PYTHONPATH": str(TRACER),
        "TRACED_CALLS": " ".join(f"triptych.{name}" for name in order),
        "TRACED_CALLS_FILE": str(calls),
    }
    flags = ["--engine=fake", "--enable-multimodal", "--fake-decode", "--pattern=E/P/D"]
    with serving(*flags, env=env) as server:
        picture = image_part(pictures.encoded(pictures.draw(1, 84, 56)))
        model = server.model
        begin = time.monotonic_ns()
        answer = server.request(
            "/v1/chat/completions",
            {
                "model": model,
                "messages": [{"role": "user", "content": [picture, text_part("What is it?")]}],
                "max_tokens": 8,
                "stream": True,
            },
        )
        assert answer.body.endswith(b"data: [DONE]\n\n"), answer.body
    entered: dict[str, int] = {}
    for line in calls.read_text().splitlines():
        moment, _, name = line.partition(" ")
        if int(moment) >= begin:
            entered.setdefault(name.removeprefix("triptych."), int(moment))
    assert [name for name in order if name not in entered] == []
    assert sorted(order, key=lambda name: entered[name]) == order
