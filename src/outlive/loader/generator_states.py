"""States of random generators, as plain data: torch's, Python's and NumPy's.

Reads:   generators; their states, which may come from a file.
Writes:  the state of a generator.
Never:   unpickles; sets a state that a generator cannot be in.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from outlive._worker import randomness
from outlive.loader.plain_values import to_bytes, to_text

_WORDS = slice(24, 24 + 8 * 624)  # where a CPU generator of torch's has its words, each in 64 bits
_CPU_STATE = 5056


def is_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *of_numpy))


def get(generator: Any) -> Any:
    """The state of a random generator."""
    if isinstance(generator, torch.Generator):
        return to_text(dense(generator.get_state().numpy().tobytes()))
    if isinstance(generator, random.Random):
        version, internal, gauss = generator.getstate()
        return {"python": [version, list(internal), gauss]}
    if hasattr(generator, "bit_generator"):
        return {"numpy": randomness.without_arrays(generator.bit_generator.state)}
    return {"numpy": randomness.without_arrays(generator.get_state(legacy=False))}


def put(generator: Any, told: Any) -> None:
    """Set a random generator to a state. One that is of another kind by now keeps its own."""
    if isinstance(generator, torch.Generator):
        if isinstance(told, str):
            state = whole(to_bytes(told))
            if generator.device.type == "cpu":
                randomness.check_parts((state, b"", b""))
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        if "python" in told:
            version, internal, gauss = told["python"]
            generator.setstate((version, tuple(internal), gauss))
    elif "numpy" in told:
        randomness.check_numpy(told["numpy"])
        state = randomness.with_arrays(told["numpy"])
        if hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


def dense(state: bytes) -> bytes:
    """A torch generator's state, at half its size where it is the one we know."""
    if len(state) == _CPU_STATE:
        words = memoryview(state)[_WORDS].cast("I")
        if not any(words[1::2].tobytes()):
            return b"w" + state[: _WORDS.start] + words[::2].tobytes() + state[_WORDS.stop :]
    return b"r" + state


def whole(told: bytes) -> bytes:
    if told[:1] == b"r":
        return told[1:]
    start, size = 1 + _WORDS.start, 4 * 624
    if len(told) != 1 + _CPU_STATE - size:
        raise ValueError("this is no state of torch's random generator")
    wide = bytearray(8 * 624)
    memoryview(wide).cast("I")[::2] = memoryview(told[start : start + size]).cast("I")
    return told[1:start] + bytes(wide) + told[start + size :]
