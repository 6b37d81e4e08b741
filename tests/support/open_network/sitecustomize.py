"""On the path of a server under test, gives its fetches a name server of the test's own.

One address of this machine then counts as one of the open network (``support.origin.OPEN``); all
else is judged as ever.
"""

import functools
import os
import sys

NAMES = {  # what each lookup of a name says; the last stays
    "ok.test": [["127.0.0.9"]],
    "inside.test": [["127.0.0.1"]],
    "mixed.test": [["127.0.0.9", "127.0.0.1"]],
    "mixed6.test": [["::1", "127.0.0.9"]],
    "metadata.test": [["127.0.0.9", "169.254.169.254"]],
    "rebound.test": [["127.0.0.9"], ["127.0.0.1"]],
}

FETCHES = "triptych.sources.fetch_sandbox" in sys.orig_argv

if "frontend" in sys.orig_argv or FETCHES:
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))

    from support.origin import NamedGate
    from triptych.sources import address

    address.AddressFilter = functools.partial(NamedGate, NAMES)  # type: ignore[misc,assignment]
