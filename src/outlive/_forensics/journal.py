"""The journal: every incident of every job of this user, on disk.

Reads   OUTLIVE_HOME, OUTLIVE_JOURNAL, OUTLIVE_JOURNAL_MIB, XDG_STATE_HOME.
Writes  one SQLite file, on a thread of its own.
Never   values of samples, only indices. Never disturbs a job: a disk that is full, read-only, locked or damaged costs
        the incidents their place in the journal, and one line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outlive._forensics.courier import Courier
from outlive._forensics.job import Job, this_job
from outlive._system.safe_files import check_private
from outlive.incident import Incident

log = logging.getLogger("outlive")

DEFAULT_MIB = 64
_OFF = {"0", "off", "no", "false"}
_CAPACITY = 1000
_AT_ONCE = 25  # rows of one transaction: a fork waits for it
WRITE_TIMEOUT_S = 10.0
FORK_WAIT_S = 1.0
_LONGEST_TEXT = 64 * 1024
_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "afs",
    "gluster",
    "fuse",
    "9p",
    "panfs",
    "virtiofs",
)


class UnreadableError(ValueError):
    """An incident in the journal that this version cannot make sense of."""


@dataclass(frozen=True)
class Entry:
    """An incident in the journal, and the job it happened in."""

    id: str
    time: float
    verdict: str
    kind: str
    sentence: str
    samples: tuple[str, ...]
    slot: int
    job: Job
    json: str

    @property
    def incident(self) -> Incident:
        """UnreadableError: it is damaged, or a newer version tells incidents in another way."""
        try:
            return replace(Incident.from_json(self.json), id=self.id)
        except Exception as error:
            raise self._unreadable(error) from None

    @contextlib.contextmanager
    def shown(self) -> Iterator[Incident]:
        """The incident. What cannot be shown of it in the block is an UnreadableError, too."""
        try:
            yield self.incident
        except UnreadableError:
            raise
        except Exception as error:
            raise self._unreadable(error) from error

    def to_dict(self) -> dict[str, Any]:
        """Everything that is known, as JSON has it."""
        import json
        from dataclasses import asdict

        try:
            return {**json.loads(self.json), "id": self.id, "job": asdict(self.job)}
        except (ValueError, TypeError, RecursionError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> UnreadableError:
        why = f"{type(error).__name__}: {error}"
        return UnreadableError(f"incident {self.id} is damaged, or written by a newer version of outlive ({why[:200]})")


class Entries(list[Entry]):
    """Entries, newest first."""

    def __init__(self) -> None:
        self.problems: list[str] = []  # what could not be read, a sentence each


def add(incident: Incident) -> None:
    """Have an incident written; returns at once, whatever the disk does."""
    try:
        if is_on():
            writer.post((incident, this_job()))
    except Exception:
        _count_lost(1)
        log.debug("an incident did not reach the journal", exc_info=True)


def flush(deadline_s: float = 10.0) -> bool:
    """Wait until what was added is written, or given up."""
    return writer.flush(deadline_s)


def has_all(since: float, lost_before: int, deadline_s: float) -> bool:
    """Whether all that was added is in the journal, and nothing of this time was removed for want of room there."""
    return flush(deadline_s) and lost() == lost_before and (not removed_until or removed_until < since)


def lost() -> int:
    """How many incidents of this process did not reach the journal."""
    return _lost + writer.dropped


def is_on() -> bool:
    return os.environ.get("OUTLIVE_JOURNAL", "").strip().lower() not in _OFF and not fork_gate.tainted


def home() -> Path:
    """Where the journal lies: $OUTLIVE_HOME, or outlive's folder among the user's state."""
    own = os.environ.get("OUTLIVE_HOME")
    if own:
        return Path(own)
    state = os.environ.get("XDG_STATE_HOME", "")
    # The standard has paths that are not absolute ignored.
    return (Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()) / "outlive"


def make_home() -> Path:
    """The same, made if it is not there; UnsafeFolder where another user could have put things there."""
    folder = home()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_home()
    return folder


def _check_home() -> None:
    folder = home()
    if os.path.lexists(folder):
        check_private(Path(os.path.realpath(folder)))  # the user may have moved it, and left a link


def path() -> Path:
    """The file that this machine writes: on a file system that others see, each machine has its own."""
    host = f"-{this_job().host}" if is_network_folder(home()) else ""
    return home() / f"journal{host}.sqlite3"


def find(*, limit: int = -1, **conditions: Any) -> Entries:
    """Entries of all machines that write here, newest first; `journal_file.Choice` has the conditions."""
    import sqlite3

    from outlive._forensics.journal_file import Choice, ForeignJournalError, JournalFile, NewerJournalError

    found = Entries()
    failed: list[Exception] = []
    for file in _paths():
        try:
            rows, unreadable, broken_off = JournalFile(file).find(Choice(**conditions), limit=limit)
        except (sqlite3.Error, ForeignJournalError, NewerJournalError) as error:
            failed.append(error)
            found.problems.append(f"{file} cannot be read: {error}")
            continue
        if unreadable:
            found.problems.append(f"{_counted(unreadable)} in {file} cannot be read: damaged, or by a newer outlive")
        if broken_off:
            found.problems.append(f"the rest of {file} cannot be read: {broken_off}")
        for row in rows:
            samples = tuple(row.samples.splitlines())
            job = Job(row.command, row.folder, row.pid, row.host, row.rank)
            found.append(Entry(row.id, row.time, row.verdict, row.kind, row.sentence, samples, row.slot, job, row.json))
    if failed and len(failed) == len(found.problems) and not found:
        raise failed[0]
    found.sort(key=lambda entry: entry.time, reverse=True)
    if limit >= 0:
        del found[limit:]
    return found


def _counted(incidents: int) -> str:
    return f"{incidents} incident{'' if incidents == 1 else 's'}"


def forget(**conditions: Any) -> int:
    """Delete entries; answers how many."""
    from outlive._forensics.journal_file import Choice, JournalFile

    return sum(JournalFile(file).delete(Choice(**conditions)) for file in _paths())


def _paths() -> list[Path]:
    _check_home()
    return sorted(home().glob("journal*.sqlite3"))


# ---------------------------------------------------------------- writing


class _Fork:
    """Keeps forks and SQLite apart: a child has its locks, and those of imports, but not the thread that holds them."""

    def __init__(self) -> None:
        self.tainted = False  # this process was forked while its parent wrote: SQLite may hang here
        self._gate = threading.Lock()
        self._held = threading.local()
        self._registered = False

    def __enter__(self) -> None:
        self._gate.acquire()

    def __exit__(self, *how: object) -> None:
        self._gate.release()

    def watch(self) -> None:
        if not self._registered and hasattr(os, "register_at_fork"):
            self._registered = True
            os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def _before(self) -> None:
        self._held.yes = self._gate.acquire(timeout=FORK_WAIT_S)

    def _in_parent(self) -> None:
        if self._held.yes:
            self._gate.release()

    def _in_child(self) -> None:
        self.tainted = self.tainted or not self._held.yes
        self._gate = threading.Lock()


fork_gate = _Fork()
failure_logged = False
removed_until = 0.0  # the newest incident that had to make room
_lost = 0


def _count_lost(count: int) -> None:
    global _lost
    _lost += count


def _write(posted: Sequence[tuple[Incident, Job]]) -> None:
    global removed_until
    fork_gate.watch()
    try:
        with fork_gate:  # an import that a fork interrupts is never finished in the child
            import json  # noqa: F401
            import secrets  # noqa: F401

            import psutil  # noqa: F401

            from outlive import plain, tables  # noqa: F401
            from outlive._forensics.journal_file import JournalFile
        rows = _rows(posted)
        make_home()
        where = path()
        file = JournalFile(where, size_bytes=read_size_bytes(), shared=is_network_folder(where))
        removed = file.write(rows, deadline_s=WRITE_TIMEOUT_S, gate=fork_gate)
        removed_until = max(removed_until, removed)
        _count_lost(len(posted) - len(rows))
    except Exception as error:
        _count_lost(len(posted))
        _tell_once(error)


def _rows(posted: Sequence[tuple[Incident, Job]]) -> list[Any]:
    rows = []
    for incident, job in posted:
        try:
            rows.append(_row(incident, job))
        except Exception:
            log.debug("an incident cannot be told, and is not in the journal", exc_info=True)
    return rows


def _row(incident: Incident, job: Job) -> Any:
    import json
    import secrets

    from outlive._forensics.journal_file import Row
    from outlive.plain import plain

    samples = [_line(plain(index)) for index in incident.indices[:1000]]
    return Row(
        id=_line(incident.id) or secrets.token_hex(4),
        time=incident.when or time.time(),
        verdict=incident.verdict.name.value if incident.verdict else "",
        kind=incident.kind.value,
        sentence=_line(str(incident)),
        samples="\n".join(samples),
        described="\n".join(_line(text) for text in incident.described[:1000]),
        slot=max(-1, min(incident.slot, 2**31)),
        command=job.command,
        folder=job.folder,
        pid=job.pid,
        host=job.host,
        rank=job.rank,
        json=json.dumps(_shortened(incident.to_dict())),
    )


def _line(value: Any) -> str:
    """One line that a database takes: no surrogates, no line breaks, not a book."""
    text = " ".join(str(value).split("\n"))[:4000]
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\N{REPLACEMENT CHARACTER}")


def _shortened(value: Any) -> Any:
    """Without the middle of very long texts: one exception's message must not push out everybody else's incidents."""
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        half = _LONGEST_TEXT // 2
        return f"{value[:half]}\n… {len(value) - 2 * half} characters left out …\n{value[-half:]}"
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return value


def read_size_bytes() -> int:
    try:
        mib = float(os.environ.get("OUTLIVE_JOURNAL_MIB", DEFAULT_MIB))
        if mib > 0:
            return int(mib * 1024 * 1024)
    except (ValueError, OverflowError):
        pass  # a setting that says nothing: the default serves
    return DEFAULT_MIB << 20


def is_network_folder(folder: Path) -> bool:
    """Whether other machines may see this folder."""
    import psutil

    try:
        real = os.path.realpath(folder)
        mounts = [p for p in psutil.disk_partitions(all=True) if _lies_in(real, p.mountpoint)]
        # Of several on one place the last covers the others.
        kind = sorted(mounts, key=lambda p: len(p.mountpoint))[-1].fstype if mounts else ""
    except Exception:
        return False  # nobody knows: as on a disk of our own
    return kind.lower().startswith(_NETWORK)


def _lies_in(real: str, mountpoint: str) -> bool:
    return real == mountpoint or real.startswith(mountpoint.rstrip("/") + "/")


def _tell_once(error: Exception) -> None:
    global failure_logged
    level = logging.DEBUG if failure_logged else logging.WARNING
    failure_logged = True
    log.log(
        level,
        "the journal in %s cannot be written (%s: %s); the job is not affected, loader.incidents has them all; "
        "set OUTLIVE_HOME to another folder, or OUTLIVE_JOURNAL=0 for no journal",
        home(),
        type(error).__name__,
        error,
    )
    log.debug("writing the journal failed", exc_info=error)


writer: Courier[tuple[Incident, Job]] = Courier("outlive-journal", _write, capacity=_CAPACITY, at_once=_AT_ONCE)
