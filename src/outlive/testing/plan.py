"""What chaos is to do: read from a command line or a TOML file, and checked.

Reads   text.
Writes  nothing.
Never   guesses: a word that means nothing is an error that names the nearest ones that do.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import random
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outlive.quantities import parse_bytes
from outlive.settings import check_number
from outlive.testing import around
from outlive.testing.around import Surrounding
from outlive.testing.faults import ALIASES, CATALOGUE, MOMENTS, Fault
from outlive.testing.marks import Marks
from outlive.testing.modifiers import At, Times
from outlive.testing.plan_words import PlanError, exception_of, nearest, seconds, whole, whole_ones

POLICIES = ("raise", "skip", "replace")
HANG_TIMEOUT_S = 5.0  # where the plan has hangs and nobody has said what a sample may take
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
_TIMES = re.compile(r"x(\d+)")


@dataclass(frozen=True)
class Planned:
    """A fault, how many samples it is planted at, and how often it fires at each. `times=None`: always."""

    fault: str
    share: float | None = None
    count: int | None = None
    samples: tuple[Any, ...] = ()
    moment: str = ""
    times: int | None = 1
    loaders: tuple[int, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self, marks: Marks | None = None) -> Fault:
        """The fault itself; a transient one keeps its marks there."""
        arguments = dict(self.arguments)
        if "error" in arguments:
            arguments["error"] = exception_of(str(arguments["error"]))
        fault = CATALOGUE[self.fault](**arguments)
        if self.moment:
            fault = At(self.moment, fault)
        return fault if self.times is None else Times(self.times, fault, marks)

    @property
    def table(self) -> dict[str, Any]:
        """As a plan's file has it; where it is planted stands elsewhere."""
        times = "always" if self.times is None else self.times
        return {"fault": self.fault, "times": times, "moment": self.moment, **self.arguments}

    def choose(self, keys: Sequence[Any], rng: random.Random) -> list[Any]:
        """The samples that it is planted at, out of those that come without faults."""
        if self.samples:
            return [key for key in keys if key in self.samples or (type(key) is tuple and key[1] in self.samples)]
        count = math.ceil(self.share * len(keys)) if self.share is not None else self.count or 1
        return rng.sample(list(keys), min(count, len(keys)))

    @property
    def row(self) -> str:
        """Its line in the table."""
        return f"{self.fault}@{self.moment}" if self.moment else self.fault


@dataclass(frozen=True)
class Plan:
    """Everything that chaos is to do; `parse_faults` makes faults of a text, as on the command line."""

    faults: tuple[Planned, ...] = ()
    kill_every_s: float | None = None
    seed: int = 0
    policy: str = "skip"
    sample_timeout: float | None = None  # None: as the environment says, or HANG_TIMEOUT_S where there are hangs
    busy_cpus: int = 0  # from the first loader to the end; `surroundings` can say more
    memory_pressure: int = 0
    surroundings: tuple[Surrounding, ...] = ()

    def __post_init__(self) -> None:
        # What `parse_faults` gives may have both.
        named = tuple(one for one in self.faults if isinstance(one, Surrounding))
        object.__setattr__(self, "surroundings", (*self.surroundings, *named))
        object.__setattr__(self, "faults", tuple(one for one in self.faults if isinstance(one, Planned)))
        check_number("busy_cpus", self.busy_cpus, least=0, whole=True)
        if self.policy not in POLICIES:
            raise PlanError(f"policy must be {', '.join(POLICIES[:-1])} or {POLICIES[-1]}, got {self.policy!r}")
        if not (self.faults or self.kill_every_s or self.around):
            raise PlanError("a plan without faults shows nothing; say which, such as --faults segv,oom,hang:2%")

    @property
    def around(self) -> tuple[Surrounding, ...]:
        """What is around the program, said in either way."""
        cpus = (Surrounding("cpus", count=self.busy_cpus),) if self.busy_cpus else ()
        memory = (Surrounding("memory", size=self.memory_pressure),) if self.memory_pressure else ()
        return (*self.surroundings, *cpus, *memory)

    @property
    def has_hangs(self) -> bool:
        return any(planned.make(_NO_MARKS).plain.hangs for planned in self.faults)

    @property
    def retries(self) -> int:
        """So many that no sample is condemned for what is transient: its own fault, and another that falls on it, too.

        Not for more: that is unlikely, and the pauses between tries of what is bad for good must be over before the
        next worker is killed.
        """
        harmful = [planned.times or 0 for planned in self.faults if planned.make(_NO_MARKS).plain.notice]
        return max([1, *harmful]) + (len(harmful) + (self.kill_every_s is not None) > 1)

    @property
    def errors(self) -> list[str]:
        """Names of the exceptions that its faults raise, for retry_on. Not those of outages, which are the breaker's:
        tries of each sample, with their pauses, would keep it from seeing that all fail.
        """
        own = ["outlive.testing.faults.InjectedError"]
        for planned in self.faults:
            error = planned.arguments.get("error")
            if error is not None:
                own.append(str(error).partition(":")[0].strip())
        return own


_NO_MARKS = Marks(path="")


def parse_faults(text: str) -> tuple[Any, ...]:
    """«segv,oom:5,hang:2%,kill@collate:always,exit:x2»; «all» is the whole catalogue, a sample each. What is around a
    program may stand in it, too: «outage:3s,memory@5s:500MiB:10s». Gives what `Plan(faults=)` takes: a `Planned` or a
    `Surrounding` for each word.
    """
    found: list[Any] = []
    for word in text.split(","):
        if not word.strip():
            continue
        beside = around.from_word(word.strip())
        if beside is not None:
            found.append(beside)
            continue
        named, *details = word.strip().split(":")
        name, _, moment = named.partition("@")
        if name == "all":
            found += [Planned(known, moment=moment) for known in CATALOGUE]
            if details or moment:
                raise PlanError(f"«all» takes no details, got {word.strip()!r}")
            continue
        found.append(_checked(_detailed(fault_name(name), moment, details, word.strip())))
    if not found:
        raise PlanError(f"there is no fault in {text!r}; there are {', '.join([*CATALOGUE, *around.KINDS])}")
    return tuple(found)


def _detailed(name: str, moment: str, details: Iterable[str], word: str) -> Planned:
    planned = Planned(name, moment=moment)
    for detail in details:
        share, times = _SHARE.fullmatch(detail), _TIMES.fullmatch(detail)
        if share:
            planned = dataclasses.replace(planned, share=float(share[1]) / 100)
        elif times:
            planned = dataclasses.replace(planned, times=int(times[1]))
        elif detail == "always":
            planned = dataclasses.replace(planned, times=None)
        elif detail.isdecimal():
            planned = dataclasses.replace(planned, count=int(detail))
        else:
            raise PlanError(
                f"{detail!r} in {word!r} says nothing; write 2% or 5 (samples), x3 (times at each) or always"
            )
    return planned


def fault_name(name: str) -> str:
    """The catalogue's name of a fault."""
    known = name.strip().lower().replace("_", "-")
    known = ALIASES.get(known, known)
    if known in around.KINDS:
        raise PlanError(f'{known} is no fault of a sample; write [[surroundings]] and kind = "{known}"')
    if known not in CATALOGUE:
        raise PlanError(f"there is no fault {name!r}{nearest(known, [*CATALOGUE, *ALIASES, *around.KINDS], ALIASES)}")
    return known


def _checked(planned: Planned) -> Planned:
    where = f"fault {planned.fault}"
    if planned.moment and planned.moment not in MOMENTS:
        raise PlanError(f"{where}: there is no moment {planned.moment!r}{nearest(planned.moment, MOMENTS)}")
    if planned.share is not None and not 0 < planned.share <= 1:
        raise PlanError(f"{where}: a share is between 0% and 100%, got {planned.share:.6%}")
    if planned.count is not None and planned.count < 1:
        raise PlanError(f"{where}: at how many samples? got {planned.count}")
    if planned.times is not None and planned.times < 1:
        raise PlanError(f'{where}: times must be at least 1, or "always", got {planned.times}')
    try:
        planned.make(_NO_MARKS)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{where}: {error}") from None
    return planned


# ---------------------------------------------------------------- a file


def load(path: str | Path) -> Plan:
    """The plan of a TOML file."""
    tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        told = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # TOML's, and that of text which is none
        raise PlanError(f"{path} is no TOML: {error}") from None
    return from_dict(told, str(path))


_KEYS = ("seed", "policy", "kill_every", "sample_timeout", "busy_cpus", "memory_pressure", "fault", "surroundings")
_FAULT_KEYS = ("fault", "share", "count", "samples", "moment", "times", "loaders")


def from_dict(told: dict[str, Any], name: str = "the plan") -> Plan:
    """The plan that these keys mean; [[fault]] and [[surroundings]] tables are in lists."""
    for key in told:
        if key not in _KEYS:
            raise PlanError(f"{name}: there is no key {key!r}{nearest(key, _KEYS)}")
    tables = _tables(told, "fault", name)
    beside = _tables(told, "surroundings", name)
    kill_every = told.get("kill_every")
    try:
        return Plan(
            faults=tuple(_planned(table, f"{name}, fault {number}") for number, table in enumerate(tables, 1)),
            kill_every_s=None if kill_every is None else seconds(kill_every, "kill_every"),
            seed=whole(told, "seed", 0),
            policy=told.get("policy", "skip"),
            sample_timeout=None if "sample_timeout" not in told else seconds(told["sample_timeout"], "sample_timeout"),
            busy_cpus=whole(told, "busy_cpus", 0),
            memory_pressure=parse_bytes("memory_pressure", told["memory_pressure"]) if "memory_pressure" in told else 0,
            surroundings=tuple(
                around.from_table(table, f"{name}, surroundings {number}") for number, table in enumerate(beside, 1)
            ),
        )
    except PlanError as error:
        raise error if str(error).startswith(name) else PlanError(f"{name}: {error}") from None
    except (TypeError, ValueError) as error:
        raise PlanError(f"{name}: {error}") from None


def _tables(told: dict[str, Any], key: str, name: str) -> list[dict[str, Any]]:
    tables = told.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise PlanError(f"{name}: {key} is a table, or several, each begun by [[{key}]], got {tables!r}")
    return tables


def _planned(table: dict[str, Any], where: str) -> Planned:
    try:
        return _checked(_from_table(table))
    except (TypeError, ValueError) as error:
        raise PlanError(f"{where}: {error}") from None


def _from_table(table: dict[str, Any]) -> Planned:
    if "fault" not in table:
        raise PlanError('which one? write fault = "segv"')
    name = fault_name(str(table["fault"]))
    arguments = {key: value for key, value in table.items() if key not in _FAULT_KEYS}
    kind: Any = CATALOGUE[name]
    takes = [one.name for one in dataclasses.fields(kind)]
    for key in arguments:
        if key not in takes:
            raise PlanError(f"{name} has no {key!r}{nearest(key, [*_FAULT_KEYS, *takes])}")
    given = [key for key in ("share", "count", "samples") if key in table]
    if len(given) > 1:
        raise PlanError(f"{' and '.join(given)} are two answers to how many; choose one")
    share, samples = table.get("share"), table.get("samples", [])
    if isinstance(share, str):
        found = _SHARE.fullmatch(share.replace(" ", ""))
        share = float(found[1]) / 100 if found else share
    if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float))):
        raise PlanError(f'a share is written "2%" or 0.02, got {share!r}')
    if not isinstance(samples, list):
        raise PlanError(f"samples are a list, such as [18, 40], got {samples!r}")
    times = table.get("times", 1)
    return Planned(
        name,
        share=share,
        count=whole(table, "count", None),
        samples=tuple(tuple(key) if isinstance(key, list) else key for key in samples),
        moment=str(table.get("moment", "")),
        times=None if times == "always" else whole(table, "times", 1),
        loaders=whole_ones(table, "loaders"),
        arguments=arguments,
    )
