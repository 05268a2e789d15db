"""Where a handler is, as a process tells its child: by module and name, if it can be imported; otherwise by value."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import spawn
from types import ModuleType
from typing import Any

from taskmesh.client.definition import TaskDefinition
from taskmesh.model import distribution


@dataclass(frozen=True)
class HandlerRef:
    """Where a child finds a handler: by module and qualified name; otherwise the handler and its arguments, by value."""

    module: str
    qualname: str
    file: str | None
    main: Mapping[str, Any]
    """What is needed to import the parent's `__main__`, for a handler that is defined there."""
    pickled: bytes | None


def reference(
    definition: TaskDefinition[Any, Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> HandlerRef:
    """Return where the handler is. What the child cannot import is passed by value, with its arguments.

    Raises `TypeError` if neither is possible.
    """
    fn = definition.fn
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    main = _main_of(module)
    if str(main.get("init_main_from_name")).endswith(".__main__"):  # `python -m package`: it is a module like others
        module, main = main["init_main_from_name"], {}
    if module and qualname and _is_found(fn, qualname) and (module != "__main__" or main):
        file = getattr(sys.modules[fn.__module__], "__file__", None)
        return HandlerRef(module, qualname, file, main, None)
    try:
        import cloudpickle  # type: ignore[import-untyped]  # noqa: PLC0415 — an extra
    except ImportError:
        raise TypeError(
            f"task {definition.name!r}: a child process cannot import {qualname or fn!r} of {module!r}: define the handler "
            "at the top of a module, or install cloudpickle, which can send functions by value: "
            f"{distribution.install('process')}"
        ) from None
    try:
        return HandlerRef(module or "", qualname or "", None, {}, cloudpickle.dumps((fn, args, kwargs or {})))
    except Exception as error:
        raise TypeError(
            f"task {definition.name!r}: a child process cannot import {qualname or fn!r} of {module!r}, and it cannot be "
            f"sent by value ({error}): define the handler at the top of a module"
        ) from error


def _is_found(fn: Any, qualname: str) -> bool:
    found: Any = sys.modules.get(fn.__module__)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return (found.fn if isinstance(found, TaskDefinition) else found) is fn


def _main_of(module: str | None) -> dict[str, Any]:
    """Return what `multiprocessing` tells its own children about a script, if the handler is in it."""
    if module != "__main__":
        return {}
    told: dict[str, Any] = dict(spawn.get_preparation_data("taskmesh"))
    main: dict[str, Any] = {name: told[name] for name in ("init_main_from_name", "init_main_from_path") if name in told}
    if main:
        main["sys_argv"] = told["sys_argv"]
    return main


def found(handler: HandlerRef) -> Callable[..., Any]:
    """Return the handler, in the child. Raises whatever its import raises."""
    if handler.main:
        spawn.prepare(dict(handler.main))  # only once, as it sees itself
    return _found_by_name(handler.module, handler.qualname, handler.file)


@functools.lru_cache(maxsize=256)
def _found_by_name(module: str, qualname: str, file: str | None) -> Callable[..., Any]:
    found: Any = _imported(module, file)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found.fn if isinstance(found, TaskDefinition) else found


def _imported(module: str, file: str | None) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if file is None or error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
    # Loaded in the parent from a place that is on no path, as test runners and plug-in systems do.
    spec = importlib.util.spec_from_file_location(module, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"there is no module {module!r}, and {file} is not a Python file", name=module)
    loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
