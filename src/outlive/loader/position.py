"""A loader's position as plain values: what `state_dict()` returns, and what `load_state_dict()` takes.

Reads   random states, stands of slots, the ledger.
Writes  dictionaries of numbers and texts, which pickle, torch.save and JSON can carry.
Never   a dataset, a process or an iterator: those are for `resuming`.

Random states are most of it. Of a slot's three generators only those are told of that are not as they were seeded:
whoever does not use NumPy's does not carry it; torch's is told as the 32-bit words that it is, not as 64-bit ones.
"""

from __future__ import annotations

import functools
import operator
import random
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from outlive._forensics.ledger import COUNTS, Ledger, Quarantine, StreamIndex
from outlive._transport import wire
from outlive._worker import randomness
from outlive._worker.loop import Restored
from outlive.engines.workers import Stand
from outlive.evidence import NO_EVIDENCE
from outlive.incident import Incident
from outlive.loader import epochs, generator_states
from outlive.loader.dataset_keeper import changed_attributes, with_attributes
from outlive.loader.plain_values import NotPlainError, from_plain, to_bytes, to_plain, to_text
from outlive.loader.streams import Base, Place, Run

FORMAT = 2
_GENERATORS = ("torch", "random", "numpy")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # means nothing in another process: such a repr must match nothing there
_LONGEST_TEXT = 2000  # of a traceback or a stack in a quarantined sample's incident


# ---------------------------------------------------------------- random states

Parts = tuple[bytes, bytes, bytes]


def of_random(state: bytes, known: Parts | None = None) -> dict[str, str]:
    """The parts of a random state that differ from those that are known anyway."""
    parts = randomness.parts_of(state)
    told = {}
    for place, (name, part) in enumerate(zip(_GENERATORS, parts, strict=True)):
        if known is None or part != known[place]:
            told[name] = to_text(generator_states.dense(part) if name == "torch" and part else part)
    return told


def to_random(told: Mapping[str, str], known: Parts | None = None) -> bytes:
    parts = list(known or (b"", b"", b""))
    for place, name in enumerate(_GENERATORS):
        if name in told:
            part = to_bytes(told[name])
            parts[place] = generator_states.whole(part) if name == "torch" and part else part
    if known is None and not (parts[0] and parts[1]):
        raise ValueError("the state of a random generator is missing")
    checked = parts[0], parts[1], parts[2]
    randomness.check_parts(checked)
    return randomness.joined(checked)


@functools.lru_cache(maxsize=256)
def seeded(base_seed: int, slot: int) -> Parts:
    """The random state of a worker that has drawn nothing yet, as `Randomness` reads it."""
    seed = base_seed + slot
    generator = torch.Generator()
    generator.manual_seed(seed)
    _, (*words, index), _ = random.Random(seed).getstate()
    python_state = b"f" + b"\0" * 9 + struct.pack("<625I", index, *words)
    try:
        import numpy
    except ImportError:
        return generator.get_state().numpy().tobytes(), python_state, b""
    held: Any = numpy.random.RandomState(torch_worker._generate_state(base_seed, slot)).get_state()
    numpy_state = b"f" + struct.pack("<qd", held[3], held[4]) + held[1].tobytes() + struct.pack("<I", held[2])
    return generator.get_state().numpy().tobytes(), python_state, numpy_state


# ---------------------------------------------------------------- slots


def of_stand(stand: Stand, base_seed: int, slot: int, dataset: Any, stream: bool) -> dict[str, Any]:
    """`dataset`: as the trainer has it for its workers."""
    known = seeded(base_seed, slot)
    told: dict[str, Any] = {}
    if stand.random_at_start is not None:
        told["random_at_start"] = of_random(stand.random_at_start, known)
    if stand.random_now is not None:
        told["random"] = of_random(stand.random_now, known)
    if stand.place is not None and stream:
        told["stream"] = of_place(stand.place, dataset, known)
    elif stand.place is not None:
        told["dataset_state"] = wire.load(stand.place)
    iterations = stand.iterations
    if stand.dataset is not None:
        attributes = changed_attributes(dataset, stand.dataset)
        if attributes is not None:
            told["attributes"] = attributes
        else:
            iterations = stand.epochs - len(stand.earlier)  # from the beginning, then
    if stand.steps:
        told["steps"] = [[count, sorted(killers)] for count, killers in stand.steps]
    if iterations:
        told["iterations"] = iterations
    if stand.earlier:
        told["earlier"] = [_of_left(left, base_seed, slot, dataset, stream) for left in stand.earlier]
    if stand.epochs:
        told["epochs"] = stand.epochs
    return told


def to_stand(told: Mapping[str, Any], base_seed: int, slot: int, dataset: Any) -> Stand:
    known = seeded(base_seed, slot)
    at_start, now = told.get("random_at_start"), told.get("random")
    place = None
    if "stream" in told:
        place = to_place(told["stream"], dataset, known)
    elif "dataset_state" in told:
        place = wire.dump(told["dataset_state"])
    return Stand(
        None if at_start is None else to_random(at_start, known),
        None if now is None else to_random(now, known),
        place,
        with_attributes(dataset, told["attributes"]) if "attributes" in told else None,
        tuple((count, frozenset(killers)) for count, killers in told.get("steps", ())),
        told.get("iterations", 0),
        told.get("epochs", 0),
        tuple(_to_left(left, base_seed, slot, dataset) for left in told.get("earlier", ())),
    )


def _of_left(left: Restored, base_seed: int, slot: int, dataset: Any, stream: bool) -> dict[str, Any]:
    """An earlier epoch, as it was left."""
    stand = Stand(left.random_at_start, left.random_now, left.place, None, left.steps)
    note = left.epoch_note or epochs.Note()
    calls = epochs.to_plain_calls(note.calls)
    return {**of_stand(stand, base_seed, slot, dataset, stream), "shared_seed": note.shared_seed, "calls": calls}


def _to_left(told: Mapping[str, Any], base_seed: int, slot: int, dataset: Any) -> Restored:
    stand = to_stand(told, base_seed, slot, dataset)
    note = epochs.Note(told["shared_seed"], epochs.from_plain_calls(told["calls"]))
    return Restored(
        0, note if any(note) else None, stand.random_at_start, stand.random_now, stand.place, None, stand.steps
    )


def of_place(place: bytes, dataset: Any, known: Parts | None = None) -> dict[str, Any]:
    """Where a stream stands, as plain data; what its dataset and its iterator say of themselves, as they said it."""
    at = Place(*wire.load(place))
    base = Base(*at.base)
    told: dict[str, Any] = {
        "taken": at.taken,
        "skipped": list(at.stepped_over),
        "snapshot_taken": base.taken,
        "runs": [
            [size, times, None if state is None else of_random(state, known)] for size, times, state in at.batches
        ],
        "collate_draws": at.collate_draws,
        "ended": at.ended,
        "can_skip": at.can_skip,
        "exhausted": at.exhausted,
    }
    if base.snapshot is not None:
        told["snapshot"] = wire.load(base.snapshot)
    if base.random is not None:
        told["snapshot_random"] = of_random(base.random, known)
    if at.dataset and (attributes := changed_attributes(dataset, at.dataset)) is not None:
        told["attributes"] = attributes
    return told


def to_place(told: Mapping[str, Any], dataset: Any, known: Parts | None = None) -> bytes:
    random_there = told.get("snapshot_random")
    base = Base(
        told["snapshot_taken"],
        wire.dump(told["snapshot"]) if "snapshot" in told else None,
        None if random_there is None else to_random(random_there, known),
    )
    runs = ((size, times, None if state is None else to_random(state, known)) for size, times, state in told["runs"])
    return wire.dump(
        tuple(
            Place(
                told["taken"],
                tuple(told["skipped"]),
                base,
                tuple(Run(*run) for run in runs),
                told["collate_draws"],
                with_attributes(dataset, told["attributes"]) if "attributes" in told else b"",
                told["ended"],
                told["can_skip"],
                told.get("exhausted", told["ended"]),
            )
        )
    )


# ---------------------------------------------------------------- the ledger


class LedgerTeller:
    """Tells what a ledger has counted and put in quarantine; each incident is put into words once."""

    def __init__(self) -> None:
        self._told: dict[Any, tuple[Incident, dict[str, Any]]] = {}

    def tell(self, ledger: Ledger, counts: Mapping[str, int]) -> dict[str, Any]:
        return {
            **{name: getattr(ledger, name) for name in ("delivered", "errored", "emptied")},
            **{name: getattr(ledger, name) + counts.get(name, 0) for name in COUNTS},
            "incidents": ledger.earlier + len(ledger.incidents),
            "quarantine": [self._sample(key, incident) for key, incident in ledger.quarantine.items()],
        }

    def _sample(self, key: Any, incident: Incident) -> dict[str, Any]:
        known = self._told.get(key)
        if known is None or known[0] is not incident:
            told = {"sample": _of_index(key), "incident": _slim(incident).to_dict()}
            known = self._told[key] = (incident, told)
        return known[1]


def restore_ledger(ledger: Ledger, told: Mapping[str, Any]) -> None:
    for name in ("delivered", "errored", "emptied", *COUNTS):
        setattr(ledger, name, told.get(name, 0))
    ledger.earlier = max(0, told["incidents"] - len(ledger.incidents))
    for sample in told["quarantine"]:
        _put(ledger.quarantine, sample["sample"], Incident.from_dict(sample["incident"]))


def _slim(incident: Incident) -> Incident:
    failure = incident.failure
    if failure is not None:
        failure = replace(failure, traceback=failure.traceback[-_LONGEST_TEXT:])
    return replace(incident, evidence=NO_EVIDENCE, stack=incident.stack[-_LONGEST_TEXT:], failure=failure)


def _of_index(key: Any) -> Any:
    if isinstance(key, StreamIndex):
        return {"worker": key.worker, "ordinal": key.ordinal}
    if type(key) in (int, str):
        return key
    try:
        return {"value": to_plain(key)}
    except NotPlainError:
        return {"repr": _ADDRESS.sub("", repr(key))}


def _put(quarantine: Quarantine, told: Any, incident: Incident) -> None:
    if type(told) in (int, str):
        quarantine.put(told, incident)
    elif "repr" in told:
        quarantine.put_text(str(told["repr"]), incident)
    elif "value" in told:
        quarantine.put(from_plain(told["value"]), incident)
    else:
        quarantine.put(StreamIndex(operator.index(told["worker"]), operator.index(told["ordinal"])), incident)


# ---------------------------------------------------------------- the loader


def heading(loader: Any) -> dict[str, Any]:
    """What a position and the loader that takes it up must have in common."""
    stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    length = None
    if not stream:
        try:
            length = len(loader.dataset)
        except Exception:  # it has none: then the sampler knows how far indices go
            pass
    return {
        "outlive": FORMAT,
        "kind": "iterable" if stream else "map-style",
        "batch_size": loader.batch_size,
        "length": length,
        "num_workers": "auto" if loader._sizing is not None else int(loader.num_workers),
    }
