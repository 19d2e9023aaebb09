"""Where a loader is, and going on from there.

Reads   the iterator that was made last, the sampler, the trainer's random state.
Writes  that random state, when a pass is begun again, and puts it back.
Never   anything per batch: whoever asks pays, the batches do not.

    state_dict ─► Bookmark.tell ─► position_of(iterator)          every slot after its last batch that was delivered
    iter(loader), after load_state_dict
      random state of the epoch's begin ─► sampler, seeds as then ─► slots set out ─► random state of now again

A pass that is over, or was not begun, is told as the random state of now: the next one begins with it.
"""

from __future__ import annotations

import copy
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from outlive._worker.randomness import Randomness
from outlive.engines.workers import Memory, Stand
from outlive.loader import drawing, epoch_state, epochs, generator_states, position

log = logging.getLogger("outlive")


class Begun(NamedTuple):
    """The trainer's randomness when a pass began."""

    random: bytes
    generators: dict[str, Any]  # by name, their states
    counters: dict[str, Any]  # of samplers, by name, as far as they have changed

    def told(self) -> dict[str, Any]:
        random = position.of_random(self.random)
        return {"random": random, "generators": self.generators, "counters": self.counters}


class Planned(NamedTuple):
    """A batch that was under way: drawn, and not delivered."""

    seq: int
    slot: int | None  # None: whose turn it is
    index: Any = None
    is_drawn: bool = False


class Bookmark:
    """A loader's, for all its passes. Its iterators hold it; it holds no loader, and nothing that has workers."""

    def __init__(self, loader: Any) -> None:
        self.pending: dict[str, Any] | None = None  # a position that the next pass begins with
        self.resumed: dict[str, Any] | None = None  # the same while that pass is being made
        self.file: Any = None  # where positions are written as batches are delivered
        self.ledger = loader._ledger
        self.parts: Any = None
        self._latest: Callable[[], Any] | None = None  # weakly, where it has workers
        self._mark: object = None
        self._kept: dict[str, Any] | None = None
        self._teller = position.LedgerTeller()
        self._counters: dict[str, Any] = {}  # of samplers, as they were at first
        self._randomness: Randomness | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None, "_mark": None, "_randomness": None, "parts": None}

    @property
    def randomness(self) -> Randomness:
        if self._randomness is None:
            self._randomness = Randomness()
        return self._randomness

    def know_samplers(self, loader: Any) -> None:
        """Once the loader has its samplers, and has not asked them yet."""
        self._counters = drawing.counters_of(loader)

    # ------------------------------------------------------------ a pass

    def look_at(self, loader: Any) -> Any:
        """What positions are about; the loader itself must be free to go."""
        self.parts = SimpleNamespace(
            dataset=loader.dataset,
            sampler=loader.sampler,
            batch_sampler=loader.batch_sampler,
            generator=loader.generator,
            batch_size=loader.batch_size,
            num_workers=loader.num_workers,
            persistent_workers=loader.persistent_workers,
            _sizing=loader._sizing,
        )
        return self.parts

    def set(self, loader: Any, told: dict[str, Any]) -> None:
        """Have the trainer's randomness be what it was when a pass began."""
        self.look_at(loader)
        self._set(told)

    def begin(self, loader: Any, iterator: Any, told: dict[str, Any] | None = None, is_set: bool = False) -> Begun:
        """A pass begins here, or as `told`; answers with the randomness that it begins with."""
        parts = self.look_at(loader)
        if told is not None:
            if "exhausted" in told["sampler"]:  # else it is between two epochs, and the sampler knows
                drawing.restore_sampler(parts, told["sampler"])
            if not is_set:
                self._set(told)
        begun = Begun(self.randomness.read(), self._generators(), self._changed_counters())
        self._kept = None
        self._latest = weakref.ref(iterator) if hasattr(iterator, "_engine") else lambda: iterator
        self._mark = iterator._mark = object()
        return begun

    def left(self, iterator: Any) -> None:
        """This iterator will be asked no more: keep where it was, if it was the last one."""
        if getattr(iterator, "_mark", None) is not self._mark:
            return
        try:
            self._kept = iterator.position()
        except Exception as error:  # a sampler that cannot be asked, an epoch that could not be begun: workers must go
            log.debug("the position of an iterator that was left is not known: %r", error)
        self._latest = None

    def delivered(self, iterator: Any) -> None:
        """A batch is about to be delivered."""
        if self.file is not None and self.file.is_due(self.ledger.delivered + 1):
            self._write(iterator, True)

    def ended(self, iterator: Any) -> None:
        """A pass is over."""
        if self.file is not None:
            self._write(iterator, False)

    def _write(self, iterator: Any, given: bool) -> None:
        try:
            state = self._state(iterator, given)
            self.file.write(state["batches"], state["epoch"], state)
        except Exception as error:  # a full disk, a sampler that cannot be asked: no reason to end the job
            log.warning("the position could not be written to %s: %r", self.file.path, error)

    # ------------------------------------------------------------ telling

    def tell(self, loader: Any) -> dict[str, Any]:
        if self.pending is not None:
            return copy.deepcopy(self.pending)
        self.look_at(loader)
        state = self._state(self._latest() if self._latest is not None else None, False)
        if "begun" in state and not state["num_workers"]:
            state["begun"]["random_now"] = position.of_random(self.randomness.read())
        return state

    def _state(self, iterator: Any, given: bool) -> dict[str, Any]:
        """`given`: the batch in hand counts as delivered."""
        parts, ledger = self.parts, self.ledger
        drawing.check_can_be_told(parts)
        middle = iterator.position(given) if iterator is not None else self._kept
        counts = iterator.counts() if iterator is not None else {}
        state = {**position.heading(parts), "ledger": self._teller.tell(ledger, counts)}
        state["ledger"]["delivered"] += given
        state["batches"] = state["ledger"]["delivered"]
        if middle is not None and "random" in middle:
            return {**state, "epoch": ledger.epoch, "begun": middle}
        state |= {
            "epoch": ledger.epoch + 1,
            "random": position.of_random(self.randomness.read()),
            "generators": self._generators(),
            "counters": self._changed_counters(),
            "sampler": drawing.tell_sampler(parts),
        }
        return state | (middle or {})

    def middle(self, begun: Begun) -> dict[str, Any]:
        """What every position in the middle of a pass has."""
        now = {"generators_now": self._generators(), "counters_now": self._changed_counters()}
        return {**begun.told(), **now}

    def _generators(self) -> dict[str, Any]:
        return {name: generator_states.get(g) for name, g in drawing.generators_of(self.parts).items()}

    def _changed_counters(self) -> dict[str, Any]:
        """Those that are not as they were when the loader was made: the rest is how the user has made the sampler."""
        unknown = object()
        now = drawing.counters_of(self.parts)
        return {name: value for name, value in now.items() if self._counters.get(name, unknown) != value}

    # ------------------------------------------------------------ taking up

    def load(self, loader: Any, state: dict[str, Any]) -> None:
        if not state:
            return  # as torchdata has it
        epoch_state.check(state, loader)
        self.pending = copy.deepcopy(dict(state))
        self.ledger.epoch = state["epoch"] - 1
        position.restore_ledger(self.ledger, state["ledger"])

    def resume(self, loader: Any, make: Callable[[], Any]) -> Any:
        """Make the iterator that goes on from the pending position."""
        state = self.pending
        assert state is not None
        before = self.randomness.read()
        self.look_at(loader)
        middle = state.get("begun")
        try:
            self.resumed = state
            if middle is None:
                drawing.begin_after(self.parts, state["sampler"])
                self._set(state)
            iterator = make()
        except BaseException:
            self.randomness.set(before)
            raise
        finally:
            self.resumed = None
        self.pending = None
        if middle is not None:
            self._set_generators(middle["generators_now"], middle.get("counters_now", {}))
            now = middle.get("random_now") if not loader.num_workers else None
            self.randomness.set(before if now is None else position.to_random(now))
        elif loader.num_workers and position.of_random(before) != state["random"]:
            self.randomness.set(before)  # a trainer that goes on otherwise has its reasons
        return iterator

    def _set(self, told: dict[str, Any]) -> None:
        self.randomness.set(position.to_random(told["random"]))
        self._set_generators(told["generators"], told.get("counters", {}))

    def _set_generators(self, told: dict[str, Any], counters: dict[str, Any]) -> None:
        generators = drawing.generators_of(self.parts)
        for name, state in told.items():
            if name in generators:
                generator_states.put(generators[name], state)
        drawing.set_counters(self.parts, counters)


# ---------------------------------------------------------------- passes with workers


class Track:
    """What a pass with workers notes of itself for its position: two stores per batch."""

    def __init__(self, begun: Begun, slots: int, resumed: dict[str, Any] | None) -> None:
        self.begun = begun
        self.resumed = resumed  # the position that this pass goes on from
        self.drawn = 0  # index lists
        self.exhausted = False  # the sampler has no more
        self.finished = False
        self.planned: deque[Planned] = deque()
        self.booked = [-1] * (slots + 1)  # by slot, its last batch that had its turn; beyond: whoever had time
        self.booked_before = (0, -1)
        self.next_slot = 0
        self.next_stands: dict[int, Stand] = {}  # of streams that had ended already in the position

    def book(self, slot: int, seq: int) -> None:
        """This batch has its turn."""
        self.booked_before = (slot, self.booked[slot])
        self.booked[slot] = seq


def begin(iterator: Any, loader: Any) -> Track:
    """An epoch of a SupervisedIterator begins, or the one that is taken up."""
    resumed, iterator._resumed = iterator._resumed, None
    told = None
    if resumed is not None:
        told = resumed.get("begun") or (resumed | resumed["fleet"] if "fleet" in resumed else None)
    # A pass without workers draws its seed after its begin; this one has done so just now.
    is_set = told is not None and "base_seed" not in told
    begun = iterator._bookmark.begin(loader, iterator, told, is_set)
    return Track(begun, iterator._num_workers, resumed if resumed is not None and "begun" in resumed else None)


def position_of(iterator: Any, given: bool) -> dict[str, Any]:
    """Where a SupervisedIterator is."""
    if iterator._track.finished:
        return _between_epochs(iterator)
    bookmark, parts = iterator._bookmark, iterator._bookmark.parts
    outstanding, booked, received = iterator._outstanding, iterator._track.booked, iterator._rcvd_idx
    hand = iterator._hand
    if hand is not None and not given and hand[0] not in outstanding:  # booked, and nobody has it
        slot, before = iterator._track.booked_before
        outstanding, received = {hand[0]: slot, **outstanding}, hand[0]
        booked = [*booked]
        booked[slot] = before
    again = iterator._in_order and drawing.can_be_begun_again(parts)
    seqs = sorted(outstanding)
    drawn = iterator._door.drawn
    machine = iterator._machine
    slots = () if iterator._seeds_by_batch else range(iterator._num_workers)
    stands = [iterator._engine.stand_of(slot, booked[slot]) for slot in slots]
    return {
        **bookmark.middle(iterator._track.begun),
        **_of_fleet(iterator, stands),
        "in_order": iterator._in_order,
        "received": received,
        "sent": iterator._send_idx,
        "next_slot": iterator._track.next_slot,
        "owed": iterator._owed,
        "lacking": iterator._agreement.owed,
        "seqs": seqs,
        "owners": [outstanding[seq] for seq in seqs],
        "indices": None if again else [drawn[seq] for seq in seqs],
        "deaths": [
            [seq, sorted(task.deaths.items()), task.whole_deaths]
            for seq, task in machine.tasks.items()
            if task.deaths or task.whole_deaths
        ],
        "ended": [slot for slot, alive in enumerate(iterator._workers_status) if not alive],
        "counted": [machine.bad, machine.drawn],
        "sampler": drawing.tell_sampler(parts) | {"drawn": received, "exhausted": False}
        if again
        else drawing.tell(parts, iterator._sampler_iter, iterator._track.drawn, iterator._track.exhausted),
    }


def _of_fleet(iterator: Any, stands: list[Stand]) -> dict[str, Any]:
    base_seed, dataset = int(iterator._base_seed), iterator._engine.job.settings.dataset
    note = iterator._engine.epoch_note or epochs.Note(iterator._job_seed)
    return {
        "base_seed": base_seed,
        "shared_seed": note.shared_seed,
        "calls": epochs.to_plain_calls(note.calls),
        "fleet_epoch": iterator._engine.epoch,
        "by_batch": iterator._seeds_by_batch,
        "slots": [position.of_stand(stand, base_seed, n, dataset, iterator._stream) for n, stand in enumerate(stands)],
    }


def _between_epochs(iterator: Any) -> dict[str, Any]:
    """What persistent workers take along from one epoch into the next."""
    if not iterator._persistent_workers:
        return {}
    stands = []
    for slot in range(iterator._num_workers if not iterator._seeds_by_batch else 0):
        stands.append(_next_epoch(iterator, slot, iterator._track.booked[slot]))
    fleet = _of_fleet(iterator, stands)
    return {"fleet": {**fleet, "fleet_epoch": fleet["fleet_epoch"] + 1}}


def _next_epoch(iterator: Any, slot: int, batch: int) -> Stand:
    """Where a slot begins the epoch after this one, of which this batch was its last."""
    stand = iterator._engine.stand_of(slot, batch)
    at_start = stand.random_at_start if stand.random_now is None else stand.random_now
    if not iterator._stream:
        return Stand(at_start, None, stand.place)
    memory = Memory()
    memory.set_out(stand)
    memory.begin_epoch(iterator._engine.epoch_note, *iterator._engine.job.next_epoch(stand.place))
    return memory.stand_after(-1, None)


def fleet_of(state: dict[str, Any] | None, loader: Any) -> dict[str, Any] | None:
    """What a position says of the workers, as far as this loader can go on with it."""
    if state is None:
        return None
    fleet: dict[str, Any] | None = state.get("begun") or state.get("fleet")
    if fleet is None or "base_seed" not in fleet:
        if fleet is not None:  # it was without workers: from here on the batch decides what is drawn
            return {
                **fleet,
                "base_seed": None,
                "by_batch": True,
                "fleet_epoch": 0,
                "slots": [],
                "shared_seed": None,
                "calls": [],
            }
        return None
    if state["num_workers"] == position.heading(loader)["num_workers"] or fleet["by_batch"]:
        return fleet
    return {**fleet, "by_batch": True, "slots": []} if "begun" in state else None


def set_out(engine: Any, fleet: dict[str, Any], dataset: Any) -> None:
    """Before workers are started."""
    base_seed, ours = fleet["base_seed"], engine.job.settings.dataset
    stands = {slot: position.to_stand(told, base_seed, slot, ours) for slot, told in enumerate(fleet["slots"])}
    in_the_middle = "received" in fleet
    if not in_the_middle and epochs.is_settable(dataset):
        # The trainer tells its dataset which epoch comes; one that was kept would not know.
        for slot, stand in stands.items():
            earlier = tuple(replace(left, epoch_note=None) for left in stand.earlier)
            stands[slot] = replace(stand, dataset=None, iterations=0, earlier=earlier)
    calls = epochs.from_plain_calls(fleet["calls"]) if in_the_middle else ()
    engine.set_out(fleet["fleet_epoch"], epochs.Note(fleet["shared_seed"], calls), stands)


def _renumbered(told: dict[str, Any], numbers: dict[int, int]) -> dict[str, Any]:
    return {**told, "deaths": [[numbers[seq], *rest] for seq, *rest in told["deaths"]]}


def go_on(iterator: Any, state: dict[str, Any]) -> None:
    """Bring a SupervisedIterator, whose epoch was just begun as then, to where the position is."""
    told = state["begun"]
    iterator._sampler_iter = drawing.restore(iterator._bookmark.parts, iterator._sampler_iter, told["sampler"])
    workers = iterator._num_workers
    same = state["num_workers"] == workers and len(told.get("slots", ())) == workers
    if not same and not told.get("by_batch"):
        log.info(
            "resumed with %d workers instead of %s: samples come in the same order; from here on random numbers are "
            "seeded by batch",
            workers,
            state["num_workers"],
        )
    indices = told.get("indices")
    received = told["received"] if "received" in told else told["taken"]
    seqs = told.get("seqs", [received + n for n in range(len(indices or ()))])
    sent = told.get("sent", received + len(seqs))
    if iterator._in_order and not told.get("in_order", True):
        # Batches came as they were ready: those under way have the last numbers here, so that none is missing between.
        received = sent - len(seqs)
        renumbered = dict(zip(seqs, range(received, sent), strict=True))
        seqs, told = list(renumbered.values()), _renumbered(told, renumbered)
    iterator._rcvd_idx, iterator._send_idx = received, sent
    iterator._track.drawn = told["sampler"]["drawn"]
    iterator._track.exhausted = told["sampler"]["exhausted"]
    iterator._agreement.owed = told.get("lacking", 0)
    if same or indices is not None:
        owners = told["owners"] if same else [None] * len(seqs)
        drawn = [(None, False)] * len(owners) if indices is None else [(index, True) for index in indices]
        plan = zip(seqs, owners, drawn, strict=True)
        iterator._track.planned = deque(Planned(seq, slot, index, is_drawn) for seq, slot, (index, is_drawn) in plan)
    else:
        iterator._send_idx = received  # drawn anew, and dealt out anew
    iterator._track.next_slot = told["next_slot"] if same else received % workers
    turn = iterator._track.next_slot
    iterator._worker_queue_idx_cycle = itertools.cycle([*range(turn, workers), *range(turn)])
    machine = iterator._machine
    for slot in told["ended"] if same else ():
        iterator._workers_status[slot] = False
        machine.slots[slot].ended = True
        iterator._track.next_stands[slot] = _next_epoch(iterator, slot, -1)
    iterator._owed = len(iterator._track.planned)
    iterator._draw_owed()
    machine.bad, machine.drawn = told.get("counted", (machine.bad, machine.drawn))
    for seq, deaths, whole_deaths in told.get("deaths", ()):
        task = machine.tasks.get(seq)
        if task is not None:
            task.deaths, task.whole_deaths = dict(deaths), whole_deaths
    iterator._owed = told["owed"] if same else 0
    if not iterator._stream:
        room = iterator._prefetch_factor * machine.crew.wanted - len(iterator._outstanding)
        iterator._owed = max(iterator._owed, room)
    iterator._draw_owed()
