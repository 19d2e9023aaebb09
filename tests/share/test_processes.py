"""Every worker reads what was shared where it lies, under each start method, and nothing of it is left by the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch

import outlive
from outlive import share
from outlive._system import choice
from outlive.testing.leaks import POLL_S, Patience
from share.datasets import Everything, Texts, Unpickling, digest, one_of_each, texts
from share.threading_datasets import ThreadedTexts

METHODS = ("fork", "spawn", "forkserver")
LOADERS = {"outlive": outlive.DataLoader, "torch": torch.utils.data.DataLoader}
MANY = 300_000
PROGRAM = Path(__file__).with_name("programs") / "reader.py"
GONE_WITHIN_S = 2.5  # seconds in which they have CPUs


def private_bytes(pid: int) -> int:
    """Memory that no other process has a part in."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def descendants() -> set[int]:
    """All descendants but the standard library's own, which live as long as the interpreter."""
    forkserver = sys.modules.get("multiprocessing.forkserver")
    server = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    found = [process for process in psutil.Process().children(recursive=True) if process.pid != server]
    return {process.pid for process in found if "resource_tracker import main" not in " ".join(process.cmdline())}


def cost_of_an_epoch(kind: Any, method: str, names: Any) -> int:
    """Private memory of all workers, and of the zygote, after they have read every text in a random order.

    A short list is read in as many batches as a long one, because a worker that has worked has memory of its own.
    """
    order = [number % len(names) for number in torch.randperm(MANY).tolist()]
    digests = list(map(digest, names))
    others = descendants()
    loader = kind(
        Texts(names),
        batch_size=3000,
        sampler=order,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    total = sum(int(batch.sum()) for batch in loader)
    assert total == sum(map(digests.__getitem__, order))
    workers = descendants() - others
    assert len(workers) >= 2
    cost = sum(map(private_bytes, workers))
    loader._iterator._shutdown_workers()  # torch's loader has no close()
    return cost


@pytest.mark.alone
@pytest.mark.skipif(choice.PORTABLE, reason="the loader has other processes there")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", LOADERS)
def test_reading_all_of_a_shared_list_costs_workers_nothing(kind, method):
    """Against the same with a short list: less than 15 % of one copy for both workers, where plain ones cost two."""
    names = texts(MANY)
    one_copy = sum(map(sys.getsizeof, names)) + sys.getsizeof(names)
    short = cost_of_an_epoch(LOADERS[kind], method, share(texts(3000)))
    plain = cost_of_an_epoch(LOADERS[kind], method, names)
    shared = cost_of_an_epoch(LOADERS[kind], method, share(names))

    assert shared - short < 0.15 * one_copy
    assert plain - short > 0.7 * one_copy


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", LOADERS)
def test_everything_that_was_shared_is_read_by_workers(kind, method):
    """Each kind of thing, by handle, as it is read here."""
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    shared = {name: share(value) for name, value in one_of_each().items()}
    shared["slice"] = shared["slice"][100:300:7]
    dataset = Everything(shared)
    loader = LOADERS[kind](
        dataset, batch_size=None, num_workers=2, multiprocessing_context=method, collate_fn=_as_it_is
    )

    assert list(loader) == [dataset[index] for index in range(len(dataset))]


def _as_it_is(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [Texts, Unpickling, ThreadedTexts])
def test_a_worker_that_is_replaced_finds_the_data(tmp_path, method, kind):
    """Forked from a zygote that has it, unpickling after its fork, or in an interpreter of its own."""
    names = texts(500)
    dataset = kind(share(names), kill_at=222, mark=tmp_path / "killed")
    loader = outlive.DataLoader(dataset, batch_size=25, num_workers=2, multiprocessing_context=method)

    assert torch.cat(list(loader)).tolist() == list(map(digest, names))
    assert loader.statistics().restarts == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_is_started_gets_the_data_while_another_lets_go_of_it(method):
    """The child has a handle of its own from the start."""
    context = torch.multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, share(texts(1000)), share(numpy.arange(1000))), daemon=True)
    process.start()
    theirs.close()

    assert ours.recv() == "ready"  # it has unpickled, and nobody here has the data any more
    ours.send(700)
    assert ours.recv() == (texts(1000)[700], 700)
    process.join(30)
    assert process.exitcode == 0
    ours.close()
    process.close()


def _answer(connection: Any, names: Any, numbers: Any) -> None:
    connection.send("ready")
    index = connection.recv()
    connection.send((names[index], int(numbers[index])))


def test_what_a_worker_shared_can_be_read_here():
    """Through a queue, while that worker lives."""
    context = torch.multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_share_there, args=(theirs,), daemon=True)
    process.start()
    theirs.close()

    assert ours.recv() == ["a", "b"]
    ours.send("thank you")
    process.join(30)
    ours.close()
    process.close()


def _share_there(connection: Any) -> None:
    shared = share(["a", "b"])
    connection.send(shared)
    connection.recv()


# ---------------------------------------------------------------- ends


def gone(left: Callable[[], Any], pids: Callable[[], Iterable[int]]) -> bool:
    """Whether what is looked for is gone before these processes, who may be at it, have had their time."""
    patience = Patience(GONE_WITHIN_S)
    while left():
        if patience.is_over(pids()):
            return False
        time.sleep(POLL_S)  # between two looks, with a deadline
    return True


@pytest.mark.parametrize("system", ["", "portable"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("whom", ["trainer", "all"])
def test_nothing_is_left_when_its_users_are_killed(tmp_path, system, method, whom):
    """No name, and nobody who holds the memory: it has gone with the last of them."""
    tag = uuid.uuid4().hex
    environment = {**os.environ, "OUTLIVE_TEST_TAG": tag, "OUTLIVE_SYSTEM": system}
    with (tmp_path / "stderr").open("w") as stderr:
        trainer = subprocess.Popen(
            [sys.executable, str(PROGRAM), method],
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    assert trainer.stdout is not None
    assert trainer.stdin is not None
    assert trainer.stdout.readline() == b"ready\n", (tmp_path / "stderr").read_text()
    assert len(holders(tag)) >= 2  # of the portable layer, a worker may still be starting
    assert len(names_of(trainer.pid)) == (1 if system == "portable" else 0)
    if whom == "all":
        for pid in holders(tag) - {trainer.pid}:
            with_suppressed_kill(pid)
    trainer.kill()
    trainer.wait(10)
    trainer.stdin.close()
    trainer.stdout.close()

    assert gone(lambda: names_of(trainer.pid), lambda: living(tag)), names_of(trainer.pid)
    assert gone(lambda: living(tag), lambda: living(tag)), living(tag)
    # The black box of a worker that was just being started is another matter, and not this test's.
    boxes = [name for name in os.listdir("/dev/shm") if name.startswith(f"outlive-{trainer.pid}-")]
    assert all(name.endswith("b") for name in boxes), boxes
    for name in boxes:
        os.unlink(f"/dev/shm/{name}")


def with_suppressed_kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it went with one that was killed before it


def names_of(pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"outlive-{pid}-") and name.endswith("s")]


def living(tag: str) -> set[int]:
    """Processes of that job, the dead that nobody has reaped left out."""
    mark = f"OUTLIVE_TEST_TAG={tag}".encode()
    found = set()
    for pid in psutil.pids():
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
        except OSError:
            pass  # gone, or not ours to look at
    return found


def holders(tag: str) -> set[int]:
    """Those of them which have the memory mapped."""
    found = set()
    for pid in living(tag):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # it has gone since
        if "outlive-share" in maps or "/dev/shm/outlive-" in maps:
            found.add(pid)
    return found


@pytest.mark.skipif(not choice.PORTABLE, reason="there are no names else")
def test_a_name_goes_with_the_data_on_the_portable_layer():
    """Here, and not in a fork that lets go of its copy."""
    shared = share(["a"])
    assert len(names_of(os.getpid())) == 1
    pid = os.fork()
    if pid == 0:
        del shared
        os._exit(0)
    os.waitpid(pid, 0)

    assert len(names_of(os.getpid())) == 1
    assert shared == ["a"]
    del shared
    assert names_of(os.getpid()) == []
