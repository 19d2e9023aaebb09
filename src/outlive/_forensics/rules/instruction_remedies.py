"""What to do about an instruction that ended a worker: by the library it is in and the feature it wants.

Reads   the place of an instruction, names of features.
Writes  nothing.
Never   more than a few lines each: they are printed under «next».
"""

from __future__ import annotations

import re

from outlive.evidence import CodePlace

BUILD_RECORDER = "install a C compiler and reinstall outlive   crashes are then recorded, with their instruction"

# Where the name to import and the name to install differ.
_DISTRIBUTIONS = {
    "cv2": "opencv-python",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "scikit_learn": "scikit-learn",
    "skimage": "scikit-image",
    "scikit_image": "scikit-image",
    "opencv_python": "opencv-python",
}
_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/]+)")


def for_missing_feature(place: CodePlace | None, missing: tuple[str, ...]) -> tuple[str, ...]:
    library = "" if place is None else place.library
    found: list[str] = []
    if place is not None and not library and place.is_mapped:
        found += [
            "delete what was compiled for another machine: NUMBA_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR, __pycache__/*.nbc",
            "NUMBA_CPU_NAME=generic   if Numba made this code",
        ]
    elif "torchinductor" in library:
        found.append(f"rm -r {library.rsplit('/', 1)[0]}   torch.compile made it on, or for, another machine")
    elif "openblas" in library.lower():
        found.append(f"OPENBLAS_CORETYPE={_openblas_core(missing)}   OpenBLAS then uses kernels that this CPU can run")
    elif "/torch/" in library or "libtorch" in library:
        found.append("ATEN_CPU_CAPABILITY=default   torch then uses kernels for any x86-64 CPU")
        found.append(f"ONEDNN_MAX_CPU_ISA={_onednn_isa(missing)}   if the function is oneDNN's (dnnl)")
    elif "/numpy/" in library and _is_dispatched(missing):
        found.append(f'NPY_DISABLE_CPU_FEATURES="{_numpy_names(missing)}"   NumPy then leaves its code for them unused')
    elif "mkl" in library.lower():
        found.append("MKL_ENABLE_INSTRUCTIONS=SSE4_2   MKL then uses kernels that this CPU can run")
    package = package_of(library)
    if package == "numpy":
        found.append("pip install --force-reinstall --no-binary numpy -Csetup-args=-Dcpu-baseline=none numpy")
    elif package and package != "torch":
        found.append(f"pip install --force-reinstall --no-binary {package} {package}   builds it for this CPU")
    elif library and not package:
        found.append(
            f"build {library.rsplit('/', 1)[-1]} without -march=native: -march=x86-64-v2 runs on any CPU since 2009"
        )
    wanted = " and ".join(missing) or "it"
    found.append(f"use machines whose CPU has {wanted} (lscpu shows the flags)")
    return tuple(found)


def package_of(library: str) -> str:
    """The name to install of the package that a library belongs to; empty: of none."""
    found = _INSTALLED.search(library)
    if found is None:
        return ""
    name = found[1].removesuffix(".libs").partition(".")[0]
    return _DISTRIBUTIONS.get(name, name.replace("_", "-"))


def _openblas_core(missing: tuple[str, ...]) -> str:
    if missing and all(name.startswith("AVX512") for name in missing):
        return "Haswell"
    if {"SSE4_1", "SSE4_2", "SSSE3", "POPCNT"} & set(missing):
        return "Prescott"
    return "Nehalem"


def _onednn_isa(missing: tuple[str, ...]) -> str:
    if any(name.startswith("AMX") for name in missing):
        return "AVX512_CORE_BF16"
    return "AVX2" if missing and all(name.startswith("AVX512") for name in missing) else "SSE41"


def _numpy_names(missing: tuple[str, ...]) -> str:
    """What NumPy calls its choices, from 2.4 on and before; names that it does not know it passes over."""
    wide = "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
    return wide if all(name.startswith("AVX512") for name in missing) else f"X86_V3 AVX2 FMA3 {wide}"


def _is_dispatched(missing: tuple[str, ...]) -> bool:
    """Whether NumPy's wheels have a choice: what is below AVX is in all of their code."""
    return bool(missing) and all(name.startswith(("AVX", "FMA", "F16C")) for name in missing)


def for_trap(place: CodePlace | None, *, is_rust: bool, is_breakpoint: bool) -> tuple[str, ...]:
    found = []
    if is_rust:
        found.append("RUST_BACKTRACE=1   the panic then shows its way")
    if is_breakpoint:
        found.append("remove the breakpoint (__debugbreak, raise(SIGTRAP), breakpoint in native code) or the debugger")
    found += _source_line(place)
    found.append("read what the library wrote right before: the check that failed is mostly named there")
    return tuple(found)


def for_corruption(place: CodePlace | None) -> tuple[str, ...]:
    return (
        "keep callbacks alive: a ctypes or cffi callback whose Python object is gone is such a pointer",
        *_source_line(place),
        *_newer(place),
        "run the sample alone under valgrind, or with the library built by -fsanitize=address",
    )


def for_smashed_stack(place: CodePlace | None) -> tuple[str, ...]:
    function = place.function if place is not None and place.function else "this function"
    return (
        f"look for an array in {function} that is written past its end; -fsanitize=address names the line",
        *_source_line(place),
        *_newer(place),
    )


def _newer(place: CodePlace | None) -> list[str]:
    package = package_of(place.library) if place is not None else ""
    return [f"pip install -U {package}   memory corruption is often mended already"] if package else []


def for_null_call(place: CodePlace | None) -> tuple[str, ...]:
    return (*_source_line(place), "check the plug-in, callback or weak symbol that this library expects to be set")


def for_division(place: CodePlace | None) -> tuple[str, ...]:
    return (
        "check the sample for an empty size: zero width, height, channels, stride, window or count",
        *_source_line(place),
    )


def for_system_call(name: str) -> tuple[str, ...]:
    allow = f"that allows {name}" if name else "that allows it"
    return (
        f"docker run --security-opt seccomp=profile.json   with a profile {allow}",
        "in Kubernetes: securityContext.seccompProfile.type: Unconfined, or a Localhost profile",
        "look for a sandbox in the worker itself: prctl(PR_SET_SECCOMP), libseccomp, a systemd SystemCallFilter=",
    )


def _source_line(place: CodePlace | None) -> list[str]:
    if place is None or not place.library.startswith("/") or place.offset is None:
        return []
    return [f"addr2line -Cfe {place.library} {place.offset:#x}   names the source line, if it was built with -g"]
