/* The fatal-signal recorder: what a dying worker writes into its black box.
 *
 * Reads   siginfo, the interrupted thread's registers and memory, /proc/self/maps.
 * Writes  one record, and the maps behind it, in shared memory that outlives the process.
 * Never   allocates, locks or calls what is not async-signal-safe (tests/recorder/test_source.py checks it);
 *         costs nothing until a signal comes.
 *
 *     signal ─► claim ─► facts ─► code, stack, returns ─► maps ─► step down ─► return
 *                 │ taken: wait for the other thread                  │
 *                 │ our own fault: on                                 ▼
 *                 └────────────────────────────────────► the instruction faults again, or the signal that
 *                                                        was sent is queued again: faulthandler, then death
 *
 * The next handler gets the same siginfo and the same context as we did: nothing shows that we were there.
 * SIGTERM and its like are only noted, with their sender, and only while their action is the default: whoever handles
 * or ignores them never meets us.
 * A thread without an alternate stack (one that native code started; Python's get one by `add_stack`) is recorded on
 * its own stack; if that is what overflowed, the kernel kills the process at once, with the right signal and without a
 * record.
 */

#define _GNU_SOURCE 1
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "recorder.h"

enum {
    SIGNALS = 7,
    ENDINGS = 8,
    ALTERNATE_STACK = 64 << 10, /* our frame and faulthandler's, each with up to 11 KiB of vector registers */
    LOSERS_WAIT_MS = 1000,
    SEGV_TAGGED_LATE = 8, /* SEGV_MTEAERR, missing in older headers */
};
static const int signals[SIGNALS] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS};

/* What others send to end a process; no instruction is to blame. */
static const int endings[ENDINGS] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU};

/* A record that is older than the worker's last step by more than this was survived: it may be written over. */
static const int64_t SURVIVED_NS = 10000000000;

static struct record *record;
static char *maps;
static size_t maps_room;
static const volatile int64_t *last_step_ns; /* the black box's SINCE */
static size_t page_size;
static const void *abort_message; /* where the C library keeps a pointer to its last words; NULL: it keeps none */
static pid_t owner;             /* forks of the worker share the black box, and must not write to it */
static volatile int claiming;   /* the thread that came last, */
static volatile int recording;  /* and the one that is at it: faults of theirs are our own */

static struct sigaction first[SIGNALS];  /* what was there when we came */
static struct sigaction latest[SIGNALS]; /* what was there when we were put in front last */
static int known[SIGNALS];               /* whether `first` is */
static int entered[SIGNALS];

/* ---------------------------------------------------------------- in the handler */

/* Copy from our own memory without ever faulting; how much was there. At most two pages. */
static size_t peek(void *to, uint64_t from, size_t size)
{
    size_t in_page = page_size - (size_t)(from & (page_size - 1));
    size_t head = in_page < size ? in_page : size;
    struct iovec local = {to, size};
    /* Apart, so that an unmapped second page does not cost the first. */
    struct iovec remote[2] = {{(void *)(uintptr_t)from, head}, {(void *)(uintptr_t)(from + head), size - head}};
    long got = syscall(SYS_process_vm_readv, (long)getpid(), &local, 1L, remote, size > head ? 2L : 1L, 0L);
    return got > 0 && (size_t)got <= size ? (size_t)got : 0;
}

/* Registers in the order of crash.py's names; answers with the frame pointer, 0 where none is known. */
static uint64_t take_registers(const ucontext_t *context)
{
#if defined(__x86_64__)
    static const int order[] = {
        REG_RAX, REG_RBX, REG_RCX, REG_RDX, REG_RSI, REG_RDI, REG_RBP, REG_RSP, REG_R8,
        REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15, REG_RIP, REG_EFL,
    };
    const greg_t *from = context->uc_mcontext.gregs;
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        record->registers[i] = (uint64_t)from[order[i]];
    record->register_count = sizeof order / sizeof *order;
    record->architecture = X86_64;
    record->instruction_pointer = (uint64_t)from[REG_RIP];
    record->stack_pointer = (uint64_t)from[REG_RSP];
    record->trap = (uint64_t)from[REG_TRAPNO];
    record->fault_error = (uint64_t)from[REG_ERR];
    return (uint64_t)from[REG_RBP];
#elif defined(__aarch64__)
    const mcontext_t *from = &context->uc_mcontext;
    for (size_t i = 0; i < 31; i++)
        record->registers[i] = from->regs[i];
    record->registers[31] = from->sp;
    record->registers[32] = from->pc;
    record->registers[33] = from->pstate;
    record->register_count = 34;
    record->architecture = AARCH64;
    record->instruction_pointer = from->pc;
    record->stack_pointer = from->sp;
    /* Blocks of {magic, size}, ended by zeros; one of them holds the syndrome, with «read or write» in it. */
    const unsigned char *block = (const unsigned char *)from->__reserved;
    const unsigned char *end = block + sizeof from->__reserved;
    while (block + 16 <= end) {
        uint32_t head[2];
        memcpy(head, block, sizeof head);
        if (head[0] == 0 || head[1] < 16)
            break;
        if (head[0] == 0x45535201)
            memcpy(&record->fault_error, block + 8, 8);
        block += head[1];
    }
    return from->regs[29];
#else
    (void)context;
    return 0;
#endif
}

static void take_facts(int number, const siginfo_t *info)
{
    struct timespec now = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    record->version = VERSION;
    record->signal = number;
    record->code = info->si_code;
    record->error = info->si_errno;
    record->pid = owner;
    record->thread = recording;
    record->system_call = -1;
    record->time_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (info->si_code == SI_USER || info->si_code == SI_QUEUE || info->si_code == SI_TKILL) {
        record->sender_pid = info->si_pid;
        record->sender_uid = info->si_uid;
    } else if (number == SIGSYS && info->si_code > 0) {
        record->system_call = info->si_syscall;
        record->address = (uint64_t)(uintptr_t)info->si_call_addr;
    } else if (info->si_code > 0) {
        record->address = (uint64_t)(uintptr_t)info->si_addr;
    }
    syscall(SYS_prctl, (long)PR_GET_NAME, record->thread_name, 0L, 0L, 0L);
}

static void take_code(int number)
{
    uint64_t at = record->instruction_pointer;
    size_t got = peek(record->instruction, at, INSTRUCTION_ROOM);
    if (got == 0 && number == SIGILL && record->code > 0) {
        /* Forbidden, or emulated. This page was just executed: it can be read as far as it goes. */
        size_t in_page = page_size - (size_t)(at & (page_size - 1));
        got = in_page < INSTRUCTION_ROOM ? in_page : INSTRUCTION_ROOM;
        memcpy(record->instruction, (const void *)(uintptr_t)at, got);
    }
    __atomic_store_n(&record->instruction_size, (uint32_t)got, __ATOMIC_RELEASE);
    got = at > BEFORE_ROOM ? peek(record->before, at - BEFORE_ROOM, BEFORE_ROOM) : 0;
    __atomic_store_n(&record->before_size, got == BEFORE_ROOM ? BEFORE_ROOM : 0, __ATOMIC_RELEASE);
}

static void take_stack(uint64_t frame)
{
    uint64_t at = record->stack_pointer;
    size_t got = peek(record->stack, at, STACK_ROOM);
    if (got == 0 && at != 0) { /* overflowed: what is above may still be there */
        at = (at | (page_size - 1)) + 1;
        got = peek(record->stack, at, STACK_ROOM);
    }
    record->stack_address = at;
    __atomic_store_n(&record->stack_size, (uint32_t)got, __ATOMIC_RELEASE);

    uint64_t lowest = record->stack_pointer;
    uint32_t count = 0;
    uint64_t pair[2];
    /* A frame pointer that is none (most libraries keep none) soon leads nowhere. */
    while (count < MOST_RETURNS && frame >= lowest && frame - lowest < (64u << 20) && frame % 8 == 0 &&
           peek(pair, frame, sizeof pair) == sizeof pair && pair[1] != 0) {
        record->returns[count++] = pair[1];
        lowest = frame + sizeof pair;
        frame = pair[0];
    }
    __atomic_store_n(&record->return_count, count, __ATOMIC_RELEASE);
}

/* The C library keeps what it wrote before abort() as {unsigned size; char text[]}, text ended by a zero: it is there
 * where standard error is closed, too. */
static void take_message(int number)
{
    uint64_t at = 0;
    if (number != SIGABRT || abort_message == NULL)
        return;
    if (peek(&at, (uint64_t)(uintptr_t)abort_message, sizeof at) != sizeof at || at == 0)
        return;
    size_t got = peek(record->message, at + sizeof(unsigned), MESSAGE_ROOM);
    __atomic_store_n(&record->message_size, (uint32_t)got, __ATOMIC_RELEASE);
}

/* Now: what the dying worker holds of it is free as soon as it is gone. */
static void take_shared_memory(int number)
{
    struct statfs found;
    if (number != SIGBUS || syscall(SYS_statfs, "/dev/shm", &found) != 0)
        return;
    record->shared_free_bytes = (uint64_t)found.f_bavail * (uint64_t)found.f_bsize;
    record->shared_bytes = (uint64_t)found.f_blocks * (uint64_t)found.f_bsize;
}

static void save_maps(void)
{
    int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    size_t filled = 0;
    while (file >= 0 && filled < maps_room) {
        ssize_t got = read(file, maps + filled, maps_room - filled);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0 || (size_t)got > maps_room - filled)
            break;
        filled += (size_t)got;
        __atomic_store_n(&record->maps_size, (uint32_t)filled, __ATOMIC_RELEASE);
    }
    if (file >= 0)
        close(file);
}

/* Whether this thread is the one to write the record. */
static int claim(int thread)
{
    uint64_t state = EMPTY;
    claiming = thread;
    int won = __atomic_compare_exchange_n(&record->state, &state, WRITING, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    if (!won && state == SAVED && *last_step_ns - record->time_ns > SURVIVED_NS)
        won = __atomic_compare_exchange_n(&record->state, &state, WRITING, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    if (!won)
        claiming = 0;
    return won;
}

static void write_record(int number, const siginfo_t *info, const ucontext_t *context)
{
    memset((char *)record + sizeof record->state, 0, sizeof *record - sizeof record->state);
    take_facts(number, info);
    uint64_t frame = take_registers(context);
    __atomic_store_n(&record->state, FACTS, __ATOMIC_RELEASE);
    take_code(number);
    take_stack(frame);
    take_message(number);
    take_shared_memory(number);
    save_maps();
    __atomic_store_n(&record->state, SAVED, __ATOMIC_RELEASE);
}

/* Put the handler below us in our place: whoever was there last, then whoever was there first, then the default.
 * So two handlers that each chain to the other come to an end. */
static void step_down(int place)
{
    struct sigaction plain;
    memset(&plain, 0, sizeof plain);
    plain.sa_handler = SIG_DFL;
    int times = __atomic_add_fetch(&entered[place], 1, __ATOMIC_ACQ_REL);
    sigaction(signals[place], times == 1 ? &latest[place] : times == 2 ? &first[place] : &plain, NULL);
}

/* Whether returning makes the same signal come again. */
static int faults_again(int number, int code)
{
    if (code <= 0)
        return 0; /* sent by kill(), raise(), abort() */
    if (number == SIGSEGV)
        return code != SEGV_TAGGED_LATE;
    if (number == SIGBUS)
        return code != BUS_MCEERR_AO;
    return number == SIGILL || number == SIGFPE;
}

/* Queue the signal as it came. It is blocked until we return: the next handler then finds the context that we found. */
static void send_again(int number, siginfo_t *info, int thread)
{
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, number);
    pthread_sigmask(SIG_BLOCK, &one, NULL);
    if (syscall(SYS_rt_tgsigqueueinfo, (long)getpid(), (long)thread, (long)number, info) != 0)
        raise(number);
}

/* A system call of ours is forbidden: have it answer so, for the kernel leaves the call's number there. */
static void refuse(ucontext_t *context)
{
#if defined(__x86_64__)
    context->uc_mcontext.gregs[REG_RAX] = -ENOSYS;
#elif defined(__aarch64__)
    context->uc_mcontext.regs[0] = (uint64_t)-ENOSYS;
#else
    (void)context;
#endif
}

#if defined(__x86_64__)
__attribute__((force_align_arg_pointer)) /* qemu's emulation enters with an odd stack; vector stores fault on that */
#endif
static void on_fatal_signal(int number, siginfo_t *info, void *context)
{
#if defined(__x86_64__)
    /* Alignment checks, where that is what faulted, would be on in here, too. */
    __builtin_ia32_writeeflags_u64(__builtin_ia32_readeflags_u64() & ~0x40000ull);
#endif
    int before = errno;
    int thread = (int)syscall(SYS_gettid);
    int place = 0;
    while (place < SIGNALS - 1 && signals[place] != number)
        place++;
    if (getpid() != owner) {
        /* A fork of the worker's: its death is its own affair. */
    } else if (recording == thread || claiming == thread) {
        if (number == SIGSYS && info->si_code > 0) {
            refuse((ucontext_t *)context);
            errno = before;
            return;
        }
    } else if (claim(thread)) {
        recording = thread;
        claiming = 0;
        write_record(number, info, (const ucontext_t *)context);
        recording = 0;
    } else if (record->thread != thread) {
        /* Another thread was first. It ends the process when it is done; were we faster, its record would be lost. */
        for (int waited = 0; waited < LOSERS_WAIT_MS; waited += 5)
            poll(NULL, 0, 5);
    }
    step_down(place);
    if (!faults_again(number, info->si_code))
        send_again(number, info, thread);
    errno = before;
}

/* Note who sent it; then the default, which is what was there. */
#if defined(__x86_64__)
__attribute__((force_align_arg_pointer))
#endif
static void on_ending_signal(int number, siginfo_t *info, void *context)
{
    int before = errno;
    int thread = (int)syscall(SYS_gettid);
    struct sigaction plain;
    (void)context;
    if (getpid() == owner && claim(thread)) {
        recording = thread;
        claiming = 0;
        memset((char *)record + sizeof record->state, 0, sizeof *record - sizeof record->state);
        take_facts(number, info);
        __atomic_store_n(&record->state, SAVED, __ATOMIC_RELEASE);
        recording = 0;
    }
    memset(&plain, 0, sizeof plain);
    plain.sa_handler = SIG_DFL;
    sigaction(number, &plain, NULL);
    send_again(number, info, thread);
    errno = before;
}

/* ---------------------------------------------------------------- outside of it */

static int is_ours(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_fatal_signal;
}

static int put_in_front(void)
{
    struct sigaction ours, current;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_fatal_signal;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigfillset(&ours.sa_mask);
    for (int i = 0; i < SIGNALS; i++)
        sigdelset(&ours.sa_mask, signals[i]);
    for (int i = 0; i < SIGNALS; i++) {
        if (sigaction(signals[i], NULL, &current) != 0)
            return -1;
        if (is_ours(&current))
            continue;
        latest[i] = current;
        if (!known[i]) {
            first[i] = current;
            known[i] = 1;
        }
        entered[i] = 0;
        if (sigaction(signals[i], &ours, NULL) != 0)
            return -1;
    }
    return 0;
}

/* Where nobody has chosen otherwise. */
static int mind_endings(void)
{
    struct sigaction ours, current;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_ending_signal;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigfillset(&ours.sa_mask);
    for (int i = 0; i < ENDINGS; i++) {
        if (sigaction(endings[i], NULL, &current) != 0)
            return -1;
        int untouched = !(current.sa_flags & SA_SIGINFO) && current.sa_handler == SIG_DFL;
        if (untouched && sigaction(endings[i], &ours, NULL) != 0)
            return -1;
    }
    return 0;
}

/* For this thread. Answers with the start of its memory, NULL where the thread has one that is large enough;
 * MAP_FAILED, and errno, where there can be none. */
static void *make_alternate_stack(void)
{
    stack_t stack;
    if (sigaltstack(NULL, &stack) != 0)
        return MAP_FAILED;
    if (!(stack.ss_flags & SS_DISABLE) && stack.ss_size >= ALTERNATE_STACK)
        return NULL;
    /* The page below stays forbidden: overflowing this one, too, must not write over somebody's memory. */
    char *memory = mmap(NULL, page_size + ALTERNATE_STACK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return MAP_FAILED;
    memset(&stack, 0, sizeof stack);
    stack.ss_sp = memory + page_size;
    stack.ss_size = ALTERNATE_STACK;
    if (mprotect(stack.ss_sp, ALTERNATE_STACK, PROT_READ | PROT_WRITE) != 0 || sigaltstack(&stack, NULL) != 0) {
        munmap(memory, page_size + ALTERNATE_STACK);
        return MAP_FAILED;
    }
    return memory;
}

static PyObject *recorder_install(PyObject *module, PyObject *arguments)
{
    unsigned long long at, step, maps_at, room;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "KKKK", &at, &step, &maps_at, &room))
        return NULL;
    page_size = (size_t)sysconf(_SC_PAGESIZE);
    if (make_alternate_stack() == MAP_FAILED) /* this one stays until the process ends */
        return PyErr_SetFromErrno(PyExc_OSError);
#ifdef __GLIBC__
    abort_message = dlvsym(RTLD_DEFAULT, "__abort_msg", "GLIBC_PRIVATE");
#endif
    record = (struct record *)(uintptr_t)at;
    last_step_ns = (const volatile int64_t *)(uintptr_t)step;
    maps = (char *)(uintptr_t)maps_at;
    maps_room = (size_t)room;
    owner = getpid();
    claiming = recording = 0;
    if (put_in_front() != 0 || mind_endings() != 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    record->version = VERSION; /* what comes from now on is recorded */
    Py_RETURN_NONE;
}

static PyObject *recorder_add_stack(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    void *memory = record != NULL ? make_alternate_stack() : NULL;
    return PyLong_FromVoidPtr(memory == MAP_FAILED ? NULL : memory);
}

static PyObject *recorder_drop_stack(PyObject *module, PyObject *at)
{
    (void)module;
    char *memory = PyLong_AsVoidPtr(at);
    stack_t stack;
    if (memory == NULL && PyErr_Occurred())
        return NULL;
    /* Somebody who has put another in its place may mean to put it back: it stays then. */
    if (memory != NULL && sigaltstack(NULL, &stack) == 0 && stack.ss_sp == memory + page_size) {
        memset(&stack, 0, sizeof stack);
        stack.ss_flags = SS_DISABLE;
        if (sigaltstack(&stack, NULL) == 0)
            munmap(memory, page_size + ALTERNATE_STACK);
    }
    Py_RETURN_NONE;
}

static PyObject *recorder_reinstall(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    if (record != NULL && owner == getpid() && (put_in_front() != 0 || mind_endings() != 0))
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *recorder_is_installed(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    if (record == NULL || owner != getpid())
        Py_RETURN_FALSE;
    for (int i = 0; i < SIGNALS; i++) {
        struct sigaction current;
        if (sigaction(signals[i], NULL, &current) != 0 || !is_ours(&current))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"install", recorder_install, METH_VARARGS, "install(record, last_step, maps, maps_room): addresses, and a size."},
    {"reinstall", recorder_reinstall, METH_NOARGS, "Come first again, before handlers that were installed since."},
    {"add_stack", recorder_add_stack, METH_NOARGS, "A second stack for this thread: where it is, 0 if it needs none."},
    {"drop_stack", recorder_drop_stack, METH_O, "Give back what add_stack gave, in the same thread."},
    {"is_installed", recorder_is_installed, METH_NOARGS, "Whether all seven signals come to us first."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "outlive._capture._recorder", "Fills the crash record.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__recorder(void)
{
    PyObject *module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
    if (module != NULL)
        PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    if (module != NULL && PyModule_AddIntConstant(module, "RECORD_SIZE", (long)sizeof(struct record)) != 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
