# SPDX-License-Identifier: Apache-2.0
"""Tensors in, tensors out: decode, fused MoE and the chunk allocator. Never imports vLLM.

Modules import each other relatively, so that the folder also works as a top-level package on a
machine that has torch (and triton) alone.
"""
