"""Random numbers by counting: every draw is a hash of where it is made, so that any order, and C, gets the same.

Reads   a key (of a seed, a batch, a hop and a kind of edge), places and numbers of draws.
Writes  nothing.
Never   has a state, and never calls a logarithm of the system's: drawing.h has the same in C, bit for bit.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]
Doubles: TypeAlias = NDArray[np.float64]

STEP = 0x9E3779B97F4A7C15
MOST = 0xFFFFFFFF  # the largest bound that `below` bears
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ALL = (1 << 64) - 1
_LOW = np.uint64(0xFFFFFFFF)
_FRACTION, _ONE = np.uint64(0x000FFFFFFFFFFFFF), np.uint64(0x3FF0000000000000)


def derived(seed: int, *parts: int) -> int:
    """The key of a place that is named by whole numbers: a batch, a hop, a kind of edge."""
    key = _mixed_int(seed & _ALL)
    for part in parts:
        key = _mixed_int((key + STEP * (part + 1)) & _ALL)
    return key


def drawn(key: int | Words, number: NDArray[np.int64] | NDArray[np.uint64] | int) -> Words:
    """From a key to those of places in it, and from there to draws."""
    keys = np.uint64(key) if isinstance(key, int) else key
    with np.errstate(over="ignore"):
        steps = (np.asarray(number).astype(np.uint64) + np.uint64(1)) * np.uint64(STEP)
        return _mixed(np.asarray(keys + steps, np.uint64))


def below(draws: Words, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Integers in [0, bound): the upper half of the product, for bounds below 2**32."""
    limits = bounds.astype(np.uint64)
    upper = (draws >> np.uint64(32)) * limits
    lower = ((draws & _LOW) * limits) >> np.uint64(32)
    found: NDArray[np.int64] = ((upper + lower) >> np.uint64(32)).astype(np.int64)
    return found


def unit(draws: Words) -> Doubles:
    """In [0, 1)."""
    found: Doubles = (draws >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def exponential(draws: Words) -> Doubles:
    """-log of numbers in (0, 1]: exponential variates. 2 artanh(s) for the fraction, and the exponent's share."""
    values = ((draws >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53
    bits = values.view(np.uint64)
    exponents = (bits >> np.uint64(52)).astype(np.int64) - 1023
    fractions = ((bits & _FRACTION) | _ONE).view(np.float64)
    large = fractions > 1.4142135623730951
    fractions = np.where(large, fractions * 0.5, fractions)
    exponents = exponents + large
    s = (fractions - 1.0) / (fractions + 1.0)
    z = s * s
    total = np.full_like(z, 1.0 / 21.0)
    for odd in (19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        total = total * z + 1.0 / odd
    found: Doubles = -(exponents.astype(np.float64) * 0.6931471805599453 + (s + s) * total)
    return found


def _mixed_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _ALL
    value = ((value ^ (value >> 27)) * _SECOND) & _ALL
    return value ^ (value >> 31)


def _mixed(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    mixed: Words = values ^ (values >> np.uint64(31))
    return mixed
