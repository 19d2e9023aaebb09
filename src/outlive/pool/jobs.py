"""What a worker does for a pool: run its initializer, then tasks.

Reads   chunks of tasks.
Writes  their results, through its desk; what it is doing, to the black box.
Never   lets what one task raises, or returns, touch another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import pickle
import random
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outlive._capture.blackbox import POSITION, SINCE
from outlive._fleet.policy import pause_s
from outlive._transport.wire import SendingFailedError
from outlive._worker import failures, threads
from outlive._worker.loop import Desk, Restored
from outlive.incident import Decision, Stage
from outlive.limits import NO_LIMITS, Limits
from outlive.pool.failing import Raised, UnpicklableResultError, UnreadableTaskError
from outlive.pool.parcels import PLAIN, Apart, Message, are_plain, dumps
from outlive.pool.work import Sent, Shared
from outlive.settings import FaultPolicy

_MOST_FUNCTIONS = 256
_LONG_NS = 20_000_000  # a chunk that has taken so long hands back what it has not begun: others may have time


@dataclass
class Results:
    """What comes back of a chunk."""

    done: list[Sequence[int]] = field(default_factory=list)  # positions, in the order of `values`
    values: list[Any] = field(default_factory=list)
    raised: dict[int, Raised] = field(default_factory=dict)
    rest: list[int] = field(default_factory=list)  # not begun: the others took long
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return len(self.values) + len(self.raised)

    def fit(self, size: int) -> bool:
        """Whether these can be the results of a chunk of this size."""
        positions = [*self.done, self.raised, self.rest]
        return (
            sum(map(len, self.done)) == len(self.values)
            and all(type(p) is int for some in positions for p in some)
            and all(0 <= min(some) and max(some) < size for some in positions if some)
            and all(type(raised) is Raised for raised in self.raised.values())
            and 0 <= self.seconds < math.inf
        )


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
    may_end: bool = False
    threads: int | None = 1

    def prepare(self, desk: Desk, slot: int, restored: Restored) -> None:
        self.desk = desk
        desk.randomness = _NoRandomness()  # type: ignore[assignment]
        self._functions: dict[Sent, Callable[..., Any]] = {}
        _seed_apart()
        if self.threads is not None:
            threads.limit(self.threads)
        if self.initializer is not None:
            initialize = self.initializer
            initialize = pickle.loads(initialize) if isinstance(initialize, bytes) else initialize
            try:
                initialize(*self.initargs)
            except Exception:  # where concurrent.futures says it; the pool's own error has it, too
                logging.getLogger("concurrent.futures").critical("Exception in initializer:", exc_info=True)
                raise

    @property
    def _keep(self) -> bool:
        """Whether a task may get its arguments a second time here."""
        return bool(self.policy.retry_on) and self.policy.retries > 0

    def __getstate__(self) -> dict[str, Any]:
        """For spawn: the function by value where it must be; its arguments may be locks and queues, as at any start."""
        state = dict(self.__dict__)
        with contextlib.suppress(Exception):  # then as it is, and whoever starts the process says why not
            state["initializer"] = None if self.initializer is None else dumps(self.initializer)
        return state

    def begin_epoch(self, note: Any) -> bytes:
        return b""

    def next_epoch(self, place: bytes | None) -> tuple[bytes | None, bytes | None, bool]:
        return None, None, False

    def run(self, seq: int, body: memoryview, probe: bool) -> None:
        message = Message(body)
        functions, segments, together, hands_back = message.head
        results = Results()
        self.desk.box.enter(Stage.FETCHING, seq)
        begun = time.monotonic_ns()
        until = begun + _LONG_NS if hands_back else sys.maxsize
        first = 0
        for function, positions, apart, rows in segments:
            blobs = range(first, first + len(positions)) if apart else range(first, first + 1)
            first = blobs.stop
            arguments = _Apart(message, blobs, self._keep) if apart else _Together(message, blobs[0], rows, self._keep)
            self._run_segment(seq, Sent(*functions[function]), positions, arguments, results, until)
        results.seconds = (time.monotonic_ns() - begun) / 1e9
        self._send(seq, results, probe, together)

    def _run_segment(
        self,
        seq: int,
        function: Sent,
        positions: Sequence[int],
        given: _Apart | _Together,
        results: Results,
        until: int,
    ) -> None:
        if results.rest:
            results.rest.extend(positions)
            return
        words, clock = self.desk.box.words, time.monotonic_ns
        words[POSITION] = positions[0]
        words[SINCE] = clock()
        failed = len(results.raised)
        try:
            call, arguments = given.calls(self._functions.get(function) or self._load(function))
        except BaseException as error:
            for position in positions:
                self._note(_unreadable(error), position, results, Stage.FETCHING)
            return
        add = results.values.append
        tasks = zip(positions, arguments)
        position = positions[0]
        while True:
            try:
                for position, argument in tasks:
                    words[POSITION] = position
                    words[SINCE] = now = clock()
                    if now > until and results.count:
                        results.rest += [position, *(position for position, _ in tasks)]
                        break
                    add(call(argument))
                break
            except BaseException as error:  # and on with the next one
                again = functools.partial(given.call_again, _Fresh(function), list(positions).index(position))
                self._failed(error, seq, position, results, again)
        if results.rest or len(results.raised) > failed:
            left_out = {*results.rest, *results.raised}
            positions = [position for position in positions if position not in left_out]
        if positions:
            results.done.append(positions)

    def _load(self, function: Sent) -> Callable[..., Any]:
        if len(self._functions) >= _MOST_FUNCTIONS:
            self._functions.clear()
        held = self.desk.box.in_hand()
        # Its module may have much to import, in every fresh worker: that is no part of what a task may take.
        self.desk.box.enter(Stage.AT_WORK, held.batch, held.position)
        try:
            call: Any = pickle.loads(function.pickled)
            if type(call) is Shared:
                call = pickle.loads(call.pickled)
            elif _has_state(function, call):
                call = _Fresh(function)
        finally:
            self.desk.box.enter(Stage.FETCHING, held.batch, held.position)
        self._functions[function] = call
        return call  # type: ignore[no-any-return]

    def _failed(
        self, error: BaseException, seq: int, position: int, results: Results, again: Callable[[], Any]
    ) -> None:
        """Try again where the policy says so; else the error is the task's outcome."""
        policy, attempt = self.policy, 1
        while isinstance(error, policy.retry_on) and attempt <= policy.retries:
            failure = failures.capture(error, Stage.FETCHING, position)
            self.desk.box.enter(Stage.WAITING, seq, position)
            self.desk.tell_retry(seq, replace(failure, attempts=attempt, decision=Decision.RETRY))
            time.sleep(pause_s(policy, attempt, hash((seq, position)) & 0xFFFF))
            attempt += 1
            self.desk.box.enter(Stage.FETCHING, seq, position)
            try:
                value = again()
            except BaseException as another:
                error = another
            else:
                results.values.append(value)
                return
        if self.desk.allowance is not None:
            self.desk.allowance.stop_if_refused(error)
        self._note(error, position, results, Stage.FETCHING, attempt)

    def _note(self, error: BaseException, position: int, results: Results, stage: Stage, attempt: int = 1) -> None:
        failure = failures.capture(error, stage, position)
        self.desk.dealt_with.append(replace(failure, attempts=attempt, decision=Decision.SKIP, culprits=(position,)))
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        results.raised[position] = Raised(error, text, dumps)

    def _send(self, seq: int, results: Results, probe: bool, together: bool) -> None:
        box = self.desk.box
        box.finished()
        box.enter(Stage.SENDING, seq, results.done[0][0] if len(results.values) == 1 else -1)
        send = self.desk.can_pack if probe else lambda packed: self.desk.send_batch(seq, packed)
        values = results.values
        try:
            if len(values) > 1 and not together and not are_plain(values):
                results.values = [value if type(value) in PLAIN else Apart.of(value) for value in values]
            send(results)
            return
        except SendingFailedError:
            raise
        except BaseException:  # whatever pickling raises: one result is to blame
            if box.in_hand().stage is Stage.DELIVERING:
                raise  # half of it may be on its way
            self.desk.arena.begin()
        positions = [position for some in results.done for position in some]
        results.values = [self._sendable(value, position, results) for position, value in zip(positions, values)]
        results.values = [value for p, value in zip(positions, results.values) if p not in results.raised]
        results.done = [[position for position in positions if position not in results.raised]]
        send(results)

    def _sendable(self, value: Any, position: int, results: Results) -> Any:
        """The value as it can travel; where it cannot at all, that is its task's error."""
        try:
            if type(value) in PLAIN:
                return value
            apart = Apart.of(value)
            self.desk.can_pack(apart)
            return apart
        except SendingFailedError:
            raise
        except BaseException as error:
            if self.desk.allowance is not None:
                self.desk.allowance.stop_if_refused(error)
            if not isinstance(error, Exception):
                self._note(error, position, results, Stage.SENDING)
                return None
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            told = UnpicklableResultError(
                f"the task returned a {kind}, which cannot be pickled: {failures.text_of(error)}"
            )
            told.__cause__ = error
            self._note(told, position, results, Stage.SENDING)
            return None
        finally:
            self.desk.arena.begin()


def _has_state(function: Sent, call: Any) -> bool:
    """Whether it brings data that a task can change: a method its object, a partial its arguments.

    What is found by name has none, and what is defined in `__main__` has globals, which last as long as the worker. So
    does, of a whole `map`, what a closure or a large function brings: it may take long to load.
    """
    if isinstance(call, types.FunctionType):
        return not function.mapped and call.__closure__ is not None
    return not isinstance(call, type) and pickle.loads(function.pickled) is not call


class _Fresh:
    """A function that is loaded for each call: it is called as it was given, whatever was done to it before."""

    def __init__(self, function: Sent) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = pickle.loads(self._function.pickled)
        return (pickle.loads(call.pickled) if type(call) is Shared else call)(*args, **kwargs)


_Calls = tuple[Callable[[Any], Any], Iterable[Any]]  # a function of one argument, and what to give it, row by row


class _Apart:
    """Arguments with a pickle for each row: one that cannot be read is its own task's error."""

    def __init__(self, message: Message, blobs: range, keep: bool) -> None:
        self._message, self._blobs, self._keep = message, blobs, keep

    def calls(self, function: Callable[..., Any]) -> _Calls:
        return functools.partial(self._call, function), self._blobs

    def call_again(self, function: Callable[..., Any], number: int) -> Any:
        return self._call(function, self._blobs[number])

    def _call(self, function: Callable[..., Any], blob: int) -> Any:
        try:
            row, kwargs = self._message.load(blob, keep=self._keep)
        except BaseException as error:
            raise _unreadable(error) from error
        return function(*row, **kwargs)


class _Together:
    """Arguments with one pickle for all rows, which may have objects in common."""

    def __init__(self, message: Message, blob: int, rows: list[int] | None, keep: bool) -> None:
        self._message, self._blob, self._rows, self._keep = message, blob, rows, keep

    def calls(self, function: Callable[..., Any]) -> _Calls:
        columns = self._message.load(self._blob, keep=self._keep)[0]
        if self._rows is not None:
            columns = [[column[row] for row in self._rows] for column in columns]
        if len(columns) == 1:
            return function, columns[0]
        if not columns:
            return lambda _: function(), itertools.repeat(None)
        return lambda row: function(*row), zip(*columns)

    def call_again(self, function: Callable[..., Any], number: int) -> Any:
        call, arguments = self.calls(function)
        return call(next(itertools.islice(arguments, number, None)))


def _unreadable(error: BaseException) -> UnreadableTaskError:
    what = f"{type(error).__name__}: {failures.text_of(error)}"
    told = UnreadableTaskError(f"a worker could not unpickle this task: {what}")
    told.__cause__ = error
    return told


def _seed_apart() -> None:
    """Workers are forks of one process: without this, all would draw the same random numbers."""
    seed = int.from_bytes(os.urandom(8), "little") >> 1
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
