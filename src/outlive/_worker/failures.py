"""Exceptions in a form that always travels.

Reads   the exception that is being handled; which disk is full, where it is about that.
Writes  a `Failure`: names and text, and the type only where it pickles.
Never   the exception object: it may not pickle, or not unpickle, or take half the memory with it.
"""

from __future__ import annotations

import pickle
import traceback

from outlive._system import disks
from outlive.incident import Failure, Stage


def capture(error: BaseException, stage: Stage, position: int = -1, advice: str = "") -> Failure:
    """`advice` says what to do about it, where we know."""
    kind = type(error)
    text = text_of(error)
    return Failure(
        type_name=kind.__name__,
        message=text + advice,
        traceback="".join(traceback.format_exception(kind, error, error.__traceback__)) + advice,
        pickled_type=_pickled_type(kind),
        stage=stage,
        position=position,
        full=disks.full_one(error, text) if disks.is_about_room(error, text) else None,
    )


def text_of(error: BaseException) -> str:
    """What an exception says. Never raises."""
    try:
        return str.__str__(str(error))  # a class of the user's that is a str stays here
    except Exception as broken:  # a user's __str__ may itself fail; the class name is still known
        return f"<its __str__ raised {type(broken).__name__}>"


def _pickled_type(kind: type) -> bytes | None:
    try:
        pickled = pickle.dumps(kind)
        return pickled if pickle.loads(pickled) is kind else None
    except Exception:  # a class that only exists here: its name and text travel instead
        return None
