"""What is written down about a failure: type, message and the last lines of code, bounded.

Never a variable's value: a document is read by more people than the process that failed.
"""

from __future__ import annotations

import traceback

from taskmesh.errors import Retry, Snooze, TaskFailed

MAX_REASON_CHARS = 4_000
_FRAMES_KEPT = 8
_CALLERS = tuple(f"/taskmesh/consumer/{name}.py" for name in ("executor", "processes", "child"))


class ReasonElsewhere(Exception):
    """The cause of an error that was raised in another process: its reason, made where the traceback was."""


def reason_text(error: BaseException) -> str:
    """Return type, message and the last frames of an error. Only file, line and code of a frame are kept."""
    if isinstance(error.__cause__, ReasonElsewhere):
        return cleaned(str(error.__cause__))
    if isinstance(error, (TaskFailed, Retry, Snooze)):
        return cleaned(_message(error) or type(error).__name__)
    text = _summary(error)[: MAX_REASON_CHARS // 2]
    frames = traceback.extract_tb(error.__traceback__)
    # What called the handler is the same for every failure, and says nothing about this one.
    ours = [i for i, frame in enumerate(frames) if frame.filename.replace("\\", "/").endswith(_CALLERS)]
    own = frames[ours[-1] + 1 if ours else 0 :][-_FRAMES_KEPT:]
    if own:
        text += "\n" + "".join(traceback.format_list(own)).rstrip()
    return cleaned(text)


def _summary(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(error)).strip()
    except Exception as second:  # noqa: BLE001 — an exception whose own text cannot be made must not hide that it was raised
        return f"{type(error).__name__} (its text cannot be made: {type(second).__name__})"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 — as above
        return f"{type(error).__name__} (its text cannot be made: {type(second).__name__})"


def unstorable_text(error: BaseException) -> str:
    """Return the reason of an execution whose result cannot be stored."""
    return cleaned(f"the handler's result cannot be stored: {error}")


def cleaned(text: str) -> str:
    """Return the text without what MongoDB cannot store, and not longer than is kept."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")[:MAX_REASON_CHARS]
