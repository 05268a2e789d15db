"""What a mesh can do to bring tasks into the world: publish them, by definition or by name, with or without an event loop.

Params are checked first, all of them; then inserted, about a thousand per round trip. If the answer is lost they are published
again: each publication is known by its `publish_id`, so nothing is there twice and `created` stays true to the first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from bson import ObjectId
from pymongo.errors import PyMongoError

from taskmesh.client.connection import Connected, sample
from taskmesh.client.definition import Configuration, TaskDefinition, TaskHandle
from taskmesh.client.portal import portal_loop, run_blocking
from taskmesh.client.registered import RegisteredDefinition
from taskmesh.client.tracing import Carrier, carrier, going_on, publishing
from taskmesh.model.errors import InvalidParams, TaskMeshError
from taskmesh.model.task import checked_key, checked_name
from taskmesh.store import Store
from taskmesh.store.driver import twin_of
from taskmesh.store.publish import Publication, Published, publish, publish_in_session
from taskmesh.store.server_errors import is_over_deadline, is_passing

PUBLISH_DEADLINE_S = 30.0


class Publishing(Connected):
    """The part of `TaskMesh` that publishes."""

    definitions: dict[str, TaskDefinition[Any, Any]]

    def __init__(self, client: Any = None, *, database: str = "taskmesh", collection: str = "tasks") -> None:
        super().__init__(client, database=database, collection=collection)
        self.definitions = {}
        self._twin: tuple[asyncio.AbstractEventLoop, asyncio.Task[Publishing]] | None = None
        """The same on the portal's loop, for `publish_sync`."""

    async def close(self) -> None:
        """Stop the consumers that run, within their grace; then close what `connect` and `publish_sync` opened.

        Does nothing the second time.
        """
        try:
            await super().close()
        finally:
            if self._twin is not None:  # handlers may have used it up to now
                await asyncio.to_thread(self.close_sync)

    async def publish(
        self, name: str, key: str, params: Mapping[str, Any] | None = None, **configuration: Any
    ) -> TaskHandle[Any]:
        """Publish by task name, without the handler's code.

        Uses the option and queue of the definition if this mesh knows the name, else those that workers have registered,
        else the defaults. Raises as `TaskDefinition.publish` does.
        """
        return (await self.publish_many(name, {checked_key(key): {} if params is None else params}, **configuration))[0]

    async def publish_many(
        self, name: str, params_by_key: Mapping[str, Mapping[str, Any]], **configuration: Any
    ) -> list[TaskHandle[Any]]:
        """Publish many tasks by name, about a thousand per round trip; handles in the order given.

        All are checked before any is written.
        """
        definition = self.definitions.get(checked_name(name))
        if definition is not None:
            return await self.publish_all(definition.configure(**configuration), params_by_key)
        keys = [checked_key(key) for key in params_by_key]
        registered = await self.registered(name)
        try:
            stored = [registered.to_store(params) for params in params_by_key.values()]
        except InvalidParams:  # a worker that takes them may have come since
            registered = await self.registered(name, newly=True)
            stored = [registered.to_store(params) for params in params_by_key.values()]
        return await self._publish_named(
            name,
            registered.configuration.changed(**configuration),
            dict(zip(keys, stored, strict=True)),
            known=registered.found,
        )

    async def registered(self, name: str, *, newly: bool = False) -> RegisteredDefinition:
        """Return what workers have registered of the tasks of this name. `newly`: not as it was some seconds ago."""
        _ = self.store  # whether there is one
        return await self._registry.definition(checked_name(name), newly=newly)

    async def publish_all(
        self, definition: TaskDefinition[Any, Any], params_by_key: Mapping[str, Mapping[str, Any]]
    ) -> list[TaskHandle[Any]]:
        """Publish tasks of one definition; all are checked before any is written."""
        checked = {checked_key(key): definition.params.to_store(params) for key, params in params_by_key.items()}
        return await self._publish_named(definition.name, definition.configuration, checked)

    async def _publish_named(
        self,
        name: str,
        configuration: Configuration,
        checked: Mapping[str, tuple[dict[str, Any], int]],
        *,
        known: bool = True,
    ) -> list[TaskHandle[Any]]:
        publish_id = ObjectId()
        publications = [
            configuration.publication(name, key, params, size, publish_id) for key, (params, size) in checked.items()
        ]
        store = self.store
        await self._create_what_is_missing()
        with publishing(name, list(checked), configuration.queue) as trace:
            for publication in publications:
                publication.trace = trace
            if configuration.session is not None:
                if self.clock.stale:
                    await sample(self.clock, store)
                published = await publish_in_session(store, publications, self.clock.now(), configuration.session)
            else:
                published = await self._published(store, publications)
        warnings = await self._warnings(name, configuration, known=known)
        return [
            TaskHandle(
                self, name, publication.key, created=result.created, updated=result.updated, warnings=list(warnings)
            )
            for publication, result in zip(publications, published, strict=True)
        ]

    async def _warnings(self, name: str, configuration: Configuration, *, known: bool) -> list[str]:
        try:
            return await self._registry.warnings(name, configuration, self.clock.now(), known=known)
        except PyMongoError as error:  # the tasks are published all the same
            return [f"could not be checked against the workers that there are ({type(error).__name__})"]

    async def _published(self, store: Store, publications: list[Publication]) -> list[Published]:
        """Publish, and again while the database is away, up to a deadline: a repeated publish is known by its `publish_id`."""
        give_up = time.monotonic() + PUBLISH_DEADLINE_S
        pause = 0.05
        while True:
            try:
                if self.clock.stale:
                    await sample(self.clock, store)
                return await publish(store, publications, self.clock.now())
            except PyMongoError as error:
                locked = is_over_deadline(error)
                if not (is_passing(error) or locked) or time.monotonic() + pause > give_up:
                    if locked:
                        keys = ", ".join(repr(publication.key) for publication in publications[:3])
                        raise TaskMeshError(
                            f"publishing {keys} waits for somebody's open transaction: try again later"
                        ) from error
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    def publication_of(
        self, definition: TaskDefinition[Any, Any] | str, key: str, params: Mapping[str, Any]
    ) -> Publication:
        """Check what a handler wants to be published with its SUCCESS. Raises as `publish` does."""
        if isinstance(definition, str):
            named = self.definitions.get(checked_name(definition))
            unknown = RegisteredDefinition(definition, None)
            stored, size = named.params.to_store(params) if named else unknown.to_store(params)
            configuration = named.configuration if named else unknown.configuration
            return configuration.publication(definition, checked_key(key), stored, size)
        stored, size = definition.params.to_store(params)
        return definition.configuration.publication(definition.name, checked_key(key), stored, size)

    def publish_all_sync(
        self, definition: TaskDefinition[Any, Any], params_by_key: Mapping[str, Mapping[str, Any]]
    ) -> list[TaskHandle[Any]]:
        """Publish from code without an event loop. Raises `RuntimeError` inside one."""
        in_portal = self._publish_in_portal(definition, params_by_key, carrier())
        handles = run_blocking(in_portal, "publish_sync")
        for handle in handles:
            handle.mesh = self
        return handles

    async def _publish_in_portal(
        self,
        definition: TaskDefinition[Any, Any],
        params_by_key: Mapping[str, Mapping[str, Any]],
        trace: Carrier | None,
    ) -> list[TaskHandle[Any]]:
        """Publish in the portal's loop, on a connection of its own. `trace`: where the caller is."""
        loop = asyncio.get_running_loop()
        if self._twin is None or self._twin[0] is not loop:  # after a fork, the child has a portal of its own
            # As a task, since many threads may ask at once: the first connects, and all wait for that.
            self._twin = loop, loop.create_task(self._connected_twin(), name="taskmesh connects publish_sync")
        try:
            twin = await self._twin[1]
        except BaseException:
            self._twin = None
            raise
        with going_on(trace):
            return await twin.publish_all(definition, params_by_key)

    async def _connected_twin(self) -> Publishing:
        twin = Publishing(self._twin_client(), database=self._database, collection=self._collection)
        twin.definitions = self.definitions
        await twin.connect()
        return twin

    def close_sync(self) -> None:
        """Close what `publish_sync` opened, if it did; the next `publish_sync` opens it again. `close` does it too."""
        twin, self._twin = self._twin, None
        if twin is not None and twin[0] is portal_loop():
            run_blocking(_close_twin(twin[1]), "close_sync")

    def _twin_client(self) -> Any:
        return self._client if self._client is None or isinstance(self._client, str) else twin_of(self._client)


async def _close_twin(connecting: asyncio.Task[Publishing]) -> None:
    """Close a mesh on the portal's loop, and its client, which is nobody else's."""
    try:
        twin = await connecting
    except Exception:  # noqa: BLE001 — it never connected, for whatever reason: whoever asked for it was told
        return
    driver = twin.store.driver
    await twin.close()
    await driver.close()
