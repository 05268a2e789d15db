"""Periodic tasks: declare, list, pause, trigger and remove them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator, Mapping
from datetime import datetime, timedelta
from typing import Any

from taskmesh.client.connection import Connection
from taskmesh.client.definition import TaskDefinition
from taskmesh.client.handle import TaskHandle
from taskmesh.client.params import checked_size, with_stored_fields
from taskmesh.client.publisher import Publisher
from taskmesh.model.configuration import Configuration
from taskmesh.model.errors import CannotDecrypt, InvalidOption, TaskNotFound
from taskmesh.model.ids import checked_remark, checked_text
from taskmesh.model.schedule import (
    KEY_KEPT_MS,
    Declaration,
    ScheduleInfo,
    checked_declaration,
    key_of,
    stored,
    timing_of,
)
from taskmesh.model.task import checked_key, checked_name
from taskmesh.store import Store, audit
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.publication import Publication
from taskmesh.store.triggers import schedules
from taskmesh.store.triggers.schedules import ChangedMeanwhile

logger = logging.getLogger("taskmesh.scheduling")
_LONGEST_ID_BYTES = 400
_DEFAULTS: Document = {
    "cron": None,
    "interval_ms": None,
    "timezone": "UTC",
    "params": {},
    "missed": "latest",
    "overlap": "allow",
    "jitter_ms": 0,
}


class Declared:
    """What `mesh.every(…)` returns. Await it to wait until the schedule is stored, and to get its `ScheduleInfo`."""

    def __init__(self, schedules: Schedules, declaration: Declaration, by: str | None) -> None:
        self._schedules = schedules
        self._declaration = declaration
        self._by = by
        self._storing: asyncio.Task[ScheduleInfo] | None = None
        self.schedule_id = declaration.schedule_id

    def store_soon(self) -> None:
        """Store it now, whether or not somebody awaits it."""
        self._storing = asyncio.get_running_loop().create_task(self._schedules.store(self._declaration, by=self._by))
        self._storing.add_done_callback(self._tell_failure)

    def __await__(self) -> Generator[Any, None, ScheduleInfo]:
        if self._storing is None:
            return self._schedules.store(self._declaration, by=self._by).__await__()
        return asyncio.shield(self._storing).__await__()

    def _tell_failure(self, storing: asyncio.Task[ScheduleInfo]) -> None:
        if not storing.cancelled() and (error := storing.exception()) is not None:
            logger.error("schedule %r was not stored: %s", self.schedule_id, error)


class Schedules:
    """The operations on periodic tasks."""

    def __init__(
        self, connection: Connection, publisher: Publisher, definitions: Mapping[str, TaskDefinition[Any, Any]]
    ) -> None:
        self._connection = connection
        self._publisher = publisher
        self._definitions = definitions
        self.declarations: dict[str, Declaration] = {}
        """Declarations in code, by the ids of the schedules. They are stored each time the mesh connects."""

    @property
    def _store(self) -> Store:
        return self._connection.store

    async def store_declared(self) -> None:
        """Store the schedules that were declared before the mesh was connected."""
        for declaration in self.declarations.values():
            await self.store(declaration)

    def declare(self, declaration: Declaration, *, by: str | None = None) -> Declared:
        """Keep a declaration until the mesh connects, or store it at once if it is connected. See `TaskMesh.every`."""
        id_ = declaration.schedule_id
        if len(id_.encode()) > _LONGEST_ID_BYTES:
            raise InvalidOption(f"schedule_id must have at most {_LONGEST_ID_BYTES} bytes, got {id_[:40]!r}…")
        declared = Declared(self, declaration, checked_remark("by", by) or audit.acting.get())
        loop = self._connection.loop
        if self._is_connected_here():
            declared.store_soon()
        elif loop is not None:  # a thread beside it, like that of a plain handler
            loop.call_soon_threadsafe(declared.store_soon)
        elif id_ in self.declarations:
            raise InvalidOption(f"a schedule {id_!r} is declared already: give each of them its own schedule_id")
        self.declarations[id_] = declaration
        return declared

    def _is_connected_here(self) -> bool:
        try:
            return self._connection.is_usable_in(asyncio.get_running_loop())
        except RuntimeError:  # no loop runs: definition time
            return False

    async def put(self, schedule_id: str, *, by: str | None = None, **given: Any) -> ScheduleInfo:
        """Create a schedule, or change the given fields of an existing one; other fields stay as they are.

        `given`: `name` of the task and the keywords of `TaskMesh.every`. `cron` and `interval_ms` replace each other. Code that
        declares the schedule resets it to what it says. `by`: who, for the audit; by default the user of this process, and its
        host. Raises `InvalidOption`, and `InvalidParams` if params are given that do not fit the task.
        """
        who = audit.author(by)
        id_ = checked_text("schedule_id", checked_key(schedule_id), most=_LONGEST_ID_BYTES)
        while True:
            stored = await schedules.read(self._store, id_)
            declaration, stay = self._changed(id_, stored, given)
            with contextlib.suppress(ChangedMeanwhile):  # what is not given stays as it is then
                return await self.store(declaration, by=who, stay=stay, as_seen=stored or {})

    def _changed(
        self, id_: str, stored: Document | None, given: Mapping[str, Any]
    ) -> tuple[Declaration, Document | None]:
        """Return a schedule with the given fields changed, and its stored params if they stay as they are."""
        fields, settings, stay = dict(_DEFAULTS), Document(), None
        if stored is not None:
            fields |= {name: stored[name] for name in ("name", *fields)}
            settings |= stored["settings"]
            if "params" not in given:
                if given.get("name", stored["name"]) == stored["name"]:
                    stay = stored["params"]
                else:
                    sealed_for = _id_of(stored["name"], id_)
                    fields["params"] = self._connection.payloads.decrypted_params(sealed_for, stored["params"])
        if given.get("cron") is not None or given.get("interval_ms") is not None:
            fields |= {"cron": None, "interval_ms": None}  # it runs by one of them
        fields |= {name: value for name, value in given.items() if name == "name" or name in fields}
        settings |= {name: value for name, value in given.items() if name not in fields}
        if "name" not in fields:
            raise InvalidOption(f"there is no schedule {id_!r} yet: to create it, name the task that it publishes")
        Configuration().changed(**settings)
        declaration = checked_declaration(checked_name(fields.pop("name")), id_, settings=settings, **fields)
        return declaration, stay

    async def store(
        self,
        declaration: Declaration,
        *,
        by: str | None = None,
        stay: Document | None = None,
        as_seen: Document | None = None,
    ) -> ScheduleInfo:
        """Store one schedule, and note who declared it, if given.

        `stay`: its params as they are in the database, which stay: they may be encrypted, without a key here. `as_seen`: raise
        `ChangedMeanwhile` if it is no longer as it was then. Raises `InvalidParams` if its params do not fit a handler that is
        known here.
        """
        definition = self._definitions.get(declaration.name)
        params = dict(declaration.params)
        fields = stored(declaration, params)
        settings, _ = with_stored_fields(declaration.name, Configuration().changed(**declaration.settings))
        if settings.fields:
            fields["settings"]["fields"] = settings.fields
        if definition is not None:
            if stay is None:
                fields["params"], _ = definition.to_store(params)
            fields["base"] = _base(definition.configuration)
        else:
            registered = await self._publisher.registered(declaration.name)
            if stay is None:
                fields["params"], _ = registered.to_store(params)
            if registered.found:
                fields["base"] = _base(registered.configuration)
        fields["params"] = stay if stay is not None else await self._sealed(declaration, fields["params"])

        def first_time(now: datetime) -> datetime | None:
            return declaration.timing.after(now, now)

        id_ = declaration.schedule_id
        info = self._info(await schedules.declare(self._store, id_, fields, first_time, as_seen=as_seen))
        if by is not None:
            about = {"name": info.name, "schedule_id": id_, "cron": info.cron, "interval_ms": info.interval_ms}
            await audit.note(self._store, "schedule.declare", by, **about)
        return info

    async def _sealed(self, declaration: Declaration, params: Document) -> Document:
        """Return the params as they are stored; as they are there already, if they are the same, so that nothing changes."""
        id_ = _id_of(declaration.name, declaration.schedule_id)
        payloads = self._connection.payloads
        if payloads.codec_of(declaration.name) is not None:
            stored = await schedules.read(self._store, declaration.schedule_id) or {}
            there: Document = stored.get("params", {})
            with contextlib.suppress(CannotDecrypt):
                if payloads.decrypted_params(id_, there) == params:
                    return there
        return payloads.sealed_params(id_, params)

    def _info(self, schedule: Document) -> ScheduleInfo:
        """Return a schedule for display."""
        id_ = _id_of(schedule["name"], schedule["_id"])
        return ScheduleInfo.from_document(
            schedule | {"params": self._connection.payloads.shown_params(id_, schedule["params"])}
        )

    async def publication_of_tick(self, schedule: Document, key: str, start_time: datetime | None) -> Publication:
        """Return the task of a tick: as its definition says if it is known here, else as the declaring process knew it."""
        name, payloads = schedule["name"], self._connection.payloads
        params = payloads.decrypted_params(_id_of(name, schedule["_id"]), schedule["params"])
        definition = self._definitions.get(name)
        if definition is not None:
            configuration = definition.configuration
        else:
            configuration = Configuration().changed(**schedule.get("base", {}))
        configuration = configuration.changed(**schedule.get("settings", {}), start_time=start_time)
        kept = {
            name: max(value, KEY_KEPT_MS)
            for name in ("retain_success_ms", "retain_failed_ms")
            if (value := getattr(configuration.option, name)) is not None
        }
        configuration = configuration.changed(**kept)
        task = definition or await self._publisher.registered(name)
        if task.broadcast:
            configuration = await self._publisher.addressed(name, configuration)
        configuration, size_of_fields = self._publisher.final_configuration(task, configuration)
        size = checked_size(name, params) + size_of_fields
        return self._publisher.new_publication(task, checked_key(key), params, configuration, size)

    async def all(self) -> list[ScheduleInfo]:
        """Return all schedules, the next to tick first."""
        return [self._info(document) for document in await schedules.read_all(self._store)]

    async def pause(self, schedule_id: str, *, reason: str | None = None, by: str | None = None) -> ScheduleInfo:
        """Pause a schedule until `resume`. Raises `TaskNotFound`.

        `reason`, `by`: why and who, for listings and the audit; by default the user of this process, and its host.
        """
        why, who = checked_remark("reason", reason), audit.author(by)
        told = {"paused": True, "paused_reason": why, "paused_by": who, "pause_time": self._connection.clock.now()}
        await schedules.set_paused(self._store, checked_text("schedule_id", schedule_id, most=_LONGEST_ID_BYTES), told)
        paused = self._info(await self._schedule(schedule_id))
        await audit.note(self._store, "schedule.pause", who, schedule_id=schedule_id)
        return paused

    async def resume(self, schedule_id: str, *, by: str | None = None) -> ScheduleInfo:
        """Let a paused schedule tick again, from now on: ticks in between are left out.

        `by`: who, for the audit; by default the user of this process, and its host. Raises `TaskNotFound`.
        """
        who = audit.author(by)
        schedule = await self._schedule(schedule_id)
        if schedule["paused"]:
            next_time = timing_of(schedule).after(schedule["now"], schedule["anchor_time"])
            gone = dict.fromkeys(("paused_reason", "paused_by", "pause_time"))
            await schedules.set_paused(self._store, schedule_id, {"paused": False, "next_time": next_time, **gone})
        await audit.note(self._store, "schedule.resume", who, schedule_id=schedule_id)
        return self._info(await self._schedule(schedule_id))

    async def trigger(self, schedule_id: str, *, by: str | None = None) -> TaskHandle[Any]:
        """Publish the schedule's task now, beside its ticks, even while it is paused. Raises `TaskNotFound`.

        `by`: who, for the audit; by default the user of this process, and its host.
        """
        who = audit.author(by)
        schedule = await self._schedule(schedule_id)
        moment, id_ = schedule["now"], _id_of(schedule["name"], schedule_id)
        params = self._connection.payloads.unsealed_params(id_, schedule["params"])
        while True:
            key = key_of(schedule_id, moment, "by-hand-")
            settings = {**schedule.get("base", {}), **schedule.get("settings", {})}
            if schedule["name"] in self._definitions:
                settings = schedule.get("settings", {})
            (handle,) = await self._publisher.publish_many(schedule["name"], {key: params}, **settings)
            if handle.created:
                break
            moment += timedelta(milliseconds=1)
        await schedules.note_tick(self._store, schedule_id, {"time": moment, "key": key, "kind": "triggered"})
        await audit.note(self._store, "schedule.trigger", who, schedule_id=schedule_id)
        return handle

    async def remove(self, schedule_id: str, *, by: str | None = None) -> ScheduleInfo:
        """Remove a schedule and return it as it was. Its tasks stay. Code that declares it brings it back.

        `by`: who, for the audit; by default the user of this process, and its host. Raises `TaskNotFound`.
        """
        who = audit.author(by)
        schedule = await self._schedule(schedule_id)
        self.declarations.pop(schedule_id, None)
        await schedules.remove(self._store, schedule_id)
        await audit.note(self._store, "schedule.remove", who, schedule_id=schedule_id)
        return self._info(schedule)

    async def _schedule(self, schedule_id: str) -> Document:
        id_ = checked_text("schedule_id", schedule_id, most=_LONGEST_ID_BYTES)
        schedule = await schedules.read(self._store, id_)
        if schedule is None:
            raise TaskNotFound(f"there is no schedule {schedule_id!r}: `taskmesh schedules` lists them")
        return schedule


def _id_of(name: str, schedule_id: str) -> str:
    """Return what takes the place of the task's `_id` where a schedule's own params are encrypted."""
    return f"{name}:schedule:{schedule_id}"


def _base(configuration: Configuration) -> Document:
    """Return how the tasks of a schedule are published if their definition is not known."""
    needs = {"needs": dict(configuration.needs)} if configuration.needs else {}
    return {"queue": configuration.queue, **configuration.option.stored(), **needs}
