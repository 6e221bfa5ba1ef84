# SPDX-License-Identifier: Apache-2.0
"""DPA-MoE: run-time control of expert precision for Mixture-of-Experts models in vLLM.

This package must import without vLLM: the offline tools (``vllm-dpa encode`` and the like) and
:mod:`vllm_dpa.kernels` run on machines that have only torch.
"""

__version__ = "0.1.0"
