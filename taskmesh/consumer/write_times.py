"""Write times: how long one worker's set updates take, and so after what time the server has to give up the next one.

One locked document holds up the whole set that it is in, so deadlines are short, and then the set is split. But an overloaded
server is late with every set, and splitting only adds to its work. So deadlines follow the time that sets took recently, as
TCP's retransmission timeout does (RFC 6298).
"""

from __future__ import annotations

_TIMES_THE_USUAL = 4
_WEIGHT_OF_THE_LAST = 1 / 4


class WriteTimes:
    """What claims and outcomes of one worker have shown."""

    def __init__(self) -> None:
        self._usual_s = 0.0

    def deadline_ms(self, least_ms: int, most_ms: int) -> int:
        """Return the next deadline: `least_ms` as long as the server is not slow, `most_ms` however slow it is."""
        return max(least_ms, min(most_ms, int(1000 * _TIMES_THE_USUAL * self._usual_s)))

    def met(self, took_s: float) -> None:
        """Learn how long an answered write took."""
        self._usual_s += _WEIGHT_OF_THE_LAST * (took_s - self._usual_s)

    def missed(self, deadline_ms: int) -> None:
        """Learn that this was too short: the next deadline is twice as long, however many have missed the same one."""
        self._usual_s = max(self._usual_s, 2 * deadline_ms / 1000 / _TIMES_THE_USUAL)
