"""What Python imports when it starts under `outlive run`: waits for torch, then does what it would have done anyway.

Reads   sys.path.
Writes  sys.path, from which the folder of this file is taken again; sys.meta_path.
Never   stands in the way: an interpreter that has no outlive starts as if this file were not there, and the
        sitecustomize that it would have found without us is imported after this one.
"""

import os
import sys


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    try:
        from outlive.adoption import hook
    except (ImportError, SyntaxError):
        pass  # another Python, with packages of its own: nothing of ours is there to supervise with
    else:
        hook.begin()
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found,unused-ignore]  # noqa: F401  # the next one on the path
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


_begin()
