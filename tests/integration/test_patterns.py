"""What each worker loads, and what passes through whom."""

import random

import pytest
from tools import tiny

from support.requests64 import picture, png
from support.servers import image_part, serving, text_part
from triptych.transfer.file import FOLDER_ID_FILE


def pictures(count):
    return [image_part(png(picture(random.Random(i)))) for i in range(count)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_apart_nobody_loads_another_stage_and_the_frontend_moves_no_tensor(family):
    with serving(
        str(tiny.ensure_checkpoint(family)), "--pattern=E*2/P/D", "--enable-multimodal"
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
    with serving(
        str(tiny.ensure_checkpoint("qwen2_5_vl")), "--pattern=E/PD", "--enable-multimodal"
    ) as server:
        before = server.cluster()["E-0"]["counters"]["encoded_items"]
        assert server.chat("Hello", max_tokens=4).status == 200
        assert server.cluster()["E-0"]["counters"]["encoded_items"] == before
        assert server.chat([*pictures(2), text_part("?")], max_tokens=4).status == 200
        assert server.cluster()["E-0"]["counters"]["encoded_items"] == before + 2


@pytest.fixture(scope="module")
def answers():
    """What the same requests were answered, by transport."""
    return {}


@pytest.mark.parametrize(
    ("transport", "through"), [("shm", False), ("nixl", False), ("file", False), ("inline", True)]
)
def test_tensors_do_not_pass_through_the_frontends_process(transport, through, answers, tmp_path):
    """Counted by the kernel: what the frontend reads and writes, beside what workers hand over.

    Inline tickets do ride through it, which shows that the count would see them.
    """
    folder = tmp_path / "shared"
    flags = ["--pattern=E/P/D", "--enable-multimodal", f"--transport={transport}"]
    if transport == "file":
        flags.append(f"--transfer-folder={folder}")
    with serving(str(tiny.ensure_checkpoint("qwen2_5_vl")), *flags) as server:
        pid = server.state()["frontend"]["pid"]
        content = [*pictures(2), text_part("Which? " * 150)]
        sent = -sum(sum(w["bytes_sent"].values()) for w in server.cluster().values())
        moved = -bytes_moved(pid)
        answers[transport] = []
        for i in range(5):
            answer = server.chat([text_part(str(i)), *content], max_tokens=2, temperature=0)
            assert answer.status == 200
            answers[transport].append(answer.json["choices"])
        moved += bytes_moved(pid)
        sent += sum(sum(w["bytes_sent"].values()) for w in server.cluster().values())
        assert sent > 1_000_000
        assert (moved > sent) is through
        workers = server.cluster()
        assert {workers[w]["transport"] for w in ("E-0", "P-0")} == {transport}
        assert list(workers["D-0"]["bytes_received"]) == [transport]
        assert workers["P-0"]["tickets"] == workers["P-0"]["segments"] == 0
    assert all(same == answers[transport] for same in answers.values())
    assert {file.name for file in folder.glob("*")} <= {FOLDER_ID_FILE}


def bytes_moved(pid):
    with open(f"/proc/{pid}/io") as io:
        counts = dict(line.split(": ") for line in io.read().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])
