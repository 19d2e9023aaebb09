"""After every test here: no cell is mapped, and none had to be collected as a cycle first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from transport.watching import NOTHING, mapped_cells


@pytest.fixture(autouse=True)
def _no_cell_stays() -> Iterator[None]:
    before = mapped_cells()
    yield
    if before == NOTHING:
        assert mapped_cells() == NOTHING
