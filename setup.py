"""Builds the C parts, where there is a compiler, and brings the pages of `outlive explain` along.

Reads   the platform; docs/crashes.
Writes  extensions for all Pythons from 3.10 on (the limited API), and outlive/explanations.
Never   fails for want of a compiler: the package then works without crash records, and samples graphs with NumPy.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# A free-threaded Python knows no limited API: there the extension serves that one version.
ABI3 = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildWithPages(build_py):
    """Copies docs/crashes into the package: one source for the web, the checkout and `outlive explain`."""

    def run(self) -> None:
        super().run()
        for page, target in self._pages():
            self.mkpath(str(target.parent))
            self.copy_file(str(page), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(target) for _, target in self._pages())]

    def _pages(self) -> list[tuple[Path, Path]]:
        if self.editable_mode:
            return []  # a checkout reads them where they lie
        shelf = Path(self.build_lib) / "outlive" / "explanations"
        return [(page, shelf / page.name) for page in sorted(Path("docs/crashes").glob("*.md"))]


recorder = Extension(
    "outlive._capture._recorder",
    sources=["src/outlive/_capture/recorder.c"],
    depends=["src/outlive/_capture/recorder.h"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if ABI3 else [],
    extra_compile_args=["-std=c11", "-Wall", "-Wextra"],
    libraries=["dl"],  # a library of its own before glibc 2.34
    # Bound when it is loaded: in the handler the dynamic linker must have nothing left to do.
    extra_link_args=["-Wl,-z,now"],
    py_limited_api=ABI3,
    optional=True,
)

_SAMPLING = "src/outlive/graph/sampling"
sampler = Extension(
    "outlive.graph.sampling._sampler",
    sources=[f"{_SAMPLING}/{name}.c" for name in ("sampler", "hops", "walks")],
    depends=[f"{_SAMPLING}/{name}.h" for name in ("sampler", "drawing")],
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if ABI3 else [],
    # A multiplication fused with an addition would round otherwise than NumPy does.
    extra_compile_args=["/O2", "/fp:precise"]
    if sys.platform == "win32"
    else ["-std=c11", "-O3", "-ffp-contract=off", "-Wall", "-Wextra"],
    py_limited_api=ABI3,
    optional=True,
)

setup(
    cmdclass={"build_py": BuildWithPages},
    ext_modules=[recorder, sampler] if sys.platform == "linux" else [sampler],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if ABI3 else {},
)
