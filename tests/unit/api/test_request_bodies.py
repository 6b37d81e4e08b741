"""Bodies that clients and benchmarks of OpenAI, vLLM and SGLang send: accepted, or refused by name.

``goldens/request_bodies.json`` has them. ``waits_for`` marks those whose fields the server does not
take yet; remove the mark with the change that makes it take them.
"""

import json
from pathlib import Path

import pytest

BODIES = json.loads((Path(__file__).parents[2] / "goldens" / "request_bodies.json").read_text())
DONE = [entry for entry in BODIES if "waits_for" not in entry]


@pytest.mark.parametrize("entry", DONE, ids=lambda entry: entry["source"])
async def test_a_body_is_accepted_or_refused_as_the_file_says(web, entry):
    reply = await web.ask(entry["path"], entry["body"])
    if entry["answer"] == "accepted":
        assert reply.status == 200, reply.body
    else:
        assert (reply.status, reply.code) == (400, "unsupported_parameter")
        assert reply.param == entry["param"]


def test_each_source_stands_there_once():
    sources = [entry["source"] for entry in BODIES]
    assert len(set(sources)) == len(sources)
    assert all(("param" in entry) == (entry["answer"] == "refused") for entry in BODIES)
