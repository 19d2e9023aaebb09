"""What workers and zygotes say: read, and refused where it is no message of outlive's.

Reads   bodies of frames.
Writes  nothing.
Never   hands on a value of another type, or a number that does not fit, than the message has.

A worker runs code of the user's, and that may write to any descriptor of its process. So whatever cannot be read, or
says what it cannot mean, is an error here, and costs the process that sent it; nothing else.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import logging
import math
import types
import typing
from collections.abc import Callable
from typing import Any

from outlive._system.address_space import NoRoomError
from outlive._system.channel import Channel, Frame
from outlive._transport import wire
from outlive._transport.wire import Kind, Side
from outlive.evidence import Creep, Evidence, Seen
from outlive.incident import Failure, InHand

_LEAST, _MOST = -(1 << 63), (1 << 64) - 1

# What is in the body of each kind that has a pickle as its body.
_BODIES: dict[int, Any] = {
    Kind.EMPTY: Side,
    Kind.ENDED: Side,
    Kind.ERROR: tuple[Failure, Side],
    Kind.ASK: Failure,
    Kind.RETRIED: Failure,
    Kind.UNPREPARED: Failure,
    Kind.UNSENT: Failure,
    Kind.DOUBT: tuple[Failure, tuple[str, ...], tuple[int, ...], bool, float],
    Kind.PROBED: tuple[bool, tuple[Any, ...], Failure | None, tuple[str, ...], bool],
    Kind.CREPT: Creep,
    # from a zygote
    Kind.FORKED: tuple[int, int, int],
    Kind.EXITED: tuple[int, int, int, bool, float, Evidence, str | None],
    Kind.SUSPECTED: tuple[int, InHand, str, Seen, bool],
    Kind.GREW: tuple[int, Evidence],
    Kind.MEMORY: tuple[bool, int, int, int, int],
    Kind.UNFORKED: Failure,
    Kind.UNLOADABLE: Failure,
}


log = logging.getLogger("outlive")


class ForeignMessageError(ValueError):
    """What came is no message of outlive's, or none that its sender may send now."""


def take_all(channel: Channel, take: Callable[[Frame, list[Any]], None], news: list[Any]) -> bool:
    """Take what comes from a channel, or came before and waits for room; whether something waits now.

    What cannot be taken costs its sender, and nothing else; what there is no room for here costs nothing.
    """
    untaken = channel.untaken
    if not untaken:
        untaken.extend(channel.receive())
    while untaken:
        frame = untaken.popleft()
        try:
            take(frame, news)
        except NoRoomError:
            untaken.appendleft(frame)
            channel.drained = True
            return True
        except OSError:  # a cell that cannot be mapped
            channel.tear()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever unpickling what is no pickle of ours may raise
            log.debug("what came is no message: %r", error)
            channel.garble()
    return channel.starved


def body_of(frame: Frame) -> Any:
    """What a frame says; raises whatever unpickling raises, or `ForeignMessageError`."""
    value = wire.load(frame.body)
    check(value, _BODIES[frame.kind])
    return value


def check(value: Any, hint: Any) -> None:
    require(_checker(hint)(value))


def require(condition: bool) -> None:
    if not condition:
        raise ForeignMessageError


@functools.cache
def _checker(hint: Any) -> Callable[[Any], bool]:
    """Whether a value is of a type as it is written in an annotation, with all that is in it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: True
    if origin in (typing.Union, types.UnionType):
        choices = [_checker(argument) for argument in arguments]
        return lambda value: any(choice(value) for choice in choices)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _fixed(tuple, [_checker(argument) for argument in arguments])
    if origin in (tuple, frozenset):
        each = _checker(arguments[0])
        return lambda value: type(value) is origin and all(map(each, value))
    if origin is collections.abc.Mapping:
        key, item = map(_checker, arguments)
        return lambda value: type(value) is dict and all(key(k) and item(i) for k, i in value.items())
    if hint is int:
        return lambda value: type(value) is int and _LEAST <= value <= _MOST
    if hint is float:
        return lambda value: type(value) in (int, float) and math.isfinite(value)
    if dataclasses.is_dataclass(hint):
        return _record(hint)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _fixed(hint, [_checker(argument) for argument in typing.get_type_hints(hint).values()])
    if hint in (bool, str, bytes, types.NoneType) or issubclass(hint, enum.Enum):
        return lambda value: type(value) is hint
    raise TypeError(f"no message may have a {hint} in it")


def _fixed(kind: type[tuple[Any, ...]], checkers: list[Callable[[Any], bool]]) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        if type(value) is not kind or len(value) != len(checkers):
            return False
        return all(checker(part) for checker, part in zip(checkers, value, strict=True))

    return fits


def _record(kind: Any) -> Callable[[Any], bool]:
    checkers = [(name, _checker(hint)) for name, hint in typing.get_type_hints(kind).items()]
    return lambda value: type(value) is kind and all(checker(getattr(value, name)) for name, checker in checkers)
