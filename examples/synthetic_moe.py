# SPDX-License-Identifier: Apache-2.0
"""Write an encoded checkpoint of OLMoE-1B-7B's shape with random weights, to measure speed and memory.

    python examples/synthetic_moe.py OUT [--layers 16] [--scale-layout geometric]

Nothing is fitted: planes are random bits under scales that halve per plane, residuals fall by four per
chunk. It takes 8.3 GB on disk and has no tokenizer: prompts are token ids (vLLM's skip_tokenizer_init).
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from vllm_dpa import __version__
from vllm_dpa.checkpoint import (
    CONFIG,
    MANIFEST,
    CheckpointReader,
    LayerShape,
    Manifest,
    Quality,
    Residuals,
    record_file,
    write_json,
)
from vllm_dpa.checkpoint_parts import join_chunks, write_layer
from vllm_dpa.kernels.planes import (
    NUM_CHUNKS,
    NUM_TIERS,
    PER_CHUNK,
    SCALE_LAYOUTS,
    PlaneStack,
    num_groups,
    plane_bytes,
)
from vllm_dpa.safetensors_stream import SafetensorsStream
from vllm_dpa.settings import FORMAT_VERSION, CheckpointSettings

HIDDEN, INTERMEDIATE, EXPERTS, VOCABULARY = 2048, 1024, 64, 50304
REST = "model.safetensors"


def model_config(layers: int) -> dict[str, object]:
    """config.json of allenai/OLMoE-1B-7B-0924, with any number of layers."""
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 50279,
        "pad_token_id": 1,
    }


def rest_of_model(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of everything that is not a routed expert."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for i in range(layers):
        prefix = f"model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}.self_attn.{name}.weight", (HIDDEN, HIDDEN)
        for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm"):
            yield f"{prefix}.{name}.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)


def random_stack(
    rows: int, columns: int, settings: CheckpointSettings, row_blocks: int
) -> PlaneStack:
    """All experts of one matrix of a layer."""
    side = (EXPERTS, rows, num_groups(columns, settings.group_size))
    scales = NUM_CHUNKS if settings.scale_layout == PER_CHUNK else 1
    bits = (EXPERTS, rows, plane_bytes(columns))
    return PlaneStack(
        planes=[torch.randint(0, 256, bits, dtype=torch.uint8) for _ in range(NUM_CHUNKS)],
        scales=[
            torch.full(side, columns**-0.5 * 2.0**-j, dtype=torch.float16) for j in range(scales)
        ],
        offset=torch.zeros(side, dtype=torch.float16),
        gain=torch.ones(EXPERTS, row_blocks, NUM_TIERS, dtype=torch.float32),
        columns=columns,
        group_size=settings.group_size,
        scale_layout=settings.scale_layout,
    )


def write_rest(path: Path, layers: int) -> None:
    """Norms of ones, matrices of random normal weights."""
    shapes = dict(rest_of_model(layers))
    with SafetensorsStream(path, {n: (torch.bfloat16, s) for n, s in shapes.items()}) as stream:
        for name, shape in shapes.items():
            if len(shape) == 1:
                value = torch.ones(shape, dtype=torch.bfloat16)
            else:
                value = (torch.randn(shape, dtype=torch.float32) * shape[1] ** -0.5).bfloat16()
            stream.put(name, value)


def random_residuals(layers: int) -> Residuals:
    """4^-k with a spread between experts of about a factor of two."""
    spread = torch.exp(0.7 * torch.randn(layers, EXPERTS, 1, dtype=torch.float32))
    r: Tensor = spread * 4.0 ** -torch.arange(NUM_TIERS, dtype=torch.float32)
    r[..., :2] = 0
    return Residuals(r, torch.full((layers, EXPERTS), 1, dtype=torch.int64))


def write(out: Path, layers: int, settings: CheckpointSettings) -> None:
    """Write a whole checkpoint into the new folder ``out``."""
    shapes = [
        LayerShape(
            prefix=f"model.layers.{i}.mlp.experts",
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
        )
        for i in range(layers)
    ]
    write_rest(out / REST, layers)
    parts = out / "parts"
    parts.mkdir()
    for shape in shapes:
        w13 = random_stack(2 * INTERMEDIATE, HIDDEN, settings, 2)
        write_layer(parts, shape, w13, random_stack(HIDDEN, INTERMEDIATE, settings, 1))
        print(f"\r{shape.prefix}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    chunks = join_chunks(parts, out, shapes, settings)
    parts.rmdir()
    write_json(out / CONFIG, model_config(layers) | {"quantization_config": settings.model_dump()})
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        settings=settings,
        layers=shapes,
        files={name: record_file(out / name) for name in [REST, *chunks]},
        encoder={"name": "synthetic", "version": __version__},
        source={"name": "random weights of OLMoE-1B-7B's shape", "model_type": "olmoe"},
        quality=Quality(tiers=[], layers=[]),
    )
    write_json(out / MANIFEST, manifest.model_dump())
    CheckpointReader(out).write_residuals(random_residuals(layers), {"name": "synthetic"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--scale-layout", choices=SCALE_LAYOUTS, default=PER_CHUNK)
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists; remove it or choose another folder")
    partial = arguments.out.with_name(f".{arguments.out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        torch.manual_seed(0)
        settings = CheckpointSettings(group_size=128, scale_layout=arguments.scale_layout)
        write(partial, arguments.layers, settings)
        os.rename(partial, arguments.out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    main()
