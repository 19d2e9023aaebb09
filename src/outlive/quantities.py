"""Sizes as people write them: «4GiB», «512 MB», «80%»; and as we print them.

Reads   text.
Writes  text.
Never   guesses a unit: a number alone is bytes.
"""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40} | {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 1 << 10,  # as ulimit, docker and Kubernetes' Ki mean it
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_LONGEST_SHOWN = 40
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


MOST_BITS = 62  # of a number that a setting may be: what C, and a struct, can hold


def check_size(name: str, value: Any) -> None:
    """Raise `ValueError` for a whole number that no computer could mean."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"{name} must be less than 2**{MOST_BITS}, got a number of {value.bit_length()} bits")


def parse_bytes(name: str, value: Any) -> int:
    """How many bytes `name=value` means."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is not None and found[2].upper() in _UNITS:
        size = float(found[1]) * _UNITS[found[2].upper()]
        if size >= 2**MOST_BITS:
            raise ValueError(f"{name} must be less than 4 EiB, got {value[:_LONGEST_SHOWN]!r}")
        value = round(size)
    check_size(name, value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f'{name} must be a size such as "4GiB" or a number of bytes, got {value!r}')
    if value <= 0:
        raise ValueError(f"{name} must be more than nothing, got {value!r}")
    return value


def parse_bytes_or_share(name: str, value: Any, whole: int) -> int:
    """The same, or a share of `whole`: «80%»."""
    found = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        try:
            return parse_bytes(name, value)
        except TypeError:
            raise TypeError(f'{name} must be a size such as "24GiB" or a share such as "80%", got {value!r}') from None
    share = float(found[1])
    if not 0 < share <= 100:
        raise ValueError(f'{name} is a share between "1%" and "100%", got {value[:_LONGEST_SHOWN]!r}')
    return round(whole * share / 100)


def in_words(size: float) -> str:
    """«512 B», «3.1 MiB», «24 GiB»."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    if size < 1024:
        return f"{sign}{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024 or unit == "TiB":
            return f"{sign}{size:.0f} {unit}" if size >= 100 else f"{sign}{size:.3g} {unit}"
    raise AssertionError("there is no unit above the last")
