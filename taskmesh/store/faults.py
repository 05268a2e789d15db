"""Faults: which errors pass by themselves, and which are about one document."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pymongo.errors import (
    ConnectionFailure,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WriteConcernError,
)

T = TypeVar("T")

_OVER_DEADLINE = 50
_PATIENCE_S = 30.0
_PAUSE_S = 0.1
_PASSING = {
    6,
    7,
    24,
    64,
    79,
    89,
    91,
    112,
    133,
    134,
    189,
    202,
    246,
    262,
    358,
    9001,
    10107,
    11600,
    11602,
    13388,
    13435,
    13436,
}
"""Host or network trouble, elections, write conflicts, overload: try again."""
_PASSING_LABELS = ("RetryableWriteError", "TransientTransactionError", "SystemOverloadedError", "RetryableError")


def is_passing(error: BaseException) -> bool:
    """Whether the same command may go well a little later. The command may have been applied all the same."""
    if isinstance(error, (ConnectionFailure, WriteConcernError)):
        return True
    if isinstance(error, OperationFailure):
        return error.code in _PASSING or any(error.has_error_label(label) for label in _PASSING_LABELS)
    return isinstance(error, PyMongoError) and not isinstance(error, OperationFailure) and error.timeout


def is_over_deadline(error: BaseException) -> bool:
    """Whether the server gave up at our deadline, perhaps half-way: most likely a document of the set is locked.

    Not so where it has written and only waited for the majority: smaller sets would wait as long.
    """
    waited_for_majority = isinstance(error, WriteConcernError)
    return isinstance(error, OperationFailure) and not waited_for_majority and error.code == _OVER_DEADLINE


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Do what is safe to repeat; again while the database falters, as in an election, which the driver repeats only in part."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return await call()
        except PyMongoError as error:
            waited = isinstance(error, ServerSelectionTimeoutError)  # for as long as the client allows
            if waited or not (is_passing(error) or is_over_deadline(error)) or time.monotonic() > give_up:
                raise
        await asyncio.sleep(_PAUSE_S)
