"""A script with a function and a class where ranks find them, and with closures under the guard, where they do not."""

import sys
from dataclasses import dataclass

import outlive


@dataclass
class Settings:
    step: int = 3


def work(rank, settings, scale):
    assert type(settings) is sys.modules["__main__"].Settings  # the very class: it was not sent, but imported
    print("worked", scale(rank + settings.step))


if __name__ == "__main__":
    factor = 10

    def start(rank, settings):
        work(rank, settings, lambda value: factor * value)

    outlive.spawn(work, (Settings(), lambda value: factor * value), start_method=sys.argv[1])
    outlive.spawn(start, (Settings(),), start_method=sys.argv[1])
