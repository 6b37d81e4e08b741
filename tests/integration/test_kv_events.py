"""Workers of a real server report what they cache, and a second question finds it.

Proved with ``block_size`` left out of the record, and with the ledger's counters out of the report.
"""

import asyncio

from support.servers import image_part, serving, text_part
from triptych.runtime.directory import Directory

SECRET = "s" * 32
WORDS = "What is to be seen here, from left to right and from top to bottom, in many words? " * 3


def counted(server, counter):
    return {name: one["counters"].get(counter) for name, one in server.cluster().items()}


def test_cached_blocks_are_reported_and_counted(tmp_path):
    flags = ["--engine=fake", "--enable-multimodal", "--pattern=E/P/D", f"--run-dir={tmp_path}"]
    flags.append("--worker-tls")  # beside: with it everything is as without
    with serving(*flags, env={"TRIPTYCH_SECRET": SECRET}) as server:
        seen = asyncio.run(Directory(tmp_path, SECRET).view())
        assert all(one.address.startswith("tls://127.0.0.1:") for one in seen.values())
        sizes = {one.role: one.block_size for one in seen.values()}
        assert sizes == {"E": 0, "P": 16, "D": 16}
        content = [image_part(b"a picture"), text_part(WORDS)]
        answers = [server.chat(content, max_tokens=40).json for _ in range(2)]
        usages = [answer["usage"] for answer in answers]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached[0] == 0
        assert cached[1] == (usages[1]["prompt_tokens"] - 1) // 16 * 16
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
        total = usages[0]["prompt_tokens"]
        # The last token of the answer is not computed.
        told = {"E-0": None, "P-0": total // 16, "D-0": (total + 39) // 16}
        server.wait(lambda: counted(server, "kv_blocks_reported") == told, what="all is told")
        metrics = server.request("/metrics").body.decode()
        assert "triptych_worker_kv_blocks_reported{" in metrics
        assert "triptych_worker_kv_watchers{" in metrics
