"""The random state of a worker: torch, random and NumPy, read cheaply after each batch.

Reads   the three global generators of this process.
Writes  them, when a replacement goes on where a dead worker was.
Never   imports torch or NumPy by itself: what the user did not import, he did not draw from.

`random.getstate()` and `numpy.random.get_state()` build Python objects and cost 40 µs together, too
much for a batch of 100 µs. Both are Mersenne twisters whose words lie flat in memory: they
are copied from there (0.2 µs). Where the layout is not what we know, the slow way serves.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

_WORDS = 624
_HEAD = struct.Struct("<HHH")


def flat_random() -> Callable[[], bytes] | None:
    """Reads index and words of random's hidden instance, or None where they are not where we think."""
    instance = random._inst
    if sys.implementation.name != "cpython" or type(instance).__basicsize__ < 16 + 4 * (_WORDS + 1):
        return None
    memory = (ctypes.c_uint32 * (_WORDS + 1)).from_address(id(instance) + object.__basicsize__)
    flat = memoryview(memory).cast("B")
    state = random.getstate()[1]
    if memory[0] != state[_WORDS] or tuple(memory[1:]) != tuple(state[:_WORDS]):
        return None
    return flat.tobytes


def flat_numpy(numpy: Any) -> tuple[Callable[[], bytes], Callable[[], bytes]] | None:
    """Readers of NumPy's words, and of the object around them, where a left-over gaussian is kept."""
    state = numpy.random.get_state(legacy=False)
    if state.get("bit_generator") != "MT19937":
        return None
    holder = numpy.random.mtrand._rand
    address = holder._bit_generator.ctypes.state_address
    memory = (ctypes.c_uint32 * (_WORDS + 1)).from_address(address)
    if memory[_WORDS] != state["state"]["pos"] or list(memory[:_WORDS]) != state["state"]["key"].tolist():
        return None
    around = (ctypes.c_char * (type(holder).__basicsize__ - 16)).from_address(id(holder) + 16)
    return memoryview(memory).cast("B").tobytes, memoryview(around).cast("B").tobytes


class Randomness:
    """Reads and sets the random state of this process."""

    def __init__(self, *, fast: bool = True) -> None:
        """`fast`: read the generators' memory where it is known; else, and elsewhere, pickle their states."""
        self._fast = fast
        self._random = flat_random() if fast else None
        self._torch: Any = None  # its generator, once torch is there
        self._numpy_bits: Any = None  # held, so that the memory we read stays where it is
        self._numpy: tuple[Callable[[], bytes], Callable[[], bytes]] | None = None
        self._numpy_around = b""
        self._numpy_gauss: tuple[int, float] = (0, 0.0)

    # ------------------------------------------------------------ reading

    def read(self) -> bytes:
        torch_state = b""
        if self._torch is None and _has_torch():
            self._torch = sys.modules["torch"].default_generator
        if self._torch is not None:
            state = self._torch.get_state()
            torch_state = ctypes.string_at(state.data_ptr(), state.numel())
        python_state = self._read_random()
        numpy_state = self._read_numpy()
        return b"".join(
            (_HEAD.pack(len(torch_state), len(python_state), len(numpy_state)), torch_state, python_state, numpy_state)
        )

    def _read_random(self) -> bytes:
        if self._random is None:
            return b"p" + pickle.dumps(random.getstate())
        gauss = random._inst.gauss_next  # type: ignore[attr-defined]
        return b"f" + (b"\0" * 9 if gauss is None else b"\1" + struct.pack("<d", gauss)) + self._random()

    def _read_numpy(self) -> bytes:
        numpy = sys.modules.get("numpy")
        if numpy is None or "numpy.random" not in sys.modules:
            return b""
        bits = numpy.random.mtrand._rand._bit_generator
        if self._numpy_bits is not bits:  # looked at anew when a user exchanges it
            self._numpy_bits = bits
            self._numpy = flat_numpy(numpy) if self._fast else None
            self._numpy_around = b""
        if self._numpy is None:
            return b"p" + pickle.dumps(numpy.random.get_state(legacy=False))
        words, around = self._numpy
        now = around()
        if now != self._numpy_around:
            self._numpy_around = now
            state = numpy.random.get_state(legacy=False)
            self._numpy_gauss = (state["has_gauss"], state["gauss"])
        return b"f" + struct.pack("<qd", *self._numpy_gauss) + words()

    # ------------------------------------------------------------ setting

    def set(self, state: bytes) -> None:
        torch_state, python_state, numpy_state = parts_of(state)
        if torch_state:
            import torch

            torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
        self._set_random(python_state)
        if numpy_state:
            self._set_numpy(numpy_state)

    def _set_random(self, state: bytes) -> None:
        if state[:1] == b"p":
            random.setstate(pickle.loads(state[1:]))
            return
        gauss = struct.unpack("<d", state[2:10])[0] if state[1] else None
        index, *words = struct.unpack(f"<{_WORDS + 1}I", state[10:])
        random.setstate((3, (*words, index), gauss))

    def _set_numpy(self, state: bytes) -> None:
        import numpy

        if state[:1] == b"p":
            numpy.random.set_state(pickle.loads(state[1:]))
            return
        has_gauss, gauss = struct.unpack("<qd", state[1:17])
        words = numpy.frombuffer(state[17:], numpy.uint32)
        numpy.random.set_state(("MT19937", words[:_WORDS], int(words[_WORDS]), int(has_gauss), gauss))


def parts_of(state: bytes) -> tuple[bytes, bytes, bytes]:
    """What `read` gave, apart: torch's, random's and NumPy's; b"" for one that was not there."""
    torch_size, python_size, numpy_size = _HEAD.unpack_from(state)
    after_torch = _HEAD.size + torch_size
    after_python = after_torch + python_size
    return state[_HEAD.size : after_torch], state[after_torch:after_python], state[after_python:][:numpy_size]


def joined(parts: tuple[bytes, bytes, bytes]) -> bytes:
    """What `set` takes, of its parts."""
    return b"".join((_HEAD.pack(*map(len, parts)), *parts))


def _has_torch() -> bool:
    return "torch" in sys.modules and hasattr(sys.modules["torch"], "default_generator")
