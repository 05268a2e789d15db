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
from pymongo.helpers_shared import _RETRYABLE_ERROR_CODES  # the one place where the driver keeps them

T = TypeVar("T")

_OVER_DEADLINE = 50
_PATIENCE_S = 30.0
_PAUSE_S = 0.1
_PASSING = _RETRYABLE_ERROR_CODES | {24, 64, 79, 112, 133, 202, 246, 358, 365, 13388}
"""Host or network trouble, elections: the driver's own class; and lock time-outs, write conflicts, overload.

The server labels errors of what the driver itself may repeat, and of transactions. Most writes here are neither (an update of
many tasks, a raw command): so their errors come without a label, and have to be known by their codes.
"""
_PASSING_LABELS = ("RetryableWriteError", "TransientTransactionError", "SystemOverloadedError", "RetryableError")


def is_passing(error: BaseException) -> bool:
    """Whether the same command may go well a little later. The command may have been applied all the same."""
    if isinstance(error, (ConnectionFailure, WriteConcernError)):
        return True
    if isinstance(error, OperationFailure):
        return any(error.has_error_label(label) for label in _PASSING_LABELS) or error.code in _PASSING
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
