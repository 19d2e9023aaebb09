"""Values come back as they were sent, with as few copies as possible.

Reads   objects after their journey; descriptors and memory held.
Writes  objects of every kind and size.
Never   a second process: both ends are here, with separate maps of the same memory.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loader_inputs as inputs
from loader_comparison import differences
from outlive._transport import packing, wire
from outlive._transport.cells import INLINE_ROOM
from outlive.incident import Failure
from packing.link import LARGE, Unpicklable, expected, open_descriptors, pattern


@pytest.mark.parametrize("name", inputs.values())
def test_a_value_comes_back_as_it_was_sent(link, name):
    """Every kind of value, bit for bit, with its type."""
    value = inputs.values()[name]

    assert differences(link.carry(value), expected(value)) == []


def test_all_values_come_back_in_one_parcel(link):
    """Many buffers, in cells and inline, do not get into each other's way."""
    values = inputs.values()

    assert differences(link.carry(values), {name: expected(value) for name, value in values.items()}) == []


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, INLINE_ROOM - 1, INLINE_ROOM, INLINE_ROOM + 1, 1 << 16, 3 << 20])
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_buffer_of_any_size_comes_back(link, size, kind):
    """Around the edges between message and cell."""
    data = pattern(size, 3)

    back = link.carry(torch.from_numpy(data.copy()) if kind == "tensor" else data)

    assert np.asarray(back).tobytes() == data.tobytes()


def test_a_received_value_can_be_written_to_without_side_effects(link):
    """A batch is the consumer's own."""
    one = link.carry([torch.zeros(10), torch.zeros(100_000), np.zeros(100_000), np.zeros(3)])
    two = link.carry([torch.zeros(10), torch.zeros(100_000), np.zeros(100_000), np.zeros(3)])
    for item in one:
        item += 1

    assert all(float(item.sum()) == 0 for item in two)
    assert all(float(item.min()) == 1 for item in one)


@pytest.mark.parametrize("floats", [10, 100_000])
def test_tensors_that_share_a_storage_go_on_sharing_it(link, floats):
    """A storage travels once, however many tensors look at it."""
    whole = torch.arange(float(floats))

    one, two, same = link.carry([whole, whole[1:], whole])
    one[1] = -1

    assert two[0] == -1
    assert same is one


def test_a_small_view_of_a_large_tensor_travels_alone(link):
    """Not with the rest of its storage."""
    view = torch.arange(1_000_000.0)[500:510]

    parcel, _ = link.send(view)

    assert sum(size for _, _, size in parcel.places) < 4096
    packing.discard(parcel, link.table)


SHARING = {
    "a part before the whole": lambda x: [x[:10], x],
    "the whole before a part": lambda x: [x, x[:10]],
    "parts that overlap": lambda x: [x[:10], x[5:15]],
    "a part twice": lambda x: [x[3:9], x[3:9]],
    "a part, then the storage": lambda x: [x[7:10], x.untyped_storage()],
    "a part of other elements": lambda x: [x[4:20], x.view(torch.int32)[16:30], x.view(torch.uint8)[70:75]],
    "overlapping in a chain": lambda x: [x[20:30], x[0:12], x[10:22]],
    "a part and a row of it": lambda x: [x[:60].view(6, 10), x[:60].view(6, 10)[:, 3]],
}


@pytest.mark.parametrize("case", SHARING)
def test_views_that_overlap_go_on_sharing_whichever_comes_first(link, case):
    """Also when neither is all of the storage: what one writes, the other sees."""
    sent = SHARING[case](torch.arange(LARGE, dtype=torch.float64))

    back = link.carry(sent)

    assert differences(back[0], sent[0]) == []
    assert [getattr(item, "stride", tuple)() for item in back] == [getattr(item, "stride", tuple)() for item in sent]
    storages = [item.untyped_storage() if isinstance(item, torch.Tensor) else item for item in back]
    assert len({storage.data_ptr() for storage in storages}) == 1
    for one, two in zip(back[1:], sent[1:], strict=True):
        assert bytes(one) == bytes(two) if isinstance(one, torch.UntypedStorage) else torch.equal(one, two)


def test_views_far_apart_travel_without_what_lies_between(link):
    """As samples that are slices of one tensor do, in a list that nobody stacked."""
    whole = torch.arange(LARGE * 4.0).view(4, -1)
    views = [row[100:200] for row in whole]

    parcel, body = link.send(views)

    assert sum(size for cell, _, size in parcel.places if cell >= wire.INLINE) < 4 * 400 + 64
    assert differences(packing.unpack(parcel, body, link.table), views) == []


def test_a_view_with_narrow_gaps_keeps_its_strides(link):
    """What lies between its elements travels with them while it is little."""
    view = torch.arange(float(LARGE)).view(-1, 100)[:50, ::3]

    assert link.carry(view).stride() == view.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.bfloat16])
def test_a_view_with_wide_gaps_arrives_dense(link, dtype):
    """One column of a large table: its elements travel, not the table."""
    column = torch.arange(LARGE).to(dtype).view(-1, 300)[:, 7]

    parcel, body = link.send([column, column[::2]])

    assert sum(size for cell, _, size in parcel.places if cell >= wire.INLINE) < 2 * LARGE // 300 * 4
    one, two = packing.unpack(parcel, body, link.table)
    assert one.tolist() == column.tolist()
    assert two.tolist() == column[::2].tolist()
    assert one.is_contiguous()


def test_what_travels_beside_a_batch_comes_with_it(link):
    """Failures that were dealt with, and where a stream stands."""
    side = wire.Side((Failure("ValueError", "bad", "…", None, position=3),), b"place")

    parcel, body = link.send(torch.zeros(100_000), side)

    assert parcel.side == side
    assert packing.unpack(parcel, body, link.table).shape == (100_000,)


@pytest.mark.parametrize("numbers", [[], [1], list(range(300)), [-(1 << 62), 1 << 62]], ids=len)
def test_numbers_come_back(numbers):
    """The cells that are free again."""
    packed = bytearray(wire.pack_numbers(numbers) + b"the task")

    assert wire.unpack_numbers(packed, len(numbers)) == numbers


@pytest.mark.parametrize("before", [[], [torch.zeros(10)], [torch.zeros(200_000), np.zeros(200_000)]], ids=len)
def test_an_object_that_does_not_pickle_spoils_nothing(link, before):
    """Its error comes out; the next batch travels in the memory that was meant for it."""
    descriptors = open_descriptors()
    for _ in range(3):
        link.arena.begin()
        with pytest.raises(TypeError, match="this does not travel"):
            link.dispatch([*before, Unpicklable()])

    back = link.carry([torch.ones(200_000)])

    assert float(back[0].sum()) == 200_000
    assert link.cells_made <= 2
    assert open_descriptors() == descriptors


def test_a_tensor_with_a_history_is_refused_in_torchs_words(link):
    """Autograd does not cross processes."""
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor which requires_grad"):
        link.carry(torch.ones(2, requires_grad=True) * 2)
