"""All commands of `taskmesh`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from taskmesh.cli import audit, bulk, errors, explain, fleet, following, publishing, queues, tasks, top
from taskmesh.cli.connected import Collection, Database, Uri
from taskmesh.cli.demo import demo
from taskmesh.cli.dev import dev
from taskmesh.cli.web import web
from taskmesh.cli.worker import worker
from taskmesh.model import distribution

app = typer.Typer(
    help="taskmesh: tasks on MongoDB, with leases, fencing and retries. See `taskmesh COMMAND --help`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # main() says errors in a sentence; a bug shows Python's own traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"taskmesh {distribution.release()}")
        raise typer.Exit


@app.callback()
def _everywhere(
    uri: Uri = None,
    database: Database = None,
    collection: Collection = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version, and end.")
    ] = False,
) -> None:
    # Given before the command they mean the same as after it: the commands read them from the environment.
    for name, value in (("URI", uri), ("DATABASE", database), ("COLLECTION", collection)):
        if value is not None:
            os.environ[f"TASKMESH_{name}"] = value


app.command("worker", rich_help_panel="Run")(worker)
app.command("dev", rich_help_panel="Run")(dev)
app.command("demo", rich_help_panel="Run")(demo)
app.command("web", rich_help_panel="Run")(web)
publishing.add_to(app)
tasks.add_to(app)
explain.add_to(app)
following.add_to(app)
errors.add_to(app)
bulk.add_to(app)
audit.add_to(app)
queues.add_to(app)
fleet.add_to(app)
top.add_to(app)
