"""What is kept of a batch costs what it weighs, and stays as it is.

Reads   objects after their journey; how much of the cells is resident.
Writes  batches of several parts.
Never   a second process: both ends are here, with separate maps of the same memory.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlive._system import memory
from outlive._transport import leases, packing, tensors
from outlive._transport.cells import PAGE
from packing.link import LARGE, Link, pattern
from transport.process_inspection import resident_cells

KIB = 1 << 10
SMALL, MIDDLE = 100, 40 * KIB


def _parts(seed: int, sizes: list[int]) -> list[np.ndarray]:
    return [pattern(size, seed + n) for n, size in enumerate(sizes)]


def _is_right(seed: int, number: int, part: Any) -> bool:
    return np.array_equal(np.asarray(part), pattern(len(part), seed + number))


KINDS: dict[str, Callable[[np.ndarray], Any]] = {"tensors": torch.from_numpy, "arrays": np.copy}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_part_that_is_kept_of_each_batch_keeps_no_other(link, kind, kept):
    """A large part, a small one, one in between: as much memory as these parts take, and that of a few batches."""
    sizes = [LARGE, SMALL, 2 * LARGE, MIDDLE]
    held = []
    gc.collect()  # what earlier tests left
    before = resident_cells()
    for seed in range(60):
        batch = link.carry([KINDS[kind](part) for part in _parts(seed, sizes)])
        held.append(batch[kept])
        del batch

    assert all(_is_right(seed, kept, part) for seed, part in enumerate(held))
    bound = 60 * (sizes[kept] // PAGE + 2 if sizes[kept] > PAGE else 0) * PAGE + 12 * sum(sizes)
    assert resident_cells() - before <= 2 * bound  # both ends are mapped here
    del held
    gc.collect()
    link.carry(_parts(0, sizes))
    assert link.table.bytes_held <= 12 * 2 * sum(sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_part_is_no_part_of_a_cell(link, kind):
    """Nor of the message that it came in: it has memory of its own."""
    made = []
    for sizes in ([LARGE, SMALL], [30 * KIB, SMALL]):
        for seed in range(6):
            _, small = link.carry([KINDS[kind](part) for part in _parts(seed, sizes)])
            made.append((seed, small))
    base = [np.asarray(small) for _, small in made]

    assert all(_is_right(seed, 1, small) for seed, small in made)
    assert link.cells_made <= 2
    assert all(_owner_bytes(array) < KIB for array in base)


def _owner_bytes(array: np.ndarray) -> int:
    """How much memory an array, or a tensor's array, keeps alive."""
    owner = array.base
    if isinstance(owner, torch.Tensor):
        return owner.untyped_storage().nbytes()
    return memoryview(owner if owner is not None else array).nbytes


def test_tensors_that_share_a_storage_share_its_lease(link):
    """The storage stays while any of them does, and another storage beside it goes."""
    held = []
    gc.collect()  # what earlier tests left
    before = resident_cells()
    for seed in range(40):
        whole = torch.from_numpy(pattern(LARGE, seed))
        _, view, other = link.carry([whole, whole[5 : 2 * KIB], torch.from_numpy(pattern(LARGE, seed + 1))])
        held.append(view)
        del other, _

    assert all(np.array_equal(view.numpy(), pattern(LARGE, seed)[5 : 2 * KIB]) for seed, view in enumerate(held))
    assert resident_cells() - before <= 2 * (40 * (LARGE + 2 * PAGE) + 12 * 2 * LARGE)


def test_memory_that_user_code_in_the_worker_keeps_is_not_given_back(link):
    """A dataset that keeps what it collated, where the trainer keeps a part of it: both find it unchanged."""
    here, there = [], []
    for seed in range(30):
        link.arena.give_back(link.table.take_freed())
        link.arena.begin()
        rooms = [tensors.room_for(link.arena, (size,), torch.uint8) for size in (LARGE, MIDDLE)]
        for n, room in enumerate(rooms):
            room.copy_(torch.from_numpy(pattern(len(room), seed + n)))
        parcel, body = link.dispatch(rooms)
        here.append(packing.unpack(parcel, body, link.table)[1])
        there.append(rooms[0])
        del rooms, room

    assert all(_is_right(seed, 0, room) for seed, room in enumerate(there))
    assert all(_is_right(seed, 1, part) for seed, part in enumerate(here))


def test_a_fork_of_the_trainer_goes_on_seeing_all_of_a_batch(link):
    """Also when the trainer keeps a part of it, and has let go of the others since."""
    link.carry(_parts(0, [LARGE, MIDDLE]))
    link.table.forget()
    link.arena.forget()
    batch = link.carry(_parts(0, [LARGE, MIDDLE]))
    assert link.cells_made == 3  # two for the first, one for this
    come, gone = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(come[0], 1)
            kept = batch[1]
            right = all(_is_right(0, n, part) for n, part in enumerate(batch))
            del batch
            os.write(gone[1], b"right" if right and _is_right(0, 1, kept) else b"wrong")
        finally:
            os._exit(0)
    kept = batch[1]
    del batch
    for seed in range(30):
        link.carry(_parts(seed, [LARGE, MIDDLE]))
    link.table.abandon()
    os.write(come[1], b"!")
    seen = os.read(gone[0], 100)
    os.waitpid(pid, 0)
    for fd in (*come, *gone):
        os.close(fd)

    assert seen == b"right"
    assert _is_right(0, 1, kept)


@pytest.mark.parametrize("end", ["forget", "abandon"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_parts_that_are_let_go_of_at_the_end_of_an_epoch_are_given_back(link, end, when):
    """Whole batches were kept until then: what is left of them costs what it weighs."""
    gc.collect()  # what earlier tests left
    before = resident_cells()
    batches = [link.carry(_parts(seed, [LARGE, MIDDLE])) for seed in range(20)]
    kept: list[Any] = []
    if when == "before":
        kept = [batch[1] for batch in batches]
        del batches
    getattr(link.table, end)()
    link.table = leases.CellTable()  # nobody keeps that of a worker which is gone
    if when == "after":
        kept = [batch[1] for batch in batches]
        del batches
    link.arena.forget()

    assert all(_is_right(seed, 1, part) for seed, part in enumerate(kept))
    assert resident_cells() - before <= 20 * (MIDDLE + 2 * PAGE) + 2 * LARGE  # of the last result nothing is known
    del kept
    assert resident_cells() == before


def test_batches_are_copied_out_of_their_cells_when_very_many_are_kept(link, monkeypatch):
    """A process may have a limited number of maps."""
    monkeypatch.setattr(leases, "MOST_MAPS", 5)

    held = [link.carry(_parts(seed, [LARGE, MIDDLE])) for seed in range(30)]

    assert all(_is_right(seed, n, part) for seed, batch in enumerate(held) for n, part in enumerate(batch))
    assert link.cells_made <= 8


def test_a_result_that_is_opened_twice_keeps_its_cell_between(link):
    """An interrupt comes when the batch is there already: it is opened again."""
    parcel, body = link.send(_parts(0, [LARGE, MIDDLE]))
    hold = leases.Hold(link.table)
    packing.unpack(parcel, body, link.table, hold)
    link.carry(_parts(1, [LARGE, MIDDLE]))
    batch = packing.unpack(parcel, body, link.table, hold)
    del hold
    link.carry(_parts(2, [LARGE, MIDDLE]))

    assert all(_is_right(0, n, part) for n, part in enumerate(batch))


SIZES = st.lists(
    st.sampled_from([1, SMALL, PAGE, PAGE + 1, 3 * PAGE, MIDDLE, LARGE, 3 * LARGE]), min_size=1, max_size=5
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["carry", "carry", "carry", "carry", "let go", "cache", "discard", "forget"]),
        SIZES,
        st.integers(0, 31),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(STEPS)
def test_no_part_that_is_kept_ever_changes_whatever_becomes_of_the_others(steps):
    """Any parts of any batches, kept for any time, here and in the worker."""
    link = Link()
    here: list[tuple[int, int, Any]] = []
    there: list[tuple[int, torch.Tensor]] = []
    for seed, (what, sizes, which) in enumerate(steps):
        if what == "let go":
            del here[which % 3 :: 2]
            del there[which % 2 :]
        elif what == "forget":
            link.table.forget()
            link.arena.forget()
        elif what == "discard":
            parcel, _ = link.send(_parts(seed, sizes))
            packing.discard(parcel, link.table)
        else:
            link.arena.give_back(link.table.take_freed())
            link.arena.begin()
            room = tensors.room_for(link.arena, (sizes[0],), torch.uint8)
            room.copy_(torch.from_numpy(pattern(sizes[0], seed)))
            sent = [room, *_parts(seed, sizes)[1:]]
            if what == "cache":
                there.append((seed, room))
            parcel, body = link.dispatch(sent)
            batch = packing.unpack(parcel, body, link.table)
            here += [(seed, n, part) for n, part in enumerate(batch) if which >> n & 1]
            del room, sent, batch
        assert all(_is_right(*kept) for kept in here)
        assert all(_is_right(seed, 0, room) for seed, room in there)
    for cell in link.arena.made:
        memory.discard(cell.handle)
