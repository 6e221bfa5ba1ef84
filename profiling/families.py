# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a Hugging Face checkpoint are routed experts, per model family.

To add a family, add an entry to ``FAMILIES`` (see CONTRIBUTING.md). A model that is not listed is
refused at encode time rather than guessed at.
"""

import re
from dataclasses import dataclass
from typing import Any

from vllm_dpa.checkpoint import LayerShape
from vllm_dpa.errors import DpaError

EXPERT_WORD = re.compile(r"\.experts\.")


@dataclass(frozen=True)
class Family:
    """How one model family names its experts.

    Attributes:
        model_type: ``model_type`` in config.json.
        num_experts_keys: keys of config.json that may hold the number of routed experts.
        intermediate_key: key with the intermediate size of a routed expert.
        experts: pattern of an expert tensor, with groups ``prefix`` (the module that vLLM calls the
            MoE layer), ``expert`` and ``matrix``.
        matrices: names of the gate, up and down projection in group ``matrix``.
    """

    model_type: str
    num_experts_keys: tuple[str, ...]
    intermediate_key: str
    experts: re.Pattern[str]
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def num_experts(self, config: dict[str, Any], where: str) -> int:
        """Routed experts of a layer.

        Raises:
            DpaError: the config does not say.
        """
        for key in self.num_experts_keys:
            if isinstance(config.get(key), int):
                return int(config[key])
        raise DpaError(f"{where} has no {self.num_experts_keys[0]}")


_MLP_EXPERTS = re.compile(
    r"^(?P<prefix>model\.layers\.\d+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<matrix>\w+)\.weight$"
)

FAMILIES = {
    family.model_type: family
    for family in (
        Family("olmoe", ("num_experts",), "intermediate_size", _MLP_EXPERTS),
        Family("qwen2_moe", ("num_experts",), "moe_intermediate_size", _MLP_EXPERTS),
        Family(
            "qwen3_moe", ("num_experts", "num_local_experts"), "moe_intermediate_size", _MLP_EXPERTS
        ),
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
    return _listed(model_type, where)


def layers_of_config(config: dict[str, Any], where: str) -> list[LayerShape]:
    """The MoE layers of a model whose weights are not there.

    Raises:
        DpaError: a family that is not listed, or a size is missing in the config.
    """
    family = _listed(str(config.get("model_type")), where)
    keys = ("num_hidden_layers", "hidden_size", family.intermediate_key)
    for key in keys:
        if not isinstance(config.get(key), int):
            raise DpaError(f"{where}: config.json has no {key}")
    count, hidden, intermediate = (config[key] for key in keys)
    experts = family.num_experts(config, f"{where}: config.json")
    dense = set(config.get("mlp_only_layers") or [])
    step = config.get("decoder_sparse_step") or 1
    return [
        LayerShape(
            prefix=f"model.layers.{i}.mlp.experts",
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size=intermediate,
        )
        for i in range(count)
        if i not in dense and (i + 1) % step == 0
    ]


def _listed(model_type: str, where: str) -> Family:
    if model_type not in FAMILIES:
        raise DpaError(
            f"{where}: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
