"""Five hosts: frontend, E, P and D on one each and NATS on the fifth. Same tokens as one machine."""

import asyncio
import shutil
import sys
from contextlib import ExitStack

import pytest

from support.hosts import hosts, possible
from support.requests64 import mixed
from support.servers import TestServer, serving
from triptych.engines.torch import tiny

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not possible(), reason="network namespaces can't be made here (root?)"),
]
SECRET = {"TRIPTYCH_SECRET": "s" * 32}
