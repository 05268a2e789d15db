"""The hook `on_claim`: the user's filter on the tasks that a worker claims."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from taskmesh.model.ids import shown

logger = logging.getLogger("taskmesh.consumer")


class ClaimFilter:
    """The filter that `on_claim` returns. The hook is asked before every claim and every scan."""

    def __init__(self, on_claim: Callable[[Any], Any] | None, consumer: object) -> None:
        """`consumer` is passed to the hook."""
        self._on_claim = on_claim
        self._consumer = consumer
        self.said: str | None = None if on_claim is None else "has not been asked yet"
        """The latest answer, in words for people. None if there is no hook."""
        self.claims_nothing = False
        """Whether the latest answer was that nothing may be claimed."""

    async def ask(self) -> Mapping[str, Any] | None:
        """Return the filter, or None if nothing may be claimed. Raises whatever the hook raises, and `TypeError`."""
        if self._on_claim is None:
            return {}
        self.said, self.claims_nothing = "failed, so nothing is claimed", True  # unless it comes to its end
        answer = self._on_claim(self._consumer)
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer is not None and not isinstance(answer, Mapping):
            raise TypeError(f"on_claim must return a filter on task documents or None, got {answer!r}")
        self.said = "claims nothing at the moment" if answer is None else f"claims {shown(dict(answer))}"
        self.claims_nothing = answer is None
        return answer

    async def current(self) -> Mapping[str, Any] | None:
        """Return the filter, or None if nothing may be claimed. None also if the hook fails, which is logged."""
        try:
            return await self.ask()
        except Exception:
            logger.exception("the hook 'on_claim' failed: no claims this round")
            return None
