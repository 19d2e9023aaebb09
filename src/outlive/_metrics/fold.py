"""Makes events for viewers, and counts, of the records that machine and runner speak. Pure.

Reads   events, actions, explained incidents.
Writes  nothing; answers with plain dictionaries.
Never   the clock, a process, a file; a sample's value.

    kind             what else it has
    job-began        pid, slots
    epoch-began      epoch
    epoch-ended      epoch, delivered
    worker-started   slot, incarnation
    worker-ready     slot, incarnation
    worker-died      slot, incarnation, pid, how, hung, doing, batch, seconds
    worker-recycled  slot, incarnation, pid, why
    worker-unstarted slot, incarnation, how
    incident         id, incident (its kind), sentence, verdict, cause, action, slot, incarnation, pid, batch, epoch,
                     samples, described, seconds
    retry            id, slot, samples
    quarantine       id, verdict, slot, samples, replaced
    breaker          id, sentence, open
    resized          workers, why
    given-up         limit, why
    tick             delivered, samples, bytes, wait_seconds, trainer_seconds, restarts, retries, recycled, quarantined,
                     incidents, workers, cells, slots: [{slot, incarnation, doing, private, shared, cpu}]
    job-ended        —
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from outlive import plain
from outlive import records as r
from outlive.incident import Incident, IncidentKind

_MOST_SAMPLES = 16
_LONGEST = 500


def cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


_WORKER = {"slot": int, "incarnation": int}
_ABOUT = {"id": str, "slot": int, "samples": list}
_NUMBER = (int, float)
_COUNTS = ("delivered", "samples", "bytes", "restarts", "retries", "recycled", "quarantined", "incidents", "workers")
_FIELDS: dict[str, dict[str, Any]] = {  # by kind, of what type each is
    "job-began": {"pid": int, "slots": int},
    "epoch-began": {"epoch": int},
    "epoch-ended": {"epoch": int, "delivered": int},
    "worker-started": _WORKER,
    "worker-ready": _WORKER,
    "worker-died": {**_WORKER, "pid": int, "how": str, "hung": bool, "doing": str, "batch": int, "seconds": _NUMBER},
    "worker-recycled": {**_WORKER, "pid": int, "why": str},
    "worker-unstarted": {**_WORKER, "how": str},
    "incident": {
        **dict.fromkeys(("incident", "sentence", "verdict", "cause", "action"), str),
        **dict.fromkeys(("incarnation", "pid", "batch", "epoch"), int),
        **{**_ABOUT, "described": list, "seconds": _NUMBER},
    },
    "retry": _ABOUT,
    "quarantine": {**_ABOUT, "verdict": str, "replaced": bool},
    "breaker": {"id": str, "sentence": str, "open": bool},
    "resized": {"why": str},
    "given-up": {"limit": str, "why": str},
    "tick": {**dict.fromkeys(_COUNTS, int), "wait_seconds": _NUMBER, "trainer_seconds": _NUMBER, "slots": list},
}
_SLOT = {"private": int, "shared": int, "cpu": _NUMBER}  # of a tick, where it is known
_PLAIN = (int, float, str, type(None))


def is_sound(event: Any) -> bool:
    """Whether viewers can show an event: what its kind has is there, and of the right type. A kind that this version
    does not know may have anything."""
    if not (isinstance(event, dict) and type(event.get("n")) is int and isinstance(event.get("kind"), str)):
        return False
    if not _is(event.get("time"), _NUMBER):
        return False
    if not all(_is(event.get(name), kind) for name, kind in _FIELDS.get(event["kind"], {}).items()):
        return False
    if event["kind"] == "tick":
        return all(isinstance(slot, dict) and _is_slot(slot) for slot in event["slots"])
    texts = event.get("described", []) if event["kind"] == "incident" else []
    samples = event["samples"] if "samples" in _FIELDS.get(event["kind"], {}) else []
    return all(isinstance(text, str) for text in texts) and all(isinstance(sample, _PLAIN) for sample in samples)


def _is_slot(slot: dict[str, Any]) -> bool:
    known = {**_WORKER, "doing": str, **{name: kind for name, kind in _SLOT.items() if name in slot}}
    return all(_is(slot.get(name), kind) for name, kind in known.items())


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


class Fold:
    """One job's counts."""

    def __init__(self) -> None:
        self.by_verdict: Counter[str] = Counter()  # samples that were left out or replaced
        self.restarts: Counter[int] = Counter()  # by slot

    def event(self, record: Any, explained: Incident | None = None) -> list[dict[str, Any]]:
        """What viewers are told of an event or an action; `explained`: the incident of a quarantine."""
        if isinstance(record, r.StartWorker):
            if record.incarnation > 1:
                self.restarts[record.slot] += 1
            return [{"kind": "worker-started", "slot": record.slot, "incarnation": record.incarnation}]
        if isinstance(record, r.WorkerReady):
            return [{"kind": "worker-ready", "slot": record.slot, "incarnation": record.incarnation}]
        if isinstance(record, r.WorkerExited):
            return [_ended(record)]
        if isinstance(record, r.PreparationFailed):
            how = f"{record.failure.type_name}: {record.failure.message}".removeprefix(": ")
            named = {"slot": record.slot, "incarnation": record.incarnation}
            return [{"kind": "worker-unstarted", **named, "how": cut(how)}]
        if isinstance(record, r.PutInQuarantine) and explained is not None:
            return [self._quarantined(explained, len(record.positions))]
        if isinstance(record, r.GiveUp):
            return [{"kind": "given-up", "limit": record.limit.value, "why": cut(record.text)}]
        return []

    def _quarantined(self, incident: Incident, count: int) -> dict[str, Any]:
        verdict = verdict_of(incident)
        self.by_verdict[verdict] += max(1, count)
        replaced = incident.action.startswith("replaced by")
        return {"kind": "quarantine", **_about(incident), "verdict": verdict, "replaced": replaced}

    def incident(self, incident: Incident) -> list[dict[str, Any]]:
        told: dict[str, Any] = {
            "kind": "incident",
            **_about(incident),
            "incident": incident.kind.value,
            "sentence": cut(str(incident)),
            "verdict": verdict_of(incident),
            "cause": cut(incident.verdict.words if incident.verdict is not None else incident.cause),
            "action": incident.action,
            "incarnation": incident.incarnation,
            "pid": incident.pid,
            "batch": incident.batch,
            "epoch": incident.epoch,
            "described": [cut(text) for text in incident.described],
            "seconds": round(incident.in_hand.seconds, 3),
        }
        more: list[dict[str, Any]] = []
        if "again" in incident.action or incident.action == "retried":
            more.append({"kind": "retry", **_about(incident)})
        if incident.kind is IncidentKind.BREAKER:
            open_now = " is gone" in incident.source
            more.append({"kind": "breaker", "id": incident.id, "sentence": told["sentence"], "open": open_now})
        if incident.kind is IncidentKind.RESIZED:
            more.append({"kind": "resized", "id": incident.id, "why": cut(incident.recycled)})
        return [told, *more]


def verdict_of(incident: Incident) -> str:
    return incident.verdict.name.value if incident.verdict is not None else incident.kind.value


def _about(incident: Incident) -> dict[str, Any]:
    samples = [plain.plain(index) for index in incident.indices[:_MOST_SAMPLES]]
    return {"id": incident.id, "slot": incident.slot, "samples": samples}


def _ended(record: r.WorkerExited) -> dict[str, Any]:
    named = {"slot": record.slot, "incarnation": record.incarnation, "pid": record.pid}
    if record.recycled:
        return {"kind": "worker-recycled", **named, "why": record.recycled}
    hand = record.in_hand
    return {
        "kind": "worker-died",
        **named,
        "how": record.exit.words,
        "hung": record.hung,
        "doing": hand.stage.words,
        "batch": hand.batch,
        "seconds": round(hand.seconds, 3),
    }
