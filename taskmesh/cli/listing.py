"""Listings: once or again and again (`--watch`), as a table or as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import anyio
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from taskmesh.cli import output
from taskmesh.mesh import TaskMesh

Json = Annotated[bool, typer.Option("--json", help="Print JSON: an array for a list, else an object.")]
Watch = Annotated[
    float | None, typer.Option("--watch", min=0.1, metavar="SECONDS", help="Repeat at this interval until Ctrl-C.")
]

T = TypeVar("T")
_REST_SHARE = 3
"""After a look that took so long, at least so many times that long passes before the next."""


@dataclass(frozen=True)
class Listing:
    """What there is to show: `data` for programs, `shown` for people."""

    data: Any
    shown: RenderableType
    nothing: str | None = None
    """If nothing was found: what, and where it was looked for."""


async def show(read: Callable[[], Awaitable[Listing]], *, as_json: bool, every_s: float | None = None) -> None:
    """Read and print once, or every `every_s` seconds until Ctrl-C. JSON that is repeated takes one line each time."""
    if every_s is None:
        listing = await read()
        if as_json:
            output.show_json(listing.data)
            if listing.nothing is not None:
                output.say(listing.nothing, stderr=True)
        else:
            output.console().print(listing.shown, crop=False)  # what must not be cut is not wrapped either
        return
    try:
        if as_json or not sys.stdout.isatty():
            await _repeat(read, every_s, as_json)
        else:
            await _live(read, every_s)
    except (KeyboardInterrupt, anyio.get_cancelled_exc_class()):
        raise typer.Exit(0) from None  # that is how one ends it


def nothing_found(mesh: TaskMesh, what: str, data: Any = ()) -> Listing:
    """Return the listing of an empty answer: it says where it looked, since another database looks like an empty one."""
    said = f"{what}; looked at {mesh.address}"
    return Listing(data, Text(said, style="dim"), said)


async def show_found(
    mesh: TaskMesh,
    find: Callable[[], Awaitable[T]],
    shown: Callable[[T], RenderableType],
    nothing: str,
    *,
    as_json: bool,
    every_s: float | None = None,
) -> None:
    """Show what `find` returns, which is its own data. `nothing`: what to say if that is empty."""

    async def read() -> Listing:
        found = await find()
        return Listing(found, shown(found)) if found else nothing_found(mesh, nothing, found)

    await show(read, as_json=as_json, every_s=every_s)


async def _repeat(read: Callable[[], Awaitable[Listing]], every_s: float, as_json: bool) -> None:
    while True:
        began = time.monotonic()
        listing = await read()
        if as_json:
            print(output.one_line(listing.data), flush=True)
        else:
            output.console().print(listing.shown)
            print(flush=True)
        await _rest(every_s, began)


async def _live(read: Callable[[], Awaitable[Listing]], every_s: float) -> None:
    with Live(console=output.console(), screen=True, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            began = time.monotonic()
            shown = (await read()).shown
            live.update(Group(shown, Text(f"\nevery {every_s:g} s · Ctrl-C ends", style="dim")), refresh=True)
            await _rest(every_s, began)


async def _rest(every_s: float, began: float) -> None:
    """Wait for the next look, which must not come so soon that the database does little else: counting millions takes time."""
    await anyio.sleep(max(every_s, _REST_SHARE * (time.monotonic() - began)))
