/* The crash record: what a worker's fatal-signal handler leaves in its black box.
 *
 * `crash.py` reads it, by these offsets. Whatever may be cut short has a size that is
 * stored after its bytes: a handler that dies half-way leaves a record that is still lawful.
 */
#ifndef OUTLIVE_RECORDER_H
#define OUTLIVE_RECORDER_H

#include <stddef.h>
#include <stdint.h>

enum { VERSION = 1 };
enum architecture { OTHER = 0, X86_64 = 1, AARCH64 = 2 };
enum state {
    EMPTY = 0,
    WRITING = 1, /* somebody has claimed it */
    FACTS = 2,   /* everything up to `registers` is whole */
    SAVED = 3,   /* nothing more will come */
};

enum {
    MOST_REGISTERS = 40,
    MOST_RETURNS = 32,
    INSTRUCTION_ROOM = 64,
    BEFORE_ROOM = 16,
    STACK_ROOM = 4096,
    MESSAGE_ROOM = 1000,
};

struct record {
    uint64_t state; /* stored with release, read with acquire */
    uint32_t version; /* from the installation on */
    uint32_t architecture;
    int32_t signal;
    int32_t code;
    int32_t error;
    int32_t pid;
    int32_t thread;
    int32_t sender_pid; /* where a process sent the signal, else 0 */
    uint32_t sender_uid;
    int32_t system_call; /* of SIGSYS, else -1 */
    uint64_t address;    /* where a fault has one, else 0 */
    int64_t time_ns;     /* CLOCK_MONOTONIC, as the rest of the black box */
    uint64_t trap;
    uint64_t fault_error; /* x86-64: the page fault's error code; aarch64: ESR */
    char thread_name[16];
    uint64_t instruction_pointer;
    uint64_t stack_pointer;
    uint32_t register_count;
    uint32_t instruction_size;
    uint32_t before_size;
    uint32_t return_count;
    uint64_t stack_address; /* of the first byte of `stack`: above the stack pointer where that is not mapped */
    uint32_t stack_size;
    uint32_t maps_size;
    uint64_t registers[MOST_REGISTERS];
    uint8_t instruction[INSTRUCTION_ROOM]; /* at the instruction pointer */
    uint8_t before[BEFORE_ROOM];           /* right before it: a trap's pointer is past its instruction */
    uint64_t returns[MOST_RETURNS];        /* return addresses along the frame pointers */
    uint8_t spare[224];
    uint8_t stack[STACK_ROOM];
    uint64_t shared_free_bytes; /* of SIGBUS: what /dev/shm had, */
    uint64_t shared_bytes;      /* and its size; 0: nobody knows */
    uint32_t message_size;
    uint32_t reserved;
    char message[MESSAGE_ROOM]; /* of SIGABRT: what the C library said before it called abort() */
};

_Static_assert(offsetof(struct record, address) == 48, "crash.py reads by offset");
_Static_assert(offsetof(struct record, thread_name) == 80, "crash.py reads by offset");
_Static_assert(offsetof(struct record, stack_address) == 128, "crash.py reads by offset");
_Static_assert(offsetof(struct record, registers) == 144, "crash.py reads by offset");
_Static_assert(offsetof(struct record, instruction) == 464, "crash.py reads by offset");
_Static_assert(offsetof(struct record, returns) == 544, "crash.py reads by offset");
_Static_assert(offsetof(struct record, stack) == 1024, "crash.py reads by offset");
_Static_assert(offsetof(struct record, shared_free_bytes) == 5120, "crash.py reads by offset");
_Static_assert(offsetof(struct record, message) == 5144, "crash.py reads by offset");
_Static_assert(sizeof(struct record) == 6144, "crash.py reads by offset");

#endif
