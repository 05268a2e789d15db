"""Django's tasks, wherever they are in this release of Django."""

from __future__ import annotations

import importlib
from typing import Any

import django

_PACKAGE = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
tasks: Any = importlib.import_module(_PACKAGE)
exceptions: Any = importlib.import_module(f"{_PACKAGE}.exceptions")
signals: Any = importlib.import_module(f"{_PACKAGE}.signals")
InvalidTask: Any = getattr(exceptions, "InvalidTask", None) or exceptions.InvalidTaskError
