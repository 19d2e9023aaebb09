"""The board: a small file that a job maps and writes, and that viewers map and read. Where everything is on it.

Reads   a copy of a board.
Writes  words into one.
Never   opens or maps anything.

    words 0…63      the head: what it is, the sequence number, counters (see HEAD)
    texts           breaker, advice, quarantined by verdict, workers stuck in the kernel: a length, then UTF-8
    histograms      fetch, collate, send: the sum in nanoseconds, then a count for each power of two
    slots           a row each: what its worker does, where its black box is, the samples of its next batches
    slate           what the trainer itself does, where it makes its batches: the words of a black box

The sequence number is odd while the job writes. Who reads copies all of it, and looks whether the number has changed.
«left» alone is written with each batch, by one store, and counts down: delivered is «base» less «left».
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlive._capture import blackbox
from outlive._capture.blackbox import BUCKETS, FIRST_BUCKET, SLATE_WORDS

MAGIC = int.from_bytes(b"outlive", "little") >> 1
VERSION = 2
HEAD = (
    *("magic", "version", "sequence", "slots", "base", "left", "time_ns", "clock_ns"),
    *("epoch", "samples", "bytes", "wait_ns", "waiting_since_ns", "epoch_since_ns", "epochs_ns"),
    *("errored", "emptied", "restarts", "retries", "replaced", "recycled", "quarantined", "incidents"),
    *("workers", "cell_bytes", "cells", "memory_limit", "ended_ns", "events"),
)
AT = {name: place for place, name in enumerate(HEAD)}
SEQUENCE, BASE, LEFT, ENDED = AT["sequence"], AT["base"], AT["left"], AT["ended_ns"]
COUNTS = HEAD[AT["time_ns"] : AT["ended_ns"]]  # what is written together
_COUNTS = slice(AT["time_ns"], AT["ended_ns"])

TEXTS = ("breaker", "advice", "by_verdict", "stuck")
_TEXT_WORDS = 128
_TEXTS_AT = 64
HISTOGRAMS = ("fetch", "collate", "send")
_HISTOGRAM_WORDS = 1 + BUCKETS
TIMES = blackbox.TIMES
_TIMES_AT = _TEXTS_AT + len(TEXTS) * _TEXT_WORDS
_SLOTS_AT = _TIMES_AT + TIMES + 1

ROW = (
    *("incarnation", "state", "pid", "holder", "box_fd", "stack_fd", "queued", "stage", "batch", "position"),
    *("since_ns", "stand_in", "resident", "private", "shared", "slope", "descriptors", "threads"),
    *("on_cpu", "starved", "waiting", "idle", "disk", "load_ns", "limit_ms", "cell_bytes"),
)
STATES = ("empty", "starting", "ready", "closed", "here")  # here: no worker, the trainer itself
_ROW_WORDS = 32
LISTS, LISTED = 4, 256  # batches of a slot whose samples are named, and how many of each
_LIST_WORDS = 2 + LISTED
_SLOT_WORDS = _ROW_WORDS + LISTS * _LIST_WORDS
MOST_SLOTS = 256


def size_bytes(slots: int) -> int:
    return 8 * (_slate_at(slots) + SLATE_WORDS)


def _slate_at(slots: int) -> int:
    return _SLOTS_AT + min(slots, MOST_SLOTS) * _SLOT_WORDS


# ---------------------------------------------------------------- writing


def begin(words: Any, slots: int) -> None:
    words[AT["version"]] = VERSION
    words[AT["slots"]] = min(slots, MOST_SLOTS)
    words[AT["magic"]] = MAGIC


def write_counts(words: Any, counts: Sequence[int]) -> None:
    """As COUNTS names them."""
    words[_COUNTS] = memoryview(array("q", counts))


def write_text(words: Any, name: str, text: str) -> None:
    encoded = text.encode("utf-8", "replace")[: 8 * (_TEXT_WORDS - 1)]
    at = _TEXTS_AT + TEXTS.index(name) * _TEXT_WORDS
    padded = array("q", encoded + bytes(-len(encoded) % 8))
    words[at] = len(encoded)
    if padded:
        words[at + 1 : at + 1 + len(padded)] = memoryview(padded)


def write_times(words: Any, times: Sequence[int]) -> None:
    words[_TIMES_AT : _TIMES_AT + TIMES] = memoryview(array("q", times))


def write_row(words: Any, slot: int, row: Sequence[int]) -> None:
    """As ROW names it."""
    at = _SLOTS_AT + slot * _SLOT_WORDS
    words[at : at + len(ROW)] = memoryview(array("q", row))


def write_list(words: Any, slot: int, place: int, batch: int, indices: Iterable[int]) -> None:
    """The samples of a batch that a slot's worker has, or is to have, in hand."""
    at = _SLOTS_AT + slot * _SLOT_WORDS + _ROW_WORDS + place * _LIST_WORDS
    listed = array("q", indices)[:LISTED]
    words[at + 1] = 0
    if listed:
        words[at + 2 : at + 2 + len(listed)] = memoryview(listed)
    words[at] = batch
    words[at + 1] = len(listed)


def slate(words: Any, slots: int) -> Any:
    """That part of it."""
    at = _slate_at(slots)
    return words[at : at + SLATE_WORDS]


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Row:
    values: Mapping[str, int]
    listed: Mapping[int, Sequence[int]]  # batch → its samples


@dataclass(frozen=True)
class Picture:
    """A board as it was at one moment."""

    head: Mapping[str, int]
    texts: Mapping[str, str]
    times: Sequence[int]
    rows: Sequence[Row]
    slate: array[int]

    @property
    def delivered(self) -> int:
        return self.head["base"] - self.head["left"]


def is_board(words: Sequence[int]) -> bool:
    return len(words) > _SLOTS_AT and words[0] == MAGIC and words[AT["version"]] == VERSION


def read(words: array[int]) -> Picture:
    """`words`: a copy, taken while nothing was written."""
    head = dict(zip(HEAD, words))
    texts = {}
    for number, name in enumerate(TEXTS):
        at = _TEXTS_AT + number * _TEXT_WORDS
        size = min(max(0, words[at]), 8 * (_TEXT_WORDS - 1))
        texts[name] = words[at + 1 : at + _TEXT_WORDS].tobytes()[:size].decode("utf-8", "replace")
    rows = []
    for slot in range(min(head["slots"], (len(words) - _SLOTS_AT) // _SLOT_WORDS)):
        at = _SLOTS_AT + slot * _SLOT_WORDS
        values = dict(zip(ROW, words[at : at + len(ROW)]))
        listed = {}
        for place in range(LISTS):
            begin = at + _ROW_WORDS + place * _LIST_WORDS
            count = min(max(0, words[begin + 1]), LISTED)
            if count:
                listed[words[begin]] = words[begin + 2 : begin + 2 + count]
        rows.append(Row(values, listed))
    return Picture(head, texts, words[_TIMES_AT : _TIMES_AT + TIMES], rows, slate(words, head["slots"]))


def histograms(times: Sequence[int]) -> dict[str, dict[str, Any]]:
    """By name: upper bounds in seconds, how many were within each (not more than the one before), and the sum."""
    bounds = [2.0 ** (FIRST_BUCKET + n) / 1e9 for n in range(BUCKETS - 1)]
    found = {}
    for number, name in enumerate(HISTOGRAMS):
        at = number * _HISTOGRAM_WORDS
        counts = list(times[at + 1 : at + _HISTOGRAM_WORDS])
        found[name] = {"bounds": bounds, "counts": counts, "sum": times[at] / 1e9 if times else 0.0}
    return found
