# SPDX-License-Identifier: Apache-2.0
"""Imported first of all by ``conftest.py``: Triton kernels run in Triton's interpreter in the tests.

Triton reads the variable when it, and the module of a kernel, is imported. Nothing that the tests start
should see it.
"""

import os

VARIABLE = "TRITON_INTERPRET"

_before = os.environ.get(VARIABLE)
os.environ[VARIABLE] = "1"
try:
    import triton.experimental.gluon  # noqa: F401  (Triton imports it at the first launch, which is too late)

    import vllm_dpa.kernels.triton.allocate
    import vllm_dpa.kernels.triton.fused_moe  # noqa: F401
finally:
    if _before is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = _before
