"""Each test of what jobs publish has a runtime folder of its own.

Reads   nothing.
Writes  OUTLIVE_RUNTIME, for the test and the processes it starts.
Never   the user's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTLIVE_RUNTIME", str(tmp_path))
    return tmp_path / "outlive"
