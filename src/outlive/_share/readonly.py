"""What all shared containers are: read-only, and pickled by handle.

Reads   nothing.
Writes  nothing: whoever tries is told what to do instead.
Never   a copy of what is shared, except where Python's own container would make one, too.
"""

from __future__ import annotations

from typing import Any, NoReturn

from outlive._share import segments
from outlive._share.segments import Memory


class Shared:
    """Something that lies in shared memory."""

    __slots__ = ("__weakref__", "_memory", "_size")

    _name = "thing"
    _plain: Any = None  # what it behaves as

    def __init__(self, mapped: Memory, size_bytes: int) -> None:
        self._memory = mapped
        self._size = size_bytes

    @property
    def nbytes(self) -> int:
        """How much shared memory it takes: once, for all processes."""
        return self._size

    def _parts(self) -> tuple[Any, ...]:
        """What, beside the memory, makes it."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (segments.of(self._memory), self._size, *self._parts())

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def _refusal(method: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        plain = self._plain.__name__
        raise TypeError(
            f"a shared {self._name} is read-only, for all processes read the same bytes "
            f"(for one of your own to change, make a copy: {plain}(shared); in a dataset, keep what changes in another "
            f"attribute)"
        )

    refuse.__name__ = method
    return refuse


def refusing(*methods: str) -> Any:
    """A class decorator: these methods of the plain container say why they are not for this one."""

    def decorate(cls: Any) -> Any:
        for method in methods:
            setattr(cls, method, _refusal(method))
        return cls

    return decorate
