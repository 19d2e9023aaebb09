"""A script whose import takes for ever in a rank."""

import time

import outlive


def work(rank):
    pass


if __name__ != "__main__":
    time.sleep(600)  # until it is interrupted or killed

if __name__ == "__main__":
    outlive.spawn(work, timeout=1)
