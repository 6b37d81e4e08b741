"""The request plane: calls on a worker over multiplexed TCP connections.

A call is one Ask and any number of Answers, then an end: well, or with the error of the other side.
The scope of a call is the scope of what it holds at the worker. This module is the door; behind it
are the worker's end (server), the caller's end (connection), what both share (link) and the wire
format (frames).
"""

from triptych.runtime.connection import Call, Connection
from triptych.runtime.server import Reply, Server

__all__ = ["Call", "Connection", "Reply", "Server"]
