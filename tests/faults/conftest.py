"""Has pytest explain the assertions of `expectations.py` as it does those of the tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("faults.expectations")
