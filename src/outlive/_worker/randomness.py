"""The random state of a worker: torch, random and NumPy, read cheaply after each batch.

Reads   the three global generators of this process.
Writes  them, when a replacement goes on where a dead worker was.
Never   imports torch or NumPy by itself: what the user did not import, he did not draw from.

`random.getstate()` and `numpy.random.get_state()` build Python objects and cost 40 µs together, too
much for a batch of 100 µs. Both are Mersenne twisters whose words lie flat in memory: they
are copied from there (0.2 µs). Where the layout is not what we know, the slow way serves.

A state is three parts, of packed numbers: it may come from a file, so nothing in it is ever unpickled.

    torch     as `torch.get_rng_state()` has it
    random    b"f", whether a gaussian is left over, that gaussian, index, 624 words
    NumPy     b"f", the same, 624 words, index; or b"j" and JSON, of a generator that is no Mersenne twister
"""

from __future__ import annotations

import ctypes
import json
import random
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

_WORDS = 624
_HEAD = struct.Struct("<HHH")
_PYTHON = struct.Struct(f"<cBd{_WORDS + 1}I")
_NUMPY = struct.Struct(f"<cqd{_WORDS + 1}I")
_TORCH_BYTES = 5056
_TORCH_PLACE = struct.Struct("<8xiiQ")  # of a generator's state: words left, whether it is seeded, the next word
_OF_NUMPY = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


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
        """`fast`: read the generators' memory where it is known; else, and elsewhere, ask them for their states."""
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
            _, (*words, index), gauss = random.getstate()
            return _PYTHON.pack(b"f", gauss is not None, gauss or 0.0, index, *words)
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
            return _of_numpy(numpy.random.get_state(legacy=False))
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
        _, has_gauss, gauss, index, *words = _PYTHON.unpack(state)
        random.setstate((3, (*words, index), gauss if has_gauss else None))

    def _set_numpy(self, state: bytes) -> None:
        import numpy

        if state[:1] == b"j":
            numpy.random.set_state(with_arrays(json.loads(state[1:])))
            return
        has_gauss, gauss = struct.unpack_from("<qd", state, 1)
        words = numpy.frombuffer(state, numpy.uint32, offset=17)
        numpy.random.set_state(("MT19937", words[:_WORDS], int(words[_WORDS]), int(has_gauss), gauss))


def _of_numpy(state: Any) -> bytes:
    if state["bit_generator"] == "MT19937":
        words, index = state["state"]["key"].tolist(), state["state"]["pos"]
        return _NUMPY.pack(b"f", state["has_gauss"], state["gauss"], *words, index)
    return b"j" + json.dumps(without_arrays(state)).encode("ascii")


def without_arrays(state: Any) -> Any:
    """What a generator of NumPy's says of itself, as plain data."""
    if isinstance(state, Mapping):
        return {key: without_arrays(value) for key, value in state.items()}
    if hasattr(state, "dtype"):
        return {"array": state.tolist(), "dtype": str(state.dtype)} if state.ndim else state.item()
    return state


def with_arrays(told: Any) -> Any:
    """What a generator of NumPy's takes: the inverse of `without_arrays`."""
    import numpy

    if not isinstance(told, Mapping):
        return told
    if "array" not in told:
        return {key: with_arrays(value) for key, value in told.items()}
    if told["dtype"] not in ("uint32", "uint64"):
        raise ValueError(f"no generator has numbers of type {told['dtype']!r}")
    return numpy.array(told["array"], dtype=told["dtype"])


def check_parts(parts: tuple[bytes, bytes, bytes]) -> None:
    """Raise `ValueError` unless these are states that generators can be in: NumPy and torch take some that are not,
    and then read beyond their words.
    """
    torch_state, python_state, numpy_state = parts
    if torch_state:
        left, seeded, following = _TORCH_PLACE.unpack_from(torch_state.ljust(_TORCH_BYTES, b"\0"))
        if len(torch_state) != _TORCH_BYTES or not (0 < left <= _WORDS + 1 - following and seeded == 1):
            raise ValueError("this is no state of torch's random generator")
    if python_state and not (_is_packed(python_state, _PYTHON) and _PYTHON.unpack(python_state)[3] <= _WORDS):
        raise ValueError("this is no state of Python's random generator")
    if numpy_state[:1] == b"j":
        import numpy

        told, own = json.loads(numpy_state[1:]), numpy.random.get_state(legacy=False)["bit_generator"]
        check_numpy(told)
        if told["bit_generator"] not in (*_OF_NUMPY, own):
            raise ValueError(f"NumPy has no generator {told['bit_generator']!r}")
    elif numpy_state and not (_is_packed(numpy_state, _NUMPY) and _NUMPY.unpack(numpy_state)[-1] <= _WORDS):
        raise ValueError("this is no state of NumPy's random generator")


def _is_packed(state: bytes, form: struct.Struct) -> bool:
    return len(state) == form.size and state[:1] == b"f"


def check_numpy(told: Any) -> None:
    """Raise an exception if this is no state, as plain data, that a generator of NumPy's takes. Others check for
    themselves.
    """
    import numpy

    name, state = told["bit_generator"], with_arrays(told)
    if name not in _OF_NUMPY:
        return
    if name == "MT19937" and not 0 <= state["state"]["pos"] <= _WORDS:
        raise ValueError("this is no state of a Mersenne twister")
    getattr(numpy.random, name)().state = state


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
