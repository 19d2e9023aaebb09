"""A loader's slots as they are now: for `statistics()`.

Reads   the machine, and black boxes through the engine.
Writes  nothing.
Never   waits, nor asks a worker: it works while one hangs.
"""

from __future__ import annotations

from typing import Any

from outlive._fleet.machine import Machine
from outlive.statistics import SlotStatistics


def at_slots(machine: Machine, engine: Any) -> tuple[SlotStatistics, ...]:
    """What each slot's worker does; `engine` is None once it is closed."""
    rows = []
    for slot in machine.slots:
        pid, in_hand = (None, None) if engine is None else engine.look(slot.number)
        load, descriptors, threads = (None, None, None) if engine is None else engine.load_of(slot.number)
        rows.append(
            SlotStatistics(
                slot=slot.number,
                state="closed" if engine is None else slot.state,
                pid=pid,
                incarnation=slot.incarnation,
                doing=in_hand.stage.words if in_hand else "",
                batch=in_hand.batch if in_hand else -1,
                seconds=in_hand.seconds if in_hand else 0.0,
                queued=len(slot.queue),
                cell_bytes=0 if engine is None else engine.cell_bytes(slot.number),
                load=load,
                descriptors=descriptors,
                threads=threads,
                limit_s=None if engine is None else engine.limit_s(slot.number),
            )
        )
    return tuple(rows)
