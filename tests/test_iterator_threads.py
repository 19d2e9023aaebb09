"""One iterator and several threads: two at once are told, one after the other are served.

Reads   what threads get from one iterator.
Writes  a gate file, which lets samples through.
Never   depends on which thread is first.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

import loader_inputs as inputs
import outlive
from deadlines import wait_until


@pytest.mark.parametrize(
    "arguments", [{"num_workers": 1}, {"num_workers": 0, "faults": "skip"}], ids=["worker", "here"]
)
def test_two_threads_in_next_at_once_are_told(arguments, tmp_path):
    """One of them gets its batch, the other an error that says what to do; the iterator goes on."""
    loader = outlive.DataLoader(inputs.Gated(tmp_path / "gate"), batch_size=2, **arguments)
    iterator = iter(loader)
    first = next(iterator)
    outcomes: list[Any] = []

    def take() -> None:
        try:
            outcomes.append(next(iterator))
        except outlive.OutliveError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    told = wait_until(lambda: bool(outcomes), 60.0)  # whoever came second; the first waits at the gate
    (tmp_path / "gate").touch()
    for thread in threads:
        thread.join()
    [error] = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    [batch] = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]

    assert told
    assert "another thread is in next() of this iterator" in str(error)
    assert [indices.tolist() for indices, _ in (first, batch, *iterator)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("workers", [1, 0])
def test_threads_may_take_turns(workers):
    """As a thread does that fetches ahead for another; also where the one before ended in an error."""
    loader = outlive.DataLoader(inputs.Fails({2: inputs.key_error}), num_workers=workers)
    iterator = iter(loader)
    outcomes: list[str] = []

    def take() -> None:
        try:
            next(iterator)
            outcomes.append("a batch")
        except KeyError:
            outcomes.append("an error")

    for _ in range(4):
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    assert outcomes == ["a batch", "a batch", "an error", "a batch"]
