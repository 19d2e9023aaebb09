"""Shared lists, tuples, dicts and sets are read as ordinary ones are: compared with those, whatever is in them."""

from __future__ import annotations

import collections.abc
import copy
import operator
import os
import pickle
import random
import sys
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outlive
import warm_server
from outlive import SharedDict, SharedList, share
from outlive._share import hashing
from outlive._share.mappings import SharedSet
from outlive._share.sequences import SharedTuple
from outlive._share.texts import SharedBytes, SharedStr

# Lone surrogates among them, as in file names that are no UTF-8.
TEXTS = st.text() | st.lists(st.sampled_from(["a", "é", "\ud800", "\udc00", "\x00", "😀"])).map("".join)
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    TEXTS,
    st.binary(max_size=20),
)
VALUES = st.one_of(
    st.lists(TEXTS),
    st.lists(st.binary(max_size=20)),
    st.lists(st.integers(-130, 130)),
    st.lists(st.integers(-(2**66), 2**66)),
    st.lists(st.floats(allow_nan=False)),
    st.lists(st.booleans()),
    st.lists(ATOMS),
    st.lists(st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner), max_leaves=5)),
    st.lists(st.dictionaries(st.text(max_size=3), ATOMS, max_size=3)),
)
KEYS = st.one_of(
    TEXTS,
    st.integers(),
    st.floats(allow_nan=False),
    st.binary(max_size=9),
    st.none(),
    st.booleans(),
    st.tuples(TEXTS, st.integers()),
    st.frozensets(st.integers(), max_size=1),
)
DICTS = st.one_of(
    st.dictionaries(TEXTS, ATOMS),
    st.dictionaries(st.integers(), ATOMS),
    st.dictionaries(KEYS, ATOMS, max_size=40),
)
MANY_KEYS = st.one_of(
    *(st.lists(kind, min_size=60, max_size=200, unique=True) for kind in (TEXTS, st.integers(), st.integers() | TEXTS))
)
SLICES = st.slices(20)


def exactly(values: Any) -> str:
    """Types and values: 1, 1.0 and True are equal, and no reader may get one for another."""
    return repr(values)


# ---------------------------------------------------------------- lists


@given(VALUES, st.data())
def test_a_list_is_read_as_the_plain_one_is(values, data):
    """Length, index, negative index, slice, iteration, `in`, equality both ways."""
    shared = share(values)

    assert type(shared) is SharedList
    assert len(shared) == len(values)
    assert bool(shared) == bool(values)
    assert exactly(list(shared)) == exactly(values)
    assert exactly([shared[index] for index in range(-len(values), len(values))]) == exactly(values * 2)
    assert shared == values
    assert values == shared
    assert shared != [*values, 1]
    assert [1, *values] != shared
    assert exactly(list(reversed(shared))) == exactly(values[::-1])
    for value in (*values, "missing", 10**30):
        assert (value in shared, shared.count(value)) == (value in values, values.count(value))
    if values:
        some = data.draw(st.sampled_from(values))
        assert shared.index(some) == values.index(some)
        assert shared != [*values[:-1], object()]


@given(VALUES, SLICES, SLICES)
def test_a_slice_of_a_slice_is_what_it_is_of_the_plain_one(values, first, second):
    """A slice is shared as well: nothing is copied."""
    shared = share(values)

    assert exactly(list(shared[first])) == exactly(values[first])
    assert exactly(list(shared[first][second])) == exactly(values[first][second])
    assert shared[first][second] == values[first][second]
    assert type(shared[first]) is SharedList
    assert exactly([shared[first][i] for i in range(len(values[first]))]) == exactly(values[first])


@pytest.mark.parametrize("wrong", [3, -4, 10**30, "a", 1.0, None])
def test_an_index_that_is_wrong_raises_what_a_list_raises(wrong):
    """In a list's words."""
    plain = ["a", "b", "c"]
    with pytest.raises((IndexError, TypeError)) as expected:
        plain[wrong]

    for shared in (share(plain), share([1, 2, 3]), share([1, "b", None])):
        with pytest.raises(expected.type) as raised:
            shared[wrong]
        assert wrong == 10**30 or str(raised.value) == str(expected.value)


def test_an_index_may_be_anything_that_counts():
    """NumPy's integers, as samplers give them, and bool."""
    shared = share(["a", "b", "c"])

    assert [shared[numpy.int64(1)], shared[numpy.uint8(2)], shared[True]] == ["b", "c", "b"]
    with pytest.raises(IndexError):
        shared[numpy.int64(3)]


@pytest.mark.parametrize("name", [n for n in dir(list) if n not in dir(tuple) and n not in ("copy", "__reversed__")])
def test_every_method_that_would_change_a_list_says_that_it_is_read_only(name):
    """And what to do instead."""
    with pytest.raises(TypeError, match=r"a shared list is read-only.*list\(shared\)"):
        getattr(share([1, 2, 3]), name)(0, 0)


def test_statements_that_would_change_a_list_are_refused():
    """Not only methods by name."""
    shared = share([1, 2, 3])

    with pytest.raises(TypeError, match="read-only"):
        shared[0] = 5
    with pytest.raises(TypeError, match="read-only"):
        del shared[0]
    with pytest.raises(TypeError, match="read-only"):
        shared += [4]
    assert shared == [1, 2, 3]


def test_what_makes_a_new_list_makes_a_plain_one():
    """Sums, products, copies, sorted; random choices."""
    shared = share([3, 1, 2])

    sums = [operator.add(shared, [4]), operator.add([4], shared), shared + shared]
    assert sums == [[3, 1, 2, 4], [4, 3, 1, 2], [3, 1, 2, 3, 1, 2]]
    assert [shared * 2, 2 * shared, shared.copy(), sorted(shared)] == [
        [3, 1, 2] * 2,
        [3, 1, 2] * 2,
        [3, 1, 2],
        [1, 2, 3],
    ]
    assert all(type(made) is list for made in (*sums, shared * 2, shared.copy()))
    assert random.Random(5).sample(shared, 2) == random.Random(5).sample([3, 1, 2], 2)
    with pytest.raises(TypeError):
        operator.add(shared, (1,))
    with pytest.raises(TypeError):
        hash(shared)


def test_a_list_of_numbers_is_an_array_without_a_copy_where_that_is_asked_for():
    """NumPy reads them where they lie."""
    values = list(range(-1000, 1000))
    shared = share(values)

    assert numpy.asarray(shared).tolist() == values
    assert numpy.asarray(shared).dtype == numpy.asarray(values).dtype
    assert numpy.asarray(shared[10:3:-2]).tolist() == values[10:3:-2]
    assert numpy.asarray(shared[3::-1]).tolist() == values[3::-1]
    assert numpy.asarray(shared[5:5]).tolist() == []
    assert numpy.asarray(share([0.5, 1.5])).tolist() == [0.5, 1.5]
    assert numpy.asarray(share(["a", "bc"])).tolist() == ["a", "bc"]
    assert not numpy.asarray(shared, dtype=numpy.int16).flags.owndata
    with pytest.raises(ValueError, match="these numbers lie there as int16: as int64 they are a copy"):
        shared.__array__(copy=False)
    with pytest.raises(ValueError, match="anything but numbers cannot be an array without a copy"):
        share(["a"]).__array__(copy=False)


def test_types_are_those_of_the_plain_ones():
    """`collections.abc` knows them; the originals are untouched."""
    assert isinstance(share([1]), collections.abc.Sequence)
    assert isinstance(share({1: 2}), collections.abc.Mapping)
    assert isinstance(share({1}), collections.abc.Set)
    kinds = [type(share(x)) for x in ((1,), {1: 2}, {1}, frozenset({1}), "text", b"bytes")]
    assert kinds == [SharedTuple, SharedDict, SharedSet, SharedSet, SharedStr, SharedBytes]


def test_a_representation_is_short():
    """However long the list."""
    shown = repr(share(["a" * 10] * 100_000))

    assert shown == "SharedList(['aaaaaaaaaa', 'aaaaaaaaaa', 'aaaaaaaaaa', …], len=100000, 1.34 MiB)"
    assert repr(share({"k": 1})).startswith("SharedDict({'k': 1}, len=1, ")
    assert repr(share({5})).startswith("SharedSet({5}, len=1, ")
    assert repr(share([b"x" * 900])).endswith(", len=1, 1012 B)")
    assert repr(share(b"x" * 50)).startswith(f"SharedBytes({b'x' * 20!r}…, len=50, ")


def test_elements_are_made_anew_each_time():
    """So no reference count of a shared element is ever touched, and no reader's change reaches another."""
    shared = share([{"a": [1]}, "x" * 50])

    shared[0]["a"].append(2)

    assert shared[0] == {"a": [1]}
    assert shared[1] is not shared[1]


@given(VALUES)
def test_a_tuple_is_read_as_the_plain_one_is(values):
    """Equal to tuples, not to lists; hashed like one."""
    plain = tuple(values)
    shared: Any = share(plain)

    assert exactly(tuple(shared)) == exactly(plain)
    assert shared == plain
    assert plain == shared
    assert (shared == values, values == shared) == (False, False)
    try:
        expected = hash(plain)
    except TypeError:
        return
    assert hash(shared) == expected


# ---------------------------------------------------------------- dicts and sets


class Equal:
    """Equal to a number, with its hash: a key of a dict that has the number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return self.number == other

    def __hash__(self) -> int:
        return hash(self.number)


@given(DICTS, st.lists(KEYS, max_size=10))
def test_a_dict_is_read_as_the_plain_one_is(plain, others):
    """Lookups that hit and miss, order, views, equality both ways."""
    shared = share(plain)

    assert type(shared) is SharedDict
    assert exactly(dict(shared.items())) == exactly(plain)
    assert [exactly(list(shared)), exactly(list(shared.values()))] == [
        exactly(list(plain)),
        exactly(list(plain.values())),
    ]
    assert shared == plain
    assert plain == shared
    assert len(shared) == len(plain)
    assert list(reversed(shared)) == list(reversed(plain))
    assert shared.keys() == plain.keys()
    assert list(shared.items()) == list(plain.items())
    for key in [*plain, *others]:
        assert (key in shared) == (key in plain)
        assert exactly(shared.get(key, "missing")) == exactly(plain.get(key, "missing"))
        assert shared.keys().__contains__(key) == (key in plain)
    for key, value in plain.items():
        assert exactly(shared[key]) == exactly(value)
    assert shared != {**plain, "another": 1, "and another": 2}
    assert shared != dict.fromkeys(plain, object()) or not plain


@given(MANY_KEYS)
def test_every_key_is_found_in_a_full_table(keys):
    """Probing past others, at the table's end, too."""
    shared = share({key: position for position, key in enumerate(keys)})

    assert [shared[key] for key in keys] == list(range(len(keys)))


def test_every_key_is_found_when_all_collide(monkeypatch):
    """The worst case is slow, not wrong."""
    monkeypatch.setattr(hashing, "crc32", lambda *_: 2**32 - 1)
    keys = [f"k{i}" for i in range(100)]
    shared = share(dict.fromkeys(keys, 1))

    assert all(key in shared for key in keys)
    assert "another" not in shared


def test_equal_numbers_are_one_key():
    """As in a dict: 1, 1.0, True, and NumPy's one."""
    shared = share({1: "one", 2.5: "more"})

    assert [shared[key] for key in (1, 1.0, True, numpy.int64(1), numpy.float64(2.5))] == ["one"] * 4 + ["more"]
    assert 0.5 not in shared


# Small values: keys that are equal, and tuples and sets of them, meet often.
SMALL = st.one_of(st.integers(-2, 9), st.booleans(), st.sampled_from([0.5, 7.0, float("inf")]))
NESTED = st.recursive(SMALL, lambda part: st.lists(part, max_size=2).map(tuple) | st.frozensets(part, max_size=2))
NUMPY = st.one_of(
    SMALL.map(lambda number: numpy.array(number)[()]),
    st.integers(0, 9).map(numpy.uint8),
    st.sampled_from(["7", "a"]).map(numpy.str_),
    st.sampled_from([b"7", b"a"]).map(numpy.bytes_),
    st.integers(0, 9).map(lambda day: numpy.datetime64(day, "D")),
    st.integers(0, 9).map(Equal),
)


@given(
    st.dictionaries(st.one_of(NESTED, st.sampled_from(["7", "a", b"7", b"a", None])), st.integers()),
    st.lists(st.one_of(NUMPY, NESTED, NUMPY.map(lambda key: (key,)), NUMPY.map(lambda key: frozenset([key])))),
)
def test_every_kind_of_key_gets_the_answer_of_the_plain_dict(plain, keys):
    """Also NumPy's scalars, which compare element by element with tuples, and keys of classes of one's own."""
    shared = share(plain)

    assert [shared.get(key, "missing") for key in keys] == [plain.get(key, "missing") for key in keys]


def test_a_key_that_is_none_raises_what_a_dict_raises():
    """KeyError with the key, TypeError for what has no hash, and «not there» for a kind that no shared key is of."""
    shared = share({"a": 1})

    with pytest.raises(KeyError, match="'b'"):
        shared["b"]
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        shared.get([])
    with pytest.raises(TypeError, match="unhashable type"):
        assert ("a", []) not in shared
    assert object() not in shared


@pytest.mark.parametrize(
    "change",
    [
        lambda shared: shared.__setitem__("a", 1),
        lambda shared: shared.__delitem__("a"),
        lambda shared: shared.update(a=1),
        lambda shared: shared.pop("a"),
        lambda shared: shared.popitem(),
        lambda shared: shared.clear(),
        lambda shared: shared.setdefault("b", 1),
        lambda shared: shared.__ior__({}),
    ],
)
def test_a_dict_is_not_changed(change):
    """Whoever tries is told what to do."""
    shared = share({"a": 0})

    with pytest.raises(TypeError, match=r"a shared dict is read-only.*dict\(shared\)"):
        change(shared)
    assert shared == {"a": 0}


def test_what_makes_a_new_dict_makes_a_plain_one():
    """Unions and copies."""
    shared = share({"a": 0})

    assert [shared | {"b": 1}, {"a": 5} | shared, shared.copy()] == [{"a": 0, "b": 1}, {"a": 0}, {"a": 0}]
    assert type(shared | {}) is dict


@given(st.sets(KEYS, max_size=30), st.sets(KEYS, max_size=5))
def test_a_set_is_read_as_the_plain_one_is(plain, other):
    """Members, comparison, algebra."""
    shared: Any = share(plain)

    assert shared == plain
    assert plain == shared
    assert [key in shared for key in (*plain, *other)] == [key in plain for key in (*plain, *other)]
    assert [shared & other, shared | other, shared - other, other - shared, shared ^ other] == [
        plain & other,
        plain | other,
        plain - other,
        other - plain,
        plain ^ other,
    ]
    assert (shared <= other, shared >= other, shared.isdisjoint(other)) == (
        plain <= other,
        plain >= other,
        plain.isdisjoint(other),
    )
    assert [shared.union(other), shared.intersection(other), shared.difference(other)] == [
        plain | other,
        plain & other,
        plain - other,
    ]
    with pytest.raises(TypeError, match="a shared set is read-only"):
        shared.add(1)


# ---------------------------------------------------------------- texts and bytes


@given(TEXTS | st.text("ab\xff"), SLICES)
def test_a_text_is_read_as_the_plain_one_is(plain, which):
    """Characters, not bytes; slices are ordinary texts."""
    shared: Any = share(plain)

    assert (len(shared), str(shared), list(shared)) == (len(plain), plain, list(plain))
    assert shared[which] == plain[which]
    assert [shared[i] for i in range(-len(plain), len(plain))] == list(plain) * 2
    assert shared == plain
    assert plain == shared
    assert shared != plain + "x"
    assert plain[1:3] in shared
    assert hash(shared) == hash(plain)


@given(st.binary(), SLICES)
def test_bytes_are_read_as_the_plain_ones_are(plain, which):
    """And without a copy through `view`."""
    shared: Any = share(plain)

    assert (len(shared), bytes(shared), list(shared)) == (len(plain), plain, list(plain))
    assert shared[which] == plain[which]
    assert shared == plain
    assert plain == shared
    assert shared.view == plain
    assert shared.view.readonly
    assert plain[1:3] in shared


# ---------------------------------------------------------------- handles


@given(st.one_of(VALUES, st.dictionaries(KEYS, ATOMS), st.sets(KEYS), TEXTS, st.binary()))
def test_a_pickle_is_a_handle(values):
    """It leads back to the same memory, in this process as well; copies are the thing itself."""
    shared: Any = share(values)
    again = pickle.loads(pickle.dumps(shared))

    assert again == values
    assert again._memory is shared._memory
    assert copy.deepcopy(shared) is copy.copy(shared) is shared


def test_a_pickle_of_a_long_list_is_short():
    """It has the place, not the data; of a slice, too."""
    shared = share(["some text"] * 100_000)

    assert len(pickle.dumps(shared)) < 1000
    assert pickle.loads(pickle.dumps(shared[5:10])) == ["some text"] * 5


def test_a_pickle_can_be_read_while_its_writer_lives():
    """By a process that is no child of it by multiprocessing's doing."""
    shared = share(["a", "b"])
    program = "import pickle, sys; print(list(pickle.load(sys.stdin.buffer)))"
    pickled = pickle.dumps(shared)
    ended = warm_server.run([sys.executable, "-c", program], input=pickled, capture_output=True, timeout=60)

    assert ended.stdout.strip() == b"['a', 'b']", ended.stderr


def test_a_pickle_says_why_it_cannot_be_read_when_its_writer_is_gone():
    """And what to pickle instead."""
    program = "import outlive, pickle, sys; sys.stdout.buffer.write(pickle.dumps(outlive.share(['a'])))"
    pickled = warm_server.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True).stdout

    with pytest.raises(pickle.UnpicklingError, match=r"the process that pickled it is gone.*list\(shared\)"):
        pickle.loads(pickled)


def test_a_descriptor_that_was_given_anew_is_not_taken_for_the_data():
    """A pickle that outlives the data must not lead to whatever has its number now."""
    shared = share(["a"])
    pickled = pickle.dumps(shared)
    del shared
    other = share(["b"])

    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(pickled)
    assert other == ["b"]


def test_memory_goes_with_the_last_that_looks_at_it():
    """A slice keeps it, and nothing else does; descriptors are not left (the leak check looks)."""

    def maps() -> int:
        with open("/proc/self/maps") as lines:
            return sum("outlive-share" in line or f"/outlive-{os.getpid()}-" in line for line in lines)

    before = maps()
    shared = share(["a"] * 100)
    part = shared[3:5]
    keys = share({"a": 1}).keys()
    del shared

    assert maps() == before + 2
    assert part == ["a", "a"]
    del part
    assert maps() == before + 1
    assert list(keys) == ["a"]
    del keys
    assert maps() == before


def test_what_is_shared_is_not_shared_again():
    """It comes back as it is."""
    for thing in ([1], (1,), {"a": 1}, {1}, "text", b"bytes", numpy.arange(5)):
        shared = share(thing)
        assert share(shared) is shared


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (5, "share() cannot share an int: it takes lists, tuples, dicts"),
        (lambda: None, "share() cannot share a function: it takes lists"),
        (numpy.array([object()]), "share() cannot share a ndarray"),
        ([lambda: None], "share() cannot share this list: Can't pickle"),
        ({object(): 1}, "share() cannot share this dict: keys of a shared dict or set are str, bytes, numbers"),
    ],
    ids=["int", "function", "objects", "unpicklable", "keys"],
)
def test_what_cannot_be_shared_is_refused(thing, message):
    """With what can."""
    with pytest.raises(TypeError) as raised:
        share(thing)

    assert str(raised.value).startswith(message)


def test_shared_things_inside_many_others_are_refused():
    """Their handles would lie in the memory, where nobody keeps them good."""
    inner = share([1])

    with pytest.raises(TypeError, match="share the outer object alone"):
        share([inner] * 100)
    assert share([inner, inner]) == [[1], [1]]


def test_the_public_names_are_there():
    """And `share` is the function, whatever was imported before."""
    assert outlive.share is share
    assert {"share", "shared_parts", "SharedList", "SharedDict", "SharedPart"} <= set(outlive.__all__)
