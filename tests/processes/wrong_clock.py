"""A wall clock that is wrong in this process alone, for machines without libfaketime. Monotonic time stays true."""

from __future__ import annotations

import datetime as dt
import sys
import time

_true_time, _true_time_ns, _TrueDatetime = time.time, time.time_ns, dt.datetime
_offset_s = 0.0


class _ShiftedDatetime(dt.datetime):
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
