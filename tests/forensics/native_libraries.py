"""Native code that breaks in ways that are known beforehand, compiled when a test needs it.

Reads   nothing.
Writes  libfaulty.so and libthrowing.so into a folder of the test's.
Never   runs anything by itself.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

C = r"""
#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct header { char magic[24]; int width; };
typedef void *(*setter)(void *, int, size_t);
static volatile setter set = memset; /* not to be seen through by the compiler */

int width_of(struct header *header) { return header->width; }
void set_width(struct header *header) { header->width = 1; }
int read_at(volatile char *at) { return *at; }
void write_at(volatile char *at) { *at = 1; }
long element(volatile long *array, long index) { return array[index]; }
int low_half(char *at) { return *(volatile char *)(long)(int)(long)at; }

int recurse(int depth)
{
    volatile char room[512];
    room[0] = (char)depth;
    return recurse(depth + 1) + room[0];
}

int one_large_frame(void)
{
    volatile char room[64 << 20];
    room[0] = 1;
    return room[0];
}

static void *in_thread(void *none) { recurse(0); return none; }

void recurse_in_native_thread(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, in_thread, NULL);
    pthread_join(thread, NULL);
}

void change_constant(void)
{
    static const char greeting[] = "constant";
    *(volatile char *)greeting = 'C';
}

void free_twice(void)
{
    void *volatile block = malloc(64 << 10);
    free(malloc(16));
    free(block);
    free(block);
}

void free_stranger(char *at) { free(at); }

void write_past_block(void)
{
    char *volatile block = malloc(4000), *volatile next = malloc(4000);
    for (; next - block != 4016; next = malloc(4000)) block = next; /* until one lies behind the other */
    set(block, 0x49, 4100); /* its size is now one that no block has, whatever else is in the heap */
    free(next);
}

int use_large_after_free(void)
{
    char *volatile block = malloc(32 << 20);
    set(block, 1, 32 << 20);
    free(block);
    return block[(16 << 20) + 40];
}

void smash_stack(int size)
{
    char room[16];
    set(room, 0x41, (size_t)size);
}

void expect_answer(int answer) { assert(answer == 42 && "the answer"); }
void give_up(void) { abort(); }

#if defined(__x86_64__)
int read_misaligned(char *at)
{
    int value;
    __asm__ volatile("pushfq; orl $0x40000, (%%rsp); popfq; movl 1(%1), %0" : "=r"(value) : "r"(at) : "memory");
    return value;
}

void read_vector(char *at) { __asm__ volatile("movaps (%0), %%xmm0" : : "r"(at) : "xmm0"); }
#endif
"""

CPP = r"""
#include <exception>
#include <stdexcept>
#include <thread>

struct Odd {};

extern "C" void throw_error() { throw std::runtime_error("tile 7 has no pixels"); }
extern "C" void throw_odd() { throw Odd(); }
extern "C" void terminate_plainly() { std::terminate(); }
extern "C" void lose_thread() { std::thread thread([] { for (;;) std::this_thread::yield(); }); }
"""

FLAGS = ("-shared", "-fPIC", "-g", "-O0", "-fno-omit-frame-pointer", "-fstack-protector-all", "-w", "-pthread")


def have_compilers() -> bool:
    return all(shutil.which(compiler) is not None for compiler in ("cc", "c++"))


def build(folder: Path) -> None:
    """Put both libraries into a folder."""
    for compiler, source, suffix, name in (("cc", C, "c", "faulty"), ("c++", CPP, "cpp", "throwing")):
        path = folder / f"{name}.{suffix}"
        path.write_text(source)
        subprocess.run([compiler, *FLAGS, str(path), "-o", str(folder / f"lib{name}.so")], check=True)
