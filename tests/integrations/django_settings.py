"""The settings of Django for `django_conformance.py`. TASKMESH_URI and TASKMESH_DATABASE say where its tasks are."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

URI = os.environ["TASKMESH_URI"]
DATABASE = os.environ["TASKMESH_DATABASE"]
BACKEND = "taskmesh.integrations.django.TaskmeshBackend"
RETRIED = {"max_unexpected_retries": 2, "unexpected_retry_delay_ms": 0}
TIRELESS = {"max_unexpected_retries": 40, "unexpected_retry_delay_ms": 0}
"""More failures than are kept."""

SECRET_KEY = "x"
USE_TZ = True
DATABASES: dict[str, Any] = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
if importlib.util.find_spec("django_mongodb_backend"):
    DATABASES["mongodb"] = {"ENGINE": "django_mongodb_backend", "HOST": URI, "NAME": DATABASE}

TASKS: dict[str, Any] = {
    "default": {"BACKEND": BACKEND, "QUEUES": ["default", "other"], "OPTIONS": {"uri": URI, "database": DATABASE}},
    "patient": {
        "BACKEND": BACKEND,
        "OPTIONS": {"uri": URI, "database": DATABASE, "collection": "patient", "option": RETRIED},
    },
    "tireless": {
        "BACKEND": BACKEND,
        "OPTIONS": {"uri": URI, "database": DATABASE, "collection": "tireless", "option": TIRELESS},
    },
    "same": {"BACKEND": BACKEND, "OPTIONS": {"django_database": "mongodb", "collection": "same"}},
    "nowhere": {"BACKEND": BACKEND, "OPTIONS": {"django_database": "none"}},
    "wrong": {"BACKEND": BACKEND, "OPTIONS": {"databse": "x"}},
    "bad": {"BACKEND": BACKEND, "OPTIONS": {"option": {"priority": "high"}}},
}
ROOT_URLCONF = "tests.integrations.django_settings"
urlpatterns: list[Any] = []
