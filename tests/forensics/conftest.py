"""Gives a test a journal of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outlive._forensics import journal


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OUTLIVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(journal, "failure_logged", False)
    yield tmp_path / "home"
    assert journal.flush(60.0)
