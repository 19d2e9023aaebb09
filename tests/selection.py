"""Choose and order tests: mark repetitions as `full`, which `make test` leaves to `make test-all`, and shuffle.

Reads:   the parameters of each collected test.
Writes:  the mark `full` on cases that repeat a promise under another start method or seed.
Never:   drops a test, or all cases of any row: each row stays under at least one start method.

A test with a parameter that names start methods repeats each row of its other parameters under fork, spawn and
forkserver. `make test` keeps:

    one row        its first start method (fork, where it has that) and one of the others
    several rows   each row once, with start methods taken in turn

An interpreter that spawn starts imports torch, which costs as much as ten tests under forkserver do. So of four turns
one is spawn's. Which ones follows from the test's name alone, so it is the same however the tests were chosen or
ordered. Of a parameter `seed`, `make test` keeps the first values.
"""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

_METHODS = {"fork", "spawn", "forkserver"}
_SEEDS = 4


def mark_repetitions(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of each test that `make test` can do without."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        parameter = _parameter_with_methods(cases)
        repeated = _repetitions(name, cases, parameter) if parameter else []
        for case in [*repeated, *_later_seeds(cases)]:
            case.add_marker(pytest.mark.full)


def _parameter_with_methods(cases: list[pytest.Function]) -> str | None:
    values: dict[str, set[str]] = defaultdict(set)
    for case in cases:
        for name, value in case.callspec.params.items():
            if isinstance(value, str):
                values[name].add(value)
    return next((name for name, seen in values.items() if len(seen & _METHODS) > 1), None)


def _repetitions(name: str, cases: list[pytest.Function], parameter: str) -> list[pytest.Function]:
    rows: dict[tuple[int, ...], dict[str, pytest.Function]] = defaultdict(dict)
    for case in cases:
        # By identity: cases of a row share the very objects they were parametrized with.
        others = tuple(id(value) for key, value in case.callspec.params.items() if key != parameter)
        rows[others][str(case.callspec.params[parameter])] = case
    first = zlib.crc32(name.encode())
    left_out = []
    for turn, by_method in enumerate(rows.values(), first):
        methods = list(by_method)
        if len(rows) == 1:
            kept = {methods[0], _in_turn(methods[1:], turn)} if methods[1:] else set(methods)
        else:
            kept = {_in_turn(methods, turn)}
        left_out += [case for method, case in by_method.items() if method not in kept]
    return left_out


def _in_turn(methods: list[str], turn: int) -> str:
    quick = [method for method in methods if method != "spawn"]
    if not quick or ("spawn" in methods and turn % 4 == 0):
        return "spawn"
    return quick[turn % len(quick)]


def _later_seeds(cases: list[pytest.Function]) -> list[pytest.Function]:
    seeds = list(dict.fromkeys(case.callspec.params["seed"] for case in cases if "seed" in case.callspec.params))
    return [case for case in cases if case.callspec.params.get("seed") in seeds[_SEEDS:]]


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Put modules, and the tests in each, in an order that follows from the seed."""
    chance = random.Random(seed)
    modules: dict[str, float] = defaultdict(chance.random)
    items.sort(key=lambda item: (modules[item.nodeid.partition("::")[0]], chance.random()))
