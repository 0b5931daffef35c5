/* One large row, copied by stores that go past the caches; for x86 alone, as others have no such stores that C could name.
 *
 * Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (MOVNTDQ, PREFETCHh, SFENCE).
 */
#include "kernels.h"

#ifdef __x86_64__
#include <emmintrin.h>

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

static PyMethodDef methods[] = {
    {"stream", (PyCFunction)(void (*)(void))stream, METH_FASTCALL, stream_doc},
    {NULL, NULL, 0, NULL},
};

int
add_stream(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}

#else

int
add_stream(PyObject *module)
{
    (void)module;
    return 0;
}

#endif
