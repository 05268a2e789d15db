"""Wall clocks that are wrong in one process alone; monotonic time stays true.

With libfaketime (`apt-get install libfaketime`) in whatever process is started; without it in one of Python that shifts its own.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAKETIME = next(
    (path for path in Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), Path("/no libfaketime on this machine")
)

_true_time, _true_time_ns, _TrueDatetime = time.time, time.time_ns, dt.datetime
_offset_s = 0.0


def faked(offset_s: float) -> dict[str, str]:
    """The environment in which a process's wall clock is off by so much, all its libraries included."""
    return {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME": f"{offset_s:+.0f}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        # Else, with the glibc of Debian 12, every timed wait of a thread returns at once: a mongod kept two cores busy.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
    }


@contextmanager
def clock_off(offset_s: float) -> Iterator[None]:
    """Let the clocks of processes that are started meanwhile be off by so much; 0: let them be right."""
    before = dict(os.environ)
    if offset_s:
        os.environ |= faked(offset_s)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _AnyDatetime(type):
    """Whoever asks for a `datetime` by the name that we have taken is content with a true one."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TrueDatetime)


class _ShiftedDatetime(dt.datetime, metaclass=_AnyDatetime):
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> _ShiftedDatetime:
        return cls.fromtimestamp(_true_time() + _offset_s, tz)


def shift_wall_clock(offset_s: float) -> None:
    """Make `time.time` and `datetime.now` wrong, wherever they were imported by name already."""
    global _offset_s  # noqa: PLW0603 -- there is one clock in a process
    _offset_s = offset_s
    time.time = lambda: _true_time() + offset_s
    time.time_ns = lambda: _true_time_ns() + int(offset_s * 1e9)
    for module in list(sys.modules.values()):
        if getattr(module, "datetime", None) is _TrueDatetime and module.__name__ != __name__:
            module.datetime = _ShiftedDatetime  # type: ignore[attr-defined]  # it has one: that was just seen
