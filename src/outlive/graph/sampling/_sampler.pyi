"""The C extension, built from sampler.c, hops.c and walks.c where there is a compiler.

Arrays come as addresses; each answer is (damage, place, first, second).
"""

from typing import TypeAlias

_Answer: TypeAlias = tuple[int, int, int, int]
_Addresses: TypeAlias = tuple[int, ...]

def survey(topology: _Addresses, frontier: _Addresses, rule: _Addresses, picks: _Addresses, /) -> _Answer: ...
def hop(
    topology: _Addresses,
    frontier: _Addresses,
    rule: _Addresses,
    picks: _Addresses,
    found: _Addresses,
    edges: _Addresses,
    scratch: _Addresses,
    /,
) -> _Answer: ...
def induce(topology: _Addresses, frontier: _Addresses, found: _Addresses, edges: _Addresses, /) -> _Answer: ...
def enter(found: _Addresses, first: int, /) -> _Answer: ...
def walk(topology: _Addresses, steps: int, walks: int, length: int, key: int, p: float, q: float, /) -> _Answer: ...
def gather(source: int, rows: int, row_bytes: int, index: int, count: int, target: int, /) -> _Answer: ...
