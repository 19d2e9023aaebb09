"""Sends objects with the standard library's pool and with ours, and prints what differs: `arguments`, `results`."""

import multiprocessing
import pprint
import sys
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.multiprocessing

import outlive
from travelling_objects import describe, make, objects

TIMEOUT_S = 60


def holding(value):
    return lambda: describe(value)


def as_arguments(pool):
    return {name: pool.submit(describe, value).result(TIMEOUT_S) for name, value in objects().items()}


def as_results(pool):
    return {name: describe(pool.submit(make, name).result(TIMEOUT_S)) for name in objects()}


if __name__ == "__main__":
    torch.set_num_threads(1)  # a worker that is forked from a process with threads of torch's hangs in its first sum
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as stock:
        theirs = as_arguments(stock) if sys.argv[1] == "arguments" else as_results(stock)
    with outlive.Pool(1) as pool:
        if sys.argv[1] == "arguments":
            ours = [
                as_arguments(pool),
                dict(zip(objects(), pool.map(describe, objects().values(), chunksize=len(objects())))),
                {name: pool.submit(holding(value)).result(TIMEOUT_S) for name, value in objects().items()},
            ]
        else:
            together = pool.map(make, objects(), chunksize=len(objects()))
            ours = [as_results(pool), dict(zip(objects(), map(describe, together)))]
    for each in ours:
        pprint.pprint({name: (each[name], theirs[name]) for name in theirs if each[name] != theirs[name]}, compact=True)
