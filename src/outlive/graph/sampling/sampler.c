/* The module `_sampler`: takes addresses of NumPy's arrays, as compiled.py has checked them, and answers with numbers.
 *
 * Reads   tuples of addresses and lengths.
 * Writes  nothing itself.
 * Never   looks at an array: addresses are those of arrays that compiled.py holds until the call is over. The limited
 *         API has no buffers before Python 3.11.
 */

#include <Python.h>

#include "sampler.h"

static void *pointer(unsigned long long address)
{
    return (void *)(uintptr_t)address;
}

static int to_topology(PyObject *tuple, void *into)
{
    struct topology *topology = into;
    unsigned long long indptr, indices, edge_ids, weights, times;
    long long destinations, sources, edges;
    if (!PyArg_ParseTuple(tuple, "KKiKiKiKLLL", &indptr, &indices, &topology->index_size, &edge_ids,
                          &topology->id_size, &weights, &topology->weight_size, &times, &destinations, &sources,
                          &edges))
        return 0;
    topology->indptr = pointer(indptr);
    topology->indices = pointer(indices);
    topology->edge_ids = pointer(edge_ids);
    topology->weights = pointer(weights);
    topology->times = pointer(times);
    topology->destinations = destinations;
    topology->sources = sources;
    topology->edges = edges;
    return 1;
}

static int to_frontier(PyObject *tuple, void *into)
{
    struct frontier *frontier = into;
    unsigned long long nodes, owners, times;
    long long first, count;
    if (!PyArg_ParseTuple(tuple, "KKKLL", &nodes, &owners, &times, &first, &count))
        return 0;
    frontier->nodes = pointer(nodes);
    frontier->owners = pointer(owners);
    frontier->times = pointer(times);
    frontier->first = first;
    frontier->count = count;
    return 1;
}

static int to_rule(PyObject *tuple, void *into)
{
    struct rule *rule = into;
    long long fanout;
    unsigned long long key;
    if (!PyArg_ParseTuple(tuple, "LiiiK", &fanout, &rule->replace, &rule->weighted, &rule->last, &key))
        return 0;
    rule->fanout = fanout;
    rule->key = key;
    return 1;
}

static int to_picks(PyObject *tuple, void *into)
{
    struct picks *picks = into;
    unsigned long long starts, degrees, counts;
    if (!PyArg_ParseTuple(tuple, "KKK", &starts, &degrees, &counts))
        return 0;
    picks->starts = pointer(starts);
    picks->degrees = pointer(degrees);
    picks->counts = pointer(counts);
    return 1;
}

static int to_found(PyObject *tuple, void *into)
{
    struct found *found = into;
    unsigned long long nodes, owners, slots;
    long long count, room;
    if (!PyArg_ParseTuple(tuple, "KKKiiLL", &nodes, &owners, &slots, &found->bits, &found->exact, &count, &room))
        return 0;
    found->nodes = pointer(nodes);
    found->owners = pointer(owners);
    found->slots = pointer(slots);
    found->count = count;
    found->room = room;
    return 1;
}

static int to_edges(PyObject *tuple, void *into)
{
    struct edges *edges = into;
    unsigned long long rows, cols, ids;
    long long room;
    if (!PyArg_ParseTuple(tuple, "KKKL", &rows, &cols, &ids, &room))
        return 0;
    edges->rows = pointer(rows);
    edges->cols = pointer(cols);
    edges->ids = pointer(ids);
    edges->room = room;
    return 1;
}

static int to_scratch(PyObject *tuple, void *into)
{
    struct scratch *scratch = into;
    unsigned long long words;
    long long count;
    if (!PyArg_ParseTuple(tuple, "KL", &words, &count))
        return 0;
    scratch->words = pointer(words);
    scratch->count = count;
    return 1;
}

static PyObject *answer(struct outcome outcome)
{
    return Py_BuildValue("iLLL", (int)outcome.damage, (long long)outcome.place, (long long)outcome.first,
                         (long long)outcome.second);
}

static PyObject *call_survey(PyObject *module, PyObject *arguments)
{
    (void)module;
    struct topology topology;
    struct frontier frontier;
    struct rule rule;
    struct picks picks;
    struct outcome outcome;
    if (!PyArg_ParseTuple(arguments, "O&O&O&O&", to_topology, &topology, to_frontier, &frontier, to_rule, &rule,
                          to_picks, &picks))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    outcome = survey(&topology, &frontier, &rule, &picks);
    Py_END_ALLOW_THREADS;
    return answer(outcome);
}

static PyObject *call_hop(PyObject *module, PyObject *arguments)
{
    (void)module;
    struct topology topology;
    struct frontier frontier;
    struct rule rule;
    struct picks picks;
    struct found found;
    struct edges edges;
    struct scratch scratch;
    struct outcome outcome;
    if (!PyArg_ParseTuple(arguments, "O&O&O&O&O&O&O&", to_topology, &topology, to_frontier, &frontier, to_rule, &rule,
                          to_picks, &picks, to_found, &found, to_edges, &edges, to_scratch, &scratch))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    outcome = hop(&topology, &frontier, &rule, &picks, &found, &edges, &scratch);
    Py_END_ALLOW_THREADS;
    return answer(outcome);
}

static PyObject *call_induce(PyObject *module, PyObject *arguments)
{
    (void)module;
    struct topology topology;
    struct frontier frontier;
    struct found found;
    struct edges edges;
    struct outcome outcome;
    if (!PyArg_ParseTuple(arguments, "O&O&O&O&", to_topology, &topology, to_frontier, &frontier, to_found, &found,
                          to_edges, &edges))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    outcome = induce(&topology, &frontier, &found, &edges);
    Py_END_ALLOW_THREADS;
    return answer(outcome);
}

static PyObject *call_enter(PyObject *module, PyObject *arguments)
{
    (void)module;
    struct found found;
    struct outcome outcome;
    long long from;
    if (!PyArg_ParseTuple(arguments, "O&L", to_found, &found, &from))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    outcome = enter(&found, from);
    Py_END_ALLOW_THREADS;
    return answer(outcome);
}

static PyObject *call_walk(PyObject *module, PyObject *arguments)
{
    (void)module;
    struct topology topology;
    struct outcome outcome;
    unsigned long long steps, key;
    long long walks, length;
    double p, q;
    if (!PyArg_ParseTuple(arguments, "O&KLLKdd", to_topology, &topology, &steps, &walks, &length, &key, &p, &q))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    outcome = walk(&topology, pointer(steps), walks, length, key, p, q);
    Py_END_ALLOW_THREADS;
    return answer(outcome);
}

static PyObject *call_gather(PyObject *module, PyObject *arguments)
{
    (void)module;
    struct outcome outcome;
    unsigned long long source, index, target;
    long long rows, row_bytes, count;
    if (!PyArg_ParseTuple(arguments, "KLLKLK", &source, &rows, &row_bytes, &index, &count, &target))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    outcome = gather(pointer(source), rows, row_bytes, pointer(index), count, pointer(target));
    Py_END_ALLOW_THREADS;
    return answer(outcome);
}

static PyMethodDef methods[] = {
    {"survey", call_survey, METH_VARARGS, "Where the columns of a frontier lie, and how many edges to take of each."},
    {"hop", call_hop, METH_VARARGS, "Take them, and number their sources."},
    {"induce", call_induce, METH_VARARGS, "All edges between nodes that were met."},
    {"enter", call_enter, METH_VARARGS, "Enter listed nodes into the table."},
    {"walk", call_walk, METH_VARARGS, "Random walks."},
    {"gather", call_gather, METH_VARARGS, "Copy rows by number."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* it has no state */
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_sampler",
    .m_doc = "Neighbourhoods of a graph, sampled.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__sampler(void)
{
    return PyModuleDef_Init(&definition);
}
