"""The request plane: calls on a worker over multiplexed connections.

A call is one Ask and any number of Answers, then an end: well, or with the error of the other side.
The scope of a call is the scope of what it holds at the worker. This module is the door; behind it
are the worker's end (server), the caller's end (connection), what both share (link), the wire
format (frames) and what carries it: TCP, WebSocket or NATS (planes).
"""

from triptych.runtime.connection import Call, Connection
from triptych.runtime.server import Reply, Server

__all__ = ["Call", "Connection", "Reply", "Server"]
