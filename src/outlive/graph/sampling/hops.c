/* One hop: which edges into a frontier are taken, and what numbers their sources get.
 *
 * Reads   the arrays of a graph, which may be those of a damaged file: nothing is followed unchecked.
 * Writes  edges, new nodes and the table over them, into arrays that Python made large enough.
 * Never   waits for memory where it can ask ahead, allocates, or touches Python: the GIL is free meanwhile.
 *
 *     frontier ─► survey: columns ─► draw positions ─► read sources ─► number them
 *                   (asks ahead)      (asks for         (asks for
 *                                      sources)          slots)          in chunks that fit the first-level cache
 *
 * plain.py does the same with NumPy, bit for bit.
 */

#include "sampler.h"

#include "drawing.h"

enum {
    AHEAD = 24,  /* nodes of the frontier whose column is asked for before it is read */
    CHUNK = 256, /* edges between drawing and numbering: their lines stay in the cache */
    SCAN = 32,   /* up to as many draws, a scan over the earlier ones is faster than a bitmap */
};
static const int64_t LONGEST = INT64_C(0xFFFFFFFF); /* `below` bears no longer column */

/* ---------------------------------------------------------------- weights and times */

static inline double weight_at(const struct topology *graph, int64_t at)
{
    return graph->weight_size == 4 ? (double)((const float *)graph->weights)[at]
                                   : ((const double *)graph->weights)[at];
}

/* Whether an edge may be taken; `bad` is set where its weight is none. No branches: they would be guessed wrong. */
static inline int eligible(const struct topology *graph, int64_t at, int weighted, const int64_t *latest, int *bad)
{
    int taken = !latest || graph->times[at] <= *latest;
    if (weighted) {
        double weight = weight_at(graph, at);
        *bad |= taken & !((weight >= 0.0) & (weight <= DBL_MAX));
        taken &= weight > 0.0;
    }
    return taken;
}

/* Counts the edges of a column that may be taken, and lists them if `into` (with room for all) is given. Negative:
 * -1 - the edge with a bad weight. */
static inline int64_t candidates(const struct topology *graph, int64_t start, int64_t degree, int weighted,
                                 const int64_t *latest, int64_t *into)
{
    int64_t count = 0;
    int bad = 0;
    if (into) {
        for (int64_t at = start; at < start + degree; at++) {
            into[count] = at;
            count += eligible(graph, at, weighted, latest, &bad);
        }
    } else {
        for (int64_t at = start; at < start + degree; at++)
            count += eligible(graph, at, weighted, latest, &bad);
    }
    for (int64_t at = start; bad; at++) {
        bad = 0;
        eligible(graph, at, weighted, latest, &bad);
        if (bad)
            return -1 - at;
        bad = 1;
    }
    return count;
}

/* ---------------------------------------------------------------- a first look */

struct outcome survey(const struct topology *graph, const struct frontier *frontier, const struct rule *rule,
                      const struct picks *picks)
{
    int64_t total = 0, longest = 0;
    for (int64_t at = 0; at < frontier->count; at++) {
        if (at + AHEAD < frontier->count) {
            int64_t later = frontier->nodes[at + AHEAD];
            if (later >= 0 && later < graph->destinations)
                PREFETCH(graph->indptr + later);
        }
        int64_t node = frontier->nodes[at];
        if (node < 0 || node >= graph->destinations)
            return damaged(NODE_OUTSIDE, at);
        int64_t start = graph->indptr[node], end = graph->indptr[node + 1];
        if (start < 0 || end < start || end > graph->edges || end - start > LONGEST)
            return damaged(COLUMN_DAMAGED, node);
        int64_t count = end - start;
        if (rule->weighted || frontier->times) {
            const int64_t *latest = frontier->times ? frontier->times + at : NULL;
            count = candidates(graph, start, end - start, rule->weighted, latest, NULL);
            if (count < 0)
                return damaged(WEIGHT_BAD, -1 - count);
        }
        if (end - start > longest)
            longest = end - start;
        if (rule->fanout >= 0 && count > 0 && (rule->replace || count > rule->fanout))
            count = rule->fanout;
        picks->starts[at] = start;
        picks->degrees[at] = end - start;
        picks->counts[at] = count;
        total += count;
    }
    return sound(total, longest);
}

/* ---------------------------------------------------------------- which edges */

/* `count` different numbers below `bound`, by Floyd's algorithm, in the order in which they are drawn. */
static void distinct(uint64_t base, int64_t bound, int64_t count, int64_t *into, uint64_t *bitmap)
{
    if (count <= SCAN) {
        uint32_t seen[SCAN];
        for (int64_t draw = 0; draw < count; draw++) {
            int64_t top = bound - count + draw;
            uint32_t number = (uint32_t)below(drawn(base, draw), (uint64_t)top + 1);
            int twice = 0;
            for (int64_t other = 0; other < draw; other++)
                twice |= seen[other] == number;
            seen[draw] = twice ? (uint32_t)top : number;
            into[draw] = seen[draw];
        }
        return;
    }
    for (int64_t draw = 0; draw < count; draw++) {
        int64_t top = bound - count + draw;
        int64_t number = (int64_t)below(drawn(base, draw), (uint64_t)top + 1);
        if (bitmap[number >> 6] >> (number & 63) & 1)
            number = top;
        bitmap[number >> 6] |= UINT64_C(1) << (number & 63);
        into[draw] = number;
    }
    for (int64_t draw = 0; draw < count; draw++)
        bitmap[into[draw] >> 6] = 0;
}

struct ranked {
    int64_t rank, place;
};

static inline int precedes(struct ranked a, struct ranked b)
{
    return a.rank < b.rank || (a.rank == b.rank && a.place < b.place);
}

/* Lets the first of a heap (the last in order) sink to its place. */
static void sink(struct ranked *heap, int64_t size, int64_t at)
{
    struct ranked moved = heap[at];
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= size)
            break;
        if (child + 1 < size && precedes(heap[child], heap[child + 1]))
            child++;
        if (!precedes(moved, heap[child]))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

/* The `size` that come first stay in the heap, while others are offered. */
static inline void offer(struct ranked *heap, int64_t *held, int64_t size, struct ranked item)
{
    if (*held < size) {
        heap[(*held)++] = item;
        if (*held == size)
            for (int64_t at = size / 2 - 1; at >= 0; at--)
                sink(heap, size, at);
    } else if (precedes(item, heap[0])) {
        heap[0] = item;
        sink(heap, size, 0);
    }
}

static void sort(struct ranked *heap, int64_t size)
{
    for (int64_t end = size - 1; end > 0; end--) {
        struct ranked last = heap[0];
        heap[0] = heap[end];
        heap[end] = last;
        sink(heap, end, 0);
    }
}

/* From candidates, not all of which are taken. `spare` has room for two words a candidate. False: weights too large. */
static int choose(const struct topology *graph, const struct rule *rule, int64_t start, uint64_t base,
                  const int64_t *candidate, int64_t candidate_count, int64_t count, int64_t *into, int64_t *spare)
{
    if (rule->last) {
        struct ranked *heap = (struct ranked *)spare;
        int64_t held = 0;
        for (int64_t at = 0; at < candidate_count; at++) {
            struct ranked item = {~graph->times[candidate[at]], ~candidate[at]};
            offer(heap, &held, count, item);
        }
        for (int64_t at = 0; at < count; at++) { /* in the order of the column */
            heap[at].rank = ~heap[at].place;
            heap[at].place = 0;
        }
        for (int64_t at = count / 2 - 1; at >= 0; at--)
            sink(heap, count, at);
        sort(heap, count);
        for (int64_t at = 0; at < count; at++)
            into[at] = heap[at].rank;
    } else if (rule->weighted && rule->replace) {
        double *sums = (double *)spare;
        double sum = 0.0;
        for (int64_t at = 0; at < candidate_count; at++) {
            sum = sum + weight_at(graph, candidate[at]);
            sums[at] = sum;
        }
        if (!(sum <= DBL_MAX))
            return 0;
        for (int64_t draw = 0; draw < count; draw++) {
            double wanted = unit(drawn(base, draw)) * sum;
            int64_t low = 0, high = candidate_count - 1; /* the first whose sum is larger */
            while (low < high) {
                int64_t middle = (low + high) >> 1;
                if (sums[middle] > wanted)
                    high = middle;
                else
                    low = middle + 1;
            }
            into[draw] = candidate[low];
        }
    } else if (rule->weighted) {
        struct ranked *heap = (struct ranked *)spare;
        int64_t held = 0;
        double worst = 0.0;
        for (int64_t at = 0; at < candidate_count; at++) {
            uint64_t draw = drawn(base, candidate[at] - start);
            double weight = weight_at(graph, candidate[at]);
            if (held == count && missing(draw) > worst * weight)
                continue; /* as -log(u) > 1 - u, it cannot be among the first: no need for the logarithm */
            double key = exponential(draw) / weight;
            struct ranked item = {0, candidate[at]};
            memcpy(&item.rank, &key, sizeof item.rank); /* not negative: in the order of its bits */
            offer(heap, &held, count, item);
            memcpy(&worst, &heap[0].rank, sizeof worst);
            worst = worst * (1.0 + 1e-9); /* what rounding may have done is far less */
        }
        sort(heap, count);
        for (int64_t at = 0; at < count; at++)
            into[at] = heap[at].place;
    } else if (rule->replace) {
        for (int64_t draw = 0; draw < count; draw++)
            into[draw] = candidate[below(drawn(base, draw), (uint64_t)candidate_count)];
    } else {
        distinct(base, candidate_count, count, into, (uint64_t *)spare);
        for (int64_t draw = 0; draw < count; draw++)
            into[draw] = candidate[into[draw]];
    }
    return 1;
}

/* ---------------------------------------------------------------- numbers for nodes */

static inline uint64_t hashed(const struct found *found, int64_t node, int64_t owner)
{
    return found->exact ? (uint64_t)node * STEP : mix((uint64_t)node * STEP + (uint64_t)owner);
}

static inline uint64_t slot_of(const struct found *found, uint64_t hash)
{
    return hash >> (64 - found->bits);
}

static inline uint32_t tag_of(const struct found *found, uint64_t hash, int64_t node)
{
    return found->exact ? (uint32_t)node : (uint32_t)hash;
}

/* The slot that has this node, or the empty one where it belongs. */
static inline uint64_t *seek(const struct found *found, int64_t node, int64_t owner)
{
    uint64_t hash = hashed(found, node, owner);
    uint32_t tag = tag_of(found, hash, node);
    uint64_t last = (UINT64_C(1) << found->bits) - 1;
    for (uint64_t at = slot_of(found, hash);; at = (at + 1) & last) {
        uint64_t entry = found->slots[at];
        if (entry == 0)
            return found->slots + at;
        if ((uint32_t)(entry >> 32) != tag)
            continue;
        if (found->exact)
            return found->slots + at;
        int64_t number = (int64_t)(uint32_t)entry - 1;
        if (found->nodes[number] == node && (!found->owners || found->owners[number] == owner))
            return found->slots + at;
    }
}

static inline void occupy(const struct found *found, uint64_t *slot, int64_t node, int64_t owner, int64_t number)
{
    uint32_t tag = tag_of(found, hashed(found, node, owner), node);
    *slot = (uint64_t)tag << 32 | (uint64_t)(number + 1);
}

/* Enters nodes that stand in the list already, from this number on; a repeated one keeps its first number. */
struct outcome enter(struct found *found, int64_t from)
{
    for (int64_t number = from; number < found->count; number++) {
        int64_t owner = found->owners ? found->owners[number] : 0;
        uint64_t *slot = seek(found, found->nodes[number], owner);
        if (*slot == 0)
            occupy(found, slot, found->nodes[number], owner, number);
    }
    return sound(0, 0);
}

/* Numbers the sources of edges [from, to), whose positions stand in `ids`. */
static struct outcome number(const struct topology *graph, const struct frontier *frontier, struct found *found,
                             const struct edges *edges, int64_t from, int64_t to)
{
    for (int64_t at = from; at < to; at++) {
        int64_t position = edges->ids[at];
        int64_t source = whole(graph->indices, graph->index_size, position);
        if (source < 0 || source >= graph->sources)
            return damaged(SOURCE_OUTSIDE, position);
        int64_t owner = found->owners ? frontier->owners[edges->cols[at] - frontier->first] : 0;
        PREFETCH(found->slots + slot_of(found, hashed(found, source, owner)));
        edges->rows[at] = source;
        if (graph->edge_ids)
            edges->ids[at] = whole(graph->edge_ids, graph->id_size, position);
    }
    for (int64_t at = from; at < to; at++) {
        int64_t source = edges->rows[at];
        int64_t owner = found->owners ? frontier->owners[edges->cols[at] - frontier->first] : 0;
        uint64_t *slot = seek(found, source, owner);
        if (*slot == 0) {
            if (found->count >= found->room)
                return damaged(ROOM_EXCEEDED, at);
            occupy(found, slot, source, owner, found->count);
            found->nodes[found->count] = source;
            if (found->owners)
                found->owners[found->count] = owner;
            edges->rows[at] = found->count++;
        } else {
            edges->rows[at] = (int64_t)(uint32_t)*slot - 1;
        }
    }
    return sound(0, 0);
}

struct outcome hop(const struct topology *graph, const struct frontier *frontier, const struct rule *rule,
                   const struct picks *picks, struct found *found, const struct edges *edges,
                   const struct scratch *scratch)
{
    int filtered = rule->weighted || frontier->times;
    int64_t drawn_to = 0, numbered_to = 0;
    for (int64_t at = 0; at < frontier->count; at++) {
        int64_t start = picks->starts[at], degree = picks->degrees[at], count = picks->counts[at];
        if (count == 0)
            continue;
        if (start < 0 || degree < 0 || degree > graph->edges - start || count > edges->room - drawn_to)
            return damaged(ROOM_EXCEEDED, at);
        int64_t *into = edges->ids + drawn_to;
        uint64_t base = drawn(rule->key, frontier->first + at);
        if (filtered) {
            if (3 * degree > scratch->count)
                return damaged(ROOM_EXCEEDED, at);
            const int64_t *latest = frontier->times ? frontier->times + at : NULL;
            int64_t *candidate = scratch->words + 2 * degree;
            int64_t eligible = candidates(graph, start, degree, rule->weighted, latest, candidate);
            if (eligible < 0)
                return damaged(WEIGHT_BAD, -1 - eligible);
            if (rule->fanout < 0 || (!rule->replace && eligible <= rule->fanout)) {
                if (eligible != count)
                    return damaged(ROOM_EXCEEDED, at);
                memcpy(into, candidate, (size_t)count * sizeof *into);
            } else {
                if (eligible == 0 || count != rule->fanout)
                    return damaged(ROOM_EXCEEDED, at);
                if (!rule->last && !rule->weighted && !rule->replace) /* the bitmap starts empty */
                    memset(scratch->words, 0, (size_t)(eligible / 64 + 1) * sizeof(int64_t));
                if (!choose(graph, rule, start, base, candidate, eligible, count, into, scratch->words))
                    return damaged(TOTAL_BAD, frontier->nodes[at]);
            }
        } else if (rule->fanout < 0 || (!rule->replace && degree <= rule->fanout)) {
            if (count != degree)
                return damaged(ROOM_EXCEEDED, at);
            for (int64_t draw = 0; draw < count; draw++)
                into[draw] = start + draw;
        } else if (rule->replace) {
            for (int64_t draw = 0; draw < count; draw++)
                into[draw] = start + (int64_t)below(drawn(base, draw), (uint64_t)degree);
        } else {
            if (count > degree || (count > SCAN && degree / 64 + 1 > scratch->count))
                return damaged(ROOM_EXCEEDED, at);
            distinct(base, degree, count, into, (uint64_t *)scratch->words);
            for (int64_t draw = 0; draw < count; draw++)
                into[draw] += start;
        }
        for (int64_t draw = 0; draw < count; draw++) {
            PREFETCH((const char *)graph->indices + into[draw] * graph->index_size);
            if (graph->edge_ids)
                PREFETCH((const char *)graph->edge_ids + into[draw] * graph->id_size);
            edges->cols[drawn_to + draw] = frontier->first + at;
        }
        drawn_to += count;
        if (drawn_to - numbered_to >= CHUNK) {
            struct outcome outcome = number(graph, frontier, found, edges, numbered_to, drawn_to);
            if (outcome.damage)
                return outcome;
            numbered_to = drawn_to;
        }
    }
    struct outcome outcome = number(graph, frontier, found, edges, numbered_to, drawn_to);
    return outcome.damage ? outcome : sound(drawn_to, found->count);
}

/* ---------------------------------------------------------------- all edges between nodes that were met */

/* Counts them where `edges->rows` is NULL. */
struct outcome induce(const struct topology *graph, const struct frontier *frontier, struct found *found,
                      const struct edges *edges)
{
    int64_t count = 0;
    for (int64_t at = 0; at < frontier->count; at++) {
        int64_t node = frontier->nodes[at];
        if (node < 0 || node >= graph->destinations)
            return damaged(NODE_OUTSIDE, at);
        int64_t start = graph->indptr[node], end = graph->indptr[node + 1];
        if (start < 0 || end < start || end > graph->edges)
            return damaged(COLUMN_DAMAGED, node);
        int64_t owner = frontier->owners ? frontier->owners[at] : 0;
        for (int64_t position = start; position < end; position++) {
            if (frontier->times && graph->times[position] > frontier->times[at])
                continue;
            int64_t source = whole(graph->indices, graph->index_size, position);
            if (source < 0 || source >= graph->sources)
                return damaged(SOURCE_OUTSIDE, position);
            uint64_t entry = *seek(found, source, owner);
            if (entry == 0)
                continue;
            if (edges->rows) {
                if (count >= edges->room)
                    return damaged(ROOM_EXCEEDED, at);
                edges->rows[count] = (int64_t)(uint32_t)entry - 1;
                edges->cols[count] = frontier->first + at;
                edges->ids[count] = graph->edge_ids ? whole(graph->edge_ids, graph->id_size, position) : position;
            }
            count++;
        }
    }
    return sound(count, 0);
}
