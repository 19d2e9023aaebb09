"""Handing out: which index is drawn next, and whose batch it is.

Reads   the sampler; how many batches each slot has.
Writes  tasks to the runner.
Never   loses an index that was drawn: an interrupt in between is known, and said; a sampler's error waits until the
        batches drawn before it were delivered.
"""

from __future__ import annotations

from typing import Any

from outlive import records as r
from outlive._fleet.runner import Runner
from outlive._system.address_space import NoRoomError
from outlive.loader.door import Door
from outlive.loader.pacing import Pacing
from outlive.loader.resuming import Track


class HandsOut:
    """The part of a SupervisedIterator that draws; `_owed` says how many indices."""

    _runner: Runner
    _door: Door
    _track: Track
    _pacing: Pacing | None
    _sampler_iter: Any
    _worker_queue_idx_cycle: Any
    _workers_num_tasks: list[int]
    _workers_status: list[bool]
    _outstanding: dict[int, int]
    _num_workers: int
    _prefetch_factor: int
    _in_order: bool
    _stream: bool
    _send_idx: int
    _owed: int
    _hand: Any
    _agreement: Any
    _sampler_error: Exception | None = None

    def _draw_owed(self) -> None:
        """Draw as many indices as batches were booked; an interrupted one is drawn with the next call."""
        while self._owed and self._sampler_error is None:
            self._try_put_index()
            self._owed -= 1

    def _open(self, seq: int, payload: Any) -> Exception | None:
        """Open a batch, before anything is booked: when this is interrupted, or there is no room for it in this
        process, which is no fault of the batch, it comes with the next call. What makes it unreadable is returned."""
        try:
            self._hand = seq, self._agreement.given(payload.open())
        except NoRoomError:
            raise
        except Exception as error:
            return error
        return None

    def _raise_sampler_error(self) -> None:
        """Raise what the sampler raised, once. The next call draws again, as with num_workers=0."""
        error, self._sampler_error = self._sampler_error, None
        if error is None:
            return
        try:
            raise error
        finally:
            del error  # its traceback leads here: a cycle would keep the iterator

    def _try_put_index(self) -> None:
        # Until the machine knows of it: an interrupt in between would lose this index, and one inside a sampler that
        # is a generator ends it, and with it the epoch.
        self._runner.torn = True
        track = self._track
        planned = track.planned.popleft() if track.planned else None
        if planned is not None and planned.is_drawn:
            index = planned.index
        else:
            try:
                index = next(self._sampler_iter)
            except StopIteration:
                self._runner.torn = False
                track.exhausted = True
                return
            except Exception as error:
                self._runner.torn = False
                self._sampler_error = error
                return
            track.drawn += 1
        if planned is None or planned.slot is None:
            slot = self._choose_slot()
            if slot is None:
                self._runner.torn = False
                return
        else:
            slot = planned.slot
            self._workers_num_tasks[slot] += 1
        if planned is None:
            seq, self._send_idx = self._send_idx, self._send_idx + 1
        else:
            seq = planned.seq
        self._door.draw(seq, index)
        self._outstanding[seq] = slot
        door = self._door
        self._runner.tell(r.TaskSubmitted(seq, slot, door.size_of(seq), not self._stream, *door.known_bad(seq)))

    def _choose_slot(self) -> int | None:
        """Whose batch it is: the next one's in turn, as in torch; -1: whoever has time."""
        if self._pacing is not None:
            return -1
        most = self._prefetch_factor * self._num_workers
        for _ in range(self._num_workers):
            slot: int = next(self._worker_queue_idx_cycle)
            if self._workers_status[slot] and (
                self._in_order or self._workers_num_tasks[slot] < most // sum(self._workers_status)
            ):
                self._workers_num_tasks[slot] += 1
                self._track.next_slot = (slot + 1) % self._num_workers
                return slot
        return None
