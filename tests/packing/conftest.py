"""Gives each test both ends of the way that batches take."""

from __future__ import annotations

import pytest

from packing.link import Link


@pytest.fixture
def link() -> Link:
    return Link()
