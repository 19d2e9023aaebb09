"""Tasks from everywhere in a main module: also piped into Python, or typed at a prompt."""

import os
import sys

from outlive import Pool

OFFSET = 7
METHOD = os.environ["METHOD"]


class Point:
    def __init__(self, x):
        self.x = x

    def moved(self):
        return Point(self.x + OFFSET)


class OwnError(Exception):
    pass


def double(number):
    return 2 * number


def fail():
    raise OwnError("of the main module")


def adder(more):
    return lambda number: number + more


def note(where):
    sys.modules["__main__"].noted = where


if __name__ == "__main__":
    with Pool(2, METHOD, note, ("here",)) as pool:
        print("mapped", list(pool.map(double, range(3))), list(pool.map(lambda n: n + OFFSET, range(3))))
        print("closure", pool.submit(adder(3), 4).result(), pool.submit(adder(3), 5).result())
        print("class", pool.submit(Point(1).moved).result().x, type(pool.submit(Point, 2).result()) is Point)
        print("raised", type(pool.submit(fail).exception()) is OwnError)
        print("died", type(pool.submit(os._exit, 3).exception()).__name__)
