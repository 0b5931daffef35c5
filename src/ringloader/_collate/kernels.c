/* Loops over the rows of a batch, in which Python would take longer than the copying itself.
 *
 * Owns the copying of many rows in one call: out of the arrays of samples (`join`), out of one array by places (`take`), and of
 * one large row past the caches (`stream`). Each has an equal in Python that is used where this is not built. What is given is
 * checked here to the byte, whatever the caller has looked at before: no call reads or writes outside of it. Must not know
 * slots, layouts or datasets.
 *
 * Source: numpy's reference, C-API, "Array structure and data access".
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

#include <stdint.h>
#include <string.h>

#ifdef __x86_64__
#include <emmintrin.h>
#endif

/* With fewer bytes, letting other threads run costs more than they gain. */
#define UNLOCKED_NBYTES (64 << 10)

/* -- rows of samples -------------------------------------------------------------------------------------------------------- */

/* A tensor as DLPack describes it, and the table by which torch does so without Python. Source: DLPack 1.3, C API. */
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
static PyObject *place_name;

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
"Copy rows, arrays or tensors, one behind the other into `slot`, a writable buffer, those of a column from its offset on, in bytes.\n\n"
"`columns`: a tuple of lists or tuples of one length. Returns the places of the columns that were left out, as their rows are\n"
"not all contiguous arrays, or plain tensors, of numbers with the shape and dtype of the first. Raises ValueError for a column\n"
"that does not fit.");

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

/* -- rows of one array ------------------------------------------------------------------------------------------------------ */

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

/* -- past the caches -------------------------------------------------------------------------------------------------------- */

#ifdef __x86_64__
/* Pages are copied four at a time, side by side: the processor fetches ahead within a page alone. The lines that come after
 * them are asked for at the same time. */
#define LINE_NBYTES 64
#define PAGE_NBYTES 4096
#define BLOCK_NBYTES (4 * PAGE_NBYTES)

static void
stream_line(char *target, const char *source)
{
    __m128i first = _mm_loadu_si128((const __m128i *)source), second = _mm_loadu_si128((const __m128i *)(source + 16));
    __m128i third = _mm_loadu_si128((const __m128i *)(source + 32)), fourth = _mm_loadu_si128((const __m128i *)(source + 48));
    _mm_stream_si128((__m128i *)target, first);
    _mm_stream_si128((__m128i *)(target + 16), second);
    _mm_stream_si128((__m128i *)(target + 32), third);
    _mm_stream_si128((__m128i *)(target + 48), fourth);
}

static void
copy_past_caches(char *target, const char *source, size_t nbytes)
{
    size_t start = -(uintptr_t)target % LINE_NBYTES, done;
    start = start < nbytes ? start : nbytes;
    memcpy(target, source, start);
    for (done = start; nbytes - done >= BLOCK_NBYTES; done += BLOCK_NBYTES) {
        for (size_t line = 0; line < PAGE_NBYTES; line += 2 * LINE_NBYTES) {
            for (size_t at = done + line; at < done + BLOCK_NBYTES; at += PAGE_NBYTES) {
                /* Asking for what may not be there is no fault. */
                _mm_prefetch(source + at + BLOCK_NBYTES, _MM_HINT_T1);
                _mm_prefetch(source + at + BLOCK_NBYTES + LINE_NBYTES, _MM_HINT_T1);
                stream_line(target + at, source + at);
                stream_line(target + at + LINE_NBYTES, source + at + LINE_NBYTES);
            }
        }
    }
    _mm_sfence(); /* after which others see what was stored */
    memcpy(target + done, source + done, nbytes - done);
}

PyDoc_STRVAR(stream_doc, "stream(rows, place, row, /)\n--\n\n"
"Copy a row to its place in `rows`, a writable buffer of rows of that size, with stores that go past the caches.\n\n"
"Raises IndexError for a place that is not whole in `rows`, ValueError or BufferError for a row with strides.");

static PyObject *
stream(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    PyObject *result = NULL;
    Py_buffer rows = {0}, row = {0};
    Py_ssize_t place;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "stream takes rows, place and row");
        return NULL;
    }
    place = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &rows, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(args[2], &row, PyBUF_SIMPLE) < 0) {
        goto end;
    }
    if (row.len < 1 || place < 0 || place >= rows.len / row.len) {
        PyErr_Format(PyExc_IndexError, "place %zd of rows of %zd bytes", place, row.len);
        goto end;
    }
    {
        char *target = (char *)rows.buf + place * row.len;
        const char *source = row.buf;
        Py_BEGIN_ALLOW_THREADS
        if (source < target + row.len && target < source + row.len) {
            memmove(target, source, (size_t)row.len);
        }
        else {
            copy_past_caches(target, source, (size_t)row.len);
        }
        Py_END_ALLOW_THREADS
    }
    result = Py_NewRef(Py_None);
end:
    PyBuffer_Release(&row);
    PyBuffer_Release(&rows);
    return result;
}
#endif

/* -- samples ---------------------------------------------------------------------------------------------------------------- */

/* Writes down which sample is read; returns whether that is not wanted any more, -1 with an exception set. The page is held for
 * no longer: its owner may close it meanwhile. */
static int
begin_sample(PyObject *words, Py_ssize_t sample_word, Py_ssize_t cancel_word, Py_ssize_t place, int64_t serial)
{
    Py_buffer page;
    Py_ssize_t num_words;
    int is_cancelled = -1;
    if (PyObject_GetBuffer(words, &page, PyBUF_WRITABLE) < 0) {
        return -1;
    }
    num_words = page.len / (Py_ssize_t)sizeof(int64_t);
    if (sample_word < 0 || sample_word >= num_words || cancel_word < 0 || cancel_word >= num_words) {
        PyErr_SetString(PyExc_IndexError, "no such word");
    }
    else {
        volatile int64_t *held = page.buf;
        held[sample_word] = place;
        is_cancelled = held[cancel_word] == serial;
    }
    PyBuffer_Release(&page);
    return is_cancelled;
}

PyDoc_STRVAR(fetch_doc, "fetch(dataset, keys, samples, info, words, sample_word, cancel_word, serial, /)\n--\n\n"
"Append `dataset[key]` to the list `samples` for each of the list `keys` that it has none for yet.\n\n"
"Before each, its place is written to `info.place` and to the word `sample_word` of `words`, a writable buffer of int64. Ends\n"
"early, and returns False, when the word `cancel_word` is `serial`. Raises what the dataset raises.");

static PyObject *
fetch(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    PyObject *keys, *samples;
    Py_ssize_t sample_word, cancel_word;
    int64_t serial;
    if (num_args != 8 || !PyList_CheckExact(args[1]) || !PyList_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "fetch takes a dataset, two lists and five more");
        return NULL;
    }
    keys = args[1];
    samples = args[2];
    sample_word = PyLong_AsSsize_t(args[5]);
    cancel_word = PyErr_Occurred() ? -1 : PyLong_AsSsize_t(args[6]);
    serial = PyErr_Occurred() ? -1 : PyLong_AsLongLong(args[7]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    /* The lists are measured anew each time: the dataset may do anything. */
    for (Py_ssize_t place = PyList_GET_SIZE(samples); place < PyList_GET_SIZE(keys); place++) {
        PyObject *number = PyLong_FromSsize_t(place), *key, *sample;
        int is_cancelled, failed = number == NULL || PyObject_SetAttr(args[3], place_name, number) < 0;
        Py_XDECREF(number);
        if (failed || PyErr_CheckSignals() < 0) {
            return NULL;
        }
        is_cancelled = begin_sample(args[4], sample_word, cancel_word, place, serial);
        if (is_cancelled < 0) {
            return NULL;
        }
        if (is_cancelled) {
            Py_RETURN_FALSE;
        }
        key = Py_NewRef(PyList_GET_ITEM(keys, place));
        sample = PyObject_GetItem(args[0], key);
        Py_DECREF(key);
        failed = sample == NULL || PyList_Append(samples, sample) < 0;
        Py_XDECREF(sample);
        if (failed) {
            return NULL;
        }
    }
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(know_tensors_doc, "know_tensors(tensor_type, /)\n--\n\n"
"Have `join` take tensors, from now on. Returns False where they do not describe themselves to C, before torch 2.10.");

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
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, take_doc},
    {"fetch", (PyCFunction)(void (*)(void))fetch, METH_FASTCALL, fetch_doc},
#ifdef __x86_64__
    {"stream", (PyCFunction)(void (*)(void))stream, METH_FASTCALL, stream_doc},
#endif
    {NULL, NULL, 0, NULL},
};

static int
execute(PyObject *module)
{
    import_array1(-1); /* refuses a numpy that this was not built for */
    place_name = PyUnicode_InternFromString("place");
    return place_name == NULL ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ringloader._collate.kernels",
    .m_doc = "Loops over the rows of a batch; see kernels.c.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit_kernels(void)
{
    return PyModuleDef_Init(&definition);
}
