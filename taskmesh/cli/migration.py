"""`migrate`: jobs that another program keeps in MongoDB become tasks."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from taskmesh.admin.migration import Agenda, Moved, MScheduler, Peer
from taskmesh.admin.migration import migrate as moved
from taskmesh.admin.store.migration import Source
from taskmesh.cli import output
from taskmesh.cli.output import Json
from taskmesh.mesh import TaskMesh


async def migrate(
    mesh: TaskMesh,
    peer: Annotated[
        Literal["agenda", "mscheduler"], typer.Argument(metavar="agenda|mscheduler", help="Whose jobs these are.")
    ],
    *,
    source: Annotated[
        str, typer.Option("--from", metavar="DATABASE.COLLECTION", help="Where they are, on the same servers.")
    ],
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="agenda: OLD=NEW, what a job is called here; several. mscheduler: what its tasks are called."
        ),
    ] = None,
    param: Annotated[
        str, typer.Option(help="mscheduler: the parameter that receives params that are not an object.")
    ] = "params",
    take: Annotated[bool, typer.Option("--take", help="Do it; else only show what would be done.")] = False,
    as_json: Json = False,
) -> None:
    """Import the unfinished jobs of Agenda or mscheduler, each once. Safe to repeat, and safe while that program runs."""
    database, _, collection = source.partition(".")
    if not (database and collection):
        raise typer.BadParameter(f"--from takes DATABASE.COLLECTION, like app.agendaJobs, got {source!r}")
    found: list[Moved] = []
    reader = _reader(peer, name or [], param)
    async for each in moved(
        Source(mesh.store, database, collection), reader, mesh.publisher, mesh.schedules, take=take
    ):
        found.append(each)
        if not as_json:
            where = "" if each.name is None else f" to {each.name} {each.key}"
            output.say(f"{each.what} {each.job}{where}{f': {each.why}' if each.why else ''}")
    if as_json:
        output.show_json([asdict(each) for each in found])
        return
    counts = Counter(each.what for each in found)
    output.say(", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "nothing is left to move")
    if counts["would move"]:
        output.say("nothing was changed: --take moves them")


def _reader(peer: str, names: list[str], param: str) -> Peer:
    if peer == "mscheduler":
        if len(names) != 1:
            raise typer.BadParameter("mscheduler's tasks have no name: give one, like --name resize")
        return MScheduler(names[0], param)
    pairs = [each.partition("=") for each in names]
    if wrong := [old for old, _, new in pairs if not (old and new)]:
        raise typer.BadParameter(f"--name takes OLD=NEW for agenda, got {wrong[0]!r}")
    return Agenda({old: new for old, _, new in pairs})
