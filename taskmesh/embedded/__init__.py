"""The bundled MongoDB: a real `mongod`, for laptops, demos and tests. Not for production.

shared.py    attach: one server for all processes of a directory, which ends with the last of them
watchdog.py  the process that owns that server
mongod.py    which mongod, and its command line
replica.py   forming a replica set, waiting for a primary
"""

from __future__ import annotations

from taskmesh.embedded.mongod import find_mongod
from taskmesh.embedded.shared import EmbeddedServer, attach, running_in

__all__ = ["EmbeddedServer", "attach", "find_mongod", "running_in"]
