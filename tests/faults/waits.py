"""Waits that will end, and waits that never will: one for each sample of a dataset.

Reads   what the trainer holds for them: locks, queues, pipes, files.
Writes  nothing.
Never   ends by itself, unless the trainer lets it.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch.utils.data import Dataset

_fork = multiprocessing.get_context("fork")


class World:
    """What the trainer holds, and lets go of at the end."""

    def __init__(self, folder: Path) -> None:
        self.over = folder / "over"
        self.fifo, self.other_fifo, self.locked = folder / "a.fifo", folder / "b.fifo", folder / "locked"
        os.mkfifo(self.fifo)
        os.mkfifo(self.other_fifo)
        self.between_workers = _fork.Lock()
        self.of_a_dead_worker = _fork.Lock()
        self.of_trainer = _fork.RLock()
        self.of_trainer.acquire()
        self.turn = _fork.Lock()
        self.queue = _fork.Queue()
        self.event = _fork.Event()
        self.none_left = _fork.Semaphore(0)
        self.room = _fork.BoundedSemaphore(1)
        self.condition = _fork.Condition()
        self.notified = _fork.Value("i", 0)
        self.pipe = os.pipe()
        self.other_pipe = os.pipe()
        self.file = os.open(self.locked, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self.file, fcntl.LOCK_EX)
        self.listener = socket.create_server(("127.0.0.1", 0))

    def let_go(self, wrongly_ended: set[str]) -> None:
        """What is waited for rightly comes."""
        self.over.touch()
        self.of_trainer.release()
        self.turn.release()
        self.queue.put("an item")
        self.none_left.release()
        self.room.release()
        if not wrongly_ended:  # else these would wait for the dead to wake up
            self.event.set()
            with self.condition:
                self.notified.value = 1
                self.condition.notify_all()
        os.write(self.pipe[1], b"!")
        os.write(self.other_pipe[1], b"!")
        fcntl.flock(self.file, fcntl.LOCK_UN)
        self.connection, _ = self.listener.accept()
        self.connection.send(b"!")
        for fifo in (self.fifo, self.other_fifo):
            os.close(os.open(fifo, os.O_WRONLY))

    def close(self) -> None:
        for fd in (*self.pipe, *self.other_pipe, self.file):
            os.close(fd)
        self.queue.close()
        self.queue.join_thread()
        self.listener.close()
        if hasattr(self, "connection"):
            self.connection.close()


def wait_until_over(world: World) -> None:
    while not world.over.exists():
        time.sleep(0.02)  # between two looks, until the trainer ends it


# ---------------------------------------------------------------- right


def hold_lock_of_workers(world: World) -> None:
    with world.between_workers:
        wait_until_over(world)


def wait_for_lock_of_another_worker(world: World) -> None:
    while not world.between_workers._semlock._is_zero():  # until the other has it
        time.sleep(0.01)
    with world.between_workers:
        pass


def wait_for_lock_of_trainer(world: World) -> None:
    with world.of_trainer:
        pass


def wait_for_its_turn(world: World) -> None:
    """A lock as a gate: one process takes it, another opens it."""
    world.turn.acquire()
    world.turn.acquire()


def get_from_queue_of_trainer(world: World) -> None:
    world.queue.get()


def wait_for_event_of_trainer(world: World) -> None:
    world.event.wait()


def acquire_semaphore(world: World) -> None:
    world.none_left.acquire()


def wait_for_room(world: World) -> None:
    """As a full queue does: it took the room itself, and another process makes some."""
    world.room.acquire()
    world.room.acquire()


def wait_for_condition(world: World) -> None:
    with world.condition:
        world.condition.wait_for(lambda: world.notified.value)


def read_pipe(world: World) -> None:
    os.read(world.pipe[0], 1)


def receive(world: World) -> None:
    with socket.create_connection(world.listener.getsockname()) as connection:
        connection.recv(1)


def lock_file(world: World) -> None:
    with open(world.locked) as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def open_fifo(world: World) -> None:
    with open(world.fifo, "rb"):
        pass


def wait_for_program(world: World) -> None:
    subprocess.run(["cat", world.other_fifo], check=True)


def join_thread_that_reads(world: World) -> None:
    thread = threading.Thread(target=os.read, args=(world.other_pipe[0], 1))
    thread.start()
    thread.join()


def try_with_timeout(world: World) -> None:
    lock = threading.Lock()
    lock.acquire()
    while not world.over.exists():
        lock.acquire(timeout=0.5)


# ---------------------------------------------------------------- wrong


def lock_twice(world: World) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def lock_crosswise(world: World) -> None:
    a, b = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def take(first: threading.Lock, second: threading.Lock) -> None:
        with first:
            both.wait()
            second.acquire()

    thread = threading.Thread(target=take, args=(b, a), daemon=True)
    thread.start()
    take(a, b)


def get_from_own_queue(world: World) -> None:
    queue.Queue[int]().get()


def wait_for_own_event(world: World) -> None:
    threading.Event().wait()


def wait_for_own_future(world: World) -> None:
    executor = concurrent.futures.ThreadPoolExecutor(1)
    executor.submit(lambda: executor.submit(int).result()).result()


def wait_for_lock_of_the_dead(world: World) -> None:
    while not world.of_a_dead_worker._semlock._is_zero():  # until the other has it, who dies with it
        time.sleep(0.01)
    world.of_a_dead_worker.acquire()


def stop_self(world: World) -> None:
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)


def die_with_lock(world: World) -> None:
    world.of_a_dead_worker.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


RIGHT: tuple[Callable[[World], None], ...] = (
    *(hold_lock_of_workers, wait_for_lock_of_another_worker, wait_for_lock_of_trainer, wait_for_its_turn),
    *(get_from_queue_of_trainer, wait_for_event_of_trainer, acquire_semaphore, wait_for_room, wait_for_condition),
    *(read_pipe, receive, lock_file, open_fifo, wait_for_program, join_thread_that_reads, try_with_timeout),
)
WRONG: tuple[Callable[[World], None], ...] = (
    *(lock_twice, lock_crosswise, get_from_own_queue, wait_for_own_event, wait_for_own_future),
    *(wait_for_lock_of_the_dead, stop_self),
)


class Waiting(Dataset[int]):
    """A sample for each of these waits; what they wait for goes along to the workers."""

    def __init__(self, world: World, waits: tuple[Callable[[World], None], ...]) -> None:
        self.world = world
        self.waits = waits

    def __len__(self) -> int:
        return len(self.waits)

    def __getitem__(self, index: int) -> int:
        self.waits[index](self.world)
        return index
