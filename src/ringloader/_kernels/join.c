/* Rows of samples, arrays or tensors, joined one behind the other: all leaves of a batch in one call.
 *
 * Owns what rows have to be like to be copied as they are; the columns of others are left to numpy or torch. Source: numpy's
 * reference, C-API, "Array structure and data access"; DLPack 1.3, C API.
 */
#include "kernels.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

/* A tensor as DLPack describes it, and the table by which torch does so without Python. */
typedef struct {
    char *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    const int64_t *shape, *strides;
    uint64_t offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *take, *give;
    int (*describe)(PyObject *, DLTensor *);
    void *stream;
} DLExchange;

enum { DL_MAJOR = 1, DL_CPU = 1, DL_COMPLEX = 5 };

static PyTypeObject *tensor_type; /* NULL until `know_tensors` */
static const DLExchange *exchange;
static PyObject *grad_getter, *neg_method, *conj_method; /* of that type */

/* One leaf of a batch: its rows, what all of them have to be like, and where they go. */
typedef struct {
    PyObject *held; /* a tuple of its own: reading a tensor may run code of Python, which may do anything to a list */
    PyObject **rows;
    DLTensor first; /* of tensors */
    size_t row_nbytes;
    char *target;
    const char **sources; /* NULL once a row was met that is not like the first */
} Column;

/* Each of these returns 0 or NULL for a row that is to be left to numpy or torch. With an exception, if one was raised by what
 * comes between: a signal's handler, a mode of torch's. */

static int
measure_array(PyObject *row, size_t *nbytes)
{
    if (!PyTypeNum_ISNUMBER(PyArray_TYPE((PyArrayObject *)row))) {
        return 0;
    }
    *nbytes = (size_t)PyArray_NBYTES((PyArrayObject *)row);
    return 1;
}

static const char *
find_array(PyObject *row, PyObject *other)
{
    PyArrayObject *array = (PyArrayObject *)row, *first = (PyArrayObject *)other;
    if (!PyArray_CheckExact(row) || !PyArray_IS_C_CONTIGUOUS(array) || !PyArray_SAMESHAPE(array, first)) {
        return NULL;
    }
    /* Arrays nearly always share the object for their dtype; those that were unpickled may have one each. */
    if (PyArray_DESCR(array) != PyArray_DESCR(first) && !PyArray_EquivArrTypes(array, first)) {
        return NULL;
    }
    return PyArray_BYTES(array);
}

static int
describe_tensor(PyObject *row, DLTensor *tensor)
{
    if (Py_TYPE(row) != tensor_type || exchange->describe(row, tensor) != 0) {
        if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) {
            PyErr_Clear(); /* sparse, nested, quantized: torch finds the words */
        }
        return 0;
    }
    return tensor->device.type == DL_CPU;
}

static int
measure_tensor(PyObject *row, DLTensor *tensor, size_t *nbytes)
{
    if (!describe_tensor(row, tensor) || tensor->dtype.bits % 8 || tensor->dtype.lanes != 1) {
        return 0;
    }
    *nbytes = tensor->dtype.bits / 8;
    for (int32_t axis = 0; axis < tensor->ndim; axis++) {
        *nbytes *= (size_t)tensor->shape[axis];
    }
    return 1;
}

static int
lies_in_one_piece(const DLTensor *tensor)
{
    int64_t expected = 1;
    for (int32_t axis = tensor->ndim - 1; axis >= 0 && tensor->strides != NULL; axis--) {
        if (tensor->shape[axis] != 1 && tensor->strides[axis] != expected) {
            return 0;
        }
        expected *= tensor->shape[axis];
    }
    return 1;
}

/* What DLPack does not say of a tensor: whether its numbers are those that lie there, and nobody wants to go back from them. */
static int
is_plain(PyObject *row, int is_complex)
{
    PyObject *marks[3] = {Py_TYPE(grad_getter)->tp_descr_get(grad_getter, row, (PyObject *)tensor_type), NULL, NULL};
    int found = marks[0] == Py_False;
    if (found) {
        marks[1] = PyObject_CallOneArg(neg_method, row);
        found = marks[1] == Py_False;
    }
    if (found && is_complex) {
        marks[2] = PyObject_CallOneArg(conj_method, row);
        found = marks[2] == Py_False;
    }
    for (int mark = 0; mark < 3; mark++) {
        Py_XDECREF(marks[mark]);
    }
    return found;
}

static const char *
find_tensor(PyObject *row, const Column *column)
{
    const DLTensor *first = &column->first;
    DLTensor tensor;
    if (!describe_tensor(row, &tensor) || tensor.ndim != first->ndim ||
        memcmp(&tensor.dtype, &first->dtype, sizeof(tensor.dtype)) != 0 ||
        memcmp(tensor.shape, first->shape, sizeof(int64_t) * (size_t)tensor.ndim) != 0) {
        return NULL;
    }
    if (!column->row_nbytes) {
        return ""; /* without bytes there may be no address, and strides are any */
    }
    if (!lies_in_one_piece(&tensor)) {
        return NULL;
    }
    return is_plain(row, first->dtype.code == DL_COMPLEX) ? tensor.data + tensor.offset : NULL;
}

static void
copy_columns(const Column *columns, Py_ssize_t num_columns, Py_ssize_t num_rows)
{
    /* Sample after sample: what its leaves lie over is often the same memory, and in the cache now. */
    for (Py_ssize_t row = 0; row < num_rows; row++) {
        for (Py_ssize_t place = 0; place < num_columns; place++) {
            const Column *column = &columns[place];
            if (column->sources != NULL) {
                memmove(column->target + (size_t)row * column->row_nbytes, column->sources[row], column->row_nbytes);
            }
        }
    }
}

/* Reads the addresses of all rows; returns the bytes there are to copy, -1 with an exception set. */
static Py_ssize_t
find_rows(Column *columns, Py_ssize_t num_rows, PyObject *given, PyObject *offsets, const Py_buffer *slot,
          const char **sources)
{
    Py_ssize_t num_columns = PyTuple_GET_SIZE(given);
    size_t total = 0;
    for (Py_ssize_t place = 0; place < num_columns; place++) {
        PyObject *rows = PyTuple_GET_ITEM(given, place);
        Column *column = &columns[place];
        size_t offset = PyLong_AsSize_t(PyTuple_GET_ITEM(offsets, place));
        int is_array;
        if (PyErr_Occurred()) {
            return -1;
        }
        column->held = PyTuple_CheckExact(rows) ? Py_NewRef(rows) : PyList_AsTuple(rows);
        if (column->held == NULL) {
            return -1;
        }
        if (PyTuple_GET_SIZE(column->held) != num_rows) {
            PyErr_Format(PyExc_ValueError, "column %zd has changed", place);
            return -1;
        }
        column->rows = PySequence_Fast_ITEMS(column->held);
        is_array = PyArray_CheckExact(column->rows[0]);
        if (!(is_array ? measure_array(column->rows[0], &column->row_nbytes)
                       : measure_tensor(column->rows[0], &column->first, &column->row_nbytes))) {
            if (PyErr_Occurred()) {
                return -1;
            }
            continue;
        }
        if (offset > (size_t)slot->len || (column->row_nbytes &&
                                           (size_t)num_rows > ((size_t)slot->len - offset) / column->row_nbytes)) {
            PyErr_Format(PyExc_ValueError, "leaf %zd does not fit", place);
            return -1;
        }
        column->target = (char *)slot->buf + offset;
        column->sources = sources + place * num_rows;
        for (Py_ssize_t row = 0; row < num_rows; row++) {
            const char *source = is_array ? find_array(column->rows[row], column->rows[0])
                                          : find_tensor(column->rows[row], column);
            if (source == NULL) {
                if (PyErr_Occurred()) {
                    return -1;
                }
                column->sources = NULL;
                break;
            }
            column->sources[row] = source;
        }
        total += column->sources == NULL ? 0 : (size_t)num_rows * column->row_nbytes;
    }
    return (Py_ssize_t)total;
}

static PyObject *
places_left(const Column *columns, Py_ssize_t num_columns)
{
    PyObject *left = PyList_New(0);
    for (Py_ssize_t place = 0; left != NULL && place < num_columns; place++) {
        if (columns[place].sources == NULL) {
            PyObject *number = PyLong_FromSsize_t(place);
            if (number == NULL || PyList_Append(left, number) < 0) {
                Py_CLEAR(left);
            }
            Py_XDECREF(number);
        }
    }
    return left;
}

static int
check_columns(PyObject *given, PyObject *offsets)
{
    Py_ssize_t num_rows = -1;
    if (!PyTuple_CheckExact(given) || !PyTuple_CheckExact(offsets) || !PyTuple_GET_SIZE(given) ||
        PyTuple_GET_SIZE(given) != PyTuple_GET_SIZE(offsets)) {
        PyErr_SetString(PyExc_TypeError, "columns and offsets have to be tuples of one length above 0");
        return -1;
    }
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(given); place++) {
        PyObject *rows = PyTuple_GET_ITEM(given, place);
        Py_ssize_t length;
        if (!PyTuple_CheckExact(rows) && !PyList_CheckExact(rows)) {
            PyErr_Format(PyExc_TypeError, "column %zd has to be a list or tuple", place);
            return -1;
        }
        length = PySequence_Fast_GET_SIZE(rows);
        if (length < 1 || (place && length != num_rows)) {
            PyErr_Format(PyExc_ValueError, "column %zd has %zd rows", place, length);
            return -1;
        }
        num_rows = length;
    }
    return 0;
}

PyDoc_STRVAR(join_doc, "join(columns, slot, offsets, /)\n--\n\n"
"Copy rows, arrays or tensors, one behind the other into `slot`, a writable buffer, each column from its offset on.\n\n"
"`columns`: a tuple of lists or tuples of one length; `offsets`: a tuple of as many ints, in bytes. Returns the places of the\n"
"columns that were left out, as their rows are not all contiguous arrays, or plain tensors, of numbers, with the shape and\n"
"dtype of the first. Raises ValueError for a column that does not fit.");

static PyObject *
join(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    PyObject *left = NULL;
    Column *columns = NULL;
    const char **sources = NULL;
    Py_buffer slot;
    Py_ssize_t num_columns, num_rows, nbytes;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "join takes columns, slot and offsets");
        return NULL;
    }
    if (check_columns(args[0], args[2]) < 0 || PyObject_GetBuffer(args[1], &slot, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    num_columns = PyTuple_GET_SIZE(args[0]);
    num_rows = PySequence_Fast_GET_SIZE(PyTuple_GET_ITEM(args[0], 0));
    columns = PyMem_Calloc((size_t)num_columns, sizeof(Column));
    sources = PyMem_Calloc((size_t)num_columns * (size_t)num_rows, sizeof(char *));
    if (columns == NULL || sources == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    nbytes = find_rows(columns, num_rows, args[0], args[2], &slot, sources);
    if (nbytes < 0) {
        goto end;
    }
    if (nbytes >= UNLOCKED_NBYTES) {
        Py_BEGIN_ALLOW_THREADS
        copy_columns(columns, num_columns, num_rows);
        Py_END_ALLOW_THREADS
    }
    else {
        copy_columns(columns, num_columns, num_rows);
    }
    left = places_left(columns, num_columns);
end:
    for (Py_ssize_t place = 0; columns != NULL && place < num_columns; place++) {
        Py_XDECREF(columns[place].held);
    }
    PyMem_Free(columns);
    PyMem_Free(sources);
    PyBuffer_Release(&slot);
    return left;
}

PyDoc_STRVAR(know_tensors_doc, "know_tensors(tensor_type, /)\n--\n\n"
"Have `join` take tensors, from now on. Returns False where they do not describe themselves to C: by DLPack 1.3.");

static PyObject *
know_tensors(PyObject *module, PyObject *type)
{
    PyObject *capsule = PyType_Check(type) ? PyObject_GetAttrString(type, "__dlpack_c_exchange_api__") : NULL;
    const DLExchange *found = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    PyObject *getter = found == NULL ? NULL : PyObject_GetAttrString(type, "requires_grad");
    PyObject *neg = found == NULL ? NULL : PyObject_GetAttrString(type, "is_neg");
    PyObject *conj = found == NULL ? NULL : PyObject_GetAttrString(type, "is_conj");
    int is_known = getter != NULL && neg != NULL && conj != NULL && Py_TYPE(getter)->tp_descr_get != NULL &&
                   found->major == DL_MAJOR && found->describe != NULL;
    PyErr_Clear();
    Py_XDECREF(capsule); /* the table lives as long as the process */
    if (is_known) {
        exchange = found;
        Py_XSETREF(grad_getter, Py_NewRef(getter));
        Py_XSETREF(neg_method, Py_NewRef(neg));
        Py_XSETREF(conj_method, Py_NewRef(conj));
        Py_XSETREF(tensor_type, (PyTypeObject *)Py_NewRef(type));
    }
    Py_XDECREF(getter);
    Py_XDECREF(neg);
    Py_XDECREF(conj);
    return PyBool_FromLong(is_known);
}

static PyMethodDef methods[] = {
    {"join", (PyCFunction)(void (*)(void))join, METH_FASTCALL, join_doc},
    {"know_tensors", know_tensors, METH_O, know_tensors_doc},
    {NULL, NULL, 0, NULL},
};

int
add_join(PyObject *module)
{
    import_array1(-1); /* refuses a numpy that this was not built for */
    return PyModule_AddFunctions(module, methods);
}
