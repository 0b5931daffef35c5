/* What the files of this folder share: each adds its functions to the module. */
#ifndef RINGLOADER_KERNELS_H
#define RINGLOADER_KERNELS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

/* With fewer bytes, letting other threads run costs more than they gain. */
#define UNLOCKED_NBYTES (64 << 10)

/* Each returns 0, or -1 with an exception set. */
int add_join(PyObject *module);
int add_take(PyObject *module);
int add_stream(PyObject *module);
int add_fetch(PyObject *module);

#endif
