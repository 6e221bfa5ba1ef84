# SPDX-License-Identifier: Apache-2.0
"""Kernels run in Triton's interpreter here. The package reads the variable when it is imported; nothing
else in the process, or started by it, should see it."""

import os

VARIABLE = "TRITON_INTERPRET"

before = os.environ.get(VARIABLE)
os.environ[VARIABLE] = "1"
try:
    import vllm_dpa.kernels.triton.fused_moe  # noqa: F401
finally:
    if before is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = before
