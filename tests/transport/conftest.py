"""After every test here: no cell is mapped, and none had to be collected as a cycle first."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from outlive._system import choice
from transport.process_inspection import NOTHING, mapped_cells

# What the portable layer cannot be asked for: part of a test's name → why.
NOT_PORTABLE = {
    "test_limits.py": "only Linux's own layer does without names in /dev/shm",
    "test_a_batch_is_made_again_when_its_worker_dies_with_half": "the samples kill when the dataset is pickled, too",
    "test_a_batch_that_cannot_be_unpickled": "the dataset holds what cannot be unpickled",
    "gives_its_memory_back_when_it_goes[quantized]": "torch cannot pickle quantized tensors for spawned processes",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if choice.PORTABLE:
        for item in items:
            for part, reason in NOT_PORTABLE.items():
                if part in item.nodeid:
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _no_cell_stays() -> Iterator[None]:
    before = mapped_cells()
    if before != NOTHING:
        gc.collect()  # of an earlier test of other things, in a cycle
        before = mapped_cells()
    yield
    if before == NOTHING:
        assert mapped_cells() == NOTHING
