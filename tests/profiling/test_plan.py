# SPDX-License-Identifier: Apache-2.0
"""The plan: sizes are those that the encode then has, memory is enough, a config.json will do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_model import make_model

from vllm_dpa.checkpoint import CheckpointReader
from vllm_dpa.errors import DpaError
from vllm_dpa.profiling.encode import encode
from vllm_dpa.profiling.layer_fit import EncodeOptions
from vllm_dpa.profiling.plan import make_plan

CPU = torch.device("cpu")

QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize("layout", ["per_chunk", "geometric"])
def test_sizes_are_those_of_the_encode(tmp_path: Path, layout: str) -> None:
    model = make_model(tmp_path / "model")
    options = EncodeOptions(scale_layout=layout, group_size=32)
    plan = make_plan(model, options, None, CPU)
    encode(model, tmp_path / "out", options)
    reader = CheckpointReader(tmp_path / "out")
    for k, size in plan.output_bytes.items():
        stored = sum(
            part.numel() * part.itemsize
            for layer in reader.layers
            for stack in reader.read_layer(layer)
            for part in (*stack.planes[:k], *stack.scales[:k], stack.offset)
        )
        assert size == stored
    assert plan.weights == 2 * 4 * 3 * 40 * 24
    assert plan.rest_bytes == 2 * (10 * 40 + 2 * 4 * 40)
    assert plan.calibration_seconds == 0


def test_config_alone_is_enough(tmp_path: Path) -> None:
    config = QWEN3_30B | {"hidden_size": 256, "moe_intermediate_size": 128, "mlp_only_layers": [3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = make_plan(tmp_path, EncodeOptions(), 4096, CPU)
    assert plan.layers == 47
    assert plan.experts == 47 * 128
    assert plan.rest_bytes is None
    assert plan.weights_per_second > 0
    assert plan.calibration_seconds > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mystery"}, "'mystery' is not supported"),
        ({"hidden_size": None}, "has no hidden_size"),
    ],
)
def test_config_that_says_too_little_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B | change))
    with pytest.raises(DpaError, match=message):
        make_plan(tmp_path, EncodeOptions(), None, CPU)


# Runs the command and prints the peak of its resident memory last.
COMMAND = """
import resource, sys
from vllm_dpa.cli import app
app(sys.argv[1:], standalone_mode=False)
print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_is_enough_and_not_far_too_much(tmp_path: Path, find_model) -> None:
    """Peak resident memory of a calibrated encode, plan and encode in processes of their own."""
    model = find_model("tiny-qwen2moe")
    encode = ["encode", str(model), str(tmp_path / "out"), "--calibration",
              str(model / "text/calibration.txt"), "--calibration-tokens", "16384"]  # fmt: skip

    def output(*options: str) -> list[str]:
        command = [sys.executable, "-c", COMMAND, *encode, *options]
        return subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.splitlines()

    planned = json.loads("\n".join(output("--plan", "--json")[:-1]))["memory_bytes"]
    peak = int(output()[-1])
    # The upper bound allows for what the C library keeps of memory that its threads gave back.
    assert 0.5 * planned < peak < 1.3 * planned, (peak, planned)
