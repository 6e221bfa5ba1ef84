# SPDX-License-Identifier: Apache-2.0
"""The GPU path: layout, allocation and fused MoE in Triton. Needs torch and triton alone.

Where the environment says ``TRITON_INTERPRET=1`` when this package is imported, all kernels run in
Triton's interpreter on CPU tensors.
"""
