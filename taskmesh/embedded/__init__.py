"""The MongoDB that comes along: a real `mongod`, for laptops, demos and tests. Not for production.

binary.py    which mongod
mongod.py    one mongod as a child process (tests build replica sets of it)
replica.py   forming a replica set, waiting for a primary
"""

from __future__ import annotations

from taskmesh.embedded.binary import find_mongod
from taskmesh.embedded.mongod import Mongod

__all__ = ["Mongod", "find_mongod"]
