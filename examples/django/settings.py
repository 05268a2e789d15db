"""The settings of a small site. TASKMESH_URI says where MongoDB is; without it, the embedded one."""

from __future__ import annotations

import os

SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", "for this example alone")
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "testserver"]
ROOT_URLCONF = "examples.django.urls"
USE_TZ = True

TASKS = {
    "default": {
        "BACKEND": "taskmesh.integrations.django.TaskmeshBackend",
        "QUEUES": ["default", "mail"],
        "OPTIONS": {
            "database": os.environ.get("TASKMESH_DATABASE", "site"),
            "option": {"max_unexpected_retries": 3, "run_timeout_ms": 60_000},
        },
    }
}
