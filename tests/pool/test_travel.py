"""What travels to and from a pool's workers: everything as it was, large things beside the pickle, nothing shared."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

import outlive
from outlive import FaultPolicy, Pool
from outlive.pool.parcels import dumps
from outlive.pool.work import Function
from pool import task_functions

torch = pytest.importorskip("torch")
METHODS = ("fork", "spawn", "forkserver")
LARGE = 300_000
DEADLINE_S = 60.0


def things() -> dict[str, Any]:
    """Small and large, of every kind that has a way of its own."""
    random = np.random.default_rng(0)
    numbers = random.standard_normal(LARGE)
    read_only = numbers.copy()
    read_only.flags.writeable = False
    return {
        "small": numbers[:7],
        "large": numbers,
        "strided": numbers[::3],
        "fortran": np.asfortranarray(numbers.reshape(1000, -1)),
        "read-only": read_only,
        "records": np.zeros(LARGE // 10, [("a", "<i4"), ("b", ">f8")]),
        "no bytes": np.empty((0, 3)),
        "objects": np.array([1, "two", None], dtype=object),
        "tensor": torch.from_numpy(numbers.copy()),
        "small tensor": torch.arange(5),
        "half": torch.arange(LARGE).to(torch.bfloat16),
        "view": torch.arange(LARGE).reshape(2, -1).t(),
        "scalar": torch.tensor(3.5),
        "with gradient": torch.ones(LARGE, requires_grad=True),
        "conjugate": torch.full((3,), 1 + 2j).conj(),
        "sparse": torch.eye(50).to_sparse(),
        "bytes": random.bytes(LARGE),
        "bytearray": bytearray(random.bytes(LARGE)),
        "text": "ä" * LARGE,
        "nested": {"x": [numbers[:3], (torch.ones(2), b"z" * LARGE)]},
    }


def is_same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, torch.Tensor):
        dense = (one.to_dense(), two.to_dense()) if one.is_sparse else (one, two)
        return one.dtype == two.dtype and one.requires_grad == two.requires_grad and torch.equal(*dense)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(is_same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(is_same, one, two))
    return bool(one == two)


@pytest.mark.parametrize("method", METHODS)
def test_everything_comes_back_as_it_was(method):
    given = things()
    with Pool(2, method) as pool:
        alone = dict(zip(given, pool.map(task_functions.same, given.values(), chunksize=1)))
        together = dict(zip(given, pool.map(task_functions.same, given.values(), chunksize=len(given))))
        submitted = {name: pool.submit(task_functions.same, value=value) for name, value in given.items()}
        for name, value in given.items():
            assert is_same(alone[name], value), name
            assert is_same(together[name], value), name
            assert is_same(submitted[name].result(60), value), name


def test_arrow_and_pandas_travel():
    arrow, pandas = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")
    table = arrow.table({"a": np.arange(LARGE), "b": [str(n) for n in range(LARGE)]})
    frame = pandas.DataFrame({"a": np.arange(LARGE), "b": np.ones(LARGE)})
    with Pool(1) as pool:
        assert pool.submit(task_functions.same, table).result(60).equals(table)
        assert pool.submit(task_functions.same, frame).result(60).equals(frame)


@pytest.mark.parametrize("method", METHODS)
def test_a_large_argument_is_read_where_it_was_written(method):
    """The worker makes no copy of it, and may write to it; the caller's stays as it was."""
    given = np.ones(LARGE)
    with Pool(1, method) as pool:
        assert "outlive-message" in pool.submit(task_functions.find_map, given).result(60)
        assert pool.submit(task_functions.fill, given).result(60) == 2 * LARGE
        assert pool.submit(task_functions.fill, torch.ones(LARGE)).result(60) == 2 * LARGE
    assert given.sum() == LARGE


@pytest.mark.parametrize("chunk", ["auto", 1])
def test_tasks_that_are_sent_together_share_nothing(chunk):
    given: list[int] = []
    with Pool(2) as pool:
        assert set(pool.map(task_functions.grow, [given] * 500, chunksize=chunk)) == {1}
        assert {pool.submit(task_functions.grow, given).result(60) for _ in range(20)} == {1}
        returned = list(pool.map(task_functions.return_same_list, range(500), chunksize=chunk))
        returned += [
            future.result(60) for future in [pool.submit(task_functions.return_same_list, n) for n in range(200)]
        ]
    assert given == []
    assert len({id(each) for each in returned}) == len(returned)


@pytest.mark.parametrize("method", METHODS)
def test_a_large_function_is_sent_once(method):
    table = np.arange(LARGE)
    function = Function(lambda n: int(table[n]))
    assert len(function.pickled) < 1000
    with Pool(2, method) as pool:
        assert list(pool.map(lambda n: int(table[n]), range(2000))) == list(range(2000))


@pytest.mark.parametrize("chunk", ["auto", 100])
def test_a_chunk_that_takes_long_hands_back_what_it_has_not_begun(chunk, tmp_path):
    """Many short tasks, then long ones: they are not left to the worker that was sent them together.

    Long ones do not end before another worker has begun one, too.
    """
    (tmp_path / "begun").mkdir()
    (tmp_path / "workers").mkdir()
    numbers = range(600, 1100) if chunk == "auto" else range(1100)
    with Pool(2) as pool:
        if chunk == "auto":  # tasks so short that all of the next ones are sent together
            assert len(list(pool.map(task_functions.square, range(20_000)))) == 20_000
        task = functools.partial(task_functions.take_a_while, str(tmp_path / "begun"), str(tmp_path / "workers"))
        pids = list(pool.map(task, numbers, chunksize=chunk))
    assert {str(pid) for pid in pids[-100:]} == set(os.listdir(tmp_path / "workers"))
    assert len(set(pids[-100:])) == 2
    assert set(task_functions.count_starts(tmp_path / "begun").values()) == {1}
    assert sorted(task_functions.count_starts(tmp_path / "begun")) == list(numbers)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_shared_travels_by_handle(method):
    numbers = outlive.share(np.arange(LARGE))
    given = {"array": numbers, "part": numbers[10:20], "tensor": outlive.share(torch.arange(LARGE))}
    names = outlive.share([str(n) for n in range(LARGE)])
    with Pool(1, method) as pool:
        for name, value in given.items():
            array = value.numpy() if name == "tensor" else value
            assert "outlive-share" in pool.submit(task_functions.find_map, array).result(60)
            assert len(dumps(value)) < 1000, name
        assert "outlive-share" in pool.submit(lambda: task_functions.find_map(numbers)).result(60)
        assert pool.submit(len, names).result(60) == LARGE
        back = pool.submit(task_functions.same, numbers).result(60)
    assert np.array_equal(back, numbers)
    back[0] = 5  # what comes back is the caller's own
    assert numbers[0] == 0


# ---------------------------------------------------------------- another attempt

ARGUMENTS = {
    "small": lambda: np.ones(3),
    "large": lambda: np.ones(LARGE),
    "read-only view of the caller's": lambda: view_of(np.ones(LARGE)),
    "tensor": lambda: torch.ones(LARGE),
    "list": lambda: [np.ones(3)],
    "bytearray": lambda: bytearray(b"\1" * LARGE),
}


def view_of(array: Any) -> Any:
    view = array[:]
    view.flags.writeable = False
    return view


def first_of(value: Any) -> float:
    return first_of(value[0]) if isinstance(value, list) else float(value[0])


def set_all(value: Any, number: int) -> None:
    """Change what an argument holds, in place, as a task or its caller may."""
    if isinstance(value, list):
        set_all(value[0], number)
    elif isinstance(value, bytearray):
        value[:] = bytes([number]) * len(value)
    elif isinstance(value, torch.Tensor):
        value.fill_(number)
    else:
        (value if value.flags.writeable else value.base)[...] = number


@pytest.mark.parametrize("how", ["submit", pytest.param("map", marks=pytest.mark.full), "chunks"])
@pytest.mark.parametrize("kind", [kind for kind in ARGUMENTS if not kind.startswith("read-only")])
def test_a_task_that_is_tried_again_gets_its_arguments_as_they_were(kind, how, tmp_path):
    """The first attempt changed them, then raised what the policy retries."""

    def flaky(value: Any, number: int) -> float:
        found = first_of(value)
        set_all(value, 2)
        task_functions.note(str(tmp_path), number)
        if task_functions.count_starts(tmp_path)[number] < 3:
            raise OSError("not yet")
        return found

    policy = FaultPolicy(retry_on=OSError, retries=2, backoff_s=0.0)
    given = [ARGUMENTS[kind]() for _ in range(3)]
    with Pool(1, faults=policy) as pool:
        if how == "submit":
            futures = [pool.submit(flaky, value, number) for number, value in enumerate(given)]
            found = [future.result(DEADLINE_S) for future in futures]
        else:
            found = list(pool.map(flaky, given, range(3), chunksize=1 if how == "map" else 3))

    assert found == [1.0] * 3
    assert task_functions.count_starts(tmp_path) == dict.fromkeys(range(3), 3)


@pytest.mark.parametrize("how", ["submit", pytest.param("map", marks=pytest.mark.full), "chunks"])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_a_task_that_killed_its_worker_gets_its_arguments_as_they_were(kind, how, tmp_path):
    """The caller has changed them since, as a loop does that fills one buffer after the other."""
    changed, begun = tmp_path / "changed", tmp_path / "begun"
    begun.mkdir()

    def deadly(value: Any, number: int) -> float:
        task_functions.note(str(begun), number)
        if task_functions.count_starts(begun)[number] == 1:
            task_functions.wait_for(str(changed))
            os.kill(os.getpid(), signal.SIGKILL)
        return first_of(value)

    given = [ARGUMENTS[kind]() for _ in range(3)]
    with Pool(1, retries=3) as pool:
        if how == "submit":
            futures = [pool.submit(deadly, value, number) for number, value in enumerate(given)]
        else:
            results = pool.map(deadly, given, range(3), chunksize=1 if how == "map" else 3)
        task_functions.wait_for(str(begun / "0"))
        set_all(given[0], 2)
        changed.touch()
        found = [future.result(DEADLINE_S) for future in futures] if how == "submit" else list(results)

    assert found == [1.0] * 3


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Wordless:
    """Raises that when it is pickled, or when it is unpickled."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __getstate__(self) -> Any:
        if self.when == "pickled":
            raise WordlessError
        return self.__dict__

    def __setstate__(self, state: Any) -> None:
        raise WordlessError


@pytest.mark.parametrize("when", ["pickled", "unpickled"])
def test_a_result_costs_its_task_only_when_its_error_has_no_text(when):
    """Else it would end the pool's own thread, and every other task with it."""
    with Pool(1, "fork") as pool:
        futures = [pool.submit(Wordless, when), pool.submit(int, 3)]

        assert futures[1].result() == 3
        assert "<its __str__ raised RuntimeError>" in str(futures[0].exception())


@pytest.mark.parametrize("kind", ["small", pytest.param("large", marks=pytest.mark.full)])
def test_tasks_that_are_parted_after_a_death_get_their_arguments_as_they_were(kind, tmp_path):
    """A result killed the worker that packed it: each task of the chunk is tried alone. The caller has gone on."""
    given = [ARGUMENTS[kind]() for _ in range(3)]
    with Pool(1, retries=3) as pool:
        results = pool.map(task_functions.first_or_death, given, [str(tmp_path)] * 3, range(3), chunksize=3)
        task_functions.wait_for(str(tmp_path / "begun 2"))
        for array in given:
            set_all(array, 2)
        task_functions.note(str(tmp_path), "changed")
        assert list(results) == [1.0] * 3

    assert (tmp_path / "begun 2").read_text() == "xx"


# ---------------------------------------------------------------- what a function brings


def closure_over(given: list[int]) -> Any:
    return lambda number: task_functions.grow(given)


CALLABLES = {
    "method": task_functions.Counter().call,
    "instance": task_functions.Counter(),
    "partial": functools.partial(task_functions.grow_and_ignore, []),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_a_function_with_data_is_called_as_it_was_given(kind):
    """What one task does to it, no other task sees: as in a pool of the standard library."""
    function = CALLABLES[kind]
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        expected = [*(pool.submit(function, n).result() for n in range(3)), *pool.map(function, range(100))]
    with Pool(1) as pool:
        assert list(pool.map(task_functions.square, range(1000)))  # so short that the next are sent together
        submitted = [pool.submit(function, n) for n in range(3)]
        found = [*(task.result(DEADLINE_S) for task in submitted), *pool.map(function, range(100))]

    assert found == expected == [1] * 103


def test_tasks_with_the_same_closure_share_nothing():
    with Pool(1) as pool:
        tasks = [pool.submit(closure_over([]), n) for n in range(3)]
        assert [task.result(DEADLINE_S) for task in tasks] == [1] * 3


@pytest.mark.parametrize("kind", ["partial", "closure", pytest.param("large closure", marks=pytest.mark.full)])
@pytest.mark.parametrize("how", ["submit", "map"])
def test_a_function_that_is_tried_again_has_its_data_as_they_were(how, kind, tmp_path):
    """Each attempt adds 1 to an array of ones that the function brought."""
    array, folder = np.ones(LARGE if kind == "large closure" else 3), str(tmp_path)
    function: Any = lambda number: task_functions.fail_twice(array, folder, number)  # noqa: E731
    if kind == "partial":
        function = functools.partial(task_functions.fail_twice, array, folder)
    with Pool(1, faults=FaultPolicy(retry_on=OSError, retries=2, backoff_s=0.0)) as pool:
        found = list(pool.map(function, [0])) if how == "map" else [pool.submit(function, 0).result(DEADLINE_S)]

    assert found == [2.0]
    assert task_functions.count_starts(tmp_path) == {0: 3}
