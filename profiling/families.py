# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a Hugging Face checkpoint are routed experts, per model family.

To add a family, add an entry to ``FAMILIES`` (see CONTRIBUTING.md). A model that is not listed is
refused at encode time rather than guessed at.
"""

import re
from dataclasses import dataclass
from typing import Any

from vllm_dpa.errors import DpaError

EXPERT_WORD = re.compile(r"\.experts\.")


@dataclass(frozen=True)
class Family:
    """How one model family names its experts.

    Attributes:
        model_type: ``model_type`` in config.json.
        num_experts_key: key of config.json with the number of routed experts.
        experts: pattern of an expert tensor, with groups ``prefix`` (the module that vLLM calls the
            MoE layer), ``expert`` and ``matrix``.
        matrices: names of the gate, up and down projection in group ``matrix``.
    """

    model_type: str
    num_experts_key: str
    experts: re.Pattern[str]
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


_MLP_EXPERTS = re.compile(
    r"^(?P<prefix>model\.layers\.\d+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<matrix>\w+)\.weight$"
)

FAMILIES = {
    family.model_type: family
    for family in (
        Family("olmoe", "num_experts", _MLP_EXPERTS),
        Family("qwen2_moe", "num_experts", _MLP_EXPERTS),
    )
}


def family_of(config: dict[str, Any], tensor_names: list[str], where: str) -> Family:
    """The family of a model.

    Raises:
        DpaError: no routed experts, or a family that is not listed.
    """
    model_type = str(config.get("model_type"))
    if not any(EXPERT_WORD.search(name) for name in tensor_names):
        raise DpaError(
            f"{where}: model_type {model_type!r} has no MoE layer with routed experts; there is "
            "nothing to encode"
        )
    if model_type not in FAMILIES:
        raise DpaError(
            f"{where}: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
