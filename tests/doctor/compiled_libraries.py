"""Small native libraries that need what a CPU may lack, or take care not to.

Reads   nothing.
Writes  libraries, compiled with cc.
Never   runs them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from faults.crashes import X86
from forensics.illegal_instructions import bytes_of

WIDEST = "62f17c4858c0"  # vaddps zmm0,zmm0,zmm0: AVX-512
WIDE = "c5fc58c0"  # vaddps ymm0,ymm0,ymm0: AVX

ASK = 'unsigned a, b, c, d; __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));'


def can_compile() -> bool:
    return X86 and shutil.which("cc") is not None


def run(code: str) -> str:
    """C that runs these bytes."""
    return f'__asm__ volatile(".byte {bytes_of(code)}");'


def build(folder: Path, name: str, source: str, *flags: str) -> Path:
    """At -O1, without what distributions add; functions stay apart and are called through the linker's table."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = ["-shared", "-fPIC", "-O1", "-fno-inline", "-fno-optimize-sibling-calls", "-Wno-unused-variable"]
    subprocess.run(["cc", *plain, "-x", "c", "-", "-o", path, *flags], input=source, text=True, check=True)
    return path


# Each runs AVX-512 code whenever it is loaded.
AT_LOAD = {
    "in a constructor": f"__attribute__((constructor)) void start(void) {{ {run(WIDEST)} }}",
    "behind a call through the linker's table": f"""
        void work(void) {{ {run(WIDEST)} }}
        __attribute__((constructor)) void start(void) {{ work(); __asm__ volatile(""); }}""",
    "behind two hidden calls": f"""
        static void deep(void) {{ {run(WIDEST)} }}
        static void work(void) {{ deep(); __asm__ volatile(""); }}
        __attribute__((constructor)) static void start(void) {{ work(); __asm__ volatile(""); }}""",
    "on both ways of a choice": f"""
        extern int getpid(void);
        __attribute__((constructor)) void start(void) {{
            if (getpid() & 1) {{ {run("90")} {run(WIDEST)} }} else {{ {run(WIDEST)} {run("90")} }} }}""",
    "where a module is made": f"void *PyInit_victim(void) {{ {run(WIDEST)} return 0; }}",
    "although it asks": f"""
        int has(void) {{ {ASK} return b >> 16 & 1; }}
        __attribute__((constructor)) void start(void) {{ volatile int known = has(); {run(WIDEST)} }}""",
}

# None of these runs AVX-512 code on a CPU without it.
CAREFUL = {
    "a choice in a constructor": f"""
        static int has(void) {{ {ASK} return b >> 16 & 1; }}
        static void work(void) {{ {run(WIDEST)} }}
        __attribute__((constructor)) void start(void) {{ if (has()) work(); }}""",
    "a choice that another function made": f"""
        int known;
        void find_out(void) {{ {ASK} known = b >> 16 & 1; }}
        void work(void) {{ if (known) {{ {run(WIDEST)} }} }}
        void *PyInit_victim(void) {{ find_out(); work(); return 0; }}""",
    "a table of functions": f"""
        static void wide(void) {{ {run(WIDEST)} }}
        static void plain(void) {{ }}
        void (*table[])(void) = {{plain, wide}};
        void (*chosen)(void);
        __attribute__((constructor)) void start(void) {{ {ASK} chosen = table[b >> 16 & 1]; }}
        void work(void) {{ chosen(); }}""",
    "a choice of the loader": f"""
        static void wide(void) {{ {run(WIDEST)} }}
        static void plain(void) {{ }}
        extern unsigned long getauxval(unsigned long);
        static void (*choose(void))(void) {{ return getauxval(26) ? wide : plain; }}
        void work(void) __attribute__((ifunc("choose")));""",
    "a name that says so": f"void sum_avx512(void) {{ {run(WIDEST)} }}",
    "a question to another library": f"""
        extern int cpuinfo_has_x86_avx512f(void);
        void work(void) {{ if (cpuinfo_has_x86_avx512f()) {{ {run(WIDEST)} }} }}""",
    "bytes in a constant": """
        long work(void) { long a; __asm__ volatile("movabs $0x9090c058487cf162,%0" : "=r"(a)); return a; }""",
    "bytes in data": f"const unsigned char work[] = {{ {'0x90,' * 16} {bytes_of(WIDEST + WIDE)}, 0xc3 }};",
    "what older CPUs run as something else": f"""
        int has(void) {{ {ASK} return b; }}
        __attribute__((constructor)) void start(void) {{ __asm__ volatile("tzcnt %rax,%rax"); }}""",
}

FLOATS = "\n".join(
    f"float work{n}(float a, float b) {{ return a * b + {n}; }} double more{n}(double a) {{ return a / {n + 1}; }}"
    for n in range(30)
)
