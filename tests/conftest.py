"""Shared fixtures: the recipes of the checkout and stores of their own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

for name in [
    name for name in os.environ if name.startswith("QDC_") and name not in ("QDC_TRAIN_PYTHON", "QDC_SERVE_PYTHON")
]:
    del os.environ[name]


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A private copy of the recipes, to edit."""
    folder = tmp_path / "project" / "recipes"
    shutil.copytree(ROOT / "recipes", folder)
    return folder
