"""A driver call that is cancelled while it waits for a server leaves the client usable."""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import ExitStack
from typing import Any

from pymongo import AsyncMongoClient, network_layer, pool_shared
from pymongo.asynchronous import pool, topology
from pymongo.lock import _async_create_condition, _async_create_lock

import taskmesh.store  # noqa: F401 -- mends the driver


async def test_a_wait_that_is_cancelled_as_it_takes_its_lock_back_gives_it_back() -> None:
    for module in (pool, topology):
        lock = _async_create_lock()
        condition = _async_create_condition(lock)

        async def wait(module: object = module, condition: object = condition, lock: Any = lock) -> None:
            async with lock:
                await module._async_cond_wait(condition, 0.01)  # type: ignore[attr-defined]

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        async with lock:  # held until its time is over, so that it has to wait for the lock
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.sleep(0.01)
            assert not waiting.done(), "it gives back a lock that is not its own"
        await asyncio.wait([waiting], timeout=5.0)

        assert waiting.cancelled()
        assert not lock.locked(), "nobody is left to give it back"


async def test_a_connect_that_is_cancelled_closes_its_socket() -> None:
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient("mongodb://127.0.0.1:1")
    options = client._topology_settings.pool_options
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as full:
        for _ in range(4):  # so that the next connection waits
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        connecting = asyncio.create_task(pool_shared._async_create_connection(server.getsockname(), options))
        await asyncio.wait([connecting], timeout=0.1)
        connecting.cancel()
        await asyncio.wait([connecting], timeout=5.0)
        assert connecting.cancelled()
        del connecting
        gc.collect()  # "unclosed <socket …>" would be raised here
    await client.close()


async def test_a_send_that_is_cancelled_as_it_ends_is_cancelled() -> None:
    sent = asyncio.get_running_loop().create_future()

    class Connection:
        gettimeout = 5.0

        async def write(self, _: bytes) -> None:
            await sent

    async def send_and_go_on() -> None:
        await network_layer.async_sendall(Connection(), b"x")  # type: ignore[arg-type]  # all it asks for
        await asyncio.sleep(60)

    sending = asyncio.create_task(send_and_go_on())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    sent.set_result(None)
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending], timeout=5.0)
    assert sending.cancelled()
