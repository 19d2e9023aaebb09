"""The form of a state, and whether what it says can be: checked whole when it is loaded, before anything is changed.

Reads:   a state, which may come from anywhere; the loader that is to go on from it.
Writes:  nothing.
Never:   lets a state in whose numbers contradict each other: `next()` would wait for a batch that never comes.

What samplers and datasets say of themselves is theirs to check: it is handed to their `load_state_dict` as it is.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import torch

from outlive import errors
from outlive._forensics.ledger import Ledger
from outlive.loader import drawing, epochs, generator_states, position
from outlive.loader.jobs import is_stateful

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Random: TypeAlias = dict[Literal["torch", "random", "numpy"], str]
Snapshot: TypeAlias = dict[Literal["dataset", "itself", "iterator"], Any]
Counters: TypeAlias = dict[str, bool | int | float | str | list[Any] | None]
Changed: TypeAlias = list[tuple[Annotated[list[str], msgspec.Meta(min_length=1)], Any]]


# ---------------------------------------------------------------- the form


@dataclass(frozen=True)
class SavedStream:
    taken: Count
    skipped: list[Count]
    snapshot_taken: Count
    runs: list[tuple[Count, Count, Random | None]]
    collate_draws: bool
    ended: bool
    can_skip: bool
    exhausted: bool = False
    snapshot: Snapshot = field(default_factory=dict)
    snapshot_random: Random | None = None
    attributes: Changed = field(default_factory=list)


@dataclass(frozen=True)
class SavedStand:
    random_at_start: Random | None = None
    random: Random | None = None
    stream: SavedStream | None = None
    steps: list[tuple[Count, list[Count]]] = field(default_factory=list)


@dataclass(frozen=True)
class SavedLeft(SavedStand):
    """An earlier epoch, as it was left."""

    shared_seed: Seed | None = field(kw_only=True)
    calls: list[tuple[list[Any], list[Any], Any]] = field(kw_only=True)


@dataclass(frozen=True)
class SavedSlot(SavedStand):
    attributes: Changed = field(default_factory=list)
    iterations: Count = 0
    epochs: Count = 0
    earlier: list[SavedLeft] = field(default_factory=list)


@dataclass(frozen=True)
class SavedFleet:
    base_seed: Seed
    shared_seed: Seed | None
    calls: list[tuple[list[Any], list[Any], Any]]
    fleet_epoch: Count
    by_batch: bool
    slots: list[SavedSlot]


@dataclass(frozen=True)
class SavedSampler:
    epoch: int | None = None


@dataclass(frozen=True)
class SavedCursor(SavedSampler):
    drawn: Count = field(kw_only=True)
    exhausted: bool = field(kw_only=True)


@dataclass(frozen=True)
class SavedPass:
    """The middle of an epoch."""

    random: Random
    generators: dict[str, Any]
    counters: Counters
    generators_now: dict[str, Any]
    counters_now: Counters
    sampler: SavedCursor


@dataclass(frozen=True)
class SavedPassHere(SavedPass):
    """With `num_workers=0`."""

    taken: Count
    indices: list[Any]
    random_now: Random | None = None
    dataset: Snapshot = field(default_factory=dict)
    stream_ended: bool = False
    stream: SavedStream | None = None


@dataclass(frozen=True)
class SavedPassOfWorkers(SavedPass, SavedFleet):
    in_order: bool
    received: Count
    sent: Count
    next_slot: Count
    owed: Count
    lacking: int
    seqs: list[Count]
    owners: list[int]
    indices: list[Any] | None
    deaths: list[tuple[Count, list[tuple[int, Count]], Count]]
    ended: list[Count]
    counted: tuple[Count, Count]


@dataclass(frozen=True)
class SavedSample:
    sample: Any
    incident: dict[str, Any]


@dataclass(frozen=True)
class SavedLedger:
    delivered: Count
    errored: Count
    emptied: Count
    restarts: Count
    retries: Count
    replaced: Count
    recycled: Count
    spared: Count
    incidents: Count
    quarantine: list[SavedSample]


@dataclass(frozen=True)
class SavedLoader:
    """What every state has."""

    kind: str
    batch_size: Any
    length: Any
    num_workers: Count | Literal["auto"]
    ledger: SavedLedger
    batches: Count
    epoch: Count


@dataclass(frozen=True)
class SavedBetween(SavedLoader):
    """Between two epochs."""

    random: Random
    generators: dict[str, Any]
    counters: Counters
    sampler: SavedSampler
    fleet: SavedFleet | None = None
    dataset: Snapshot = field(default_factory=dict)


# ---------------------------------------------------------------- the check


_WORDS_FOR = {
    "kind": ("the dataset is {here}, the state is of one that is {there}", "load it with the dataset it was taken of"),
    "batch_size": ("batch_size is {here}, in the state it is {there}", "batches would be cut elsewhere; set {there}"),
    "length": ("the dataset has {here} samples, in the state it has {there}", "indices would mean other samples"),
}


def check(state: Any, loader: Any) -> None:
    """Raise `PositionError`, which says why, where a loader cannot go on from a state."""
    if not isinstance(state, Mapping) or "outlive" not in state:
        raise errors.PositionError(
            "this is no state of outlive.DataLoader: it lacks the key 'outlive'; "
            "pass what state_dict() returned (torchdata's states have another form)"
        )
    if state["outlive"] != position.FORMAT:
        raise errors.PositionError(
            f"the state has format {state['outlive']!r:.50}, this version of outlive reads {position.FORMAT}; "
            "load it with the version that wrote it"
        )
    try:
        saved = msgspec.convert(state, SavedLoader if "begun" in state else SavedBetween)
        begun = _begun(state["begun"]) if "begun" in state else None
        _check_fit(state, loader, begun is not None)
        for problem in _contradictions(saved, begun, loader):
            raise ValueError(problem)
        _check_contents(state, begun, loader)
    except errors.PositionError:
        raise
    except RecursionError:
        raise _damaged("it is nested too deeply") from None
    except Exception as error:  # whatever decoding may raise about what may be anything
        raise _damaged(f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error) from None


def _damaged(reason: Any) -> errors.PositionError:
    return errors.PositionError(
        f"the state is damaged: {reason}; load another one, or begin the epoch anew, without a state"
    )


def _begun(told: Any) -> SavedPassHere | SavedPassOfWorkers:
    if isinstance(told, Mapping) and "base_seed" in told:
        return msgspec.convert(told, SavedPassOfWorkers)
    return msgspec.convert(told, SavedPassHere)


def _check_fit(state: Mapping[str, Any], loader: Any, is_begun: bool) -> None:
    here = position.heading(loader)
    for name, (said, advice) in _WORDS_FOR.items():
        if here[name] != state[name]:
            words = {"here": here[name], "there": state[name]}
            raise errors.PositionError(f"{said.format(**words)}: {advice.format(**words)}")
    if state["kind"] == "iterable" and is_begun and here["num_workers"] != state["num_workers"]:
        raise errors.PositionError(
            f"num_workers is {here['num_workers']}, in the state it is {state['num_workers']}: the streams of an "
            f"IterableDataset belong to their workers; set num_workers={state['num_workers']} until this epoch is over"
        )


def _contradictions(saved: SavedLoader, begun: SavedPass | None, loader: Any) -> Iterator[str]:
    """What cannot be true at the same time, in words."""
    if saved.batches != saved.ledger.delivered:
        yield f"{saved.batches} batches were delivered, and {saved.ledger.delivered}"
    stream = saved.kind == "iterable"
    if isinstance(saved, SavedBetween):
        yield from _about_snapshot(saved.dataset, loader, stream)
        if saved.fleet is not None:
            yield from _about_fleet(saved.fleet, saved, loader, stream)
    if isinstance(begun, SavedPassHere):
        if saved.num_workers != 0:
            yield f"num_workers is {saved.num_workers}, and no worker is in it"
        if begun.sampler.drawn != begun.taken + len(begun.indices):
            yield f"{begun.taken} batches were taken of {begun.sampler.drawn}, and {len(begun.indices)} are left"
        yield from _about_length(begun.taken, loader)
        yield from _about_snapshot(begun.dataset, loader, stream)
        if begun.stream is not None:
            yield from _about_stream(begun.stream, loader, stream)
    if isinstance(begun, SavedPassOfWorkers):
        yield from _about_fleet(begun, saved, loader, stream)
        yield from _about_batches(begun, saved.num_workers, loader, stream)


def _about_batches(begun: SavedPassOfWorkers, num_workers: int | str, loader: Any, stream: bool) -> Iterator[str]:
    slots = num_workers if isinstance(num_workers, int) else 1
    seqs = begun.seqs
    whole = list(range(begun.received, begun.sent)) if begun.sent - begun.received == len(seqs) else None
    if begun.received > begun.sent or (begun.in_order and seqs != whole):
        yield f"{begun.received} batches came of {begun.sent}, and {len(seqs)} are under way"
    if any(a >= b for a, b in itertools.pairwise([begun.received - 1, *seqs, begun.sent])):
        yield f"a batch is under way twice, or is none of the batches {begun.received} to {begun.sent - 1}"
    least = 0 if isinstance(num_workers, int) else -1
    if len(begun.owners) != len(seqs) or not all(least <= owner < slots for owner in begun.owners):
        yield f"{len(seqs)} batches are under way in the slots {begun.owners}, of {slots}"
    if begun.indices is None:
        if begun.sampler.drawn != begun.received or begun.sampler.exhausted or not begun.in_order:
            yield f"{begun.sampler.drawn} batches were drawn, and {begun.received} delivered"
        yield from _about_length(begun.received, loader)
    elif len(begun.indices) != len(seqs) or begun.sampler.drawn < begun.sent:
        yield f"{begun.sampler.drawn} batches were drawn, {begun.sent} sent, and {len(begun.indices)} are under way"
    if begun.next_slot >= slots:
        yield f"the next slot is {begun.next_slot}, of {slots}"
    if begun.owed > _most_owed(loader, slots):
        yield f"{begun.owed} batches are to be drawn at once"
    if not 0 <= begun.lacking <= begun.sent:
        yield f"other ranks have had {begun.lacking} batches more, of {begun.sent}"
    dead = [seq for seq, _, _ in begun.deaths]
    if len({*dead}) < len(dead) or not {*dead} <= {*seqs}:
        yield f"workers died of the batches {dead}, which are not under way"
    if begun.ended and (not stream or len({*begun.ended}) < len(begun.ended) or max(begun.ended) >= slots):
        yield f"the streams of the slots {begun.ended} have ended, of {slots}"


def _most_owed(loader: Any, slots: int) -> int:
    """More than any loader has been told to have under way, and as many as are drawn in no time."""
    return max(100_000, (loader.prefetch_factor or 0) * slots)


def _about_length(taken: int, loader: Any) -> Iterator[str]:
    """Of torch's own samplers it is known how many batches they make."""
    if drawing.can_be_begun_again(loader) and not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        most = len(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        if taken > most:
            yield f"{taken} batches were delivered of an epoch that has {most}"


def _about_fleet(fleet: SavedFleet, saved: SavedLoader, loader: Any, stream: bool) -> Iterator[str]:
    slots = saved.num_workers
    if slots == 0 or len(fleet.slots) != (0 if fleet.by_batch or slots == "auto" else slots):
        yield f"num_workers is {slots}, and {len(fleet.slots)} slots are in it"
    if fleet.fleet_epoch > saved.epoch:
        yield f"workers are in epoch {fleet.fleet_epoch}, and the loader in epoch {saved.epoch}"
    for number, slot in enumerate(fleet.slots):
        begun = slot.iterations + len(slot.earlier)
        if not begun <= slot.epochs <= fleet.fleet_epoch:
            yield f"slot {number} has begun {begun} of {slot.epochs} epochs, in epoch {fleet.fleet_epoch}"
        for stand in (slot, *slot.earlier):
            if stand.stream is not None:
                yield from _about_stream(stand.stream, loader, stream)
            if stand.steps and not stream:
                yield f"the dataset is map-style, and slot {number} steps over samples of a stream"


def _about_stream(at: SavedStream, loader: Any, stream: bool) -> Iterator[str]:
    if not stream:
        yield "the dataset is map-style, and a slot stands in a stream"
    forwarded = at.snapshot_taken + sum(size * times for size, times, _ in at.runs)
    if forwarded > at.taken or any(times > 1 for size, times, _ in at.runs if size == 0):
        yield f"{at.taken} samples were taken of a stream, {forwarded} of them in batches"
    if at.snapshot_taken and not at.snapshot:
        yield f"the stream's state after {at.snapshot_taken} samples is missing"
    yield from _about_snapshot(at.snapshot, loader, stream)


def _about_snapshot(snapshot: Snapshot, loader: Any, stream: bool) -> Iterator[str]:
    of_dataset = "dataset" in snapshot or "itself" in snapshot
    if (of_dataset and not is_stateful(loader.dataset)) or (not stream and snapshot.keys() - {"dataset"}):
        yield f"the dataset has no load_state_dict() for {', '.join(snapshot)}"


def _check_contents(state: Mapping[str, Any], begun: SavedPass | None, loader: Any) -> None:
    """Decode everything once: what cannot be decoded is found here, and not in the middle of `iter()`."""
    ledger = Ledger()
    position.restore_ledger(ledger, state["ledger"])
    position.LedgerTeller().tell(ledger, {})
    for incident in ledger.quarantine.values():
        str(incident)
    told = state if begun is None else state["begun"]
    for name in ("random", "random_now"):
        if told.get(name) is not None:
            position.to_random(told[name])
    live = drawing.generators_of(loader)
    for name in ("generators", "generators_now"):
        for path, there in told.get(name, {}).items():
            if path in live:
                generator_states.put(_another(live[path]), there)
    for name in ("counters", "counters_now"):
        drawing.check_counters(loader, told.get(name, {}))
    if "stream" in told:
        position.to_place(told["stream"], loader.dataset)
    fleet = told if isinstance(begun, SavedPassOfWorkers) else state.get("fleet")
    if fleet is not None:
        epochs.check_calls(epochs.from_plain_calls(fleet["calls"]), loader.dataset)
        for number, slot in enumerate(fleet["slots"]):
            for left in slot.get("earlier", ()):
                epochs.check_calls(epochs.from_plain_calls(left["calls"]), loader.dataset)
            position.to_stand(slot, fleet["base_seed"], number, loader.dataset)


def _another(generator: Any) -> Any:
    """A generator of the same kind, to try a state on."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(device=generator.device)
    return random.Random() if isinstance(generator, random.Random) else copy.deepcopy(generator)
