"""The transport by which a hop hands over: the best that every possible reader supports."""

import pytest
from msgspec.structs import replace

from triptych.messages import WorkerRecord
from triptych.pipeline.membership import Membership, Peer
from triptych.topology import Topology
from triptych.transfer.registry import TransferEndpoint

ALL, NO_NIXL = ("shm", "nixl", "inline"), ("shm", "inline")
FOLDER = ("shm", "file", "inline")


class Line:
    closing = False


def membership(*workers):
    found = Membership(Topology.parse("E/P/D"), None, "secret", "least-loaded", "m")
    for number, (host, transports, state, *gpu) in enumerate(workers):
        record = WorkerRecord(
            f"P-{number}", "P", 1, "a:1", 1, "m", state=state, memory=host, transports=transports
        )
        folder = "shared" if "file" in transports else ""
        record = replace(record, gpu="".join(gpu), folder=folder)
        found._peers[record.id] = Peer(record, Line(), Line())
    return found


@pytest.mark.parametrize(
    ("workers", "transport"),
    [
        ([], "shm"),
        ([("a", NO_NIXL, "ready"), ("a", ALL, "ready")], "shm"),
        ([("a", ALL, "ready"), ("b", ALL, "ready")], "nixl"),
        ([("a", ALL, "ready"), ("b", NO_NIXL, "ready")], "inline"),
        ([("a", FOLDER, "ready"), ("b", FOLDER, "ready")], "file"),
        ([("a", FOLDER, "ready"), ("b", ALL, "ready")], "inline"),
        ([("a", ALL, "ready"), ("b", NO_NIXL, "draining")], "shm"),  # it is not asked any more
        ([("a", ALL, "ready"), ("", (), "ready")], "shm"),  # an unknown host counts as the same
        ([("a", ALL, "ready"), ("", (), "ready"), ("b", ALL, "ready")], "inline"),
        ([("a", ALL, "ready", "g"), ("a", ALL, "ready", "g")], "cuda"),
        ([("a", ALL, "ready", "g"), ("a", ALL, "draining")], "cuda"),
        ([("a", ALL, "ready", "g"), ("a", ALL, "ready")], "shm"),  # which has no GPU
        ([("a", ALL, "ready", "g"), ("a", ALL, "ready", "h")], "shm"),
        ([("a", ALL, "ready", "g"), ("b", ALL, "ready", "g")], "nixl"),  # it opens no table there
    ],
)
def test_the_best_that_all_can(workers, transport):
    assert membership(*workers).common_transport() == transport


def test_a_publisher_elsewhere_counts_too():
    one = membership(("a", ALL, "ready"), ("a", ALL, "ready"))
    assert one.common_transport(TransferEndpoint("a", "", ALL)) == "shm"
    assert one.common_transport(TransferEndpoint("b", "", ALL)) == "nixl"
    assert one.common_transport(TransferEndpoint("b", "", NO_NIXL)) == "inline"


def test_hosts_with_different_folders_do_not_use_them():
    """Off: ``common_transport`` of the membership passes no folder on."""
    one = membership(("a", FOLDER, "ready"))
    assert one.common_transport(TransferEndpoint("b", "", FOLDER, "shared")) == "file"
    assert one.common_transport(TransferEndpoint("b", "", FOLDER, "another")) == "inline"
    assert one.common_transport(TransferEndpoint("b", "", FOLDER, "")) == "inline"


def test_a_publisher_besides_the_workers_has_no_gpu():
    one = membership(("a", ALL, "ready", "g"))
    assert one.common_transport() == "cuda"
    assert one.common_transport(TransferEndpoint("a", "", ALL)) == "shm"
