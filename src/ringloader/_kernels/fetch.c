/* The samples of a batch, asked of the dataset one by one. Must not hold anything of the caller's while the dataset runs. */
#include "kernels.h"

static PyObject *place_name;

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

static PyMethodDef methods[] = {
    {"fetch", (PyCFunction)(void (*)(void))fetch, METH_FASTCALL, fetch_doc},
    {NULL, NULL, 0, NULL},
};

int
add_fetch(PyObject *module)
{
    place_name = PyUnicode_InternFromString("place");
    if (place_name == NULL) {
        return -1;
    }
    return PyModule_AddFunctions(module, methods);
}
