"""Cells are used again once no view of their batch lives, and not before.

Reads   objects after their journey; descriptors and memory held.
Writes  objects of every kind and size.
Never   a second process: both ends are here, with separate maps of the same memory.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outlive
from outlive._system import memory
from outlive._transport import packing, tensors
from outlive._transport.cells import ALIGNMENT, INLINE_ROOM, Arena
from packing.link import LARGE, Link, Unpicklable, open_descriptors, pattern


def test_a_cell_is_used_again_when_its_batch_is_gone(link):
    """Batch after batch in the same memory."""
    for seed in range(50):
        batch = link.carry(torch.full((50_000,), float(seed)))
        assert float(batch[0]) == seed
        del batch

    assert link.cells_made <= 2


def test_a_small_batch_takes_no_cell(link):
    """It goes inside its message."""
    kept = [link.carry(torch.full((100,), float(seed))) for seed in range(50)]

    assert link.cells_made == 0
    assert [float(batch[0]) for batch in kept] == list(range(50))


def test_a_consumer_that_keeps_its_batches_gets_more_cells(link):
    """list(loader): none of them changes when others arrive."""
    kept = [link.carry(torch.full((50_000,), float(seed))) for seed in range(30)]

    assert [(float(batch.min()), float(batch.max())) for batch in kept] == [(seed, seed) for seed in range(30)]
    assert link.cells_made == 30


def test_kept_batches_cost_no_descriptors(link):
    """However many batches a consumer keeps: no «Too many open files»."""
    before = open_descriptors()

    kept = [link.carry(torch.zeros(50_000)) for _ in range(30)]

    assert open_descriptors() == before
    assert len(kept) == 30


VIEWS = {
    "a slice": lambda t: t[10:20],
    "a transposed view": lambda t: t.view(1000, 50).T[3],
    "a detached tensor": lambda t: t.detach(),
    "its array": lambda t: t.numpy()[5:],
    "a view of a view of its array": lambda t: t.numpy()[5:][3:].reshape(-1, 2),
    "a memoryview": lambda t: memoryview(t.numpy()).cast("B"),
    "its storage": lambda t: t.untyped_storage(),
    "a tensor made of its array": lambda t: torch.from_numpy(t.numpy()),
    "a tensor made by dlpack": lambda t: torch.from_dlpack(t),
}


def _bytes_of(view: Any) -> bytes:
    if isinstance(view, torch.UntypedStorage):
        view = torch.empty(0, dtype=torch.uint8).set_(view)
    return bytes(view.contiguous().numpy() if isinstance(view, torch.Tensor) else view)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_cell_is_not_used_again_while_a_view_of_its_batch_lives(link, view):
    """However little of it, and however far from the tensor that arrived."""
    kept = view(link.carry(torch.full((50_000,), 7.0)))
    held = _bytes_of(kept)
    for seed in range(5):
        link.carry(torch.full((50_000,), float(seed)))

    assert _bytes_of(kept) == held
    del kept
    gc.collect()
    made = link.cells_made
    for seed in range(5):
        link.carry(torch.full((50_000,), float(seed)))
    assert link.cells_made == made


def test_a_batch_of_many_tensors_frees_its_cell_with_the_last_of_them(link):
    """One lease for all that came in a cell."""
    batch = link.carry([torch.full((20_000,), float(n)) for n in range(6)])
    made = link.cells_made
    last = batch[-1]
    del batch
    again = link.carry([torch.full((20_000,), -1.0) for _ in range(6)])

    assert float(last.sum()) == 5 * 20_000
    assert link.cells_made > made
    del again, last
    made = link.cells_made
    for _ in range(5):
        link.carry([torch.full((20_000,), -1.0) for _ in range(6)])
    assert link.cells_made == made


def test_a_discarded_result_frees_its_cells_at_once(link):
    """A broken-off epoch."""
    for _ in range(20):
        parcel, _ = link.send(torch.zeros(50_000))
        packing.discard(parcel, link.table)

    assert link.cells_made <= 2


def test_a_batch_that_outgrows_its_cell_takes_a_larger_one_and_the_smaller_goes(link):
    """Memory held follows what batches need."""
    for floats in (20_000, 200_000, 2_000_000):
        for _ in range(4):
            batch = link.carry(torch.full((floats,), 3.0))
            assert float(batch.sum(dtype=torch.float64)) == 3.0 * floats
            del batch

    assert link.table.bytes_held < 2 * 8_000_000 + (1 << 20)


def test_memory_is_given_back_when_batches_become_small_again(link):
    """One huge batch does not cost its size for ever."""
    link.carry(torch.zeros(4_000_000))
    for _ in range(200):
        link.carry(torch.zeros(30_000))

    assert link.table.bytes_held < 2_000_000


def test_a_batch_of_many_buffers_travels_in_few_cells(link):
    """Descriptors that a message can carry are limited."""
    batch = link.carry([torch.full((20_000,), float(n)) for n in range(300)])

    assert [float(t[0]) for t in batch] == list(range(300))
    assert link.cells_made <= 8


def test_a_batch_of_growing_buffers_travels(link):
    """Each larger than all before it together: the worst case for cells."""
    sizes = [LARGE * 3**n for n in range(5)]

    batch = link.carry([pattern(size, n) for n, size in enumerate(sizes)])

    assert all(np.array_equal(got, pattern(size, n)) for n, (got, size) in enumerate(zip(batch, sizes, strict=True)))


@pytest.mark.parametrize("floats", [100, 30_000])
def test_room_that_was_collated_into_is_not_copied_again(link, floats):
    """default_collate writes straight into the memory that the batch travels in."""
    link.arena.begin()
    room = tensors.room_for(link.arena, (4, floats), torch.float32)
    torch.stack([torch.full((floats,), float(n)) for n in range(4)], out=room)
    used = link.arena.scratch_used, link.arena.current_used

    parcel, body = link.dispatch(room)
    back = packing.unpack(parcel, body, link.table)

    assert [size for _, _, size in parcel.places] == [16 * floats]
    assert back[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert sum(used) == 16 * floats


@pytest.mark.parametrize("floats", [100, 30_000])
def test_memory_that_user_code_in_the_worker_keeps_is_not_reused(link, floats):
    """A dataset that caches what it collated finds it unchanged."""
    kept = []
    for n in range(12):
        link.arena.give_back(link.table.take_freed())
        link.arena.begin()
        room = tensors.room_for(link.arena, (floats,), torch.float32).fill_(float(n))
        parcel, body = link.dispatch(room)
        if n % 3 == 0:
            kept.append((n, room))
        del room
        assert float(packing.unpack(parcel, body, link.table).sum()) == n * floats

    assert [(n, float(room.sum())) for n, room in kept] == [(n, float(n * floats)) for n, _ in kept]


def test_room_for_nothing_is_an_empty_tensor(link):
    """Of the right shape and type."""
    room = tensors.room_for(link.arena, (3, 0, 2), torch.bfloat16)

    assert (room.shape, room.dtype) == ((3, 0, 2), torch.bfloat16)


@given(st.lists(st.integers(0, 3 * LARGE), max_size=20))
@settings(max_examples=60)
def test_pieces_of_one_batch_do_not_overlap(sizes):
    """Each aligned, within its region, found again by its address."""
    arena = Arena()
    taken: list[tuple[int, int]] = []
    for size in sizes:
        cell, offset, address, root = arena.allocate(size)
        assert offset + size <= len(root)
        assert address % ALIGNMENT == 0
        if size:
            assert address == root[offset:].ctypes.data
            assert arena.find(address, size) == (cell, offset)
            taken.append((address, address + size))
    taken.sort()

    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
    for cell in arena.made:
        memory.discard(cell.handle)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["carry", "carry", "carry", "release", "discard", "keep in worker", "fail"]),
        st.lists(st.sampled_from([1, 1000, INLINE_ROOM - 64, LARGE, 3 * LARGE, 10 * LARGE]), min_size=1, max_size=4),
        st.integers(0, 5),
    ),
    max_size=25,
)


@settings(max_examples=100)
@given(STEPS)
def test_nothing_that_is_looked_at_ever_changes_whatever_comes_and_goes(steps):
    """Any order of sending, keeping, letting go and failing: views on either side stay what they were."""
    link = Link()
    before = open_descriptors()
    held: list[tuple[int, list[np.ndarray]]] = []
    in_worker: list[tuple[int, torch.Tensor]] = []
    for seed, (what, sizes, which) in enumerate(steps):
        if what == "carry":
            batch = link.carry([pattern(size, seed) for size in sizes])
            held.append((seed, [item[: which + 1] for item in batch] if which < 3 else batch))
            del batch
        elif what == "release" and held:
            held.pop(which % len(held))
        elif what == "discard":
            parcel, _ = link.send([pattern(size, seed) for size in sizes])
            packing.discard(parcel, link.table)
        elif what == "keep in worker":
            link.arena.give_back(link.table.take_freed())
            link.arena.begin()
            room = tensors.room_for(link.arena, (sizes[0],), torch.uint8)
            room.copy_(torch.from_numpy(pattern(sizes[0], seed)))
            in_worker.append((seed, room))
            parcel, body = link.dispatch([room, *(pattern(size, seed) for size in sizes[1:])])
            first = packing.unpack(parcel, body, link.table)[0]
            assert np.array_equal(first.numpy(), pattern(sizes[0], seed))
            del room, first
            if which == 0:
                in_worker.clear()
        elif what == "fail":
            link.arena.begin()
            with pytest.raises(TypeError):
                link.dispatch([*(pattern(size, seed) for size in sizes), Unpicklable()])
        for number, items in held:
            for item in items:
                assert np.array_equal(item, pattern(len(item), number)), f"batch {number} changed under its consumer"
        for number, room in in_worker:
            assert np.array_equal(room.numpy(), pattern(len(room), number)), f"what batch {number} left was overwritten"

    for cell in link.arena.made:  # of a last batch that failed: they would travel with the next
        memory.discard(cell.handle)
    assert open_descriptors() == before


@settings(max_examples=25)
@given(st.lists(st.sampled_from([LARGE, 2 * LARGE, 3 * LARGE]), min_size=1, max_size=4), st.integers(0, 3))
def test_memory_does_not_grow_when_the_same_batches_come_again_and_again(sizes, kept_back):
    """With a consumer that is so many batches behind: a constant number of cells."""
    link = Link()
    behind: list[Any] = []

    def turn() -> None:
        behind.append(link.carry([pattern(size, 1) for size in sizes]))
        if len(behind) > kept_back:
            behind.pop(0)

    for _ in range(12):
        turn()
    made, held = link.cells_made, link.table.bytes_held
    for _ in range(30):
        turn()

    assert link.cells_made == made
    assert link.table.bytes_held <= held


def test_a_cell_that_came_back_meanwhile_is_used_before_another_is_made(link):
    """The worker looks for news of it only when it needs one."""
    asked = []

    def news() -> list[int]:
        asked.append(True)
        return link.table.take_freed()

    link.arena.news = news
    for n in range(5):
        link.arena.begin()
        parcel, body = link.dispatch(pattern(LARGE, n))
        assert np.array_equal(packing.unpack(parcel, body, link.table), pattern(LARGE, n))

    assert (link.cells_made, len(asked)) == (1, 5)


def test_an_unneeded_cell_is_given_back(link):
    """A consumer that once held three batches, and then one at a time."""
    held = [link.carry(pattern(LARGE, n)) for n in range(3)]
    most = link.table.bytes_held
    del held
    for n in range(200):
        link.carry(pattern(LARGE, n))

    assert most == 3 * link.table.bytes_held
    assert link.cells_made == 3


def test_memory_is_shared_between_its_maps_and_outlives_its_handle():
    """Two maps of one memory file; gone when the last is."""
    before = open_descriptors()
    handle = memory.create(5000, "outlive-test")
    one, two = memory.attach(handle), memory.attach(handle, 5000)
    memory.discard(handle)

    memoryview(one).cast("B")[4999] = 7

    assert memoryview(two).cast("B")[4999] == 7
    assert len(memoryview(one).cast("B")) == 5000
    assert open_descriptors() == before


def test_a_map_lives_as_long_as_any_view_of_it():
    """The last look may be an array's."""
    handle = memory.create(1 << 16)
    view = np.frombuffer(memoryview(memory.attach(handle)), np.uint8)[100:200]
    memory.discard(handle)
    gc.collect()

    view[:] = 9

    assert view.sum() == 900


def test_memory_that_cannot_be_had_is_an_error_in_words():
    """Not a crash at the first touch."""
    handle = memory.create(100)
    try:
        with pytest.raises(OSError, match="cannot map"):
            memory.attach(handle, 1 << 62)
    finally:
        memory.discard(handle)


class LargeSamples(torch.utils.data.Dataset):
    """Samples of 256 KiB."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 16,), float(index))


def test_statistics_show_the_memory_in_cells():
    """Of each worker, and of all: also what is still held when the worker that made it is gone."""
    loader = outlive.DataLoader(LargeSamples(), batch_size=2, num_workers=2)
    iterator = iter(loader)
    held = next(iterator)
    during = loader.statistics()
    rest = [float(batch[0, 0]) for batch in iterator]
    after = loader.statistics()
    value = float(held[1, 5])
    del held

    assert 1 << 19 <= during.cell_bytes <= 8 << 19
    assert during.cell_bytes == sum(slot.cell_bytes for slot in during.slots)
    assert rest == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert (value, 1 << 19 <= after.cell_bytes < 2 << 19) == (1.0, True)
    assert [slot.cell_bytes for slot in after.slots] == [0, 0]
    assert loader.statistics().cell_bytes == 0
