"""share(): moves data into shared memory, once, for all processes to read.

Reads   what it is given.
Writes  one segment per call.
Never   changes what it is given: it answers a copy that leads to shared memory, or the very same object.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from outlive import printable as printable  # log lines are escaped
from outlive._share import buffers, columns, hashing, survey, texts
from outlive._share.mappings import SharedDict, SharedSet
from outlive._share.readonly import Shared
from outlive._share.segments import Builder, Memory
from outlive._share.sequences import SharedList, SharedTuple
from outlive._share.texts import SharedBytes, SharedStr
from outlive.quantities import in_words

T = TypeVar("T")

LARGE_BYTES = 1 << 20  # what is smaller, inside something else, stays where it is

log = logging.getLogger("outlive")


@dataclass(frozen=True)
class SharedPart:
    """Something that lies in shared memory: where it is in the object, what it was or is, how large it is there."""

    path: str
    kind: str
    nbytes: int


def share(obj: T, *, min_bytes: int = LARGE_BYTES) -> T:
    """Move data into shared memory; every process that gets the result reads it from there, without a copy.

    obj        a list, tuple, dict, set, str or bytes; a NumPy array, a torch tensor, a pandas or Arrow table; or an
           object, or a container of up to 64 elements, that has such in it: then you get a copy of it in which all
           that are larger than `min_bytes` are shared
    min_bytes  what counts as large inside something else

    What comes back is read-only and behaves as what was given. Arrays, tensors and tables are ordinary ones, whose
    bytes lie in shared memory. Elements of lists and dicts are made anew each time they are read.
    """
    if isinstance(obj, Shared) or buffers.is_shared(obj):
        return obj
    if not survey.is_container(obj) and not survey.has_attributes(obj):
        raise TypeError(
            f"share() cannot share {_article(obj)}: it takes lists, tuples, dicts, sets, str, bytes, NumPy arrays, "
            f"torch tensors in main memory, pandas and Arrow tables, and objects that have these as attributes"
        )
    if not survey.is_container(obj) or survey.leads_to_large(obj, min_bytes):
        return cast(T, _Move(min_bytes).within(obj, "object"))
    return cast(T, _Move(min_bytes).whole(obj))


def share_dataset(
    dataset: T, *, min_bytes: int = LARGE_BYTES, before: dict[int, tuple[Any, Any]] | None = None
) -> tuple[T, list[SharedPart]]:
    """A dataset whose large containers are shared, however deep (`Subset`, `ConcatDataset`, wrappers), and which.

    `before` keeps what was moved from one call to the next: what is still the same object is not moved again.
    """
    move = _Move(min_bytes, before)
    return cast(T, move.within(dataset, "dataset")), move.moved


def dataset_for_workers(dataset: T, before: dict[int, tuple[Any, Any]]) -> T:
    """The same for a loader, which says in the log what was moved."""
    shared, moved = share_dataset(dataset, before=before)
    if moved:
        parts = ", ".join(f"{part.path} ({part.kind}, {in_words(part.nbytes)})" for part in moved)
        log.info("in shared memory for all workers: %s", parts)
    elif not before:
        log.info("nothing in the dataset is both large and of a kind that can be shared")
    return shared


def shared_parts(obj: Any) -> tuple[SharedPart, ...]:
    """What of an object lies in shared memory, and how much memory that is."""
    found, goals = survey.look_around(obj, type(obj).__name__, _is_shared)
    return tuple(SharedPart(found.paths[id(goal)], type(goal).__name__, _nbytes(goal)) for goal in goals)


def _is_shared(obj: Any) -> bool:
    return isinstance(obj, Shared) or buffers.is_shared(obj)


def _nbytes(obj: Any) -> int:
    return int(obj.nbytes) if isinstance(obj, Shared) else survey.estimate_bytes(obj)


def _article(obj: Any) -> str:
    name = type(obj).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


Opener = Callable[[Memory], Any]


class _Move:
    """One call: what is found goes into one segment."""

    def __init__(self, min_bytes: int, before: dict[int, tuple[Any, Any]] | None = None) -> None:
        self._min_bytes = min_bytes
        self._before = before
        self._builder = Builder()
        self.moved: list[SharedPart] = []

    def whole(self, obj: Any) -> Any:
        """All of a container."""
        try:
            opener = self._pack(obj)
        except MemoryError:
            raise
        except Exception as error:
            raise TypeError(f"share() cannot share this {type(obj).__name__}: {error}") from error
        if opener is None:
            raise TypeError(
                f"share() cannot share this {type(obj).__name__}: it has no buffers, only Python objects "
                f"(a column of texts can be shared with the dtype 'string[pyarrow]', or as a list of str)"
            )
        return opener(self._builder.build())

    def within(self, root: Any, name: str) -> Any:
        """A copy of `root` in which what is large is shared."""
        found, goals = survey.look_around(root, name, self._is_goal)
        openers: dict[int, Opener] = {}
        replaced: dict[int, Any] = {}
        for goal in goals:
            known = self._known(goal)
            if known is not None:
                replaced[id(goal)] = known
            elif not _is_shared(goal):
                self._try_to_pack(goal, found.paths[id(goal)], openers)
        if openers:
            mapped = self._builder.build()
            replaced |= {key: opener(mapped) for key, opener in openers.items()}
            if self._before is not None:
                self._before.update((key, (found.nodes[key], replaced[key])) for key in openers)
        return survey.with_replaced(found, replaced)

    def _is_goal(self, obj: Any) -> bool:
        if _is_shared(obj):
            return True
        if not survey.is_container(obj) or survey.leads_to_large(obj, self._min_bytes):
            return False
        return survey.estimate_bytes(obj) >= self._min_bytes

    def _known(self, obj: Any) -> Any:
        original, shared = (self._before or {}).get(id(obj), (None, None))
        same = original is obj and (not hasattr(obj, "__len__") or len(obj) == len(shared))
        return shared if same else None

    def _try_to_pack(self, obj: Any, path: str, openers: dict[int, Opener]) -> None:
        state = self._builder.state()
        opener, problem = None, "it has no buffers, only Python objects"
        try:
            opener = self._pack(obj)
        except MemoryError:
            raise
        except Exception as error:  # elements that cannot be pickled, keys of another kind: it stays as it is
            problem = str(error)
        if opener is None:
            self._builder.go_back(state)
            log.info("%s (%s) is not shared: %s", path, type(obj).__name__, problem)
            return
        openers[id(obj)] = opener
        self.moved.append(SharedPart(path, type(obj).__name__, self._builder.size - state[0]))

    def _pack(self, obj: Any) -> Opener | None:
        """Add a container to the segment; how to open it there."""
        builder = self._builder
        before = builder.size
        parts: tuple[Any, ...]
        if type(obj) in (list, tuple):
            cls: Any = SharedList if type(obj) is list else SharedTuple
            parts = (columns.pack(obj, builder),)
        elif type(obj) is dict:
            keys = list(obj)
            cls, parts = SharedDict, (columns.pack(keys, builder), hashing.pack(keys, builder))
            parts = (*parts, columns.pack(list(obj.values()), builder))
        elif type(obj) in (set, frozenset):
            keys = list(obj)
            cls, parts = SharedSet, (columns.pack(keys, builder), hashing.pack(keys, builder))
        elif type(obj) is str:
            cls, parts = SharedStr, texts.pack_text(obj, builder)
        elif type(obj) is bytes:
            cls, parts = SharedBytes, (builder.add(obj), len(obj))
        else:
            return buffers.pack(obj, builder)
        size = builder.size - before
        return lambda mapped: cls(mapped, size, *parts)
