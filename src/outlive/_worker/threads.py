"""How many threads numerical libraries may start in a worker: eight workers must not be sixty-four threads.

Reads   which libraries are loaded.
Writes  their settings, and environment variables for those that come later.
Never   loads a library that is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any

VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS", "POLARS_MAX_THREADS"),
)
# Part of a library's file name → what sets its number of threads, the first that it has.
_SETTERS = {
    "openblas": (
        *("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"),
        *("openblas_set_num_threads64_", "openblas_set_num_threads"),
    ),
    "libmkl_rt": ("MKL_Set_Num_Threads",),
    "libgomp": ("omp_set_num_threads",),
    "libiomp": ("omp_set_num_threads",),
    "libomp": ("omp_set_num_threads",),
    "blis": ("bli_thread_set_num_threads",),
}


def limit(count: int) -> None:
    """At most so many threads per library, from now on, in this process and in what it starts."""
    for name in VARIABLES:
        os.environ[name] = str(count)
    for path in loaded_libraries():
        with contextlib.suppress(OSError, AttributeError):  # gone, or a build without the function
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            names = next(names for part, names in _SETTERS.items() if part in os.path.basename(path))
            name = next((name for name in names if hasattr(library, name)), names[0])
            getattr(library, name)(ctypes.c_int(count))
            # In a fork OpenBLAS starts all its threads to be told that they are too many. They go, and come as needed.
            library.blas_thread_shutdown_()
    for module, function in (("torch", "set_num_threads"), ("cv2", "setNumThreads"), ("numexpr", "set_num_threads")):
        loaded: Any = sys.modules.get(module)
        if loaded is not None:
            with contextlib.suppress(Exception):  # half imported, or another thing by that name
                # OpenCV joins its threads when told 1, and in a fork these are not there to be joined. 0: none.
                getattr(loaded, function)(0 if module == "cv2" and count == 1 else count)


def loaded_libraries() -> list[str]:
    """Files of loaded libraries that we know how to talk to."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            paths = {line[line.index("/") :].rstrip("\n") for line in lines if "/" in line}
    except OSError:
        return []  # no such file on this system: the environment variables must do
    return sorted(path for path in paths if any(part in os.path.basename(path) for part in _SETTERS))
