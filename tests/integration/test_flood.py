"""Load row 5 in small: many pictures at once beside text. Counts only, no times."""

import io
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from PIL import Image

from support.servers import image_part, serving, text_part

PICTURES, TEXTS = 40, 40
ROOM = 4 << 20  # bytes of large bodies; each has about one MB
GROWTH = 50 << 20  # bytes that a process may have grown by when all is over
HELD = ("tickets", "segments", "queued", "running")


@pytest.fixture(scope="module", params=["E/PD", "EPD"])
def server(request):
    flags = ["--engine=fake", "--fake-decode", "--enable-multimodal", f"--pattern={request.param}"]
    flags += [f"--limits-media-in-flight-bytes={ROOM}", "--cache-embeddings=0", "--cache-decoded=0"]
    with serving(*flags) as server:
        yield server


def noise(seed):
    """A JPEG file of some 750 kB, which is 1 MB as base64."""
    rng = random.Random(seed)
    out = io.BytesIO()
    Image.frombytes("RGB", (880, 880), rng.randbytes(3 * 880 * 880)).save(out, "JPEG", quality=75)
    return out.getvalue()


def ask(server, content):
    answer = server.chat(content, max_tokens=6, ignore_eos=True)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]["content"]


def shown(server, file):
    return ask(server, [image_part(file, "image/jpeg"), text_part("What is it?")])


def processes(server):
    state = server.state()
    return {"frontend": state["frontend"]["pid"]} | {w["id"]: w["pid"] for w in state["workers"]}


def memory(server):
    """Resident bytes of every process."""
    return {name: psutil.Process(pid).memory_info().rss for name, pid in processes(server).items()}


def descriptors(server):
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in processes(server).items()}


def large_bodies(server):
    text = server.request("/metrics").body.decode()
    found = re.findall(r"^triptych_media_large_bodies_(\w+?)(?:_total)? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_a_flood_of_pictures_stays_within_its_memory_limit_and_leaves_nothing(server):
    files = [noise(seed) for seed in range(PICTURES)]
    with ThreadPoolExecutor(8) as few:  # pools and buffers grow to what they need
        alone = list(few.map(lambda file: shown(server, file), files))
    assert len(set(alone)) > PICTURES // 2  # the answer depends on the picture
    text = ask(server, "Hello")
    base, open_files = memory(server), descriptors(server)

    with ThreadPoolExecutor(PICTURES + 4) as pool:
        flood = [pool.submit(shown, server, file) for file in files]
        texts = [pool.submit(ask, server, "Hello") for _ in range(TEXTS)]
        assert [one.result() for one in texts] == [text] * TEXTS
        assert [one.result() for one in flood] == alone

    counted = large_bodies(server)
    assert 2 << 20 < counted["peak_bytes"] <= ROOM
    assert (counted["bytes"], counted["waiting"], counted["refused"]) == (0, 0, 0)
    server.wait(
        lambda: not any(worker[held] for worker in server.cluster().values() for held in HELD),
        what="everything is given back",
    )
    server.wait(lambda: _at_most(descriptors(server), open_files), what="descriptors are closed")
    after = memory(server)
    assert {
        name: after[name] - base[name] for name in base if after[name] - base[name] > GROWTH
    } == {}


def _at_most(now, before):
    return all(now[name] <= before[name] for name in before)
