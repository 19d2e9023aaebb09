"""What the runner asks about a pool's chunks: their bytes, their tasks' names.

Reads   the chunks that are under way.
Writes  the ledger.
Never   knows the pool: that must be free to go when its last user lets go of it.
"""

from __future__ import annotations

import pathlib
import secrets
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any, Protocol

from outlive._forensics import autopsy, guard
from outlive._forensics.ledger import Ledger
from outlive.incident import Decision, Incident, IncidentKind, InHand
from outlive.orders import Plan
from outlive.pool.work import Chunk, Function, Item

_MOST_SHOWN = 80
_MOST_VALUE = 40


class Sight(Protocol):
    def look(self, slot: int) -> tuple[int | None, InHand | None]: ...


class Door:
    def __init__(self, ledger: Ledger, engine: Sight, *, imports_main: bool) -> None:
        self.ledger = ledger
        self.engine = engine
        self.chunks: dict[int, Chunk] = {}
        self.condemned: dict[int, dict[int, Incident]] = defaultdict(dict)  # seq → position → why
        self._imports_main = imports_main
        self._last: tuple[Incident, Incident] | None = None

    def encode(self, seq: int, plan: Plan) -> list[Any]:
        return self.chunks[seq].encode(plan.excluded, plan.probe)

    def explain(self, incident: Incident) -> Incident:
        if self._last is not None and self._last[0] is incident:
            return self._last[1]
        asked = incident
        if self._imports_main and incident.kind is IncidentKind.START and incident.exit is None:
            incident = replace(incident, evidence=replace(incident.evidence, unguarded=guard.unguarded_line()))
        chunk = self.chunks.get(incident.batch)
        places = [] if chunk is None else [chunk.item_at(p) for p in incident.positions if p < chunk.size]
        numbers = tuple(item.number + row for item, row in places)
        action = "raised" if incident.action == "left out" else incident.action.replace("sample", "task")
        action = action.replace("multiprocessing_context", "mp_context")
        explained = autopsy.perform(
            replace(
                incident,
                noun="task",
                action=action.replace("batch", "task"),
                recycled=incident.recycled.replace(" batches", " tasks"),
                batch=-1,
                indices=numbers,
                index=numbers[0] if len(numbers) == 1 else None,
                described=tuple(_call(*place) for place in places[:1]),
                pid=incident.pid if incident.pid > 0 else self.engine.look(incident.slot)[0] or -1,
                when=time.time(),
                number=len(self.ledger.incidents),
                id=secrets.token_hex(4),
            )
        )
        self._last = (asked, explained)
        return explained

    def incident_happened(self, incident: Incident) -> None:
        self.ledger.add(incident)

    def incident_goes_on(self, incident: Incident) -> None:
        self.ledger.tell_again(incident)

    def quarantine(self, seq: int, positions: tuple[int, ...], incident: Incident) -> None:
        self.condemned[seq].update(dict.fromkeys(positions, incident))

    def probes(self, *_: Any) -> Any:
        raise AssertionError("a pool's workers doubt no source")

    def decide(self, incident: Incident) -> Decision:
        raise AssertionError("a pool's policy has no callable")


def _call(item: Item, row: int) -> str:
    """«parse('a.jpg', <ndarray>)»: values only of what is short and plain."""
    function = item.function.call if type(item.function) is Function else item.function
    named = [shown(value) for value in item.row(row)] + [f"{key}={shown(value)}" for key, value in item.kwargs.items()]
    text = f"{getattr(function, '__qualname__', type(function).__name__)}({', '.join(named)})"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def shown(value: Any) -> str:
    if isinstance(value, (bool, int, float, str, pathlib.PurePath, type(None))):
        text = str(value) if isinstance(value, pathlib.PurePath) else repr(value)
        return text if len(text) <= _MOST_VALUE else text[: _MOST_VALUE - 1] + "…"
    return f"<{type(value).__name__}>"
