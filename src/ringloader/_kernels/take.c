/* Rows of one array, gathered by their places, into one target or several. */
#include "kernels.h"

/* Rows of one size, `stride` bytes from one to the next, and the targets that each goes to, `shifts` bytes further on each. */
typedef struct {
    const char *rows;
    Py_ssize_t nbytes, stride, row_nbytes;
    const int64_t *places;
    Py_ssize_t num_places, num_targets;
    Py_buffer *targets;
    Py_ssize_t *shifts;
} Taken;

static void
take_rows(const Taken *taken)
{
    Py_ssize_t size = taken->row_nbytes;
    for (Py_ssize_t row = 0; row < taken->num_places; row++) {
        const char *source = taken->rows + taken->places[row] * taken->stride;
        for (Py_ssize_t number = 0; number < taken->num_targets; number++) {
            memmove((char *)taken->targets[number].buf + row * size, source + taken->shifts[number], (size_t)size);
        }
    }
}

/* Returns -1 with an exception set for a place, or a target, that a row is not whole in. */
static int
check_taken(const Taken *taken)
{
    Py_ssize_t last_shift = 0, room, num_rows;
    if (taken->stride < 1 || taken->row_nbytes < 1) {
        PyErr_SetString(PyExc_ValueError, "stride and row_nbytes have to be above 0");
        return -1;
    }
    for (Py_ssize_t number = 0; number < taken->num_targets; number++) {
        if (taken->targets[number].len / taken->row_nbytes < taken->num_places || taken->shifts[number] < 0) {
            PyErr_Format(PyExc_ValueError, "target %zd does not fit", number);
            return -1;
        }
        last_shift = Py_MAX(last_shift, taken->shifts[number]);
    }
    room = taken->nbytes < last_shift ? -1 : taken->nbytes - last_shift - taken->row_nbytes;
    num_rows = room < 0 ? 0 : room / taken->stride + 1;
    for (Py_ssize_t row = 0; row < taken->num_places; row++) {
        if (taken->places[row] < 0 || taken->places[row] >= num_rows) {
            PyErr_Format(PyExc_IndexError, "place %lld of %zd rows", (long long)taken->places[row], num_rows);
            return -1;
        }
    }
    return 0;
}

static int
get_targets(Taken *taken, PyObject *targets, PyObject *shifts)
{
    Py_ssize_t num_targets;
    if (!PyTuple_CheckExact(targets) || !PyTuple_CheckExact(shifts) || PyTuple_GET_SIZE(targets) != PyTuple_GET_SIZE(shifts)) {
        PyErr_SetString(PyExc_TypeError, "targets and shifts have to be tuples of one length");
        return -1;
    }
    num_targets = PyTuple_GET_SIZE(targets);
    taken->targets = PyMem_Calloc((size_t)num_targets + 1, sizeof(Py_buffer));
    taken->shifts = PyMem_Calloc((size_t)num_targets + 1, sizeof(Py_ssize_t));
    if (taken->targets == NULL || taken->shifts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; taken->num_targets < num_targets; taken->num_targets++) {
        taken->shifts[taken->num_targets] = PyLong_AsSsize_t(PyTuple_GET_ITEM(shifts, taken->num_targets));
        if (PyErr_Occurred() || PyObject_GetBuffer(PyTuple_GET_ITEM(targets, taken->num_targets),
                                                   &taken->targets[taken->num_targets], PyBUF_WRITABLE) < 0) {
            return -1;
        }
    }
    return 0;
}

PyDoc_STRVAR(take_doc, "take(rows, stride, row_nbytes, places, targets, shifts, /)\n--\n\n"
"Copy the rows at `places`, a buffer of int64, one behind the other into each of `targets`, a tuple of writable buffers.\n\n"
"`rows`: a buffer in which row i begins `i * stride` bytes on, for target j so many more as the tuple `shifts` says. All in\n"
"bytes. Raises IndexError for a place, ValueError for a target in which a row would not lie whole.");

static PyObject *
take(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    PyObject *result = NULL;
    Taken taken = {0};
    Py_buffer rows = {0}, places = {0};
    if (num_args != 6) {
        PyErr_SetString(PyExc_TypeError, "take takes rows, stride, row_nbytes, places, targets and shifts");
        return NULL;
    }
    taken.stride = PyLong_AsSsize_t(args[1]);
    taken.row_nbytes = PyErr_Occurred() ? -1 : PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &rows, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(args[3], &places, PyBUF_SIMPLE) < 0 || get_targets(&taken, args[4], args[5]) < 0) {
        goto end;
    }
    taken.rows = rows.buf;
    taken.nbytes = rows.len;
    taken.places = places.buf;
    taken.num_places = places.len / (Py_ssize_t)sizeof(int64_t);
    if (check_taken(&taken) < 0) {
        goto end;
    }
    if (taken.num_places * taken.row_nbytes * taken.num_targets >= UNLOCKED_NBYTES) {
        Py_BEGIN_ALLOW_THREADS
        take_rows(&taken);
        Py_END_ALLOW_THREADS
    }
    else {
        take_rows(&taken);
    }
    result = Py_NewRef(Py_None);
end:
    while (taken.num_targets > 0) {
        PyBuffer_Release(&taken.targets[--taken.num_targets]);
    }
    PyMem_Free(taken.targets);
    PyMem_Free(taken.shifts);
    PyBuffer_Release(&places);
    PyBuffer_Release(&rows);
    return result;
}

static PyMethodDef methods[] = {
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, take_doc},
    {NULL, NULL, 0, NULL},
};

int
add_take(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
