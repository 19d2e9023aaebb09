"""What runs out, what is ignored, and who writes where he should not: nothing of it ends an epoch without a word."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import Dataset, IterableDataset

from deadlines import Deadline, wait_until
from outlive import DataLoader, FaultPolicy
from outlive.engines.local import zygote
from outlive.errors import OutliveError


class Plain(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


def flat(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch]


# ---------------------------------------------------------------- processes


class RefusedForks:
    """Refuses to fork in a zygote while a file is there. The limit itself does not bind root, as which CI runs."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign
        self.fork = os.fork

    def __call__(self) -> int:
        if self.sign.exists() and Path("/proc/self/comm").read_text().startswith("outlive-zygote"):
            (self.sign.parent / "refused").touch()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self.fork()


class DiesOnce(Plain):
    """At sample 9, the first time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> int:
        if index == 9 and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            (self.folder / "no forks").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_an_epoch_goes_on_when_no_process_can_be_started_for_a_while(tmp_path, monkeypatch):
    """The zygote tries again; the other workers do not even notice."""
    monkeypatch.setattr(zygote, "FORK_PATIENCE_S", 30.0)  # longer than the thread below takes on a busy machine
    monkeypatch.setattr(os, "fork", RefusedForks(tmp_path / "no forks"))
    loader = DataLoader(DiesOnce(tmp_path), batch_size=4, num_workers=2, multiprocessing_context="fork")

    def relent() -> None:
        deadline = Deadline(10)
        while not (tmp_path / "refused").exists() and not deadline.passed:
            time.sleep(0.005)  # between two looks, with a deadline
        (tmp_path / "no forks").unlink()

    iterator = iter(loader)
    thread = threading.Thread(target=relent)
    thread.start()

    assert flat(iterator) == list(range(24))
    thread.join()
    assert loader.statistics().restarts == 1


def test_the_error_says_what_to_do_when_no_process_can_be_started_at_all(tmp_path, monkeypatch):
    """After some tries, in words, and not as an endless loop."""
    monkeypatch.setattr(os, "fork", RefusedForks(tmp_path / "no forks"))
    loader = DataLoader(DiesOnce(tmp_path), batch_size=4, num_workers=2, multiprocessing_context="fork")

    with pytest.raises(OSError, match="no process can be started: raise the limit with `ulimit -u`"):
        flat(loader)


# ---------------------------------------------------------------- ignored signals


@pytest.fixture
def _ignored_children() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("_ignored_children")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_no_descriptor_is_left_when_the_trainer_ignores_sigchld(method):
    """The kernel reaps the zygote then, and multiprocessing never learns that it ended."""
    counts = []
    for _ in range(3):
        loader = DataLoader(Plain(), batch_size=4, num_workers=1, multiprocessing_context=method)
        assert flat(loader) == list(range(24))
        del loader
        counts.append(len(os.listdir("/proc/self/fd")))

    assert counts[1:] == counts[:1] * 2


# ---------------------------------------------------------------- a socket that is not his


class WritesToSockets(Plain):
    """Sample 6 writes to every socket of its process."""

    def __getitem__(self, index: int) -> int:
        if index == 6:
            for name in os.listdir("/proc/self/fd"):
                try:
                    if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                        os.write(int(name), b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 3)
                except OSError:
                    pass  # the folder's own descriptor is gone again, or a socket of another kind
        return index


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_sample_that_writes_to_our_socket_is_found(method):
    """It costs itself and nothing else, although no signal and no error tells which one it was."""
    loader = DataLoader(
        WritesToSockets(), batch_size=4, num_workers=2, multiprocessing_context=method, faults=FaultPolicy("skip")
    )

    assert flat(loader) == [n for n in range(24) if n != 6]
    assert set(loader.quarantine) == {6}
    assert "wrote to a socket of outlive's" in loader.quarantine[6].stack


# ---------------------------------------------------------------- interrupts


class InterruptedSampler:
    """Indices in order. Somebody presses Ctrl-C when so many were drawn: before they are returned, or after."""

    def __init__(self, at: int, *, generator: bool) -> None:
        self.at = at
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        if self.generator:
            return self._generate()
        self.next = iter(range(24))
        self.drawn = 0
        return self

    def _generate(self) -> Iterator[int]:
        for index in range(24):
            if index == self.at:
                raise KeyboardInterrupt
            yield index

    def __next__(self) -> int:
        self.drawn += 1
        if self.drawn == self.at:
            raise KeyboardInterrupt
        return next(self.next)


def go_on_after_interrupts(loader: Any) -> tuple[list[int], list[str]]:
    """What a consumer gets who catches Ctrl-C, and errors, and goes on with the same iterator."""
    iterator, got, raised = iter(loader), [], []
    for _ in range(60):
        try:
            got.append(int(next(iterator)))
        except StopIteration:
            break
        except (KeyboardInterrupt, OutliveError) as error:
            raised.append(str(error) or type(error).__name__)
    return got, raised


@pytest.mark.parametrize("generator", [True, False])
def test_an_interrupt_in_the_sampler_loses_nothing_silently(generator):
    """An index, or a generator's whole rest, may be gone: the iterator says so instead of ending early."""
    sampler = InterruptedSampler(15, generator=generator)
    loader = DataLoader(Plain(), batch_size=None, sampler=sampler, num_workers=2)

    got, raised = go_on_after_interrupts(loader)

    assert got == list(range(len(got)))
    assert raised[0] == "KeyboardInterrupt"
    assert "a batch may be missing; make a new one: iter(loader)" in raised[1]


@pytest.mark.parametrize("step", ["_draw_owed", "forget"])
def test_a_batch_comes_with_the_next_call_when_returning_it_is_interrupted(step, monkeypatch):
    """Between booking a batch and returning it, wherever the interrupt falls."""
    loader = DataLoader(Plain(), batch_size=None, num_workers=2)
    iterator = iter(loader)
    home = iterator if step == "_draw_owed" else iterator._door
    whole = getattr(home, step)
    calls = []

    def interrupted(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) % 3 == 1:
            raise KeyboardInterrupt
        whole(*arguments)

    monkeypatch.setattr(home, step, interrupted)
    loader._get_iterator = lambda: iterator
    got, raised = go_on_after_interrupts(loader)

    assert got == list(range(24))
    assert set(raised) == {"KeyboardInterrupt"}
    assert loader.statistics().delivered == 24


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize("stream", [False, True])
def test_workers_end_with_the_loop_when_the_traceback_is_kept(stream):
    """As a notebook does after «interrupt kernel»: its frames would keep the iterator, and that the workers."""
    before = set(psutil.Process().children(recursive=True))
    dataset = Endless() if stream else Plain()
    sampler = None if stream else InterruptedSampler(15, generator=False)
    loader = DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=2)

    try:
        for number in loader:
            if stream and number == 8:
                loader._latest()._runner.tell = interrupt
    except KeyboardInterrupt as error:
        kept = error

    assert wait_until(lambda: set(psutil.Process().children(recursive=True)) <= before)
    assert kept.__traceback__.tb_next is not None


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
