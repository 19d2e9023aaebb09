"""Builds the fatal-signal recorder, where there is a C compiler; everything else stands in pyproject.toml.

Reads   the platform.
Writes  one extension for all Pythons from 3.10 on (the limited API).
Never   fails for want of a compiler: the package then works without crash records.
"""

import sys
import sysconfig

from setuptools import Extension, setup

# A free-threaded Python knows no limited API: there the extension serves that one version.
ABI3 = not sysconfig.get_config_var("Py_GIL_DISABLED")

recorder = Extension(
    "holdfast._capture._recorder",
    sources=["src/holdfast/_capture/recorder.c"],
    depends=["src/holdfast/_capture/recorder.h"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if ABI3 else [],
    extra_compile_args=["-std=c11", "-Wall", "-Wextra"],
    libraries=["dl"],  # a library of its own before glibc 2.34
    # Bound when it is loaded: in the handler the dynamic linker must have nothing left to do.
    extra_link_args=["-Wl,-z,now"],
    py_limited_api=ABI3,
    optional=True,
)

setup(
    ext_modules=[recorder] if sys.platform == "linux" else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if ABI3 else {},
)
