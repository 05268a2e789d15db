"""The base of models that are only read: tasks, queues, workers as the engine returns them."""

from __future__ import annotations

import threading
from typing import Any

from pydantic import BaseModel, ConfigDict

_BUILDING = threading.Lock()


class ReadOnly(BaseModel):
    """A model whose validator is built when the first instance is read: built at import, they cost all programs 15 ms."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    @classmethod
    def model_rebuild(cls, **settings: Any) -> bool | None:
        """Build the validator, one thread at a time: releases of pydantic before 2.14 do not ensure that."""
        with _BUILDING:
            return super().model_rebuild(**settings)
