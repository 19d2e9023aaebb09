"""Ends a thread of multiprocessing after each test, and has pytest explain the assertions of `assertions.py`."""

from __future__ import annotations

from multiprocessing import resource_sharer

import pytest

pytest.register_assert_rewrite("equality.assertions")


@pytest.fixture(autouse=True)
def _no_thread_of_torch():
    """torch sends indices that are tensors through a thread of multiprocessing's, which then stays."""
    yield
    resource_sharer.stop(timeout=5)
