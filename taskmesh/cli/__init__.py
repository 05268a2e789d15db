"""The command line (extra `cli`). Thin: parse, call the public API, show.

In reading order: `app` (all commands), `connected` (where to connect, and how errors end), `output`; `publishing`,
`tasks`, `following`, `fleet` (one call each); `worker`, `loading`, `supervisor`, `slot` (running).

Exit status: 0 done, 1 it failed, 2 wrong usage.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from taskmesh.errors import InvalidKey, InvalidName, InvalidOption, InvalidParams, TaskMeshError

DONE, FAILED, WRONG_USAGE = 0, 1, 2
_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line of this process, and end it with the right status."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        print(f"taskmesh: the command line needs {' and '.join(missing)}: pip install 'taskmesh[cli]'", file=sys.stderr)
        sys.exit(FAILED)
    from pymongo.errors import PyMongoError  # noqa: PLC0415  # only after the check: it takes a while

    from taskmesh.cli.app import app  # noqa: PLC0415  # not there without the extra

    try:
        app(prog_name="taskmesh")
    except (InvalidName, InvalidKey, InvalidOption, InvalidParams) as error:
        _end(error, WRONG_USAGE)
    except TaskMeshError as error:
        _end(error, FAILED)
    except PyMongoError as error:  # a malformed URI, no permission, the database went away meanwhile
        _end(f"MongoDB: {error}", FAILED)
    except BrokenPipeError:  # `taskmesh ls | head` has seen enough
        sys.stderr.close()
        sys.exit(FAILED)


def _end(error: object, status: int) -> None:
    """Say in one sentence what was wrong, and end."""
    print(f"taskmesh: {error}", file=sys.stderr)
    sys.exit(status)
