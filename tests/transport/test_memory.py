"""Memory in cells follows what is prefetched and held, does not thrash, and is given back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deadlines import wait_until
from loader_comparison import OURS
from outlive import FaultPolicy
from transport import batch_values
from transport.process_inspection import NOTHING, mapped_cells

KIB, MIB = 1 << 10, 1 << 20
WAYS = pytest.mark.parametrize("persistent", [False, True], ids=["workers end", "workers persist"])


def _loader(*sizes_bytes: int, **more: Any) -> Any:
    counts = [size // 4 for size in sizes_bytes]
    options = {"num_workers": 1, "prefetch_factor": 2} | more
    return OURS(batch_values.FilledTensors(*counts), batch_size=None, collate_fn=batch_values.as_is, **options)


def _watch(loader: Any, held: int = 1) -> tuple[int, list[int]]:
    """One epoch with the last `held` batches in hand: how many cells there ever were, the bytes mapped each time."""
    cells: set[int] = set()
    sizes = []
    kept: list[Any] = []
    for number, batch in enumerate(loader):
        assert (float(batch[0]), float(batch[-1])) == (number, number)
        kept = [*kept, batch][-held:]
        del batch
        now = mapped_cells()
        cells |= now.inodes
        sizes.append(now.size_bytes)
    return len(cells), sizes


SIZES = {
    "equal": [MIB] * 100,
    "a little different": [MIB + 4 * KIB * (i * 37 % 50) for i in range(100)],
    "alternating": [[100 * KIB, 2 * MIB][i % 2] for i in range(100)],
    "now and then a large one": [4 * MIB if i % 8 == 7 else 100 * KIB for i in range(100)],
    "any": [random.Random(i).randrange(60 * KIB, 2 * MIB) for i in range(100)],
    "around the edge of a message": [56 * KIB + (i % 3 - 1) * KIB for i in range(100)],
}


@pytest.mark.parametrize("how", SIZES)
def test_a_handful_of_cells_serves_all_batches_when_sizes_vary(how):
    """Two prefetched, one in hand, one on its way back; and a few while the largest size is learned."""
    made, _ = _watch(_loader(*SIZES[how]))

    assert made <= 10


def test_a_batch_that_outgrows_its_cell_gets_a_larger_one():
    """Growing for ever, cell by cell; every batch is whole (`_watch` looks at both ends of it)."""
    sizes = [100 * KIB * (i + 1) for i in range(40)]

    _, mapped = _watch(_loader(*sizes))

    assert max(mapped) <= 8 * max(sizes)


@pytest.mark.parametrize("held", [1, 5, 20])
@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (1, 4), (2, 2)])
def test_memory_is_bounded_by_what_is_prefetched_and_held(held, workers, prefetch):
    """A cell for each of these batches, and for each worker one that it writes and one on its way back."""
    _, mapped = _watch(_loader(*[MIB] * 60, num_workers=workers, prefetch_factor=prefetch), held)

    most = workers * prefetch + held + 1 + 2 * workers
    assert max(mapped) <= most * (MIB + 64 * KIB)


def test_memory_is_given_back_when_batches_become_small():
    """One huge batch does not cost its size for ever."""
    _, mapped = _watch(_loader(*[100 * KIB] * 5, 32 * MIB, *[100 * KIB] * 150))

    assert max(mapped) >= 32 * MIB
    assert mapped[-1] <= 4 * MIB


@WAYS
def test_nothing_is_mapped_when_an_epoch_is_over(persistent):
    """Not here, and not in workers that persist; epoch after epoch."""
    loader = _loader(*[MIB] * 12, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        _watch(loader)

        assert mapped_cells() == NOTHING
        pids = [slot.pid for slot in loader.statistics().slots if slot.pid is not None]
        assert len(pids) == (2 if persistent else 0)
        assert wait_until(lambda pids=pids: all(mapped_cells(pid) == NOTHING for pid in pids))


@WAYS
def test_only_the_last_batch_is_mapped_when_it_is_still_in_hand(persistent):
    """As after any `for batch in loader`; it lives as long as it is looked at, through the next epoch too."""
    loader = _loader(*[MIB] * 12, num_workers=2, persistent_workers=persistent)
    for batch in loader:
        assert batch.is_contiguous()

    assert len(mapped_cells()) == 1
    _watch(loader)
    assert (float(batch.min()), float(batch.max())) == (11, 11)
    assert len(mapped_cells()) == 1
    del batch
    assert mapped_cells() == NOTHING


@WAYS
def test_nothing_is_mapped_when_a_loader_is_left_in_the_middle(persistent):
    """Prefetched batches go with it."""
    loader = _loader(*[MIB] * 12, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    batch = next(iterator)
    del iterator, loader

    assert float(batch[0]) == 0
    del batch
    assert wait_until(lambda: mapped_cells() == NOTHING)


class Refuses:
    """Can be pickled, and not unpickled."""

    def __init__(self, refuse: bool = False) -> None:
        if refuse:
            raise ValueError("not here")

    def __reduce__(self) -> Any:
        return Refuses, (True,)


@pytest.mark.parametrize("first", [False, True], ids=["after its tensors", "before its tensors"])
def test_a_batch_that_cannot_be_unpickled_keeps_no_memory(first):
    """Its cells are used again, whether it had been looked at or not."""
    parts = [torch.zeros(100_000), torch.zeros(100_000)]
    parts.insert(0 if first else 2, Refuses())
    loader = OURS(
        batch_values.ReadySamples(*[parts, torch.zeros(100_000)] * 20),
        batch_size=None,
        collate_fn=batch_values.as_is,
        num_workers=1,
        faults=FaultPolicy(on_error="skip", max_bad=None),
    )
    cells: set[int] = set()
    delivered = 0
    for _ in loader:
        delivered += 1
        cells |= mapped_cells().inodes

    assert delivered == 20
    assert len(loader.quarantine) == 20
    assert len(cells) <= 10
    del _
    assert mapped_cells() == NOTHING


LEAKY = {
    "sparse COO": lambda x: x.to_sparse(),
    "sparse CSR": lambda x: x.to_sparse_csr(),
    "sparse BSC": lambda x: x.to_sparse_bsc((2, 2)),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "parameter": lambda x: torch.nn.Parameter(x),
    "subclass": lambda x: x.as_subclass(batch_values.Image),
    "conjugated": lambda x: x.to(torch.complex64).conj(),
    "array": lambda x: x.numpy(),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse|quantiz|nested|jagged).*")
@pytest.mark.parametrize("kind", LEAKY)
def test_a_batch_of_any_kind_gives_its_memory_back_when_it_goes(kind):
    """At once: nothing of ours or torch's keeps it, and no cycle has to be collected."""
    sample = LEAKY[kind](torch.ones(300, 300))
    loader = OURS(
        batch_values.ReadySamples(*[sample] * 30), batch_size=None, collate_fn=batch_values.as_is, num_workers=1
    )
    cells: set[int] = set()
    for batch in loader:
        cells |= mapped_cells().inodes
        del batch

    assert 1 <= len(cells) <= 10
    assert mapped_cells() == NOTHING
