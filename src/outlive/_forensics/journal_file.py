"""One journal on disk: a SQLite file that many processes write at once.

Reads   the file.
Writes  the file, never more than its size allows; sets a damaged one aside.
Never   stays open: a process that forks must carry no connection along. Never writes to another program's database,
        nor removes or replaces a file.

    write ──► begin immediate ─► insert ─► oldest out, while too large ─► commit
                 └ locked: short waits, with the gate open in between
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import NamedTuple

SCHEMA = 1
_APPLICATION = 0x686F6C64  # «hold»: what `file` shows
_SHORT_WAIT_S = 0.1
_KEEP = 0.9  # of the size, once it is exceeded: not every write should have to delete
_DAMAGED, _MOST_DAMAGED = ".damaged", 3
_PARTS = ("-wal", "-shm", "-journal", "")  # SQLite's own files beside it first
_TABLES = """
CREATE TABLE incidents (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    time REAL NOT NULL,
    verdict TEXT NOT NULL,
    kind TEXT NOT NULL,
    sentence TEXT NOT NULL,
    samples TEXT NOT NULL,      -- a line each
    described TEXT NOT NULL,
    slot INTEGER NOT NULL,
    command TEXT NOT NULL,
    folder TEXT NOT NULL,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    rank INTEGER,
    json TEXT NOT NULL,
    UNIQUE (id, time, host, pid)
);
CREATE INDEX incidents_by_time ON incidents (time);
"""


class NewerJournalError(Exception):
    """A newer version of outlive made this file: it is left as it is."""


class ForeignJournalError(OSError):
    """Another program made this file: it is left as it is."""


@dataclass(frozen=True)
class Row:
    """An incident as it stands in the file."""

    id: str
    time: float
    verdict: str
    kind: str
    sentence: str
    samples: str
    described: str
    slot: int
    command: str
    folder: str
    pid: int
    host: str
    rank: int | None
    json: str


class Found(NamedTuple):
    """Rows of a file, and what of it could not be read."""

    rows: list[Row]
    unreadable: int = 0
    broken_off: str = ""  # why the rest is missing


_TEXT = (str,)
_KINDS = (_TEXT, (float,), *(_TEXT,) * 5, (int,), *(_TEXT,) * 2, (int,), _TEXT, (int, type(None)), _TEXT)  # of a Row


def _is_row(values: tuple[object, ...]) -> bool:
    """Whether these are a row's. SQLite stores anything in any column, and a damaged file has anything."""
    return all(type(value) in kinds for value, kinds in zip(values, _KINDS)) and math.isfinite(values[1])  # type: ignore[arg-type]


_COLUMNS = ", ".join(f.name for f in fields(Row))
_PLACES = ", ".join("?" for _ in fields(Row))


@dataclass(frozen=True)
class Choice:
    """Which rows: all conditions that are given."""

    id_prefix: str = ""
    verdict: str = ""
    since: float | None = None
    before: float | None = None
    job: str = ""  # part of the command or folder, or the pid, or the host
    sample: str = ""  # the index, or part of its description

    def where(self) -> tuple[str, list[object]]:
        terms: list[tuple[str, list[object]]] = []
        if self.id_prefix:
            terms.append(("substr(id, 1, ?) = ?", [len(self.id_prefix), self.id_prefix]))
        if self.verdict:
            terms.append(("verdict = ?", [self.verdict]))
        if self.since is not None:
            terms.append(("time >= ?", [self.since]))
        if self.before is not None:
            terms.append(("time < ?", [self.before]))
        if self.job:
            term = "(instr(command, ?) OR instr(folder, ?) OR CAST(pid AS TEXT) = ? OR host = ?)"
            terms.append((term, [self.job] * 4))
        if self.sample:
            term = "(instr(char(10) || samples || char(10), ?) OR instr(described, ?))"
            terms.append((term, [f"\n{self.sample}\n", self.sample]))
        if not terms:
            return "", []
        return " WHERE " + " AND ".join(t for t, _ in terms), [value for _, values in terms for value in values]


class JournalFile:
    """A path, and what may be done with the file there."""

    def __init__(self, path: Path, *, size_bytes: int = 64 << 20, shared: bool = False) -> None:
        self.path = path
        self._size_bytes = size_bytes
        self._shared = shared  # on a file system that other machines see, too: no WAL, which needs shared memory

    def write(
        self, rows: Sequence[Row], *, deadline_s: float, gate: contextlib.AbstractContextManager[object]
    ) -> float:
        """Add the rows; the gate is closed only while the file is open. Answers the time of the newest row that was
        removed to make room; 0: none was."""
        give_up_at = time.monotonic() + deadline_s
        while True:
            try:
                with gate:
                    return self._write_once(rows)
            except sqlite3.OperationalError as error:
                # Locked by another process, or being made by one: worth another try. A full disk may be free again.
                if time.monotonic() > give_up_at or not _is_busy(error):
                    raise
            except sqlite3.DatabaseError as error:
                if type(error) is not sqlite3.DatabaseError or time.monotonic() > give_up_at:
                    raise  # our own mistake, not the file's
                with gate:
                    self._set_aside_if_damaged()
            time.sleep(_SHORT_WAIT_S / 4)

    def find(self, choice: Choice, *, limit: int = -1) -> Found:
        """The rows of a choice, newest first."""
        if not self.path.exists():
            return Found([])
        where, values = choice.where()
        query = f"SELECT {_COLUMNS} FROM incidents{where} ORDER BY time DESC, number DESC LIMIT ?"
        found: list[Row] = []
        unreadable = 0
        with self._open_to_read() as connection:
            if not _version(connection) and not _is_foreign(connection):
                return Found([])  # made, and not yet filled
            _check_version(connection, self.path)
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            try:
                for row in connection.execute(query, [*values, limit]):
                    if _is_row(row):
                        found.append(Row(*row))
                    else:
                        unreadable += 1
            except sqlite3.DatabaseError as error:
                if not found:
                    raise
                return Found(found, unreadable, str(error))
        return Found(found, unreadable)

    def delete(self, choice: Choice) -> int:
        """Remove the rows of a choice, and give their room back; answers how many there were."""
        if not self.path.exists():
            return 0
        where, values = choice.where()
        with self._open(wait_s=10.0) as connection:
            # So that what is forgotten cannot be read from the file's free pages.
            connection.execute("PRAGMA secure_delete = ON")
            with _transaction(connection):
                count = connection.execute(f"DELETE FROM incidents{where}", values).rowcount
            connection.execute("PRAGMA incremental_vacuum").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return count

    def _write_once(self, rows: Sequence[Row]) -> float:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Commands and file names are the user's own; SQLite gives its other files the rights of this one.
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        with self._open(wait_s=_SHORT_WAIT_S) as connection:
            with _transaction(connection):
                connection.executemany(
                    f"INSERT OR IGNORE INTO incidents ({_COLUMNS}) VALUES ({_PLACES})", map(astuple, rows)
                )
                removed = self._make_room(connection)
            connection.execute("PRAGMA incremental_vacuum").fetchall()
        return removed

    def _make_room(self, connection: sqlite3.Connection) -> float:
        """Remove the oldest until what is used is well below the size; answers the time of the newest of them."""
        used = _used_bytes(connection)
        if used <= self._size_bytes:
            return 0.0
        (together,) = connection.execute("SELECT total(length(json)) FROM incidents").fetchone()
        per_byte = used / max(1.0, together)  # pages, index and the other columns included
        excess = used - self._size_bytes * _KEEP
        oldest: list[tuple[int]] = []
        removed = 0.0
        query = "SELECT number, length(json), time FROM incidents ORDER BY time, number"
        for number, length, at in connection.execute(query):
            if excess <= 0:
                break
            excess -= length * per_byte
            oldest.append((number,))
            removed = at if isinstance(at, float) else removed
        connection.executemany("DELETE FROM incidents WHERE number = ?", oldest)
        return removed

    @contextlib.contextmanager
    def _open(self, *, wait_s: float) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, timeout=wait_s, isolation_level=None, check_same_thread=True)
        try:
            if not _version(connection) and not _is_foreign(connection):
                self._make(connection)
            _check_version(connection, self.path)
            connection.execute("PRAGMA synchronous = NORMAL")
            yield connection
        finally:
            connection.close()

    @contextlib.contextmanager
    def _open_to_read(self) -> Iterator[sqlite3.Connection]:
        """Without making or changing anything; a folder that may not be written is read as it lies there."""
        uri = self.path.absolute().as_uri()
        mode = "mode=rw" if os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK) else "immutable=1"
        connection = sqlite3.connect(f"{uri}?{mode}", uri=True, timeout=10.0, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()

    def _make(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table
        if not self._shared:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()  # where it is refused, the old mode stays
        with _transaction(connection):
            if not _version(connection):  # else another process was faster
                for statement in _TABLES.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {SCHEMA}")

    def _set_aside_if_damaged(self) -> None:
        """Two processes may find the damage at once: the second must not take away what the first began anew."""
        with _alone(self.path.with_name(self.path.name + ".lock")) as alone:
            if not alone or self._is_sound():
                return
            aside = self._free_name()
            for part in _PARTS:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{self.path}{part}", f"{aside}{part}")

    def _free_name(self) -> str:
        """For a damaged file. Nothing is replaced, and only so many are kept: they must not fill a disk."""
        for number in range(1, _MOST_DAMAGED + 1):
            aside = f"{self.path}{_DAMAGED}{f'-{number}' if number > 1 else ''}"
            if not any(os.path.lexists(f"{aside}{part}") for part in _PARTS):
                return aside
        raise OSError(f"{self.path} is damaged, and so were {_MOST_DAMAGED} before it: remove {self.path}{_DAMAGED}*")

    def _is_sound(self) -> bool:
        connection = sqlite3.connect(self.path, timeout=_SHORT_WAIT_S, isolation_level=None)
        try:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
        except sqlite3.OperationalError:
            return True  # locked: somebody works with it
        except sqlite3.DatabaseError:
            return False
        finally:
            connection.close()


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back by itself
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _is_foreign(connection: sqlite3.Connection) -> bool:
    """Whether it is another program's database. An empty one may become a journal."""
    (identity,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return bool(identity != _APPLICATION and (identity or tables))


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    if _is_foreign(connection):
        raise ForeignJournalError(f"{path} is a database of another program's: set OUTLIVE_HOME to another folder")
    if _version(connection) > SCHEMA:
        raise NewerJournalError(f"{path} was made by a newer version of outlive: update this one to read or write it")


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _is_busy(error: sqlite3.OperationalError) -> bool:
    code = getattr(error, "sqlite_errorcode", None)  # Python 3.11 and later
    if code is None:
        return "locked" in str(error)
    return code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)  # type: ignore[attr-defined,unused-ignore]


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether nobody else holds this lock file."""
    try:
        import fcntl
    except ImportError:  # where there is none, files that are open cannot be renamed either
        yield True
        return
    number = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(number)
