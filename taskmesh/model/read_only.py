"""The base of models that are only read: tasks, queues, workers as the engine tells of them."""

from __future__ import annotations

import threading
from typing import Any

from pydantic import BaseModel, ConfigDict

_BUILDING = threading.Lock()


class ReadOnly(BaseModel):
    """What nobody declares. Its validator is built when the first one is read: built at import, they cost all programs 15 ms."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    @classmethod
    def model_rebuild(cls, **settings: Any) -> bool | None:
        """Build the validator. One thread at a time: releases of pydantic before 2.14 do not see to that."""
        with _BUILDING:
            return super().model_rebuild(**settings)
