# SPDX-License-Identifier: Apache-2.0
"""A random model folder of awkward sizes, for tests of the encoder's files."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

E, H, I = 4, 40, 24  # noqa: E741


def make_model(path: Path, dtype: torch.dtype = torch.bfloat16, layers: int = 2) -> Path:
    """A random OLMoE-like folder with sizes that no group size divides; weights only."""
    path.mkdir()
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    config = {"model_type": "olmoe", "num_experts": E, "hidden_size": H, "intermediate_size": I}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"old")
    tensors = {"model.embed_tokens.weight": weight(10, H)}
    for layer in range(layers):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = weight(E, H)
        for expert in range(E):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors[f"{prefix}.gate_proj.weight"] = weight(I, H)
            tensors[f"{prefix}.up_proj.weight"] = weight(I, H)
            tensors[f"{prefix}.down_proj.weight"] = weight(H, I)
    save_file(tensors, path / "model.safetensors")
    return path


def content(folder: Path) -> dict[str, bytes]:
    """Relative name -> bytes of every file."""
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}
