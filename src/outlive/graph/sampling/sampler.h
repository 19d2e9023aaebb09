/* What the C files of the sampler share: arrays as they come from Python, and the ways in which they can be damaged.
 *
 * Reads   nothing.
 * Writes  nothing.
 * Never   owns memory: every array is one of NumPy's, and compiled.py holds it while C works on it.
 */

#ifndef OUTLIVE_SAMPLER_H
#define OUTLIVE_SAMPLER_H

#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch(address)
#elif defined(_MSC_VER) && defined(_M_X64)
#include <xmmintrin.h>
#define PREFETCH(address) _mm_prefetch((const char *)(address), _MM_HINT_T0)
#else
#define PREFETCH(address) ((void)(address))
#endif

/* compiled.py has the same numbers, and the words for them. */
enum damage {
    SOUND = 0,
    NODE_OUTSIDE = 1,   /* place: in the frontier */
    COLUMN_DAMAGED = 2, /* place: the node */
    SOURCE_OUTSIDE = 3, /* place: the edge */
    WEIGHT_BAD = 4,     /* place: the edge */
    TOTAL_BAD = 5,      /* place: the node */
    ROOM_EXCEEDED = 6,  /* arrays changed while they were read */
};

/* The edges of one kind, by destination. */
struct topology {
    const int64_t *indptr;
    const void *indices;
    const void *edge_ids; /* NULL: as they lie */
    const void *weights;
    const int64_t *times;
    int index_size, id_size, weight_size;
    int64_t destinations, sources, edges;
};

/* Nodes whose neighbours are wanted. */
struct frontier {
    const int64_t *nodes;
    const int64_t *owners; /* NULL: not disjoint */
    const int64_t *times;  /* NULL: not temporal */
    int64_t first, count;  /* `first`: the local number of nodes[0] */
};

struct rule {
    int64_t fanout; /* negative: all */
    int replace, weighted, last;
    uint64_t key;
};

/* What a first look found, by place in the frontier: where the column starts, its length, how many to take of it. */
struct picks {
    int64_t *starts, *degrees, *counts;
};

/* Nodes of one kind that were met, and an open-addressing table over them: tag above, number + 1 below; 0 is empty. */
struct found {
    int64_t *nodes;
    int64_t *owners;
    uint64_t *slots;
    int bits;  /* 2**bits slots, more than half of them empty */
    int exact; /* the tag is the node */
    int64_t count, room;
};

struct edges {
    int64_t *rows, *cols, *ids;
    int64_t room;
};

struct scratch {
    int64_t *words;
    int64_t count;
};

struct outcome {
    enum damage damage;
    int64_t place;
    int64_t first, second;
};

struct outcome survey(const struct topology *, const struct frontier *, const struct rule *, const struct picks *);
struct outcome hop(const struct topology *, const struct frontier *, const struct rule *, const struct picks *,
                   struct found *, const struct edges *, const struct scratch *);
struct outcome induce(const struct topology *, const struct frontier *, struct found *, const struct edges *);
struct outcome enter(struct found *, int64_t from);
struct outcome walk(const struct topology *, int64_t *steps, int64_t walks, int64_t length, uint64_t key, double p,
                    double q);
struct outcome gather(const char *source, int64_t rows, int64_t row_bytes, const int64_t *index, int64_t count,
                      char *target);

static inline int64_t whole(const void *array, int size, int64_t at)
{
    return size == 4 ? (int64_t)((const int32_t *)array)[at] : ((const int64_t *)array)[at];
}

static inline struct outcome damaged(enum damage damage, int64_t place)
{
    struct outcome outcome = {damage, place, 0, 0};
    return outcome;
}

static inline struct outcome sound(int64_t first, int64_t second)
{
    struct outcome outcome = {SOUND, 0, first, second};
    return outcome;
}

#endif
