"""A program with a worker that starts others: `python nested.py describe|stay FOLDER`."""

import sys
import time

import outlive
from pool import kin_functions

if __name__ == "__main__":
    what, folder = sys.argv[1:]
    with outlive.Pool(1, retries=0) as pool:
        if what == "describe":
            told = pool.submit(kin_functions.describe).result()
            nested = pool.submit(kin_functions.run, "Pool", "spawn").result()
            print(told["name"], told["daemon"], told["parent"][2], nested)
        else:
            task = pool.submit(kin_functions.stay_in_all, folder)
            while not pool.pids:
                time.sleep(0.005)  # until there is one
            print(pool.pids[0], flush=True)
            print(type(task.exception()).__name__, flush=True)
