"""What came of a chaos run: the survival table, made of notes and incidents.

Reads   the notes of a run with faults and of one without; the incidents of the former.
Writes  nothing; answers with figures, and with the table as text.
Never   believes the loader: what was drawn is noted where it is drawn, what arrived where it arrives.

Lost is a sample that should have come and did not. In an epoch that came to its end that is what was drawn and neither
received nor bad for good; in one that did not, and for streams, what the run without faults received counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outlive.incident import Incident, IncidentKind
from outlive.testing.around import FAILING, KINDS
from outlive.testing.faults import CATALOGUE

_STILL_S = 0.5  # a sample that was asked for just before it was over may be noted after
KILLS = "kill-every"  # the row of workers that were killed from outside
_ORDER = (*CATALOGUE, KILLS, *KINDS)


@dataclass
class Epoch:
    """One pass over a loader, as noted."""

    drawn: Counter[Any] = field(default_factory=Counter)
    got: Counter[Any] = field(default_factory=Counter)
    ended: bool = False
    raised: bool = False
    begun: float = 0.0
    last: float = 0.0
    arrived: list[list[Any]] = field(default_factory=list)  # batch by batch
    given: int = 0  # of these: so many were given to the program

    def close(self) -> None:
        """Of an epoch that broke off, what had arrived and was given to nobody has not been received."""
        for batch in self.arrived if self.ended else self.arrived[: self.given]:
            self.got.update(batch)

    @property
    def seconds(self) -> float:
        return max(0.0, self.last - self.begun)


@dataclass(frozen=True)
class Fired:
    """One injection."""

    row: str
    fault: str
    loader: str
    key: Any
    pid: int
    worker: int
    time: float


@dataclass
class Beside:
    """Something around the program."""

    kind: str
    fails: bool  # samples raise because of it
    begun: float
    error: str = ""  # what they raise; empty: nobody knows
    over: float | None = None  # None: it lasted to the end

    def is_on(self, time: float) -> bool:
        return time >= self.begun and (self.over is None or time <= self.over + _STILL_S)


@dataclass
class Story:
    """The notes of one run, in order."""

    epochs: dict[tuple[str, int], Epoch] = field(default_factory=dict)
    fired: list[Fired] = field(default_factory=list)
    went_on: list[tuple[str, int, int, float]] = field(default_factory=list)  # loader, worker, pid, time
    errors: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    beside: dict[int, Beside] = field(default_factory=dict)  # by place in the plan
    struck: list[Fired] = field(default_factory=list)  # samples and connections that failed by what is around
    gave: list[float] = field(default_factory=list)  # when a batch was given to the program

    @property
    def received(self) -> int:
        return sum(epoch.got.total() for epoch in self.epochs.values())

    @property
    def seconds(self) -> float:
        """From the first loader's beginning to the last one's end."""
        epochs = self.epochs.values()
        return max((epoch.last for epoch in epochs), default=0.0) - min((epoch.begun for epoch in epochs), default=0.0)

    @property
    def rate(self) -> float:
        """Samples per second, while loaders were iterated over."""
        seconds = sum(epoch.seconds for epoch in self.epochs.values())
        return self.received / seconds if seconds else 0.0


def read(notes: Iterable[dict[str, Any]]) -> Story:
    """What notes tell."""
    story = Story()
    for note in notes:
        what, loader = note["what"], note.get("loader", "")
        if what == "fired":
            name, moment = note["fault"], note["moment"]
            natural = CATALOGUE[name]().moment if name in CATALOGUE else moment
            row = name if moment == natural else f"{name}@{moment}"
            fired = Fired(row, name, loader, _key(note["key"]), note["pid"], note["worker"], note["t"])
            (story.struck if name in FAILING else story.fired).append(fired)
        elif what == "began":
            story.beside[note["place"]] = Beside(note["kind"], note["fails"], note["t"], note["error"])
        elif what == "over":
            story.beside[note["place"]].over = note["t"]
        elif what == "went on":
            story.went_on.append((loader, note["worker"], note["pid"], note["t"]))
        elif what == "left":
            story.left[loader] = note["why"]
        else:
            epoch = story.epochs.setdefault((loader, note["epoch"]), Epoch(begun=note["t"]))
            epoch.last = note["t"]
            if what == "drawn":
                epoch.drawn.update(map(_key, note["keys"]))
            elif what == "got":
                epoch.arrived.append([_key(key) for key in note["keys"]])
            elif what == "gave":
                epoch.given += 1
                story.gave.append(note["t"])
            elif what == "ended":
                epoch.ended = True
            elif what == "raised":
                epoch.raised = True
                story.errors.append(note["error"])
    for epoch in story.epochs.values():
        epoch.close()
    return story


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


# ---------------------------------------------------------------- figures


@dataclass(frozen=True)
class Row:
    """What came of one kind of fault."""

    fault: str
    injected: int
    noticed: int | None  # None: there is nothing to be noticed, or nobody to notice it
    survived: int
    lost: int
    recovery_s: tuple[float, ...] = ()

    def recovery(self, share: float) -> float | None:
        """The time within which this share of them was recovered from."""
        if not self.recovery_s:
            return None
        ordered = sorted(self.recovery_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    rows: tuple[Row, ...]
    lost: int  # samples that should have come and did not, whatever stood at them
    lost_samples: tuple[Any, ...]  # those of them whose names are known
    twice: int  # samples that came more than once
    received: int
    expected: int
    rate: float
    plain_rate: float
    status: int | None  # how the program ended; None: it did not, and was killed
    error: str = ""
    bad_anyway: tuple[Any, ...] = ()  # samples that did not come without faults either: not counted as lost

    @property
    def injected(self) -> int:
        return sum(row.injected for row in self.rows)

    @property
    def is_whole(self) -> bool:
        """Nothing was lost, nothing came twice, and the program ended well."""
        return not self.lost and not self.twice and self.status == 0

    @property
    def total(self) -> Row:
        noticed = [row.noticed for row in self.rows if row.noticed is not None]
        times = tuple(time for row in self.rows for time in row.recovery_s)
        survived = sum(row.survived for row in self.rows)
        return Row("all", self.injected, sum(noticed) if noticed else None, survived, self.lost, times)

    def to_dict(self) -> dict[str, Any]:
        told = asdict(self)
        for row, own in zip(told["rows"], self.rows, strict=True):
            row |= {"recovery_p50_s": own.recovery(0.5), "recovery_p99_s": own.recovery(0.99)}
        return told | {"injected": self.injected}


def judge(
    run: Story,
    plain: Story,
    incidents: Sequence[Incident] | None,
    excused: set[tuple[str, Any]],
    status: int | None,
    *,
    may_repeat: bool = False,
    error: str = "",
) -> Outcome:
    """`excused`: samples that are bad for good; `incidents`: None where there is nobody who notices."""
    lost, nameless, anyway = _lost(run, plain, excused)
    doubled = 0 if may_repeat else _twice(run)
    noticed = _noticed(run.fired, incidents) if incidents is not None else None
    rows = []
    for name in sorted({fired.row for fired in run.fired}, key=_order):
        mine = [place for place, fired in enumerate(run.fired) if fired.row == name]
        at = {(run.fired[place].loader, run.fired[place].key) for place in mine}
        back = [_recovered_s(run, run.fired[place], status == 0) for place in mine]
        kind = CATALOGUE.get(run.fired[mine[0]].fault)
        quiet = kind is not None and not kind().notice
        rows.append(
            Row(
                name,
                len(mine),
                None if noticed is None or quiet else sum(noticed[place] for place in mine),
                sum(seconds is not None for seconds in back),
                sum(name in at for name in lost),
                () if quiet else tuple(seconds for seconds in back if seconds is not None and seconds >= 0),
            )
        )
    rows += _beside_rows(run, incidents, lost, status)
    expected = sum(epoch.got.total() for epoch in plain.epochs.values())
    names = tuple(key for _, key in lost)
    everything = len(lost) + nameless
    return Outcome(
        tuple(rows),
        everything,
        names,
        doubled,
        run.received,
        expected,
        run.rate,
        plain.rate,
        status,
        error,
        tuple(dict.fromkeys(key for _, key in anyway)),
    )


def _beside_rows(
    run: Story, incidents: Sequence[Incident] | None, lost: Sequence[tuple[str, Any]], status: int | None
) -> list[Row]:
    """What came of what was around the program. An outage that no sample met was none."""
    rows = []
    for kind in [kind for kind in KINDS if kind in {one.kind for one in run.beside.values()}]:
        struck = [one for one in run.struck if one.fault == kind]
        mine = [one for one in run.beside.values() if one.kind == kind]
        if kind in FAILING:
            mine = [one for one in mine if any(one.is_on(hit.time) for hit in struck)]
        failing = [one for one in mine if one.fails]
        again = [next((time - one.over for time in run.gave if time > one.over), None) for one in mine if one.over]
        rows.append(
            Row(
                kind,
                len(mine),
                sum(_is_told(one, incidents) for one in failing) if failing and incidents is not None else None,
                len(mine) if status == 0 else sum(seconds is not None for seconds in again),
                len({(hit.loader, hit.key) for hit in struck} & set(lost)),
                tuple(seconds for seconds in again if seconds is not None) if failing else (),
            )
        )
    return rows


def _is_told(one: Beside, incidents: Sequence[Incident]) -> bool:
    """Whether incidents tell of a source that fails so: the breaker's, or those of samples."""
    raised = {incident.failure.type_name for incident in incidents if incident.failure is not None}
    return one.error in raised if one.error else bool(raised)


def _order(row: str) -> tuple[int, str]:
    """As in the catalogue, and by moment."""
    name, _, moment = row.partition("@")
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER)), moment


def _lost(
    run: Story, plain: Story, excused: set[tuple[str, Any]]
) -> tuple[list[tuple[str, Any]], int, list[tuple[str, Any]]]:
    """Samples by loader and name, how many more of which the names are not known, and those that are bad anyway: they
    did not come without faults either."""
    named: list[tuple[str, Any]] = []
    anyway: list[tuple[str, Any]] = []
    nameless = 0
    for place in sorted({*run.epochs, *plain.epochs}):
        loader, _ = place
        mine, theirs = run.epochs.get(place, Epoch()), plain.epochs.get(place, Epoch())
        if mine.ended and mine.drawn:
            bad = (mine.drawn - mine.got) & (theirs.drawn - theirs.got)
            anyway += [(loader, key) for key in bad]
            missing = mine.drawn - mine.got - bad
        elif not theirs.drawn and theirs.got:  # a stream: every run gives the same
            missing = theirs.got - mine.got
        else:
            known = Counter({key: n for key, n in (mine.drawn - mine.got).items() if (loader, key) in excused})
            nameless += max(0, theirs.got.total() - mine.got.total() - known.total())
            continue
        named += [(loader, key) for key, n in missing.items() for _ in range(n) if (loader, key) not in excused]
    return named, nameless, anyway


def _twice(run: Story) -> int:
    return sum((epoch.got - epoch.drawn).total() for epoch in run.epochs.values() if epoch.drawn)


def _recovered_s(run: Story, fired: Fired, ended_well: bool) -> float | None:
    """From the fault until its worker, or the one in its place, fetched again; negative: there was no more to fetch.

    None: it was not survived. A worker may well go on in a program that is about to die of what its neighbour did: in
    an epoch that broke off only what still came to the program counts.
    """
    mine = [epoch for (name, _), epoch in run.epochs.items() if name == fired.loader and epoch.begun <= fired.time]
    if not mine:
        return None
    epoch = max(mine, key=lambda one: one.begun)
    whole = epoch.ended or (ended_well and not epoch.raised)  # or the program had seen enough of it
    if not whole and not (epoch.last > fired.time if fired.fault == KILLS else fired.key in epoch.got):
        return None
    kind = CATALOGUE.get(fired.fault)
    dies = kind is None or kind().notice == "death"
    for loader, worker, pid, time in run.went_on:
        if (loader, worker) == (fired.loader, fired.worker) and time > fired.time and not (dies and pid == fired.pid):
            return time - fired.time
    return -1.0 if whole else None


def _noticed(fired: Sequence[Fired], incidents: Sequence[Incident]) -> list[bool]:
    """Of each injection, whether an incident tells of it."""
    deaths = {incident.pid for incident in incidents if incident.kind is not IncidentKind.EXCEPTION}
    raised: set[str] = set()
    for incident in incidents:
        if incident.kind in (IncidentKind.EXCEPTION, IncidentKind.BREAKER):
            raised.update(_name(index) for index in incident.indices)
    found = []
    for one in fired:
        kind = CATALOGUE.get(one.fault)
        if kind is None or kind().notice == "death":
            found.append(one.pid in deaths)
        else:
            found.append(_name(one.key) in raised)
    return found


def _name(key: Any) -> str:
    """The same for a sample's key as a journal has it and as notes have it."""
    if hasattr(key, "ordinal") or (isinstance(key, tuple) and len(key) == 2):
        return f"StreamIndex(worker={key[0]}, ordinal={key[1]})"
    return str(key)


# ---------------------------------------------------------------- the table


def table(outcome: Outcome, other: Outcome | None = None) -> list[str]:
    """The survival table; with another run beside it."""
    head = ["fault", "injected", "noticed", "survived", "lost", "recovered p50", "p99"]
    if other is not None:
        head += ["│ torch: injected", "survived", "lost"]
    theirs = {row.fault: row for row in other.rows} if other is not None else {}
    mine = {row.fault: row for row in outcome.rows}
    lines = [head]
    for name in sorted({*mine, *theirs}, key=_order):
        lines.append(_cells(mine.get(name, Row(name, 0, None, 0, 0)), theirs.get(name), other is not None))
    last = _cells(outcome.total, other.total if other is not None else None, other is not None)
    widths = [max(len(line[place]) for line in [*lines, last]) for place in range(len(head))]
    rule = ["─" * (sum(widths) + 2 * (len(widths) - 1))]
    body = [
        "  ".join(_set(cell, width, place) for place, (cell, width) in enumerate(zip(line, widths))).rstrip()
        for line in [*lines, last]
    ]
    return [body[0], *rule, *body[1:-1], *rule, body[-1]]


def _set(cell: str, width: int, place: int) -> str:
    return cell.ljust(width) if place == 0 else cell.rjust(width)


def _cells(row: Row, other: Row | None, beside: bool) -> list[str]:
    noticed = "–" if row.noticed is None else f"{row.noticed:,}"
    cells = [row.fault, f"{row.injected:,}", noticed, f"{row.survived:,}", f"{row.lost:,}"]
    cells += [_time(row.recovery(0.5)), _time(row.recovery(0.99))]
    if beside:
        cells += [f"{other.injected:,}", f"{other.survived:,}", f"{other.lost:,}"] if other else ["0", "–", "–"]
    return cells


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
