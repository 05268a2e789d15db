"""Faults: which errors pass by themselves, and which are about one document."""

from __future__ import annotations

from pymongo.errors import ConnectionFailure, OperationFailure, PyMongoError, WriteConcernError

_OVER_DEADLINE = 50
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
    """Whether the server gave up at our deadline, perhaps half-way: most likely a document of the set is locked."""
    return isinstance(error, OperationFailure) and error.code == _OVER_DEADLINE
