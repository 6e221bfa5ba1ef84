# SPDX-License-Identifier: Apache-2.0
"""fp8 checkpoints with a scale per block of a matrix, as DeepSeek-V3 and Qwen3 are published.

A matrix ``X.weight`` in float8_e4m3fn comes with ``X.weight_scale_inv`` [ceil(N/b0), ceil(C/b1)], and
the weight is value * scale of its block.
"""

from typing import Any

import torch
from torch import Tensor

from vllm_dpa.errors import DpaError

SUFFIX = "_scale_inv"
FP8 = torch.float8_e4m3fn


def block_size(config: dict[str, Any], where: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None where the checkpoint is not quantised.

    Raises:
        DpaError: quantised in another way.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or not (isinstance(block, list) and len(block) == 2):
        raise DpaError(
            f"{where} is already quantised ({method}); encode the original checkpoint (of quantised "
            "ones only fp8 with weight_block_size is supported)"
        )
    return int(block[0]), int(block[1])


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int], where: str) -> Tensor:
    """float32 [N, C] from float8_e4m3fn [N, C] and its scales.

    Raises:
        DpaError: the scales do not fit the matrix.
    """
    rows, columns = weight.shape
    wanted = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != wanted:
        raise DpaError(
            f"{where}: {tuple(scale.shape)} scales for a matrix of {rows} x {columns} in blocks of "
            f"{block[0]} x {block[1]}, expected {wanted}; download the model again"
        )
    spread = scale.float().repeat_interleave(block[0], 0)[:rows]
    return weight.float() * spread.repeat_interleave(block[1], 1)[:, :columns]
