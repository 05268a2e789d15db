"""The hook `on_claim`: the user's filter on the tasks that a worker claims."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

logger = logging.getLogger("taskmesh.consumer")


class ClaimFilter:
    """What `on_claim` says, asked before every claim and scan."""

    def __init__(self, on_claim: Callable[[Any], Any] | None, consumer: object) -> None:
        """`consumer` is what the hook is shown."""
        self._on_claim = on_claim
        self._consumer = consumer

    async def ask(self) -> Mapping[str, Any] | None:
        """Return the filter, or None if nothing may be claimed. Raises what the hook does, and `TypeError`."""
        if self._on_claim is None:
            return {}
        answer = self._on_claim(self._consumer)
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer is not None and not isinstance(answer, Mapping):
            raise TypeError(f"on_claim must return a filter on task documents or None, got {answer!r}")
        return answer

    async def current(self) -> Mapping[str, Any] | None:
        """Return the filter, or None if nothing may be claimed: also when the hook fails, which is logged."""
        try:
            return await self.ask()
        except Exception:
            logger.exception("the hook 'on_claim' failed: no claims this round")
            return None
