"""Lets torchvision be imported beside a torch whose build is another: its transforms need no compiled operators.

Reads   whether it can be imported as it is.
Writes  the declarations of two operators that it expects, where its library of operators cannot be loaded.
Never   their implementation: who calls them is told that there is none.
"""

import sys

import torch


def declare():
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")


declare()
