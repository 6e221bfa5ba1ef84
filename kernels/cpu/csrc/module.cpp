// SPDX-License-Identifier: Apache-2.0
// A Python module with no functions of its own: importing it loads the library that ctypes then calls.
#include <Python.h>

#include "kernels.h"

VLLM_DPA_API int vllm_dpa_interface_version() { return kInterfaceVersion; }

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_native", "Native CPU kernels; see kernels/cpu/native.py.", -1,
    nullptr, nullptr, nullptr, nullptr, nullptr,
};

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&module_definition); }
