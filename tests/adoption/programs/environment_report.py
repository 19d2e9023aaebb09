"""Prints all that a program can see of how it was started, and does what its arguments say.

Reads   standard input.
Writes  one line of JSON.
Never   torch.
"""

import json
import os
import signal
import sys
import time

OURS = ("OUTLIVE_RUN", "PYTHONPATH")


def view():
    spec = globals().get("__spec__")
    return {
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "spec": spec and spec.name,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "path": sys.path,
        "flags": [str(sys.flags), sys.warnoptions],
        "stdin": sys.stdin.read(),
        "environment": {name: value for name, value in os.environ.items() if name not in OURS},
        "customized": getattr(sys, "customized", None),
        "site": getattr(sys.modules.get("sitecustomize"), "__file__", None),
        "executable": sys.executable,
        "depth": len(list(frames())),
    }


def frames():
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def fail():
    raise LookupError("as planned")


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "wait":
        try:
            print(os.getpid(), flush=True)
            while True:
                time.sleep(0.01)  # until the signal: pause() could miss it
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise
    print(json.dumps(view()))
    if what == "raise":
        fail()
    if what == "exit":
        sys.exit(int(sys.argv[2]))
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
