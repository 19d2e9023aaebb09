"""What a worker finds on its desk: frames in the order that counts, also when it looks for some of them early."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast._capture import blackbox
from holdfast._capture.blackbox import BlackBox
from holdfast._system import channel as channels
from holdfast._system import nameless
from holdfast._system.channel import Channel
from holdfast._transport import wire
from holdfast._transport.cells import Arena
from holdfast._transport.wire import Kind
from holdfast._worker.loop import Desk


@pytest.fixture
def ends() -> Iterator[tuple[Desk, Channel]]:
    """A worker's desk, and the trainer's end of its socket."""
    one, other = channels.pair()
    bell, box = channels.bell(), nameless.descriptor(blackbox.SIZE)
    waiting = Channel(one, blocking=True, owned=False, bell=bell)
    trainer = Channel(other, blocking=False, owned=False)
    view = BlackBox(nameless.adopt(box))
    yield Desk(waiting, view, Arena()), trainer
    view.release()
    waiting.close()
    trainer.close()


def free(trainer: Channel, *numbers: int) -> None:
    trainer.send_quietly(Kind.FREED, len(numbers), [wire.pack_numbers(list(numbers))])


def test_freed_cells_are_found_behind_tasks_and_tasks_stay_in_order(ends):
    """A task is not begun early, nor forgotten."""
    desk, trainer = ends
    trainer.send(Kind.TASK, 1)
    free(trainer, 7)
    trainer.send(Kind.TASK, 2)
    assert desk.next_frame().seq == 1
    free(trainer, 8, 9)
    trainer.send(Kind.TASK, 3)

    assert desk.arena.news() == [7, 8, 9]
    assert [desk.next_frame().seq for _ in range(2)] == [2, 3]
    assert desk.arena.news() == []


def test_nothing_is_read_from_another_thread(ends):
    """A dataset that collates in threads of its own must not read the worker's tasks."""
    desk, trainer = ends
    free(trainer, 7)
    found = []
    thread = threading.Thread(target=lambda: found.append(desk.arena.news()))
    thread.start()
    thread.join()

    assert found == [[]]
    assert desk.arena.news() == [7]


def test_the_trainer_s_end_is_noticed_after_its_last_task(ends):
    """Looking for freed cells may be what sees that the trainer is gone: what it sent before is done first."""
    desk, trainer = ends
    trainer.send(Kind.TASK, 1)
    trainer.close()

    assert desk.arena.news() == []
    assert desk.next_frame().seq == 1
    assert desk.arena.news() == []
    with pytest.raises(EOFError):
        desk.next_frame()
