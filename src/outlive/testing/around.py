"""What a plan has around a program: memory and CPUs that others use, a full disk, a network or a source that fails.

Reads   a table of a plan's file, or a word of its list.
Writes  nothing.
Never   does it: `beside` does, and in the program `injecting`.

    [[surroundings]]
    kind = "memory"         outage, network, memory, cpus or disk
    size = "500MiB"
    from = "5s"             after the first loader has begun
    for = "10s"
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from outlive.quantities import parse_bytes, parse_bytes_or_share
from outlive.settings import check_number
from outlive.testing.plan_words import PlanError, exception_of, nearest, seconds, whole, whole_ones

_TIMES = ("from", "for")
KINDS: dict[str, tuple[str, ...]] = {
    "outage": ("error", "loaders", *_TIMES),
    "network": ("delay", *_TIMES),
    "memory": ("size", *_TIMES),
    "cpus": ("count", *_TIMES),
    "disk": ("size", "folder"),
}
FAILING = ("outage", "network")  # others are a burden, and nothing that raises
_FAILS_FOR_S = 2.0
_SOMEWHERE = (0.1, 0.6)  # of the time that loaders took without faults
_SIZES = {"memory": "", "disk": "1MiB"}


@dataclass(frozen=True)
class Surrounding:
    """Something around the program, from when and for how long. What a kind does not take stays as it is here."""

    kind: str
    from_s: float | None = None  # after the first loader has begun; None: at once, what fails when the seed says
    for_s: float | None = None  # None: to the end
    size: str | int = ""
    count: int = 1
    folder: str = ""  # on the full disk; empty: that of temporary files
    delay_s: float | None = None  # of every connection; None: it is refused
    error: str = "ConnectionRefusedError: injected"
    loaders: tuple[int, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether samples raise because of it."""
        return self.kind in FAILING and self.delay_s is None

    @property
    def raises(self) -> str:
        """The name of the exception, where that is known: what libraries make of a network that fails is theirs."""
        return self.error.partition(":")[0].strip() if self.kind == "outage" else ""


def from_table(table: dict[str, Any], where: str) -> Surrounding:
    """What a [[surroundings]] table of a plan's file says."""
    kinds = ", ".join(KINDS)
    if "kind" not in table:
        raise PlanError(f'{where}: which kind? write kind = "memory" (there are {kinds})')
    kind = str(table["kind"])
    if kind not in KINDS:
        raise PlanError(f"{where}: there is no kind {kind!r}{nearest(kind, KINDS)}")
    for key in table:
        if key != "kind" and key not in KINDS[kind]:
            raise PlanError(f"{where}: {kind} has no {key!r}; it has {', '.join(KINDS[kind])}")
    try:
        return _checked(
            Surrounding(
                kind,
                from_s=seconds(table["from"], "from", least=0) if "from" in table else None,
                for_s=seconds(table["for"], "for") if "for" in table else None,
                size=table.get("size", _SIZES.get(kind, "")),
                count=whole(table, "count", 1),
                folder=str(table.get("folder", "")),
                delay_s=seconds(table["delay"], "delay") if "delay" in table else None,
                error=str(table.get("error", Surrounding.error)),
                loaders=whole_ones(table, "loaders"),
            )
        )
    except (TypeError, ValueError) as error:
        raise PlanError(f"{where}: {error}") from None


_NAMED = re.compile(rf"({'|'.join(KINDS)})(?:@([^:]+))?")


def from_word(word: str) -> Surrounding | None:
    """«outage:3s», «memory@5s:500MiB:10s», «cpus:2»; None: it is no such word."""
    head, *details = word.split(":")
    found = _NAMED.fullmatch(head)
    if found is None:
        return None
    kind, moment = found[1], found[2]
    table: dict[str, Any] = {"kind": kind} | ({"from": moment} if moment else {})
    for detail in details:
        if kind == "cpus" and detail.isdecimal():
            table["count"] = int(detail)
        elif kind in _SIZES and "size" not in table and not re.fullmatch(r"[\d.]+(ms|s|m|h)", detail):
            table["size"] = detail
        elif "for" not in table:
            table["for"] = detail
        else:
            raise PlanError(f"{detail!r} in {word!r} says nothing: {table['for']!r} says for how long already")
    return from_table(table, repr(word))


def _checked(told: Surrounding) -> Surrounding:
    if told.kind == "memory":
        if not told.size:
            raise PlanError("how much memory? give a size, such as 500MiB, or a share of what is free, such as 50%")
        parse_bytes_or_share("size", told.size, 1)
    elif told.kind == "disk":
        parse_bytes("size", told.size)
    elif told.kind == "cpus":
        check_number("count", told.count, least=1, whole=True)
    elif told.kind == "outage":
        exception_of(told.error)
    return told


def words(one: Surrounding, from_s: float, for_s: float | None) -> str:
    """«outage from 1.2 s for 2 s», «cpus to the end»."""
    if one.kind == "disk":
        return "disk"
    since = f" from {from_s:.3g} s" if from_s else ""
    return f"{one.kind}{since}{' to the end' if for_s is None else f' for {for_s:.3g} s'}"


# Each with when it begins, after the first loader has, and for how long; None: to the end.
Timeline: TypeAlias = Sequence[tuple[Surrounding, float, float | None]]


def timeline(planned: Sequence[Surrounding], seed: int, usual_s: float) -> Timeline:
    """When it all happens. `usual_s`: what loaders take without faults; what fails, and is not said when, begins at a
    moment within that, which the seed chooses.
    """
    rng = random.Random(f"{seed}:surroundings")
    found: list[tuple[Surrounding, float, float | None]] = []
    for one in planned:
        chosen_s = usual_s * rng.uniform(*_SOMEWHERE)
        fails = one.kind in FAILING
        begins_s = one.from_s if one.from_s is not None else chosen_s if fails else 0.0
        found.append((one, begins_s, one.for_s if one.for_s is not None else _FAILS_FOR_S if fails else None))
    return found
