"""What the consumer holds is never overwritten, whatever it does with it and however long it keeps it."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

from loader_comparison import OURS
from transport import batch_values
from transport.process_inspection import mapped_cells, run_program

LARGE = 20_000  # float32: 78 KiB, a cell
SMALL = 20
MORE = 20  # batches after the one in hand: each cell is used again several times


def _batches(floats: int, count: int = MORE, **more: Any) -> Iterator[Any]:
    """Batch i holds `floats` times the value i + 1."""
    samples = [torch.full((floats,), float(i + 1)) for i in range(count)]
    return iter(
        OURS(batch_values.ReadySamples(*samples), batch_size=None, collate_fn=batch_values.as_is, num_workers=1, **more)
    )


def _go_on(batches: Iterator[Any]) -> None:
    """Take the rest, letting go of each."""
    for batch in batches:
        batch.add_(0.5)


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda t: t,
    "in a list": lambda t: [t][0],
    "a slice of a slice": lambda t: t[2:][3:9],
    "one element": lambda t: t[-1],
    "data": lambda t: t.data[1:3],
    "detached": lambda t: t.detach(),
    "an array": lambda t: t.numpy(),
    "an array of another class": lambda t: t.numpy()[3:].view(np.matrix),
    "a memoryview": lambda t: memoryview(t.numpy()).cast("B"),
    "an array over a memoryview": lambda t: np.frombuffer(memoryview(t.numpy()), np.float32)[1:],
    "a tensor over an array": lambda t: torch.from_numpy(t.numpy()[2:]),
    "another type": lambda t: t.view(torch.int32),
    "as_strided": lambda t: torch.as_strided(t, (2, 3), (3, 1), 1),
    "expanded": lambda t: t[:1].expand(7),
    "a parameter": lambda t: torch.nn.Parameter(t),
    "its storage": lambda t: t.untyped_storage(),
    "dlpack": lambda t: np.from_dlpack(t),
    "split": lambda t: t.split(5)[2],
    "an iterator over it": lambda t: list(t)[7],
}


def _bytes(view: Any) -> bytes:
    if isinstance(view, torch.UntypedStorage):
        view = torch.empty(0, dtype=torch.uint8).set_(view)
    if isinstance(view, torch.Tensor):
        view = view.detach().contiguous().numpy()
    return bytes(view)


@pytest.mark.parametrize("floats", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("how", VIEWS)
def test_a_view_stays_as_it_is_when_later_batches_arrive(how, floats):
    """Its cell is leased while the view lives, however little of the batch it is."""
    batches = _batches(floats)
    kept = VIEWS[how](next(batches))
    before = _bytes(kept)

    _go_on(batches)

    assert _bytes(kept) == before
    assert set(np.frombuffer(before, np.float32)) == {1.0}


def test_a_view_outlives_its_loader():
    """And is still right when another loader has used much memory since."""
    batches = _batches(LARGE)
    kept = next(batches)[5:10]
    _go_on(batches)
    del batches
    gc.collect()
    _go_on(_batches(LARGE))

    assert kept.tolist() == [1.0] * 5
    assert len(mapped_cells()) == 1
    del kept
    assert len(mapped_cells()) == 0


def test_kept_batches_keep_what_is_written_to_them():
    """list(loader), then all of it changed in place."""
    kept = list(_batches(LARGE, 60))
    for batch in kept[::2]:
        batch.neg_()

    expected = [-(i + 1.0) if i % 2 == 0 else i + 1.0 for i in range(60)]
    assert [(float(b.min()), float(b.max())) for b in kept] == [(value, value) for value in expected]


RESIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "smaller": lambda t: t.resize_(3),
    "to nothing": lambda t: t.resize_(0),
    "much larger": lambda t: t.resize_(5_000_000),
    "a little larger": lambda t: t.resize_(len(t) + 1),
    "its storage to nothing": lambda t: t.untyped_storage().resize_(0),
    "its storage larger": lambda t: t.untyped_storage().resize_(40_000_000),
    "its storage smaller": lambda t: t.untyped_storage().resize_(8),
    "set to another": lambda t: t.set_(torch.zeros(7)),
    "swapped": lambda t: setattr(t, "data", torch.zeros(3)),
}


@pytest.mark.parametrize("floats", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("how", RESIZES)
def test_resizing_a_batch_raises_or_leaves_others_unchanged(how, floats):
    """Neither a batch that is in hand nor one to come."""
    batches = _batches(floats)
    other = next(batches)
    batch = next(batches)
    with contextlib.suppress(RuntimeError):
        RESIZES[how](batch)
    if batch.numel() and batch.untyped_storage().nbytes() >= batch.nbytes:
        batch.fill_(-1)
    rest = [(float(later.min()), float(later.max())) for later in batches]

    assert rest == [(i + 1.0, i + 1.0) for i in range(2, MORE)]
    assert set(other.tolist()) == {1.0}


@pytest.mark.parametrize("floats", [SMALL, LARGE], ids=["small", "large"])
def test_a_saved_batch_takes_its_own_size(floats):
    """torch.save writes the tensor, not the cell that it lies in."""
    samples = [[torch.full((floats,), 1.0), torch.full((3 * floats,), 2.0)]]
    loader = OURS(batch_values.ReadySamples(*samples), batch_size=None, collate_fn=batch_values.as_is, num_workers=1)
    one, _ = next(iter(loader))
    sizes = []
    for tensor in (one, one.clone()):
        file = io.BytesIO()
        torch.save(tensor, file)
        sizes.append(len(file.getvalue()))
        file.seek(0)
        assert torch.equal(torch.load(file), one)

    assert sizes[0] == sizes[1]


# ---------------------------------------------------------------- other processes


@pytest.fixture
def _no_thread_of_torchs() -> Iterator[None]:
    """torch sends descriptors through a thread of multiprocessing's, which then stays."""
    yield
    resource_sharer.stop(timeout=5)


def _echo(inbox: Any, go: Any, outbox: Any) -> None:
    thing = inbox.get()
    outbox.put("have it")
    go.wait(60)
    outbox.put((float(thing.min()), float(thing.max())))


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor": lambda t: t,
    "a slice": lambda t: t[3:11],
    "an array": lambda t: t.numpy(),
    "a tensor in shared memory": lambda t: t.share_memory_(),
}


@pytest.mark.usefixtures("_no_thread_of_torchs")
@pytest.mark.parametrize("module", [multiprocessing, torch.multiprocessing], ids=["multiprocessing", "torch's"])
@pytest.mark.parametrize("how", WAYS)
def test_a_batch_sent_on_to_another_process_stays_as_it_is(how, module):
    """Pickled, or by torch's shared memory: the receiver's is not the cell."""
    context = module.get_context("fork")
    inbox, outbox, go = context.Queue(), context.Queue(), context.Event()
    receiver = context.Process(target=_echo, args=(inbox, go, outbox))
    receiver.start()
    try:
        batches = _batches(LARGE)
        inbox.put(WAYS[how](next(batches)))
        assert outbox.get(timeout=60) == "have it"
        _go_on(batches)
        go.set()

        assert outbox.get(timeout=60) == (1.0, 1.0)
    finally:
        go.set()
        receiver.join(30)
        receiver.close()
        for queue in (inbox, outbox):
            queue.close()
            queue.join_thread()


@pytest.mark.parametrize("floats", [SMALL, LARGE], ids=["small", "large"])
def test_a_batch_in_shared_memory_stays_as_it_is(floats):
    """share_memory_ moves it out of its cell."""
    batches = _batches(floats)
    kept = next(batches).share_memory_()

    _go_on(batches)

    assert set(kept.tolist()) == {1.0}
    assert len(mapped_cells()) == 0


@pytest.mark.parametrize("floats", [SMALL, LARGE], ids=["small", "large"])
def test_a_fork_of_the_trainer_goes_on_seeing_the_batch_that_was_in_hand(floats):
    """Also when the trainer has let go of it, and nobody can ask the fork whether it has."""
    batches = _batches(floats)
    batch = next(batches)
    come, gone = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(come[0], 1)
            os.write(gone[1], f"{float(batch.min())} {float(batch.max())}".encode())
        finally:
            os._exit(0)
    del batch
    _go_on(batches)
    os.write(come[1], b"!")
    seen = os.read(gone[0], 100)
    os.waitpid(pid, 0)
    for fd in (*come, *gone):
        os.close(fd)

    assert seen == b"1.0 1.0"


def test_cells_are_used_again_after_a_fork():
    """Only what was in hand at the fork is set aside."""
    seen: set[int] = set()
    for number, batch in enumerate(_batches(LARGE, 60)):
        if number == 10:
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        seen |= mapped_cells().inodes
        assert float(batch[0]) == number + 1

    assert len(seen) <= 8


# ---------------------------------------------------------------- many, and changed


def test_ten_thousand_batches_are_kept_with_256_descriptors():
    """list(loader): no descriptor per batch, of which 3,000 are in cells."""
    done = run_program("keep_everything.py")

    assert (done.returncode, done.stdout) == (0, "10000 batches, all as they were made\n"), done.stderr


KINDS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda floats: torch.ones(floats),
    "array": lambda floats: np.ones(floats, np.float32),
    "dict": lambda floats: {"a": torch.ones(floats), "b": np.ones(floats)},
}


def _add_one(batch: Any) -> float:
    """Change a batch in place; the least and the most of it must have been one."""
    if isinstance(batch, dict):
        return sum(_add_one(part) for part in batch.values()) / 2
    mean = float(batch.min() + batch.max()) / 2
    batch += 1
    return mean


@pytest.mark.parametrize("collate_fn", [batch_values.as_is, None], ids=["as it is", "default_convert"])
@pytest.mark.parametrize("floats", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", KINDS)
def test_writing_to_a_batch_changes_nothing_else(kind, floats, collate_fn):
    """Not the next batches, not what the dataset holds in the worker, not the trainer's."""
    sample = KINDS[kind](floats)
    loader = OURS(
        batch_values.ReadySamples(*[sample] * 12),
        batch_size=None,
        collate_fn=collate_fn,
        num_workers=1,
        persistent_workers=True,
    )

    means = [_add_one(batch) for _ in range(2) for batch in loader]

    assert means == [1.0] * 24
    assert _add_one(sample) == 1.0


@pytest.mark.parametrize("floats", [SMALL, LARGE], ids=["small", "large"])
def test_writing_to_a_collated_batch_changes_nothing_else(floats):
    """default_collate stacks into the cell, out of what the dataset holds."""
    loader = OURS(
        batch_values.ReadySamples(*[torch.ones(floats)] * 24), batch_size=2, num_workers=1, persistent_workers=True
    )

    assert [_add_one(batch) for _ in range(2) for batch in loader] == [1.0] * 24
