"""`DataLoader.close()`, and a loader in a `with` block: workers end, and the loader can be used again.

Reads   which processes live.
Writes  nothing.
Never   ends a worker by itself.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import outlive
from deadlines import wait_until
from faults.faulty_datasets import (
    SIZE,
    FaultPlacement,
    Samples,
    Stream,
    all_indices,
    all_values,
    indices_of,
    make_loader,
)
from outlive.errors import OutliveError

PACKAGE = os.path.dirname(outlive.__file__)


def children() -> list[psutil.Process]:
    """Return the children of this process that have not ended."""
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_when_a_loader_is_closed(method, persistent):
    """In the middle of an epoch, while the iterator is still held; a second call changes nothing."""
    before = len(children())
    loader = make_loader(FaultPlacement(), multiprocessing_context=method, persistent_workers=persistent)
    iterator = iter(loader)
    first = next(iterator)
    values = first["samples"].tolist()
    assert len(children()) > before

    loader.close()
    loader.close()

    assert len(children()) == before or method == "spawn"  # its resource tracker stays
    assert loader.statistics().workers == 0
    assert first["samples"].tolist() == values
    with pytest.raises(OutliveError, match="was shut down; make a new one"):
        next(iterator)


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("kind", [Samples, Stream])
def test_a_closed_loader_can_be_iterated_again(kind, persistent):
    """After a whole epoch, and after a part of one."""
    whole = all_indices(make_loader(FaultPlacement(), dataset=kind(SIZE, FaultPlacement())))
    loader = make_loader(FaultPlacement(), dataset=kind(SIZE, FaultPlacement()), persistent_workers=persistent)

    assert all_indices(loader) == whole
    loader.close()
    assert indices_of(next(iter(loader))) == whole[0]
    loader.close()
    assert all_indices(loader) == whole
    loader.close()


def interrupted_at(line: int, act: Callable[[], None]) -> bool:
    """Have an interrupt come at this line of the package's own code, counted while it acts. Return whether it came."""
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if PACKAGE not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if left == 0:
            left = -1
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.leaks_allowed  # of descriptors: those of a worker whose release was interrupted stay open
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an interrupted close leaves sockets to the collector
def test_workers_end_wherever_closing_is_interrupted():
    """Ctrl-C at one line or another of it leaves no process, after a second call or without the loader."""
    before = len(children())
    for line in itertools.count(1, 31):
        loader = make_loader(FaultPlacement(), persistent_workers=True)
        next(iter(loader))

        was_interrupted = interrupted_at(line, loader.close)
        if line % 2:
            loader.close()
        del loader
        gc.collect()

        assert wait_until(lambda: len(children()) == before), f"interrupted at line {line}"
        if not was_interrupted:
            break
    assert line > 50


def test_a_position_is_kept_when_the_loader_is_closed():
    """The next loader goes on where the closed one was."""
    whole = all_values(make_loader(FaultPlacement()))
    loader = make_loader(FaultPlacement())
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    loader.close()
    again = make_loader(FaultPlacement())
    again.load_state_dict(loader.state_dict())

    assert all_values(again) == whole[2:]


def test_a_with_block_closes_the_loader_also_after_an_error():
    """The error is the trainer's own."""
    before = len(children())
    loader = make_loader(FaultPlacement(), persistent_workers=True)

    def train() -> None:
        with loader as entered:
            assert entered is loader
            for _ in entered:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert len(children()) == before


@pytest.mark.parametrize("faults", ["raise", "skip"])
def test_close_does_nothing_without_workers(faults):
    """The iterator goes on."""
    loader: Any = make_loader(FaultPlacement(), faults, num_workers=0)
    loader.close()
    iterator = iter(loader)
    first = indices_of(next(iterator))
    loader.close()

    assert [first, *map(indices_of, iterator)] == all_indices(loader)
