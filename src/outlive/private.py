"""What of an incident may be private, and the incident without it, for whatever leaves the machine. Plain data.

Reads   incidents.
Writes  nothing.
Never   lets through a field that is marked: arguments of commands, tasks and calls, registers, memory, what a process
        wrote. Words that quote such a value are cut, too.

    registers: Mapping[str, int] = field(default_factory=dict, metadata=PRIVATE)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from outlive.evidence import Evidence
    from outlive.incident import Incident
    from outlive.verdicts import Verdict

PRIVATE: Mapping[str, bool] = MappingProxyType({"private": True})  # marks a field of a dataclass
_CUT = "…"
_LEAST_VALUE = 1 << 16  # smaller ones are offsets, flags and counts
_LEAST_QUOTED = 4  # characters of a line
_LONGEST_QUOTED = 60
# Up to the last bracket: a command may have brackets, so where it ends is not known. Rather too much than too little.
_PROCESS = re.compile(r"(process \d+) \(([^\s()]*)(?:.*\)|.*)", re.DOTALL)
_NUMBER = re.compile(r"0x[0-9a-f]+|(?<![\w.])-?\d{5,}(?![\w.])")
_TEXT = re.compile(r"""the text (?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")

T = TypeVar("T")


def without(incident: Incident) -> Incident:
    """The incident without what may be private. What happened, where and why stays."""
    bare = _unmarked(incident)
    evidence = _without_commands(bare.evidence)
    crash = evidence.crash
    if crash is not None and crash.address_as_text:
        evidence = replace(evidence, crash=replace(crash, address=None))
    verdict = None if incident.verdict is None else _verdict(incident.verdict, incident)
    described = bare.described
    if incident.noun == "task":  # the call: its function stays
        described = tuple(each.partition("(")[0] for each in described)
    return replace(bare, evidence=evidence, verdict=verdict, described=described)


def _unmarked(thing: T) -> T:
    """With the defaults of the fields that are marked."""
    changed: dict[str, Any] = {}
    for each in fields(thing):  # type: ignore[arg-type]
        value = getattr(thing, each.name)
        if each.metadata == PRIVATE:
            changed[each.name] = each.default_factory() if each.default_factory is not MISSING else each.default
        elif is_dataclass(value):
            changed[each.name] = _unmarked(value)
        elif isinstance(value, tuple):
            changed[each.name] = tuple(_unmarked(item) if is_dataclass(item) else item for item in value)
    return dataclasses.replace(thing, **changed)  # type: ignore[type-var]


# ---------------------------------------------------------------- commands of other processes


def program(command: str) -> str:
    """Return `ffmpeg` for `ffmpeg -i a.mp4`."""
    return (command.split() or [""])[0]


def _programs(words: str) -> str:
    """Return `a pipe to process 812 (ffmpeg)` for `a pipe to process 812 (ffmpeg -i a.mp4)`."""
    return _PROCESS.sub(r"\1 (\2)", words)


def _without_commands(evidence: Evidence) -> Evidence:
    seen, around, examined = evidence.seen, evidence.surroundings, evidence.examined
    if seen is not None:
        threads = tuple(replace(thread, target=_programs(thread.target)) for thread in seen.threads)
        seen = replace(seen, threads=threads, tracer=_programs(seen.tracer))
    if around is not None:
        around = replace(around, sender=program(around.sender))
    if examined is not None and examined.instruction is not None and not examined.instruction.is_valid:
        examined = replace(examined, instruction=replace(examined.instruction, text=""))  # it has the bytes
    return replace(evidence, seen=seen, surroundings=around, examined=examined)


# ---------------------------------------------------------------- words


def _verdict(verdict: Verdict, incident: Incident) -> Verdict:
    """With words that quote nothing private: facts that quote what the worker wrote go altogether."""
    cut = dict(_replacements(incident))
    values = frozenset(_values(incident))

    def told(text: str) -> str:
        for old, new in cut.items():
            text = text.replace(old, new)
        return _TEXT.sub(f"the text {_CUT}", _NUMBER.sub(lambda found: _number(found[0], values), text))

    written = [line.strip()[:_LONGEST_QUOTED] for line in incident.evidence.last_words.splitlines()]
    written = [line for line in written if len(line) >= _LEAST_QUOTED]
    facts = tuple(told(fact) for fact in verdict.facts if not any(line in fact for line in written))
    return replace(verdict, cause=told(verdict.cause), facts=facts, remedies=tuple(map(told, verdict.remedies)))


def _replacements(incident: Incident) -> Iterator[tuple[str, str]]:
    seen, around, examined = incident.evidence.seen, incident.evidence.surroundings, incident.evidence.examined
    if around is not None and around.sender:
        yield around.sender, program(around.sender)
    if seen is not None:
        for words in filter(None, (seen.tracer, *(thread.target for thread in seen.threads))):
            yield words, _programs(words)
    instruction = examined.instruction if examined is not None else None
    if instruction is not None and instruction.divisor_value not in (None, 0, -1):
        yield f"division by {instruction.divisor_value}", f"division by {_CUT}"
    if instruction is not None and not instruction.is_valid and instruction.text:
        yield instruction.text, _CUT


def _values(incident: Incident) -> Iterator[int]:
    """Numbers that are contents of registers or of memory: an address that was used came from there."""
    crash = incident.crash
    if crash is not None:
        yield from (value for value in (*crash.registers.values(), crash.address or 0) if value >= _LEAST_VALUE)


def _number(text: str, values: frozenset[int]) -> str:
    value = int(text, 0)
    return _CUT if value % (1 << 64) in values else text


# ---------------------------------------------------------------- names


def differences(told: Any, bare: Any, at: str = "") -> Iterator[str]:
    """Where an incident as plain values differs from itself without what is private, such as `crash.registers`."""
    if isinstance(told, dict) and isinstance(bare, dict) and (bare or not told):
        for name, value in told.items():
            yield from differences(value, bare.get(name), f"{at}.{name}" if at else name)
    elif told != bare:
        yield at
