# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``vllm.general_plugins``: vLLM calls it in every process, some twice."""


def register() -> None:
    """Make ``--quantization dpa-moe`` known to vLLM. Idempotent."""
    # Imported here: the entry point is resolved before vLLM is ready to be imported in full.
    from vllm_dpa import quantization, vllm_seams

    quantization.register_config()
    vllm_seams.install_config_check()
