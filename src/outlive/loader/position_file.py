"""A loader's position on disk, for trainers that are themselves killed.

Reads   the file.
Writes  the file, whole or not at all.
Never   leaves a half-written position, whenever the trainer is killed; never unpickles what it reads: a line of JSON
        for each position, after a mark and a checksum.

The last three positions are in it. A trainer has its own checkpoint, and may be killed between the two: whichever of
them its checkpoint belongs to is there, if it is written as often as the positions are.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from outlive import errors
from outlive._system import safe_files
from outlive.loader.plain_values import from_plain, to_plain

KEPT = 3
_MAGIC = b"outlive position 2\n"
_SUM_BYTES = 4


class PositionFile:
    def __init__(self, path: str | os.PathLike[str], every: int) -> None:
        self.path = Path(path)
        self._every = every
        self._kept: list[tuple[int, int, bytes]] | None = None  # batches, epoch, its line; the newest last

    def is_due(self, batches: int) -> bool:
        return batches % self._every == 0

    def write(self, batches: int, epoch: int, state: dict[str, Any]) -> None:
        """Add the position before so many batches and one more, which is in this epoch."""
        if self._kept is None:
            self._kept = self._read()
        others = [kept for kept in self._kept if kept[0] < batches or (kept[0] == batches and kept[1] < epoch)]
        line = json.dumps([batches, epoch, to_plain(state, "state_dict()")]).encode("ascii")
        kept = [*others[1 - KEPT :], (batches, epoch, line)]
        self._replace(b"\n".join(line for _, _, line in kept))
        self._kept = kept

    def _replace(self, body: bytes) -> None:
        with safe_files.replacing(self.path) as file:
            file.write(_MAGIC + zlib.crc32(body).to_bytes(_SUM_BYTES, "little") + body)

    def load(self, batches: int | None, epoch: int | None) -> dict[str, Any] | None:
        """The newest position, or the one after so many batches, before a batch of this epoch; None: no file yet."""
        kept = self._read()
        if not kept:
            return None
        fitting = [p for p in kept if batches in (None, p[0]) and epoch in (None, p[1])]
        if not fitting:
            there = ", ".join(f"{b} batches (epoch {e})" for b, e, _ in kept)
            wanted = " and ".join(
                f"{value} {word}" for value, word in ((batches, "batches"), (epoch, "as epoch")) if value is not None
            )
            raise errors.PositionError(
                f"{self.path} has positions after {there}, none with {wanted}; write checkpoints at multiples of "
                f"journal_every, now {self._every}, and each before the next position is due"
            )
        self._kept = kept[: kept.index(fitting[-1]) + 1]  # what came after it will come again
        state: dict[str, Any] = self._decode(fitting[-1][2])[2]
        return state

    def _read(self) -> list[tuple[int, int, bytes]]:
        if self.path.exists() and not self.path.is_file():
            raise self._unreadable()  # a pipe would have us wait
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        head = len(_MAGIC) + _SUM_BYTES
        body = data[head:]
        if not data.startswith(_MAGIC) or zlib.crc32(body).to_bytes(_SUM_BYTES, "little") != data[len(_MAGIC) : head]:
            raise self._unreadable()
        return [(*self._decode(line)[:2], line) for line in body.split(b"\n")]

    def _decode(self, line: bytes) -> tuple[int, int, Any]:
        try:
            batches, epoch, told = json.loads(line)
            state = from_plain(told)
            if type(batches) is int and type(epoch) is int and state["batches"] == batches:
                return batches, epoch, state
        except (ValueError, TypeError, KeyError, RecursionError):
            pass  # said below
        raise self._unreadable()

    def _unreadable(self) -> errors.PositionError:
        return errors.PositionError(
            f"{self.path} is no position file of this version of outlive's, or it is damaged; "
            "give journal_position another path, or remove the file to begin from the start"
        )
