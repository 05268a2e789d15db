"""Retention is the window of de-duplication: its end does not wait for MongoDB's TTL monitor to come round (T37)."""

from __future__ import annotations

from taskmesh.store import control
from taskmesh.store.publish import publish_in_session
from tests.properties.life import Life


async def past_retention(life: Life) -> None:
    """Publish, succeed, and let the retention pass, with nobody there to delete."""
    await life.publish(retain_success_ms=1_000)
    await life.succeed(await life.claim())
    life.later(1_000)


async def test_t37_a_key_past_its_retention_is_published_afresh(life: Life) -> None:
    await past_retention(life)
    assert (await life.publish(n=2)).created
    assert (await life.document())["params"] == {"n": 2}
    assert await life.status() == "INIT"


async def test_t37_a_key_past_its_retention_is_published_afresh_in_a_transaction(life: Life) -> None:
    for flags in ((), ("update_existing_params",)):
        await past_retention(life)
        async with life.store.driver.session() as session, await session.start_transaction():
            publication = life.publication(n=2, retain_success_ms=1_000, flags=flags)
            (published,) = await publish_in_session(life.store, [publication], life.now, session)
        assert published.created
        assert (await life.document())["params"] == {"n": 2}
        await life.succeed(await life.claim())
        life.later(1_000)


async def test_t37_a_key_within_its_retention_is_left_alone(life: Life) -> None:
    await past_retention(life)
    life.later(-1)
    assert not (await life.publish(n=2)).created
    assert (await life.document())["params"] == {"n": 0}


async def test_t37_retry_does_not_bring_back_a_task_past_its_retention(life: Life) -> None:
    await past_retention(life)
    assert not await control.retry(life.store, life.id)
