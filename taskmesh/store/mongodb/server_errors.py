"""The meaning of server errors: which are temporary, which concern one document, which concern us, and which a stream.

This is the only place that knows their codes.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import TypeVar

from pymongo.errors import (
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    InvalidOperation,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WriteConcernError,
)
from pymongo.helpers_shared import _RETRYABLE_ERROR_CODES  # the one place where the driver keeps them

T = TypeVar("T")


class Code(IntEnum):
    """Error codes of the server, by its own names; where it has none, by their meaning."""

    BAD_VALUE = 2
    UNAUTHORIZED = 13
    OVERFLOW = 15
    AUTHENTICATION_FAILED = 18
    LOCK_TIMEOUT = 24
    NAMESPACE_EXISTS = 48
    MAX_TIME_MS_EXPIRED = 50
    DOLLAR_PREFIXED_FIELD_NAME = 52
    INVALID_DB_REF = 55
    DOTTED_FIELD_NAME = 57
    COMMAND_NOT_FOUND = 59
    WRITE_CONCERN_FAILED = 64
    UNKNOWN_REPL_WRITE_CONCERN = 79
    INDEX_OPTIONS_CONFLICT = 85
    INDEX_KEY_SPECS_CONFLICT = 86
    WRITE_CONFLICT = 112
    DOCUMENT_VALIDATION_FAILURE = 121
    FAILED_TO_SATISFY_READ_PREFERENCE = 133
    CAPPED_POSITION_LOST = 136
    CANNOT_INDEX_PARALLEL_ARRAYS = 171
    NETWORK_INTERFACE_EXCEEDED_TIME_LIMIT = 202
    RETRY_CHANGE_STREAM = 234
    CONVERSION_FAILURE = 241
    SNAPSHOT_UNAVAILABLE = 246
    NO_SUCH_TRANSACTION = 251
    INVALID_RESUME_TOKEN = 260
    CHANGE_STREAM_FATAL_ERROR = 280
    CHANGE_STREAM_HISTORY_LOST = 286
    TRANSACTION_EXCEEDED_LIFETIME_LIMIT = 290
    INTERNAL_TRANSACTION_NOT_SUPPORTED = 358
    TEMPORARILY_UNAVAILABLE = 365
    REAUTHENTICATION_REQUIRED = 391
    ATLAS_ERROR = 8000
    BSON_OBJECT_TOO_LARGE = 10334
    DUPLICATE_KEY = 11000
    STALE_CONFIG = 13388
    DISTINCT_TOO_LARGE = 17217
    INDEX_KEY_TOO_LONG = 17280
    UPDATED_DOCUMENT_TOO_LARGE = 17419
    UPDATED_DOCUMENT_TOO_LARGE_AFTER_MODIFIERS = 17420
    UNKNOWN_FIELD_OF_STAGE = 40415
    CHANGE_STREAM_WITHOUT_REPLICA_SET = 40573


DOCUMENT_TOO_LARGE = frozenset(
    {Code.BSON_OBJECT_TOO_LARGE, Code.UPDATED_DOCUMENT_TOO_LARGE, Code.UPDATED_DOCUMENT_TOO_LARGE_AFTER_MODIFIERS}
)
"""The codes for a document that would exceed 16 MB."""
_ABOUT_THE_DOCUMENT = DOCUMENT_TOO_LARGE | {
    Code.OVERFLOW,
    Code.DOLLAR_PREFIXED_FIELD_NAME,
    Code.INVALID_DB_REF,
    Code.DOTTED_FIELD_NAME,
    Code.DOCUMENT_VALIDATION_FAILURE,
    Code.CANNOT_INDEX_PARALLEL_ARRAYS,
    Code.DUPLICATE_KEY,
    Code.INDEX_KEY_TOO_LONG,
}
"""Too large, nested too deeply, against a validator or a user's index: another try does no better."""
_ABOUT_US = frozenset({Code.UNAUTHORIZED, Code.AUTHENTICATION_FAILED, Code.REAUTHENTICATION_REQUIRED, Code.ATLAS_ERROR})
"""Not allowed, not logged in, over a quota."""
_STREAM_HISTORY_LOST = frozenset(
    {
        Code.CHANGE_STREAM_HISTORY_LOST,
        Code.CHANGE_STREAM_FATAL_ERROR,
        Code.INVALID_RESUME_TOKEN,
        Code.CAPPED_POSITION_LOST,
        Code.RETRY_CHANGE_STREAM,
        # An event larger than a message may be, which is in the way for ever: the stream goes on after it.
        Code.BSON_OBJECT_TOO_LARGE,
    }
)
_NO_STREAM = frozenset(
    {
        Code.UNAUTHORIZED,
        Code.COMMAND_NOT_FOUND,
        Code.UNKNOWN_FIELD_OF_STAGE,
        Code.CHANGE_STREAM_WITHOUT_REPLICA_SET,
    }
)
_TRANSACTION_GONE = frozenset({Code.NO_SUCH_TRANSACTION, Code.TRANSACTION_EXCEEDED_LIFETIME_LIMIT})
_PATIENCE_S = 30.0
_PAUSE_S = 0.1
_PASSING = _RETRYABLE_ERROR_CODES | {
    Code.LOCK_TIMEOUT,
    Code.WRITE_CONCERN_FAILED,
    Code.UNKNOWN_REPL_WRITE_CONCERN,
    Code.WRITE_CONFLICT,
    Code.FAILED_TO_SATISFY_READ_PREFERENCE,
    Code.NETWORK_INTERFACE_EXCEEDED_TIME_LIMIT,
    Code.SNAPSHOT_UNAVAILABLE,
    Code.INTERNAL_TRANSACTION_NOT_SUPPORTED,
    Code.TEMPORARILY_UNAVAILABLE,
    Code.STALE_CONFIG,
}
"""Host or network trouble, elections (the driver's own class of errors); and lock time-outs, write conflicts, overload.

The server labels errors of operations that the driver itself may repeat, and of transactions. Most writes here are neither
(an update of many tasks, a raw command), so their errors come without a label, and have to be recognised by their codes."""
_NOT_YET_A_MEMBER = "Sessions are not supported"
"""The driver's message for a server that could not serve reads when it was connected to, such as one that has just restarted.

That it is a replica set, which has sessions, was checked when the mesh connected."""
_PASSING_LABELS = ("RetryableWriteError", "TransientTransactionError", "SystemOverloadedError", "RetryableError")


def own_copy(error: Exception) -> Exception:
    """Return a copy for one of several callers that get the same error: each adds to its traceback."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 — somebody's own class, which cannot be copied
        return error
    return copied.with_traceback(error.__traceback__)


def is_passing(error: BaseException) -> bool:
    """Whether the same command may succeed a little later. It may have been applied nevertheless."""
    if isinstance(error, (ConnectionFailure, WriteConcernError)):
        return True
    if isinstance(error, ConfigurationError):
        return _NOT_YET_A_MEMBER in str(error)
    if isinstance(error, BulkWriteError):
        # It has no code of its own. What was written, and not confirmed by a majority in time, may yet be.
        refused = error.details["writeErrors"]
        return all(each["code"] in _PASSING for each in refused) and bool(
            refused or error.details["writeConcernErrors"]
        )
    if isinstance(error, OperationFailure):
        return any(error.has_error_label(label) for label in _PASSING_LABELS) or error.code in _PASSING
    return isinstance(error, PyMongoError) and not isinstance(error, OperationFailure) and error.timeout


def is_over_deadline(error: BaseException) -> bool:
    """Whether the server gave up at our deadline, perhaps half-way: most likely a document of the set is locked.

    False if it has written everything and only waited for the majority: smaller sets would wait as long.
    """
    waited_for_majority = isinstance(error, WriteConcernError)
    return isinstance(error, OperationFailure) and not waited_for_majority and error.code == Code.MAX_TIME_MS_EXPIRED


def is_unconfirmed(error: BaseException) -> bool:
    """Whether the server has written everything, and only lacks a majority's confirmation in time. That will probably come."""
    late = (Code.MAX_TIME_MS_EXPIRED, Code.WRITE_CONCERN_FAILED)
    return isinstance(error, WriteConcernError) and error.code in late


def is_about_us(error: BaseException) -> bool:
    """Whether we are not allowed, not logged in, or over a quota: then all writes fail alike, until that is fixed."""
    return isinstance(error, OperationFailure) and error.code in _ABOUT_US


def is_about_the_document(error: BaseException) -> bool:
    """Whether one document cannot be written, now or later; also if the client is closed, or cannot encode it."""
    if isinstance(error, OperationFailure):
        return error.code in _ABOUT_THE_DOCUMENT
    return isinstance(error, InvalidOperation) or not isinstance(error, PyMongoError)


def is_transaction_gone(error: BaseException) -> bool:
    """Whether the server no longer knows the transaction: it has aborted it, perhaps since it lasted too long."""
    return isinstance(error, OperationFailure) and error.code in _TRANSACTION_GONE


def is_history_lost(error: PyMongoError) -> bool:
    """Whether the position of a resume token is out of reach: only a newly opened stream goes on."""
    if not isinstance(error, OperationFailure):
        return False
    return error.code in _STREAM_HISTORY_LOST or error.has_error_label("NonResumableChangeStreamError")


def is_event_too_large(error: PyMongoError) -> bool:
    """Whether a change event is in a stream's way that is larger than a message may be."""
    return isinstance(error, OperationFailure) and error.code == Code.BSON_OBJECT_TOO_LARGE


def offers_no_stream(error: OperationFailure) -> bool:
    """Whether the server does not give us any change stream."""
    return error.code in _NO_STREAM


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Await a call that is safe to repeat. Tries again during elections and the like, which the driver covers only in part."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return await call()
        except PyMongoError as error:
            waited = isinstance(error, ServerSelectionTimeoutError)  # for as long as the client allows
            if waited or not (is_passing(error) or is_over_deadline(error)) or time.monotonic() > give_up:
                raise
        await asyncio.sleep(_PAUSE_S)
