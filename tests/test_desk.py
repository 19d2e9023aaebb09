"""What a worker finds on its desk: frames in the order that counts, also when it looks for some of them early."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from outlive._capture import blackbox
from outlive._capture.blackbox import BlackBox
from outlive._system import channel as channels
from outlive._system import nameless
from outlive._system.channel import Channel
from outlive._transport import wire
from outlive._transport.cells import Arena
from outlive._transport.wire import Kind
from outlive._worker.loop import Desk
from outlive.loader.source import Doubt, Source
from outlive.records import AnswerDoubt, SourceWord
from simulated_fleet import failure


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


def test_a_pause_ends_early_when_the_trainer_hangs_up(ends):
    """A worker that waits for its source must not keep a job that is over; what came meanwhile is kept."""
    desk, trainer = ends
    trainer.send(Kind.TASK, 1)
    desk.pause(0.001)
    trainer.send(Kind.TASK, 2)
    trainer.close()

    with pytest.raises(EOFError):
        desk.pause(3600.0)
    assert [desk.next_frame().seq for _ in range(2)] == [1, 2]


def test_tasks_wait_in_their_order_while_the_trainer_is_consulted(ends):
    """A doubt is answered before what was sent earlier is begun."""
    desk, trainer = ends
    answer = AnswerDoubt(0, 1, SourceWord.AGAIN, goods=(7,))
    trainer.send(Kind.TASK, 1)
    trainer.send(Kind.SOURCE, parts=[wire.dump(answer)])
    trainer.send(Kind.TASK, 2)

    heard = desk.doubt(0, Doubt(failure(3), ("5",), (3,), True))

    assert heard == answer
    assert [desk.next_frame().seq for _ in range(2)] == [1, 2]
    (frame,) = trainer.receive()
    assert (frame.kind, wire.load(frame.body)) == (Kind.DOUBT, (failure(3), ("5",), (3,), True, 0.0))


def test_a_probe_leaves_random_state_as_it_was(ends):
    """Samples that are condemned after a probe leave the same random numbers to those that follow."""
    desk, _ = ends
    source = Source(lambda index: random.random())
    source.went_well(1)
    source.failed(2, ValueError("bad"))
    before = random.getstate()

    assert not source.was_gone(desk, 0, failure(3), (3,))

    assert random.getstate() == before
    assert not source.is_unsure
