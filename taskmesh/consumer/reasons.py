"""What is written down about a failure: type, message and the last lines of code, bounded.

Never a variable's value: a document is read by more people than the process that failed.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

from taskmesh.model.errors import Retry, Snooze, TaskFailed

MAX_REASON_CHARS = 4_000
_FRAMES_KEPT = 8
_CALLERS = tuple(f"/taskmesh/consumer/{name}.py" for name in ("executor", "subprocess/processes", "subprocess/child"))
_OF_A_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|^<frozen")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an execution failed, as it is written down."""

    text: str
    type: str | None
    """The error's type; with its module, unless it is Python's or taskmesh's own. None: there was no error."""
    frame: str | None
    """Where it was raised: the end of the file's path, line and function of the innermost frame that is no library's."""


class ReasonElsewhere(Exception):
    """The cause of an error that was raised in another process: its reason, made where the traceback was."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


def reason_of(error: BaseException) -> Reason:
    """Return type, message and the last frames of an error. Only file, line and code of a frame are kept."""
    if isinstance(error.__cause__, ReasonElsewhere):
        return error.__cause__.reason
    frames = traceback.extract_tb(error.__traceback__)
    # What called the handler is the same for every failure, and says nothing about this one.
    ours = [i for i, frame in enumerate(frames) if _path(frame).endswith(_CALLERS)]
    own = frames[ours[-1] + 1 if ours else 0 :]
    if isinstance(error, (TaskFailed, Retry, Snooze)):
        text = _message(error) or type(error).__name__
    else:
        text = _summary(error)[: MAX_REASON_CHARS // 2]
        if own:
            text += "\n" + "".join(traceback.format_list(own[-_FRAMES_KEPT:])).rstrip()
    return Reason(cleaned(text), cleaned(_type(type(error))), _place(own))


def _type(kind: type[BaseException]) -> str:
    own = kind.__module__ in ("builtins", "__main__", "taskmesh.model.errors")
    return kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"


def _place(frames: list[traceback.FrameSummary]) -> str | None:
    """Return where it was raised. Of the path only the end: the same code stands elsewhere on each machine."""
    if not frames:
        return None
    frame = next((frame for frame in reversed(frames) if not _OF_A_LIBRARY.search(_path(frame))), frames[-1])
    return cleaned(f"{'/'.join(_path(frame).split('/')[-3:])}:{frame.lineno} in {frame.name}")


def _path(frame: traceback.FrameSummary) -> str:
    return frame.filename.replace("\\", "/")


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
