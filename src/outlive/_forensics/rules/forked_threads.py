"""The verdict on workers that were forked from a process with threads, and wait for one of those.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock.
"""

from __future__ import annotations

from collections.abc import Callable

from outlive._forensics import frames
from outlive.evidence import Seen
from outlive.incident import Incident
from outlive.verdicts import Confidence, Name, Verdict

_MOST_NAMED = 3


def forked_with_threads(incident: Incident) -> Verdict | None:
    seen = incident.evidence.seen
    if seen is None or not seen.out_of_reach:
        return None
    # Only a thread that Python knows takes a lock of Python's. With none left behind, it was the one that forked.
    takers = seen.left_behind if "(a threading." in seen.out_of_reach else (*seen.left_behind, *seen.left_native)
    if not takers:
        return None
    frame = frames.nearest_users(frames.of_stack(incident.stack))
    at = f" at {frame.words}" if frame else ""
    held = bool(seen.inherited_locks)
    what = "who held it is not here" if held else "which forking does not copy"
    facts = [
        f"its main thread waits in {seen.threads[0].system_call}, and no other thread of it could end that",
        f"the process that workers were forked from had other threads: {_named(seen)}",
        *(f"native code on its stack: {place}" for place in seen.places[:1]),
        f"no progress for {incident.in_hand.seconds:.1f} s",
    ]
    return Verdict(
        Name.FORKED_WITH_THREADS,
        f"waits{at} for {seen.out_of_reach}{': ' if held else ', '}{what}",
        facts=tuple(facts),
        remedies=(
            'multiprocessing_context="spawn"   workers then begin without what threads left behind, and make their own',
            "make the pool, lock or connection lazily: on first use in the worker, or in worker_init_fn",
        ),
        confidence=Confidence.CERTAIN if held else Confidence.LIKELY,
    )


def _named(seen: Seen) -> str:
    names = [*seen.left_behind, *seen.left_native]
    return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")


RULES: tuple[Callable[[Incident], Verdict | None], ...] = (forked_with_threads,)
