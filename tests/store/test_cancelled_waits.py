"""A driver call that is cancelled while it waits for a server leaves the client usable."""

from __future__ import annotations

import asyncio
from typing import Any

from pymongo import network_layer
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
