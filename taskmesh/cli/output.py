"""What commands print: tables for people, JSON for programs.

Tables fit the terminal; in a pipe they are as wide as they need to be, without colours. What users put into keys, results
and reasons is never taken for markup or for a terminal's control codes.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import anyio
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from taskmesh.cli.live import live
from taskmesh.mesh import TaskMesh
from taskmesh.model.jsonable import jsonable
from taskmesh.model.times import age

_PIPE_WIDTH = 100_000
_NEVER_CUT = frozenset({"STATUS", "STATE", "RUNNING"})
_KEPT = _NEVER_CUT | {"KEY", "WHY", "WHAT", "RESULT", "GATE", "WHEN", "TO", "SHUT"}
"""Columns that are kept on the narrowest terminal, besides the first."""
_ENOUGH = 16
"""A column of this many characters is readable when its text wraps."""

STYLES = {
    "INIT": "cyan",
    "ready": "cyan",
    "scheduled": "cyan",
    "retrying": "yellow",
    "RUNNING": "blue",
    "SUCCESS": "green",
    "FAIL": "red",
    "CANCELLED": "yellow",
    "EXPIRED": "magenta",
    "running": "green",
    "stopping": "yellow",
    "gone": "red",
    "ok": "green",
    "warning": "yellow",
    "error": "red",
}


def console(*, stderr: bool = False) -> Console:
    """Return a console for standard output: as wide as the terminal, or as the text if there is none."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width, soft_wrap=width is not None)


def say(text: str, *, stderr: bool = False) -> None:
    """Print a line."""
    print(printable(text), file=sys.stderr if stderr else sys.stdout)


def printable(text: str) -> str:
    """Return the text with control characters, which could move the cursor or change colours, made visible."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def cell(value: object, *, now: datetime | None = None) -> Text:
    """Return what a table shows for this value."""
    if value is None:
        return Text("–", style="dim")
    if isinstance(value, datetime):
        return Text(age(value, now or datetime.now(UTC)))
    if isinstance(value, float):
        return Text(f"{value:.1f}")
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value)) or "–"
    text = printable(str(value))
    return Text(text, style=STYLES.get(text, ""))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a plain table; columns of numbers stand to the right.

    On a narrow terminal the essential columns are kept; of the others the last are hidden, and named below the table.
    """
    cells = [[each if isinstance(each, Text) else cell(each) for each in row] for row in rows]
    screen = console().width
    needed = [
        width if name in _NEVER_CUT else min(width, screen * 2 // 5 if name == "KEY" else _ENOUGH)
        for name, *texts in zip(columns, *cells, strict=True)
        for width in [max(len(name), *(text.cell_len for text in texts), 0)]
    ]
    shown, hidden = _fitting(columns, needed, screen)
    made = Table(box=None, header_style="bold", pad_edge=False, caption_justify="left")
    for at in shown:
        texts = {row[at].plain for row in cells} - {"–"}
        numeric = bool(texts) and all(text.replace(".", "", 1).replace(",", "").isdigit() for text in texts)
        made.add_column(columns[at], justify="right" if numeric else "left", overflow="fold", min_width=needed[at])
    for row in cells:
        made.add_row(*(row[at] for at in shown))
    if hidden:
        made.caption = f"hidden for lack of space: {', '.join(columns[at] for at in hidden)}"
    return made


def _fitting(columns: Sequence[str], needed: Sequence[int], screen: int) -> tuple[list[int], list[int]]:
    """Return which columns fit into this many characters, and which are hidden."""
    shown, hidden = list(range(len(columns))), list[int]()
    for at in reversed(shown):
        if sum(needed[each] + 2 for each in shown) - 2 <= screen:
            break
        if at > 0 and columns[at] not in _KEPT:
            shown = [each for each in shown if each != at]
            hidden.insert(0, at)
    return shown, hidden


def show_json(value: object) -> None:
    """Print one value as JSON, on many lines."""
    print(json.dumps(jsonable(value), indent=2, ensure_ascii=not _unicode()))


def one_line(value: object) -> str:
    """Return a value as JSON, on one line."""
    return json.dumps(jsonable(value), ensure_ascii=not _unicode())


def _unicode() -> bool:
    """Whether standard output can show every character. If not, JSON is written with escapes."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation on a terminal; a script is not asked. Ends the command if the answer is no.

    Asks on standard error: standard output may go to a file, which should contain only the result.
    """
    if yes or not sys.stdin.isatty():
        return
    with contextlib.redirect_stdout(sys.stderr):  # reading a line prints a space too
        agreed = typer.confirm(printable(question))
    if not agreed:
        raise typer.Exit(1)


def check_can_ask(what: str, *, yes: bool) -> None:
    """Raise typer's `BadParameter` if somebody has to confirm an action on many tasks, and there is no terminal to ask on."""
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter(
            f"{what} acts on many tasks, and standard input is not a terminal to confirm it on: add --yes, or count the tasks "
            "first with --dry-run"
        )


def settings(words: Iterable[str]) -> dict[str, Any]:
    """Read FIELD=VALUE words; a value is JSON or plain text. The mesh checks the fields. Raises typer's `BadParameter`."""
    found: dict[str, Any] = {}
    for word in words:
        field, equals, text = word.partition("=")
        if not equals:
            raise typer.BadParameter(f"{word!r} is not of the form FIELD=VALUE")
        if field in found:
            raise typer.BadParameter(f"{field} is given twice")
        try:
            found[field] = from_json(text)
        except ValueError:
            found[field] = text
    return found


def from_json(text: str) -> Any:
    """Read JSON. Raises `ValueError`, also for what is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


Json = Annotated[bool, typer.Option("--json", help="Print JSON: an array for a list, else an object.")]
Watch = Annotated[
    float | None, typer.Option("--watch", min=0.1, metavar="SECONDS", help="Repeat at this interval until Ctrl-C.")
]

T = TypeVar("T")
_REST_SHARE = 3
"""The pause after a look is at least this many times as long as the look took."""


@dataclass(frozen=True)
class Listing:
    """What to show: `data` for programs, `shown` for people."""

    data: Any
    shown: RenderableType
    nothing: str | None = None
    """If nothing was found: a line that says so, and where the command looked."""


async def show(read: Callable[[], Awaitable[Listing]], *, as_json: bool, every_s: float | None = None) -> None:
    """Read and print once, or every `every_s` seconds until Ctrl-C. JSON that is repeated takes one line each time."""
    if every_s is None:
        listing = await read()
        if as_json:
            show_json(listing.data)
            if listing.nothing is not None:
                say(listing.nothing, stderr=True)
        else:
            console().print(listing.shown, crop=False)  # what must not be cut is not wrapped either
        return
    try:
        if as_json or not sys.stdout.isatty():
            await _repeat(read, every_s, as_json)
        else:

            async def shown() -> RenderableType:
                return (await read()).shown

            await live(console(), shown, lambda took_s: max(every_s, _REST_SHARE * took_s))
    except (KeyboardInterrupt, anyio.get_cancelled_exc_class()):
        raise typer.Exit(0) from None  # Ctrl-C is the normal end


def nothing_found(mesh: TaskMesh, what: str, data: Any = ()) -> Listing:
    """Return the listing for an empty answer. It says where it looked, since a wrong database looks like an empty one."""
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
    """Show what `find` returns; programs get it as it is. `nothing`: what to say if it is empty."""

    async def read() -> Listing:
        found = await find()
        return Listing(found, shown(found)) if found else nothing_found(mesh, nothing, found)

    await show(read, as_json=as_json, every_s=every_s)


async def _repeat(read: Callable[[], Awaitable[Listing]], every_s: float, as_json: bool) -> None:
    while True:
        began = time.monotonic()
        listing = await read()
        if as_json:
            print(one_line(listing.data), flush=True)
        else:
            console().print(listing.shown)
            print(flush=True)
        await _rest(every_s, began)


async def _rest(every_s: float, began: float) -> None:
    """Wait for the next look. Counting millions takes time: looks must not keep the database busy."""
    await anyio.sleep(max(every_s, _REST_SHARE * (time.monotonic() - began)))
