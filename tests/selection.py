"""Mark as `full` what repeats a promise under another start method: `make test` leaves it to `make test-all`.

Reads:   the parameters of each collected test.
Writes:  the mark `full` on some of its cases.
Never:   drops a test, or all cases of any row: each row stays under at least one start method.

A test with a parameter that names start methods repeats each row of its other parameters under fork, spawn and
forkserver. `make test` keeps:

    one row        its first start method (fork, where it has that) and one of the others
    several rows   each row once, with start methods taken in turn, so that rows and methods are covered pairwise

Which ones follows from the test's name alone, so it is the same however the tests were chosen or ordered.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

_METHODS = {"fork", "spawn", "forkserver"}


def mark_repetitions(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of each test that `make test` can do without."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        parameter = _parameter_with_methods(cases)
        if parameter:
            for case in _repetitions(name, cases, parameter):
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
    turn = zlib.crc32(name.encode())
    left_out = []
    for number, by_method in enumerate(rows.values()):
        methods = list(by_method)
        if len(rows) == 1:
            kept = {methods[0], methods[1:][turn % (len(methods) - 1)]} if methods[1:] else set(methods)
        else:
            kept = {methods[(turn + number) % len(methods)]}
        left_out += [case for method, case in by_method.items() if method not in kept]
    return left_out
