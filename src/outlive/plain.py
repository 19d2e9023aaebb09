"""Incidents as plain values and back: for JSON, the journal, logs and programs.

Reads   incidents, or the dictionaries that were made of them, by an older or a newer version too.
Writes  nothing.
Never   unpickles, and never keeps a value of a sample; of an index that is no number and no text only its repr.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from outlive import private
from outlive.crashes import CrashRecord
from outlive.evidence import Evidence, Full
from outlive.incident import Decision, Exit, Failure, Incident, IncidentKind, InHand, Stage
from outlive.verdicts import Confidence, Name, Verdict

_LONGEST_REPR = 500
# What is said in words of its own, or stands elsewhere in the dictionary.
_TOLD_APART = {"kind", "in_hand", "index", "indices", "exit", "failure", "evidence", "verdict"}


def plain(value: Any) -> Any:
    """Numbers and texts as they are, whole numbers of any make as int, anything else as its repr."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str):
        return str.__str__(value)
    try:
        return operator.index(value)
    except Exception:
        pass  # no whole number
    try:
        named = isinstance(value, tuple) and type(value).__str__ is not object.__str__  # it has words for itself
        text = str(value) if named else repr(float(value) if isinstance(value, float) else value)
    except Exception as error:
        return f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return text if len(text) <= _LONGEST_REPR else text[: _LONGEST_REPR - 1] + "…"


def of_incident(incident: Incident) -> dict[str, Any]:
    """Everything that an incident has, and the words for it, as what JSON knows; `private` names the private ones."""
    told = _of_incident(incident)
    return told | {"private": list(private.differences(told, _of_incident(private.without(incident))))}


def _of_incident(incident: Incident) -> dict[str, Any]:
    indices = tuple(plain(i) for i in incident.indices)
    incident = dataclasses.replace(incident, index=plain(incident.index), indices=indices)
    failure, exit, hand = incident.failure, incident.exit, incident.in_hand
    told: dict[str, Any] = {
        "kind": incident.kind.value,
        "cause": incident.cause,
        "doing": incident.doing,
        "index": incident.index,
        "indices": list(indices),
        "stage": hand.stage.name.lower(),
        "seconds_in_hand": hand.seconds,
        "in_hand": {"batch": hand.batch, "position": hand.position, "stand_in": plain(hand.stand_in)},
        "signal": exit.signal_name if exit else None,
        "code": exit.code if exit else None,
        "exit": {"signal": exit.signal, "code": exit.code} if exit else None,
        "exception": failure.type_name if failure else None,
        "message": failure.message if failure else None,
        "traceback": failure.traceback if failure else None,
        "failure": _of_failure(failure) if failure else None,
        "crash": incident.crash.to_dict() if incident.crash else None,
        "verdict": _of_verdict(incident.verdict) if incident.verdict else None,
        "evidence": _of_evidence(incident.evidence),
    }
    rest = {f.name: getattr(incident, f.name) for f in dataclasses.fields(incident) if f.name not in _TOLD_APART}
    told.update(_builtins(rest))
    return told


def to_incident(told: Mapping[str, Any]) -> Incident:
    """The incident that `of_incident` told of; what is not told keeps its default."""
    stage = Stage[str(told.get("stage", "starting")).upper()]
    hand = {k: v for k, v in (told.get("in_hand") or {}).items() if k in ("batch", "position", "stand_in")}
    verdict, crash, ended = told.get("verdict"), told.get("crash"), told.get("exit")
    evidence = _convert({k: v for k, v in (told.get("evidence") or {}).items() if k != "crash"}, Evidence)
    fields: dict[str, Any] = {
        "kind": IncidentKind(told["kind"]),
        "index": told.get("index"),
        "indices": tuple(told.get("indices") or ()),
        "in_hand": InHand(stage, seconds=told.get("seconds_in_hand", 0.0), **hand),
        "exit": Exit(ended.get("signal"), ended.get("code")) if ended is not None else None,
        "failure": _to_failure(told) if told.get("failure") is not None else None,
        "evidence": dataclasses.replace(evidence, crash=CrashRecord.from_dict(crash) if crash else None),
        "verdict": _to_verdict(verdict) if verdict else None,
    }
    hints = typing.get_type_hints(Incident)
    for field in dataclasses.fields(Incident):
        if field.name not in _TOLD_APART and field.name in told:
            fields[field.name] = _convert(told[field.name], hints[field.name])
    return Incident(**fields)


def to_json(incident: Incident) -> str:
    """One line of ASCII, so that file names in any encoding pass through every file and socket."""
    return json.dumps(of_incident(incident))


def from_json(text: str | bytes) -> Incident:
    return to_incident(json.loads(text))


# ---------------------------------------------------------------- parts


def _of_failure(failure: Failure) -> dict[str, Any]:
    """Without type, message and traceback: they stand beside it, under the names that people look for. And without the
    pickle of the type: plain data has none.
    """
    return {
        "stage": failure.stage.name.lower(),
        "position": failure.position,
        "decision": failure.decision.value if failure.decision else None,
        "attempts": failure.attempts,
        "culprits": list(failure.culprits),
        "ordinal": failure.ordinal,
        "stand_in": plain(failure.stand_in),
        "place": failure.place,
        "full": _builtins(failure.full),
    }


def _to_failure(told: Mapping[str, Any]) -> Failure:
    more = dict(told["failure"])
    decision, full = more.pop("decision", None), more.pop("full", None)
    known = {f.name for f in dataclasses.fields(Failure)} - {"pickled_type"}  # a journal of 0.1 has it
    return Failure(
        told.get("exception") or "",
        told.get("message") or "",
        told.get("traceback") or "",
        stage=Stage[str(more.pop("stage", "fetching")).upper()],
        culprits=tuple(more.pop("culprits", ())),
        decision=Decision(decision) if decision is not None else None,
        full=_convert(full, Full) if full is not None else None,
        **{name: value for name, value in more.items() if name in known},
    )


def _of_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "name": verdict.name.value,
        "cause": verdict.cause,
        "facts": list(verdict.facts),
        "remedies": list(verdict.remedies),
        "confidence": verdict.confidence.value,
        "page": verdict.page,
    }


def _to_verdict(told: Mapping[str, Any]) -> Verdict:
    try:
        name = Name(told["name"])
    except ValueError:  # by a newer version, which knows more verdicts
        name = Name.UNKNOWN
    return Verdict(
        name,
        told.get("cause", ""),
        facts=tuple(told.get("facts", ())),
        remedies=tuple(told.get("remedies", ())),
        confidence=Confidence(told.get("confidence", "certain")),
    )


def _of_evidence(evidence: Evidence) -> dict[str, Any]:
    indices = tuple(plain(i) for i in evidence.worked.recent_indices)
    worked = dataclasses.replace(evidence.worked, recent_indices=indices)
    told: dict[str, Any] = _builtins(dataclasses.replace(evidence, crash=None, worked=worked))
    del told["crash"]  # it stands beside the evidence
    return told


def _builtins(value: Any) -> Any:
    return _listed(msgspec.to_builtins(value, enc_hook=plain))


def _listed(value: Any) -> Any:
    """Lists for tuples: what comes back from JSON."""
    if isinstance(value, dict):
        return {name: _listed(item) for name, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _convert(value: Any, kind: Any) -> Any:
    return msgspec.convert(value, kind)
