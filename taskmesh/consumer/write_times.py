"""How long one worker's writes of many tasks take, and so how long the server may work on the next before it gives that up.

One locked document holds up the whole set that it is in, so deadlines are short, and then the set is cut into parts. But a
server with too much to do is late with every set, and all that parts do is add to its work. So deadlines follow the time
that sets took of late, as TCP's retransmission timeout does (RFC 6298).
"""

from __future__ import annotations

_TIMES_THE_USUAL = 4
_WEIGHT_OF_THE_LAST = 1 / 4


class WriteTimes:
    """What the claims and outcomes of one worker have shown."""

    def __init__(self) -> None:
        self._usual_s = 0.0

    def deadline_ms(self, least_ms: int, most_ms: int) -> int:
        """Return the next deadline: `least_ms` as long as the server is not slow, `most_ms` however slow it is."""
        return max(least_ms, min(most_ms, int(1000 * _TIMES_THE_USUAL * self._usual_s)))

    def met(self, took_s: float) -> None:
        """Learn how long a write took that was answered."""
        self._usual_s += _WEIGHT_OF_THE_LAST * (took_s - self._usual_s)

    def missed(self, deadline_ms: int) -> None:
        """Learn that this was not long enough: the next has twice as long, however many have missed the same one."""
        self._usual_s = max(self._usual_s, 2 * deadline_ms / 1000 / _TIMES_THE_USUAL)
