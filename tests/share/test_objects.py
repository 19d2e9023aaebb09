"""Arrays, tensors and tables in shared memory are ordinary ones; objects and datasets are copied around them."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import threading
from collections import namedtuple
from multiprocessing import context, popen_spawn_posix
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from outlive import DataLoader, SharedDict, SharedList, SharedPart, share, shared_parts
from outlive._share import segments
from outlive._share.sharing import share_dataset

MANY = 200_000  # texts: more than 1 MiB
Pair = namedtuple("Pair", "first second")


def texts(count: int = MANY) -> list[str]:
    return [f"text {number}" for number in range(count)]


def is_in_shared_memory(array: Any) -> bool:
    return segments.find(array.ctypes.data, array.nbytes) is not None


def handed_on(obj: Any) -> Any:
    """As to a process that multiprocessing starts, but in this one."""
    starting = object.__new__(popen_spawn_posix.Popen)
    starting._fds = []
    context.set_spawning_popen(starting)
    try:
        pickled = bytes(ForkingPickler.dumps(obj))
    finally:
        context.set_spawning_popen(None)
    assert len(pickled) < 5000
    return pickle.loads(pickled)


ARRAYS = {
    "float64": numpy.arange(1000.0),
    "matrix": numpy.arange(1000, dtype=numpy.int16).reshape(10, 100),
    "fortran": numpy.asfortranarray(numpy.arange(1000).reshape(10, 100)),
    "strided": numpy.arange(2000)[::-2],
    "complex": numpy.arange(500) + 1j,
    "texts": numpy.array(["a", "bcd"] * 500),
    "times": numpy.arange(500).astype("datetime64[s]"),
    "records": numpy.zeros(300, [("a", "i4"), ("b", "f8")]),
    "big-endian": numpy.arange(1000, dtype=">i4"),
    "scalar": numpy.array(5.0),
    "empty": numpy.empty((0, 7)),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_is_an_ordinary_one_in_shared_memory(kind):
    """Type, values, shape and order; read-only."""
    plain = ARRAYS[kind]
    shared = share(plain)

    assert type(shared) is numpy.ndarray
    assert (shared.dtype, shared.shape) == (plain.dtype, plain.shape)
    assert (shared == plain).all()
    assert shared.flags.f_contiguous == (plain.flags.f_contiguous or kind == "strided")
    with pytest.raises(ValueError, match="read-only"):
        shared[...] = plain
    assert is_in_shared_memory(shared) or not plain.size
    again = handed_on(shared)
    assert again.dtype == plain.dtype
    assert (again == plain).all()
    assert again.ctypes.data == shared.ctypes.data or not plain.size


def test_a_view_of_a_shared_array_is_handed_on_as_one():
    """Strides of any kind; the values themselves when it is pickled by others."""
    shared = share(numpy.arange(100_000).reshape(100, 1000))
    view = shared[90:10:-3, 5::7]

    assert handed_on(view).ctypes.data == view.ctypes.data
    assert (handed_on(view) == view).all()
    by_value = pickle.loads(pickle.dumps(view))
    assert (by_value == view).all()
    assert not is_in_shared_memory(by_value)
    assert by_value.flags.writeable


@pytest.mark.leaks_allowed  # torch sends tensors with a thread and a socket, which stay
@pytest.mark.parametrize("pickled", [pickle.dumps, ForkingPickler.dumps], ids=["pickle", "multiprocessing"])
def test_what_a_worker_sends_is_a_copy(pickled):
    """Else the consumer's batch were the dataset itself, for all to see what is written to it."""
    array, tensor = pickle.loads(pickled([share(numpy.arange(9))[2:], share(torch.arange(9))[2:]]))

    array += 1
    assert array.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert tensor.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert segments.find(tensor.data_ptr(), tensor.nbytes) is None


def test_other_arrays_and_tensors_are_pickled_as_before():
    """Not by handle, and whatever they are."""
    shared = share(numpy.arange(10))

    for other in (numpy.arange(10), numpy.array([{}, None]), shared + 1, numpy.empty(0)):
        again = pickle.loads(ForkingPickler.dumps(other))
        assert (again == other).all()
        assert not is_in_shared_memory(again) or not again.size


TENSORS = {
    "float32": torch.arange(1000.0),
    "bfloat16": torch.arange(1000).to(torch.bfloat16).reshape(10, 100),
    "bool": torch.arange(1000) % 3 == 0,
    "complex": torch.arange(1000).to(torch.complex64),
    "transposed": torch.arange(1000).reshape(10, 100).t(),
    "scalar": torch.tensor(5),
    "empty": torch.empty(0, 7),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_is_an_ordinary_one_in_shared_memory(kind):
    """Handed on to the same memory."""
    plain = TENSORS[kind]
    shared = share(plain) if plain.numel() else share([plain] * 100)[0]

    assert type(shared) is torch.Tensor
    assert (shared.dtype, shared.shape) == (plain.dtype, plain.shape)
    assert torch.equal(shared, plain)
    assert shared.stride() == plain.stride()
    if plain.numel():
        again = handed_on(shared)
        assert again.data_ptr() == shared.data_ptr()
        assert torch.equal(again, plain)
        if plain.ndim:
            assert torch.equal(handed_on(shared[-1:]), plain[-1:])


def test_elements_with_buffers_are_read_where_they_lie():
    """A list of arrays of different lengths: each access makes a view, not a copy."""
    plain = [numpy.arange(n) for n in range(200)]
    shared = share(plain)

    assert all((mine == theirs).all() for mine, theirs in zip(shared, plain))
    assert all(is_in_shared_memory(array) for array in shared[1:])
    assert shared[7].ctypes.data == shared[7].ctypes.data
    nested = share([{"image": torch.full((10,), float(n)), "name": str(n)} for n in range(100)])
    assert nested[5]["name"] == "5"
    assert torch.equal(nested[5]["image"], torch.full((10,), 5.0))
    assert nested[5]["image"].data_ptr() == nested[5]["image"].data_ptr()


def test_a_pandas_table_is_an_ordinary_one_in_shared_memory():
    """Columns of numbers and of texts; handed on by handle."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    text = pandas.Series(texts(50_000), dtype="string[pyarrow]")
    plain = pandas.DataFrame({"a": range(50_000), "b": numpy.arange(50_000) / 2, "text": text})
    shared = share(plain)

    assert shared.equals(plain)
    assert is_in_shared_memory(shared["b"].to_numpy())
    assert shared.iloc[7].to_list() == plain.iloc[7].to_list()
    assert share(shared) is shared
    assert [part.kind for part in shared_parts(shared)] == ["DataFrame"]
    assert handed_on(shared).equals(plain)
    assert share(handed_on(shared)["text"]) is not None
    assert share(plain["b"]).equals(plain["b"])


def test_a_part_of_a_table_is_shared_without_the_rest_of_it():
    """And a table that is not shared is pickled as it always was."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    whole = pandas.Series(texts(50_000), dtype="string[pyarrow]")
    shared = share(whole[:100])

    assert shared.equals(whole[:100])
    assert segments.of(_only(shared)).size < 10_000
    before = len(pickle.dumps(whole[:100]))
    assert len(ForkingPickler.dumps(whole[:100])) < 2 * before


def _only(series: Any) -> Any:
    """The memory that a series of texts lies in."""
    buffer = series.array._pa_array.chunk(0).buffers()[-1]
    found = segments.find(buffer.address, buffer.size)
    assert found is not None
    return found[1]


def test_an_arrow_table_is_an_ordinary_one_in_shared_memory():
    """Handed on by handle."""
    arrow = pytest.importorskip("pyarrow")
    plain = arrow.table({"a": range(50_000), "text": texts(50_000)})
    shared = share(plain)

    assert shared.equals(plain)
    assert share(shared) is shared
    again = handed_on(shared)
    assert again.equals(plain)
    assert again["a"].chunk(0).buffers()[1].address == shared["a"].chunk(0).buffers()[1].address


def test_a_table_of_python_objects_is_refused():
    """Nothing in it could be shared."""
    pandas = pytest.importorskip("pandas")

    with pytest.raises(TypeError, match="no buffers, only Python objects"):
        share(pandas.Series([{}, None], dtype=object, index=pandas.Index(["a", "b"], dtype=object)))


# ---------------------------------------------------------------- objects


@dataclasses.dataclass(frozen=True)
class Frozen:
    names: list[str]
    sizes: Any
    few: list[int]


class Slotted:
    __slots__ = ("few", "names")

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.few = [1]


class Plain(Dataset[Any]):
    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.lookup = {name: position for position, name in enumerate(names)}
        self.few = ["a", "b"]
        self.lock = threading.Lock()  # cannot be copied, and need not be
        self.get = self.by_name
        self.me = self

    def by_name(self, name: str) -> int:
        return self.lookup[name]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.names[index], self.lookup[self.names[index]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_an_object_is_copied_around_what_is_large():
    """What is small is the very same; yours is left alone."""
    plain = Plain(texts())
    shared = share(plain)

    assert type(shared) is Plain
    assert (type(shared.names), type(shared.lookup)) == (SharedList, SharedDict)
    assert (type(plain.names), type(plain.lookup)) == (list, dict)
    assert shared.few is plain.few
    assert shared.lock is plain.lock
    assert shared.me is shared
    assert shared.get.__self__ is shared
    assert shared[17] == plain[17]
    assert [part.path for part in shared_parts(shared)] == ["Plain.names", "Plain.lookup"]
    assert share(shared) is shared


def test_frozen_dataclasses_slots_and_named_tuples_are_copied_too():
    """Without running their code."""
    frozen = Frozen(texts(), numpy.zeros(1 << 18), [1])
    slotted = Slotted(frozen.names)
    shared = share(Pair(frozen, {"inner": [slotted], "few": 5}))

    assert type(shared) is Pair
    assert type(shared.first.names) is SharedList
    assert is_in_shared_memory(shared.first.sizes)
    assert shared.first.few is frozen.few
    assert shared.second["inner"][0].names is shared.first.names  # one list in two places stays one
    assert shared.second["inner"][0].few is slotted.few
    assert frozen.names == texts()


def test_a_handful_of_large_things_stays_an_ordinary_container():
    """Of many things, or of small ones, the container itself is shared."""
    shared = share({"train": texts(), "few": texts(10), "array": numpy.zeros(1 << 18)})

    assert type(shared) is dict
    assert [type(value) for value in shared.values()] == [SharedList, list, numpy.ndarray]
    assert type(share({"train": texts(10)})) is SharedDict
    assert type(share({"train": texts(10)}, min_bytes=100)["train"]) is SharedList


def test_what_cannot_be_shared_inside_an_object_stays_as_it_is(caplog):
    """And the log says why."""
    plain = Plain(texts())
    plain.few = [lambda: None] * MANY  # type: ignore[list-item]
    with caplog.at_level(logging.INFO, "outlive"):
        shared = share(plain)

    assert shared.few is plain.few
    assert type(shared.names) is SharedList
    assert any("object.few (list) is not shared: Can't pickle" in line for line in caplog.messages)


def test_an_object_with_nothing_large_comes_back_as_it_is():
    """There is nothing to do."""
    plain = Plain(texts(10))

    assert share(plain) is plain
    assert shared_parts(plain) == ()


# ---------------------------------------------------------------- datasets


def test_a_dataset_is_reached_through_wrappers():
    """Subset, ConcatDataset, TensorDataset, and what else keeps a dataset in an attribute."""
    inner = Plain(texts())
    tensors = TensorDataset(torch.zeros(1 << 19), torch.arange(1 << 19))
    plain = ConcatDataset([Subset(inner, list(range(0, MANY))), tensors])
    shared, moved = share_dataset(plain)

    assert {(part.path, part.kind) for part in moved} == {
        ("dataset.datasets[0].indices", "list"),
        ("dataset.datasets[0].dataset.names", "list"),
        ("dataset.datasets[0].dataset.lookup", "dict"),
        ("dataset.datasets[1].tensors[0]", "Tensor"),
        ("dataset.datasets[1].tensors[1]", "Tensor"),
    }
    assert all(part.nbytes > MANY for part in moved)
    assert shared[17] == plain[17]
    assert shared[MANY + 5] == plain[MANY + 5]
    assert plain.datasets[0].dataset is inner
    assert type(inner.names) is list


def test_a_later_epoch_moves_only_what_is_new():
    """Attributes that changed meanwhile are seen."""
    plain = Plain(texts())
    before: dict[int, Any] = {}
    first, _ = share_dataset(plain, before=before)
    plain.few = ["c"]
    second, moved = share_dataset(plain, before=before)
    plain.names.append("one more")
    third, moved_then = share_dataset(plain, before=before)

    assert moved == []
    assert second.names is first.names
    assert second.few == ["c"]
    assert [part.path for part in moved_then] == ["dataset.names"]
    assert third.names[-1] == "one more"


@pytest.mark.parametrize("share_it", [False, True])
def test_a_loader_shares_its_dataset_when_it_is_asked_to(caplog, share_it):
    """It says what, once, and delivers what it delivers else; your dataset is left alone."""
    plain = Plain(texts())
    loader = DataLoader(
        Subset(plain, range(500, 540)),
        batch_size=8,
        num_workers=2,
        multiprocessing_context="fork",
        share_dataset=share_it,
        collate_fn=lambda samples: (samples, type(torch.utils.data.get_worker_info().dataset.dataset.names).__name__),
    )
    with caplog.at_level(logging.INFO, "outlive"):
        epochs = [list(loader), list(loader)]

    for batches in epochs:
        assert [sample for samples, _ in batches for sample in samples] == [plain[i] for i in range(500, 540)]
        assert {kind for _, kind in batches} == {"SharedList" if share_it else "list"}
    lines = [line for line in caplog.messages if "in shared memory" in line]
    assert len(lines) == share_it
    assert all("dataset.dataset.names (list, " in line and "dataset.dataset.lookup (dict" in line for line in lines)
    assert type(plain.names) is list


def test_a_loader_says_so_when_there_is_nothing_to_share(caplog):
    """Or one would wait for an effect."""
    loader = DataLoader(
        TensorDataset(torch.zeros(8)), num_workers=1, multiprocessing_context="fork", share_dataset=True
    )
    with caplog.at_level(logging.INFO, "outlive"):
        delivered = len(list(loader))

    assert delivered == 8
    assert "nothing in the dataset is both large and of a kind that can be shared" in caplog.messages


def test_parts_say_where_what_and_how_large():
    """For whoever wants to know."""
    (part,) = shared_parts({"labels": share(list(range(100_000)))})

    assert part == SharedPart("dict['labels']", "SharedList", part.nbytes)
    assert 400_000 <= part.nbytes < 400_200


def test_threads_read_at_once():
    """Reading has no state."""
    plain = texts(20_000)
    shared = share(plain)
    table = share({text: position for position, text in enumerate(plain)})
    wrong: list[Any] = []

    def read(seed: int) -> None:
        for index in numpy.random.default_rng(seed).integers(0, len(plain), 5000):
            if shared[index] != plain[index] or table[plain[index]] != index:
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
