"""The mesh behind the pages: connected by the app that mounts them, or by the first request; and whether its database answers.

The driver waits half a minute for a database that is down, and for ever for one that is frozen. No user waits that long for a
page, so each request first asks whether the database answers, unless it has just done so.
"""

from __future__ import annotations

import asyncio
import time

from pymongo.errors import PyMongoError
from starlette.requests import Request

from taskmesh.admin.database import server_time
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import TaskMeshError

ANSWERS_WITHIN_S = 1.5
"""A database that takes longer counts as down. `/readyz` has to answer within two seconds."""
_CONNECTED_WITHIN_S = 30.0
"""For creating collections and indexes, once the server has answered."""
_ASKED_AGAIN_S = 1.0


class DatabaseUnavailable(TaskMeshError):
    """The database does not answer at the moment."""


class Connection:
    """A mesh, and whether this app connected it."""

    def __init__(self, mesh: TaskMesh) -> None:
        self.mesh = mesh
        self._connecting: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._answered_at = time.monotonic()
        self._answers = True

    @property
    def silent_s(self) -> float:
        """How long ago the database last answered."""
        return time.monotonic() - self._answered_at

    async def connected(self) -> TaskMesh:
        """Return the connected mesh. Raises `DatabaseUnavailable` soon if its database is down, or as `TaskMesh.connect`."""
        loop = asyncio.get_running_loop()
        if not self.mesh.connected_in(loop):
            if self._connecting is None or self._connecting.done():
                self._connecting = loop.create_task(self.mesh.connect(), name="taskmesh web connects")
                self._connecting.add_done_callback(_look_at)
            await self._wait_for(self._connecting)
            self._answered_at = time.monotonic()
        elif not self._answers or self.silent_s > _ASKED_AGAIN_S:
            await self.ask()
        return self.mesh

    async def _wait_for(self, connecting: asyncio.Task[None]) -> None:
        # A request that is cancelled leaves the attempt to the others.
        done, _ = await asyncio.wait([connecting], timeout=ANSWERS_WITHIN_S)
        if not done and self.mesh.reached:
            done, _ = await asyncio.wait([connecting], timeout=_CONNECTED_WITHIN_S)
        if not done:
            raise DatabaseUnavailable("no MongoDB server has answered yet: this recovers by itself when one does")
        connecting.result()

    async def ask(self) -> None:
        """Ask whether the database responds. Raises `DatabaseUnavailable` if it does not within moments."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask(), name="taskmesh web asks the database")
            self._asking.add_done_callback(_look_at)
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                await server_time(self.mesh.connection)
        except (TimeoutError, PyMongoError) as error:
            self._answers = False
            raise DatabaseUnavailable(
                f"the database has not answered for {self.silent_s:.0f} s ({type(error).__name__}): "
                "this recovers by itself when it does"
            ) from None
        self._answered_at, self._answers = time.monotonic(), True

    async def close(self) -> None:
        """Close what was opened here."""
        asking, connecting = self._asking, self._connecting
        self._asking = self._connecting = None
        for task in (asking, connecting):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        if connecting is not None:
            await self.mesh.close()


def _look_at(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of a task that perhaps nobody waits for, so that asyncio does not complain."""
    if not task.cancelled():
        task.exception()


async def mesh_of(request: Request) -> TaskMesh:
    """Return the app's mesh, connected to a database that answers."""
    connection: Connection = request.app.state.connection
    return await connection.connected()
