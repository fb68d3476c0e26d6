"""Shared fixtures: the recipes of the checkout and stores of their own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from lock_project import hub, project
from micro import Micro

__all__ = ["hub", "project"]

ROOT = Path(__file__).resolve().parents[1]

_KEPT = ("QDC_TRAIN_PYTHON", "QDC_SERVE_PYTHON", "QDC_FUZZ", "QDC_FUZZ_REPORT", "QDC_HISTORIES", "QDC_HISTORIES_REPORT")
for name in [name for name in os.environ if name.startswith("QDC_") and name not in _KEPT]:
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


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Micro:
    """Micro, built. Tests may build variants in its store; `micro.first` stays the answer of the first build."""
    return Micro(tmp_path_factory.mktemp("micro"))
