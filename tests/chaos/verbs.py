"""Every verb of the store, found by looking; and a way to be there just before one is called, wherever it is used."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pymongo import monitoring

import taskmesh.store

_current: ContextVar[tuple[str, ...]] = ContextVar("verbs", default=())


def verbs() -> dict[str, Any]:
    """Return the functions that speak to the database, by `module.name`."""
    found: dict[str, Any] = {}
    for module_info in pkgutil.walk_packages(taskmesh.store.__path__, "taskmesh.store."):
        module = importlib.import_module(module_info.name)
        for name, function in vars(module).items():
            ours = inspect.isfunction(function) and function.__module__ == module.__name__
            if ours and not name.startswith("_") and _asks_the_database(function):
                found[f"{module_info.name.rpartition('.')[2]}.{name}"] = function
    return found


def _asks_the_database(function: Any) -> bool:
    parameters = list(inspect.signature(function).parameters)
    runs = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) or "database" in parameters
    return bool(runs and parameters and parameters[0] == "store")


class CommandsOfVerbs(monitoring.CommandListener):
    """Learns which commands each verb sends."""

    def __init__(self) -> None:
        self.commands: dict[str, set[str]] = defaultdict(set)

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        for verb in _current.get():  # one may call another
            self.commands[verb].add(event.command_name)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...

    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


@contextmanager
def watched(before: Callable[[str], None]) -> Iterator[None]:
    """Call `before` with the name of each verb that is about to be called, as long as the block lasts."""
    replaced: list[tuple[Any, str, Any]] = []
    for name, function in verbs().items():
        wrapper = _wrapped(name, function, before)
        for module in [m for key, m in sys.modules.items() if key.partition(".")[0] == "taskmesh"]:
            for attribute, value in list(vars(module).items()):
                if value is function:
                    replaced.append((module, attribute, function))
                    setattr(module, attribute, wrapper)
    try:
        yield
    finally:
        for module, attribute, function in replaced:
            setattr(module, attribute, function)


def _wrapped(name: str, function: Any, before: Callable[[str], None]) -> Any:
    @contextmanager
    def called() -> Iterator[None]:
        token = _current.set((*_current.get(), name))
        try:
            before(name)
            yield
        finally:
            _current.reset(token)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*arguments: Any, **settings: Any) -> Any:
            with called():
                return await function(*arguments, **settings)

        return coroutine

    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def generator(*arguments: Any, **settings: Any) -> AsyncIterator[Any]:
            items = function(*arguments, **settings)
            while True:
                with called():
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        return
                yield item

        return generator

    @functools.wraps(function)
    def plain(*arguments: Any, **settings: Any) -> Any:
        with called():
            return function(*arguments, **settings)

    return plain
