"""A script that forgot its guard."""

import sys

import holdfast


def work(rank):
    print("working")


holdfast.spawn(work, nprocs=2, start_method=sys.argv[1])
