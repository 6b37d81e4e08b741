"""What each worker loads, and what passes through whom."""

import random

import pytest

from support.requests64 import picture, png
from support.servers import image_part, serving, text_part
from triptych.engines.torch import tiny


def pictures(count):
    return [image_part(png(picture(random.Random(i)))) for i in range(count)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_apart_nobody_loads_another_stage_and_the_frontend_moves_no_tensor(family):
    with serving(str(tiny.ensure(family)), "--pattern=E*2/P/D", "--enable-multimodal") as server:
        answer = server.chat([*pictures(4), text_part("Which?")], max_tokens=8)
        assert answer.status == 200, answer.body
        state = server.request("/cluster").json
        workers = {worker["id"]: worker for worker in state["workers"]}

        for name in ("E-0", "E-1"):
            assert workers[name]["parameters"]["language"] == 0
            assert workers[name]["parameters"]["encoder"] > 0
        for name in ("P-0", "D-0"):
            assert workers[name]["parameters"]["encoder"] == 0
            assert workers[name]["parameters"]["language"] > 0

        sent = {name: worker["bytes_sent"].get("shm", 0) for name, worker in workers.items()}
        received = {name: w["bytes_received"].get("shm", 0) for name, w in workers.items()}
        assert sent["E-0"] > 0  # four pictures fan out over both
        assert sent["E-1"] > 0
        assert received["P-0"] == sent["E-0"] + sent["E-1"]
        assert received["D-0"] == sent["P-0"] > 0
        assert not any(worker["bytes_sent"].get("inline") for worker in workers.values())
        assert state["frontend"]["tensor_bytes"] == 0


def test_text_alone_skips_the_encoder():
    with serving(str(tiny.ensure("qwen2_5_vl")), "--pattern=E/PD", "--enable-multimodal") as server:
        before = server.cluster()["E-0"]["counters"]["encoded_items"]
        assert server.chat("Hello", max_tokens=4).status == 200
        assert server.cluster()["E-0"]["counters"]["encoded_items"] == before
        assert server.chat([*pictures(2), text_part("?")], max_tokens=4).status == 200
        assert server.cluster()["E-0"]["counters"]["encoded_items"] == before + 2
