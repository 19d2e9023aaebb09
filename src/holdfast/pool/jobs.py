"""What a worker does for a pool: run its initializer, then tasks.

Reads   chunks of tasks.
Writes  their results, through its desk; what it is doing, to the black box.
Never   lets what one task raises, or returns, touch another.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from holdfast._capture.blackbox import POSITION, SINCE
from holdfast._fleet.policy import pause_s
from holdfast._worker import failures
from holdfast._worker.loop import Desk, Restored
from holdfast.incident import Decision, Stage
from holdfast.limits import NO_LIMITS, Limits
from holdfast.pool.failing import Raised, UnpicklableResultError, UnreadableTaskError
from holdfast.pool.work import dumps
from holdfast.settings import FaultPolicy

_MOST_FUNCTIONS = 256


class ByValue:
    """A result of a class that only this worker has: a notebook's, say."""

    __slots__ = ("pickled",)

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.pickled,)


@dataclass
class Results:
    """What comes back of a chunk."""

    done: list[int]
    values: list[Any]
    raised: dict[int, Raised]
    seconds: float


class _NoRandomness:
    """A task's random numbers are its own affair."""

    def read(self) -> bytes:
        return b""

    def set(self, state: bytes) -> None: ...


@dataclass
class PoolJob:
    initializer: Any  # a function, pickled once it has travelled
    initargs: tuple[Any, ...]
    policy: FaultPolicy
    limits: Limits = NO_LIMITS
    can_skip: bool = False

    def prepare(self, desk: Desk, slot: int, restored: Restored) -> None:
        self.desk = desk
        desk.randomness = _NoRandomness()  # type: ignore[assignment]
        self._functions: dict[bytes, Callable[..., Any]] = {}
        _seed_apart()
        if self.initializer is not None:
            initialize = self.initializer
            initialize = pickle.loads(initialize) if isinstance(initialize, bytes) else initialize
            try:
                initialize(*self.initargs)
            except Exception:  # where concurrent.futures says it; the pool's own error has it, too
                logging.getLogger("concurrent.futures").critical("Exception in initializer:", exc_info=True)
                raise

    def __getstate__(self) -> dict[str, Any]:
        """For spawn: the function by value where it must be; its arguments may be locks and queues, as at any start."""
        state = dict(self.__dict__)
        with contextlib.suppress(Exception):  # then as it is, and whoever starts the process says why not
            state["initializer"] = None if self.initializer is None else dumps(self.initializer)
        return state

    def begin_epoch(self, note: Any) -> bytes:
        return b""

    def run(self, seq: int, body: memoryview, probe: bool) -> None:
        functions, segments = pickle.loads(body)
        results = Results([], [], {}, 0.0)
        box = self.desk.box
        box.enter(Stage.FETCHING, seq)
        begun = time.monotonic_ns()
        for which, positions, pickled in segments:
            self._run_segment(seq, functions[which], list(positions), pickled, results)
        results.seconds = (time.monotonic_ns() - begun) / 1e9
        self._send(seq, results, probe)

    def _run_segment(self, seq: int, function: bytes, positions: list[int], pickled: bytes, results: Results) -> None:
        words, clock = self.desk.box.words, time.monotonic_ns
        words[POSITION] = positions[0]
        words[SINCE] = clock()
        try:
            call = self._functions.get(function) or self._load(function)
            rows, kwargs = pickle.loads(pickled)
        except BaseException as error:
            told = UnreadableTaskError(f"a worker could not unpickle this task: {type(error).__name__}: {error}")
            told.__cause__ = error
            for position in positions:
                self._note(told, position, results, Stage.FETCHING)
            return
        add, mark = results.values.append, results.done.append
        tasks = zip(positions, rows)
        position, row = positions[0], rows[0]
        while True:
            try:
                for position, row in tasks:
                    words[POSITION] = position
                    words[SINCE] = clock()
                    add(call(*row, **kwargs))
                    mark(position)
                return
            except BaseException as error:  # and on with the next one
                self._failed(error, seq, position, results, functools.partial(call, *row, **kwargs))

    def _load(self, pickled: bytes) -> Callable[..., Any]:
        if len(self._functions) >= _MOST_FUNCTIONS:
            self._functions.clear()
        call: Callable[..., Any] = pickle.loads(pickled)
        self._functions[pickled] = call
        return call

    def _failed(
        self, error: BaseException, seq: int, position: int, results: Results, again: Callable[[], Any]
    ) -> None:
        """Try again where the policy says so; else the error is the task's outcome."""
        policy, attempt = self.policy, 1
        while isinstance(error, policy.retry_on) and attempt <= policy.retries:
            failure = failures.capture(error, Stage.FETCHING, position)
            self.desk.dealt_with.append(replace(failure, attempts=attempt, decision=Decision.RETRY))
            self.desk.box.enter(Stage.WAITING, seq, position)
            time.sleep(pause_s(policy, attempt, hash((seq, position)) & 0xFFFF))
            attempt += 1
            self.desk.box.enter(Stage.FETCHING, seq, position)
            try:
                value = again()
            except BaseException as another:
                error = another
            else:
                results.values.append(value)
                results.done.append(position)
                return
        if self.desk.allowance is not None:
            self.desk.allowance.stop_if_refused(error)
        self._note(error, position, results, Stage.FETCHING, attempt)

    def _note(self, error: BaseException, position: int, results: Results, stage: Stage, attempt: int = 1) -> None:
        failure = failures.capture(error, stage, position)
        self.desk.dealt_with.append(replace(failure, attempts=attempt, decision=Decision.SKIP, culprits=(position,)))
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        results.raised[position] = Raised(error, text, dumps)

    def _send(self, seq: int, results: Results, probe: bool) -> None:
        box = self.desk.box
        box.finished()
        box.enter(Stage.SENDING, seq, results.done[0] if len(results.done) == 1 else -1)
        send = self.desk.can_pack if probe else lambda packed: self.desk.send_batch(seq, packed)
        try:
            send(results)
            return
        except BaseException:  # whatever pickling raises: one result is to blame
            if box.in_hand().stage is Stage.DELIVERING:
                raise  # half of it may be on its way
            self.desk.arena.begin()
        for place, (position, value) in enumerate(list(zip(results.done, results.values))):
            results.values[place] = self._sendable(value, position, results)
        kept = [p for p in results.done if p not in results.raised]
        results.values = [v for p, v in zip(results.done, results.values) if p not in results.raised]
        results.done = kept
        send(results)

    def _sendable(self, value: Any, position: int, results: Results) -> Any:
        """The value as it can travel; where it cannot at all, that is its task's error."""
        try:
            self.desk.can_pack(value)
            return value
        except BaseException as error:
            problem = error
        finally:
            self.desk.arena.begin()
        if self.desk.allowance is not None:
            self.desk.allowance.stop_if_refused(problem)
        if not isinstance(problem, Exception):
            self._note(problem, position, results, Stage.SENDING)
            return None
        try:
            pickled = cloudpickle.dumps(value, 5)
            pickle.loads(pickled)
            return ByValue(pickled)
        except BaseException:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            told = UnpicklableResultError(f"the task returned a {kind}, which cannot be pickled: {problem}")
            told.__cause__ = problem
            self._note(told, position, results, Stage.SENDING)
            return None


def _seed_apart() -> None:
    """Workers are forks of one process: without this, all would draw the same random numbers."""
    seed = int.from_bytes(os.urandom(8), "little") >> 1
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
