"""Each test of the dashboard has a runtime folder, a journal and a server of its own.

Reads   nothing.
Writes  OUTLIVE_RUNTIME and OUTLIVE_HOME, for the test and the processes it starts.
Never   the user's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboard import server_process


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLIVE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setenv("OUTLIVE_HOME", str(tmp_path / "home"))


@pytest.fixture
def server(folders: None) -> Iterator[server_process.Server]:
    with server_process.served() as found:
        yield found
