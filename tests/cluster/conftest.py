"""One server with two workers of every role, and what it answers undisturbed."""

import pytest

from support.servers import serving
from support.streams import body, streamed, whole

STREAMS, TOKENS = 50, 80
FAKE = ["--engine=fake", "--enable-multimodal"]
SLOW = ["--fake-encode-ms=150", "--fake-ttft-ms=150", "--fake-step-ms=20"]
NO_CACHE = ["--cache-embeddings=0", "--cache-decoded=0"]  # every request encodes and prefills
SECRET = {"TRIPTYCH_SECRET": "s" * 32}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def server(run_dir):
    flags = [*FAKE, *SLOW, *NO_CACHE, "--pattern=E*2/P*2/D*2", f"--run-dir={run_dir}"]
    with serving(*flags, env=SECRET) as server:
        yield server


@pytest.fixture(scope="module")
def bodies(server):
    """Of seeded, sampled requests with a picture each."""
    return [body(server, i, TOKENS) for i in range(STREAMS)]


@pytest.fixture(scope="module")
def wanted(server, bodies):
    """What undisturbed streams answer."""
    ids = whole(streamed(server, bodies), TOKENS)
    assert len({tuple(one) for one in ids}) == STREAMS
    return ids
