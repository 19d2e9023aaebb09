"""Datasets whose samples come from somewhere: a folder that goes away, a server that refuses, files that are bad.

Reads   files, or a local TCP server; the global generators of torch, random and NumPy.
Writes  nothing.
Never   anything that a spawned worker could not import by name.

Samples from index GATED on wait until the test opens the gate: it has then taken the source away, and every worker has
such a sample before it.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

import outlive
from deadlines import Deadline, wait_until
from outlive import FaultPolicy, Incident, IncidentKind

SIZE, BATCH, WORKERS = 48, 4, 2
GATED = 18  # in the middle of a batch
DEADLINE_S = 60.0


def sample(text: str) -> torch.Tensor:
    return torch.tensor([float(text), torch.rand(1).item(), random.random(), numpy.random.random()])


def await_gate(gate: Path) -> None:
    deadline = Deadline(DEADLINE_S)
    while not gate.exists() and not deadline.passed:
        time.sleep(0.002)  # between two looks, with a deadline


class Files(Dataset[torch.Tensor]):
    """A file for each sample."""

    def __init__(self, home: Path, bad: tuple[int, ...] = ()) -> None:
        self.home = home
        self.bad = frozenset(bad)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.rand(1)
        if index >= GATED:
            await_gate(self.home / "gate")
        if index in self.bad:
            raise ValueError(f"sample {index} is no number")
        return sample((self.home / "folder" / str(index)).read_text())


class WaitsForReturn(Files):
    """Sample 21 waits until the folder is there: what failed before it did so while the folder was away."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == GATED + 3:
            await_gate(self.home / "folder")
        return super().__getitem__(index)


class FailsAfterReturn(Files):
    """Samples 20 and 21 need no folder. 22 and 23, the last of their batch, do, and 23 fails when it is there again."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in (GATED + 2, GATED + 3):
            await_gate(self.home / "gate")
            return sample(str(index))
        try:
            return super().__getitem__(index)
        except FileNotFoundError:
            if index == GATED + 5:
                await_gate(self.home / "folder")
            raise


class KeepsFolderOpen(Files):
    """Reads through a descriptor of the folder, opened once in each process: dead once the folder was removed."""

    descriptor = -1

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= GATED:
            await_gate(self.home / "gate")
        if self.descriptor < 0:
            self.descriptor = os.open(self.home / "folder", os.O_RDONLY)
        with open(os.open(str(index), os.O_RDONLY, dir_fd=self.descriptor)) as file:
            return sample(file.read())


class FilesAtOnce(Files):
    """A batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class HangsWhileAway(Files):
    """Without a gate. What was good before hangs while the folder is away."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.seen: set[int] = set()

    def __getitem__(self, index: int) -> torch.Tensor:
        folder = self.home / "folder"
        if index in self.seen and not folder.exists():
            time.sleep(3600)  # this is the hang
        value = sample((folder / str(index)).read_text())
        self.seen.add(index)
        return value


class ServerSamples(Files):
    """Samples from a server."""

    def __init__(self, home: Path, port: int) -> None:
        super().__init__(home)
        self.port = port

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.rand(1)
        if index >= GATED:
            await_gate(self.home / "gate")
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            connection.sendall(f"{index}\n".encode())
            return sample(connection.makefile().readline())


class _Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(self.rfile.readline())


class Server:
    """A real server that can go away and come back at the same port."""

    def __init__(self) -> None:
        self.port = 0
        self._server: socketserver.ThreadingTCPServer | None = None

    def start(self) -> None:
        socketserver.ThreadingTCPServer.allow_reuse_address = True
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", self.port), _Echo)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()


class SourceFolder:
    """The folder with all files in it, and its gate."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path / "folder"
        self.folder.mkdir()
        for index in range(SIZE):
            (self.folder / str(index)).write_text(str(index))

    def open_gate(self) -> None:
        (self.path / "gate").touch()

    def close_gate(self) -> None:
        (self.path / "gate").unlink()

    def take_away(self) -> None:
        os.rename(self.folder, self.path / "away")

    def replace_by_copy(self) -> None:
        """Away goes the folder, and a copy of it is what will come back."""
        shutil.copytree(self.folder, self.path / "away")
        shutil.rmtree(self.folder)

    def bring_back(self) -> None:
        os.rename(self.path / "away", self.folder)


def make_loader(dataset: Any, method: str | None, faults: Any = "skip", **options: Any) -> outlive.DataLoader[Any]:
    """`method`: None for num_workers=0."""
    generator = torch.Generator()
    generator.manual_seed(7)
    random.seed(7), torch.manual_seed(7), numpy.random.seed(7)
    if isinstance(faults, str):
        faults = policy(on_error=faults)
    workers = {"num_workers": WORKERS, "multiprocessing_context": method} if method else {}
    return outlive.DataLoader(
        dataset, **{"batch_size": BATCH, "generator": generator, **workers, **options}, faults=faults
    )


def policy(**settings: Any) -> FaultPolicy:
    return FaultPolicy(**{"backoff_s": 0.02, "backoff_max_s": 0.1, "breaker_patience": DEADLINE_S, **settings})


def all_wait(loader: outlive.DataLoader[Any], but: int = -1) -> bool:
    """Whether every worker (but one) waits for its source: none has a sample in hand that may yet fail."""
    slots = [slot for slot in loader.statistics().slots if slot.slot != but]
    return all(slot.doing == "waiting before a retry" for slot in slots)


def once_open(loader: list[Any], act: Callable[[], None]) -> Callable[[Incident], None]:
    """A listener that acts when the breaker opens, once all workers have met the outage."""

    def listen(incident: Incident) -> None:
        if incident.kind is IncidentKind.BREAKER and "opened" in incident.action:
            assert wait_until(lambda: all_wait(loader[0]), DEADLINE_S)
            act()

    return listen


def values(batch: torch.Tensor) -> list[list[float]]:
    return batch.tolist()


def breakers(loader: outlive.DataLoader[Any]) -> list[str]:
    return [incident.action for incident in loader.incidents if incident.kind is IncidentKind.BREAKER]
