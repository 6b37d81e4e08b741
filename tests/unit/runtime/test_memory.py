"""Large blocks that threads have freed go back to the system."""

import subprocess
import sys

import pytest

CODE = """
import sys, threading
from triptych.runtime import process

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def work(barrier):
    for _ in range(3):
        blocks = [b"x" * (16 << 20)]
        barrier.wait()
        del blocks

if sys.argv[1] == "little":
    process.limit_allocator_cache()
before, barrier = rss(), threading.Barrier(4)
threads = [threading.Thread(target=work, args=(barrier,)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
process.trim_allocator()
print(rss() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone can be told")
@pytest.mark.parametrize("kept", ["little", "much"])
def test_what_threads_have_freed(kept):
    """``much`` shows that the allocator keeps it by itself, so that the other one can fail."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, kept], capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) < 16 << 20) is (kept == "little")
