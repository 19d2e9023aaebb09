"""The black box: what a worker was doing when it died, read by somebody else from shared memory.

Reads   the record, from another map of its memory and from another process.
Writes  it as a worker does, up to the moment of a real death.
Never   a lock.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest

from outlive._capture import blackbox, stacks
from outlive._capture.blackbox import BlackBox
from outlive._fleet.dealing import MOST_SENT
from outlive._system import memory
from outlive.incident import InHand, Stage

SECOND_NS = 1_000_000_000


@pytest.fixture
def sides() -> Iterator[tuple[BlackBox, BlackBox]]:
    """The worker's view and the trainer's, of one memory."""
    fd = memory.create(blackbox.SIZE)
    boxes = BlackBox(memory.attach(fd)), BlackBox(memory.attach(fd))
    os.close(fd)
    boxes[0].begin(4127)
    yield boxes
    for box in boxes:
        box.release()


def test_a_worker_that_never_wrote_was_starting():
    """A record of nothing but zeros is lawful: the worker died before its first word."""
    fd = memory.create(blackbox.SIZE)
    box = BlackBox(memory.attach(fd))
    os.close(fd)

    assert box.in_hand() == InHand(Stage.STARTING, 0, 0, 0.0, stand_in=box.in_hand().stand_in)
    assert box.count == 1
    assert not any(box.spans)
    assert box.limit_s is None
    assert not box.has_hung_before
    box.release()


@pytest.mark.parametrize("stage", list(Stage))
def test_what_is_in_hand_shows_on_the_other_side(sides, stage):
    """Stage, batch, position, and since when."""
    worker, trainer = sides

    worker.enter(stage, 142, 5)

    seen = trainer.in_hand()
    assert (seen.stage, seen.batch, seen.position) == (stage, 142, 5)
    assert 0 <= seen.seconds < 60


def test_time_in_hand_is_counted_from_the_last_step(sides):
    """And never negative, though clocks be asked in another order."""
    worker, trainer = sides
    worker.enter(Stage.COLLATING, 7)
    since = trainer.mark[3]

    assert trainer.in_hand(since + 3 * SECOND_NS).seconds == 3.0
    assert trainer.in_hand(since - SECOND_NS).seconds == 0.0


def test_each_sample_is_in_hand_in_turn(sides):
    """fetch() is all that a sample costs."""
    worker, trainer = sides
    worker.enter(Stage.FETCHING, 3)
    seen = []
    for position in range(4):
        worker.fetch(position)
        seen.append(trainer.in_hand())

    assert [(hand.stage, hand.batch, hand.position) for hand in seen] == [(Stage.FETCHING, 3, p) for p in range(4)]


def test_a_step_over_many_samples_says_how_many(sides):
    """A timeout is per sample."""
    worker, trainer = sides
    worker.enter(Stage.COLLATING, 3, count=16)
    many = trainer.count
    worker.enter(Stage.IDLE)

    assert (many, trainer.count) == (16, 1)


def test_every_step_changes_the_mark(sides):
    """Whoever watches sees that the worker gets on."""
    worker, trainer = sides
    marks = [trainer.mark]
    for step in (
        lambda: worker.enter(Stage.FETCHING, 1),
        lambda: worker.fetch(0),
        lambda: worker.fetch(1),
        lambda: worker.enter(Stage.COLLATING, 1),
        lambda: worker.enter(Stage.IDLE),
    ):
        step()
        marks.append(trainer.mark)

    assert len(set(marks)) == len(marks)


def test_healthy_samples_are_counted_by_how_long_they_took(sides, monkeypatch):
    """Waiting and starting do not count, nor does the sample that is still in hand."""
    worker, trainer = sides
    clock = [SECOND_NS]
    monkeypatch.setattr(blackbox.time, "monotonic_ns", lambda: clock[0])

    def after(seconds: float) -> None:
        clock[0] += int(seconds * SECOND_NS)

    def seen(kind: int) -> list[tuple[float, int]]:
        """Upper bounds, and how many took about so long."""
        counts = trainer.spans.tolist()[kind * blackbox.SPANS : (kind + 1) * blackbox.SPANS]
        return [(blackbox.span_s(n), count) for n, count in enumerate(counts) if count]

    worker.enter(Stage.IDLE)
    after(100)
    worker.enter(Stage.FETCHING, 0)
    after(50)
    worker.fetch(0)
    after(2)
    worker.fetch(1)
    after(0.001)
    worker.fetch(2)
    samples = [seen(blackbox.SAMPLE_STEPS)]
    after(2)
    worker.finished()
    samples.append(seen(blackbox.SAMPLE_STEPS))
    worker.enter(Stage.COLLATING, 0)
    after(9)
    worker.finished()

    ((short, one), (long, another)), (_, (_, two)) = samples
    assert (short, one, another, two) == (0.0, 1, 1, 2)
    assert 2 < long <= 2.5
    ((bound, once),) = seen(blackbox.BATCH_STEPS)
    assert 9 < bound <= 9 * 1.25
    assert once == 1
    assert seen(blackbox.SAMPLE_STEPS) == samples[1]


@pytest.mark.parametrize("nanoseconds", [blackbox.LONG_NS, 12_345_678, SECOND_NS, 3600 * SECOND_NS, 1 << 62])
def test_a_long_sample_is_counted_where_it_belongs(sides, nanoseconds):
    """The bucket's bound is at most a quarter above; what takes days is counted with what takes hours."""
    worker, trainer = sides

    worker.took_long(nanoseconds)

    (n,) = [n for n, count in enumerate(trainer.spans.tolist()) if count]
    assert 1 <= n < blackbox.SPANS
    last = blackbox.span_s(blackbox.SPANS - 1)
    assert min(nanoseconds / 1e9, last * 0.99) < blackbox.span_s(n) <= 1.25 * nanoseconds / 1e9


def test_what_hung_a_worker_before_is_known_to_the_next(sides):
    """That sample, or that batch as a whole, and no other."""
    worker, trainer = sides
    worker.enter(Stage.FETCHING, 3)
    worker.fetch(1)
    seen = [trainer.has_hung_before]
    for hung in ((3, 0), (3, 1), (3, -1), (2, 1), (4, -1)):
        trainer.note_hung(*hung)
        seen.append(trainer.has_hung_before)

    assert seen == [False, False, True, True, False, False]


# ---------------------------------------------------------------- random states


def state_of(batch: int) -> bytes:
    return random.Random(batch).randbytes(7000 + batch)


def test_the_states_after_the_last_batches_are_kept(sides):
    """Whichever of them was the last to arrive: a worker may be as far ahead as it has tasks."""
    worker, trainer = sides
    assert blackbox.COPIES > MOST_SENT
    last = 2 * blackbox.COPIES + 3
    for batch in range(last):
        worker.keep_random_state(batch, state_of(batch))

        kept = [n for n in range(last) if trainer.random_state(n) is not None]
        assert kept == list(range(max(0, batch + 1 - blackbox.COPIES), batch + 1))
    assert all(trainer.random_state(n) == state_of(n) for n in kept)


def test_there_is_no_state_before_the_first_batch(sides):
    """Not even for batch 0, nor for a batch before it."""
    _, trainer = sides

    assert trainer.random_state(0) is None
    assert trainer.random_state(-1) is None


@pytest.mark.parametrize("batch", [0, -1, 1])
def test_a_record_never_written_holds_no_random_state(batch):
    """A worker that died before its first word: the zeros of fresh memory are not a state after batch 0."""
    fd = memory.create(blackbox.SIZE)
    box = BlackBox(memory.attach(fd))
    os.close(fd)

    state = box.random_state(batch)
    box.release()

    assert state is None


def test_states_of_an_earlier_epoch_are_forgotten(sides):
    """Batches are numbered anew: an old name must not stand for a new batch."""
    worker, trainer = sides
    worker.keep_random_state(3, state_of(3))

    worker.forget_random_states()

    assert trainer.random_state(3) is None


def test_a_new_life_forgets_the_states_of_the_last(sides):
    """begin() on a record that was used before."""
    worker, trainer = sides
    worker.keep_random_state(3, state_of(3))

    worker.begin(99)

    assert trainer.random_state(3) is None
    assert trainer.in_hand().stage is Stage.STARTING


def test_a_state_that_does_not_fit_leaves_the_others_alone(sides):
    """It is not kept; nothing is written beyond its room."""
    worker, trainer = sides
    worker.keep_random_state(1, state_of(1))
    worker.keep_random_state(2, b"x" * blackbox.SIZE)

    assert trainer.random_state(1) == state_of(1)
    assert trainer.random_state(2) is None


class _Dies:
    """Bytes of a record whose writer dies after so many of them."""

    def __init__(self, inner: memoryview, after: int) -> None:
        self.inner = inner
        self.after = after

    def __setitem__(self, where: slice, value: bytes) -> None:
        self.inner[where.start : where.start + self.after] = value[: self.after]
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@pytest.mark.parametrize("written", [0, 1, 3000])
def test_a_death_in_the_middle_of_a_state_leaves_no_name_on_half_of_it(sides, written):
    """The state of the batch before it is whole; the half-written one is nobody's."""
    worker, trainer = sides
    full = blackbox.COPIES
    for batch in range(full):
        worker.keep_random_state(batch, state_of(batch))
    whole = worker.content
    worker.content = _Dies(whole, written)  # type: ignore[assignment]

    with pytest.raises(KeyboardInterrupt):
        worker.keep_random_state(full, state_of(full))
    worker.content = whole

    assert trainer.random_state(full) is None
    assert trainer.random_state(0) is None
    assert all(trainer.random_state(n) == state_of(n) for n in range(1, full))


# ---------------------------------------------------------------- real deaths


def in_child(act) -> int:
    """Do something in a forked process until it ends; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_the_record_outlives_a_killed_process(sides):
    """Written with plain stores: nothing to flush, nothing to lose."""
    worker, trainer = sides

    def work() -> None:
        worker.begin(os.getpid())
        worker.enter(Stage.FETCHING, 142)
        worker.keep_random_state(141, state_of(141))
        for position in range(6):
            worker.fetch(position)
        os.kill(os.getpid(), signal.SIGKILL)

    status = in_child(work)

    assert os.WTERMSIG(status) == signal.SIGKILL
    seen = trainer.in_hand()
    assert (seen.stage, seen.batch, seen.position) == (Stage.FETCHING, 142, 5)
    assert trainer.random_state(141) == state_of(141)


def test_a_record_that_was_written_over_is_still_readable(sides):
    """A wild pointer in native code: whoever reads it must not die of it."""
    worker, trainer = sides
    worker.content[:512] = b"\xa5" * 512

    assert trainer.in_hand().batch == -1
    assert trainer.count >= 1
    assert isinstance(trainer.mark, tuple)


def test_stacks_of_a_fatal_signal_are_written_to_their_file():
    """faulthandler's, into memory that outlives the process."""
    fd = memory.create(stacks.SIZE)

    def crash_here() -> None:
        stacks.install(fd)
        os.kill(os.getpid(), signal.SIGSEGV)

    in_child(crash_here)
    text = stacks.read(fd)
    os.close(fd)

    assert "Fatal Python error: Segmentation fault" in text
    assert "crash_here" in text


def test_stacks_are_written_when_they_are_asked_for():
    """The process goes on as if nothing had been."""
    fd = memory.create(stacks.SIZE)
    go_on, ready = os.pipe(), os.pipe()

    def wait_here() -> None:
        stacks.install(fd)
        os.write(ready[1], b"r")
        os.read(go_on[0], 1)
        os._exit(7)

    pid = os.fork()
    if pid == 0:
        wait_here()
    os.read(ready[0], 1)
    stacks.ask(pid)
    give_up_at = os.times().elapsed + 20
    while "wait_here" not in stacks.read(fd) and os.times().elapsed < give_up_at:
        os.sched_yield()
    text = stacks.read(fd)
    os.write(go_on[1], b"g")
    status = os.waitpid(pid, 0)[1]
    for number in (fd, *go_on, *ready):
        os.close(number)

    assert "wait_here" in text
    assert os.waitstatus_to_exitcode(status) == 7


def test_requesting_stacks_of_a_dead_process_is_no_error():
    """They may have died a moment ago."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

    stacks.ask(pid)


@pytest.mark.parametrize(("taken", "told"), [(0, ()), (1, (0,)), (64, tuple(range(64))), (100, tuple(range(36, 100)))])
def test_the_last_batches_are_known_oldest_first(sides, taken, told):
    """As many as there is room for."""
    worker, trainer = sides

    for batch in range(taken):
        worker.take_up(batch)

    assert trainer.recent_batches == told


def test_batches_of_an_earlier_epoch_are_forgotten(sides):
    """They were numbered as those of this one are."""
    worker, trainer = sides
    worker.take_up(7)

    worker.forget_batches()
    worker.take_up(0)

    assert trainer.recent_batches == (0,)


def test_a_wild_write_over_the_count_is_no_reason_to_fail(sides):
    """Whoever dies of a wild write may have hit the record before."""
    worker, trainer = sides
    worker.words[blackbox.TAKEN] = -5

    assert trainer.recent_batches == ()


def test_a_stack_that_was_cut_short_is_left_out_where_the_whole_one_is():
    """On a busy machine a worker may lose its processor while it writes."""
    whole = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in spin\n  File "b.py", line 9 in run'
    text = f"{whole[:60]}\n\n{whole}\n\n{whole}\n"

    assert stacks.without_repeats(text).count("in spin") == 1
    assert whole.splitlines()[-1] in stacks.without_repeats(text)
