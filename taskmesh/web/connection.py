"""The mesh behind the pages: connected by whoever mounts the app, or else by the first request."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from taskmesh.mesh import TaskMesh


class Connection:
    """A mesh, and whether it was this app that connected it."""

    def __init__(self, mesh: TaskMesh) -> None:
        self.mesh = mesh
        self._ours = False
        self._connecting = asyncio.Lock()

    async def connected(self) -> TaskMesh:
        """Return the mesh, connected. Raises as `TaskMesh.connect` does."""
        loop = asyncio.get_running_loop()
        if not self.mesh.connected_in(loop):
            async with self._connecting:
                if not self.mesh.connected_in(loop):
                    await self.mesh.connect()
                    self._ours = True
        return self.mesh

    async def close(self) -> None:
        """Close what was opened here."""
        if self._ours:
            self._ours = False
            await self.mesh.close()


async def mesh_of(request: Request) -> TaskMesh:
    """Return the app's mesh, connected."""
    connection: Connection = request.app.state.connection
    return await connection.connected()
