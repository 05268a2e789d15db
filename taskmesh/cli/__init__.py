"""The command line (extra `cli`). Thin: parse, call the public API, show.

In reading order: `app` (all commands), `connected` (where to connect, and the user's code), `output`; a file for each topic;
`worker` (the room of what runs tasks).

Exit status: 0 done, 1 it failed, 2 wrong usage.
"""

from __future__ import annotations

import io
import sys

from pymongo.errors import PyMongoError

from taskmesh.admin.database import said_by
from taskmesh.model.distribution import check_extra
from taskmesh.model.errors import InvalidKey, InvalidName, InvalidOption, InvalidParams, TaskMeshError

FAILED, WRONG_USAGE = 1, 2


def main() -> None:
    """Run the command line of this process, and end it with the right status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal may not know "–", and no key is worth a traceback
    try:
        check_extra("cli", ("typer", "rich"), "the command line")
        from taskmesh.cli.app import command  # noqa: PLC0415  # not there without the extra

        command()(prog_name="taskmesh")
    except (InvalidName, InvalidKey, InvalidOption, InvalidParams) as error:
        _end(error, WRONG_USAGE)
    except TaskMeshError as error:
        _end(error, FAILED)
    except PyMongoError as error:  # a malformed URI, no permission, the database went away meanwhile
        _end(f"MongoDB: {said_by(error)}", FAILED)
    except BrokenPipeError:  # `taskmesh ls | head` has seen enough
        sys.stderr.close()
        sys.exit(FAILED)


def _end(error: object, status: int) -> None:
    """Print what was wrong in one sentence, and exit."""
    print(f"taskmesh: {error}", file=sys.stderr)
    sys.exit(status)
