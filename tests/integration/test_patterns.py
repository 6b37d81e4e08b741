"""What each worker loads, and what passes through whom."""

import random

import pytest
from tools import tiny

from support.one_process import serving_in_one_process
from support.requests64 import picture, png
from support.servers import image_part, serving, text_part
from triptych.transfer.file import FOLDER_ID_FILE


def pictures(count):
    return [image_part(png(picture(random.Random(i)))) for i in range(count)]


@pytest.mark.parametrize("model", ["qwen2_5_vl", "llava"])
def test_each_worker_loads_its_own_stage_and_the_frontend_moves_no_tensor(model):
    """Real processes: ``test_demo_model``."""
    with serving_in_one_process(
        str(tiny.ensure_checkpoint(model)), "--pattern=E*2/P/D", "--enable-multimodal"
    ) as server:
        answer = server.chat([*pictures(4), text_part("Which?")], max_tokens=8)
        assert answer.status == 200, answer.body
        state = server.state()
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
    with serving_in_one_process(
        str(tiny.ensure_checkpoint("qwen2_5_vl")), "--pattern=E/PD", "--enable-multimodal"
    ) as server:
        before = server.cluster()["E-0"]["counters"]["encoded_items"]
        assert server.chat("Hello", max_tokens=4).status == 200
        assert server.cluster()["E-0"]["counters"]["encoded_items"] == before
        assert server.chat([*pictures(2), text_part("?")], max_tokens=4).status == 200
        assert server.cluster()["E-0"]["counters"]["encoded_items"] == before + 2


TRANSPORTS = ["shm", "nixl", "file", "inline"]


def flags_of(transport, folder):
    flags = ["--pattern=E/P/D", "--enable-multimodal", f"--transport={transport}"]
    return [*flags, f"--transfer-folder={folder}"] if transport == "file" else flags


def bytes_sent(server):
    return sum(sum(worker["bytes_sent"].values()) for worker in server.cluster().values())


def check_transport(server, transport, folder):
    """Every tensor went by it, and nothing of any is left."""
    workers = server.cluster()
    assert {workers[w]["transport"] for w in ("E-0", "P-0")} == {transport}
    assert list(workers["D-0"]["bytes_received"]) == [transport]
    assert workers["P-0"]["tickets"] == workers["P-0"]["segments"] == 0
    assert {file.name for file in folder.glob("*")} <= {FOLDER_ID_FILE}


@pytest.fixture(scope="module")
def answers():
    """What the same requests were answered, by transport."""
    return {}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_gives_the_same_tokens(transport, answers, tmp_path):
    folder = tmp_path / "shared"
    model = str(tiny.ensure_checkpoint("qwen2_5_vl"))
    with serving_in_one_process(model, *flags_of(transport, folder)) as server:
        before = bytes_sent(server)
        answers[transport] = []
        for i in range(5):
            content = [text_part(str(i)), *pictures(2), text_part("Which? " * 150)]
            answer = server.chat(content, max_tokens=2)
            assert answer.status == 200, answer.body
            answers[transport].append(answer.json["choices"])
        assert bytes_sent(server) - before > 1_000_000
        check_transport(server, transport, folder)
    assert all(same == answers[transport] for same in answers.values())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_do_not_pass_through_the_frontends_process(transport, tmp_path):
    """Counted by the kernel: what the frontend reads and writes, beside what workers hand over.

    Inline tickets do ride through it, which shows that the count would see them. The fake engine
    compares every byte that it receives with what was sent.
    """
    folder = tmp_path / "shared"
    with serving("--engine=fake", *flags_of(transport, folder)) as server:
        pid = server.state()["frontend"]["pid"]
        sent, moved = -bytes_sent(server), -bytes_moved(pid)
        for i in range(5):
            content = [text_part(str(i)), image_part(b"picture"), text_part("Which? " * 1000)]
            answer = server.chat(content, max_tokens=2)
            assert answer.status == 200, answer.body
        moved += bytes_moved(pid)
        sent += bytes_sent(server)
        assert sent > 1_000_000
        assert (moved > sent) is (transport == "inline")
        check_transport(server, transport, folder)


def bytes_moved(pid):
    with open(f"/proc/{pid}/io") as io:
        counts = dict(line.split(": ") for line in io.read().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])
