"""A script that forgot its guard."""

import sys

import outlive


def work(rank):
    print("working")


outlive.spawn(work, nprocs=2, start_method=sys.argv[1])
