"""Test your own handlers, on a real MongoDB, without sleeping: a plugin for pytest that is registered by asking for it.

    # conftest.py
    pytest_plugins = ["taskmesh.testing"]

    # test_orders.py
    async def test_an_order_is_shipped(mesh):
        await order.publish("o-1", id="o-1")
        assert [task.name for task in await drain(mesh)] == ["order"]
        advance(mesh, hours=24)
        assert [task.name for task in await drain(mesh)] == ["remind"]

    async def test_an_order_is_charged_once_though_its_worker_dies(mesh):
        await order.publish("o-1", id="o-1")
        with kill_at("ship"):
            await drain(mesh)

The fixture `mesh` is the mesh that the ini option `taskmesh_app` names (`app:mesh`), or one without tasks. It is connected to an
empty database of an embedded MongoDB that all tests of the session share (extra `embedded` of `taskmesh-mongodb`), or of the
server that `TASKMESH_TEST_URI` names. Async tests run by anyio's plugin or by pytest-asyncio; a plain test gets the mesh
unconnected, as a command of your own would. `worker` runs the mesh's tasks in the background while the test lasts.
"""

from __future__ import annotations

from taskmesh.testing.faults import kill_at, lose_reply
from taskmesh.testing.running import advance, drain, published

pytest_plugins = ["taskmesh.testing.fixtures"]

__all__ = ["advance", "drain", "kill_at", "lose_reply", "published"]
