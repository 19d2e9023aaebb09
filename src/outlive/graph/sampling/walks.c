/* Random walks against the direction of edges, all of them a step at a time; and rows gathered by number.
 *
 * Reads   the arrays of a graph, which may be those of a damaged file: nothing is followed unchecked.
 * Writes  the nodes of each walk, step after step; the rows.
 * Never   allocates, or touches Python: the GIL is free meanwhile.
 *
 * plain.py does the same with NumPy, bit for bit.
 */

#include "sampler.h"

#include "drawing.h"

enum {
    BLOCK = 64, /* walks whose columns, and then whose edges, are asked for together */
    LINE = 64, /* bytes that come at once */
    LINES = 4, /* of a row that are asked for */
    FAR_AHEAD = 64, /* rows */
    NEAR_AHEAD = 8,
};

static int sound_column(const struct topology *graph, int64_t node)
{
    int64_t start = graph->indptr[node], end = graph->indptr[node + 1];
    return start >= 0 && start <= end && end <= graph->edges && end - start <= INT64_C(0xFFFFFFFF);
}

/* Whether an edge leads from `source` to `destination`: sources ascend within a column. */
static int leads(const struct topology *graph, int64_t source, int64_t destination)
{
    int64_t low = graph->indptr[destination], high = graph->indptr[destination + 1];
    int64_t end = high;
    while (low < high) {
        int64_t middle = low + ((high - low) >> 1);
        if (whole(graph->indices, graph->index_size, middle) < source)
            low = middle + 1;
        else
            high = middle;
    }
    return low < end && whole(graph->indices, graph->index_size, low) == source;
}

/* node2vec's second-order step, by rejection: back with weight 1/p, to a neighbour of the last with 1, away with 1/q.
 * Answers with the edge, whose source is checked by the caller, as the source of every refused one is here. */
static int64_t second_order(const struct topology *graph, int64_t before, int64_t node, uint64_t base, double p,
                            double q)
{
    int64_t start = graph->indptr[node], degree = graph->indptr[node + 1] - start;
    double back = 1.0 / p, away = 1.0 / q;
    double most = back > away ? back : away;
    most = most > 1.0 ? most : 1.0;
    for (int64_t attempt = 0;; attempt++) {
        int64_t at = start + (int64_t)below(drawn(base, 2 * attempt), (uint64_t)degree);
        int64_t next = whole(graph->indices, graph->index_size, at);
        if (next < 0 || next >= graph->sources)
            return at;
        double weight = next == before ? back : leads(graph, next, before) ? 1.0 : away;
        if (unit(drawn(base, 2 * attempt + 1)) * most < weight)
            return at;
    }
}

/* `steps`: (length + 1) rows of nodes, the first of them given. A node that no edge leads to keeps its walk. */
struct outcome walk(const struct topology *graph, int64_t *steps, int64_t walks, int64_t length, uint64_t key, double p,
                    double q)
{
    int plain = p == 1.0 && q == 1.0;
    int64_t edge[BLOCK];
    for (int64_t at = 0; at < walks; at++)
        if (steps[at] < 0 || steps[at] >= graph->destinations)
            return damaged(NODE_OUTSIDE, at);
    for (int64_t step = 0; step < length; step++) {
        const int64_t *here = steps + step * walks;
        int64_t *next = steps + (step + 1) * walks;
        uint64_t step_key = drawn(key, step);
        for (int64_t first = 0; first < walks; first += BLOCK) {
            int64_t count = walks - first < BLOCK ? walks - first : BLOCK;
            for (int64_t at = 0; at < count; at++)
                PREFETCH(graph->indptr + here[first + at]);
            for (int64_t at = 0; at < count; at++) {
                int64_t node = here[first + at];
                if (!sound_column(graph, node))
                    return damaged(COLUMN_DAMAGED, node);
                int64_t start = graph->indptr[node], degree = graph->indptr[node + 1] - start;
                uint64_t base = drawn(step_key, first + at);
                if (degree == 0)
                    edge[at] = -1;
                else if (plain || step == 0)
                    edge[at] = start + (int64_t)below(drawn(base, 0), (uint64_t)degree);
                else
                    edge[at] = second_order(graph, here[first + at - walks], node, base, p, q);
                if (edge[at] >= 0)
                    PREFETCH((const char *)graph->indices + edge[at] * graph->index_size);
            }
            for (int64_t at = 0; at < count; at++) {
                int64_t node = edge[at] < 0 ? here[first + at] : whole(graph->indices, graph->index_size, edge[at]);
                if (node < 0 || node >= graph->destinations)
                    return damaged(SOURCE_OUTSIDE, edge[at]);
                next[first + at] = node;
            }
        }
    }
    return sound(0, 0);
}

/* Rows lie anywhere: the page of one is asked for long before it is copied, its lines later, and what follows them
 * comes by itself. */
struct outcome gather(const char *source, int64_t rows, int64_t row_bytes, const int64_t *index, int64_t count,
                      char *target)
{
    int64_t bytes = row_bytes < LINES * LINE ? row_bytes : LINES * LINE;
    for (int64_t at = 0; at < count; at++)
        if (index[at] < 0 || index[at] >= rows)
            return damaged(NODE_OUTSIDE, at);
    for (int64_t at = 0; at < count; at++) {
        if (at + FAR_AHEAD < count)
            PREFETCH(source + index[at + FAR_AHEAD] * row_bytes);
        if (at + NEAR_AHEAD < count)
            for (int64_t byte = LINE; byte < bytes; byte += LINE)
                PREFETCH(source + index[at + NEAR_AHEAD] * row_bytes + byte);
        memcpy(target + at * row_bytes, source + index[at] * row_bytes, (size_t)row_bytes);
    }
    return sound(0, 0);
}
