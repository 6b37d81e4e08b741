"""A worker whose engine hangs, while its process answers: it ends, and others take its work."""

from support.servers import serving

# It prefills one prompt at a time, and behind a long one it looks as an engine that hangs.
SLOW = ["--engine=fake", "--fake-prefill-us-per-token=50000", "--limits-engine-seconds=3"]


def test_a_worker_whose_engine_hangs_ends_and_another_takes_its_place():
    """Fails where ``silence`` never ends: the long request is answered then, after a minute."""
    with serving(*SLOW, "--pattern=EPD") as server:
        pid = server.cluster()["EPD-0"]["pid"]
        assert server.chat("Hi", max_tokens=2).status == 200
        assert server.cluster()["EPD-0"]["pid"] == pid
        refused = server.chat("very " * 1200, max_tokens=2)
        assert refused.status in (500, 503), refused.body
        server.wait(
            lambda: server.complete() and server.cluster()["EPD-0"]["pid"] != pid,
            what="another is there",
        )
        assert "did nothing for --limits-engine-seconds" in server.tail()
        assert server.chat("Hi", max_tokens=2).status == 200
