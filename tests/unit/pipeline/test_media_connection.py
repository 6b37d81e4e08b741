"""Calls with much media have a connection of their own: nothing waits behind them."""

import pytest

from triptych.messages import GetReport, Job, MediaItem, Sampling, Work, WorkerRecord
from triptych.pipeline.membership import MUCH_MEDIA, Peer


class Line:
    def __init__(self):
        self.asked = []

    def call(self, ask, on_answer):
        self.asked.append(ask)


def job(*sizes):
    media = tuple(MediaItem("image", i, b"x" * size) for i, size in enumerate(sizes))
    return Job(Work("id", (1,), media, Sampling(seed=0)))


@pytest.mark.parametrize(
    ("ask", "heavy"),
    [
        (GetReport(), False),
        (job(), False),
        (job(MUCH_MEDIA), False),
        (job(MUCH_MEDIA // 2, MUCH_MEDIA // 2 + 1), True),
        (job(MUCH_MEDIA + 1), True),
    ],
)
def test_which_line_a_call_takes(ask, heavy):
    lines = Line(), Line()
    peer = Peer(WorkerRecord("E-0", "E", 1, "127.0.0.1:1", 1, "m"), *lines)
    peer.call(ask, print)
    assert [line.asked for line in lines] == ([[], [ask]] if heavy else [[ask], []])
