"""Commands that serve until Ctrl-C: `dev` (the embedded MongoDB), `web` (the dashboard and the REST API)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from taskmesh.cli import output
from taskmesh.cli.connected import Collection, Database, Uri, mesh_of
from taskmesh.cli.output import Json
from taskmesh.cli.worker.force_exit import stop_signals
from taskmesh.embedded import attach
from taskmesh.model.errors import EmbeddedUnavailable

_LOOK_S = 1.0


def dev(
    directory: Annotated[Path, typer.Option(help="Directory for its data.")] = Path(".taskmesh"),
    as_json: Json = False,
    uri: Annotated[str | None, typer.Option(hidden=True)] = None,
    database: Database = None,
) -> None:
    """Run the embedded MongoDB until Ctrl-C; all taskmesh processes of this directory use it by themselves."""
    if uri is not None:
        raise typer.BadParameter("`dev` starts a MongoDB of its own and prints its URI: leave --uri out")
    ended = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda _number, _frame: ended.set())
    with attach(directory) as server:
        if as_json:
            output.show_json({"uri": server.uri, "pid": server.pid, "directory": str(server.directory)})
        else:
            output.say(f"MongoDB runs at {server.uri}")
            output.say(f"  data   {server.directory}, which stays when the server (pid {server.pid}) stops")
            output.say("  use    nothing to do in this directory; elsewhere:")
            at = "" if database is None else f" TASKMESH_DATABASE={database}"
            output.say(f"         export TASKMESH_URI='{server.uri}'{at}")
            output.say("  stop   Ctrl-C (it keeps running while other processes in this directory use it)")
        sys.stdout.flush()
        while not ended.wait(_LOOK_S):
            with contextlib.suppress(PermissionError):
                try:
                    os.kill(server.pid, 0)
                except ProcessLookupError:
                    raise EmbeddedUnavailable(
                        f"the MongoDB in {str(server.directory)!r} ended unexpectedly: see data/mongod.log there"
                    ) from None


def web(
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0: any free port.")] = 8080,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse every change.")] = False,
    base_path: Annotated[
        str, typer.Option(help="The path that a proxy strips before it passes requests on, like /ops/mesh.")
    ] = "",
    user_header: Annotated[
        str | None,
        typer.Option(
            help="The header in which a proxy names the user, like X-Forwarded-User. Only the proxy may reach the port then."
        ),
    ] = None,
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
) -> None:
    """Serve the dashboard and the REST API until Ctrl-C."""
    from taskmesh.web import serve  # noqa: PLC0415 — an extra

    mesh = mesh_of(None, uri, database, collection)
    serve(mesh, host=host, port=port, read_only=read_only, base_path=base_path, user_header=user_header)
