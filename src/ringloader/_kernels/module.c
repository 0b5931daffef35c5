/* The module `ringloader._kernels.compiled`, which has what the other files of this folder add to it. */
#include "kernels.h"

static int
execute(PyObject *module)
{
    return add_join(module) < 0 || add_take(module) < 0 || add_stream(module) < 0 || add_fetch(module) < 0 ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ringloader._kernels.compiled",
    .m_doc = "Loops over the rows of a batch; see the package.",
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit_compiled(void)
{
    return PyModuleDef_Init(&definition);
}
