"""What plans are written with: names, whole numbers, spans of time, exceptions; and the error where one means nothing.

Reads   text.
Writes  nothing.
Never   guesses: the error names what is possible.
"""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from outlive._forensics.words import span_s


class PlanError(ValueError):
    """A plan that says nothing that can be done."""


def nearest(word: str, words: Iterable[str], other_names: Mapping[str, str] | None = None) -> str:
    """What may have been meant; if nothing is near, everything that there is."""
    known, names = list(words), other_names or {}
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(dict.fromkeys(names.get(one, one) for one in near))}?"
    return f"; there are {', '.join(dict.fromkeys(names.get(one, one) for one in known))}"


def whole(table: Mapping[str, Any], key: str, default: Any) -> Any:
    value = table.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise PlanError(f"{key} must be a whole number, got {value!r}")
    return value


def whole_ones(table: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A list of whole numbers."""
    value = table.get(key, [])
    if not isinstance(value, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in value):
        raise PlanError(f"{key} must be a list of whole numbers, such as [0, 2], got {value!r}")
    return tuple(value)


def seconds(value: Any, key: str = "a span of time", *, least: float | None = None) -> float:
    """5, 0.5 or «5s», «200ms», «2m». More than nothing, unless `least` is given."""
    given = value
    if isinstance(value, str):
        text = value.strip()
        try:
            value = float(text[:-2]) / 1000 if text.endswith("ms") else float(text)
        except ValueError:
            try:
                value = span_s(text)
            except ValueError as error:
                raise PlanError(f"{error}" if key == "a span of time" else f"{key}: {error}") from None
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fits or not (value > 0 if least is None else value >= least):
        bound = "more than 0" if least is None else f"at least {least:g}"
        raise PlanError(f'{key} is written 5 or "5s", and is {bound}, got {given!r}')
    return float(value)


def exception_of(text: str) -> BaseException:
    """«OSError», or «OSError: the text»."""
    name, _, message = text.partition(":")
    kind = getattr(builtins, name.strip(), None)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise PlanError(f"{name.strip()!r} is none of Python's exceptions")
    return kind(message.strip() or "injected")
